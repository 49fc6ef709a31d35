# SPDX-License-Identifier: Apache-2.0
"""What of the published interface is not built: modules, and names that modules show, with the feature of each.

Asking for one raises an error that names it and the feature. docs/coverage.md lists everything.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from typing import NoReturn

_MOE, _PIPELINE, _TENSOR = "mixture of experts", "pipeline parallelism", "tensor parallelism"
_SEQUENCE, _INFERENCE = "sequence parallelism", "inference"
_MEGATRON = "reshaping of tensor and pipeline parallel checkpoints"
_SWAP = "swapping by these classes (deepspeed.runtime.swap_tensor has others)"

MODULES = {
    "deepspeed.autotuning": "autotuning",
    "deepspeed.checkpoint.affine": _MEGATRON,
    "deepspeed.checkpoint.affine_transfer": _MEGATRON,
    "deepspeed.checkpoint.autoep_affine": _MOE,
    "deepspeed.checkpoint.autoep_universal": _MOE,
    "deepspeed.checkpoint.autoep_zero3_metadata": _MOE,
    "deepspeed.checkpoint.deepspeed_checkpoint": _MEGATRON,
    "deepspeed.checkpoint.reshape_3d_utils": _MEGATRON,
    "deepspeed.checkpoint.reshape_meg_2d": _MEGATRON,
    "deepspeed.checkpoint.reshape_utils": _MEGATRON,
    "deepspeed.checkpoint.zero_checkpoint": _MEGATRON,
    "deepspeed.comm.ccl": "a backend beside torch's",
    "deepspeed.comm.mori": "a backend beside torch's",
    "deepspeed.compile": "DeepCompile",
    "deepspeed.datastates": "the DataStates checkpoint library",
    "deepspeed.inference": _INFERENCE,
    "deepspeed.io": "file writers under this name (deepspeed.runtime.checkpoint_engine writes checkpoints)",
    "deepspeed.linear": "optimized LoRA layers",
    "deepspeed.model_implementations": _INFERENCE,
    "deepspeed.module_inject": _INFERENCE,
    "deepspeed.moe": _MOE,
    "deepspeed.ops.adam.multi_tensor_apply": "the launcher of fused kernels under this name",
    "deepspeed.ops.adam.zenflow_cpu_adam": "ZenFlow",
    "deepspeed.ops.adam.zenflow_torch_adam": "ZenFlow",
    "deepspeed.ops.gds": "GPU direct storage",
    "deepspeed.ops.lion.multi_tensor_apply": "the launcher of fused kernels under this name",
    "deepspeed.ops.pin_memory": "pinned memory as an op (deepspeed.utils.pin_memory pins)",
    "deepspeed.ops.transformer": "transformer kernels",
    "deepspeed.pipe": _PIPELINE,
    "deepspeed.runtime.comm": "collectives under these names (the reducer has its own)",
    "deepspeed.runtime.hybrid_engine": "the hybrid engine",
    "deepspeed.runtime.model_checkpointing.data_parallel_writer_factory": "checkpoint files split among ranks",
    "deepspeed.runtime.model_checkpointing.utils": "checkpoint files split among ranks",
    "deepspeed.runtime.pipe": _PIPELINE,
    "deepspeed.runtime.sequence_parallel": _SEQUENCE,
    "deepspeed.runtime.sparse_tensor": "sparse gradients",
    "deepspeed.runtime.state_dict_factory": _MEGATRON,
    "deepspeed.runtime.superoffload": "SuperOffload",
    "deepspeed.runtime.swap_tensor.async_swapper": _SWAP,
    "deepspeed.runtime.swap_tensor.optimizer_utils": _SWAP,
    "deepspeed.runtime.swap_tensor.partitioned_optimizer_swapper": _SWAP,
    "deepspeed.runtime.swap_tensor.partitioned_param_swapper": _SWAP,
    "deepspeed.runtime.swap_tensor.pipelined_optimizer_swapper": _SWAP,
    "deepspeed.runtime.swap_tensor.utils": _SWAP,
    "deepspeed.runtime.tensor_parallel.init_utils": _TENSOR,
    "deepspeed.runtime.tensor_parallel.tp_manager": _TENSOR,
    "deepspeed.runtime.zenflow": "ZenFlow",
    "deepspeed.sequence": _SEQUENCE,
    "deepspeed.utils.mixed_precision_linkage": "linking of masters by hand (deepspeed.utils.safe_get_* reads them)",
    "deepspeed.utils.pin_memory_tracker": "a record of pinned memory",
    "deepspeed.utils.static_cache": _INFERENCE,
}

NAMES = {
    "deepspeed": {
        "PipelineModule": _PIPELINE,
        "PipelineEngine": _PIPELINE,
        "DualPipeVEngine": _PIPELINE,
        "DualPipeVModule": _PIPELINE,
        "DeepSpeedHybridEngine": "the hybrid engine",
        "InferenceEngine": _INFERENCE,
        "DeepSpeedInferenceConfig": _INFERENCE,
        "init_inference": _INFERENCE,
        "default_inference_config": _INFERENCE,
        "tp_model_init": _TENSOR,
        "set_autotp_mode": _TENSOR,
        "load_ds_config": _TENSOR,
        "merge_tp_model_init_into_config": _TENSOR,
        "record_tp_model_init_args": _TENSOR,
        "DeepSpeedTransformerLayer": "transformer kernels",
        "DeepSpeedTransformerConfig": "transformer kernels",
        "replace_transformer_layer": "transformer kernels",
        "resolve_per_head_muon_after_sharding": "Muon per attention head",
        "QUERY": "Muon per attention head",
        "KV": "Muon per attention head",
        "MLA_Q": "Muon per attention head",
        "MLA_KV": "Muon per attention head",
        "NOT_HEAD_BLOCKED": "Muon per attention head",
    },
    "deepspeed.checkpoint": dict.fromkeys(
        (
            "DeepSpeedCheckpoint",
            "ZeROCheckpoint",
            "get_layer_ckpt_name_for_rank",
            "get_model_3d_descriptor",
            "get_model_ckpt_name_for_rank",
            "get_zero_ckpt_name_for_rank",
            "merge_state",
            "model_3d_desc",
            "reshape_meg_2d_parallel",
        ),
        _MEGATRON,
    ),
    "deepspeed.ops": dict.fromkeys(("DeepSpeedTransformerLayer", "DeepSpeedTransformerConfig"), "transformer kernels"),
    "deepspeed.ops.adam": dict.fromkeys(
        ("ZenFlowCPUAdam", "ZenFlowSelectiveAdamW", "ZenFlowSelectiveAdamW_stage3"), "ZenFlow"
    ),
    "deepspeed.runtime.tensor_parallel": dict.fromkeys(
        ("AUTOTP_MODE", "TpTrainingManager", "get_tensor_parallel_config"), _TENSOR
    ),
}


class UnbuiltFeatureError(NotImplementedError, AttributeError):
    """A public name of the interface whose feature does not exist yet; ``hasattr`` sees it as absent."""


def refuse(module: str, name: str) -> NoReturn:
    """For the ``__getattr__`` of ``module``.

    Raises:
        UnbuiltFeatureError: the interface has the name.
        AttributeError: it has not.
    """
    feature = NAMES.get(module, {}).get(name)
    if feature is not None:
        raise UnbuiltFeatureError(f"{module}.{name}: {feature} is not built yet")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


class _NamesTheFeature:
    """Asked last for a module, when it exists nowhere: says why where it is one of ``MODULES``."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        feature = MODULES.get(name)
        if feature is not None:
            raise ModuleNotFoundError(f"No module named {name!r}: {feature} is not built yet", name=name)
        return None


def name_features_of_missing_modules() -> None:
    """From now on importing one of ``MODULES`` raises a ModuleNotFoundError that names the feature."""
    if _NamesTheFeature not in sys.meta_path:
        sys.meta_path.append(_NamesTheFeature)
