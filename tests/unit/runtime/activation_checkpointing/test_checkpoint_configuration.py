# SPDX-License-Identifier: Apache-2.0
"""Who sets what: configure(), config sections, engines; and the random states of model-parallel ranks."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.activation_checkpointing.random_states import RandomStates
from unit.common import DistributedTest
from unit.runtime.activation_checkpointing.settings import all_ranks_share_one_model, unconfigured

ck = deepspeed.checkpointing

SECTION = {
    "partition_activations": True,
    "number_checkpoints": 6,
    "contiguous_memory_optimization": True,
    "synchronize_checkpoint_boundary": True,
    "cpu_checkpointing": True,
    "profile": True,
}


def settings() -> tuple[Any, ...]:
    return (
        ck.PARTITION_ACTIVATIONS,
        ck.num_layers,
        ck.CONTIGUOUS_CHECKPOINTING,
        ck.SYNCHRONIZE,
        ck.CPU_CHECKPOINT,
        ck.PROFILE_TIME,
    )


def test_nothing_is_set_at_import() -> None:
    assert ck is checkpointing and not ck.is_configured() and not ck.deepspeed_checkpointing_enabled
    assert settings() == (False, None, False, False, False, False)
    assert (ck.mpu, ck.mp_rank, ck.mp_size, ck.mp_group, ck.timers) == (None, 0, 1, None, None)
    assert (ck.contiguous_data_buffers, ck.data_offsets, ck.contiguous_size_buffers, ck.size_offsets) == ([],) * 4
    with pytest.raises(AttributeError, match="no_such_name"):
        ck.no_such_name  # noqa: B018


@pytest.mark.parametrize("form", ["dict", "path", "object"])
def test_section_of_a_config(form: str, tmp_path: Path) -> None:
    config: Any = {"train_batch_size": 1, "activation_checkpointing": SECTION}
    if form == "path":
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        config = str(path)
    elif form == "object":
        config = deepspeed.DeepSpeedConfig(config)
    ck.configure(None, deepspeed_config=config)
    assert ck.is_configured() and settings() == (True, 6, True, True, True, True)


def test_arguments_win_over_the_config_and_none_leaves_what_is_set() -> None:
    ck.configure(
        None,
        {"activation_checkpointing": SECTION},
        partition_activations=False,
        num_checkpoints=2,
        contiguous_checkpointing=False,
        synchronize=False,
        checkpoint_in_cpu=False,
        profile=False,
    )
    assert settings() == (False, 2, False, False, False, False)
    ck.configure(mpu_=None, partition_activations=True, contiguous_checkpointing=True)
    assert settings() == (True, 2, True, False, False, False)
    ck.partition_activations_in_checkpoint(False)
    ck.set_num_layers(9)
    assert settings() == (False, 9, True, False, False, False)
    ck.configure(None, {"activation_checkpointing": {"cpu_checkpointing": True}})
    assert settings() == (False, 9, False, False, True, False), "a config names everything but a number it lacks"


@pytest.mark.parametrize(("count", "error"), [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)])
def test_number_of_checkpoints_is_checked(count: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=repr(count)):
        ck.configure(None, num_checkpoints=count)
    with pytest.raises(error, match=repr(count)):
        ck.set_num_layers(count)
    assert ck.num_layers is None and not ck.is_configured()


def test_profile_logs_each_outermost_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    ck.configure(None, profile=True, synchronize=True)
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    deepspeed.logger.addHandler(handler)
    level = deepspeed.logger.level
    deepspeed.logger.setLevel(logging.INFO)
    try:
        layer, x = nn.Linear(3, 3), torch.ones(2, 3, requires_grad=True)
        ck.checkpoint(lambda a: ck.checkpoint(layer, layer(a)), x).sum().backward()
        assert [line.split("|")[1].split(":")[0].strip() for line in logged] == [
            "checkpoint_forward",
            "checkpoint_backward",
        ]
        with pytest.raises(ZeroDivisionError):
            ck.checkpoint(lambda a: a / (1 // 0), x)
        ck.checkpoint(layer, x)
        assert len(logged) == 4, "a function that raised leaves no timer running"
    finally:
        deepspeed.logger.removeHandler(handler)
        deepspeed.logger.setLevel(level)


def test_synchronizes_at_boundaries(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(deepspeed.get_accelerator(), "synchronize", lambda: calls.append("sync"), raising=False)
    layer, x = nn.Linear(3, 3), torch.ones(2, 3, requires_grad=True)
    ck.checkpoint(layer, x).sum().backward()
    assert not calls
    ck.configure(None, synchronize=True)
    ck.checkpoint(lambda a: (calls.append("run"), layer(a))[1], x).sum().backward()
    assert calls == ["sync", "run", "sync", "sync", "run", "sync"]


def test_tracker() -> None:
    tracker = ck.get_cuda_rng_tracker()
    assert tracker is ck.get_cuda_rng_tracker()
    torch.manual_seed(3)
    default = torch.get_rng_state()
    tracker.add("a", 1)
    tracker.add("b", 2)
    assert torch.equal(torch.get_rng_state(), default), "add() leaves the default state alone"
    with tracker.fork("a"):
        first = torch.rand(3)
    with tracker.fork("a"):
        second = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), default)
    torch.manual_seed(1)
    assert torch.equal(torch.cat([first, second]), torch.cat([torch.rand(3), torch.rand(3)]))
    states = tracker.get_states()
    with tracker.fork("b"):
        drawn = torch.rand(2)
    tracker.set_states(states)
    with pytest.raises(ArithmeticError), tracker.fork("b"):
        assert torch.equal(torch.rand(2), drawn)
        raise ArithmeticError
    with pytest.raises(ValueError, match="'a' exists"):
        tracker.add("a", 5)
    with pytest.raises(ValueError, match="seed 1 "):
        tracker.add("c", 1)
    with pytest.raises(KeyError, match="'c'"), tracker.fork("c"):
        pass
    tracker.reset()
    assert tracker.get_states() == {}


def test_random_states_may_be_entered_within_themselves() -> None:
    torch.manual_seed(4)
    states = RandomStates([], ck.get_cuda_rng_tracker())
    first = torch.rand(2)
    outside = torch.get_rng_state()
    with states:
        assert torch.equal(torch.rand(2), first)
        inside = torch.get_rng_state()
        with states:
            assert torch.equal(torch.rand(2), first)
        assert torch.equal(torch.get_rng_state(), inside)
    assert torch.equal(torch.get_rng_state(), outside)


def test_small_pieces() -> None:
    x, y = torch.ones(2, requires_grad=True) * 1, torch.zeros(1)
    tensors, others, flags = ck.extract_tensors([x, 3, y, None])
    assert (tensors, others, flags) == ([x, y], [3, None], (True, False, True, False))
    assert ck.merge_tensors(tensors, others, flags) == (x, 3, y, None)
    detached = ck.detach_variable((x, "s", y))
    assert detached[0].is_leaf and detached[0].requires_grad and not detached[2].requires_grad and detached[1] == "s"


class TestEngines(DistributedTest):
    world_size = 2

    def engine(self, config: dict[str, Any], mpu: Any = None) -> Any:
        model = nn.Linear(3, 3)
        return deepspeed.initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            config={"train_micro_batch_size_per_gpu": 1, **config},
            mpu=mpu,
        )[0]

    def test_an_engine_configures_what_its_config_asks_for(self) -> None:
        with unconfigured():
            unit = all_ranks_share_one_model()
            self.engine({}, unit)
            assert not ck.is_configured()
            ck.configure(None, checkpoint_in_cpu=True)
            self.engine({"activation_checkpointing": {"partition_activations": False}}, unit)
            assert ck.CPU_CHECKPOINT, "a section without a wish leaves what the user configured"
            self.engine({"activation_checkpointing": SECTION}, unit)
            assert settings() == (True, 6, True, True, True, True)
            assert (ck.mpu, ck.mp_size, ck.mp_rank) == (unit, 2, torch.distributed.get_rank())

    def test_model_parallel_unit_that_contradicts_itself(self) -> None:
        unit = all_ranks_share_one_model()
        unit.get_tensor_model_parallel_world_size = lambda: 3  # type: ignore[method-assign]
        with unconfigured():
            with pytest.raises(ValueError, match="3 ranks share a model.*group has 2"):
                ck.configure(unit, partition_activations=True)
            assert not ck.is_configured() and not ck.PARTITION_ACTIVATIONS

    def test_random_states_of_ranks_that_share_a_model(self) -> None:
        with unconfigured():
            ck.configure(all_ranks_share_one_model())
            for _ in range(2):
                ck.model_parallel_cuda_manual_seed(17)
                self.check_alike(torch.rand(4), True)
                with ck.get_cuda_rng_tracker().fork():
                    first = torch.rand(4)
                self.check_alike(first, False)
                self.check_alike(torch.rand(4), True)
            default = torch.get_rng_state()
            ck.model_parallel_reconfigure_tp_seed(17)
            assert torch.equal(torch.get_rng_state(), default)
            with ck.get_cuda_rng_tracker().fork():
                assert torch.equal(torch.rand(4), first)

    def check_alike(self, mine: torch.Tensor, alike: bool) -> None:
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        torch.distributed.all_gather(everyone, mine)
        assert torch.equal(everyone[0], everyone[1]) is alike
