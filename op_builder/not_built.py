# SPDX-License-Identifier: Apache-2.0
"""Ops that have a name in the interface and no native kernel yet.

A class leaves this file for one of its own when its sources are in ``csrc/``.
"""

from .builder import NotImplementedBuilder


class CCLCommBuilder(NotImplementedBuilder):
    """Collectives through oneCCL."""

    NAME = "deepspeed_ccl_comm"


class DeepCompileBuilder(NotImplementedBuilder):
    """Runtime of the compiler passes."""

    NAME = "dc"


class EvoformerAttnBuilder(NotImplementedBuilder):
    """Attention with pair bias."""

    NAME = "evoformer_attn"


class FPQuantizerBuilder(NotImplementedBuilder):
    """Floating-point quantization."""

    NAME = "fp_quantizer"


class FlashAttentionBuilder(NotImplementedBuilder):
    """Flash attention."""

    NAME = "flash_attn"


class GDSBuilder(NotImplementedBuilder):
    """File reads and writes straight to device memory."""

    NAME = "gds"


class InferenceBuilder(NotImplementedBuilder):
    """Transformer inference kernels."""

    NAME = "transformer_inference"


class InferenceCoreBuilder(NotImplementedBuilder):
    """Core kernels of ragged inference."""

    NAME = "inference_core_ops"


class InferenceCutlassBuilder(NotImplementedBuilder):
    """Matrix products of ragged inference."""

    NAME = "cutlass_ops"


class PinMemoryBuilder(NotImplementedBuilder):
    """Page-locked host memory."""

    NAME = "pin_memory"


class QuantizerBuilder(NotImplementedBuilder):
    """Integer quantization."""

    NAME = "quantizer"


class RaggedOpsBuilder(NotImplementedBuilder):
    """Attention and embedding of ragged inference."""

    NAME = "ragged_device_ops"


class RaggedUtilsBuilder(NotImplementedBuilder):
    """Host side of ragged inference."""

    NAME = "ragged_ops"


class RandomLTDBuilder(NotImplementedBuilder):
    """Random layer-wise token dropping."""

    NAME = "random_ltd"


class ShareMemCommBuilder(NotImplementedBuilder):
    """Collectives through shared memory."""

    NAME = "deepspeed_shm_comm"


class SpatialInferenceBuilder(NotImplementedBuilder):
    """Inference kernels for images."""

    NAME = "spatial_inference"


class StochasticTransformerBuilder(NotImplementedBuilder):
    """Training kernels of a transformer layer, faster and not reproducible."""

    NAME = "stochastic_transformer"


class TransformerBuilder(NotImplementedBuilder):
    """Training kernels of a transformer layer."""

    NAME = "transformer"


class UtilsBuilder(NotImplementedBuilder):
    """Flattening and unflattening of tensor lists."""

    NAME = "utils"
