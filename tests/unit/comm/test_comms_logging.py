# SPDX-License-Identifier: Apache-2.0
"""The comms logger: what it counts, what it leaves alone, and its arithmetic."""

import types

import pytest
import torch

import deepspeed.comm as dist
from deepspeed.comm.utils import get_msg_size_from_args
from deepspeed.utils import comms_logging
from deepspeed.utils.comms_logging import CommsLogger, calc_bw_log, convert_size
from unit.common import DistributedTest


def section(**values):
    defaults = {"enabled": True, "prof_all": True, "prof_ops": [], "verbose": False, "debug": False}
    comms_config = types.SimpleNamespace(
        comms_logger_enabled=True, comms_logger=types.SimpleNamespace(**{**defaults, **values})
    )
    return types.SimpleNamespace(comms_config=comms_config)


def test_section_that_is_there_but_disabled():
    logger = CommsLogger()
    logger.configure(section(enabled=False).comms_config)
    assert not logger.enabled


def test_it_says_once_that_it_synchronises(monkeypatch):
    said = []
    monkeypatch.setattr(comms_logging.logger, "warning", said.append)
    logger = CommsLogger()
    assert said == []
    logger.configure(section().comms_config)
    logger.start_profiling_comms()
    logger.enabled = False
    logger.start_profiling_op(["all_reduce"])
    assert len(said) == 1 and "waits for the device before and after each logged collective" in said[0]


def test_bandwidths_are_those_of_nccl_tests():
    megabyte, ms = 10**6, 1.0  # 1 MB in 1 ms: 8 Gbit/s
    assert calc_bw_log("all_reduce", megabyte, ms, 4) == (8.0, 12.0)
    assert calc_bw_log("all_gather_into_tensor", megabyte, ms, 4) == (32.0, 24.0)
    assert calc_bw_log("reduce_scatter_tensor", megabyte, ms, 4) == (8.0, 6.0)
    assert calc_bw_log("all_to_all_single", megabyte, ms, 4) == (8.0, 6.0)
    assert calc_bw_log("broadcast", megabyte, ms, 4) == (8.0, 8.0)
    assert calc_bw_log("broadcast", megabyte, 0.0, 4) == (0.0, 0.0)


@pytest.mark.parametrize("size, text", [(0, "0B"), (512, "512.0 B"), (1536, "1.5 KB"), (2**30, "1.0 GB")])
def test_convert_size(size, text):
    assert convert_size(size) == text


def test_message_size_is_what_this_rank_puts_in():
    half = torch.zeros(6, dtype=torch.half)
    cases = [
        (dist.all_reduce, (half,), {}, 12),
        (dist.all_gather_into_tensor, (torch.zeros(100), half), {}, 12),
        (dist.all_gather_into_tensor, (torch.zeros(100),), {"tensor": half}, 12),
        (dist.reduce_scatter, (half,), {"input_list": [half, half]}, 24),
        (dist.all_to_all, ([torch.zeros(9)], [half, half]), {}, 24),
        (dist.all_reduce_coalesced, ([half] * 3,), {}, 36),
        (dist.barrier, (), {}, 0),
    ]
    for func, args, kwargs, expected in cases:
        assert get_msg_size_from_args(func, *args, **kwargs) == expected, func.__name__


def test_off_means_one_check_and_no_record(monkeypatch):
    seen = []
    wrapped = dist.timed_op(lambda *args, **kwargs: seen.append((args, kwargs)))
    monkeypatch.setattr(dist.comms_logger, "enabled", False)
    wrapped(1, group=2)
    assert seen == [((1,), {"group": 2})] and not dist.has_comm_data()


class TestLogging(DistributedTest):
    world_size = 2

    def test_counts_bytes_and_names(self, monkeypatch):
        printed = []
        monkeypatch.setattr(comms_logging, "print_rank_0", printed.append)
        tensor = torch.ones(8)
        dist.all_reduce(tensor)  # before it is on
        dist.configure(section())
        for _ in range(3):
            dist.all_reduce(tensor)
        dist.all_reduce(torch.ones(2), async_op=True).wait()
        dist.all_gather_into_tensor(torch.empty(16), tensor)
        dist.broadcast(tensor, src=0, log_name="mine")
        assert dist.has_comm_data() and dist.get_comm_operation_count() == 6
        assert sorted(dist.get_logged_comm_ops()) == ["all_gather_into_tensor", "all_reduce", "mine"]
        summary = dist.log_summary(show_straggler=True, return_dict=True)
        figures = summary["all_reduce"][32]
        assert figures["count"] == 3 and summary["all_reduce"][8]["count"] == 1
        assert figures["total_latency_ms"] >= 3 * figures["min_latency_ms"] > 0
        assert 0 <= figures["straggler_ms"] < figures["total_latency_ms"]
        assert [line.split()[0] for line in printed[0].splitlines()[1:3]] == ["all_reduce", "all_reduce"]
        assert "Straggler" in printed[0].splitlines()[0]
        assert "device synchronised before and after" in printed[0].splitlines()[-1]
        dist.reset_log()
        assert not dist.has_comm_data() and dist.comms_logger.enabled

    def test_chosen_operations_and_chosen_calls(self):
        dist.configure(section(prof_all=False, prof_ops=["broadcast"]))
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        dist.broadcast(tensor, src=0)
        dist.all_reduce(tensor, prof=True, log_name="chosen")
        assert sorted(dist.get_logged_comm_ops()) == ["broadcast", "chosen"]
        dist.comms_logger.stop_profiling_op(["broadcast"])
        dist.broadcast(tensor, src=0)
        assert dist.get_comm_operation_count() == 2

    def test_debug_names_the_caller(self):
        dist.configure(enabled=True, debug=True)

        def some_training_step():
            dist.all_reduce(torch.ones(1))

        some_training_step()
        assert dist.get_logged_comm_ops() == ["all_reduce | [Caller Func: some_training_step]"]

    def test_point_to_point_does_not_wait_for_the_peer(self):
        """Both ranks send first. Waiting at the launch would hang; large messages cannot hide in a buffer."""
        dist.configure(enabled=True)
        peer = 1 - dist.get_rank()
        sent, received = torch.ones(2**20), torch.zeros(2**20)
        works = [dist.isend(sent, peer), dist.irecv(received, peer)]
        assert dist.get_comm_operation_count() == 0
        for work in works:
            work.wait()
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
        ):
            work.wait()
        assert received.sum() == 2**20 and dist.get_comm_operation_count() == 3

    def test_bandwidth_uses_the_groups_size(self):
        dist.configure(enabled=True)
        groups = [dist.new_group([0]), dist.new_group([1])]
        dist.all_reduce(torch.ones(1000), group=groups[dist.get_rank()])
        dist.all_reduce(torch.ones(1000))
        count, _, algorithm, bus = dist.comms_logger.comms_dict["all_reduce"][4000]
        assert count == 2 and bus[0] == 0.0 and bus[1] == algorithm[1] > 0
