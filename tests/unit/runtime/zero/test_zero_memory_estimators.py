# SPDX-License-Identifier: Apache-2.0
"""The estimates are what an engine holds, and the printed tables are the estimates."""

import gc
import re

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.runtime.gradients import arithmetic
from deepspeed.runtime.zero import memory_estimators as estimators
from deepspeed.runtime.zero.memory_estimators import (
    bytes_held,
    count_params,
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
    largest_layer,
)
from deepspeed.utils import set_z3_leaf_module
from unit.common import DistributedTest

GIB = 2**30
BILLION = 10**9


def bytes_of_storages():
    """Of every tensor alive: address of its memory -> bytes. Without the scratch that arithmetic keeps per thread."""
    gc.collect()
    found = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor) and each.numel() != arithmetic.CHUNK:
            storage = each.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


class TestHeld(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize(
        ("stage", "dtype", "bucket"),
        [
            (2, torch.bfloat16, 500_000_000),
            (2, torch.float32, 500_000_000),
            (2, torch.bfloat16, 20_000),
            (1, torch.float32, 20_000),
            (3, torch.bfloat16, 500_000_000),
            (3, torch.bfloat16, 20_608),  # two layers exactly: whole slices lie in a bucket while they fit
        ],
    )
    def test_estimate_is_what_an_engine_holds(self, stage, dtype, bucket):
        before = bytes_of_storages()
        model = nn.Sequential(*(nn.Linear(101, 101) for _ in range(5)))
        model[1].requires_grad_(False)
        trained, frozen = count_params(model)
        assert frozen == 101 * 102 and trained == 4 * frozen
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": dtype == torch.bfloat16},
            "zero_optimization": {
                "stage": stage,
                "reduce_bucket_size": bucket,
                "stage3_param_persistence_threshold": 0,  # small ones would stay whole
            },
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        }
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        for _ in range(2):
            engine.backward(engine(torch.ones(4, 101, dtype=dtype)).square().mean())
            engine.step()
        after = bytes_of_storages()
        measured = sum(nbytes for address, nbytes in after.items() if address not in before)
        held = bytes_held(trained, self.world_size, stage, dtype.itemsize, bucket, True, frozen)
        assert held["communication buffers"] > 0
        # Padding, and the scalars: Adam's step, the loss scale, the message of agreements.
        assert 0 <= measured - sum(held.values()) <= 1000, (measured, held)


@pytest.mark.parametrize("offload", [True, False])
def test_numbers_of_zero2(offload):
    cpu, device = estimate_zero2_model_states_mem_needs(8 * BILLION, 8, 2, cpu_offload=offload)
    # 16 bytes are sharded over 16 ranks; two buffers of 16-bit, a shard each, and a bucket of gradients
    share = BILLION // 2
    common = 16 * BILLION + 2 * share * 2 + 2 * share
    assert device == max(common + (0 if offload else 16 * share), 2 * 16 * BILLION)
    assert cpu == int(1.5 * max(8 * 8 * 4 * BILLION, 8 * 16 * share if offload else 0))


def test_zero2_of_a_small_model_is_one_bucket():
    _, device = estimate_zero2_model_states_mem_needs(1_000_000, 4, cpu_offload=False)
    assert device == 2_000_000 + 16 * 250_000 + 2_000_000 + 2_000_000


def test_start_of_zero2_may_need_more_than_training():
    _, device = estimate_zero2_model_states_mem_needs(8 * BILLION, 64, 1, cpu_offload=True)
    assert device == 2 * 16 * BILLION


@pytest.mark.parametrize(
    ("offload", "offload_params", "sharded", "moved"),
    [(True, True, 0, 18), (True, False, 2, 16), (False, False, 18, 0), (False, True, 18, 0)],
)
def test_numbers_of_zero3(offload, offload_params, sharded, moved):
    cpu, device, layer = estimate_zero3_model_states_mem_needs(
        8 * BILLION, 100_000_000, 8, 2, offload, offload_params, zero_init=True, additional_buffer_factor=1.0
    )
    share = BILLION // 2
    assert layer == 2 * 2 * 100_000_000
    assert device == sharded * share + 2 * 500_000_000 * 2 + layer + 2 * 50_000_000
    assert cpu == max(8 * moved * share, 8 * 4 * 100_000_000)
    cpu, _, _ = estimate_zero3_model_states_mem_needs(
        8 * BILLION, 100_000_000, 8, 2, offload, offload_params, zero_init=False, additional_buffer_factor=1.0
    )
    assert cpu == max(8 * moved * share, 8 * 4 * 8 * BILLION)


def test_partitioning_more_needs_less():
    per_rank = [sum(bytes_held(BILLION, 8, stage).values()) for stage in (1, 2, 3)]
    assert per_rank[0] == per_rank[1] > per_rank[2]
    assert sum(bytes_held(BILLION, 16, 3).values()) < per_rank[2]


def test_parameters_and_layers_of_a_model():
    model = nn.Sequential(nn.Linear(10, 20), nn.Sequential(nn.Linear(20, 10), nn.Linear(10, 10)))
    model[1][1].weight = model[1][0].weight = nn.Parameter(torch.zeros(10, 20))
    assert count_params(model) == (10 * 20 + 20 + 10 * 20 + 10 + 10, 0)
    assert largest_layer(model) == 220
    set_z3_leaf_module(model[1], True)
    assert largest_layer(model) == 220
    model[1].append(nn.Linear(10, 10))
    assert largest_layer(model) == 220 + 110
    for parameter in model.parameters():
        parameter.ds_numel, parameter.data = parameter.numel(), torch.empty(0)
    model[0].requires_grad_(False)
    assert count_params(model) == (330, 220) and largest_layer(model) == 330


def table(text):
    rows = re.findall(r"([\d.]+) GiB \| +([\d.]+) GiB \| (.+)", text)
    return {options: (float(cpu), float(device)) for cpu, device, options in rows}


def test_table_of_zero2(capsys):
    estimate_zero2_model_states_mem_needs_all_cold(3 * BILLION, 4, 2)
    text = capsys.readouterr().out
    assert "3000M parameters; 2 node(s) with 4 device(s)" in text
    rows = table(text)
    assert list(rows) == ["offload_optimizer=cpu", "offload_optimizer=none"]
    for offload, row in zip((True, False), rows.values()):
        expected = estimate_zero2_model_states_mem_needs(3 * BILLION, 4, 2, offload)
        assert row == tuple(round(nbytes / GIB, 2) for nbytes in expected)


def test_table_of_zero3(capsys):
    estimate_zero3_model_states_mem_needs_all_cold(3 * BILLION, 50_000_000, 4, 2, 1.2)
    rows = table(capsys.readouterr().out)
    assert len(rows) == 6
    for params, optimizer in ((True, True), (False, True), (False, False)):
        for zero_init in (True, False):
            names = ["cpu" if offload else "none" for offload in (params, optimizer)]
            row = rows[f"offload_param={names[0]}, offload_optimizer={names[1]}, zero.Init={zero_init}"]
            expected = estimate_zero3_model_states_mem_needs(
                3 * BILLION, 50_000_000, 4, 2, optimizer, params, zero_init, 1.2
            )
            assert row == tuple(round(nbytes / GIB, 2) for nbytes in expected[:2])


def test_tables_of_a_model(capsys):
    model = nn.Sequential(nn.Linear(100, 200), nn.Linear(200, 10))
    numbers = (count_params(model)[0], largest_layer(model))
    estimate_zero2_model_states_mem_needs_all_live(model, 2)
    estimate_zero3_model_states_mem_needs_all_live(model, 2)
    of_model = capsys.readouterr().out
    assert "0.02M parameters, largest layer 0.02M" in of_model
    estimate_zero2_model_states_mem_needs_all_cold(numbers[0], 2)
    estimate_zero3_model_states_mem_needs_all_cold(*numbers, 2)
    assert of_model == capsys.readouterr().out


def test_frozen_parameters_are_weights_only(capsys):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(40_000, 40_000, bias=False), nn.Linear(10_000, 10_000, bias=False))
    model[0].requires_grad_(False)
    estimate_zero2_model_states_mem_needs_all_live(model)
    estimate_zero3_model_states_mem_needs_all_live(model)
    text = capsys.readouterr().out
    assert text.count("100M parameters and 1600M frozen ones") == 2
    rows = table(text)
    trained, frozen = 100e6, 1600e6
    # weights, 16 bytes of states, a buffer, and gradients on their way
    assert rows["offload_optimizer=none"][1] == round((2 * frozen + (2 + 16 + 2 + 2) * trained) / GIB, 2)
    whole = 2 * frozen + (2 + 16 + 2) * trained + 4 * frozen + 2 * 50e6
    row = rows["offload_param=none, offload_optimizer=none, zero.Init=False"]
    assert row == (round(1.5 * 4 * (trained + frozen) / GIB, 2), round(whole / GIB, 2))


def test_every_holding_is_in_the_sum():
    held = bytes_held(1000, 1, 3, weight_bytes=2)
    assert {holding.name for holding in estimators.HOLDINGS} | {"communication buffers"} == held.keys()
    assert sum(held.values()) - held["communication buffers"] == 18_000
