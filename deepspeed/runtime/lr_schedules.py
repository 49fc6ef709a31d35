# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedules that the ``scheduler`` section of the configuration can name.

Every schedule is a closed form of one integer, the number of optimizer steps taken so far::

    steps_taken = last_batch_iteration + 1

so a schedule can be asked for any step, and resuming needs nothing but ``last_batch_iteration``. The value for
``steps_taken == 0`` is written into the optimizer when the schedule is constructed: the first update already uses it.
Values are per parameter group.

Sources: L. N. Smith, "Cyclical Learning Rates for Training Neural Networks" (2017) for the range test and the
triangular cycle; L. N. Smith, "A disciplined approach to neural network hyper-parameters: Part 1" (2018) for one cycle
followed by decay, with momentum running against the learning rate; P. Goyal et al., "Accurate, Large Minibatch SGD"
(2017) for linear warm-up; I. Loshchilov and F. Hutter, "SGDR" (2017) for the cosine.
"""

import argparse
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from deepspeed.utils.logging import logger

LR_SCHEDULE = "lr_schedule"
LR_RANGE_TEST = "LRRangeTest"
ONE_CYCLE = "OneCycle"
WARMUP_LR = "WarmupLR"
WARMUP_DECAY_LR = "WarmupDecayLR"
WARMUP_COSINE_LR = "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]

LR_RANGE_TEST_MIN_LR = "lr_range_test_min_lr"
LR_RANGE_TEST_STEP_RATE = "lr_range_test_step_rate"
LR_RANGE_TEST_STEP_SIZE = "lr_range_test_step_size"
LR_RANGE_TEST_STAIRCASE = "lr_range_test_staircase"

EDGE_VALUE = "edge_value"
MID_VALUE = "mid_value"

CYCLE_FIRST_STEP_SIZE = "cycle_first_step_size"
CYCLE_FIRST_STAIR_COUNT = "cycle_first_stair_count"
CYCLE_SECOND_STEP_SIZE = "cycle_second_step_size"
CYCLE_SECOND_STAIR_COUNT = "cycle_second_stair_count"
DECAY_STEP_SIZE = "decay_step_size"

CYCLE_MIN_LR = "cycle_min_lr"
CYCLE_MAX_LR = "cycle_max_lr"
DECAY_LR_RATE = "decay_lr_rate"

CYCLE_MIN_MOM = "cycle_min_mom"
CYCLE_MAX_MOM = "cycle_max_mom"
DECAY_MOM_RATE = "decay_mom_rate"

WARMUP_MIN_LR = "warmup_min_lr"
WARMUP_MAX_LR = "warmup_max_lr"
WARMUP_NUM_STEPS = "warmup_num_steps"
WARMUP_TYPE = "warmup_type"
WARMUP_LOG_RATE = "log"
WARMUP_LINEAR_RATE = "linear"

WARMUP_MIN_RATIO = "warmup_min_ratio"
COS_MIN_RATIO = "cos_min_ratio"
TOTAL_NUM_STEPS = "total_num_steps"

# One learning rate for all parameter groups, or one for each.
PerGroup = float | Sequence[float]


def get_torch_optimizer(optimizer: Any) -> Optimizer:
    """Return ``optimizer`` itself if it is a torch optimizer, else the one that it wraps as ``optimizer.optimizer``.

    Raises:
        TypeError: neither is a ``torch.optim.Optimizer``.
    """
    if isinstance(optimizer, Optimizer):
        return optimizer
    wrapped = getattr(optimizer, "optimizer", None)
    if isinstance(wrapped, Optimizer):
        return wrapped
    raise TypeError(
        f"a learning-rate schedule needs a torch.optim.Optimizer or a wrapper with one as .optimizer, "
        f"got {type(optimizer).__name__}"
    )


def update_lr(param_groups: list[dict[str, Any]], lrs: Sequence[float]) -> list[float]:
    """Write ``lrs[i]`` into ``param_groups[i]["lr"]`` and return the values written, one per group.

    A learning rate held as a tensor (capturable optimizers) is filled in place: graphs that captured it see the change.

    Raises:
        ValueError: the two lengths differ.
    """
    if len(param_groups) != len(lrs):
        raise ValueError(f"{len(lrs)} learning rates for {len(param_groups)} parameter groups")
    for group, lr in zip(param_groups, lrs, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
    return [float(lr) for lr in lrs]


class _Schedule:
    """What the schedules share: counting, writing learning rates, saving the count.

    A subclass validates its arguments, then calls ``_start``; it gives the values in ``get_lr``.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = get_torch_optimizer(optimizer)
        self.last_batch_iteration = -1
        self._last_lr: list[float] = []

    @property
    def _steps_taken(self) -> int:
        return self.last_batch_iteration + 1

    def _start(self, last_batch_iteration: int) -> None:
        if last_batch_iteration < -1:
            raise ValueError(f"last_batch_iteration must be -1 (start) or more, got {last_batch_iteration}")
        self.last_batch_iteration = last_batch_iteration
        self._apply()

    def _apply(self) -> None:
        self._last_lr = update_lr(self.optimizer.param_groups, self.get_lr())

    def get_lr(self) -> list[float]:
        """Learning rate of each parameter group for the current count."""
        raise NotImplementedError(f"{type(self).__name__} does not define get_lr")

    def get_last_lr(self) -> list[float]:
        """Learning rate last written into each parameter group; available from construction on."""
        return list(self._last_lr)

    def step(self, batch_iteration: int | None = None) -> None:
        """Move to the next optimizer step, or behind the 0-based step ``batch_iteration`` where it is given."""
        self.last_batch_iteration = self.last_batch_iteration + 1 if batch_iteration is None else batch_iteration
        self._apply()

    def state_dict(self) -> dict[str, int]:
        """``{"last_batch_iteration": int}``: everything else is in the constructor's arguments."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: dict[str, int]) -> None:
        """Restore the count and write the learning rates that belong to it."""
        self.last_batch_iteration = sd["last_batch_iteration"]
        self._apply()

    def _per_group(self, name: str, value: PerGroup) -> list[float]:
        """One float per parameter group from a number or a list of them."""
        num_groups = len(self.optimizer.param_groups)
        values = list(value) if isinstance(value, (list, tuple)) else [value] * num_groups
        if len(values) != num_groups:
            raise ValueError(f"{name}: {len(values)} values for {num_groups} parameter groups")
        for number in values:
            if not _is_number(number):
                raise ValueError(f"{name} must be a number or one per parameter group, got {value!r}")
        return [float(number) for number in values]

    def _initial_lrs(self, last_batch_iteration: int) -> list[float]:
        """The optimizer's own learning rate per group.

        A schedule built for a resumed optimizer finds ``lr`` somewhere along the old schedule; what it started from is
        then under ``initial_lr``, torch's name for it, which is kept up to date here.
        """
        for group in self.optimizer.param_groups:
            if last_batch_iteration == -1:
                group["initial_lr"] = float(group["lr"])
            else:
                group.setdefault("initial_lr", float(group["lr"]))
        return [group["initial_lr"] for group in self.optimizer.param_groups]


class LRRangeTest(_Schedule):
    """Learning-rate range test: raise the rate from a low value until training diverges, to see what a model stands.

    ``lr = min_lr * (1 + step_rate * t)`` with ``t = steps_taken / step_size``, rounded down where ``staircase`` is set.

    Args:
        optimizer: torch optimizer, or a wrapper that holds one as ``.optimizer``.
        lr_range_test_min_lr: start, one number or one per parameter group.
        lr_range_test_step_size: optimizer steps over which the factor grows by ``lr_range_test_step_rate``; positive.
        lr_range_test_step_rate: growth per ``lr_range_test_step_size``.
        lr_range_test_staircase: grow in jumps instead of continuously.
        last_batch_iteration: 0-based index of the last step taken, -1 at the start.

    Raises:
        ValueError: a list with another length than the parameter groups, or a step size that is not positive.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer)
        _check_positive(LR_RANGE_TEST_STEP_SIZE, lr_range_test_step_size)
        self.min_lr = self._per_group(LR_RANGE_TEST_MIN_LR, lr_range_test_min_lr)
        self.step_size = lr_range_test_step_size
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        self._start(last_batch_iteration)

    def get_lr(self) -> list[float]:
        """Learning rate of each parameter group for the current count."""
        intervals = self._steps_taken / self.step_size
        if self.staircase:
            intervals = math.floor(intervals)
        return [lr * (1 + self.step_rate * intervals) for lr in self.min_lr]


class OneCycle(_Schedule):
    """One triangular cycle of the learning rate, then decay; momentum runs the opposite way.

    ===================  ==========================================  ==========================================
    phase                learning rate                               momentum
    ===================  ==========================================  ==========================================
    first_step_size      cycle_min_lr up to cycle_max_lr             cycle_max_mom down to cycle_min_mom
    second_step_size     back to cycle_min_lr                        back to cycle_max_mom
    afterwards           cycle_min_lr / (1 + decay_lr_rate * k)      cycle_max_mom * (1 + decay_mom_rate * k)
    ===================  ==========================================  ==========================================

    ``k`` is the number of optimizer steps since the cycle ended, divided by ``decay_step_size``.

    Args:
        optimizer: torch optimizer, or a wrapper that holds one as ``.optimizer``.
        cycle_min_lr, cycle_max_lr: ends of the cycle, one number or one per parameter group.
        decay_lr_rate: see the table.
        cycle_first_step_size, cycle_second_step_size: optimizer steps up and down; the second defaults to the first.
        cycle_first_stair_count, cycle_second_stair_count: number of jumps in which the way up (down) is taken, 0 for a
            continuous one; the second defaults to the first.
        decay_step_size: optimizer steps per unit of ``k``; 0 for no decay.
        cycle_momentum: cycle the momentum too: the first of ``betas``, or ``momentum``. An optimizer with neither is
            left alone, with one warning.
        cycle_min_mom, cycle_max_mom: ends of the momentum, one number or one per parameter group.
        decay_mom_rate: see the table.
        last_batch_iteration: 0-based index of the last step taken, -1 at the start.

    Raises:
        ValueError: a list with another length than the parameter groups, or a step size that makes no cycle.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: PerGroup = 0.8,
        cycle_max_mom: PerGroup = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer)
        second_step_size = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        second_stair_count = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        _check_positive(CYCLE_FIRST_STEP_SIZE, cycle_first_step_size)
        _check_positive(CYCLE_SECOND_STEP_SIZE, second_step_size)
        _check_not_negative(CYCLE_FIRST_STAIR_COUNT, cycle_first_stair_count)
        _check_not_negative(CYCLE_SECOND_STAIR_COUNT, second_stair_count)
        _check_not_negative(DECAY_STEP_SIZE, decay_step_size)

        self.min_lrs = self._per_group(CYCLE_MIN_LR, cycle_min_lr)
        self.max_lrs = self._per_group(CYCLE_MAX_LR, cycle_max_lr)
        self.decay_lr_rate = decay_lr_rate
        self.first_step_size, self.second_step_size = cycle_first_step_size, second_step_size
        self.first_stair_count, self.second_stair_count = cycle_first_stair_count, second_stair_count
        self.decay_step_size = decay_step_size
        self.min_moms = self._per_group(CYCLE_MIN_MOM, cycle_min_mom)
        self.max_moms = self._per_group(CYCLE_MAX_MOM, cycle_max_mom)
        self.decay_mom_rate = decay_mom_rate
        self._momentum_key = self._find_momentum_key() if cycle_momentum else None
        self.cycle_momentum = self._momentum_key is not None
        self._start(last_batch_iteration)

    def get_lr(self) -> list[float]:
        """Learning rate of each parameter group for the current count."""
        decay = 1 + self.decay_lr_rate * self._decay_intervals()
        height = self._cycle_height()
        return [(low + (high - low) * height) / decay for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def get_mom(self) -> list[tuple[float, ...]] | None:
        """Momentum of each parameter group for the current count: ``(momentum,)``, or all ``betas`` with the first one
        cycled. ``None`` where momentum is not cycled."""
        if self._momentum_key is None:
            return None
        decay = 1 + self.decay_mom_rate * self._decay_intervals()
        height = self._cycle_height()
        moms = [(high - (high - low) * height) * decay for low, high in zip(self.min_moms, self.max_moms, strict=True)]
        if self._momentum_key == "momentum":
            return [(mom,) for mom in moms]
        groups = self.optimizer.param_groups
        return [(mom, *group["betas"][1:]) for mom, group in zip(moms, groups, strict=True)]

    def _apply(self) -> None:
        super()._apply()
        moms = self.get_mom()
        if moms is None:
            return
        for group, mom in zip(self.optimizer.param_groups, moms, strict=True):
            group[self._momentum_key] = mom if self._momentum_key == "betas" else mom[0]

    def _find_momentum_key(self) -> str | None:
        for key in ("betas", "momentum"):
            if all(key in group for group in self.optimizer.param_groups):
                return key
        logger.warning(
            f"OneCycle: {type(self.optimizer).__name__} has neither betas nor momentum, so cycle_momentum has no effect"
        )
        return None

    def _cycle_height(self) -> float:
        """Position between the low (0) and the high (1) end of the cycle."""
        taken = self._steps_taken
        if taken <= self.first_step_size:
            return _stairs(taken / self.first_step_size, self.first_stair_count)
        down = min(1.0, (taken - self.first_step_size) / self.second_step_size)
        return 1.0 - _stairs(down, self.second_stair_count)

    def _decay_intervals(self) -> float:
        past_cycle = self._steps_taken - self.first_step_size - self.second_step_size
        if past_cycle <= 0 or self.decay_step_size == 0:
            return 0.0
        return past_cycle / self.decay_step_size


class WarmupLR(_Schedule):
    """Warm-up from a low rate to each parameter group's full rate, which is then held.

    ``lr = min_lr + (max_lr - min_lr) * g``, where ``g`` is 0 at construction and after the first optimizer step and
    goes to 1: ``(steps_taken - 1) / warmup_num_steps`` (``"linear"``) or ``log(steps_taken) / log(warmup_num_steps)``
    (``"log"``). Measured on DeepSpeed 0.19.8, whose schedules can be resumed here.

    Args:
        optimizer: torch optimizer, or a wrapper that holds one as ``.optimizer``.
        warmup_min_lr: start, one number or one per parameter group.
        warmup_max_lr: end, one number or one per parameter group; ``None`` for the optimizer's own.
        warmup_num_steps: positive integer; 1 is used as 2, since ``log(1)`` divides nothing.
        warmup_type: ``"log"`` or ``"linear"``.
        last_batch_iteration: 0-based index of the last step taken, -1 at the start.

    Raises:
        ValueError: ``warmup_num_steps`` is no positive integer, an unknown ``warmup_type``, or a list with another
            length than the parameter groups.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer)
        self.warmup_num_steps = _checked_warmup_steps(warmup_num_steps)
        self.warmup_type = _checked_warmup_type(warmup_type)
        initial_lrs = self._initial_lrs(last_batch_iteration)
        self.min_lrs = self._per_group(WARMUP_MIN_LR, warmup_min_lr)
        self.max_lrs = initial_lrs if warmup_max_lr is None else self._per_group(WARMUP_MAX_LR, warmup_max_lr)
        self._start(last_batch_iteration)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Move to the next optimizer step, or behind the 0-based step ``last_batch_iteration`` where it is given."""
        super().step(last_batch_iteration)

    def get_lr(self) -> list[float]:
        """Learning rate of each parameter group for the current count."""
        gamma = self._gamma()
        return [low + (high - low) * gamma for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _gamma(self) -> float:
        return _warmup_fraction(self._steps_taken, self.warmup_num_steps, self.warmup_type)


class WarmupDecayLR(WarmupLR):
    """``WarmupLR``, then a straight line back to ``warmup_min_lr``, which the step after ``total_num_steps`` has.

    Args:
        total_num_steps: length of the whole schedule, warm-up included. One that ends within the warm-up gets a
            warning: the full rate is then never reached.
        optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration: as in
            ``WarmupLR``.

    Raises:
        ValueError: as ``WarmupLR``, or ``total_num_steps`` is not positive.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = 1e-3,
        warmup_num_steps: int = 1000,
        warmup_type: str = WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        _check_positive(TOTAL_NUM_STEPS, total_num_steps)
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)
        _warn_if_shorter_than_warmup(type(self).__name__, total_num_steps, self.warmup_num_steps)

    def _gamma(self) -> float:
        if self._steps_taken <= self.warmup_num_steps:
            return super()._gamma()
        return 1.0 - _decay_progress(self._steps_taken - 1, self.warmup_num_steps, self.total_num_steps)


class WarmupCosineLR(_Schedule):
    """Warm-up, then half a cosine down, both as ratios of each parameter group's own learning rate.

    The ratio goes from ``warmup_min_ratio`` to 1 as in ``WarmupLR``, then to ``cos_min_ratio`` along
    ``cos_min_ratio + (1 - cos_min_ratio) * (1 + cos(pi * t)) / 2``, ``t`` from 0 at the end of warm-up to 1 after
    ``total_num_steps`` optimizer steps, and stays there.

    Args:
        optimizer: torch optimizer, or a wrapper that holds one as ``.optimizer``.
        total_num_steps: length of the whole schedule, warm-up included.
        warmup_min_ratio: ratio at the start.
        warmup_num_steps, warmup_type, last_batch_iteration: as in ``WarmupLR``.
        cos_min_ratio: ratio at the end.

    Raises:
        ValueError: ``warmup_num_steps`` is no positive integer, ``total_num_steps`` is not positive, or an unknown
            ``warmup_type``.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer)
        _check_positive(TOTAL_NUM_STEPS, total_num_steps)
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio = warmup_min_ratio
        self.warmup_num_steps = _checked_warmup_steps(warmup_num_steps)
        self.cos_min_ratio = cos_min_ratio
        self.warmup_type = _checked_warmup_type(warmup_type)
        self.org_lrs = self._initial_lrs(last_batch_iteration)
        _warn_if_shorter_than_warmup(type(self).__name__, total_num_steps, self.warmup_num_steps)
        self._start(last_batch_iteration)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Move to the next optimizer step, or behind the 0-based step ``last_batch_iteration`` where it is given."""
        super().step(last_batch_iteration)

    def get_lr_ratio(self) -> float:
        """Ratio to the full learning rate for the current count."""
        if self._steps_taken <= self.warmup_num_steps:
            gamma = _warmup_fraction(self._steps_taken, self.warmup_num_steps, self.warmup_type)
            return self.warmup_min_ratio + (1.0 - self.warmup_min_ratio) * gamma
        progress = _decay_progress(self._steps_taken, self.warmup_num_steps, self.total_num_steps)
        return self.cos_min_ratio + (1.0 - self.cos_min_ratio) * (1.0 + math.cos(math.pi * progress)) / 2.0

    def get_lr(self) -> list[float]:
        """Learning rate of each parameter group for the current count."""
        ratio = self.get_lr_ratio()
        return [lr * ratio for lr in self.org_lrs]


def _stairs(fraction: float, count: int) -> float:
    return fraction if count == 0 else math.floor(fraction * count) / count


def _warmup_fraction(steps_taken: int, warmup_num_steps: int, warmup_type: str) -> float:
    if warmup_type == WARMUP_LINEAR_RATE:
        return min(1.0, max(0, steps_taken - 1) / warmup_num_steps)
    if steps_taken >= warmup_num_steps:
        return 1.0
    # rounded as DeepSpeed rounds, so that a rate that comes from its checkpoint is the one that is computed here
    return (1.0 / math.log(warmup_num_steps)) * math.log(max(1, steps_taken))


def _decay_progress(steps_taken: int, warmup_num_steps: int, total_num_steps: int) -> float:
    """0 at the end of warm-up, 1 at the end of the schedule and for ever after."""
    return min(1.0, (steps_taken - warmup_num_steps) / max(1, total_num_steps - warmup_num_steps))


def _checked_warmup_steps(steps: int) -> int:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps <= 0:
        raise ValueError(
            f"{WARMUP_NUM_STEPS} must be a positive integer, got {steps!r}. For no warm-up set the minimum to the full "
            "learning rate, or choose another schedule"
        )
    return max(2, steps)


def _checked_warmup_type(warmup_type: str) -> str:
    if warmup_type not in (WARMUP_LOG_RATE, WARMUP_LINEAR_RATE):
        raise ValueError(f"{WARMUP_TYPE} must be {WARMUP_LOG_RATE!r} or {WARMUP_LINEAR_RATE!r}, got {warmup_type!r}")
    return warmup_type


def _check_positive(name: str, value: int) -> None:
    if not _is_number(value) or value <= 0:
        raise ValueError(f"{name} must be a positive number, got {value!r}")


def _check_not_negative(name: str, value: int) -> None:
    if not _is_number(value) or value < 0:
        raise ValueError(f"{name} must be a number that is not negative, got {value!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def _warn_if_shorter_than_warmup(schedule: str, total_num_steps: int, warmup_num_steps: int) -> None:
    if total_num_steps < warmup_num_steps:
        logger.warning(
            f"{schedule}: {TOTAL_NUM_STEPS} {total_num_steps} ends before {WARMUP_NUM_STEPS} {warmup_num_steps}, "
            f"so the full learning rate is never reached"
        )


# Command-line tuning: a training script can offer every argument of the schedules as an option.


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add an option group "Convergence Tuning" with the arguments of all schedules, and return ``parser``."""
    group = parser.add_argument_group("Convergence Tuning", "learning-rate schedule and its arguments")
    group.add_argument("--lr_schedule", type=str, default=None, help=f"one of {', '.join(VALID_LR_SCHEDULES)}")

    group.add_argument("--lr_range_test_min_lr", type=float, default=0.001, help="learning rate to start from")
    group.add_argument("--lr_range_test_step_rate", type=float, default=1.0, help="growth per step size")
    group.add_argument("--lr_range_test_step_size", type=int, default=1000, help="optimizer steps per growth")
    group.add_argument("--lr_range_test_staircase", action="store_true", help="grow in jumps")

    group.add_argument("--cycle_first_step_size", type=int, default=1000, help="optimizer steps on the way up")
    group.add_argument("--cycle_first_stair_count", type=int, default=-1, help="jumps on the way up, -1 for none")
    group.add_argument("--cycle_second_step_size", type=int, default=-1, help="steps on the way down, -1: as up")
    group.add_argument("--cycle_second_stair_count", type=int, default=-1, help="jumps on the way down, -1: as up")
    group.add_argument("--decay_step_size", type=int, default=1000, help="optimizer steps per unit of decay")
    group.add_argument("--cycle_min_lr", type=float, default=0.01, help="low end of the learning rate")
    group.add_argument("--cycle_max_lr", type=float, default=0.1, help="high end of the learning rate")
    group.add_argument("--decay_lr_rate", type=float, default=0.0, help="decay of the learning rate after the cycle")
    group.add_argument("--cycle_momentum", action="store_true", help="cycle the momentum too")
    group.add_argument("--cycle_min_mom", type=float, default=0.8, help="low end of the momentum")
    group.add_argument("--cycle_max_mom", type=float, default=0.9, help="high end of the momentum")
    group.add_argument("--decay_mom_rate", type=float, default=0.0, help="growth of the momentum after the cycle")

    group.add_argument("--warmup_min_lr", type=float, default=0, help="learning rate to start from")
    group.add_argument("--warmup_max_lr", type=float, default=0.001, help="learning rate after warm-up")
    group.add_argument("--warmup_num_steps", type=int, default=1000, help="optimizer steps of warm-up")
    group.add_argument("--warmup_type", type=str, default=WARMUP_LOG_RATE, help="log or linear")
    group.add_argument("--warmup_min_ratio", type=float, default=0.01, help="cosine: ratio to start from")
    group.add_argument("--total_num_steps", type=int, default=None, help="decay, cosine: steps of the schedule")
    group.add_argument("--cos_min_ratio", type=float, default=0.01, help="cosine: ratio at the end")
    return parser


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Parse the tuning options of the command line; returns them and the arguments that are none of them."""
    return add_tuning_arguments(argparse.ArgumentParser()).parse_known_args()


def _override(args: argparse.Namespace, params: dict[str, Any], names: Sequence[str]) -> None:
    for name in names:
        value = getattr(args, name, None)
        if value is not None:
            params[name] = value


def override_lr_range_test_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Write the ``LRRangeTest`` arguments that ``args`` has into ``params``."""
    _override(
        args,
        params,
        (LR_RANGE_TEST_MIN_LR, LR_RANGE_TEST_STEP_RATE, LR_RANGE_TEST_STEP_SIZE, LR_RANGE_TEST_STAIRCASE),
    )


def override_1cycle_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Write the ``OneCycle`` arguments that ``args`` has into ``params``; a negative size or count is left out."""
    sizes = (CYCLE_FIRST_STEP_SIZE, CYCLE_FIRST_STAIR_COUNT, CYCLE_SECOND_STEP_SIZE, CYCLE_SECOND_STAIR_COUNT)
    _override(args, params, [name for name in sizes if (getattr(args, name, None) or 0) >= 0])
    _override(
        args,
        params,
        (
            DECAY_STEP_SIZE,
            CYCLE_MIN_LR,
            CYCLE_MAX_LR,
            DECAY_LR_RATE,
            "cycle_momentum",
            CYCLE_MIN_MOM,
            CYCLE_MAX_MOM,
            DECAY_MOM_RATE,
        ),
    )


def override_warmupLR_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Write the ``WarmupLR`` arguments that ``args`` has into ``params``."""
    _override(args, params, (WARMUP_MIN_LR, WARMUP_MAX_LR, WARMUP_NUM_STEPS, WARMUP_TYPE))


def _override_warmup_decay_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    override_warmupLR_params(args, params)
    _override(args, params, (TOTAL_NUM_STEPS,))


def override_warmupCosineLR_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Write the ``WarmupCosineLR`` arguments that ``args`` has into ``params``."""
    _override(args, params, (TOTAL_NUM_STEPS, WARMUP_MIN_RATIO, WARMUP_NUM_STEPS, WARMUP_TYPE, COS_MIN_RATIO))


_OVERRIDES: dict[str, Callable[[argparse.Namespace, dict[str, Any]], None]] = {
    LR_RANGE_TEST: override_lr_range_test_params,
    ONE_CYCLE: override_1cycle_params,
    WARMUP_LR: override_warmupLR_params,
    WARMUP_DECAY_LR: _override_warmup_decay_params,
    WARMUP_COSINE_LR: override_warmupCosineLR_params,
}


def override_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Write the arguments of every schedule that ``args`` has into ``params``."""
    for override in _OVERRIDES.values():
        override(args, params)


def get_config_from_args(args: argparse.Namespace) -> tuple[dict[str, Any] | None, str | None]:
    """Build the ``scheduler`` section that ``args.lr_schedule`` and its options describe.

    Returns:
        ``({"type": name, "params": {...}}, None)``, or ``(None, reason)`` where no known schedule is named.
    """
    schedule = getattr(args, LR_SCHEDULE, None)
    if schedule is None:
        return None, "--lr_schedule is not given"
    if schedule not in VALID_LR_SCHEDULES:
        return None, f"{schedule!r} is not one of the schedules {', '.join(VALID_LR_SCHEDULES)}"
    params: dict[str, Any] = {}
    _OVERRIDES[schedule](args, params)
    return {"type": schedule, "params": params}, None


def get_lr_from_config(config: dict[str, Any]) -> tuple[float | None, str]:
    """Representative learning rate of a ``scheduler`` section: where the range test starts, the high end of the others.

    Returns:
        ``(lr, "")``, or ``(None, reason)`` where the section names none.
    """
    schedule, params = config.get("type"), config.get("params")
    if schedule is None or params is None:
        return None, "a scheduler section needs type and params"
    names = {
        LR_RANGE_TEST: LR_RANGE_TEST_MIN_LR,
        ONE_CYCLE: CYCLE_MAX_LR,
        WARMUP_LR: WARMUP_MAX_LR,
        WARMUP_DECAY_LR: WARMUP_MAX_LR,
    }
    if schedule not in names:
        return None, f"{schedule!r} names no learning rate of its own"
    lr = params.get(names[schedule])
    return (lr, "") if lr is not None else (None, f"{schedule} without {names[schedule]}")
