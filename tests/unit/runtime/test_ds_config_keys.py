# SPDX-License-Identifier: Apache-2.0
"""Keys and their values: unknown, misspelt, removed and deprecated keys, types, defaults."""

import logging
import sys

import pytest
import torch
from pydantic import ValidationError

from deepspeed.runtime.config import KNOWN_TOP_LEVEL_KEYS, DeepSpeedConfig, DeepSpeedConfigError, DtypeEnum
from deepspeed.runtime.config_sections import AUTOCAST_DTYPE_NAMES
from deepspeed.runtime.config_utils import closest_key, edit_distance
from deepspeed.runtime.model_checkpointing.config import get_checkpoint_config
from deepspeed.runtime.swap_tensor.aio_config import get_aio_config
from deepspeed.utils import logging as package_logging


def parse(**sections):
    return DeepSpeedConfig({"train_batch_size": 4, **sections})


@pytest.fixture
def warnings(monkeypatch):
    """Warnings of the package logger, each of which is new to this process."""
    records = []

    class Collect(logging.Handler):
        def emit(self, record):
            if record.levelno >= logging.WARNING:
                records.append(record.getMessage())

    monkeypatch.setattr(package_logging, "_seen_dist_messages", set())
    handler = Collect()
    package_logging.logger.addHandler(handler)
    yield records
    package_logging.logger.removeHandler(handler)


# Unknown and misspelt keys


@pytest.mark.parametrize(
    "key, meant",
    [
        ("zero_optimisation", "zero_optimization"),
        ("zero_optimzation", "zero_optimization"),
        ("Zero_Optimization", "zero_optimization"),
        ("zero-optimization", "zero_optimization"),
        ("gradient_acumulation_steps", "gradient_accumulation_steps"),
        ("gradient_clip", "gradient_clipping"),
        ("train_batchsize", "train_batch_size"),
        ("train_micro_batch_size_per_cpu", "train_micro_batch_size_per_gpu"),
        ("train_micro_batch_size", "train_micro_batch_size_per_gpu"),
        ("optimzer", "optimizer"),
        ("schedular", "scheduler"),
        ("FP16", "fp16"),
        ("fp61", "fp16"),
        ("optimiezr", "optimizer"),
        ("comm_logger", "comms_logger"),
    ],
)
def test_a_misspelt_top_level_key_is_refused(key, meant):
    with pytest.raises(DeepSpeedConfigError, match=f"'{key}': did you mean '{meant}'"):
        parse(**{key: {}})


@pytest.mark.parametrize(
    "key",
    [
        "msamp",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimization.stage",
        "zero_optimization.x",
        "fp8",
        "my_trainer_settings",
        "eval_batch_size",
        "_comment",
        "comment",
        "fp32",
        "x",
        "",
    ],
)
def test_other_unknown_top_level_keys_are_one_warning(key, warnings):
    parse(**{key: 1, "another": 2})
    parse(**{key: 1, "another": 2})
    assert len(warnings) == 1
    assert repr(key) in warnings[0] and "'another'" in warnings[0]


def test_other_ranks_do_not_warn(warnings, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    parse(msamp={})
    assert warnings == []


def test_known_keys_do_not_warn(warnings):
    parse(**{"fp16": {}, "tensorboard": {}, "data_efficiency": {}, "inference": {}, "optimizer": {"type": "Adam"}})
    assert warnings == []


def test_no_known_key_is_taken_for_a_misspelling_of_another():
    for key in KNOWN_TOP_LEVEL_KEYS:
        others = [other for other in KNOWN_TOP_LEVEL_KEYS if other != key]
        assert closest_key(key, others) in (None, "fp16", "bf16"), key


@pytest.mark.parametrize(
    "a, b, distance", [("", "", 0), ("abc", "abc", 0), ("kitten", "sitting", 3), ("", "ab", 2), ("ab", "ba", 1)]
)
def test_edit_distance(a, b, distance):
    assert edit_distance(a, b) == edit_distance(b, a) == distance


@pytest.mark.parametrize(
    "section, key, meant",
    [
        ("zero_optimization", "stages", "stage"),
        ("zero_optimization", "overlap_com", "overlap_comm"),
        ("fp16", "loss_scales", "loss_scale"),
        ("bf16", "enable", "enabled"),
        ("comms_logger", "verbos", "verbose"),
        ("tensorboard", "jobname", "job_name"),
        ("hybrid_engine", "enabeld", "enabled"),
        ("tensor_parallel", "autotpsize", "autotp_size"),
    ],
)
def test_typed_sections_refuse_unknown_keys(section, key, meant):
    with pytest.raises(ValidationError, match=f"'{key}'.*did you mean '{meant}'") as caught:
        parse(**{section: {key: 1}})
    assert "extra_forbidden" in str(caught.value)
    with pytest.raises(ValidationError, match="Unknown key 'something_else'.*valid keys are .*" + meant):
        parse(**{section: {"something_else": 1}})


def test_sections_inside_sections_refuse_unknown_keys():
    with pytest.raises(ValidationError, match="pin_memory"):
        parse(zero_optimization={"stage": 2, "offload_optimizer": {"pinmemory": True}})
    with pytest.raises(ValidationError, match="enabled"):
        parse(timers={"throughput": {"enable": True}})


@pytest.mark.parametrize(
    "section, misspelt, meant",
    [
        ("activation_checkpointing", "partition_activation", "partition_activations"),
        ("aio", "blocksize", "block_size"),
        ("checkpoint", "load_univesal", "load_universal"),
        ("flops_profiler", "profilestep", "profile_step"),
        ("data_types", "grad_acum_dtype", "grad_accum_dtype"),
        ("optimizer", "param", "params"),
        ("scheduler", "param", "params"),
        ("torch_autocast", "enable", "enabled"),
        ("timers", "troughput", "throughput"),
    ],
)
def test_lenient_sections_ignore_unknown_keys_but_not_misspelt_ones(section, misspelt, meant):
    parse(**{section: {"thread_count": 1, "something_else": 2}})
    with pytest.raises(DeepSpeedConfigError, match=f"{misspelt!r}.*{section!r}: did you mean {meant!r}"):
        parse(**{section: {misspelt: 1}})


# Removed and deprecated keys


@pytest.mark.parametrize(
    "key",
    [
        "nebula",
        "compression_training",
        "amp",
        "quantize_training",
        "sparse_gradients",
        "eigenvalue",
        "sparse_attention",
        "graph_harvesting",
        "curriculum_learning",
        "progressive_layer_drop",
    ],
)
@pytest.mark.parametrize("value", [{}, False, {"enabled": True}])
def test_removed_keys_are_refused(key, value):
    with pytest.raises(DeepSpeedConfigError, match=key):
        parse(**{key: value})


@pytest.mark.parametrize("key", ["mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param"])
def test_removed_zero_keys_are_refused(key):
    with pytest.raises(DeepSpeedConfigError, match=key):
        parse(zero_optimization={"stage": 2, key: -1})


def test_legacy_stage1_is_refused():
    with pytest.raises(DeepSpeedConfigError, match="legacy_stage1"):
        parse(zero_optimization={"stage": 1, "legacy_stage1": True})


@pytest.mark.parametrize(
    "old, value, read, expected",
    [
        ("cpu_offload", True, lambda zero: zero.offload_optimizer.device, "cpu"),
        ("cpu_offload", False, lambda zero: zero.offload_optimizer, None),
        ("cpu_offload_param", True, lambda zero: zero.offload_param.device, "cpu"),
        ("stage3_gather_fp16_weights_on_model_save", True, lambda z: z.gather_16bit_weights_on_model_save, True),
    ],
)
def test_deprecated_zero_keys_are_forwarded_with_a_warning(old, value, read, expected, warnings):
    assert read(parse(zero_optimization={"stage": 3, old: value}).zero_config) == expected
    assert len(warnings) == 1 and old in warnings[0]


def test_a_deprecated_key_without_successor_warns(warnings):
    parse(zero_optimization={"stage": 3, "cpu_offload_use_pin_memory": True})
    assert len(warnings) == 1 and "pin_memory" in warnings[0]


@pytest.mark.parametrize(
    "section",
    [
        {"cpu_offload": True, "offload_optimizer": {"device": "cpu"}},
        {"cpu_offload_param": True, "offload_param": {"device": "cpu"}},
        {"stage3_gather_fp16_weights_on_model_save": True, "stage3_gather_16bit_weights_on_model_save": True},
        {"stage3_gather_fp16_weights_on_model_save": True, "gather_16bit_weights_on_model_save": False},
    ],
)
def test_old_and_new_key_together_are_refused(section):
    with pytest.raises(AssertionError, match="both are given"):
        parse(zero_optimization={"stage": 3, **section})


def test_the_old_name_of_bf16(warnings):
    assert parse(bfloat16={"enabled": True}).bfloat16_config.enabled
    assert len(warnings) == 1
    assert parse(bfloat16={"enabled": True}, bf16={"enabled": True}).bfloat16_config.enabled
    with pytest.raises(AssertionError, match="both 'bf16'.*'bfloat16'"):
        parse(bfloat16={"enabled": True}, bf16={"enabled": False})


@pytest.mark.parametrize("value, stage", [(True, 1), (False, 0)])
def test_boolean_zero_optimization(value, stage, warnings):
    config = parse(zero_optimization=value, allgather_size=200)
    assert (config.zero_optimization_stage, config.zero_enabled) == (stage, bool(stage))
    assert config.zero_config.allgather_bucket_size == (200 if stage else 500000000)
    assert any("boolean" in warning for warning in warnings)


# Values


@pytest.mark.parametrize(
    "key",
    [
        "managed_gradient_accumulation",
        "dump_state",
        "disable_python_gc",
        "disable_allgather",
        "prescale_gradients",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "dataloader_drop_last",
        "wall_clock_breakdown",
        "memory_breakdown",
    ],
)
@pytest.mark.parametrize("value", ["yes", "true", 1, None, {}])  # fmt: skip
def test_switches_must_be_booleans(key, value):
    with pytest.raises(TypeError, match=f"'{key}' must be a boolean") as caught:
        parse(**{key: value})
    assert isinstance(caught.value, DeepSpeedConfigError)
    assert repr(value) in str(caught.value)
    for value in (True, False):
        assert getattr(parse(**{key: value}), key) is value


@pytest.mark.parametrize(
    "key, bad_type, bad_value, good",
    [
        ("gradient_clipping", ["1.0", None, True, float("nan")], [-1.0], [0, 0.5, 3]),
        ("gradient_predivide_factor", ["1", None, [1]], [0, -2.0], [1, 2.5]),
        ("steps_per_print", ["10", False], [0, -1], [1, 2.5, float("inf"), None]),
        ("vocabulary_size", ["8", 8.5], [0, -8], [None, 8]),
        ("gradient_allreduce_op", [1, None], ["max", ""], []),
        ("communication_data_type", [16], ["fp64", "float16"], []),
        ("seq_parallel_communication_data_type", [16], ["fp64", "int8"], []),
        ("log_level", [10], ["loud"], []),
        ("sequence_parallel_size", ["2", 1.5], [0, -1], []),
    ],
)
def test_types_and_ranges_of_top_level_values(key, bad_type, bad_value, good):
    for value in bad_type:
        with pytest.raises(TypeError, match=f"'{key}' must be") as caught:
            parse(**{key: value})
        assert isinstance(caught.value, DeepSpeedConfigError) and repr(value) in str(caught.value)
    for value in bad_value:
        with pytest.raises(ValueError, match=f"'{key}' must be") as caught:
            parse(**{key: value})
        assert isinstance(caught.value, DeepSpeedConfigError) and repr(value) in str(caught.value)
    for value in good:
        assert getattr(parse(**{key: value}), key) == value


@pytest.mark.parametrize("name, dtype", [("fp16", torch.float16), ("BF16", torch.bfloat16), ("fp32", torch.float32)])
@pytest.mark.parametrize("key", ["communication_data_type", "seq_parallel_communication_data_type"])
def test_communication_dtypes(key, name, dtype):
    assert getattr(parse(**{key: name}), key) == dtype
    assert getattr(parse(**{key: None}), key) is None


@pytest.mark.parametrize("value, expected", [("mean", "mean"), ("SUM", "sum")])
def test_gradient_allreduce_op(value, expected):
    assert parse(gradient_allreduce_op=value).gradient_allreduce_op == expected


@pytest.mark.parametrize("section", ["fp16", "zero_optimization", "optimizer", "aio", "checkpoint", "comet", "timers"])
@pytest.mark.parametrize("value", [3, "cpu", [1]])
def test_a_section_must_be_a_dict(section, value):
    with pytest.raises(TypeError, match=f"'{section}' must be a dict.*{type(value).__name__}"):
        parse(**{section: value})
    parse(**{section: None})
    parse(**{section: "auto"})


def test_auto_means_the_default_everywhere_but_for_batch_sizes():
    config = parse(
        gradient_clipping="auto",
        steps_per_print="auto",
        prescale_gradients="auto",
        communication_data_type="auto",
        fp16={"enabled": "auto", "loss_scale": "auto"},
        bf16={"enabled": "auto"},
        zero_optimization={"stage": "auto", "reduce_bucket_size": "auto", "offload_optimizer": {"device": "auto"}},
        optimizer={"type": "AdamW", "params": {"lr": "auto"}},
        flops_profiler={"enabled": "auto"},
    )
    assert config.gradient_clipping == 1.0
    assert config.communication_data_type is None
    assert not config.float16_config.enabled and not config.bfloat16_config.enabled
    assert config.zero_config.reduce_bucket_size == 500000000
    assert config.zero_config.offload_optimizer.device == "none"
    assert config.optimizer_params == {"lr": "auto"}


def test_defaults():
    config = parse()
    expected = {
        "managed_gradient_accumulation": True,
        "steps_per_print": None,
        "dump_state": False,
        "disable_python_gc": False,
        "disable_allgather": False,
        "communication_data_type": None,
        "seq_parallel_communication_data_type": torch.float32,
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "gradient_allreduce_op": "mean",
        "gradient_clipping": 1.0,
        "zero_optimization_stage": 0,
        "zero_enabled": False,
        "optimizer_name": None,
        "optimizer_params": None,
        "optimizer_legacy_fusion": False,
        "scheduler_name": None,
        "scheduler_params": None,
        "zero_allow_untested_optimizer": False,
        "zero_force_ds_cpu_optimizer": True,
        "grad_accum_dtype": None,
        "param_dtype": None,
        "buffer_dtype": None,
        "keep_in_fp32_modules": "auto",
        "torch_autocast_enabled": False,
        "torch_autocast_dtype": None,
        "torch_autocast_lower_precision_safe_modules": None,
        "wall_clock_breakdown": False,
        "memory_breakdown": False,
        "dataloader_drop_last": False,
        "log_level": None,
        "load_universal_checkpoint": False,
        "checkpoint_tag_validation_enabled": True,
        "checkpoint_tag_validation_fail": False,
        "use_node_local_storage": False,
        "checkpoint_parallel_write_pipeline": False,
        "checkpoint_config": {"tag_validation": "WARN", "checkpoint_serialization": True, "writer": None},
        "world_size": 1,
        "global_rank": 0,
    }
    assert {key: getattr(config, key) for key in expected} == expected
    assert not config.monitor_config.enabled
    assert not config.comms_config.comms_logger_enabled
    assert config.timers_config.enabled


def test_zero_defaults():
    zero = parse().zero_config
    expected = {
        "stage": 0,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 500_000_000,
        "allgather_partitions": True,
        "allgather_bucket_size": 500_000_000,
        "overlap_comm": False,
        "compute_grad_norm": True,
        "load_from_fp32_weights": True,
        "offload_param": None,
        "offload_optimizer": None,
        "sub_group_size": 1_000_000_000,
        "prefetch_bucket_size": 50_000_000,
        "param_persistence_threshold": 100_000,
        "model_persistence_threshold": sys.maxsize,
        "max_live_parameters": 1_000_000_000,
        "max_reuse_distance": 1_000_000_000,
        "gather_16bit_weights_on_model_save": False,
        "ignore_unused_parameters": True,
        "round_robin_gradients": False,
        "zero_hpz_partition_size": 1,
    }
    assert {key: getattr(zero, key) for key in expected} == expected


# Sections


@pytest.mark.parametrize(
    "name, expected", [("AdamW", "adamw"), ("LION", "lion"), ("SGD", "SGD"), ("NAdam", "NAdam"), (None, None)]
)
def test_own_optimizer_names_are_case_insensitive(name, expected):
    assert parse(optimizer={"type": name, "params": {"lr": 1}}).optimizer_name == expected


def test_scheduler():
    config = parse(scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 3}})
    assert (config.scheduler_name, config.scheduler_params) == ("WarmupLR", {"warmup_num_steps": 3})


@pytest.mark.parametrize("section", ["optimizer", "scheduler"])
def test_optimizer_and_scheduler_types(section):
    with pytest.raises(TypeError, match=f"'{section}.type' must be a string"):
        parse(**{section: {"type": 3}})
    with pytest.raises(TypeError, match=f"'{section}.params' must be a dict"):
        parse(**{section: {"type": "x", "params": [1]}})


@pytest.mark.parametrize("mode, enabled, fail", [("Ignore", False, False), ("warn", True, False), ("FAIL", True, True)])
def test_checkpoint_tag_validation(mode, enabled, fail):
    config = parse(checkpoint={"tag_validation": mode})
    assert (config.checkpoint_tag_validation_enabled, config.checkpoint_tag_validation_fail) == (enabled, fail)


def test_checkpoint_errors():
    with pytest.raises(DeepSpeedConfigError, match="checkpoint.tag_validation"):
        parse(checkpoint={"tag_validation": "maybe"})
    with pytest.raises(DeepSpeedConfigError, match="checkpoint.parallel_write.pipeline_stage"):
        parse(checkpoint={"parallel_write": {"pipeline_stage": "yes"}})
    for writer in ({"type": "SLOW"}, {"data_parallel": "PLANET"}):
        with pytest.raises(AssertionError, match="checkpoint.writer"):
            parse(checkpoint={"writer": writer})


def test_checkpoint_options():
    config = parse(
        checkpoint={"load_universal": True, "use_node_local_storage": True, "parallel_write": {"pipeline_stage": True}}
    )
    assert config.load_universal_checkpoint and config.use_node_local_storage
    assert config.checkpoint_parallel_write_pipeline
    writer = get_checkpoint_config({"checkpoint": {"writer": {"type": "mock", "io_multiplier": 2}}})["writer"]
    assert (writer["type"], writer["io_multiplier"], writer["io_buffer_size"]) == ("MOCK", 2, 64 * 1024 * 1024)


def test_aio():
    assert get_aio_config({"aio": {"block_size": 4096.0, "thread_count": 1}})["block_size"] == 4096
    assert "thread_count" not in get_aio_config({"aio": {"thread_count": 1}})
    with pytest.raises(ValueError, match="aio.queue_depth"):
        get_aio_config({"aio": {"queue_depth": 0}})


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_gds_is_refused(monkeypatch, device):
    from deepspeed import accelerator

    class Accelerator:
        def device_name(self):
            return device

    monkeypatch.setattr(accelerator, "get_accelerator", Accelerator)
    error = NotImplementedError if device == "cuda" else AssertionError
    with pytest.raises(error, match="use_gds.*'cpu'" if device == "cpu" else "use_gds.*not built"):
        get_aio_config({"aio": {"use_gds": True}})


def test_flops_profiler_switches_the_timers_on():
    config = parse(flops_profiler={"enabled": True, "profile_step": 5, "output_file": "out.txt"})
    assert config.wall_clock_breakdown is True
    profiler = config.flops_profiler_config
    assert (profiler.profile_step, profiler.output_file, profiler.module_depth) == (5, "out.txt", -1)


def test_activation_checkpointing():
    section = parse(
        activation_checkpointing={"partition_activations": True, "number_checkpoints": 4}
    ).activation_checkpointing_config
    assert (section.partition_activations, section.number_checkpoints, section.profile) == (True, 4, False)
    with pytest.raises(TypeError, match="activation_checkpointing.profile"):
        parse(activation_checkpointing={"profile": "yes"})


def test_monitors_and_comms_logger():
    config = parse(csv_monitor={"enabled": True, "output_path": "out"}, comms_logger={"enabled": True, "verbose": True})
    assert config.monitor_config.enabled and config.monitor_config.csv_monitor.output_path == "out"
    assert config.comms_config.comms_logger_enabled and config.comms_config.comms_logger.verbose


def test_data_types():
    config = parse(data_types={"grad_accum_dtype": "fp32", "buffer_dtype": "bf16", "keep_in_fp32_modules": ["norm"]})
    assert (config.grad_accum_dtype, config.buffer_dtype) == (torch.float32, torch.bfloat16)
    assert config.keep_in_fp32_modules == ["norm"]
    for bad in ("norm", 3, [3], None):
        with pytest.raises(DeepSpeedConfigError, match="keep_in_fp32_modules"):
            parse(data_types={"keep_in_fp32_modules": bad})
    with pytest.raises(ValueError, match="data_types.grad_accum_dtype"):
        parse(data_types={"grad_accum_dtype": "fp8"})


@pytest.mark.parametrize("name", AUTOCAST_DTYPE_NAMES)
def test_torch_autocast_dtypes(name):
    dtype = parse(torch_autocast={"enabled": True, "dtype": name}).torch_autocast_dtype
    assert dtype == DtypeEnum(name).value
    short = name.removeprefix("torch.")
    full = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}.get(short, short)
    assert dtype == getattr(torch, full)


def test_torch_autocast_errors():
    with pytest.raises(ValueError, match="torch_autocast.dtype"):
        parse(torch_autocast={"dtype": "fp8"})
    with pytest.raises(ValueError, match="lower_precision_safe_modules"):
        parse(torch_autocast={"lower_precision_safe_modules": [torch.nn.Linear]})
    names = ["torch.nn.Linear"]
    config = parse(torch_autocast={"lower_precision_safe_modules": names})
    assert config.torch_autocast_lower_precision_safe_modules == names
    with pytest.raises(ValueError, match="fp8"):
        DtypeEnum("fp8")


def test_vocabulary_size_warns(warnings):
    parse(vocabulary_size=50257)
    assert len(warnings) == 1 and "50257" in warnings[0]
    parse(vocabulary_size=50304)
    assert len(warnings) == 1


def test_what_client_libraries_write_is_accepted():
    DeepSpeedConfig(
        {
            "train_batch_size": 16,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 8,
            "gradient_clipping": 0.0,
            "steps_per_print": float("inf"),
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "none", "nvme_path": None},
                "offload_param": {"device": "none", "nvme_path": None},
                "stage3_gather_16bit_weights_on_model_save": False,
                "allgather_bucket_size": 2e8,
                "reduce_bucket_size": 2e8,
                "sub_group_size": 1e12,
            },
            "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 16, "auto_cast": True},
            "bf16": {"enabled": True},
            "activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False},
            "aio": {"block_size": 1048576, "queue_depth": 8, "thread_count": 1, "single_submit": False},
            "msamp": {"enabled": True, "opt_level": "O2"},
            "zero_optimization.reduce_bucket_size": 4096,
            "zero_optimization.stage3_prefetch_bucket_size": 3686.4,
        }
    )
