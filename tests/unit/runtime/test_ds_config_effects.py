# SPDX-License-Identifier: Apache-2.0
"""Every config key that training honours changes something that can be seen.

One table: a key, a value other than its default, and a probe. The probe looks at an engine (or at the parsed config)
with and without the key; the two views must differ. The values themselves are the business of other tests.
"""

from __future__ import annotations

import contextlib
import gc
import io
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from torch.utils.data import TensorDataset

from deepspeed import comm as dist
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.gradients import collectives
from deepspeed.utils import logging as package_logging
from deepspeed.utils import timer as timer_module
from unit.common import DistributedTest
from unit.runtime import engine_cases as cases

Config = dict[str, Any]
Probe = Callable[[Config], Any]

ADAMW = {"type": "AdamW", "params": {"lr": 0.1}}
FP16 = {"enabled": True}


def merged(config: Config, path: str, value: Any) -> Config:
    """A copy of ``config`` with the value at the dotted path."""
    name, _, rest = path.partition(".")
    inner = config.get(name)
    return {**config, name: merged(inner if isinstance(inner, dict) else {}, rest, value) if rest else value}


# --------------------------------------------------------------------------------------------------------------------
# Probes
# --------------------------------------------------------------------------------------------------------------------


def batches(engine: Any, seed: int = 0, count: int = 1) -> list[Any]:
    dtype = {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(engine.module.first.weight.dtype, "fp32")
    return cases.batches_of(torch_dist.get_rank(), count, dtype, seed)


def window(engine: Any, seed: int = 0) -> None:
    for batch in batches(engine, seed, engine.gradient_accumulation_steps()):
        engine.backward(engine(*batch))
        engine.step()


def update(config: Config) -> list[float]:
    """Weights after one window."""
    engine = cases.make_engine(config)
    window(engine)
    return engine.module.first.weight.detach().double().flatten().tolist()


def wire(config: Config) -> list[tuple[str, str, int]]:
    """Collectives of one window and its update: which, in which dtype, how large."""
    with on_the_wire() as seen:
        update(config)
    return [(name, dtype, numel) for name, dtype, numel, _ in seen if numel > 4]


def gathered(config: Config) -> list[tuple[str, str, int]]:
    """The same where ranks are many: few of them on CPU are always served by broadcasts."""
    few, collectives.FEW_RANKS = collectives.FEW_RANKS, 0
    try:
        return wire(config)
    finally:
        collectives.FEW_RANKS = few


def wire_values(config: Config) -> list[float]:
    """Sums of what is put into the collectives of one window."""
    with on_the_wire() as seen:
        window(cases.make_engine(config))
    reductions = ("all_reduce", "reduce", "all_to_all_single")
    return [total for name, _, numel, total in seen if numel > 4 and name in reductions]


@contextlib.contextmanager
def on_the_wire() -> Iterator[list[tuple[str, str, int, float]]]:
    seen: list[tuple[str, str, int, float]] = []
    names = ("all_reduce", "reduce", "all_to_all_single", "all_gather_into_tensor", "all_gather", "broadcast")
    real = {name: getattr(collectives.dist, name) for name in names}

    def recorded(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            sent = args[1] if name in ("all_to_all_single", "all_gather_into_tensor", "all_gather") else args[0]
            seen.append((name, str(sent.dtype), sent.numel(), float(sent.double().sum())))
            return real[name](*args, **kwargs)

        return call

    for name in names:
        setattr(collectives.dist, name, recorded(name))
    try:
        yield seen
    finally:
        for name in names:
            setattr(collectives.dist, name, real[name])


def order_of_waits(config: Config) -> list[str]:
    """When the reductions of a backward are started and when they are waited for."""
    events: list[str] = []
    real = collectives.dist.reduce

    class Watched:
        def __init__(self, work: Any) -> None:
            self.work = work

        def wait(self, *args: Any) -> Any:
            events.append("wait")
            return self.work.wait(*args)

    def started(*args: Any, **kwargs: Any) -> Any:
        events.append("start")
        return Watched(real(*args, **kwargs))

    engine = cases.make_engine(config)
    window(engine)
    collectives.dist.reduce = started
    try:
        window(engine)
    finally:
        collectives.dist.reduce = real
    assert events.count("start") == events.count("wait") > 1
    return events


def held_buffers(config: Config) -> int:
    """Bytes of communication buffers between steps."""
    engine = cases.make_engine(config)
    window(engine)
    return engine._stepper.reducer.transport.pool.nbytes


def places(config: Config) -> list[tuple[str, int]]:
    """Trainable parameters with their places in the flat tensor, in bytes."""
    engine = cases.make_engine(config)
    named = [(name, p.data_ptr()) for name, p in engine.module.named_parameters() if p.requires_grad]
    first = min(address for _, address in named)
    return [(name, address - first) for name, address in named]


def shard_dtypes(config: Config) -> list[torch.dtype]:
    engine = cases.make_engine(config)
    engine.backward(engine(*batches(engine)[0]))
    return [shard.dtype for shard in engine._stepper.reducer.shards if shard is not None]


def scales(pattern: str) -> Probe:
    """Loss scales after steps with (o) and without (.) overflow; "stop" where the run ends."""

    def probe(config: Config) -> list[Any]:
        engine = cases.make_engine(config)
        seen: list[Any] = [engine.optimizer.cur_scale]
        for kind in pattern:
            loss = engine(*batches(engine)[0])
            engine.backward(loss * float("inf") if kind == "o" else loss)
            try:
                engine.step()
            except Exception as error:  # noqa: BLE001 - a bare Exception is what the interface says
                assert "loss scale" in str(error)
                return [*seen, "stop"]
            seen.append(engine.optimizer.cur_scale)
        return seen

    return probe


def applied_with_nan(config: Config) -> bool:
    engine = cases.make_engine(config)
    engine.backward(engine(*batches(engine)[0]) * float("nan"))
    engine.step()
    return engine.was_step_applied()


def applied(config: Config) -> list[bool]:
    engine = cases.make_engine(config)
    seen = []
    for batch in batches(engine, count=4):
        engine.backward(engine(*batch))
        engine.step()
        seen.append(engine.was_step_applied())
    return seen


def input_dtype(config: Config) -> torch.dtype:
    """What the model gets for an fp32 input."""
    seen = []

    class Model(cases.OddModel):
        def forward(self, x: torch.Tensor, *rest: Any) -> torch.Tensor:
            seen.append(x.dtype)
            return super().forward(x.half(), *rest)

    engine = cases.make_engine(config, Model())
    engine(torch.ones(2, cases.WIDTH), torch.zeros(2, dtype=torch.long))
    return seen[0]


def dtypes_of_model(config: Config) -> set[torch.dtype]:
    model = cases.OddModel()
    model.register_buffer("table", torch.ones(3))
    engine = cases.make_engine(config, model)
    return {p.dtype for p in engine.module.parameters()} | {engine.module.table.dtype}


def optimizer_state(config: Config) -> int:
    """Elements of optimizer state on this rank."""
    engine = cases.make_engine({**config, "optimizer": ADAMW})
    window(engine)
    state = engine.basic_optimizer.state.values()
    return sum(value.numel() for item in state for value in item.values() if torch.is_tensor(value))


def optimizer(config: Config) -> tuple[type, float]:
    engine = cases.make_engine(config)
    return type(engine.basic_optimizer), engine.get_lr()[0]


def schedule(config: Config) -> tuple[type, float]:
    engine = cases.make_engine(config)
    window(engine)
    return type(engine.lr_scheduler), engine.get_lr()[0]


def norm(config: Config) -> bool:
    engine = cases.make_engine(config)
    window(engine)
    return engine.get_global_grad_norm() is None


def batch_sizes(config: Config) -> list[int]:
    return [ask() for ask in cases.make_engine(config).get_batch_info()]


def loader_sizes(config: Config) -> list[int]:
    engine = cases.make_engine(config)
    loader = engine.deepspeed_io(TensorDataset(torch.arange(13)), num_local_io_workers=0)
    return [len(batch) for (batch,) in loader]


def timers(config: Config) -> bool:
    engine = cases.make_engine(config)
    window(engine)
    return bool(engine.get_wall_clock_timers())


def said(*words: str, level: int = logging.INFO) -> Probe:
    """Log lines of two windows that have any of the words; on the rank that logs."""

    def probe(config: Config) -> int:
        lines: list[str] = []
        with logged(lines, level):
            engine = cases.make_engine(config)
            for seed in range(4):
                window(engine, seed)
        everywhere: list[Any] = [None] * torch_dist.get_world_size()
        torch_dist.all_gather_object(everywhere, len([line for line in lines if any(word in line for word in words)]))
        return max(everywhere)

    return probe


@contextlib.contextmanager
def logged(lines: list[str], level: int = logging.INFO) -> Iterator[None]:
    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    package_logging._seen_dist_messages.clear()
    handler, before = Collect(), package_logging.logger.level
    package_logging.logger.addHandler(handler)
    package_logging.logger.setLevel(level)
    try:
        yield
    finally:
        package_logging.logger.removeHandler(handler)
        package_logging.logger.setLevel(before)


def log_level(config: Config) -> int:
    before = package_logging.logger.level
    try:
        cases.make_engine(config)
        return package_logging.logger.level
    finally:
        package_logging.logger.setLevel(before)


def printed(words: str) -> Probe:
    """Whether rank 0 prints the words while it makes an engine and trains for a window."""

    def probe(config: Config) -> bool:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            window(cases.make_engine(config))
        everywhere: list[Any] = [None] * torch_dist.get_world_size()
        torch_dist.all_gather_object(everywhere, words in out.getvalue())
        return everywhere[0]

    return probe


def collector(config: Config) -> bool:
    engine = cases.make_engine(config)
    enabled = gc.isenabled()
    engine.destroy()
    assert gc.isenabled()
    return enabled


def device_waits(config: Config) -> int:
    """How often a window waits for the device because of the throughput timer."""
    waits: list[int] = []
    real = timer_module.ThroughputTimer._now

    def now(self: Any) -> float:
        waits.append(self.config.synchronized)
        return real(self)

    engine = cases.make_engine(config)
    timer_module.ThroughputTimer._now = now
    try:
        for seed in range(4):
            window(engine, seed)
    finally:
        timer_module.ThroughputTimer._now = real
    return sum(waits)


def recorded_collectives(config: Config) -> list[str]:
    """Names of the collectives that the communication logger has, after one all-reduce and one broadcast."""
    log = dist.comms_logger
    log.reset() if hasattr(log, "reset") else log.comms_dict.clear()
    dist.configure(enabled=False, prof_all=True, prof_ops=[], verbose=False, debug=False)
    lines: list[str] = []
    try:
        cases.make_engine(config)
        log.comms_dict.clear()
        with logged(lines):
            dist.all_reduce(torch.ones(3))
            dist.broadcast(torch.ones(3), src=0)
        verbose = any("all_reduce" in line for line in lines)
        return [*sorted(log.comms_dict), f"verbose {verbose}"]
    finally:
        dist.configure(enabled=False, prof_all=True, prof_ops=[], verbose=False, debug=False)


def outcome(config: Config) -> str:
    """Whether an engine can be made, else the kind of error."""
    try:
        cases.make_engine(config).destroy()
    except (AssertionError, ValueError, NotImplementedError) as error:
        return type(error).__name__
    return "made"


def offloads(config: Config) -> tuple[Any, Any, bool]:
    zero = DeepSpeedConfig(config).zero_config
    return zero.offload_optimizer, zero.offload_param, zero.gather_16bit_weights_on_model_save


def gathers(config: Config) -> int:
    return DeepSpeedConfig(config).zero_config.allgather_bucket_size


# --------------------------------------------------------------------------------------------------------------------
# The table
# --------------------------------------------------------------------------------------------------------------------


@dataclass
class Effect:
    """``path`` set to ``value`` on top of a config of ``stage``, ``dtype`` and ``base`` changes what ``probe`` sees."""

    path: str
    value: Any
    probe: Probe
    stage: int = 1
    dtype: str = "fp32"
    gas: int = 1
    base: Config = field(default_factory=dict)

    def configs(self) -> tuple[Config, Config]:
        config = cases.make_config(self.stage, self.dtype, self.gas)
        for path, value in self.base.items():
            config = merged(config, path, value)
        leaf = self.path.rpartition(".")[2]
        section = config
        for name in self.path.split(".")[:-1]:
            section = section.get(name) or {}
        assert section.get(leaf) != self.value, f"{self.path} has this value already"
        return config, merged(config, self.path, self.value)


SMALL = {"zero_optimization.reduce_bucket_size": 40}
PRINTING = {"steps_per_print": 1}
LOGGING = {"comms_logger": {"enabled": True}}
CHOOSING = {"comms_logger": {"enabled": True, "prof_all": False}}
DYNAMIC = {"fp16.initial_scale_power": 4, "fp16.hysteresis": 1}

EFFECTS = [
    Effect("train_batch_size", 12, batch_sizes, base={"gradient_accumulation_steps": None}),
    Effect("train_micro_batch_size_per_gpu", 3, batch_sizes),
    Effect("gradient_accumulation_steps", 3, batch_sizes),
    Effect("managed_gradient_accumulation", False, applied, gas=2),
    Effect("steps_per_print", 2, said("step=")),
    Effect("dump_state", True, printed("gradient_clipping = ")),
    Effect("disable_python_gc", True, collector),
    Effect("prescale_gradients", True, wire_values),
    Effect("gradient_predivide_factor", 4.0, wire_values),
    Effect("gradient_allreduce_op", "sum", update),
    Effect("gradient_clipping", 0.01, update),
    Effect("zero_allow_untested_optimizer", False, outcome),
    Effect("dataloader_drop_last", True, loader_sizes),
    Effect("wall_clock_breakdown", True, timers),
    Effect("memory_breakdown", True, printed("memory"), base=PRINTING),
    Effect("vocabulary_size", 50257, said("vocabulary_size")),
    Effect("log_level", "error", log_level),
    Effect("data_parallel_size", 3, outcome),
    Effect("communication_data_type", "bf16", wire),
    Effect("allgather_size", 200, gathers, base={"zero_optimization": True}),
    Effect("optimizer.type", "Adagrad", optimizer, base={"optimizer": ADAMW}),
    Effect("optimizer.params", {"lr": 0.2}, optimizer, base={"optimizer": ADAMW}),
    Effect(
        "scheduler.type",
        "LRRangeTest",
        schedule,
        base={"scheduler": {"type": "WarmupLR", "params": {}}},
    ),
    Effect(
        "scheduler.params",
        {"warmup_min_lr": 0.05},
        schedule,
        base={"scheduler": {"type": "WarmupLR", "params": {}}},
    ),
    Effect("fp16.enabled", True, dtypes_of_model),
    Effect("fp16.auto_cast", True, input_dtype, dtype="fp16"),
    Effect("fp16.loss_scale", 8.0, scales(""), dtype="fp16"),
    Effect("fp16.initial_scale_power", 5, scales(""), dtype="fp16"),
    Effect("fp16.loss_scale_window", 2, scales(".."), dtype="fp16", base=DYNAMIC),
    Effect("fp16.hysteresis", 2, scales("o"), dtype="fp16", base=DYNAMIC),
    Effect("fp16.consecutive_hysteresis", True, scales("o.o"), dtype="fp16", base={**DYNAMIC, "fp16.hysteresis": 2}),
    Effect("fp16.min_loss_scale", 8, scales("oo"), dtype="fp16", base=DYNAMIC),
    Effect("bf16.enabled", True, dtypes_of_model),
    Effect("bf16.check_grad_overflow", False, applied_with_nan, dtype="bf16"),
    Effect("data_types.grad_accum_dtype", "bf16", shard_dtypes, dtype="bf16"),
    Effect("data_types.param_dtype", "bf16", outcome),
    Effect("data_types.buffer_dtype", "bf16", dtypes_of_model),
    Effect("zero_optimization.stage", 0, optimizer_state),
    Effect("zero_optimization.contiguous_gradients", False, held_buffers),
    Effect("zero_optimization.reduce_scatter", False, wire),
    Effect("zero_optimization.reduce_bucket_size", 40, wire),
    Effect("zero_optimization.allgather_partitions", False, gathered),
    Effect("zero_optimization.allgather_bucket_size", 8, gathered),
    Effect("zero_optimization.overlap_comm", True, order_of_waits, stage=2, base=SMALL),
    Effect("zero_optimization.compute_grad_norm", False, norm),
    Effect("zero_optimization.round_robin_gradients", True, places),
    Effect("zero_optimization.parameter_alignment", True, places),
    Effect("zero_optimization.legacy_stage1", True, outcome),
    Effect("zero_optimization.cpu_offload", True, offloads),
    Effect("zero_optimization.cpu_offload_param", True, offloads, base={"zero_optimization.stage": 3}),
    Effect("zero_optimization.stage3_gather_fp16_weights_on_model_save", True, offloads),
    Effect("comms_logger.enabled", False, recorded_collectives, base=LOGGING),
    Effect("comms_logger.prof_all", False, recorded_collectives, base=LOGGING),
    Effect("comms_logger.prof_ops", ["broadcast"], recorded_collectives, base=CHOOSING),
    Effect("comms_logger.verbose", True, recorded_collectives, base=LOGGING),
    Effect("comms_logger.debug", True, recorded_collectives, base=LOGGING),
    Effect("timers.throughput.enabled", False, said("SamplesPerSec"), base=PRINTING),
    Effect("timers.throughput.synchronized", False, device_waits, base=PRINTING),
]


class TestEveryKeyHasItsEffect(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    @pytest.mark.parametrize("index", range(len(EFFECTS)), ids=[effect.path for effect in EFFECTS])
    def test_it_changes_what_is_seen(self, index: int) -> None:
        effect = EFFECTS[index]
        without, given = (effect.probe(config) for config in effect.configs())
        assert without != given, f"{effect.path} changes nothing: {given}"

    def test_adam_w_mode_chooses_the_kind_of_weight_decay(self) -> None:
        kinds = set()
        for mode in (True, False):
            params = {"lr": 0.1, "weight_decay": 0.5, "adam_w_mode": mode}
            kinds.add(tuple(update(cases.make_config(1, optimizer={"type": "Adam", "params": params}))))
        assert len(kinds) == 2

    def test_arguments_that_an_optimizer_does_not_take_are_refused_by_name(self) -> None:
        for kind, params, words in (
            ("AdamW", {"learning_rate": 0.1}, "optimizer.params.learning_rate'.*AdamW: it takes lr, "),
            ("Adam", {"weight_decays": 0.1}, "optimizer.params.weight_decays'.*did you mean 'weight_decay'"),
            ("SGD", {"adam_w_mode": True}, "optimizer.params.adam_w_mode' is no argument of SGD"),
            ("Muon", {"per_head_muon": True}, "optimizer.params.per_head_muon is not built"),
            ("Muon", {"muon_rl": 0.1}, "optimizer.params.muon_rl'.*did you mean 'muon_lr'"),
            ("Lion", {"eps": 0.1}, "optimizer.params.eps' is no argument of FusedLion"),
        ):
            with pytest.raises((TypeError, NotImplementedError), match=words):
                cases.make_engine(cases.make_config(1, optimizer={"type": kind, "params": params}))

    def test_auto_among_the_arguments_of_the_optimizer_is_its_default(self) -> None:
        config = cases.make_config(1, optimizer={"type": "AdamW", "params": {"lr": "auto", "eps": 1e-6}})
        (group,) = cases.make_engine(config).basic_optimizer.param_groups
        assert (group["lr"], group["eps"]) == (1e-3, 1e-6)

    def test_the_engine_prints_its_config_on_rank_0(self) -> None:
        engine = cases.make_engine(cases.make_config(1, gas=2, zero={"reduce_bucket_size": "auto"}))
        with contextlib.redirect_stdout(io.StringIO()) as out:
            engine.print_config()
        if torch_dist.get_rank() != 0:
            assert out.getvalue() == ""
            return
        for line in (
            "zero_optimization.stage = 1  (dict)",
            "zero_optimization.reduce_bucket_size = 500000000  (auto)",
            "zero_optimization.overlap_comm = false  (derived)",
            "dump_state = false  (default)",
        ):
            assert f"  {line}\n" in out.getvalue()
        assert "  train_batch_size = 8  (derived: computed as " in out.getvalue()
