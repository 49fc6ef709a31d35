# SPDX-License-Identifier: Apache-2.0
"""``data_types.keep_in_fp32_modules``: parts of a 16-bit model that stay in fp32."""

import re
from collections.abc import Iterator

import torch

KEEP_IN_FP32_AUTO = "auto"
# Attributes by which models of Hugging Face say so: for fp16 alone, and for both 16-bit types.
_FP16_ONLY = "_keep_in_fp32_modules"
_ALWAYS = "_keep_in_fp32_modules_strict"


def keep_in_fp32_pattern(
    module: torch.nn.Module, setting: str | list[str], dtype: torch.dtype | None
) -> "re.Pattern[str] | None":
    """What matches the names of parameters that stay in fp32; None when none do.

    Args:
        setting: names of modules or parameters, matched by whole components (``norm`` matches ``layers.0.norm.weight``;
            ``layers.0`` may be given too); "auto": what the model's own attributes list.
        dtype: that the model is cast to; None: it is not cast, and nothing needs to be kept.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        return None
    names = _listed_by_model(module, dtype) if setting == KEEP_IN_FP32_AUTO else list(setting)
    if not names:
        return None
    return re.compile("|".join(rf"(?:^|\.){re.escape(name)}(?:\.|$)" for name in names))


def _listed_by_model(module: torch.nn.Module, dtype: torch.dtype) -> list[str]:
    attributes = (_FP16_ONLY, _ALWAYS) if dtype is torch.float16 else (_ALWAYS,)
    names: dict[str, None] = {}
    for part in module.modules():
        for attribute in attributes:
            names.update(dict.fromkeys(getattr(part, attribute, None) or ()))
    return list(names)


def parameters_to_keep_in_fp32(module: torch.nn.Module, pattern: "re.Pattern[str] | None") -> set[torch.nn.Parameter]:
    """Parameters that a name of matches ``pattern``."""
    if pattern is None:
        return set()
    return {
        parameter
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if parameter.is_floating_point() and pattern.search(name)
    }


def buffers_to_keep_in_fp32(
    module: torch.nn.Module, pattern: "re.Pattern[str] | None"
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and floating-point buffers that ``pattern`` matches."""
    if pattern is None:
        return
    for name, buffer in module.named_buffers(remove_duplicate=False):
        if buffer.is_floating_point() and pattern.search(name):
            yield name, buffer
