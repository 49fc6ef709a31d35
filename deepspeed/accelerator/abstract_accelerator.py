# SPDX-License-Identifier: Apache-2.0
"""What the package needs from a device. One subclass per kind of device."""

import abc
import importlib
from abc import ABC
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch


class DeepSpeedAccelerator(ABC):
    """Interface of a device kind.

    A ``device_index`` of None means the current device. Memory figures are bytes. Creating an accelerator object must
    not touch the device; methods may.
    """

    supports_nvtx_domain = False

    def __init__(self) -> None:
        self._name: str | None = None
        self._communication_backend_name: str | None = None
        self._compile_backend: str | None = None

    # How the device runs relative to the host

    @abc.abstractmethod
    def is_synchronized_device(self) -> bool:
        """Whether an operation is complete when its call returns."""

    @abc.abstractmethod
    def use_host_timers(self) -> bool:
        """Whether host clocks time device work rightly (no device events needed)."""

    @abc.abstractmethod
    def resolves_data_dependency(self) -> bool:
        """Whether work on different streams needs no explicit waits."""

    @abc.abstractmethod
    def handles_memory_backpressure(self) -> bool:
        """Whether freeing memory that is still read by queued work is safe without extra care."""

    # Devices

    @abc.abstractmethod
    def device_name(self, device_index: int | None = None) -> str:
        """Name for ``torch.device``, e.g. ``cuda`` or ``cuda:1``."""

    @abc.abstractmethod
    def device(self, device_index: int | None = None) -> AbstractContextManager[Any]:
        """Context in which the given device is the current one."""

    @abc.abstractmethod
    def set_device(self, device_index: int) -> None:
        """Make the given device the current one."""

    @abc.abstractmethod
    def current_device(self) -> int:
        """Index of the current device."""

    @abc.abstractmethod
    def current_device_name(self) -> str:
        """Name of the current device, with its index where the device kind has several."""

    @abc.abstractmethod
    def device_count(self) -> int:
        """Number of devices that local ranks can use."""

    @abc.abstractmethod
    def synchronize(self, device_index: int | None = None) -> None:
        """Wait for all queued work of the device."""

    # Random numbers

    @abc.abstractmethod
    def random(self) -> Any:
        """Module that holds the device's random-number functions."""

    @abc.abstractmethod
    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Set the generator state (uint8 CPU tensor)."""

    @abc.abstractmethod
    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """Generator state (uint8 CPU tensor)."""

    @abc.abstractmethod
    def manual_seed(self, seed: int) -> Any:
        """Seed the current device's generator."""

    @abc.abstractmethod
    def manual_seed_all(self, seed: int) -> Any:
        """Seed the generators of all devices."""

    @abc.abstractmethod
    def initial_seed(self) -> int:
        """Seed that the current device's generator started from."""

    @abc.abstractmethod
    def default_generator(self, device_index: int) -> torch.Generator:
        """Default generator of the given device."""

    # Streams and events

    @property
    @abc.abstractmethod
    def Stream(self) -> type:
        """Class of streams."""

    @abc.abstractmethod
    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Context in which ``stream`` is current; None leaves the current stream."""

    @abc.abstractmethod
    def current_stream(self, device_index: int | None = None) -> Any:
        """The current stream of the device."""

    @abc.abstractmethod
    def default_stream(self, device_index: int | None = None) -> Any:
        """The default stream of the device."""

    @property
    @abc.abstractmethod
    def Event(self) -> type:
        """Class of events; the constructor takes ``enable_timing``."""

    # Memory

    @abc.abstractmethod
    def empty_cache(self) -> None:
        """Give cached blocks back to the device."""

    @abc.abstractmethod
    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes held by live tensors."""

    @abc.abstractmethod
    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Largest :meth:`memory_allocated` since the last reset."""

    @abc.abstractmethod
    def reset_max_memory_allocated(self, device_index: int | None = None) -> None:
        """Start :meth:`max_memory_allocated` afresh."""

    @abc.abstractmethod
    def memory_cached(self, device_index: int | None = None) -> int:
        """Bytes held by the caching allocator."""

    @abc.abstractmethod
    def max_memory_cached(self, device_index: int | None = None) -> int:
        """Largest :meth:`memory_cached` since the last reset."""

    @abc.abstractmethod
    def reset_max_memory_cached(self, device_index: int | None = None) -> None:
        """Start :meth:`max_memory_cached` afresh."""

    @abc.abstractmethod
    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """Allocator statistics under torch's keys."""

    @abc.abstractmethod
    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Start all peak figures afresh."""

    @abc.abstractmethod
    def memory_reserved(self, device_index: int | None = None) -> int:
        """Bytes that the allocator holds from the device."""

    @abc.abstractmethod
    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """Largest :meth:`memory_reserved` since the last reset."""

    @abc.abstractmethod
    def total_memory(self, device_index: int | None = None) -> int:
        """Size of the device's memory."""

    @abc.abstractmethod
    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes of the device's memory that nobody uses."""

    # Data types

    @abc.abstractmethod
    def is_bf16_supported(self) -> bool:
        """Whether training in bfloat16 works."""

    @abc.abstractmethod
    def is_fp16_supported(self) -> bool:
        """Whether training in float16 works."""

    def is_fp64_supported(self) -> bool:
        """Whether float64 tensors work."""
        return True

    @abc.abstractmethod
    def supported_dtypes(self) -> list[torch.dtype]:
        """Data types that a model can be trained in."""

    # Miscellaneous

    @abc.abstractmethod
    def is_available(self) -> bool:
        """Whether a device of this kind can be used."""

    @abc.abstractmethod
    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> Any:
        """Open a named range for the device's profiler."""

    @abc.abstractmethod
    def range_pop(self, domain: str | None = None) -> Any:
        """Close the innermost range."""

    @abc.abstractmethod
    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Run ``callback`` once the device is initialised (now, if it is)."""

    @abc.abstractmethod
    def communication_backend_name(self) -> str:
        """Name of the torch.distributed backend for tensors of this device."""

    @abc.abstractmethod
    def is_triton_supported(self) -> bool:
        """Whether Triton kernels run on the current device."""

    def prefer_triton_grouped_mm(self) -> bool:
        """Whether a Triton grouped matrix product is the better choice on this device."""
        return False

    # Graphs

    def is_current_stream_capturing(self) -> bool:
        """Whether the current stream records a graph."""
        return False

    @abc.abstractmethod
    def create_graph(self) -> Any:
        """A new graph object, or None where the device has no graphs."""

    @abc.abstractmethod
    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> AbstractContextManager[Any]:
        """Context that records device work into ``graph``."""

    @abc.abstractmethod
    def replay_graph(self, graph: Any) -> None:
        """Run the work recorded in ``graph``."""

    # Tensor constructors

    @property
    @abc.abstractmethod
    def BFloat16Tensor(self) -> Callable[..., torch.Tensor]:
        """``torch.tensor`` for bfloat16 on this device."""

    @property
    @abc.abstractmethod
    def ByteTensor(self) -> Callable[..., torch.Tensor]:
        """``torch.tensor`` for uint8 on this device."""

    @property
    @abc.abstractmethod
    def DoubleTensor(self) -> Callable[..., torch.Tensor]:
        """``torch.tensor`` for float64 on this device."""

    @property
    @abc.abstractmethod
    def FloatTensor(self) -> Callable[..., torch.Tensor]:
        """``torch.tensor`` for float32 on this device."""

    @property
    @abc.abstractmethod
    def HalfTensor(self) -> Callable[..., torch.Tensor]:
        """``torch.tensor`` for float16 on this device."""

    @property
    @abc.abstractmethod
    def IntTensor(self) -> Callable[..., torch.Tensor]:
        """``torch.tensor`` for int32 on this device."""

    @property
    @abc.abstractmethod
    def LongTensor(self) -> Callable[..., torch.Tensor]:
        """``torch.tensor`` for int64 on this device."""

    # Page-locked host memory

    def register_host_memory(self, address: int, num_bytes: int) -> None:
        """Page-lock ``num_bytes`` of host memory from ``address`` on, for this device's copies."""
        raise NotImplementedError(f"accelerator {self._name!r} cannot register host memory")

    def unregister_host_memory(self, address: int) -> None:
        """Undo :meth:`register_host_memory`."""
        raise NotImplementedError(f"accelerator {self._name!r} cannot register host memory")

    def pin_memory_alignment(self) -> int:
        """Number of elements that pinned buffers should be a multiple of."""
        return 1

    def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        """Page-locked host tensor of the same shape and dtype; values are copied when ``make_copy``.

        ``match_shape`` False allows a longer 1-D result; this implementation always matches the shape.
        """
        if tensor.is_pinned():
            return tensor
        if make_copy:
            return tensor.pin_memory()
        return torch.empty_like(tensor, device="cpu", pin_memory=True)

    def pin_empty(self, *size: Any, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
        """Uninitialised page-locked host tensor."""
        return torch.empty(*size, dtype=dtype, device=device, pin_memory=True)

    def pin_empty_like(
        self, tensor: torch.Tensor, device: str = "cpu", dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Uninitialised page-locked host tensor of the shape of ``tensor``."""
        return self.pin_empty(tensor.shape, dtype=tensor.dtype if dtype is None else dtype, device=device)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's memory is page-locked."""
        return tensor.is_pinned()

    def unpin_memory(self, tensor: torch.Tensor) -> None:
        """Undo page-locking that was not done by torch; torch releases its own pinned memory with the tensor."""

    @abc.abstractmethod
    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lives on a device of this kind."""

    # Native operators

    @abc.abstractmethod
    def op_builder_dir(self) -> str:
        """Import path of the package that holds the operator builders."""

    def _find_op_builder(self, class_name: str) -> type | None:
        return getattr(importlib.import_module(self.op_builder_dir()), class_name, None)

    @abc.abstractmethod
    def create_op_builder(self, class_name: str) -> Any:
        """A builder object of the named class, or None where this device has no such builder."""

    @abc.abstractmethod
    def get_op_builder(self, class_name: str) -> type | None:
        """The named builder class, or None where this device has no such builder."""

    @abc.abstractmethod
    def build_extension(self) -> type:
        """The setuptools command class that compiles extensions for this device."""

    # Environment and compilation

    @abc.abstractmethod
    def export_envs(self) -> list[str]:
        """Prefixes of environment variables that a launcher carries to other nodes."""

    @abc.abstractmethod
    def visible_devices_envs(self) -> list[str]:
        """Environment variables that restrict the visible devices."""

    @abc.abstractmethod
    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: list[int]) -> None:
        """Write the visible devices into ``current_env``."""

    @abc.abstractmethod
    def get_compile_backend(self) -> str:
        """Backend name for ``torch.compile``."""

    @abc.abstractmethod
    def set_compile_backend(self, backend: str) -> None:
        """Choose the backend for ``torch.compile``; ValueError for an unknown one."""

    def _checked_compile_backend(self, backend: str) -> str:
        known = torch._dynamo.list_backends(exclude_tags=())
        if backend not in known:
            raise ValueError(f"{backend!r} is not a torch.compile backend on {self._name}; known: {', '.join(known)}")
        return backend
