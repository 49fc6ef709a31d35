# SPDX-License-Identifier: Apache-2.0
"""Ranks that get out of step stop, soon, with an error that says who is where. Ranks in step notice nothing."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import timeit
from datetime import timedelta

import pytest
import torch
import torch.distributed as torch_dist

import deepspeed.comm as dist
from deepspeed.comm import watchdog, watchdog_peers, watchdog_report
from deepspeed.comm.control import ControlChannel
from deepspeed.comm.operation_log import RING, Lane, OperationLog, describe
from deepspeed.comm.watchdog import CollectiveError, CollectiveTimeoutError
from deepspeed.comm.watchdog_peers import own_hosts
from unit.common import DistributedTest

pytestmark = pytest.mark.slow

TIMEOUT = 1.5


def watchdog_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("deepspeed-watchdog")]


# ------------------------------------------------------------------ the record of one rank


def test_lane_keeps_the_last_operations_in_order():
    lane = Lane("a lane", [0, 1])
    for number in range(RING + 10):
        lane.note("reduce", ("bucket", number), key=number + 1)
    kept = lane.operations()
    assert [operation.number for operation in kept] == list(range(10, RING + 10))
    assert describe(kept[0].what) == "bucket 10" and lane.count == RING + 10


def test_descriptions_are_made_only_when_asked_for():
    calls = []

    def what():
        calls.append(1)
        return "layers.3"

    log = OperationLog()
    lane = log.lane(None, "gathers")
    lane.note("gather", what, key=4)
    wait = log.begin(lane, what)
    assert not calls
    assert log.state(0)["waits"][0]["what"] == "layers.3"
    log.end(wait)
    assert len(calls) == 1 and log.state(0)["waits"] == []


def test_faulty_description_does_not_hide_the_report():
    assert "ZeroDivisionError" in describe(lambda: str(1 // 0))


def test_noting_costs_about_a_microsecond():
    """Generous, for a busy machine; a tensor operation or a formatted text in there would cost ten times as much."""
    lane = Lane("a lane", [0, 1])
    what = ("bucket", 3)
    assert min(timeit.repeat(lambda: lane.note("reduce", what, 4), number=2000, repeat=20)) / 2000 < 5e-6


# ------------------------------------------------------------------ the report


def state_of(rank, operations, step_start=0, waits=(), ranks=(0, 1, 2), skip=0):
    log = OperationLog()
    lane = Lane("gathers of the world", list(ranks))
    for number, name in enumerate(operations):
        if number == step_start:
            lane.step_start = lane.count
        lane.note("gather", name)
    lane.ring = [entry for entry in lane.ring if entry is not None and entry[0] >= skip]
    log.lanes = lambda: [lane]
    for what in waits:
        log.begin(lane, what)
    return log.state(rank)


def test_first_difference_in_order_is_named():
    good = [f"layers.{i}" for i in range(6)]
    bad = [*good[:3], "head", *good[4:]]
    text = watchdog_report.compose({0: state_of(0, good, 2), 1: state_of(1, bad, 2), 2: state_of(2, good, 2)})
    assert (
        "OUT OF ORDER in gathers of the world: rank 1 does 'gather head' as operation 2 of this step (4 in all) where "
        "ranks 0, 2 do 'gather layers.3' as operation 2 of this step (4 in all)." in text
    )


def test_difference_before_what_is_remembered_is_noticed():
    good = [f"layers.{i}" for i in range(6)]
    states = {0: state_of(0, good, skip=3), 1: state_of(1, ["head", *good[1:]], skip=3)}
    text = watchdog_report.compose(states)
    assert "did different operations before operation 4" in text


def test_missing_operation_is_named():
    good = ["a", "b", "c"]
    text = watchdog_report.compose({0: state_of(0, good, waits=["c"]), 1: state_of(1, good[:2]), 2: state_of(2, good)})
    assert "NOT ARRIVED in gathers of the world: rank 1 has not come to operation 3, 'gather c'." in text
    assert "ranks 0, 2: 3; rank 1: 2" in text
    assert "rank 0: waits since 0.0 s for 'c'" in text
    assert "rank 1: waits for no other rank; last operation 'gather b'" in text


def test_ranks_outside_the_group_do_not_count():
    states = {0: state_of(0, ["a"], ranks=[0, 2]), 1: state_of(1, []), 2: state_of(2, ["a"], ranks=[0, 2])}
    assert watchdog_report.order_faults(states) == []


def test_silent_rank_is_told_with_its_reason():
    text = watchdog_report.compose({0: state_of(0, ["a"]), 1: "does not answer: its process has ended"})
    assert "rank 1: does not answer: its process has ended" in text
    assert "same order" in text


def test_equal_stacks_are_told_once():
    text = watchdog_report.compose({rank: state_of(rank, ["a"]) for rank in range(3)})
    assert text.count("test_equal_stacks_are_told_once") == 1
    assert "ranks 0, 1, 2:" in text


# ------------------------------------------------------------------ where a rank can be reached


@pytest.mark.parametrize("master", ["localhost", "127.0.0.1", "127.0.1.1"])
def test_ranks_of_one_host_talk_over_loopback(monkeypatch, master):
    monkeypatch.setenv("MASTER_ADDR", master)
    assert own_hosts() == ["127.0.0.1"]


def test_other_hosts_are_not_told_loopback(monkeypatch):
    """There it would mean the asking host, where nobody listens: a living rank would be taken for a dead one."""
    addresses = {"node0": "127.0.1.1", "10.255.255.255": "192.0.2.7"}  # the first as Debian maps a host's own name
    monkeypatch.setattr(watchdog_peers, "_address_towards", addresses.get)
    monkeypatch.setattr(watchdog_peers.socket, "gethostbyname", lambda name: "127.0.1.1")
    monkeypatch.setenv("MASTER_ADDR", "node0")
    assert own_hosts() == ["192.0.2.7"]
    addresses.clear()
    assert own_hosts() == []
    monkeypatch.delenv("MASTER_ADDR")
    assert own_hosts() == ["127.0.0.1"]


# ------------------------------------------------------------------ ranks out of step


def start(seconds=TIMEOUT):
    watchdog.set_timeout(seconds)
    dist.init_distributed(verbose=False)


class NeverDone:
    """Work handle of a collective that other ranks do not join."""

    def wait(self, limit):
        time.sleep(limit.total_seconds())
        raise RuntimeError("Operation timed out!")


def caught_in(call, error=CollectiveTimeoutError):
    """The text of the error that ``call`` raises, which must come soon after the timeout."""
    begin = time.monotonic()
    with pytest.raises(error) as caught:
        call()
    assert time.monotonic() - begin < TIMEOUT + 8
    return str(caught.value)


class TestTwoRanks(DistributedTest):
    world_size = 2
    init_distributed = False

    def test_sleeping_rank(self):
        start()
        dist.all_reduce(torch.ones(2))
        if dist.get_rank() == 1:
            time.sleep(TIMEOUT + 2)  # the line that rank 0 must be told
            return
        begin = time.monotonic()
        text = caught_in(lambda: dist.all_reduce(torch.ones(3)))
        assert time.monotonic() - begin > TIMEOUT
        assert "rank 0 of 2 waited" in text and "'all_reduce of 3 torch.float32 elements'" in text
        assert "rank 1 has not come to operation 2" in text
        assert "rank 1: waits for no other rank; last operation 'all_reduce of 2 torch.float32 elements'" in text
        assert "the line that rank 0 must be told" in text

    def test_stopped_rank(self):
        """It can neither answer nor is it gone."""
        start()
        dist.barrier()
        if dist.get_rank() == 1:
            pid = os.getpid()
            subprocess.Popen(
                [sys.executable, "-c", f"import os, time; time.sleep(7); os.kill({pid}, {signal.SIGCONT})"]
            )
            os.kill(pid, signal.SIGSTOP)
            return
        text = caught_in(lambda: dist.all_reduce(torch.ones(3)))
        assert "rank 1: does not answer: its process is stopped, or blocked outside of Python" in text

    def test_one_agreement_too_few(self):
        """The text of an agreement may differ between ranks; that alone is nothing wrong."""
        start()
        channel = ControlChannel()
        channel.all_reduce_max([1], what=f"what rank {dist.get_rank()} wants")
        channel.gather("x", what=f"what rank {dist.get_rank()} has")
        if dist.get_rank() == 1:
            time.sleep(TIMEOUT + 2)
            return
        text = caught_in(lambda: channel.all_reduce_max([1], what="the number of rounds"))
        assert "the ranks could not agree on the number of rounds" in text
        assert "rank 1 has not come to operation 4, 'agree on the number of rounds'" in text

    def test_error_of_one_side_only_is_an_error_with_report(self):
        """Rank 1 leaves the group: rank 0 hears of it at once, as a broken connection."""
        start()
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(1), group=group)
        if dist.get_rank() == 1:
            torch_dist.destroy_process_group(group)
            del group
            time.sleep(2)
            return
        text = caught_in(lambda: dist.all_reduce(torch.ones(1), group=group), CollectiveError)
        assert "collectives of group" in text.splitlines()[0] and "failed: " in text.splitlines()[0]
        assert "rank 1: none, or the group is destroyed there" in text

    def test_slow_rank_nobody_waits_for(self):
        start(1.0)
        time.sleep(2.5 if dist.get_rank() else 2.6)
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [2.0, 2.0]
        assert watchdog._active.verdict is None

    def test_long_wait_within_the_timeout(self):
        """Longer than a slice, so that the wait is taken up again."""
        start(8.0)
        if dist.get_rank() == 1:
            time.sleep(1.6)
        tensor = torch.full((3,), float(dist.get_rank()))
        work = dist.all_gather([torch.empty(3), gathered := torch.empty(3)], tensor, async_op=True)
        work.wait()
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
        assert gathered.tolist() == [1.0] * 3 and tensor.tolist() == [0.5] * 3
        assert watchdog._active.verdict is None and not watchdog.operations.waits

    def test_wait_that_cannot_be_given_up_is_reported(self, monkeypatch):
        start()
        logged = []
        monkeypatch.setattr(watchdog.logger, "error", logged.append)
        dist.barrier()
        if dist.get_rank() == 0:
            with watchdog.waiting("the metadata", watchdog.lane(None, "objects")):
                time.sleep(TIMEOUT + 2)
            assert len(logged) == 1 and "'the metadata' (objects of the world)" in logged[0]
        else:
            time.sleep(TIMEOUT + 2)

    def test_report_without_an_alarm(self):
        start()
        dist.barrier()
        text = watchdog.report_now()
        assert "rank 0: " in text or "ranks 0, 1: " in text
        dist.barrier()
        assert watchdog._active.verdict is None


class TestMonitoredBarrier(DistributedTest):
    world_size = 3
    init_distributed = False

    def test_all_pass(self):
        start()
        for _ in range(3):
            dist.monitored_barrier(timeout=timedelta(seconds=20))
        group = dist.new_group([0, 2])
        if dist.get_rank() != 1:
            begin = time.monotonic()
            time.sleep(0.3 * dist.get_rank())
            dist.monitored_barrier(group)
            assert time.monotonic() - begin > 0.5  # rank 2 came after 0.6 s

    @pytest.mark.parametrize(("wait_all_ranks", "watched"), [(True, True), (False, True), (True, False)])
    def test_missing_ranks_are_named_on_every_rank(self, wait_all_ranks, watched):
        start(10 * TIMEOUT if watched else 0)
        dist.barrier()
        rank = dist.get_rank()
        if rank:
            time.sleep(2.5)
        with pytest.raises(CollectiveTimeoutError) as caught:
            dist.monitored_barrier(timeout=timedelta(seconds=1), wait_all_ranks=wait_all_ranks)
        text = str(caught.value)
        if rank == 0:
            told = "ranks 1, 2" if wait_all_ranks else "rank 1"
            assert f"rank 0: {told} did not come to monitored barrier 1 within 1 s" in text
            assert ("time.sleep(2.5)" in text) is watched
        else:
            assert f"rank {rank} came to monitored barrier 1 after others had given up waiting for ranks 1, 2" in text
        dist.monitored_barrier(timeout=timedelta(seconds=20))  # the next one is a new one

    def test_watchdog_is_sooner(self):
        start()
        if dist.get_rank() == 1:
            time.sleep(TIMEOUT + 2)
            return
        assert "'monitored barrier 1'" in caught_in(lambda: dist.monitored_barrier(timeout=timedelta(seconds=60)))


class TestThreeRanks(DistributedTest):
    world_size = 3
    init_distributed = False

    def test_different_order(self):
        """ZeRO-3 style: rank 1 gathers another module than the others."""
        start()
        rank = dist.get_rank()
        lane = watchdog.lane(None, "parameters")
        watchdog.new_step()
        for name, key in [("layers.0", 1), ("layers.1", 2)]:
            lane.note("gather", name, key)
        watchdog.new_step()
        lane.note("gather", "layers.0", 1)
        name, key = ("layers.2", 3) if rank == 1 else ("layers.1", 2)
        lane.note("gather", name, key)
        text = caught_in(lambda: watchdog.wait(NeverDone(), f"module {name}", lane))
        assert f"for 'module {name}' (parameters of the world)" in text.splitlines()[0]
        assert (
            "rank 1 does 'gather layers.2' as operation 2 of this step (4 in all) where ranks 0, 2 do 'gather "
            "layers.1' as operation 2 of this step (4 in all)." in text
        )

    def test_different_collectives(self):
        start()
        rank = dist.get_rank()
        tensor = torch.ones(4)
        dist.all_reduce(tensor)
        text = caught_in(
            lambda: dist.broadcast(tensor, 0) if rank == 1 else dist.all_reduce(torch.ones(6)), CollectiveError
        )
        assert (
            "OUT OF ORDER in collectives of the world: rank 1 does 'broadcast of 4 torch.float32 elements' as "
            "operation 2 where ranks 0, 2 do 'all_reduce of 6 torch.float32 elements' as operation 2." in text
        )

    def test_all_that_wait_stop_with_the_same_report(self):
        """Also the rank whose own wait, here for an asynchronous collective, is younger than the timeout."""
        start(2.5)
        dist.barrier()
        rank = dist.get_rank()
        if rank == 1:
            time.sleep(5)
            return
        if rank == 2:
            time.sleep(1.5)
        begin = time.monotonic()
        text = caught_in(dist.all_reduce(torch.ones(1), async_op=True).wait)
        if rank == 2:
            assert time.monotonic() - begin < 2.5
            assert "because of the alarm of another rank" in text
        assert "Alarm of rank 0: waited 2." in text


# ------------------------------------------------------------------ start and end


class TestLifetime(DistributedTest):
    world_size = 2
    init_distributed = False

    @pytest.mark.parametrize("by", ["facade", "torch"])
    def test_no_thread_is_left(self, by, tmp_path):
        for number in range(2):
            watchdog.set_timeout(1.0)
            method = f"file://{tmp_path}/{number}"
            dist.init_distributed(init_method=method, rank=dist.get_local_rank(), world_size=2, verbose=False)
            assert watchdog_threads() == ["deepspeed-watchdog"]
            dist.all_reduce(torch.ones(1))
            (dist if by == "facade" else torch_dist).destroy_process_group()
            deadline = time.monotonic() + (
                0 if by == "facade" else 5
            )  # torch does not say so: it is seen a little later
            while watchdog_threads() and time.monotonic() < deadline:
                time.sleep(0.05)
            assert watchdog_threads() == []

    def test_started_once(self):
        start()
        first = watchdog._active
        dist.init_distributed(verbose=False)
        assert watchdog._active is first

    def test_off(self, monkeypatch):
        monkeypatch.setenv("DS_COLLECTIVE_TIMEOUT", "0")
        start()
        assert not watchdog.running() and watchdog_threads() == []
        dist.all_reduce(tensor := torch.ones(2))
        assert tensor.tolist() == [2.0, 2.0]

    def test_timeout_in_force(self, monkeypatch):
        dist.init_distributed(timeout=timedelta(seconds=50), verbose=False)
        assert watchdog._active.seconds == 45.0  # before the library gives up, with an error that says nothing
        watchdog.set_timeout(30)
        assert watchdog._active.seconds == 30.0
        monkeypatch.setenv("DS_COLLECTIVE_TIMEOUT", "20")
        watchdog.set_timeout(40)
        assert watchdog._active.seconds == 20.0
        monkeypatch.setenv("DS_COLLECTIVE_TIMEOUT", "soon")
        with pytest.raises(ValueError, match="DS_COLLECTIVE_TIMEOUT='soon' must be a number of seconds"):
            watchdog.start() or watchdog.set_timeout(1)


def test_timeout_must_be_a_number():
    with pytest.raises(ValueError, match="-1, must be a number of seconds"):
        watchdog.set_timeout(-1)


# Each case runs in processes that end as scripts do. They are forks of one, which saves importing torch each time.
SCRIPT = """
    import json, os, sys, time
    import torch
    import deepspeed.comm as dist
    from deepspeed.comm import watchdog

    CASES = {"gave up": 3, "raised": 2, "quiet": 2, "device": 2}

    class NeverPassed:
        def query(self):
            return False

    def body(case, rank):
        dist.all_reduce(torch.ones(2))
        if case == "gave up":
            if rank == 1:
                limit = time.monotonic() + 60
                while not os.path.exists("others have ended") and time.monotonic() < limit:
                    time.sleep(0.1)
                return
            dist.all_reduce(torch.ones(3))
        elif case == "raised":
            if rank == 1:
                raise ValueError("no such file")
            dist.all_reduce(torch.ones(3))
        elif case == "device":
            if rank == 0:
                watchdog.watch_device(watchdog.DeviceProbe("the device of the test", NeverPassed))
            time.sleep(30 if rank == 0 else 6)
        else:
            time.sleep(3 * rank)

    children = {}
    for case, size in CASES.items():
        for rank in range(size):
            pid = os.fork()
            if pid:
                children[pid] = (case, rank)
                continue
            log = os.open(f"{case}.{rank}.log", os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            method = f"file://{os.getcwd()}/{case}.store"
            dist.init_distributed("gloo", init_method=method, rank=rank, world_size=size, verbose=False)
            body(case, rank)
            sys.exit()
    ends = {}
    while children:
        pid, status = os.wait()
        case, rank = children.pop(pid)
        ends[f"{case}.{rank}"] = (os.waitstatus_to_exitcode(status), len(ends))
        if {"gave up.0", "gave up.2"} <= ends.keys():
            open("others have ended", "w").close()
    json.dump(ends, open("ends.json", "w"))
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Per case: exit status, output and place in the order of ends of each rank."""
    place = tmp_path_factory.mktemp("ended")
    (place / "script.py").write_text(textwrap.dedent(SCRIPT))
    here = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    environment = {**os.environ, "PYTHONPATH": here, "OMP_NUM_THREADS": "1", "DS_COLLECTIVE_TIMEOUT": str(TIMEOUT)}
    subprocess.run([sys.executable, "script.py"], cwd=place, env=environment, check=True, timeout=100)
    cases = {}
    for name, (code, end) in json.loads((place / "ends.json").read_text()).items():
        case, rank = name.split(".")
        cases.setdefault(case, {})[int(rank)] = (code, (place / f"{name}.log").read_text(), end)
    return cases


def test_process_that_gave_up_ends_at_once(ended):
    """A gloo thread is still in the collective; joining it would take until rank 1 leaves, which waits for the end."""
    code, _, last = ended["gave up"][1]
    assert code == 0
    for rank in (0, 2):
        code, log, place = ended["gave up"][rank]
        assert code == 1 and place < last
        assert "CollectiveTimeoutError" in log and "rank 1 has not come to operation 2" in log


def test_how_a_rank_ended_is_told(ended):
    assert [code for code, _, _ in ended["raised"].values()] == [1, 1]
    assert "rank 1: its process has ended with ValueError: no such file" in ended["raised"][0][1]


def test_stuck_device_ends_the_process(ended):
    code, log, _ = ended["device"][0]
    assert code == watchdog.EXIT_CODE == 75
    assert "rank 0 of 2: the device of the test has not advanced for" in log and "in body: time.sleep(30" in log
    assert ended["device"][1][0] == 0  # computes, and nobody waits for it


def test_device_that_goes_on_is_not_stuck(monkeypatch):
    """Marks are asked about rarely, and a passed one is replaced."""
    clock, made = [0.0], []

    class Mark:
        passed, asked = False, 0

        def __init__(self):
            made.append(self)

        def query(self):
            self.asked += 1
            return self.passed

    monkeypatch.setattr(watchdog.time, "monotonic", lambda: clock[0])
    probe = watchdog.DeviceProbe("a queue", Mark)
    for clock[0] in (0.0, 2.0, 4.0):
        probe.look(10.0)
    assert len(made) == 1 and made[0].asked == 0
    made[0].passed = True
    for clock[0] in (6.0, 8.0, 10.0):
        probe.look(10.0)
    assert len(made) == 2 and (made[0].asked, made[1].asked) == (1, 0) and probe.stuck == 0.0
    clock[0] = 17.0
    probe.look(10.0)
    assert probe.stuck == 11.0


def test_quiet_end_without_destroying_the_group(ended):
    for code, log, _ in ended["quiet"].values():
        assert code == 0
        assert not [line for line in log.splitlines() if "Gloo" not in line]
