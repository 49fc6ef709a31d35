# SPDX-License-Identifier: Apache-2.0
"""Steps with an offloaded optimizer: settings of groups, edits, failures, accessors, checkpoints, memory, and moving
states for a while."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
import deepspeed.comm as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.lion import DeepSpeedCPULion
from deepspeed.profiling.memory import memory_breakdown
from deepspeed.runtime.gradients.ledger import GradientAccountingError
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.offload_states import get_state_devices
from deepspeed.runtime.zero.utils import ZeRORuntimeException
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_grad,
)
from unit.common import DistributedTest
from unit.graphs import (
    assert_gradients,
    expected_gradients,
    full_gradients,
    make_batch,
    make_model,
    mse,
    my_batch,
    run_micro_step,
    two_backwards,
    weights_of,
)

stages = pytest.mark.parametrize("stage", [1, 2, 3], ids=lambda stage: f"stage{stage}")
Make = Callable[[list[Any]], torch.optim.Optimizer]


def cpu_adam(parameters: list[Any]) -> torch.optim.Optimizer:
    return DeepSpeedCPUAdam(parameters, lr=0.02)


def make(stage: int, optimizer: Make = cpu_adam, offload: bool = True, zero: dict[str, Any] | None = None,
         groups: Callable[[nn.Module], list[Any]] | None = None, **config: Any) -> Any:  # fmt: skip
    model = make_model()
    settings = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 50,
            "sub_group_size": 40,
            **({"offload_optimizer": {"device": "cpu", "buffer_count": 4}} if offload else {}),
            **(zero or {}),
        },
        **config,
    }
    parameters = list(model.parameters()) if groups is None else groups(model)
    return deepspeed.initialize(model=model, optimizer=optimizer(parameters), config=settings)[0]


def train(engine: Any, window: int) -> None:
    batch = my_batch(engine, window, dtype=engine.optimizer.dtype)
    run_micro_step(engine, two_backwards, "engine.backward", batch)
    engine.step()


def same_weights(a: Any, b: Any, rtol: float = 1e-5) -> None:
    torch.testing.assert_close(weights_of(a.module), weights_of(b.module), rtol=rtol, atol=1e-7)


class TestSettings(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    @stages
    def test_each_parameter_group_keeps_its_settings(self, stage: int) -> None:
        """Two groups with different lr and decay, under optimizers of three kinds of state."""

        def groups(model: nn.Module) -> list[Any]:
            heads = list(model.heads.parameters())
            rest = [p for p in model.parameters() if all(p is not head for head in heads)]
            return [{"params": rest, "lr": 0.05}, {"params": heads, "lr": 0.0, "weight_decay": 0.0}]

        def lion(parameters: list[Any]) -> torch.optim.Optimizer:
            return DeepSpeedCPULion(parameters, lr=0.01)

        def adagrad(parameters: list[Any]) -> torch.optim.Optimizer:
            return torch.optim.Adagrad(parameters, lr=0.01)

        for optimizer in (cpu_adam, lion, adagrad):
            engines = [make(stage, optimizer, offload, groups=groups) for offload in (False, True)]
            before = weights_of(engines[1].module)
            for window in range(2):
                for engine in engines:
                    train(engine, window)
                same_weights(*engines)
            after = weights_of(engines[1].module)
            for name in before:
                assert torch.equal(before[name], after[name]) == name.startswith("heads"), name
            engines[1].optimizer.param_groups[1]["lr"] = 0.1
            train(engines[1], 2)
            assert not torch.equal(after["heads.1.weight"], weights_of(engines[1].module)["heads.1.weight"])

    def test_schedulers_and_hooks_see_one_step(self) -> None:
        for optimizer in (cpu_adam, lambda parameters: torch.optim.SGD(parameters, lr=0.1)):
            engine = make(2, optimizer)
            seen: list[Any] = []
            engine.basic_optimizer.register_step_post_hook(lambda *args, into=seen: into.append(1))
            scheduler = torch.optim.lr_scheduler.StepLR(engine.basic_optimizer, 1)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                train(engine, 0)
                scheduler.step()
            assert seen == [1] and len(engine.optimizer.reducer.layout.groups) > 1

    def test_other_client_optimizers_have_to_be_allowed(self) -> None:
        def sgd(parameters: list[Any]) -> torch.optim.Optimizer:
            return torch.optim.SGD(parameters, lr=0.1)

        with pytest.raises(ZeRORuntimeException, match="SGD.*DeepSpeedCPUAdam.*zero_force_ds_cpu_optimizer"):
            make(2, sgd, zero_force_ds_cpu_optimizer=True)
        train(make(2, cpu_adam, zero_force_ds_cpu_optimizer=True), 0)
        train(make(2, sgd, offload=False, zero_force_ds_cpu_optimizer=True), 0)


class TestGradients(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    @stages
    def test_unused_parameter_with_clipping(self, stage: int) -> None:
        """The norm is over what has gradients; the other head has zeros. Windows are clipped by other factors, which
        the moments remember, in the two ways in which optimizers step."""

        def torch_adam(parameters: list[Any]) -> torch.optim.Optimizer:
            return torch.optim.Adam(parameters, lr=0.02)

        engines = [make(stage, torch_adam, False, gradient_clipping=0.1), make(stage, gradient_clipping=0.1)]
        for window, size in enumerate((10.0, 1.0, 0.01)):
            for engine in engines:
                batch = my_batch(engine, window)
                engine.backward(size * mse(engine(batch.x), batch.target))
                engine.step()
            norms = [float(engine.get_global_grad_norm()) for engine in engines]
            assert (norms[0] > 0.1) == (size > 0.1) and norms[1] == pytest.approx(norms[0], rel=1e-6)
            same_weights(*engines, rtol=1e-4)

    @stages
    def test_windows_of_different_numbers_of_backwards(self, stage: int) -> None:
        """All and only the gradients since the step before; the caller owns the boundary."""
        engines = [make(stage, offload=offload, managed_gradient_accumulation=False) for offload in (False, True)]
        for window, backwards in enumerate((3, 5, 1)):
            heads = cycle(number % 2 for number in range(backwards))

            def losses(call: Any, module: nn.Module, batch: Any) -> list[torch.Tensor]:
                return [mse(call(batch.x, head=next(heads)), batch.target)]  # noqa: B023 - used in this window only

            def batches(rank: int) -> list[Any]:
                return [make_batch(rank, window, number) for number in range(backwards)]  # noqa: B023 - as above

            expected = {engine: expected_gradients(engine.module, losses, batches, 1) for engine in engines}
            for engine in engines:
                for number in range(backwards):
                    batch = my_batch(engine, window, number)
                    engine.backward(mse(engine(batch.x, head=number % 2), batch.target))
                assert_gradients(engine, expected[engine], torch.float32, f"window {window}")
                engine.step()
            same_weights(*engines)

    @stages
    def test_edited_gradients_count_in_norm_and_update(self, stage: int) -> None:
        engine, free = make(stage, lambda p: torch.optim.SGD(p, lr=1.0)), 0.5
        run_micro_step(engine, two_backwards, "engine.backward", my_batch(engine, 0))
        before = weights_of(engine.module)
        total = 0.0
        for parameter in engine.module.parameters():
            gradient = safe_get_full_grad(parameter)
            if stage == 3 and parameter is engine.module.core[0].weight:
                safe_set_local_grad(parameter, free * deepspeed.utils.safe_get_local_grad(parameter))
            else:
                safe_set_full_grad(parameter, free * gradient)
            total += float((free * gradient).double().square().sum())
        gradients = full_gradients(engine)
        engine.step()
        assert float(engine.get_global_grad_norm()) == pytest.approx(total**0.5, rel=1e-5)
        after = weights_of(engine.module)
        for name in before:
            torch.testing.assert_close(before[name] - after[name], gradients[name], rtol=1e-4, atol=1e-6)

    @stages
    def test_an_exception_in_backward(self, stage: int) -> None:
        """Before anything was reduced it leaves nothing behind; afterwards the window is refused."""

        class Fail(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                raise ArithmeticError("stop")

        engines = [make(stage, offload=offload) for offload in (False, True)]
        for engine in engines:
            batch = my_batch(engine, 0)
            with pytest.raises(ArithmeticError):
                engine.backward(mse(Fail.apply(engine(batch.x)), batch.target))
            train(engine, 1)
        same_weights(*engines)
        engine = engines[1]
        run_micro_step(engine, two_backwards, "engine.backward", my_batch(engine, 2))
        engine.optimizer.reducer.ledger.poison = "a test says so"
        with pytest.raises(GradientAccountingError):
            engine.step()
        for one in engines:
            one.zero_grad()
            train(one, 3)
        same_weights(*engines)

    def test_an_overflow_is_skipped(self) -> None:
        for stage in (2, 3):
            engines = [
                make(stage, offload=o, fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 1})
                for o in (False, True)
            ]
            for engine in engines:
                train(engine, 0)
                before = weights_of(engine.module)
                scale = engine.optimizer.loss_scale
                batch = my_batch(engine, 1, dtype=torch.float16)
                engine.backward(mse(engine(batch.x), batch.target) * float("inf" if dist.get_rank() else 1))
                engine.step()
                assert not engine.was_step_applied() and engine.optimizer.loss_scale == scale / 2
                torch.testing.assert_close(weights_of(engine.module), before, rtol=0, atol=0)
                assert engine.get_global_grad_norm() == float("inf")
                train(engine, 2)
            same_weights(*engines, rtol=2e-3)


class TestLooking(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    @stages
    def test_accessors(self, stage: int) -> None:
        engine = make(stage)
        train(engine, 0)
        for parameter in engine.module.parameters():
            master = safe_get_full_fp32_param(parameter)
            safe_set_full_fp32_param(parameter, master + 1)
            assert torch.equal(safe_get_full_fp32_param(parameter), master + 1)
            moment = safe_get_full_optimizer_state(parameter, "exp_avg")
            assert moment.count_nonzero() and moment.shape == master.shape
            safe_set_full_optimizer_state(parameter, 2 * moment, "exp_avg")
            assert torch.equal(safe_get_full_optimizer_state(parameter, "exp_avg"), 2 * moment)
            if stage == 3:
                assert safe_get_local_fp32_param(parameter).numel() == parameter.ds_tensor.numel()
                assert engine.optimizer.get_hp_param_device(parameter).type == "cpu"
            else:
                mapping = parameter._hp_mapping
                if mapping is not None:
                    assert mapping.use_offload
                    torch.testing.assert_close(mapping.hp_fragment, mapping.lp_fragment.float())
        assert engine.optimizer.offload_optimizer if stage == 3 else engine.optimizer.cpu_offload

    @stages
    def test_memory(self, stage: int) -> None:
        """fp32 master, two moments and the gradient: 16 bytes per parameter and rank, no more, of 16-bit weights."""
        engine = make(stage, zero={"reduce_bucket_size": 1000}, bf16={"enabled": True})
        for window in range(2):
            train(engine, window)
        owned = sum(group.shard_numel for group in engine.optimizer.reducer.layout.groups)
        found = memory_breakdown(engine)
        assert found.optimizer_state - 12 * owned == 4 * len(engine.optimizer.reducer.layout.groups)  # counts of steps
        assert found.gradients == 4 * owned
        largest = max(group.shard_numel for group in engine.optimizer.reducer.layout.groups)
        assert 0 < engine.optimizer.weights.staging.nbytes <= 2 * 2 * largest
        assert engine.optimizer.reducer.transport.landing.nbytes > 0

    def test_checkpoints_between_memory_and_host(self, tmpdir: Any) -> None:
        """Saved with and without offload, at one stage, and loaded the other way round at another."""
        for number, (offload, first, second) in enumerate(((True, 2, 3), (False, 3, 1), (True, 1, 1))):
            engine = make(first, offload=offload)
            for window in range(2):
                train(engine, window)
            folder = str(Path(tmpdir) / str(number))
            engine.save_checkpoint(folder)
            other = make(second, offload=not offload)
            other.load_checkpoint(folder)
            torch.testing.assert_close(weights_of(engine.module), weights_of(other.module), rtol=0, atol=0)
            for one in (engine, other):
                train(one, 5)
            mine, its = (
                {n: safe_get_full_fp32_param(p).clone() for n, p in one.module.named_parameters()}
                for one in (engine, other)
            )
            torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-6)


class TestOffloadStates(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    @stages
    def test_training_goes_on_as_if_nothing_had_happened(self, stage: int) -> None:
        engines = [make(stage, offload=False) for _ in range(2)]
        moved = engines[1]
        for window in range(3):
            train(engines[0], window)
            batch = my_batch(moved, window)
            run_micro_step(moved, two_backwards, "engine.backward", batch)
            moved.offload_states(pin_memory=window == 1, non_blocking=window == 2)
            for call, words in (
                (lambda x=batch.x: moved(x), "engine.forward.*lp_params"),
                (moved.step, "engine.step.*optim_states, hp_params, lp_params, lp_grads.*reload_states"),
                (lambda: full_gradients(moved), "lp_grads"),
                (lambda: safe_get_full_fp32_param(moved.module.heads[0].bias), "lp_params"),
            ):
                with pytest.raises(RuntimeError, match=words):
                    call()
            moved.offload_states()  # again: nothing left to move
            moved.reload_states()
            moved.step()
            same_weights(*engines, rtol=0)
        moved.offload_states(include=[OffloadStateTypeEnum.optim_states, "hp_params"])
        moved(batch.x)  # needs none of them
        for state in OffloadStateTypeEnum:
            assert get_state_devices(moved, state) <= {torch.device("cpu")}
        moved.reload_states()
        for engine in engines:
            train(engine, 4)
        same_weights(*engines, rtol=0)

    def test_what_cannot_be(self) -> None:
        engine = make(2, offload=False)
        for device in ("nvme", "none"):
            with pytest.raises(ValueError, match=device):
                engine.offload_states(device=device)
        with pytest.raises(ValueError, match="everything"):
            engine.offload_states(include=["everything"])
        with pytest.raises(AttributeError, match="stage 1, 2 or 3"):
            make(0, offload=False).offload_states()
