# SPDX-License-Identifier: Apache-2.0
"""Which modules become leaves, by class, name and ending of the name, and by the configuration."""

import importlib
import logging

import pytest
import torch
from torch import nn

import deepspeed.utils
from deepspeed import comm as dist
from deepspeed.runtime.zero.leaf_module_config import DEFAULT_LEAF_MODULE_CLASSES, DeepSpeedZeroLeafModuleConfig
from deepspeed.utils.logging import logger
from unit.common import DistributedTest

# deepspeed.utils.z3_leaf_module is the function of this name
leaves = importlib.import_module("deepspeed.utils.z3_leaf_module")


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.each = nn.ModuleList([Expert(), Expert()])


class SpecialExperts(Experts):
    pass


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = Experts()
        self.second = SpecialExperts()
        self.shared_first = nn.Linear(2, 2)


@pytest.fixture
def model():
    return Model()


@pytest.fixture
def warnings(caplog, monkeypatch):
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level(logging.WARNING, logger=logger.name)
    return caplog


def marked_parameters(model):
    return {name for name, parameter in model.named_parameters() if leaves.z3_leaf_parameter(parameter)}


OF_FIRST = {"first.each.0.weight", "first.each.1.weight"}
OF_SECOND = {"second.each.0.weight", "second.each.1.weight"}


def test_nothing_is_a_leaf_by_itself(model):
    assert leaves.get_z3_leaf_modules(model) == [] and marked_parameters(model) == set()
    assert not any(leaves.z3_leaf_module(module) for module in model.modules())


@pytest.mark.parametrize("named", [None, "Experts", f"{__name__}.Experts"])
def test_by_class_and_its_subclasses(model, named):
    found = leaves.set_z3_leaf_modules(model, [named or Experts])
    assert found == leaves.get_z3_leaf_modules(model) == [model.first, model.second]
    assert marked_parameters(model) == OF_FIRST | OF_SECOND
    assert leaves.z3_leaf_module(model.first) and not leaves.z3_leaf_module(model)
    assert leaves.unset_z3_leaf_modules(model, [named or Experts]) == found
    assert leaves.get_z3_leaf_modules(model) == [] and marked_parameters(model) == set()


@pytest.mark.parametrize("named", [None, "SpecialExperts", f"{__name__}.SpecialExperts"])
def test_base_classes_do_not_count(model, named):
    assert leaves.set_z3_leaf_modules(model, [named or SpecialExperts]) == [model.second]
    assert marked_parameters(model) == OF_SECOND


@pytest.mark.parametrize("function", [leaves.set_z3_leaf_modules, leaves.unset_z3_leaf_modules])
@pytest.mark.parametrize("cls", [nn.Conv2d, "Conv2d", "Expert_"])
def test_class_that_is_not_there(model, function, cls):
    with pytest.raises(ValueError, match=f"Model has no module of the classes .*{getattr(cls, '__name__', cls)}"):
        function(model, [cls])
    assert function(model, [cls], raise_if_not_found=False) == []


def test_some_classes_that_are_not_there(model, warnings):
    assert leaves.set_z3_leaf_modules(model, [nn.Conv2d, SpecialExperts, "Nothing"]) == [model.second]
    assert "torch.nn.modules.conv.Conv2d" in warnings.text and "Nothing" in warnings.text
    assert "SpecialExperts" not in warnings.text


def test_neither_class_nor_name(model):
    with pytest.raises(TypeError, match="got 3"):
        leaves.set_z3_leaf_modules(model, [Experts, 3])
    assert leaves.get_z3_leaf_modules(model) == []


def test_one_module(model):
    leaves.set_z3_leaf_module(model.first, True)
    assert leaves.get_z3_leaf_modules(model) == [model.first] and marked_parameters(model) == OF_FIRST
    leaves.set_z3_leaf_module(model.first, False)
    assert leaves.get_z3_leaf_modules(model) == [] and marked_parameters(model) == set()


def test_parameters_stay_marked_as_long_as_a_leaf_holds_them(model):
    leaves.set_z3_leaf_modules(model, [Experts, Expert])
    assert len(leaves.get_z3_leaf_modules(model)) == 6
    leaves.unset_z3_leaf_modules(model, [Expert])
    assert leaves.get_z3_leaf_modules(model) == [model.first, model.second]
    assert marked_parameters(model) == OF_FIRST | OF_SECOND


def test_by_name(model):
    found, missing = leaves.set_z3_leaf_modules_by_name(model, ["second", "first.each.1"])
    assert (found, missing) == ([model.first.each[1], model.second], [])
    assert leaves.get_z3_leaf_modules(model) == found
    assert leaves.set_z3_leaf_modules_by_name(model, ["second"], flag=False) == ([model.second], [])
    assert leaves.get_z3_leaf_modules(model) == [model.first.each[1]]
    with pytest.raises(ValueError, match=r"no module with name \['each.0', ''\]"):
        leaves.set_z3_leaf_modules_by_name(model, ["second", "each.0", ""])
    assert leaves.get_z3_leaf_modules(model) == [model.first.each[1]]
    made = leaves.set_z3_leaf_modules_by_name(model, ["each.0", "second"], raise_if_not_found=False)
    assert made == ([model.second], ["each.0"])


def test_by_suffix(model):
    found, missing = leaves.set_z3_leaf_modules_by_suffix(model, ["each.0", "first"])
    assert found == [model.first, model.first.each[0], model.second.each[0], model.shared_first] and missing == []
    assert leaves.get_z3_leaf_modules(model) == found
    with pytest.raises(ValueError, match=r"no module with suffix \['third'\]"):
        leaves.set_z3_leaf_modules_by_suffix(model, ["third", "first"])
    made = leaves.set_z3_leaf_modules_by_suffix(model, ["third"], flag=False, raise_if_not_found=False)
    assert made == ([], ["third"])


def test_config(model, warnings):
    config = DeepSpeedZeroLeafModuleConfig(classes="SpecialExperts", names=["second", "first"], name_suffixes="first")
    found = leaves.apply_zero_leaf_module_config(model, config)
    assert found == leaves.get_z3_leaf_modules(model) == [model.first, model.second, model.shared_first]
    assert warnings.text == ""


def test_default_config_finds_nothing_here_and_says_nothing(model, warnings):
    assert leaves.apply_zero_leaf_module_config(model, DeepSpeedZeroLeafModuleConfig()) == []
    assert leaves.apply_zero_leaf_module_config(model, None) == []
    assert warnings.text == ""


def test_default_config_finds_a_block_of_transformers(model):
    path, name = DEFAULT_LEAF_MODULE_CLASSES[0].rsplit(".", 1)
    model.block = type(name, (Experts,), {"__module__": path})()
    assert leaves._fully_qualified_class_name(model.block) == DEFAULT_LEAF_MODULE_CLASSES[0]
    assert leaves.apply_zero_leaf_module_config(model, DeepSpeedZeroLeafModuleConfig()) == [model.block]


def test_config_that_names_what_is_not_there(model, warnings):
    config = DeepSpeedZeroLeafModuleConfig(classes=["Absent"], names=["third", "first"], name_suffixes=["end"])
    assert leaves.apply_zero_leaf_module_config(model, config) == [model.first]
    assert "leaf_module: Model has no modules ['Absent', 'third', 'end']" in warnings.text


def test_public_names():
    names = ["z3_leaf_module", "z3_leaf_parameter", "get_z3_leaf_modules", "set_z3_leaf_module", "set_z3_leaf_modules"]
    names += ["unset_z3_leaf_modules", "set_z3_leaf_modules_by_name", "set_z3_leaf_modules_by_suffix"]
    for name in names:
        assert callable(getattr(deepspeed.utils, name)) and name in deepspeed.utils.__all__


class Routed(nn.Module):
    """Two linear layers, of which a call uses one."""

    def __init__(self):
        super().__init__()
        self.each = nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)])

    def forward(self, x, choice):
        return self.each[choice](x)


class TestEngine(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("section", ["classes", "names", "name_suffixes"])
    def test_ranks_may_use_different_parts_of_a_leaf_of_the_config(self, section):
        torch.manual_seed(0)
        model = nn.Module()
        model.routed = Routed()
        model.forward = lambda x, choice: model.routed(x, choice)
        reference = Routed().double()
        reference.load_state_dict(model.routed.state_dict())
        leaf = {"classes": f"{__name__}.Routed", "names": "routed", "name_suffixes": "outed"}[section]
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {
                "stage": 3,
                "stage3_param_persistence_threshold": 0,
                "leaf_module": {section: leaf},
            },
            "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        }
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        assert leaves.get_z3_leaf_modules(engine.module) == [model.routed]
        inputs = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(1))
        rank = dist.get_rank()
        engine.backward(engine(inputs[rank], rank).square().sum())
        for each in range(2):
            (reference(inputs[each].double(), each).square().sum() / 2).backward()
        for parameter, expected in zip(model.parameters(), reference.parameters()):
            made = deepspeed.utils.safe_get_full_grad(parameter)
            assert expected.grad.abs().max() > 0
            torch.testing.assert_close(made.double(), expected.grad, rtol=1e-5, atol=1e-5)
        engine.step()
