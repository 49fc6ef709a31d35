# SPDX-License-Identifier: Apache-2.0
"""Base class of communication backends."""


class Backend:
    """A communication library that can carry the façade's collectives.

    Args:
        name: what messages call it.
        rank: this process's rank, in [0, size).
        size: number of ranks.
    """

    def __init__(self, name: str = "backend", rank: int = 0, size: int = 1) -> None:
        self.name = name
        self.world_group = None
        self.world_size = size
        self.world_rank = rank
        self.initialized = False

    def is_initialized(self) -> bool:
        """Whether the process group exists."""
        return self.initialized

    def new_group(self) -> object:
        """Create a process group; subclasses define it."""
        raise NotImplementedError(f"communication backend {self.name!r} does not implement new_group")

    def init_process_group(self) -> None:
        """Create the world process group; subclasses define it."""
        raise NotImplementedError(f"communication backend {self.name!r} does not implement init_process_group")
