# SPDX-License-Identifier: Apache-2.0
"""What all typed sections have in common, shown on the sections themselves."""

import json

import pytest
import torch
from pydantic import ValidationError

from deepspeed.runtime.config_utils import DeepSpeedConfigModel, get_config_default
from deepspeed.runtime.precision_config import DeepSpeedFP16Config
from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig, ZeroStageEnum
from deepspeed.runtime.zero.leaf_module_config import DEFAULT_LEAF_MODULE_CLASSES, DeepSpeedZeroLeafModuleConfig
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum


@pytest.mark.parametrize("value", [5e8, 500000000, 500000000.0])
def test_integral_floats_are_integers(value):
    size = DeepSpeedZeroConfig(reduce_bucket_size=value).reduce_bucket_size
    assert (size, type(size)) == (500000000, int)


@pytest.mark.parametrize("value", [1.5, "many", None, True, [1], -1, 0])
def test_other_values_are_not_bucket_sizes(value):
    with pytest.raises(ValidationError, match="reduce_bucket_size"):
        DeepSpeedZeroConfig(reduce_bucket_size=value)


@pytest.mark.parametrize("value", [4, -1, "two", True, 1.5])
def test_other_values_are_not_stages(value):
    with pytest.raises(ValidationError, match="stage"):
        DeepSpeedZeroConfig(stage=value)


@pytest.mark.parametrize("value", [3, 3.0, ZeroStageEnum.weights, ZeroStageEnum.max_stage])
def test_enum_members_are_stored_as_plain_values(value):
    config = DeepSpeedZeroConfig(stage=value, offload_param={"device": OffloadDeviceEnum.cpu})
    assert type(config.stage) is int and config.stage == 3
    assert type(config.offload_param.device) is str and config.offload_param.device == "cpu"
    assert type(DeepSpeedZeroConfig().stage) is int


@pytest.mark.parametrize("key", ["stage3_prefetch_bucket_size", "prefetch_bucket_size"])
def test_alias_and_name_are_both_accepted(key):
    assert DeepSpeedZeroConfig(**{key: 7}).prefetch_bucket_size == 7


def test_alias_and_name_together_are_refused():
    with pytest.raises(ValidationError, match="same key"):
        DeepSpeedZeroConfig(stage3_prefetch_bucket_size=7, prefetch_bucket_size=7)


def test_assignments_are_validated():
    config = DeepSpeedZeroConfig(stage=1)
    config.reduce_bucket_size = 1e6
    config.stage = 2
    assert (config.reduce_bucket_size, config.stage, config.overlap_comm) == (1000000, 2, False)
    for name, value in (("reduce_bucket_size", 0), ("stage", 7), ("no_such_key", 1)):
        with pytest.raises(ValidationError):
            setattr(config, name, value)
    with pytest.raises(ValidationError, match="compute_grad_norm"):
        DeepSpeedZeroConfig(stage=2, compute_grad_norm=False).stage = 3


def test_auto_is_the_default_unless_strict():
    assert DeepSpeedZeroConfig(stage="auto", reduce_bucket_size="auto").reduce_bucket_size == 500000000
    with pytest.raises(ValidationError):
        DeepSpeedZeroConfig(strict=True, reduce_bucket_size="auto")


@pytest.mark.parametrize(
    "stage, given, expected",
    [(0, None, False), (1, None, False), (2, None, False), (3, None, True), (3, False, False), (2, True, True)],
)
def test_overlap_comm_depends_on_the_stage(stage, given, expected):
    assert DeepSpeedZeroConfig(stage=stage, overlap_comm=given).overlap_comm is expected


def test_instances_do_not_share_defaults():
    first, second = DeepSpeedZeroConfig(), DeepSpeedZeroConfig()
    first.leaf_module.classes.append("mine")
    assert second.leaf_module.classes == DeepSpeedZeroConfig().leaf_module.classes == DEFAULT_LEAF_MODULE_CLASSES


def test_leaf_modules():
    leaf = DeepSpeedZeroLeafModuleConfig(classes="A", names=["x", "y", "x"], name_suffixes=("s",))
    assert (leaf.classes, leaf.names, leaf.name_suffixes) == (["A"], ["x", "y"], ["s"])
    with pytest.raises(ValidationError):
        DeepSpeedZeroLeafModuleConfig(classes=[3])


@pytest.mark.parametrize("value", [True, -1, float("inf"), float("nan"), "big"])
def test_loss_scale_must_be_a_finite_number(value):
    with pytest.raises(ValidationError, match="loss_scale"):
        DeepSpeedFP16Config(loss_scale=value)


@pytest.mark.parametrize("key", ["loss_scale_window", "min_loss_scale"])
@pytest.mark.parametrize("value", [0, -1])
def test_dynamic_loss_scale_needs_positive_settings(key, value):
    with pytest.raises(ValidationError, match=key):
        DeepSpeedFP16Config(enabled=True, **{key: value})
    DeepSpeedFP16Config(enabled=False, **{key: value})
    DeepSpeedFP16Config(enabled=True, loss_scale=8, **{key: value})


def test_dynamic_loss_scale_arguments():
    config = DeepSpeedFP16Config(initial_scale_power=4, loss_scale_window=5, hysteresis=3, min_loss_scale=2)
    assert config.initial_dynamic_scale() == 16
    assert config.dynamic_loss_scale_args() == {
        "init_scale": 16,
        "scale_window": 5,
        "delayed_shift": 3,
        "consecutive_hysteresis": False,
        "min_scale": 2,
    }


def test_sections_can_be_written_as_json():
    zero = json.loads(
        DeepSpeedZeroConfig(stage=2, offload_param={"device": "nvme", "nvme_path": "/x"}).model_dump_json()
    )
    assert (zero["stage"], zero["offload_param"]["nvme_path"]) == (2, "/x")
    assert json.loads(TPTrainingConfig(dtype="bf16").model_dump_json())["dtype"] == "torch.bfloat16"


def test_tensor_parallel_section():
    config = TPTrainingConfig(dtype="bf16", tp={"tp_size": 2}, kernel_inject=True)
    assert (config.dtype, config.tensor_parallel.tp_size) == (torch.bfloat16, 2)
    assert config.replace_with_kernel_inject
    with pytest.raises(ValidationError, match="dtype"):
        TPTrainingConfig(dtype="fp8")


def test_get_config_default():
    class Section(DeepSpeedConfigModel):
        needed: int
        given: int = 3

    assert get_config_default(DeepSpeedZeroConfig, "reduce_bucket_size") == 500000000
    assert get_config_default(Section, "given") == 3
    for name in ("needed", "absent"):
        with pytest.raises(AssertionError, match=name):
            get_config_default(Section, name)
