# SPDX-License-Identifier: Apache-2.0
"""What only a device can show of the fused optimizers: graphs, repeatability, tensors beyond 2^31 elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed.ops.adam import FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import FusedLion

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CLASSES = [FusedAdam, FusedLion, FusedLamb]
HUGE = 2**31 + 8


def parameters_on_device(sizes: list[int]) -> list[torch.nn.Parameter]:
    generator = torch.Generator("cuda").manual_seed(1)
    return [torch.nn.Parameter(torch.randn(size, generator=generator, device="cuda")) for size in sizes]


def give_gradients(parameters: list[torch.nn.Parameter], seed: int) -> None:
    """New values in the same memory."""
    generator = torch.Generator("cuda").manual_seed(seed)
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.normal_(generator=generator)


@pytest.mark.parametrize("cls", CLASSES)
def test_a_captured_step_goes_on_counting_and_follows_the_rate(cls: type[torch.optim.Optimizer]) -> None:
    sizes = [5, 1023, 4096, 70_001]
    captured, plain = parameters_on_device(sizes), parameters_on_device(sizes)
    rate = torch.tensor(1e-2, device="cuda")
    one = cls(captured, lr=rate, weight_decay=0.1, capturable=True)
    other = cls(plain, lr=1e-2, weight_decay=0.1)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        give_gradients(captured, 0)
        one.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one.step()
    for step in range(20):
        give_gradients(plain, step)
        other.param_groups[0]["lr"] = 1e-2 if step < 10 else 3e-3
        other.step()
        if step > 0:
            rate.fill_(other.param_groups[0]["lr"])
            give_gradients(captured, step)
            graph.replay()
    assert one.state[captured[0]]["step"].is_cuda and one.state[captured[0]]["step"] == 20
    for ours, theirs in zip(captured, plain):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cls", CLASSES)
def test_bits_do_not_change_from_run_to_run(cls: type[torch.optim.Optimizer]) -> None:
    def run() -> list[torch.Tensor]:
        parameters = parameters_on_device([3, 5000, 3_000_001])
        optimizer = cls(parameters, lr=1e-2, weight_decay=0.1)
        for step in range(20):
            give_gradients(parameters, step)
            optimizer.step()
        return [parameter.detach() for parameter in parameters]

    first = run()
    for again in (run(), run()):
        assert all(torch.equal(a, b) for a, b in zip(first, again))


@pytest.mark.parametrize("cls", CLASSES)
def test_more_elements_than_31_bits_can_count(cls: type[torch.optim.Optimizer]) -> None:
    """The ends and the middle of a huge tensor get what a small tensor of the same numbers gets."""
    if torch.cuda.mem_get_info()[0] < HUGE * 20:
        pytest.skip("needs 43 GB of free device memory")
    master = torch.nn.Parameter(torch.zeros(HUGE, device="cuda"))
    gradient = torch.zeros(HUGE, device="cuda", dtype=torch.bfloat16)
    low = torch.zeros(HUGE, device="cuda", dtype=torch.bfloat16)
    places = [0, 2**30 - 3, 2**31 - 40, HUGE - 17]
    generator = torch.Generator("cuda").manual_seed(1)
    small = torch.nn.Parameter(torch.randn(17 * len(places), generator=generator, device="cuda"))
    small_gradient = torch.randn(17 * len(places), generator=generator, device="cuda").bfloat16()
    for index, place in enumerate(places):
        part = slice(17 * index, 17 * index + 17)
        master.data[place : place + 17] = small.data[part]
        gradient[place : place + 17] = small_gradient[part]
    options: dict[str, Any] = {"lr": 1e-2}
    huge_optimizer, small_optimizer = cls([master], **options), cls([small], **options)
    for _ in range(2):
        huge_optimizer.step_flat(
            master, gradient, huge_optimizer.state[master], huge_optimizer.param_groups[0], low, 0.5
        )
        small_optimizer.step_flat(
            small, small_gradient, small_optimizer.state[small], small_optimizer.param_groups[0], None, 0.5
        )
    found = torch.cat([master.data[place : place + 17] for place in places])
    torch.testing.assert_close(found, small.data, rtol=1e-6, atol=1e-7)
    assert torch.equal(torch.cat([low[place : place + 17] for place in places]), found.bfloat16())
    assert master.data[2**20 : places[1]].count_nonzero() == 0
