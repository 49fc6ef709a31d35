# SPDX-License-Identifier: Apache-2.0
"""Threads that work beside the one that saves or loads.

Not ``concurrent.futures.ThreadPoolExecutor``, which takes no more work once the interpreter ends, when a checkpoint may
still be on its way to the disk.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Crew:
    """A few threads that do what they are given, in the order in which it was given.

    Args:
        size: number of threads; with 0 the caller does the work itself.
        name: of the threads.
    """

    def __init__(self, size: int, name: str) -> None:
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None]
        self._tasks = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._work, name=name, daemon=True) for _ in range(size)]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[..., Any], *args: Any) -> "Future[Any]":
        """Have ``work(*args)`` done; the future has its result or raises its exception."""
        task: tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] = (Future(), work, args)
        if self._threads:
            self._tasks.put(task)
        else:
            self._do(*task)
        return task[0]

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._do(*task)

    @staticmethod
    def _do(future: "Future[Any]", work: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            future.set_result(work(*args))
        except BaseException as error:  # noqa: BLE001 - whoever asks for the result gets it
            future.set_exception(error)

    def close(self) -> None:
        """Wait until everything that was given is done."""
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
