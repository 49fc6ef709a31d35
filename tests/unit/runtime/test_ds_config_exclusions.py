# SPDX-License-Identifier: Apache-2.0
"""Keys that cannot be used together, and features that do not exist yet."""

import pytest
from pydantic import ValidationError

from deepspeed.runtime.config import DeepSpeedConfig, unsupported_features


def parse(**sections):
    return DeepSpeedConfig({"train_batch_size": 4, **sections})


def zero(stage, **options):
    return {"stage": stage, **options}


FP16, BF16 = {"enabled": True}, {"enabled": True}
FP32_ACCUMULATION = {"grad_accum_dtype": "fp32"}

REFUSED = [
    (AssertionError, "one dtype", {"fp16": FP16, "bf16": BF16}),
    *(
        (AssertionError, f"{section}.{key}", {section: {"enabled": True, key: True}, "zero_optimization": zero(0)})
        for section, key in (
            ("fp16", "fp16_master_weights_and_grads"),
            ("bf16", "bf16_master_weights_and_grads"),
            ("bf16", "bf16_optimizer_states"),
        )
    ),
    (
        AssertionError,
        "needs 'bf16.bf16_master_weights_and_grads'",
        {"bf16": {"enabled": True, "bf16_optimizer_states": True}, "zero_optimization": zero(1)},
    ),
    (AssertionError, "param_dtype", {"bf16": BF16, "data_types": {"param_dtype": "fp32"}}),
    (AssertionError, "param_dtype", {"data_types": {"param_dtype": "fp16"}}),
    (
        AssertionError,
        "zero_quantized_weights",
        {"torch_autocast": {"enabled": True}, "zero_optimization": zero(3, zero_quantized_weights=True)},
    ),
    (ValueError, "stage 3", {"gradient_allreduce_op": "sum", "zero_optimization": zero(3)}),
    (
        ValueError,
        "zenflow",
        {"gradient_allreduce_op": "SUM", "zero_optimization": zero(2, zenflow={"topk_ratio": 0.1})},
    ),
    (ValueError, "deepcompile", {"gradient_allreduce_op": "sum", "compile": {"deepcompile": True}}),
    *(
        (AssertionError, key, {key: value, "zero_optimization": zero(stage)})
        for stage in (2, 3)
        for key, value in (("prescale_gradients", True), ("gradient_predivide_factor", 2.0))
    ),
    *((AssertionError, "even", {"zero_optimization": zero(stage, allgather_bucket_size=5)}) for stage in (1, 2)),
    *((ValidationError, "compute_grad_norm", {"zero_optimization": zero(s, compute_grad_norm=False)}) for s in (0, 3)),
    (ValueError, "gradient_clipping", {"zero_optimization": zero(2, compute_grad_norm=False)}),
    (
        ValueError,
        "offload_optimizer",
        {
            "gradient_clipping": 0.0,
            "zero_optimization": zero(2, compute_grad_norm=False, offload_optimizer={"device": "cpu"}),
        },
    ),
    (
        ValueError,
        "zenflow",
        {"gradient_clipping": 0.0, "zero_optimization": zero(2, compute_grad_norm=False, zenflow={})},
    ),
    (
        ValueError,
        "grad_accum_dtype",
        {
            "gradient_clipping": 0.0,
            "bf16": BF16,
            "data_types": FP32_ACCUMULATION,
            "zero_optimization": zero(1, compute_grad_norm=False),
        },
    ),
    (ValueError, "offload_optimizer.*stage 0", {"zero_optimization": zero(0, offload_optimizer={"device": "cpu"})}),
    (ValueError, "offload_optimizer.*stage 0", {"zero_optimization": zero(0, cpu_offload=True)}),
    *(
        (ValueError, f"offload_param.*stage {s}", {"zero_optimization": zero(s, offload_param={"device": "cpu"})})
        for s in (0, 1, 2)
    ),
    *((ValidationError, "ratio", {"zero_optimization": zero(s, offload_optimizer={"ratio": 0.5})}) for s in (0, 1, 2)),
    *((ValidationError, "ratio", {"zero_optimization": zero(3, offload_optimizer={"ratio": r})}) for r in (-0.1, 1.1)),
    *(
        (ValidationError, "nvme_path", {"zero_optimization": zero(3, **{section: {"device": "nvme"}})})
        for section in ("offload_optimizer", "offload_param")
    ),
    *(
        (
            AssertionError,
            "overlap_comm",
            {"managed_gradient_accumulation": False, "zero_optimization": zero(stage, overlap_comm=True)},
        )
        for stage in (0, 1)
    ),
    (AssertionError, "deepcompile", {"managed_gradient_accumulation": False, "compile": {"deepcompile": True}}),
    (ValueError, "gradient_clipping", {"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}}),
    (AssertionError, "lamb", {"optimizer": {"type": "Lamb"}, "fp16": {"enabled": True, "loss_scale": 8}}),
    (ValueError, "muon", {"optimizer": {"type": "Muon"}, "zero_optimization": zero(3)}),
]


@pytest.mark.parametrize("error, text, sections", REFUSED)
def test_refused(error, text, sections):
    with pytest.raises(error, match=text):
        parse(**sections)


ACCEPTED = [
    {"fp16": FP16, "bf16": {"enabled": False}},
    {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}, "zero_optimization": zero(1)},
    {"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}, "zero_optimization": zero(2)},
    {"bf16": BF16, "data_types": {"param_dtype": "bf16"}},
    {"data_types": {"param_dtype": "fp32"}},
    {"torch_autocast": {"enabled": True}, "zero_optimization": zero(2)},
    *({"gradient_allreduce_op": "sum", "zero_optimization": zero(stage)} for stage in (0, 1, 2)),
    # reduce_scatter says nothing about stages 0 and 1
    *({"prescale_gradients": True, "zero_optimization": zero(stage)} for stage in (0, 1)),
    *({"gradient_predivide_factor": 2.0, "zero_optimization": zero(stage)} for stage in (0, 1)),
    *({"prescale_gradients": True, "zero_optimization": zero(stage, reduce_scatter=False)} for stage in (2, 3)),
    *({"zero_optimization": zero(stage, allgather_bucket_size=5)} for stage in (0, 3)),
    *({"gradient_clipping": 0.0, "zero_optimization": zero(stage, compute_grad_norm=False)} for stage in (1, 2)),
    {
        "gradient_clipping": 0.0,
        "bf16": BF16,
        "data_types": FP32_ACCUMULATION,
        "zero_optimization": zero(2, compute_grad_norm=False),
    },
    {"zero_optimization": zero(3, offload_optimizer={"ratio": 0.5})},
    *({"zero_optimization": zero(s, offload_optimizer={"device": "cpu"})} for s in (1, 2, 3)),
    {"zero_optimization": zero(3, offload_param={"device": "cpu"})},
    {"zero_optimization": zero(0, offload_optimizer={"device": "none"}, offload_param={"device": "none"})},
    {"zero_optimization": zero(3, offload_param={"device": "nvme", "nvme_path": "/tmp"})},
    *({"zero_optimization": zero(s, offload_optimizer={"device": "nvme", "nvme_path": "/tmp"})} for s in (1, 2, 3)),
    {"managed_gradient_accumulation": False, "zero_optimization": zero(1)},
    {"managed_gradient_accumulation": False, "zero_optimization": zero(2, overlap_comm=True)},
    {"optimizer": {"type": "Lamb"}, "fp16": {"enabled": True, "loss_scale": 0}},
    {"optimizer": {"type": "Lamb"}, "fp16": {"enabled": False, "loss_scale": 8}},
    {"optimizer": {"type": "Muon"}, "zero_optimization": zero(2)},
    {"optimizer": {"type": "Muon"}, "zero_optimization": zero(3, reduce_scatter=False)},
]


@pytest.mark.parametrize("sections", ACCEPTED)
def test_accepted(sections):
    parse(**sections)


UNSUPPORTED = [
    (
        "zero_optimization.offload_optimizer.super_offload",
        {"zero_optimization": zero(3, offload_optimizer={"device": "cpu", "super_offload": True})},
    ),
    ("zero_optimization.zenflow", {"zero_optimization": zero(2, zenflow={})}),
    ("zero_optimization.zero_quantized_weights", {"zero_optimization": zero(2, zero_quantized_weights=True)}),
    (
        "zero_optimization.zero_quantized_nontrainable_weights",
        {"zero_optimization": zero(2, zero_quantized_nontrainable_weights=True)},
    ),
    ("zero_optimization.zero_quantized_gradients", {"zero_optimization": zero(2, zero_quantized_gradients=True)}),
    ("pipeline", {"pipeline": {"partition": "uniform"}}),
    ("hybrid_engine.enabled", {"hybrid_engine": {"enabled": True}}),
    ("compile.deepcompile", {"compile": {"deepcompile": True}}),
    ("data_efficiency.enabled", {"data_efficiency": {"enabled": True}}),
    ("weight_quantization", {"weight_quantization": {"quantized_initialization": {"num_bits": 8}}}),
    ("autotuning.enabled", {"autotuning": {"enabled": True}}),
    ("expert_parallel", {"expert_parallel": {"enabled": True}}),
    ("tensor_parallel.autotp_size", {"tensor_parallel": {"autotp_size": 2}}),
    ("tensor_parallel.tp", {"tensor_parallel": {"tp": {"tp_size": 2}}}),
    ("sequence_parallel_size", {"sequence_parallel_size": 2}),
    ("use_data_before_expert_parallelism", {"use_data_before_expert_parallelism": True}),
    (
        "fp16.fp16_master_weights_and_grads",
        {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}, "zero_optimization": zero(1)},
    ),
    ("datastates_ckpt", {"datastates_ckpt": True}),
    ("checkpoint.writer.data_parallel", {"checkpoint": {"writer": {"data_parallel": "REPLICA"}}}),
]


@pytest.mark.parametrize("key, sections", UNSUPPORTED)
def test_a_missing_feature_is_named(key, sections):
    features = unsupported_features(parse(**sections))
    assert len(features) == 1
    assert features[0].startswith(f"{key}: ") and features[0].endswith("is not implemented")


@pytest.mark.parametrize(
    "sections",
    [
        {},
        *({"zero_optimization": zero(stage, overlap_comm=True, round_robin_gradients=True)} for stage in (0, 1, 2)),
        {"zero_optimization": zero(2, offload_optimizer={"device": "none"}, offload_param={"device": "none"})},
        {"hybrid_engine": {"enabled": False}, "autotuning": {"enabled": False}, "data_efficiency": {"enabled": False}},
        {"expert_parallel": {"enabled": False}, "compile": {"deepcompile": False}, "weight_quantization": {}},
        {
            "tensor_parallel": {"autotp_size": 0},
            "datastates_ckpt": False,
            "pipeline": {},
            "checkpoint": {"writer": None},
        },
        {"fp16": FP16, "gradient_allreduce_op": "sum", "csv_monitor": {"enabled": "auto"}},
        *(
            {section: {"enabled": True}}
            for section in ("tensorboard", "wandb", "csv_monitor", "comet", "flops_profiler")
        ),
    ],
)
def test_what_exists_is_not_listed(sections):
    assert unsupported_features(parse(**sections)) == []
