# SPDX-License-Identifier: Apache-2.0
"""Tensors of changing sizes in one buffer that is allocated once, moved together when holes are too small."""

from dataclasses import dataclass, field

import torch

from deepspeed.utils.logging import print_dist


def print_rank_0(message: str) -> None:
    """Print ``message`` on rank 0."""
    print_dist(message, ranks=[0])


@dataclass(eq=False)
class _Block:
    """A tensor in use at elements ``[start, stop)``, and the parameters that view its beginning."""

    tensor: torch.Tensor
    start: int
    stop: int
    params: list[tuple[torch.nn.Parameter, int, torch.Size]] = field(default_factory=list)


class ContiguousMemoryAllocator:
    """Hands out 1-D tensors of one buffer.

    Where no hole is large enough but all together are, the tensors in use are moved to the front of the buffer: they
    and the parameters assigned to them keep their identity and their values, and point elsewhere. Whoever keeps another
    view of such a tensor sees other data then. Not for several threads or streams.

    Args:
        size: elements of the buffer.
        dtype, device: of the buffer.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.buffer = torch.zeros(size, dtype=dtype, device=device)
        self.total_free = size
        self._blocks: list[_Block] = []  # by place
        self._most_allocated = 0

    def allocate_tensor(self, size: int) -> torch.Tensor:
        """A tensor of ``size`` elements, whose content is undefined. It is in use until it is released.

        Raises:
            ValueError: the size is not positive.
            RuntimeError: less than that is free.
        """
        if size <= 0:
            raise ValueError(f"a tensor needs at least one element, got size {size}")
        if size > self.total_free:
            raise RuntimeError(
                f"{size} elements wanted, {self.total_free} of {self.buffer.numel()} are free: release tensors or make"
                " the buffer larger"
            )
        start = self._find_hole(size)
        if start is None:
            self._move_to_front()
            start = self._find_hole(size)
        block = _Block(self.buffer.narrow(0, start, size), start, start + size)
        self._blocks.append(block)
        self._blocks.sort(key=lambda each: each.start)
        self.total_free -= size
        self._most_allocated = max(self._most_allocated, self.buffer.numel() - self.total_free)
        return block.tensor

    def assign_to_param(
        self, tensor: torch.Tensor, param: torch.nn.Parameter, numel: int, shape: torch.Size | tuple[int, ...]
    ) -> None:
        """Let ``param.data`` be the first ``numel`` elements of ``tensor``, in ``shape``, until the tensor is released.

        Raises:
            ValueError: ``tensor`` is not in use, or smaller than ``numel``.
        """
        block = self._block_of(id(tensor))
        if numel > tensor.numel():
            raise ValueError(f"{numel} elements do not fit in a tensor of {tensor.numel()}")
        block.params.append((param, numel, torch.Size(shape)))
        param.data = tensor.narrow(0, 0, numel).view(shape)

    def release_tensor(self, tensor: torch.Tensor) -> None:
        """Give a tensor back; parameters assigned to it become empty.

        Raises:
            ValueError: it is not in use.
        """
        self.release_tensor_with_id(id(tensor))

    def release_tensor_with_id(self, tensor_id: int) -> None:
        """As ``release_tensor``, with the ``id()`` of the tensor."""
        block = self._block_of(tensor_id)
        for param, _, _ in block.params:
            param.data = torch.empty(0, dtype=param.dtype, device=param.device)
        self._blocks.remove(block)
        self.total_free += block.stop - block.start

    def print_allocation(self, resolution: int = 200) -> None:
        """Print on rank 0 what is in use: ``resolution`` characters, ``#`` in use, ``-`` in part, ``.`` free."""
        total = self.buffer.numel()
        line = ""
        for cell in range(resolution):
            begin = cell * total // resolution
            end = max((cell + 1) * total // resolution, begin + 1)
            used = sum(max(0, min(end, block.stop) - max(begin, block.start)) for block in self._blocks)
            line += "#" if used == end - begin else "-" if used else "."
        print_rank_0(f"{line} {total - self.total_free} of {total} elements in use")

    def max_allocated(self) -> int:
        """Most elements that were in use at once."""
        return self._most_allocated

    def _block_of(self, tensor_id: int) -> _Block:
        for block in self._blocks:
            if id(block.tensor) == tensor_id:
                return block
        raise ValueError("this tensor is not in use here: it was never allocated by this buffer, or is released")

    def _find_hole(self, size: int) -> int | None:
        """Beginning of the smallest hole that is large enough."""
        ends = [0, *(block.stop for block in self._blocks)]
        begins = [*(block.start for block in self._blocks), self.buffer.numel()]
        fitting = [(begin - end, end) for end, begin in zip(ends, begins) if begin - end >= size]
        return min(fitting)[1] if fitting else None

    @torch.no_grad()
    def _move_to_front(self) -> None:
        end = 0
        for block in self._blocks:
            size = block.stop - block.start
            if block.start != end:
                target = self.buffer.narrow(0, end, size)
                # source and target overlap where the move is shorter than the block
                target.copy_(block.tensor.clone() if block.start - end < size else block.tensor)
                block.tensor.data = target
                block.start, block.stop = end, end + size
                for param, numel, shape in block.params:
                    param.data = target.narrow(0, 0, numel).view(shape)
            end += size
