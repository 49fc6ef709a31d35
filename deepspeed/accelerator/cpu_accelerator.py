# SPDX-License-Identifier: Apache-2.0
"""The host processor as accelerator. Every operation is complete when its call returns."""

import functools
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from .abstract_accelerator import DeepSpeedAccelerator


class _HostStream:
    """A stream on which everything is already done."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = torch.device("cpu")
        self.priority = priority

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: "_HostEvent | None" = None) -> "_HostEvent":
        event = _HostEvent() if event is None else event
        event.record(self)
        return event


class _HostEvent:
    """A point in time on the host clock."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._seconds: float | None = None

    def record(self, stream: Any = None) -> None:
        self._seconds = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: "_HostEvent") -> float:
        """Milliseconds from this event to ``end_event``."""
        if self._seconds is None or end_event._seconds is None:
            raise RuntimeError("both events must be recorded before the time between them can be taken")
        return (end_event._seconds - self._seconds) * 1e3


_HOST_STREAM = _HostStream()


def _resident_bytes() -> int:
    """Resident set size of this process in bytes; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # no procfs: only the peak is known there
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class CPU_Accelerator(DeepSpeedAccelerator):
    """CPU with gloo. Memory figures are those of the process (resident set) and of the machine."""

    def __init__(self) -> None:
        self._name = "cpu"
        self._communication_backend_name = "gloo"
        self._compile_backend = "inductor"
        self.max_mem = 0

    def is_synchronized_device(self) -> bool:
        return True

    def use_host_timers(self) -> bool:
        return True

    def resolves_data_dependency(self) -> bool:
        return True

    def handles_memory_backpressure(self) -> bool:
        return True

    def device_name(self, device_index: int | None = None) -> str:
        return "cpu"

    def device(self, device_index: int | None = None) -> AbstractContextManager[Any]:
        return nullcontext()

    def set_device(self, device_index: int) -> None:
        pass

    def current_device(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))

    def current_device_name(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return max(1, int(os.environ.get("LOCAL_SIZE", "1")))

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def random(self) -> Any:
        return torch.random

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        torch.set_rng_state(new_state)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return torch.get_rng_state()

    def manual_seed(self, seed: int) -> torch.Generator:
        return torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> torch.Generator:
        return torch.manual_seed(seed)

    def initial_seed(self) -> int:
        return torch.initial_seed()

    def default_generator(self, device_index: int = 0) -> torch.Generator:
        return torch.default_generator

    @property
    def Stream(self) -> type:
        return _HostStream

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext(stream)

    def current_stream(self, device_index: int | None = None) -> _HostStream:
        return _HOST_STREAM

    def default_stream(self, device_index: int | None = None) -> _HostStream:
        return _HOST_STREAM

    @property
    def Event(self) -> type:
        return _HostEvent

    def empty_cache(self) -> None:
        pass

    def get_rss(self) -> int:
        """Resident set size in bytes; also updates the peak."""
        resident = _resident_bytes()
        self.max_mem = max(self.max_mem, resident)
        return resident

    def reset_rss(self) -> int:
        """Start the peak at the present resident set size and return it."""
        self.max_mem = _resident_bytes()
        return self.max_mem

    def memory_allocated(self, device_index: int | None = None) -> int:
        return self.get_rss()

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        self.get_rss()
        return self.max_mem

    def reset_max_memory_allocated(self, device_index: int | None = None) -> None:
        self.reset_rss()

    def memory_cached(self, device_index: int | None = None) -> int:
        return self.get_rss()

    def max_memory_cached(self, device_index: int | None = None) -> int:
        return self.max_memory_allocated()

    def reset_max_memory_cached(self, device_index: int | None = None) -> None:
        self.reset_rss()

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        current = self.get_rss()
        return {"allocated_bytes.all.current": current, "allocated_bytes.all.peak": self.max_mem}

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        self.reset_rss()

    def memory_reserved(self, device_index: int | None = None) -> int:
        return self.get_rss()

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return self.max_memory_allocated()

    def total_memory(self, device_index: int | None = None) -> int:
        return _physical_bytes()

    def available_memory(self, device_index: int | None = None) -> int:
        try:
            with open("/proc/meminfo") as meminfo:
                for line in meminfo:
                    if line.startswith("MemAvailable:"):
                        return int(line.split()[1]) * 1024
        except FileNotFoundError:  # no procfs: fall through to a bound that every system can tell
            pass
        return max(0, _physical_bytes() - self.get_rss())

    def is_bf16_supported(self) -> bool:
        return True

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float, torch.bfloat16, torch.half]

    def is_available(self) -> bool:
        return True

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        pass

    def range_pop(self, domain: str | None = None) -> None:
        pass

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        return callback()

    def communication_backend_name(self) -> str:
        return "gloo"

    def is_triton_supported(self) -> bool:
        return False

    def create_graph(self) -> None:
        return None

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> AbstractContextManager[Any]:
        raise NotImplementedError("graph capture: the CPU has no device graphs")

    def replay_graph(self, graph: Any) -> None:
        raise NotImplementedError("graph replay: the CPU has no device graphs")

    @property
    def BFloat16Tensor(self) -> Callable[..., torch.Tensor]:
        return functools.partial(torch.tensor, dtype=torch.bfloat16, device="cpu")

    @property
    def ByteTensor(self) -> Callable[..., torch.Tensor]:
        return functools.partial(torch.tensor, dtype=torch.uint8, device="cpu")

    @property
    def DoubleTensor(self) -> Callable[..., torch.Tensor]:
        return functools.partial(torch.tensor, dtype=torch.double, device="cpu")

    @property
    def FloatTensor(self) -> Callable[..., torch.Tensor]:
        return functools.partial(torch.tensor, dtype=torch.float, device="cpu")

    @property
    def HalfTensor(self) -> Callable[..., torch.Tensor]:
        return functools.partial(torch.tensor, dtype=torch.half, device="cpu")

    @property
    def IntTensor(self) -> Callable[..., torch.Tensor]:
        return functools.partial(torch.tensor, dtype=torch.int, device="cpu")

    @property
    def LongTensor(self) -> Callable[..., torch.Tensor]:
        return functools.partial(torch.tensor, dtype=torch.long, device="cpu")

    # There is no copy engine that page-locking would help, and no driver to lock pages with.

    def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        return tensor

    def pin_empty(self, *size: Any, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"

    def op_builder_dir(self) -> str:
        return "deepspeed.ops.op_builder"

    def create_op_builder(self, op_name: str) -> Any:
        builder = self.get_op_builder(op_name)
        return None if builder is None else builder()

    def get_op_builder(self, class_name: str) -> type | None:
        return self._find_op_builder(class_name)

    def build_extension(self) -> type:
        from torch.utils.cpp_extension import BuildExtension

        return BuildExtension

    def export_envs(self) -> list[str]:
        return []

    def visible_devices_envs(self) -> list[str]:
        return []

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: list[int]) -> None:
        pass

    def get_compile_backend(self) -> str:
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        self._compile_backend = self._checked_compile_backend(backend)
