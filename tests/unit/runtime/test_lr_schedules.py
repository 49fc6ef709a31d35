# SPDX-License-Identifier: Apache-2.0
"""Schedules against their closed forms, written out here by hand for chosen steps."""

import argparse
import inspect
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed.runtime import lr_schedules as ls
from unit.common import DistributedTest
from unit.runtime import engine_cases as cases


def make_optimizer(*lrs: float, kind: type = torch.optim.SGD, **kwargs: Any) -> torch.optim.Optimizer:
    return kind([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs], lr=0.5, **kwargs)


def lrs_of(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def trace(schedule: Any, steps: int, group: int = 0) -> list[float]:
    """Learning rates that the updates 0 .. steps-1 use; checks on the way that all three views of it agree."""
    used = []
    for _ in range(steps):
        assert schedule.get_lr() == schedule.get_last_lr() == lrs_of(schedule.optimizer)
        used.append(schedule.get_last_lr()[group])
        schedule.step()
    return used


def build(name: str, optimizer: Any) -> Any:
    kwargs = {
        "LRRangeTest": {"lr_range_test_step_size": 3},
        "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 4, "decay_step_size": 2},
        "WarmupLR": {"warmup_num_steps": 4},
        "WarmupDecayLR": {"total_num_steps": 10, "warmup_num_steps": 4, "warmup_max_lr": [0.2, 0.4]},
        "WarmupCosineLR": {"total_num_steps": 10, "warmup_num_steps": 4},
    }[name]
    return getattr(ls, name)(optimizer, **kwargs)


class TestRangeTest:
    def test_grows_linearly(self) -> None:
        schedule = ls.LRRangeTest(make_optimizer(9.0), 0.01, lr_range_test_step_size=4, lr_range_test_step_rate=3.0)
        assert trace(schedule, 9) == pytest.approx([0.01 * (1 + 3.0 * i / 4) for i in range(9)])

    def test_staircase_per_group(self) -> None:
        optimizer = make_optimizer(9.0, 9.0)
        schedule = ls.LRRangeTest(optimizer, [0.01, 0.1], 2, 1.0, lr_range_test_staircase=True)
        assert lrs_of(optimizer) == pytest.approx([0.01, 0.1])
        assert trace(schedule, 5, group=1) == pytest.approx([0.1, 0.1, 0.2, 0.2, 0.3])


class TestOneCycle:
    def test_triangle_then_decay(self) -> None:
        optimizer = make_optimizer(9.0, momentum=0.5)
        schedule = ls.OneCycle(
            optimizer,
            cycle_min_lr=0.1,
            cycle_max_lr=0.5,
            cycle_first_step_size=4,
            cycle_second_step_size=2,
            decay_lr_rate=1.0,
            decay_step_size=2,
        )
        up, down = [0.1, 0.2, 0.3, 0.4, 0.5], [0.3, 0.1]
        decay = [0.1 / (1 + 0.5), 0.1 / (1 + 1.0), 0.1 / (1 + 1.5)]
        assert trace(schedule, 10) == pytest.approx(up + down + decay)

    def test_momentum_runs_against_the_rate(self) -> None:
        optimizer = make_optimizer(9.0, 9.0, kind=torch.optim.Adam, betas=(0.5, 0.99))
        schedule = ls.OneCycle(optimizer, 0.1, 1.0, cycle_first_step_size=2, decay_step_size=1, decay_mom_rate=0.1)
        seen = []
        for _ in range(6):
            assert [group["betas"] for group in optimizer.param_groups] == schedule.get_mom()
            seen.append(optimizer.param_groups[1]["betas"][0])
            schedule.step()
        assert seen == pytest.approx([0.9, 0.85, 0.8, 0.85, 0.9, 0.9 * 1.1])
        assert optimizer.param_groups[0]["betas"][1] == 0.99

    def test_stairs(self) -> None:
        schedule = ls.OneCycle(
            make_optimizer(9.0, momentum=0.1), 0.0, 1.0, cycle_first_step_size=4, cycle_first_stair_count=2
        )
        assert trace(schedule, 9) == pytest.approx([0, 0, 0.5, 0.5, 1.0, 1.0, 0.5, 0.5, 0])

    def test_momentum_left_alone(self) -> None:
        optimizer = make_optimizer(9.0, momentum=0.3)
        schedule = ls.OneCycle(optimizer, 0.1, 1.0, cycle_momentum=False)
        schedule.step()
        assert schedule.get_mom() is None and optimizer.param_groups[0]["momentum"] == 0.3

    def test_optimizer_without_momentum(self) -> None:
        schedule = ls.OneCycle(make_optimizer(9.0, kind=torch.optim.Adagrad), 0.1, 1.0)
        assert schedule.get_mom() is None


class TestWarmup:
    def test_linear(self) -> None:
        schedule = ls.WarmupLR(make_optimizer(9.0), 0.1, 0.5, warmup_num_steps=4, warmup_type="linear")
        assert trace(schedule, 7) == pytest.approx([0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.5])

    def test_log(self) -> None:
        schedule = ls.WarmupLR(make_optimizer(9.0), 0.0, 1.0, warmup_num_steps=8)
        expected = [0.0] + [math.log(i) / math.log(8) for i in range(1, 9)] + [1.0, 1.0]
        assert trace(schedule, 11) == pytest.approx(expected)

    def test_maximum_is_each_groups_own_rate_by_default(self) -> None:
        optimizer = make_optimizer(1e-5, 3e-4)
        schedule = ls.WarmupLR(optimizer, warmup_num_steps=5, warmup_type="linear")
        assert lrs_of(optimizer) == [0.0, 0.0]
        for _ in range(6):
            schedule.step()
        assert lrs_of(optimizer) == pytest.approx([1e-5, 3e-4])

    @pytest.mark.parametrize("warmup_type", ["log", "linear"])
    def test_one_step_of_warmup_works(self, warmup_type: str) -> None:
        schedule = ls.WarmupLR(make_optimizer(0.2), warmup_num_steps=1, warmup_type=warmup_type)
        assert schedule.warmup_num_steps == 2
        assert trace(schedule, 4)[3] == 0.2

    @pytest.mark.parametrize("name", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
    @pytest.mark.parametrize("steps", [0, -3, 2.5, "10", None, True])
    def test_steps_must_be_a_positive_int(self, name: str, steps: object) -> None:
        kwargs = {} if name == "WarmupLR" else {"total_num_steps": 10}
        with pytest.raises(ValueError, match="warmup_num_steps"):
            getattr(ls, name)(make_optimizer(0.1), warmup_num_steps=steps, **kwargs)

    def test_unknown_type(self) -> None:
        with pytest.raises(ValueError, match="'cubic'"):
            ls.WarmupLR(make_optimizer(0.1), warmup_type="cubic")

    def test_decay(self) -> None:
        schedule = ls.WarmupDecayLR(make_optimizer(9.0), 6, 0.1, 0.5, warmup_num_steps=2, warmup_type="linear")
        assert trace(schedule, 9) == pytest.approx([0.1, 0.1, 0.3, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1])

    def test_decay_without_maximum_uses_each_groups_own_rate(self) -> None:
        schedule = ls.WarmupDecayLR(make_optimizer(0.2, 0.4), 8, warmup_max_lr=None, warmup_num_steps=2)
        schedule.step(1)
        assert schedule.get_last_lr() == pytest.approx([0.2, 0.4])

    def test_cosine(self) -> None:
        schedule = ls.WarmupCosineLR(
            make_optimizer(2.0),
            total_num_steps=6,
            warmup_min_ratio=0.2,
            warmup_num_steps=2,
            cos_min_ratio=0.1,
            warmup_type="linear",
        )
        cosine = [0.1 + 0.9 * (1 + math.cos(math.pi * i / 4)) / 2 for i in range(5)]
        assert trace(schedule, 9) == pytest.approx([2 * r for r in [0.2, 0.2, 0.6, *cosine[1:], 0.1, 0.1]])

    def test_cosine_has_one_value_per_group_from_the_start(self) -> None:
        optimizer = make_optimizer(1.0, 3.0)
        schedule = ls.WarmupCosineLR(optimizer, 10, warmup_min_ratio=0.5, warmup_num_steps=2)
        assert schedule.get_lr() == lrs_of(optimizer) == pytest.approx([0.5, 1.5])


@pytest.mark.parametrize("name", ls.VALID_LR_SCHEDULES)
class TestEverySchedule:
    def test_name_is_the_class_name(self, name: str) -> None:
        assert type(build(name, make_optimizer(0.1, 0.2, momentum=0.9))).__name__ in ls.VALID_LR_SCHEDULES

    def test_resumes_where_it_was(self, name: str) -> None:
        straight = build(name, make_optimizer(0.1, 0.2, momentum=0.9))
        for _ in range(6):
            straight.step()
        saved = straight.state_dict()
        assert saved == {"last_batch_iteration": 5}

        resumed = build(name, make_optimizer(0.1, 0.2, momentum=0.9))
        resumed.load_state_dict(saved)
        assert lrs_of(resumed.optimizer) == straight.get_last_lr()
        assert trace(resumed, 5) == trace(straight, 5)

    def test_step_to_a_given_iteration(self, name: str) -> None:
        one_by_one = build(name, make_optimizer(0.1, 0.2, momentum=0.9))
        for _ in range(3):
            one_by_one.step()
        at_once = build(name, make_optimizer(0.1, 0.2, momentum=0.9))
        at_once.step(2)
        assert at_once.get_last_lr() == one_by_one.get_last_lr()

    def test_wrapped_optimizer(self, name: str) -> None:
        optimizer = make_optimizer(0.1, 0.2, momentum=0.9)
        schedule = build(name, SimpleNamespace(optimizer=optimizer))
        schedule.step()
        assert schedule.optimizer is optimizer and lrs_of(optimizer) == schedule.get_last_lr()

    def test_no_optimizer(self, name: str) -> None:
        with pytest.raises(TypeError, match="SimpleNamespace"):
            build(name, SimpleNamespace())


def test_resumed_optimizer_keeps_the_full_rate() -> None:
    optimizer = make_optimizer(0.8)
    first = ls.WarmupLR(optimizer, warmup_num_steps=4, warmup_type="linear")
    first.step()
    second = ls.WarmupLR(optimizer, warmup_num_steps=4, warmup_type="linear", last_batch_iteration=1)
    assert second.get_last_lr() == pytest.approx([0.2])


# Worked out by hand from the definitions: learning rate of each of two groups before the updates 0, 1, 2, ...
BY_HAND = [
    (
        "LRRangeTest",
        {"lr_range_test_min_lr": [0.1, 1.0], "lr_range_test_step_size": 2, "lr_range_test_step_rate": 0.5},
        [(0.1, 1.0), (0.125, 1.25), (0.15, 1.5), (0.175, 1.75), (0.2, 2.0)],
    ),
    (
        "LRRangeTest",
        {
            "lr_range_test_min_lr": [0.1, 1.0],
            "lr_range_test_step_size": 2,
            "lr_range_test_step_rate": 0.5,
            "lr_range_test_staircase": True,
        },
        [(0.1, 1.0), (0.1, 1.0), (0.15, 1.5), (0.15, 1.5), (0.2, 2.0)],
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": [0.0, 1.0],
            "cycle_max_lr": [1.0, 3.0],
            "cycle_first_step_size": 4,
            "cycle_second_step_size": 2,
            "decay_step_size": 3,
            "decay_lr_rate": 2.0,
        },
        [(0, 1), (0.25, 1.5), (0.5, 2), (0.75, 2.5), (1, 3), (0.5, 2), (0, 1), (0, 0.6), (0, 3 / 7), (0, 1 / 3)],
    ),
    (
        "WarmupLR",
        {"warmup_min_lr": [0.0, 1.0], "warmup_max_lr": [1.0, 2.0], "warmup_num_steps": 4},
        [(0, 1), (0, 1), (0.5, 1.5), (0.7924812503605781, 1.7924812503605781), (1, 2), (1, 2)],
    ),
    ("WarmupLR", {"warmup_num_steps": 1}, [(0, 0), (0, 0), (0.3, 3.0), (0.3, 3.0)]),
    ("WarmupLR", {"warmup_num_steps": 1, "warmup_type": "linear"}, [(0, 0), (0, 0), (0.15, 1.5), (0.3, 3.0)]),
    (
        "WarmupDecayLR",
        {
            "total_num_steps": 6,
            "warmup_min_lr": [0.0, 0.1],
            "warmup_max_lr": [0.4, 0.5],
            "warmup_num_steps": 2,
            "warmup_type": "linear",
        },
        [(0, 0.1), (0, 0.1), (0.2, 0.3), (0.4, 0.5), (0.3, 0.4), (0.2, 0.3), (0.1, 0.2), (0, 0.1)],
    ),
    (
        "WarmupCosineLR",
        {
            "total_num_steps": 6,
            "warmup_min_ratio": 0.5,
            "warmup_num_steps": 2,
            "cos_min_ratio": 0.2,
            "warmup_type": "linear",
        },
        [
            (0.15, 1.5),
            (0.15, 1.5),
            (0.225, 2.25),
            (0.3 * 0.882842712474619, 3 * 0.882842712474619),
            (0.18, 1.8),
            (0.3 * 0.317157287525381, 3 * 0.317157287525381),
            (0.06, 0.6),
            (0.06, 0.6),
        ],
    ),
]


@pytest.mark.parametrize("name, arguments, expected", BY_HAND)
def test_values_worked_out_by_hand(name: str, arguments: dict[str, Any], expected: list[tuple[float, float]]) -> None:
    optimizer = make_optimizer(0.3, 3.0, momentum=0.9)
    schedule = getattr(ls, name)(optimizer, **arguments)
    for lrs in expected:
        assert lrs_of(optimizer) == pytest.approx(lrs, abs=1e-15)
        schedule.step()


def test_momentum_worked_out_by_hand() -> None:
    optimizer = make_optimizer(0.3, 3.0, momentum=0.1)
    schedule = ls.OneCycle(
        optimizer,
        0.1,
        1.0,
        cycle_first_step_size=2,
        cycle_second_step_size=4,
        cycle_min_mom=[0.8, 0.5],
        cycle_max_mom=[0.9, 0.7],
        decay_step_size=2,
        decay_mom_rate=0.1,
    )
    expected = [(0.9, 0.7), (0.85, 0.6), (0.8, 0.5), (0.825, 0.55), (0.85, 0.6), (0.875, 0.65), (0.9, 0.7)]
    expected += [(0.945, 0.735), (0.99, 0.77)]
    for moms in expected:
        assert [group["momentum"] for group in optimizer.param_groups] == pytest.approx(moms)
        schedule.step()


@pytest.mark.parametrize(
    "name, arguments, culprit",
    [
        ("LRRangeTest", {"lr_range_test_step_size": 0}, "lr_range_test_step_size"),
        ("LRRangeTest", {"lr_range_test_min_lr": "low"}, "lr_range_test_min_lr"),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": [0.1, "x"]}, "cycle_max_lr"),
        (
            "OneCycle",
            {"cycle_min_lr": 0.1, "cycle_max_lr": 1, "cycle_second_step_size": -1},
            "cycle_second_step_size",
        ),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "decay_step_size": "2"}, "decay_step_size"),
        ("WarmupLR", {"warmup_max_lr": True}, "warmup_max_lr"),
        ("WarmupLR", {"warmup_min_lr": float("nan")}, "warmup_min_lr"),
        ("WarmupDecayLR", {"total_num_steps": 0}, "total_num_steps"),
        ("WarmupDecayLR", {"total_num_steps": None}, "total_num_steps"),
        ("WarmupCosineLR", {"total_num_steps": "100"}, "total_num_steps"),
    ],
)
def test_a_wrong_value_is_refused_by_name(name: str, arguments: dict[str, Any], culprit: str) -> None:
    with pytest.raises(ValueError, match=rf"{culprit}.*got"):
        getattr(ls, name)(make_optimizer(0.1, 0.2, momentum=0.9), **arguments)


# From the config, in an engine.


def scheduler(name: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": name, "params": params}}


class TestScheduleOfTheConfig(DistributedTest):
    world_size = 1

    def test_each_update_uses_the_rate_of_the_schedule(self) -> None:
        params = {"warmup_max_lr": 0.4, "warmup_num_steps": 4, "warmup_type": "linear", "warmup_min_lr": "auto"}
        for stage in (0, 2):
            engine = cases.make_engine(cases.make_config(stage, gas=2, **scheduler("WarmupLR", **params)))
            used = []
            for batch in cases.batches_of(0, 12):
                before = [p.clone() for p in engine.module.parameters()]
                engine.backward(engine(*batch))
                used.append(engine.get_lr()[0])
                engine.step()
                moved = any(not torch.equal(a, b) for a, b in zip(before, engine.module.parameters(), strict=True))
                assert moved == (engine.was_step_applied() and used[-1] > 0)
            assert used == pytest.approx([0.0, 0.0, 0.0, 0.0, 0.1, 0.1, 0.2, 0.2, 0.3, 0.3, 0.4, 0.4])

    def test_without_a_maximum_each_group_keeps_its_own_rate(self) -> None:
        def two_groups(parameters: Any) -> torch.optim.Optimizer:
            first, *rest = parameters
            return torch.optim.AdamW([{"params": [first], "lr": 1e-5}, {"params": rest, "lr": 3e-4}])

        config = cases.make_config(1, **scheduler("WarmupLR", warmup_num_steps=2))
        engine = cases.make_engine(config, optimizer=two_groups)
        assert engine.get_lr() == [0.0, 0.0]
        for batch in cases.batches_of(0, 3):
            engine.backward(engine(*batch))
            engine.step()
        assert engine.get_lr() == pytest.approx([1e-5, 3e-4])

    def test_a_skipped_step_does_not_move_the_schedule(self) -> None:
        config = cases.make_config(2, **scheduler("LRRangeTest", lr_range_test_step_size=1, lr_range_test_min_lr=0.1))
        engine = cases.make_engine(config)
        for broken, expected in ((False, 0.2), (True, 0.2), (False, 0.3)):
            x, y, uses = cases.batches_of(0, 1)[0]
            engine.backward(engine(x * (float("nan") if broken else 1.0), y, uses))
            engine.step()
            assert engine.was_step_applied() != broken
            assert engine.get_lr() == pytest.approx([expected])

    def test_a_schedule_resumes_in_a_new_engine(self) -> None:
        config = cases.make_config(1, **scheduler("WarmupCosineLR", total_num_steps=9, warmup_num_steps=3))
        straight = cases.make_engine(config)
        for batch in cases.batches_of(0, 5):
            straight.backward(straight(*batch))
            straight.step()
        resumed = cases.make_engine(config)
        resumed.lr_scheduler.load_state_dict(straight.lr_scheduler.state_dict())
        assert resumed.get_lr() == straight.get_lr() != [0.1]

    def test_wrong_arguments_are_refused_by_name(self) -> None:
        for name, params, words in (
            ("WarmupLR", {"warmup_num_step": 3}, "scheduler.params.warmup_num_step'.*did you mean 'warmup_num_steps'"),
            ("WarmupLR", {"nonsense": 3}, "scheduler.params.nonsense'.*it takes warmup_min_lr, "),
            ("WarmupDecayLR", {"total_num_steps": "auto"}, "WarmupDecayLR needs scheduler.params.total_num_steps"),
            ("WarmupLR", {"warmup_num_steps": 0}, "warmup_num_steps must be a positive integer, got 0"),
            ("StepLR", {"gamma": 0.5}, "StepLR needs scheduler.params.step_size"),
            ("NoSuchLR", {}, "NoSuchLR"),
        ):
            with pytest.raises((TypeError, ValueError, AssertionError), match=words):
                cases.make_engine(cases.make_config(1, **scheduler(name, **params)))

    def test_schedules_of_torch(self) -> None:
        engine = cases.make_engine(cases.make_config(1, **scheduler("StepLR", step_size=1, gamma=0.5)))
        engine.backward(engine(*cases.batches_of(0, 1)[0]))
        engine.step()
        assert engine.get_lr() == [0.05]


def test_list_of_the_wrong_length() -> None:
    with pytest.raises(ValueError, match="3 values for 2 parameter groups"):
        ls.WarmupLR(make_optimizer(0.1, 0.2), warmup_max_lr=[1.0, 2.0, 3.0])


def test_tensor_learning_rate_is_filled_in_place() -> None:
    lr = torch.tensor(0.5)
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    schedule = ls.WarmupLR(optimizer, warmup_num_steps=2, warmup_type="linear")
    schedule.step()
    assert optimizer.param_groups[0]["lr"] is lr and float(lr) == 0.0


@pytest.mark.parametrize("name, lr", list(zip(ls.VALID_LR_SCHEDULES, [0.001, 0.1, 0.001, 0.001, None], strict=True)))
def test_tuning_arguments_make_a_section_that_builds(name: str, lr: float | None) -> None:
    parser = ls.add_tuning_arguments(argparse.ArgumentParser())
    section, reason = ls.get_config_from_args(parser.parse_args(["--lr_schedule", name, "--total_num_steps", "20"]))
    assert reason is None and section["type"] == name
    assert section["params"].get("total_num_steps") == (20 if "Decay" in name or "Cosine" in name else None)
    getattr(ls, name)(make_optimizer(0.1, momentum=0.9), **section["params"]).step()
    assert ls.get_lr_from_config(section)[0] == lr


@pytest.mark.parametrize("name", ls.VALID_LR_SCHEDULES)
def test_every_argument_of_a_schedule_has_an_option_that_reaches_it(name: str) -> None:
    parser = ls.add_tuning_arguments(argparse.ArgumentParser())
    _, *parameters = inspect.signature(getattr(ls, name)).parameters
    parameters.remove("last_batch_iteration")
    for parameter in parameters:
        is_switch = parameter in ("lr_range_test_staircase", "cycle_momentum")
        value = "linear" if parameter == "warmup_type" else 7
        given = [f"--{parameter}"] if is_switch else [f"--{parameter}", str(value)]
        section, _ = ls.get_config_from_args(parser.parse_args(["--lr_schedule", name, *given]))
        assert section["params"][parameter] == (True if is_switch else value), parameter


def test_section_without_schedule_gives_the_reason() -> None:
    parser = ls.add_tuning_arguments(argparse.ArgumentParser())
    assert ls.get_config_from_args(parser.parse_args([]))[0] is None
    section, reason = ls.get_config_from_args(parser.parse_args(["--lr_schedule", "Steep"]))
    assert section is None and "'Steep'" in reason
