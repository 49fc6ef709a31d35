# SPDX-License-Identifier: Apache-2.0
"""docs/config.md and the JSON schema: current, complete, and of the parser's opinion."""

import copy
import json
import re
from pathlib import Path

import pytest

import deepspeed
from deepspeed.runtime.config import KNOWN_TOP_LEVEL_KEYS, DeepSpeedConfig
from deepspeed.runtime.config_descriptions import CHECKPOINT_OPTIONS, DESCRIPTIONS, NO_EFFECT, OPTION_OF
from deepspeed.runtime.config_docs import render
from deepspeed.runtime.config_report import main
from deepspeed.runtime.config_schema import SECTION, all_keys, json_schema

ROOT = Path(deepspeed.__file__).resolve().parents[1]

TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "number": (int, float),
    "integer": (int, float),
}


def errors(schema, value, where="config"):
    """What a validator says, for the part of JSON schema that ours uses."""
    known = {"$schema", "title", "description", "default", "deprecated"}
    rules = {key: rule for key, rule in schema.items() if key not in known}
    if "anyOf" in rules:
        tried = [errors(form, value, where) for form in rules.pop("anyOf")]
        return [] if any(not found for found in tried) else [error for found in tried for error in found]
    if "enum" in rules and value not in rules.pop("enum"):
        return [f"{where} is not in the enum"]
    if "const" in rules and value != rules.pop("const"):
        return [f"{where} is not the constant"]
    if "type" in rules:
        wanted = rules.pop("type")
        if not any(is_of(value, name) for name in ([wanted] if isinstance(wanted, str) else wanted)):
            return [f"{where} is not {wanted}"]
    if "pattern" in rules and not re.search(rules.pop("pattern"), value):
        return [f"{where} does not match"]
    for name, ok in (
        ("minimum", lambda limit: value >= limit),
        ("exclusiveMinimum", lambda limit: value > limit),
        ("maximum", lambda limit: value <= limit),
    ):
        if name in rules and not ok(rules.pop(name)):
            return [f"{where} is out of range"]
    properties, patterns = rules.pop("properties", {}), rules.pop("patternProperties", {})
    closed = rules.pop("additionalProperties", True) is False
    assert not rules, f"this validator does not know {sorted(rules)}"
    found = []
    for key, item in value.items() if isinstance(value, dict) else ():
        if key in properties:
            found += errors(properties[key], item, f"{where}.{key}")
        elif closed and not any(re.search(pattern, key) for pattern in patterns):
            found.append(f"{where}.{key} is unknown")
    return found


def is_of(value, name):
    if isinstance(value, bool) and name != "boolean":
        return False
    return isinstance(value, TYPES[name]) and (name != "integer" or value == int(value))


def test_the_page_is_current():
    written = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert written == render(), "run: python -m deepspeed.runtime.config_report --docs > docs/config.md"


def test_the_page_has_every_key_with_its_default():
    page = render()
    for text in (
        "| `gradient_clipping` | number >= 0 | `1.0` |",
        "| `stage` | `0` or `1` or `2` or `3` | `0` |",
        "| `stage3_max_live_parameters` (or `max_live_parameters`) | int >= 0 | `1000000000` |",
        "| `ratio` | number >= 0.0 <= 1.0 | `1.0` |",
        "| `disable_allgather` | bool | `false` | Historic switch",
        "No effect: updated weights are always gathered.",
        "| `curriculum_learning` | truncate or pad",
    ):
        assert text in page, text
    for key in all_keys():
        assert page.count(f"| `{key.name}`") >= 1, key.path


def test_every_key_is_described_and_no_other():
    paths = {key.path for key in all_keys()}
    assert len(paths) == len(all_keys())
    assert set(DESCRIPTIONS) == paths
    assert set(NO_EFFECT) | set(CHECKPOINT_OPTIONS) <= paths
    sections = {path.split(".")[0] for path in paths}
    assert set(OPTION_OF) <= paths | sections
    assert {name for name in KNOWN_TOP_LEVEL_KEYS if name != "bfloat16"} == sections


VALID = [
    {"train_batch_size": 8},
    {
        "$schema": "./ds_config.schema.json",
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
        "communication_data_type": "FP32",
        "steps_per_print": 10,
        "bf16": {"enabled": True},
        "fp16": {"enabled": False, "loss_scale": 0, "loss_scale_window": "auto"},
        "zero_optimization": {
            "stage": 2,
            "reduce_bucket_size": 5e8,
            "overlap_comm": True,
            "offload_optimizer": {"device": "none", "nvme_path": None},
            "offload_param": None,
            "prefetch_bucket_size": 100,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "data_types": {"grad_accum_dtype": "fp32", "keep_in_fp32_modules": "auto"},
        "aio": {"block_size": 4096, "thread_count": 1},
        "checkpoint": {"tag_validation": "Warn"},
        "tensorboard": None,
        "zero_optimization.reduce_bucket_size": 1,
    },
    {
        "train_batch_size": 8,
        "bfloat16": {"enabled": "auto"},
        "zero_optimization": True,
        "pipeline": {"stages": "auto", "own_key": 1},
        "torch_autocast": {"dtype": "torch.bfloat16", "lower_precision_safe_modules": ["torch.nn.Linear"]},
        "comms_logger": {"prof_ops": ["all_reduce"], "prof_all": False},
    },
    {"train_batch_size": 8, "zero_optimization": {"stage": 3, "leaf_module": {"names": "a", "classes": ["b"]}}},
]

INVALID = [
    ("zero_optimisation", {"zero_optimisation": {"stage": 2}}),
    ("zero_optimization.stages", {"zero_optimization": {"stages": 2}}),
    (
        "zero_optimization.offload_optimizer.pinmemory",
        {"zero_optimization": {"offload_optimizer": {"pinmemory": True}}},
    ),
    ("zero_optimization.stage", {"zero_optimization": {"stage": 4}}),
    ("zero_optimization.reduce_bucket_size", {"zero_optimization": {"reduce_bucket_size": 0}}),
    ("zero_optimization.reduce_bucket_size", {"zero_optimization": {"reduce_bucket_size": 1.5}}),
    ("fp16.enabled", {"fp16": {"enabled": "maybe"}}),
    ("fp16.enable", {"fp16": {"enable": True}}),
    ("gradient_clipping", {"gradient_clipping": -1}),
    ("gradient_allreduce_op", {"gradient_allreduce_op": "max"}),
    ("train_batch_size", {"train_batch_size": "auto"}),
    ("checkpoint.tag_validation", {"checkpoint": {"tag_validation": "maybe"}}),
    ("activation_checkpointing.partition_activation", {"activation_checkpointing": {"partition_activation": True}}),
    ("curriculum_learning", {"curriculum_learning": {"enabled": True}}),
    ("optimizer.params", {"optimizer": {"params": [1]}}),
]


@pytest.mark.parametrize("config", VALID)
def test_the_schema_accepts_what_the_parser_accepts(config):
    assert errors(json_schema(), config) == []
    DeepSpeedConfig(copy.deepcopy(config))


@pytest.mark.parametrize("where, config", INVALID)
def test_the_schema_refuses_what_the_parser_refuses(where, config):
    config = {"train_batch_size": 8, **config}
    assert any(error.startswith(f"config.{where} ") for error in errors(json_schema(), config))
    with pytest.raises(Exception, match=where.rpartition(".")[2]):
        DeepSpeedConfig(config)


def test_the_schema_accepts_every_default():
    config = {"train_batch_size": 1}
    for key in all_keys():
        if key.kind == SECTION or key.default is None:
            continue
        node = config
        for name in key.section.split(".") if key.section else ():
            node = node.setdefault(name, {})
        node[key.name] = key.default
    assert len(config["zero_optimization"]) > 30
    assert errors(json_schema(), config) == []


def test_the_command_prints_both(capsys):
    assert main(["--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json_schema()
    assert main(["--docs"]) == 0
    assert capsys.readouterr().out == render()
