# SPDX-License-Identifier: Apache-2.0
"""Builders of the native ops, found by class name: ``deepspeed.ops.op_builder.CPUAdamBuilder().load()``."""

from .async_io import AsyncIOBuilder
from .builder import CUDAOpBuilder, NotImplementedBuilder, OpBuilder, get_default_compute_capabilities
from .checkpoint import CheckpointBuilder
from .cpu_optimizers import CPUAdagradBuilder, CPUAdamBuilder, CPULionBuilder
from .fused_optimizers import FusedAdamBuilder, FusedLambBuilder, FusedLionBuilder
from .not_built import (
    CCLCommBuilder,
    DeepCompileBuilder,
    EvoformerAttnBuilder,
    FlashAttentionBuilder,
    FPQuantizerBuilder,
    GDSBuilder,
    InferenceBuilder,
    InferenceCoreBuilder,
    InferenceCutlassBuilder,
    PinMemoryBuilder,
    QuantizerBuilder,
    RaggedOpsBuilder,
    RaggedUtilsBuilder,
    RandomLTDBuilder,
    ShareMemCommBuilder,
    SpatialInferenceBuilder,
    StochasticTransformerBuilder,
    TransformerBuilder,
    UtilsBuilder,
)

op_builder_dir = "deepspeed.ops.op_builder"

__all__ = [
    "AsyncIOBuilder",
    "CCLCommBuilder",
    "CPUAdagradBuilder",
    "CPUAdamBuilder",
    "CPULionBuilder",
    "CUDAOpBuilder",
    "CheckpointBuilder",
    "DeepCompileBuilder",
    "EvoformerAttnBuilder",
    "FPQuantizerBuilder",
    "FlashAttentionBuilder",
    "FusedAdamBuilder",
    "FusedLambBuilder",
    "FusedLionBuilder",
    "GDSBuilder",
    "InferenceBuilder",
    "InferenceCoreBuilder",
    "InferenceCutlassBuilder",
    "NotImplementedBuilder",
    "OpBuilder",
    "PinMemoryBuilder",
    "QuantizerBuilder",
    "RaggedOpsBuilder",
    "RaggedUtilsBuilder",
    "RandomLTDBuilder",
    "ShareMemCommBuilder",
    "SpatialInferenceBuilder",
    "StochasticTransformerBuilder",
    "TransformerBuilder",
    "UtilsBuilder",
    "get_default_compute_capabilities",
    "op_builder_dir",
]
