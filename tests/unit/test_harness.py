# SPDX-License-Identifier: Apache-2.0
"""Tests of the multi-rank tests themselves: pytest runs on small files in a process of its own, and what it says is
checked. A harness that lets a failure pass would make every other test worthless."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import uuid
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.slow

TESTS = Path(__file__).resolve().parents[1]
on_linux = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes by /proc")

# Without torch, which the session itself does not need, and which takes seconds to import.
LIGHT_HEADER = """
import os, signal, subprocess, sys, threading, time
import pytest
from unit.common import DistributedFixture, DistributedTest

def rank(): return int(os.environ["RANK"])
"""
HEADER = (
    LIGHT_HEADER
    + """
import torch
import torch.distributed as dist
"""
)

OUTCOMES = """
class TestOutcome(DistributedTest):
    world_size = 3

    def test_pass(self):
        total = torch.tensor(float(dist.get_rank() + 1))
        dist.all_reduce(total)
        assert total.item() == 6.0 and dist.get_world_size() == 3

    def test_one_rank_fails(self):
        print("written by", rank())
        print("error of", rank(), file=sys.stderr)
        values = {"a": rank()}
        if rank() == 1:
            assert values["a"] == 7, "seven expected"
        dist.barrier()

    def test_ranks_fail_differently(self):
        time.sleep(0.3 * (2 - rank()))
        raise (KeyError, ValueError, OSError)[rank()](f"from {rank()}")

    def test_all_fail_alike(self):
        raise ValueError("alike")

    def test_raises_inside(self):
        with pytest.raises(ValueError, match="expected"):
            raise ValueError("expected")

    def test_all_skip(self):
        pytest.skip("nowhere")

    def test_one_skips(self):
        if rank() == 2:
            pytest.skip("not on two")

    def test_skip_does_not_hide_failure(self):
        if rank() == 0:
            pytest.skip("early")
        time.sleep(1.5)
        assert rank() != 2

    def test_one_skips_others_wait(self):
        if rank() == 0:
            pytest.skip("the rest waits")
        dist.barrier()

    def test_xfail(self):
        pytest.xfail("known")

    def test_exit(self):
        if rank() == 1:
            sys.exit(0)

    def test_crash(self):
        if rank() == 2:
            os.kill(os.getpid(), signal.SIGSEGV)
        dist.barrier()

    def test_silent_end(self):
        if rank() == 1:
            os._exit(0)

    def test_crash_while_leaving(self, monkeypatch):
        def crash(*_):
            os.kill(os.getpid(), signal.SIGKILL)
        torch.distributed.destroy_process_group = crash


class TestHang(DistributedTest):
    world_size = 2
    exec_timeout = 1.5

    def test_hang(self):
        if rank() == 0:
            dist.barrier()
        else:
            this_is_where_it_sleeps()

    def test_hang_after_a_pass(self):
        if rank() == 1:
            dist.barrier()

    def test_after(self):
        dist.barrier()


class TestIdle(DistributedTest):
    world_size = 2
    idle_timeout = 2.0

    def test_one_collective_too_many(self):
        if rank() == 1:
            dist.barrier()

    def test_slow_but_busy(self):
        end = time.monotonic() + 4
        while rank() == 1 and time.monotonic() < end:
            pass


def this_is_where_it_sleeps():
    time.sleep(1000)
"""

PARAMETERS = """
class Point:
    def __init__(self, x): self.x = x

@pytest.fixture(params=["f1", "f2"])
def letter(request):
    return request.param

@pytest.fixture
def pid_of_session():
    return os.getpid()

class TestParameters(DistributedTest):
    world_size = [1, 2]

    @pytest.fixture(autouse=True)
    def attributes(self):
        self.given = {"t": torch.arange(3)}

    def setup_method(self, method):
        self.method_name = method.__name__

    @pytest.mark.parametrize("number", [3, 4])
    def test_values(self, letter, number, pid_of_session):
        assert letter in ("f1", "f2") and number in (3, 4)
        assert os.getpid() != pid_of_session
        assert dist.get_world_size() == self.world_size
        assert self.given["t"].tolist() == [0, 1, 2] and self.method_name == "test_values"
        print(f"ran {self.world_size} {letter} {number}")

    @pytest.mark.parametrize("value", [Point(1), torch.bfloat16, torch.ones(2), None], ids=str)
    @pytest.mark.world_size(2)
    def test_kinds(self, value):
        assert value is None or isinstance(value, (Point, torch.dtype, torch.Tensor))

    @pytest.mark.world_size(4)
    def test_mark(self, tmpdir, tmp_path):
        assert dist.get_world_size() == self.world_size == 4
        found = [None] * 4
        dist.all_gather_object(found, (str(tmpdir), str(tmp_path)))
        assert len(set(found)) == 1 and os.path.isdir(tmpdir)

    @pytest.mark.world_size(2)
    def test_monkeypatch(self, monkeypatch):
        monkeypatch.setenv("OF_THIS_RANK", str(rank()))
        assert os.environ["OF_THIS_RANK"] == os.environ["RANK"]

    @pytest.mark.world_size(2)
    def test_request(self, request):
        pass

    @pytest.mark.world_size(2)
    @pytest.mark.parametrize("function", [lambda: 1])
    def test_lambda(self, function):
        pass

    @pytest.mark.cuda
    @pytest.mark.world_size(2)
    def test_cuda(self):
        pass


class TestEnvironment(DistributedTest):
    world_size = 2

    def test_names(self):
        names = ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR")
        expected = (os.environ["RANK"], "2", "2", "127.0.0.1")
        assert tuple(os.environ[name] for name in names) == expected
        assert dist.get_backend() == "gloo" and torch.get_num_threads() == 1
        assert rank() == dist.get_rank() and int(os.environ["MASTER_PORT"]) > 0


IMPORTED_IN = os.getpid()

class TestImport(DistributedTest):
    world_size = 2

    def test_ahead_of_the_ranks(self):
        assert os.getppid() == IMPORTED_IN


class TestNotInitialized(DistributedTest):
    world_size = 2
    init_distributed = False

    def test_master_port_is_free(self):
        assert not dist.is_initialized()
        dist.init_process_group("gloo")
        dist.barrier()


class TestNoEnvironment(DistributedTest):
    world_size = 2
    set_dist_env = False

    def test_names(self):
        assert not {"RANK", "WORLD_SIZE", "MASTER_PORT"} & os.environ.keys()
        assert dist.get_world_size() == 2


class TestReuse(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    def test_first(self):
        TestReuse.pid = os.getpid()

    def test_second(self):
        assert TestReuse.pid == os.getpid()
        dist.barrier()

    def test_third_fails(self):
        assert rank() == 0

    def test_fourth(self):
        assert not hasattr(TestReuse, "pid")
        dist.barrier()


class written_by_two(DistributedFixture):
    world_size = 2

    def run(self, class_tmpdir, content):
        assert dist.get_world_size() == 2
        (class_tmpdir / f"{content}-{rank()}").write_text(content)


class fails(DistributedFixture):
    world_size = 2

    def run(self):
        assert rank() == 1, "rank of the fixture"


class skips(DistributedFixture):
    world_size = 1

    def run(self):
        pytest.skip("by the fixture")


class TestFixture(DistributedTest):
    world_size = 4

    @pytest.mark.parametrize("content", ["c1", "c2"])
    def test_reads(self, written_by_two, class_tmpdir, content):
        assert dist.get_world_size() == 4
        assert sorted(p.name for p in class_tmpdir.glob(content + "*")) == [content + "-0", content + "-1"]

    def test_failing(self, fails):
        pass

    def test_skipping(self, skips):
        pass


class TestTiming(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("number", range(5))
    def test_empty(self, number):
        pass


@pytest.mark.parametrize("content", ["plain"])
def test_plain_function(written_by_two, content, tmp_path):
    pass
"""


# No rank may be forked from a process with two threads: one lock that the other thread holds stays locked for ever.
STARTS_A_THREAD = """
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
IMPORTED_IN = os.getpid()

class TestThread(DistributedTest):
    world_size = 1

    def test_imported_by_the_rank_itself(self):
        assert os.getpid() == IMPORTED_IN and os.getppid() != os.getpid()
"""


@dataclass(frozen=True)
class Result:
    """How one test ended, taken from the junit report."""

    outcome: str
    message: str
    text: str
    output: str
    seconds: float


def run_pytest(folder: Path, *arguments: str, mark: str = "") -> subprocess.Popen[str]:
    """Start pytest on a folder, in a session of its own, with this tree's plugin."""
    ours = ("PYTEST_ADDOPTS", "RANK", "PYTEST_XDIST_WORKER")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    paths = [str(TESTS), str(TESTS.parent), environment.get("PYTHONPATH", "")]
    environment.update(PYTHONPATH=os.pathsep.join(filter(None, paths)), HARNESS_MARK=mark, DS_ACCELERATOR="cpu")
    # deepspeed only, because ranks initialise through it: nothing here makes an optimizer.
    environment.update(CUDA_VISIBLE_DEVICES="", DS_TEST_PRELOAD="deepspeed")
    command = [sys.executable, "-m", "pytest", "-p", "unit.rank_plugin", "-p", "no:cacheprovider", *arguments]
    return subprocess.Popen(
        [*command, "."], cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def results_in(report: Path) -> dict[str, Result]:
    """The results in a junit report by class and test name."""
    results = {}
    for case in ElementTree.parse(report).iter("testcase"):
        owner = case.attrib["classname"].rpartition(".")[2]
        ending = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        results[f"{owner}::{case.attrib['name']}"] = Result(
            outcome="passed" if ending is None else ending.tag,
            message="" if ending is None else ending.attrib.get("message", ""),
            text="" if ending is None else ending.text or "",
            output="".join(child.text or "" for child in case if child.tag.startswith("system-")),
            seconds=float(case.attrib["time"]),
        )
    return results


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Callable[[], dict[str, Result]]]]:
    """Runs both large files at the same time, since one of them mostly waits; by name, how to get the results."""
    runs = {}
    for name, body in {"outcomes": OUTCOMES, "parameters": PARAMETERS}.items():
        folder = tmp_path_factory.mktemp(name)
        (folder / f"test_{name}.py").write_text(HEADER + body)
        if name == "parameters":
            (folder / "test_threads.py").write_text(LIGHT_HEADER + STARTS_A_THREAD)
        runs[name] = folder, run_pytest(folder, "--junitxml=report.xml", "-o", "junit_logging=all")

    def results(name: str) -> dict[str, Result]:
        folder, process = runs[name]
        output = process.communicate(timeout=180)[0]
        assert (folder / "report.xml").exists(), output
        return results_in(folder / "report.xml")

    yield {name: partial(results, name) for name in runs}
    for _, process in runs.values():
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def outcomes(reports: dict[str, Callable[[], dict[str, Result]]]) -> dict[str, Result]:
    return reports["outcomes"]()


@pytest.fixture(scope="module")
def parameters(reports: dict[str, Callable[[], dict[str, Result]]]) -> dict[str, Result]:
    return reports["parameters"]()


# ------------------------------------------------------------------------------------------------------- outcomes


@pytest.mark.parametrize("name", ["TestOutcome::test_pass", "TestOutcome::test_raises_inside", "TestHang::test_after"])
def test_passes(outcomes: dict[str, Result], name: str) -> None:
    assert outcomes[name].outcome == "passed", outcomes[name].text


def test_failure_of_one_rank_names_it_and_ends_the_others(outcomes: dict[str, Result]) -> None:
    result = outcomes["TestOutcome::test_one_rank_fails"]
    assert result.outcome == "failure"
    assert result.message.startswith("Failed: rank 1 of 3: AssertionError: seven expected")
    assert "assert 1 == 7" in result.text and 'assert values["a"] == 7, "seven expected"' in result.text
    assert re.search(r"--- (rank 0|ranks [02], [02]): still running when another rank had ended the test", result.text)
    assert "in barrier" in result.text and "in test_one_rank_fails" in result.text
    assert "rank_server.py" not in result.text
    assert result.seconds < 8


def test_output_of_ranks_is_captured(outcomes: dict[str, Result]) -> None:
    output = outcomes["TestOutcome::test_one_rank_fails"].output
    for rank in range(3):
        assert f"[rank {rank}] written by {rank}" in output
        assert f"[rank {rank}] error of {rank}" in output


def test_different_failures_are_told_in_the_order_they_happened(outcomes: dict[str, Result]) -> None:
    result = outcomes["TestOutcome::test_ranks_fail_differently"]
    assert result.message.startswith("Failed: rank 2 of 3: OSError: from 2")
    assert re.findall(r"--- rank (\d): (\w+)", result.text) == [
        ("2", "OSError"),
        ("1", "ValueError"),
        ("0", "KeyError"),
    ]


def test_equal_failures_are_told_once(outcomes: dict[str, Result]) -> None:
    result = outcomes["TestOutcome::test_all_fail_alike"]
    assert re.search(r"ranks [012], [012], [012] of 3: ValueError: alike", result.message)
    assert result.text.count("Traceback") == 1


def test_skips_and_xfails_keep_their_reason(outcomes: dict[str, Result]) -> None:
    for name, reason in {
        "test_all_skip": "nowhere",
        "test_one_skips": "rank 2: not on two",
        "test_one_skips_others_wait": "rank 0: the rest waits",
        "test_xfail": "known",
    }.items():
        result = outcomes[f"TestOutcome::{name}"]
        assert (result.outcome, result.message) == ("skipped", reason)


def test_skip_of_one_rank_does_not_hide_a_failure(outcomes: dict[str, Result]) -> None:
    result = outcomes["TestOutcome::test_skip_does_not_hide_failure"]
    assert result.outcome == "failure" and "rank 2 of 3: AssertionError" in result.message


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("test_exit", "rank 1 of 3: SystemExit: 0"),
        ("test_crash", "rank 2 of 3: died: SIGSEGV"),
        ("test_silent_end", "rank 1 of 3: left with exit code 0"),
        ("test_crash_while_leaving", "rank 0 died: SIGKILL while leaving the process group"),
    ],
)
def test_a_rank_that_ends_fails_its_test(outcomes: dict[str, Result], name: str, message: str) -> None:
    result = outcomes[f"TestOutcome::{name}"]
    assert result.outcome == "failure" and message in result.message
    assert result.seconds < 8


def test_crash_shows_the_stack(outcomes: dict[str, Result]) -> None:
    assert re.search(r"Segmentation fault\s+(.*\n)+.*in test_crash", outcomes["TestOutcome::test_crash"].text)


def test_hang_ends_with_stacks_of_all_ranks(outcomes: dict[str, Result]) -> None:
    result = outcomes["TestHang::test_hang"]
    assert result.message.startswith("Failed: ranks 0, 1 of 2 did not finish within 1.5 s")
    assert "in this_is_where_it_sleeps" in result.text and "in barrier" in result.text
    assert 1.5 <= result.seconds < 8


def test_hang_of_one_rank_names_it(outcomes: dict[str, Result]) -> None:
    result = outcomes["TestHang::test_hang_after_a_pass"]
    assert result.message.startswith("Failed: rank 1 of 2 did not finish within 1.5 s")
    assert "--- rank 0: passed ---" in result.text and "in barrier" in result.text


def test_a_rank_that_waits_for_finished_ones_ends_early(outcomes: dict[str, Result]) -> None:
    result = outcomes["TestIdle::test_one_collective_too_many"]
    assert result.message.startswith("Failed: rank 1 of 2 idled for 2 s after other ranks had finished")
    assert "in barrier" in result.text and result.seconds < 12
    assert outcomes["TestIdle::test_slow_but_busy"].outcome == "passed"


# ---------------------------------------------------------------------------------- parameters, fixtures, environment


def test_values_of_fixtures_and_parameters_reach_all_ranks(parameters: dict[str, Result]) -> None:
    for size in (1, 2):
        for letter in ("f1", "f2"):
            for number in (3, 4):
                wanted = {f"world{size}", letter, str(number)}
                named = [result for name, result in parameters.items() if wanted <= parts_of_id(name)]
                assert [result.outcome for result in named] == ["passed"], named
                assert named[0].output.count(f"ran {size} {letter} {number}") == size


def parts_of_id(name: str) -> set[str]:
    """The parts of a test's id: what stands between the brackets, split at the hyphens."""
    return set(name.partition("[")[2].rstrip("]").split("-"))


def test_everything_else_passes(parameters: dict[str, Result]) -> None:
    expected_to_end_otherwise = ("test_request", "test_lambda", "test_cuda", "fail", "test_skipping")
    others = {n: r for n, r in parameters.items() if not any(part in n for part in expected_to_end_otherwise)}
    assert len(others) >= 28
    assert {n: r.text for n, r in others.items() if r.outcome != "passed"} == {}
    for name in (
        "TestFixture::test_reads[c1]",
        "TestNotInitialized::test_master_port_is_free",
        "TestReuse::test_fourth",
        "TestImport::test_ahead_of_the_ranks",
        "TestThread::test_imported_by_the_rank_itself",
    ):
        assert name in others


@pytest.mark.parametrize(("test", "argument"), [("test_request", "request"), ("test_lambda[<lambda>]", "function")])
def test_what_does_not_pickle_is_named(parameters: dict[str, Result], test: str, argument: str) -> None:
    result = parameters[f"TestParameters::{test}"]
    assert result.outcome == "failure"
    assert f"{argument} cannot be passed to the ranks" in result.message and "does not pickle" in result.message


def test_cuda_mark_skips(parameters: dict[str, Result]) -> None:
    result = parameters["TestParameters::test_cuda"]
    assert (result.outcome, result.message) == ("skipped", "needs a CUDA device")


def test_failure_of_a_fixture_is_an_error_of_its_test(parameters: dict[str, Result]) -> None:
    result = parameters["TestFixture::test_failing"]
    assert result.outcome == "error" and "rank 0 of 2: AssertionError: rank of the fixture" in result.message


def test_skip_of_a_fixture_skips_its_test(parameters: dict[str, Result]) -> None:
    result = parameters["TestFixture::test_skipping"]
    assert (result.outcome, result.message) == ("skipped", "by the fixture")


def test_failure_in_reused_ranks(parameters: dict[str, Result]) -> None:
    result = parameters["TestReuse::test_third_fails"]
    assert result.outcome == "failure" and "rank 1 of 2" in result.message


def test_overhead_is_small(parameters: dict[str, Result]) -> None:
    times = [result.seconds for name, result in parameters.items() if name.startswith("TestTiming")]
    # 0.12 s on two idle cores. The best of five, with room for a machine that is busy with something else.
    assert len(times) == 5 and min(times) < 0.5


# ---------------------------------------------------------------------------------------------- the session's end

SLEEPER = """
class TestSleep(DistributedTest):
    world_size = 2

    def test_sleep(self):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
        print("asleep", flush=True)
        time.sleep(100)

    def test_next(self):
        print("the next one ran", flush=True)
"""

SERVER_KILLER = """
class TestServer(DistributedTest):
    world_size = 2

    def test_kills_it(self):
        if rank() == 0:
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(100)

    def test_new_server(self):
        import torch

        torch.distributed.barrier()
"""


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    limit = time.monotonic() + seconds
    while not (done := condition()) and time.monotonic() < limit:
        time.sleep(0.05)
    return done


def processes_with(mark: str) -> list[int]:
    """Processes that have HARNESS_MARK=mark in the environment they were started with, zombies not counted."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"HARNESS_MARK={mark}".encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue  # It ended meanwhile, or belongs to somebody else.
    return found


@on_linux
@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGKILL], ids=["interrupt", "kill"])
def test_nothing_outlives_the_session(tmp_path: Path, signal_number: int) -> None:
    mark = uuid.uuid4().hex
    (tmp_path / "test_sleeper.py").write_text(LIGHT_HEADER + SLEEPER)
    process = run_pytest(tmp_path, "-s", "-k", "test_sleep", mark=mark)
    assert process.stdout is not None
    lines = []
    # With -s the lines arrive while the ranks run.
    while sum("asleep" in line for line in lines) < 2:
        line = process.stdout.readline()
        assert line, "".join(lines)
        lines.append(line)
    # The session, the server, two ranks and their children.
    assert wait_until(lambda: len(processes_with(mark)) >= 6, 5), processes_with(mark)
    process.send_signal(signal_number)
    output = process.communicate(timeout=20)[0]
    assert signal_number == signal.SIGKILL or "KeyboardInterrupt" in output
    assert wait_until(lambda: not processes_with(mark), 5), processes_with(mark)
    assert any("[rank 1] asleep" in line for line in lines)


@on_linux
def test_the_death_of_the_server_costs_one_test(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    (tmp_path / "test_server.py").write_text(LIGHT_HEADER + SERVER_KILLER)
    output = run_pytest(tmp_path, mark=mark).communicate(timeout=60)[0]
    assert "1 failed, 1 passed" in output, output
    assert "the process that ranks are forked from is gone" in output
    assert processes_with(mark) == []


def test_selection_and_stop_at_the_first_failure(tmp_path: Path) -> None:
    body = """
    class TestSelected(DistributedTest):
        world_size = 1
        init_distributed = False

        def test_one(self):
            assert rank() == 5

        def test_two(self):
            pass

        def test_three(self):
            assert rank() == 5

        def test_four(self):
            pass
    """
    (tmp_path / "test_selected.py").write_text(LIGHT_HEADER + textwrap.dedent(body))
    output = run_pytest(tmp_path, "-q", "-x", "-k", "not one").communicate(timeout=60)[0]
    assert re.match(r"1 failed, 1 passed, 1 deselected in", output.strip().splitlines()[-1]), output


# -------------------------------------------------------------------------------------------- processes side by side


@pytest.mark.parametrize(
    ("arguments", "options", "lanes"),
    [
        ([str(TESTS)], {}, 2),
        ([str(TESTS / "unit" / "utils"), __file__], {}, 2),
        ([__file__], {}, None),
        ([f"{__file__}::test_lanes"], {}, None),
        ([str(TESTS)], {"numprocesses": 0}, None),
        ([str(TESTS)], {"tx": ["popen"]}, None),
        ([str(TESTS)], {"usepdb": True}, None),
        ([str(TESTS)], {"capture": "no"}, None),
        ([str(TESTS)], {"collectonly": True}, None),
        ([str(TESTS)], {"xdist": False}, None),
    ],
)
def test_lanes(
    arguments: list[str],
    options: dict[str, object],
    lanes: int | None,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Folders are run in one process per processor, unless an option or a test that is meant alone says otherwise."""
    conftest = request.config.pluginmanager.get_plugin(str(TESTS / "conftest.py"))
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setattr(conftest, "_processors", lambda: 2)
    monkeypatch.setattr(conftest, "GPU", TESTS / "no such file")
    defaults = {"numprocesses": None, "dist": "no", "tx": [], "usepdb": False, "capture": "fd", "collectonly": False}
    plugins = SimpleNamespace(hasplugin=lambda name: name == "xdist" and options.get("xdist", True))
    config = SimpleNamespace(option=SimpleNamespace(**{**defaults, **options}), args=arguments, pluginmanager=plugins)
    before = vars(config.option).copy()
    conftest.pytest_cmdline_main(config)
    if lanes is None:
        assert vars(config.option) == before
    else:
        assert (config.option.numprocesses, config.option.dist) == (lanes, "loadfile")
