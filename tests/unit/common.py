# SPDX-License-Identifier: Apache-2.0
"""Tests and fixtures whose bodies run in several ranks at once.

::

    class TestAllReduce(DistributedTest):
        world_size = [2, 4]

        @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
        def test_sum(self, dtype, tmpdir):
            ...  # runs in every rank, with torch.distributed initialised

Fixtures and parameters are evaluated once, by pytest, in the session's process; every rank gets a copy, so they must
be picklable (``monkeypatch`` is the exception: each rank makes its own). ``self`` is a new instance in each rank with
the attributes that fixtures and ``setup_method`` gave to the session's instance. ``pytest.skip``, ``pytest.xfail`` and
``pytest.raises`` work inside the body. What a rank prints is shown with the rank's number in front.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Sequence
from inspect import Parameter, Signature, signature
from typing import Any, ClassVar

import pytest

from unit.rank_group import RankGroup, get_server
from unit.rank_server import Job, Outcome

DEFAULT_TIMEOUT = 120.0
PER_RANK_FIXTURES = ("monkeypatch",)


class DistributedExec:
    """What tests and fixtures that run in ranks have in common. All of it is set by class attributes."""

    world_size: int | Sequence[int] = 2
    """Number of ranks, or several of them: a test then runs once for each. In a rank: the number of ranks."""
    backend: str | None = None
    """Backend of torch.distributed; None takes the accelerator's (gloo on CPU, nccl on CUDA)."""
    init_distributed: bool = True
    """False starts the ranks without initialising torch.distributed; the environment allows ``env://``."""
    set_dist_env: bool = True
    """False starts the ranks without RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_SIZE, MASTER_ADDR, MASTER_PORT."""
    requires_cuda_env: bool = False
    """True skips where there is no CUDA device."""
    exec_timeout: float | None = None
    """Seconds after which the ranks are stopped and the test fails; None takes DS_TEST_TIMEOUT, else 120."""
    idle_timeout: float = 20.0
    """Seconds after which the test fails if some ranks have passed and the others do nothing but wait."""


class DistributedTest(DistributedExec):
    """Base of test classes whose test methods run in every rank. See the module's docstring."""

    reuse_dist_env: bool = False
    """True keeps the ranks and their process group from one test of the class to the next. Faster by a few
    hundredths of a second per test, but what one test leaves behind (hooks, groups, memory) meets the next."""

    @pytest.fixture(autouse=True)
    def _parametrized_world_size(self, request: pytest.FixtureRequest) -> int | None:
        return getattr(request, "param", None)


class DistributedFixture(DistributedExec):
    """Base of fixtures whose ``run`` executes in every rank, in ranks of its own.

    The class's name is the fixture's name, the arguments of ``run`` are the fixtures and parameters it needs::

        class checkpoint_of_two(DistributedFixture):
            world_size = 2

            def run(self, class_tmpdir, zero_stage):
                ...

        class TestLoad(DistributedTest):
            world_size = 4

            def test_load(self, checkpoint_of_two, class_tmpdir, zero_stage):
                ...

    The value of the fixture is None; it hands over what it made by files. It is visible where the class is: in the
    module that defines or imports it, or below the conftest that does.
    """

    fixture_scope: ClassVar[str] = "function"

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Body of the fixture. To be defined by subclasses."""
        raise NotImplementedError(f"{type(self).__name__} is a DistributedFixture and must define run()")


class RankPools:
    """Groups of ranks that are kept for the following tests of the same class (``reuse_dist_env``)."""

    def __init__(self) -> None:
        self._owner: type | None = None
        self._groups: dict[int, RankGroup] = {}

    def take(self, owner: type[DistributedTest], world_size: int, job: Job) -> RankGroup:
        """A group for a test of this class, new or used. Ends the groups of any other class."""
        if owner is not self._owner:
            self.close()
            self._owner = owner
        group = self._groups.get(world_size)
        if group is None or not group.usable:
            group = self._groups[world_size] = _new_group(owner, world_size, job)
        return group

    def close(self) -> None:
        """End all groups. Fails the current test, naming the class to blame, if ranks do not end well."""
        owner, groups = self._owner, list(self._groups.values())
        self._owner = None
        self._groups.clear()
        faults = [fault for group in groups for fault in (group.close() if group.usable else [])]
        if faults:
            pytest.fail(f"after the last test of {owner and owner.__qualname__}: {'; '.join(faults)}", pytrace=False)


def world_sizes_of(owner: type[DistributedExec], marker: pytest.Mark | None = None) -> list[int] | int:
    """The world size, or sizes, that a class and a ``pytest.mark.world_size(n)`` ask for; the mark wins."""
    sizes = owner.world_size if marker is None else marker.args[0] if len(marker.args) == 1 else marker.args
    listed = [sizes] if isinstance(sizes, int) else list(sizes)
    if not listed or not all(isinstance(size, int) and size > 0 for size in listed):
        raise pytest.UsageError(f"world_size of {owner.__qualname__} is {sizes!r}, must be positive ints")
    return sizes if isinstance(sizes, int) else listed


def run_test(item: pytest.Function, pools: RankPools) -> None:
    """Run the test method of ``item`` in ranks. Raises pytest's exceptions for failure, skip and xfail."""
    owner = item.cls
    sizes = world_sizes_of(owner, item.get_closest_marker("world_size"))
    world_size = sizes if isinstance(sizes, int) else item.callspec.params["_parametrized_world_size"]
    arguments = {name: item.funcargs[name] for name in item._fixtureinfo.argnames}
    method = getattr(item, "originalname", None) or item.name
    job = _make_job(owner, method, vars(item.instance), arguments)
    if not owner.reuse_dist_env:
        _run_in_new_group(owner, world_size, job)
        return
    _check_requirements(owner)
    raise_outcome(pools.take(owner, world_size, job).run(job, _timeout_of(owner), owner.idle_timeout))


def fixture_function(owner: type[DistributedFixture]) -> Any:
    """The pytest fixture that runs ``owner.run`` in ranks."""
    needed = list(signature(owner.run).parameters)[1:]

    def run_fixture(**arguments: Any) -> None:
        if not isinstance(owner.world_size, int):
            pytest.fail(f"world_size of {owner.__qualname__} is {owner.world_size!r}, must be an int", pytrace=False)
        _run_in_new_group(owner, owner.world_size, _make_job(owner, "run", {}, arguments))

    # pytest asks the signature which fixtures to pass.
    run_fixture.__signature__ = Signature(  # type: ignore[attr-defined]
        [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in needed]
    )
    run_fixture.__doc__ = owner.__doc__
    return pytest.fixture(scope=owner.fixture_scope, name=owner.__name__)(run_fixture)


def add_fixture_functions(module: Any) -> None:
    """Put a pytest fixture beside each DistributedFixture of a module, so that pytest finds it there."""
    for name, value in list(vars(module).items()):
        if isinstance(value, type) and issubclass(value, DistributedFixture) and value is not DistributedFixture:
            setattr(module, f"_fixture_function_of_{name}", fixture_function(value))


def raise_outcome(outcomes: list[Outcome]) -> None:
    """Turn what the ranks said into pytest's exception; return if all of them passed.

    A failure on any rank is a failure, else an xfail on any rank an xfail, else a skip on any rank a skip.
    """
    kinds = {outcome.kind for outcome in outcomes}
    if kinds & {"failed", "died", "hung"}:
        pytest.fail(_describe_failure(outcomes), pytrace=False)
    for kind, end in (("xfailed", pytest.xfail), ("skipped", pytest.skip)):
        if kind in kinds:
            reasons = [outcome.reason for outcome in outcomes if outcome.kind == kind]
            if len(set(reasons)) == 1 and len(reasons) == len(outcomes):
                end(reasons[0])
            end("; ".join(f"rank {outcome.rank}: {outcome.reason}" for outcome in outcomes if outcome.kind == kind))


def _run_in_new_group(owner: type[DistributedExec], world_size: int, job: Job) -> None:
    _check_requirements(owner)
    group = _new_group(owner, world_size, job)
    outcomes = group.run(job, _timeout_of(owner), owner.idle_timeout)
    faults = group.close() if group.usable else []
    raise_outcome(outcomes)
    if faults:
        pytest.fail(f"after the test: {'; '.join(faults)}", pytrace=False)


def _check_requirements(owner: type[DistributedExec]) -> None:
    if owner.requires_cuda_env:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


def _new_group(owner: type[DistributedExec], world_size: int, job: Job) -> RankGroup:
    return RankGroup(get_server(job), world_size, owner.backend, owner.init_distributed, owner.set_dist_env)


def _timeout_of(owner: type[DistributedExec]) -> float:
    if owner.exec_timeout is not None:
        return owner.exec_timeout
    return float(os.environ.get("DS_TEST_TIMEOUT", DEFAULT_TIMEOUT))


def _make_job(owner: type, method: str, attributes: dict[str, Any], arguments: dict[str, Any]) -> Job:
    if "<locals>" in owner.__qualname__:
        pytest.fail(f"{owner.__qualname__} is defined in a function, where ranks cannot find it", pytrace=False)
    per_rank = tuple(name for name in arguments if name in PER_RANK_FIXTURES)
    pickled = {name: _pickle(name, value) for name, value in arguments.items() if name not in per_rank}
    for name, value in attributes.items():
        _pickle(f"self.{name}", value)
    module = sys.modules[owner.__module__]
    return Job(
        module=owner.__module__,
        module_file=str(module.__file__),
        class_name=owner.__qualname__,
        method=method,
        payload=pickle.dumps((attributes, pickled)),
        per_rank=per_rank,
        sys_path=list(sys.path),
        directory=os.getcwd(),
        environment=dict(os.environ),
    )


def _pickle(name: str, value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:  # noqa: BLE001 - pickling calls into the value's class, which may raise anything
        fault = f"{type(error).__name__}: {error}"
    pytest.fail(
        f"{name} cannot be passed to the ranks of a DistributedTest: its value, a {type(value).__name__}, does not "
        f"pickle ({fault}).\nFixtures run in the session's process and ranks get copies: make this object inside the "
        f"test's body, or pass what it is made from",
        pytrace=False,
    )


def _describe_failure(outcomes: list[Outcome]) -> str:
    """Text of a failure: one line that says what happened, then each rank, those that failed first in front."""
    # A death comes to light at its peers first, as broken connections.
    order = {"died": 0, "failed": 1, "hung": 2, "stopped": 3}
    told = sorted((o for o in outcomes if o.kind in order), key=lambda o: (order[o.kind], o.when))
    groups: list[tuple[list[int], Outcome]] = []
    for outcome in told:
        for ranks, other in groups:
            if (other.kind, other.details, other.reason) == (outcome.kind, outcome.details, outcome.reason):
                ranks.append(outcome.rank)
                break
        else:
            groups.append(([outcome.rank], outcome))
    headline = _headline(groups[0], outcomes)
    sections = [f"--- {_names(ranks)}: {_state(outcome)} ---\n{outcome.details}" for ranks, outcome in groups]
    rest = [o for o in outcomes if o.kind not in order]
    if rest:
        sections.append("\n".join(f"--- rank {o.rank}: {o.kind}{' - ' * bool(o.reason)}{o.reason} ---" for o in rest))
    return "\n".join([headline, *sections]).rstrip()


def _headline(first: tuple[list[int], Outcome], outcomes: list[Outcome]) -> str:
    ranks, outcome = first
    if outcome.kind != "hung":
        return f"{_names(ranks)} of {len(outcomes)}: {outcome.reason}"
    hung = [o.rank for o in outcomes if o.kind == "hung"]
    return f"{_names(hung)} of {len(outcomes)} {outcome.reason}; stopped"


def _state(outcome: Outcome) -> str:
    if outcome.kind == "stopped":
        return "still running when another rank had ended the test; stopped here"
    if outcome.kind == "hung":
        return f"{outcome.reason}; stopped here"
    return outcome.reason


def _names(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
