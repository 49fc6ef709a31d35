# SPDX-License-Identifier: Apache-2.0
"""Config section ``flops_profiler``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed.profiling import constants as const
from deepspeed.runtime.config_utils import DeepSpeedConfigObject, check_section_keys, read_section, read_value

_KINDS = {
    const.FLOPS_PROFILER_ENABLED: ("bool", const.FLOPS_PROFILER_ENABLED_DEFAULT),
    const.FLOPS_PROFILER_RECOMPUTE_FWD_FACTOR: ("number", const.FLOPS_PROFILER_RECOMPUTE_FWD_FACTOR_DEFAULT),
    const.FLOPS_PROFILER_PROFILE_STEP: ("int", const.FLOPS_PROFILER_PROFILE_STEP_DEFAULT),
    const.FLOPS_PROFILER_MODULE_DEPTH: ("int", const.FLOPS_PROFILER_MODULE_DEPTH_DEFAULT),
    const.FLOPS_PROFILER_TOP_MODULES: ("int", const.FLOPS_PROFILER_TOP_MODULES_DEFAULT),
    const.FLOPS_PROFILER_DETAILED: ("bool", const.FLOPS_PROFILER_DETAILED_DEFAULT),
    const.FLOPS_PROFILER_OUTPUT_FILE: ("str", const.FLOPS_PROFILER_OUTPUT_FILE_DEFAULT),
}


class DeepSpeedFlopsProfilerConfig(DeepSpeedConfigObject):
    """When the flops profiler runs (``profile_step``, a global step) and how much it prints.

    Unknown keys are ignored unless they look like a misspelling (DeepSpeedConfigError).
    """

    enabled: bool
    recompute_fwd_factor: float
    profile_step: int
    module_depth: int
    top_modules: int
    detailed: bool
    output_file: str | None

    def __init__(self, param_dict: Mapping[str, Any]) -> None:
        section = read_section(param_dict, const.FLOPS_PROFILER)
        check_section_keys(section, _KINDS, const.FLOPS_PROFILER)
        for key, (kind, default) in _KINDS.items():
            setattr(self, key, read_value(section, key, default, kind, const.FLOPS_PROFILER))
