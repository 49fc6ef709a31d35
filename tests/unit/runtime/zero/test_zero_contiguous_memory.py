# SPDX-License-Identifier: Apache-2.0
"""Tensors of one buffer: none overlaps another, and all keep their values when they are moved."""

import random

import pytest
import torch
from torch import nn

from deepspeed.runtime.zero.contiguous_memory_allocator import ContiguousMemoryAllocator


@pytest.fixture
def memory():
    return ContiguousMemoryAllocator(10, torch.float32, "cpu")


def filled(memory, size, value):
    return memory.allocate_tensor(size).fill_(value)


def test_tensors_lie_in_the_buffer(memory):
    tensors = [filled(memory, size, size) for size in (3, 2, 5)]
    assert memory.buffer.tolist() == [3.0] * 3 + [2.0] * 2 + [5.0] * 5
    assert all(tensor.dtype == torch.float32 and tensor.dim() == 1 for tensor in tensors)
    assert memory.total_free == 0 and memory.max_allocated() == 10


def test_full(memory):
    filled(memory, 8, 1)
    with pytest.raises(RuntimeError, match="3 elements wanted, 2 of 10 are free"):
        memory.allocate_tensor(3)
    for size in (0, -1):
        with pytest.raises(ValueError, match="at least one element"):
            memory.allocate_tensor(size)
    assert memory.max_allocated() == 8 and memory.total_free == 2


def test_released_memory_is_used_again_and_neighbouring_holes_are_one(memory):
    first, second, third = (filled(memory, size, size) for size in (3, 3, 4))
    memory.release_tensor(first)
    memory.release_tensor_with_id(id(second))
    assert memory.total_free == 6 and memory.max_allocated() == 10
    again = filled(memory, 6, 6)
    assert again.storage_offset() == 0 and third.tolist() == [4.0] * 4


def test_the_smallest_hole_that_fits_is_taken(memory):
    tensors = [filled(memory, size, 0) for size in (4, 1, 2, 1)]
    memory.release_tensor(tensors[0])
    memory.release_tensor(tensors[2])
    assert memory.allocate_tensor(2).storage_offset() == 5


def test_scattered_holes_are_joined(memory):
    tensors = [filled(memory, 2, value) for value in range(5)]
    weight = nn.Parameter(torch.zeros(0))
    memory.assign_to_param(tensors[3], weight, 2, (1, 2))
    memory.release_tensor(tensors[0])
    memory.release_tensor(tensors[2])
    large = filled(memory, 4, 9)
    assert [tensors[i].tolist() for i in (1, 3, 4)] == [[1.0] * 2, [3.0] * 2, [4.0] * 2]
    assert large.tolist() == [9.0] * 4 and weight.tolist() == [[3.0, 3.0]]
    with torch.no_grad():
        weight.fill_(7)
    assert tensors[3].tolist() == [7.0, 7.0]  # still the same memory
    memory.release_tensor(tensors[3])
    assert weight.numel() == 0


def test_a_block_moved_by_less_than_its_length():
    memory = ContiguousMemoryAllocator(10, torch.int64, "cpu")
    first = memory.allocate_tensor(2)
    second = memory.allocate_tensor(7)
    second.copy_(torch.arange(7))
    memory.release_tensor(first)
    memory.allocate_tensor(3).fill_(-1)
    assert second.tolist() == list(range(7)) and second.storage_offset() == 0


def test_parameters(memory):
    tensor = filled(memory, 8, 2)
    weight = nn.Parameter(torch.zeros(0))
    memory.assign_to_param(tensor, weight, 6, (2, 3))
    assert weight.shape == (2, 3) and weight.data_ptr() == tensor.data_ptr()
    with pytest.raises(ValueError, match="9 elements do not fit in a tensor of 8"):
        memory.assign_to_param(tensor, weight, 9, (9,))
    memory.release_tensor(tensor)
    assert weight.shape == (0,)


def test_what_is_not_in_use(memory):
    tensor = memory.allocate_tensor(2)
    memory.release_tensor(tensor)
    for action in (memory.release_tensor, lambda t: memory.assign_to_param(t, nn.Parameter(t), 1, (1,))):
        with pytest.raises(ValueError, match="not in use"):
            action(tensor)
    with pytest.raises(ValueError, match="not in use"):
        memory.release_tensor(torch.zeros(2))


def test_print_allocation(memory, capsys):
    filled(memory, 3, 1)
    memory.print_allocation(resolution=5)
    assert "#-... 3 of 10 elements in use" in capsys.readouterr().out
    memory.print_allocation(resolution=20)
    assert "######.............. 3 of 10" in capsys.readouterr().out


def test_many_allocations():
    draw = random.Random(0)
    memory = ContiguousMemoryAllocator(1000, torch.int64, "cpu")
    live = {}
    for value in range(2000):
        size = draw.randint(1, 200)
        while memory.total_free < size:
            key = draw.choice(list(live))
            tensor, parameter = live.pop(key)
            assert torch.equal(tensor, torch.full_like(tensor, key)) and torch.equal(parameter.view(-1), tensor)
            memory.release_tensor(tensor)
        tensor = memory.allocate_tensor(size).fill_(value)
        parameter = nn.Parameter(torch.empty(0, dtype=torch.int64), requires_grad=False)
        memory.assign_to_param(tensor, parameter, size, (1, size))
        live[value] = (tensor, parameter)
    assert 800 < memory.max_allocated() <= 1000
