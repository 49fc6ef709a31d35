# SPDX-License-Identifier: Apache-2.0
"""No silent key: each is honoured, which a test shows, or refused by name, or said to have no effect, with the reason.

``ds_config_keys.json`` holds the names and defaults of the keys of DeepSpeed 0.19.8.
"""

import json
import logging
import re
from pathlib import Path

import pytest

from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError, unsupported_features
from deepspeed.runtime.config_checks import _UNSUPPORTED, keys_without_effect
from deepspeed.runtime.config_descriptions import CHECKPOINT_OPTIONS, NO_EFFECT, OPTION_OF, STAGE_3
from deepspeed.runtime.config_schema import SECTION, all_keys, missing_feature, no_effect
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.engine_config import _UNBUILT
from deepspeed.utils import logging as package_logging
from unit.runtime.test_ds_config_effects import EFFECTS
from unit.runtime.test_ds_config_exclusions import UNSUPPORTED

UNIT = Path(__file__).resolve().parents[1]
GIVEN = json.loads(Path(__file__).with_name("ds_config_keys.json").read_text(encoding="utf-8"))
KEYS = {key.path: key for key in all_keys()}
CHANGED = {effect.path for effect in EFFECTS}

# A section that 0.19.8 has removed and that exists here, and one that it never had.
REVIVED = "elasticity"
OWN = "gradient_check"

# Keys here that 0.19.8 does not list as keys of its own: a whole section, an old name, options of a group object.
FURTHER = {
    "allgather_size",
    "checkpoint.writer",
    "inference",
    "tensor_parallel.tp.mpu",
    "tensor_parallel.tp.tp_grain_size",
    "tensor_parallel.tp.tp_group",
    "tensor_parallel.tp.tp_size",
}
# A value that differs for a reason: here the section exists where there it is built on demand, or null means absent.
OTHER_DEFAULT = {
    "checkpoint.writer.type",
    "compile",
    "weight_quantization",
    "expert_parallel",
    "zero_optimization.leaf_module",
}

# Features whose own tests show what each option does: where those tests are. While a feature does not exist its switch
# is refused; when it does, every option must be mentioned there.
TESTED_IN = {
    "activation_checkpointing": "runtime/activation_checkpointing",
    "tensorboard": "monitor",
    "wandb": "monitor",
    "csv_monitor": "monitor",
    "comet": "monitor",
    "flops_profiler": "profiling",
    REVIVED: REVIVED,
    OWN: "runtime",
    "torch_autocast": "runtime",
    "bf16.bf16_master_weights_and_grads": "runtime",
    "bf16.bf16_optimizer_states": "runtime",
    "data_types.keep_in_fp32_modules": "runtime",
    "checkpoint": "checkpoint",
    "zero_optimization.load_from_fp32_weights": "checkpoint",
    "zero_optimization.sub_group_size": "runtime/zero",
    "zero_optimization.offload_param": "",
    "zero_optimization.offload_optimizer": "",
    "aio": "",
    "zero_force_ds_cpu_optimizer": "",
}


def is_stage_3(path: str) -> bool:
    """Options of stage 3; with it they are under the care of its own tests."""
    options = [option for option, feature in OPTION_OF.items() if feature == STAGE_3]
    return any(path == option or path.startswith(f"{option}.") for option in options)


def folder_of(path: str) -> str | None:
    return next((TESTED_IN[prefix] for prefix in TESTED_IN if path == prefix or path.startswith(f"{prefix}.")), None)


def mentioned(name: str, folder: str) -> bool:
    """Whether a test in the folder, other than those of the config itself, has the name as a word."""
    for file in sorted((UNIT / folder).rglob("test_*.py")):
        if "ds_config" not in file.name and re.search(rf"\b{name}\b", file.read_text(encoding="utf-8")):
            return True
    return False


@pytest.mark.parametrize("path", KEYS)
def test_a_key_is_honoured_or_refused_or_said_to_have_no_effect(path: str) -> None:
    verdicts = {
        "changes something": path in CHANGED,
        "no effect, for a reason": no_effect(path) is not None,
        "not built, refused": missing_feature(path) is not None,
        "an option of stage 3": is_stage_3(path),
        "tested with its feature": folder_of(path) is not None
        and missing_feature(path) is None
        and (KEYS[path].kind == SECTION or mentioned(KEYS[path].name, folder_of(path))),
    }
    held = [verdict for verdict, holds in verdicts.items() if holds]
    assert held, (
        f"{path!r} is accepted and nothing shows that it does anything: add it to EFFECTS in test_ds_config_effects.py,"
        " to NO_EFFECT in config_descriptions.py, refuse it in config_checks.py, or mention it in a test of its"
        f" feature (in tests/unit/{folder_of(path)})"
    )
    assert not {"changes something", "no effect, for a reason"} <= set(held), f"{path}: {held}"
    assert not {"changes something", "not built, refused"} <= set(held), f"{path}: {held}"


def test_every_key_of_the_interface_exists_and_no_other() -> None:
    assert set(GIVEN["defaults"]) - set(KEYS) == set()
    further = {path for path in KEYS if not path.startswith((f"{REVIVED}.", f"{OWN}."))} - set(GIVEN["defaults"])
    assert further == FURTHER


@pytest.mark.parametrize("path", sorted(set(GIVEN["defaults"]) - OTHER_DEFAULT))
def test_defaults_are_those_of_the_interface(path: str) -> None:
    expected, key = GIVEN["defaults"][path], KEYS[path]
    if expected == "(section)" or key.kind == SECTION:
        assert key.kind in (SECTION, "list")
    else:
        assert key.default == expected and isinstance(key.default, bool) == isinstance(expected, bool)


@pytest.mark.parametrize("section", GIVEN["removed"])
def test_removed_keys_are_refused_whatever_their_value(section: str) -> None:
    for key in set(GIVEN["removed"][section]) - {REVIVED}:
        for value in ({}, False, {"enabled": True}):
            inner = {key: value}
            config = {"train_batch_size": 1, **({section: {"stage": 1, **inner}} if section else inner)}
            with pytest.raises(DeepSpeedConfigError, match=key):
                DeepSpeedConfig(config)


def test_every_refusal_has_an_example_that_triggers_it() -> None:
    assert {name for name, _, _ in _UNSUPPORTED} - {name for name, _ in UNSUPPORTED} == set()


def test_options_belong_to_features_that_are_refused_or_exist() -> None:
    """A feature that is neither in the table of refusals nor a key would leave its options to nobody."""
    refused = {name for name, _, _ in _UNSUPPORTED}
    switches = {*KEYS, STAGE_3, "compile.deepcompile", "autotuning.enabled"}
    assert set(OPTION_OF.values()) - refused - switches == set()


def test_checkpoint_options_have_checkpoints() -> None:
    """While checkpoints are not built the methods that would read these options refuse."""
    for method in ("save_checkpoint", "load_checkpoint"):
        assert (method in _UNBUILT) == bool(missing_feature(CHECKPOINT_OPTIONS[0]))
        assert hasattr(DeepSpeedEngine, method)


@pytest.mark.parametrize("path", NO_EFFECT)
def test_a_given_key_without_effect_is_named_in_one_debug_line(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append((record.levelno, record.getMessage()))

    monkeypatch.setattr(package_logging, "_seen_dist_messages", set())
    handler, level_before = Collect(), package_logging.logger.level
    package_logging.logger.addHandler(handler)
    package_logging.logger.setLevel(logging.DEBUG)
    try:
        key, config = KEYS[path], {"train_batch_size": 1}
        value = {} if key.kind == "dict" else not key.default
        for name in reversed(path.split(".")):
            value = {name: value}
        DeepSpeedConfig(config | value)
        DeepSpeedConfig({"train_batch_size": 1, "fp16": {"enabled": False}})
    finally:
        package_logging.logger.setLevel(level_before)
        package_logging.logger.removeHandler(handler)
    debug = [text for level, text in lines if level == logging.DEBUG]
    assert debug == [f"[Rank 0] Config keys without effect: {path} ({NO_EFFECT[path]})"]


@pytest.mark.parametrize("name", ["stage3_max_live_parameters", "max_live_parameters"])
def test_options_of_stage_3_have_no_effect_below(name: str) -> None:
    for stage, expected in ((2, ["zero_optimization.stage3_max_live_parameters (stage 3 only)"]), (3, [])):
        config = DeepSpeedConfig({"train_batch_size": 1, "zero_optimization": {"stage": stage, name: 5}})
        assert keys_without_effect(config) == expected
    config = DeepSpeedConfig({"train_batch_size": 1, "zero_optimization": {"stage": 2, name: "auto"}})
    assert keys_without_effect(config) == []


def test_nothing_is_refused_or_without_effect_by_default() -> None:
    config = DeepSpeedConfig({"train_batch_size": 1})
    assert unsupported_features(config) == keys_without_effect(config) == []
