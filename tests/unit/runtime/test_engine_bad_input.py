# SPDX-License-Identifier: Apache-2.0
"""What users get wrong: every rank raises, none hangs, and after the mistake the engine trains on with right
gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.runtime.gradients.ledger import GradientAccountingError
from unit.common import DistributedTest
from unit.graphs import weights_of
from unit.runtime import engine_cases as cases

STAGES = (0, 1, 2, 3)


def my_batch(seed: int = 0) -> cases.Batch:
    return cases.batches_of(dist.get_rank(), 1, seed=seed)[0]


def whole(engine: Any) -> deepspeed.zero.GatheredParameters:
    """All weights whole, at stage 3, for code outside of any module's forward."""
    return deepspeed.zero.GatheredParameters(engine.module.parameters())


def trains_on(engine: Any, note: str) -> None:
    """Two more windows with right gradients and applied steps."""
    for seed in (5, 6):
        cases.check_window(engine, seed=seed, note=note)
        engine.step()
        assert engine.was_step_applied(), note
    cases.check_same_on_all_ranks(engine.module, note)


class TestInitialize(DistributedTest):
    world_size = 2

    def test_missing_and_wrong_arguments(self) -> None:
        model = cases.OddModel()
        config = cases.make_config(1)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        other = cases.OddModel()

        def initialize(**kwargs: Any) -> Callable[[], Any]:
            return lambda: deepspeed.initialize(**kwargs)

        for call, kind, words in (
            (initialize(config=config), AssertionError, "requires a model"),
            (initialize(model=model), AssertionError, "requires a config"),
            (initialize(model=model, config=17), TypeError, "dict or a path"),
            (initialize(model=model, config="no/such/file.json"), ValueError, "no/such/file.json"),
            (initialize(model=model, config=config), AssertionError, "needs an optimizer"),
            (initialize(model=model, config=config, optimizer=3), TypeError, "torch.optim.Optimizer"),
            (initialize(model=model, config=config, optimizer=lambda p: None), TypeError, "NoneType"),
            (
                initialize(model=model, config=config, optimizer=torch.optim.SGD(other.parameters(), lr=0.1)),
                ValueError,
                "not a parameter of the model",
            ),
            (
                initialize(model=model, config={**config, "zero_allow_untested_optimizer": False}, optimizer=sgd),
                AssertionError,
                "SGD.*zero_allow_untested_optimizer",
            ),
            (initialize(model=model, config=config, training_data=object(), optimizer=sgd), ValueError, "data set"),
            (initialize(model=model, config=config, optimizer=sgd, mesh_param=(1, 1)), NotImplementedError, "mesh"),
        ):
            with pytest.raises(kind, match=words):
                call()
        trains_on(cases.make_engine(config, model, sgd), "the model and the optimizer are still good")

    def test_wrong_values_in_the_config(self) -> None:
        model = cases.OddModel()
        for change, words in (
            ({"zero_optimization": {"stage": 7}}, "stage"),
            ({"zero_optimization": {"stage": 2, "reduce_bucket_size": 0}}, "reduce_bucket_size"),
            ({"zero_optimization": {"stage": 2, "allgather_bucket_size": 5}}, "allgather_bucket_size.*even"),
            ({"zero_optimization": {"stage": 2, "reduce_bucket": 5}}, "reduce_bucket"),
            ({"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}, "offload_optimizer.*stage 0"),
            ({"zero_optimization": {"stage": 2}, "prescale_gradients": True}, "prescale_gradients.*reduce_scatter"),
            ({"gradient_clipping": -1.0}, "gradient_clipping"),
            ({"gradient_accumulation_steps": 0}, "(?i)accumulation"),
            ({"train_batch_size": 7}, "(?i)batch"),
            ({"communication_data_type": "fp8"}, "communication_data_type"),
            ({"gradient_allreduce_op": "max"}, "gradient_allreduce_op"),
            ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.*bf16"),
            ({"zero_optimisation": {"stage": 2}}, "zero_optimization"),
            ({"optimizer": {"type": "Adamm", "params": {}}}, "Adamm"),
            ({"optimizer": {"type": "MuAdam", "params": {}}}, "(?i)muadam.*not built"),
            ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}}, "gradient_clipping"),
            ({"scheduler": {"type": "NoSuch"}, "optimizer": {"type": "Adam"}}, "NoSuch"),
        ):
            config = {**cases.make_config(1), **change}
            # config errors come as AssertionError, ValueError (pydantic's among them) or NotImplementedError
            with pytest.raises((AssertionError, ValueError, NotImplementedError, deepspeed.DeepSpeedConfigError)) as e:
                deepspeed.initialize(model=model, config=config)
            assert e.match(words), change
        trains_on(cases.make_engine(cases.make_config(2), model), "after refused configs")

    def test_parameters_that_cannot_be_trained(self) -> None:
        for stage in STAGES:
            config = cases.make_config(stage)
            model = cases.OddModel()
            with pytest.warns(UserWarning, match="duplicate"):
                twice = torch.optim.SGD([model.gain, model.gain], lr=0.1)
            with pytest.raises(AssertionError, match="gain.*twice"):
                cases.make_engine(config, model, twice)
            if stage == 3:
                model = cases.OddModel()  # the other one is partitioned by now
            adam = torch.optim.Adam(model.parameters(), lr=0.1)
            model(*my_batch()).backward()
            adam.step()
            with pytest.raises(ValueError, match="already made steps"):
                cases.make_engine(config, model, adam)
            trains_on(cases.make_engine(config, model), f"stage {stage}, a model with .grad from before")

    def test_parameters_over_the_same_memory(self) -> None:
        for stage in (1, 2, 3):
            model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
            model[1].weight = nn.Parameter(model[0].weight.data)
            with pytest.raises(ValueError, match=r"0\.weight.*1\.weight.*same memory"):
                cases.make_engine(cases.make_config(stage), model)

    def test_tied_and_empty_parameters_are_fine(self) -> None:
        """#75"""
        for stage in STAGES:
            model = cases.OddModel()
            model.empty = nn.Linear(4, 0, bias=False)
            model.tied = model.first
            engine = cases.make_engine(cases.make_config(stage), model)
            engine.backward(engine(*my_batch()) + model.empty(torch.ones(1, 4)).sum())
            engine.step()
            assert engine.was_step_applied() and model.tied.weight is model.first.weight
            cases.check_same_on_all_ranks(model)


class TestTraining(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("stage", STAGES)
    def test_losses_that_are_none(self, stage: int) -> None:
        engine = cases.make_engine(cases.make_config(stage))
        for loss, words in (
            (torch.ones(2, requires_grad=True) * 2, r"scalar loss.*\(2,\)"),
            (torch.tensor(1.0), "no graph"),
            (3.0, "float"),
            (None, "NoneType"),
        ):
            for call in (engine.backward, engine.scale):
                with pytest.raises(AssertionError, match=words):
                    call(loss)
        trains_on(engine, f"stage {stage}")

    @pytest.mark.parametrize("stage", STAGES)
    def test_step_without_backward(self, stage: int) -> None:
        for gas in (1, 2):
            engine = cases.make_engine(cases.make_config(stage, gas=gas))
            for _ in range(2):
                engine.set_gradient_accumulation_boundary(True)
                with pytest.raises(RuntimeError, match="without backward"):
                    engine.step()
            engine._is_gradient_accumulation_boundary = None
            assert (engine.global_steps, engine.micro_steps) == (0, 0) and not engine.was_step_applied()
            trains_on(engine, f"stage {stage}, accumulation {gas}")
            engine.set_gradient_accumulation_boundary(True)
            with pytest.raises(RuntimeError, match="without backward"):
                engine.step()

    @pytest.mark.parametrize("stage", STAGES)
    def test_a_gradient_set_by_hand_on_one_rank_is_refused_on_all(self, stage: int) -> None:
        engine = cases.make_engine(cases.make_config(stage))
        weight = engine.module.first.weight
        cases.check_window(engine)
        engine.step()
        with whole(engine):
            weight.grad = torch.ones_like(weight)
        with pytest.raises(GradientAccountingError, match=r"first\.weight.*safe_set_full_grad"):
            engine.backward(engine(*my_batch()))
        engine.zero_grad()
        assert weight.grad is None
        trains_on(engine, f"stage {stage}, set before a backward")
        if stage == 0:
            return  # what is set after a reduced backward is an edit there, see the accessors
        before = weights_of(engine.module)["first.weight"]
        engine.backward(engine(*my_batch()))
        with whole(engine):
            if dist.get_rank() == 1:
                weight.grad = torch.ones_like(weight)
        with pytest.raises(GradientAccountingError, match=r"rank 1: 1 parameters have a \.grad.*first\.weight"):
            engine.step()
        assert torch.equal(weights_of(engine.module)["first.weight"], before)
        engine.zero_grad()
        trains_on(engine, f"stage {stage}, set after a backward")

    @pytest.mark.parametrize("stage", STAGES)
    def test_unfreezing_after_the_engine_was_made(self, stage: int) -> None:
        model = cases.OddModel()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = cases.make_engine(cases.make_config(stage), model, optimizer)
        model.frozen.weight.requires_grad_(True)
        with pytest.raises(RuntimeError, match=r"frozen\.weight.*did not require grad"):
            engine.backward(engine(*my_batch()))  # at stage 3 forward raises: the gradient would meet a shard
            engine.step()
        model.frozen.weight.requires_grad_(False)
        engine.zero_grad()
        assert model.frozen.weight.grad is None
        trains_on(engine, f"stage {stage}")

    @pytest.mark.parametrize("stage", STAGES)
    def test_freezing_later_gives_a_zero_gradient(self, stage: int) -> None:
        engine = cases.make_engine(cases.make_config(stage))
        weight = engine.module.shared.weight
        weight.requires_grad_(False)
        before = weights_of(engine.module)["shared.weight"]
        engine.backward(engine(*my_batch()))
        engine.step()
        assert engine.was_step_applied() and torch.equal(weights_of(engine.module)["shared.weight"], before)
        weight.requires_grad_(True)
        trains_on(engine, f"stage {stage}, thawed again")

    @pytest.mark.parametrize("stage", STAGES)
    def test_an_exception_in_backward(self, stage: int) -> None:
        for where in ("first", "last"):  # early in backward is late in the model
            for announced in (True, False):
                engine = cases.make_engine(cases.make_config(stage, zero={"reduce_bucket_size": 8}))
                module = engine.module.get_submodule(where)

                def fail(*_: Any) -> None:
                    raise ZeroDivisionError("on purpose")

                handle = module.register_full_backward_hook(fail)
                loss = engine(*my_batch())
                with pytest.raises(ZeroDivisionError):
                    engine.backward(loss) if announced else loss.backward()
                handle.remove()
                engine.zero_grad()
                trains_on(engine, f"stage {stage}, failed in {where}, announced {announced}")

    @pytest.mark.parametrize("stage", STAGES)
    def test_misused_contexts(self, stage: int) -> None:
        engine = cases.make_engine(cases.make_config(stage))
        if stage >= 2:
            with pytest.raises(AssertionError, match=f"no_sync.*stage {stage}"), engine.no_sync():
                pass
        else:
            with engine.no_sync():
                engine.backward(engine(*my_batch()))
                with pytest.raises(AssertionError, match="inside no_sync"):
                    engine.step()
                with pytest.raises(AssertionError, match="inside no_sync"), engine.no_sync():
                    pass
            engine.zero_grad()
        if stage == 0:
            with pytest.raises(NotImplementedError, match="stages 1 and later"), engine.coalesce_grad_reduction():
                pass
        with pytest.raises(ValueError, match="multiple"):
            engine.set_train_batch_size(7)
        engine.backward(engine(*my_batch()))
        with pytest.raises(ValueError, match="within an accumulation window"):
            engine.set_train_batch_size(8)
        engine.step()
        trains_on(engine, f"stage {stage}")

    def test_unmanaged_accumulation_refuses_boundaries(self) -> None:
        """#20"""
        for stage in STAGES:
            engine = cases.make_engine(cases.make_config(stage, managed_gradient_accumulation=False))
            for boundary in (True, False):
                with pytest.raises(AssertionError, match="managed_gradient_accumulation"):
                    engine.set_gradient_accumulation_boundary(boundary)
            trains_on(engine, f"stage {stage}")

    @pytest.mark.parametrize("stage", STAGES)
    def test_a_custom_function_without_a_gradient_for_a_parameter(self, stage: int) -> None:
        """autograd fires the parameter's hook though nothing was delivered."""
        engine = cases.make_engine(cases.make_config(stage))
        for _ in range(2):
            before = weights_of(engine.module)["unused.weight"]
            with whole(engine):
                engine.backward(_Dropping.apply(engine(*my_batch()), engine.module.unused.weight))
            engine.step()
            assert engine.was_step_applied() and torch.equal(weights_of(engine.module)["unused.weight"], before)
        trains_on(engine, f"stage {stage}")

    def test_an_engine_without_optimizer_computes_but_does_not_train(self) -> None:
        engine = deepspeed.initialize(model=cases.OddModel(), config=cases.make_config(0))[0]
        loss = engine(*my_batch())
        assert loss.isfinite()
        for call in (lambda: engine.backward(loss), engine.step, lambda: engine.scale(loss)):
            with pytest.raises(AssertionError, match="needs an optimizer"):
                call()


class _Dropping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return loss * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None
