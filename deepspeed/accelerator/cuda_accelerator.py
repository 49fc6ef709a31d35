# SPDX-License-Identifier: Apache-2.0
"""CUDA (and ROCm, through torch's cuda interface) as accelerator."""

import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from .abstract_accelerator import DeepSpeedAccelerator

try:  # adds domains and categories to profiler ranges
    import nvtx
except ImportError:
    nvtx = None


class CUDA_Accelerator(DeepSpeedAccelerator):
    """CUDA devices with NCCL. Creating the object does not initialise CUDA."""

    supports_nvtx_domain = True

    def __init__(self) -> None:
        self._name = "cuda"
        self._communication_backend_name = "nccl"
        self._compile_backend = "inductor"

    def is_synchronized_device(self) -> bool:
        return False

    def use_host_timers(self) -> bool:
        return False

    def resolves_data_dependency(self) -> bool:
        return False

    def handles_memory_backpressure(self) -> bool:
        return False

    def device_name(self, device_index: int | None = None) -> str:
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def device(self, device_index: int | None = None) -> AbstractContextManager[Any]:
        return torch.cuda.device(device_index)

    def set_device(self, device_index: int) -> None:
        torch.cuda.set_device(device_index)

    def current_device(self) -> int:
        return torch.cuda.current_device()

    def current_device_name(self) -> str:
        return f"cuda:{torch.cuda.current_device()}"

    def device_count(self) -> int:
        return torch.cuda.device_count()

    def synchronize(self, device_index: int | None = None) -> None:
        torch.cuda.synchronize(device_index)

    def random(self) -> Any:
        return torch.cuda.random

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        torch.cuda.set_rng_state(new_state, "cuda" if device_index is None else device_index)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return torch.cuda.get_rng_state("cuda" if device_index is None else device_index)

    def manual_seed(self, seed: int) -> None:
        torch.cuda.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.cuda.manual_seed_all(seed)

    def initial_seed(self) -> int:
        return torch.cuda.initial_seed()

    def default_generator(self, device_index: int) -> torch.Generator:
        torch.cuda.init()  # the tuple of generators is empty until then
        return torch.cuda.default_generators[device_index]

    @property
    def Stream(self) -> type:
        return torch.cuda.Stream

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def current_stream(self, device_index: int | None = None) -> torch.cuda.Stream:
        return torch.cuda.current_stream(device_index)

    def default_stream(self, device_index: int | None = None) -> torch.cuda.Stream:
        return torch.cuda.default_stream(device_index)

    @property
    def Event(self) -> type:
        return torch.cuda.Event

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        return torch.cuda.memory_allocated(device_index)

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return torch.cuda.max_memory_allocated(device_index)

    # torch has one reset for all peaks; its older names for the parts only warn and call it.

    def reset_max_memory_allocated(self, device_index: int | None = None) -> None:
        torch.cuda.reset_peak_memory_stats(device_index)

    def memory_cached(self, device_index: int | None = None) -> int:
        return torch.cuda.memory_reserved(device_index)

    def max_memory_cached(self, device_index: int | None = None) -> int:
        return torch.cuda.max_memory_reserved(device_index)

    def reset_max_memory_cached(self, device_index: int | None = None) -> None:
        torch.cuda.reset_peak_memory_stats(device_index)

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        return torch.cuda.memory_stats(device_index)

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        torch.cuda.reset_peak_memory_stats(device_index)

    def memory_reserved(self, device_index: int | None = None) -> int:
        return torch.cuda.memory_reserved(device_index)

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return torch.cuda.max_memory_reserved(device_index)

    def total_memory(self, device_index: int | None = None) -> int:
        index = torch.cuda.current_device() if device_index is None else device_index
        return torch.cuda.get_device_properties(index).total_memory

    def available_memory(self, device_index: int | None = None) -> int:
        return torch.cuda.mem_get_info(device_index)[0]

    def is_bf16_supported(self) -> bool:
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        if os.environ.get("DS_ALLOW_DEPRECATED_FP16", "0") == "1" or torch.version.hip is not None:
            return True
        # Before compute capability 7.0 float16 arithmetic runs at a fraction of the float32 rate.
        return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 7

    def supported_dtypes(self) -> list[torch.dtype]:
        dtypes = [torch.float]
        if self.is_fp16_supported():
            dtypes.append(torch.half)
        if self.is_bf16_supported():
            dtypes.append(torch.bfloat16)
        return dtypes

    def is_available(self) -> bool:
        return torch.cuda.is_available()

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> Any:
        if nvtx is not None and domain is not None:
            return nvtx.push_range(message=msg, domain=domain, category=category)
        return torch.cuda.nvtx.range_push(msg)

    def range_pop(self, domain: str | None = None) -> Any:
        if nvtx is not None and domain is not None:
            return nvtx.pop_range(domain=domain)
        return torch.cuda.nvtx.range_pop()

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        return torch.cuda._lazy_call(callback)

    def communication_backend_name(self) -> str:
        return self._communication_backend_name

    def communication_backend_version(self) -> tuple[int, ...]:
        """Version of NCCL, as a tuple."""
        return torch.cuda.nccl.version()

    def is_triton_supported(self) -> bool:
        return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 8

    def prefer_triton_grouped_mm(self) -> bool:
        return False

    def is_current_stream_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def create_graph(self) -> torch.cuda.CUDAGraph:
        return torch.cuda.CUDAGraph()

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> AbstractContextManager[Any]:
        return torch.cuda.graph(graph, pool, stream)

    def replay_graph(self, graph: Any) -> None:
        graph.replay()

    @property
    def BFloat16Tensor(self) -> Callable[..., torch.Tensor]:
        return functools.partial(torch.tensor, dtype=torch.bfloat16, device="cuda")

    @property
    def ByteTensor(self) -> Callable[..., torch.Tensor]:
        return functools.partial(torch.tensor, dtype=torch.uint8, device="cuda")

    @property
    def DoubleTensor(self) -> Callable[..., torch.Tensor]:
        return functools.partial(torch.tensor, dtype=torch.double, device="cuda")

    @property
    def FloatTensor(self) -> Callable[..., torch.Tensor]:
        return functools.partial(torch.tensor, dtype=torch.float, device="cuda")

    @property
    def HalfTensor(self) -> Callable[..., torch.Tensor]:
        return functools.partial(torch.tensor, dtype=torch.half, device="cuda")

    @property
    def IntTensor(self) -> Callable[..., torch.Tensor]:
        return functools.partial(torch.tensor, dtype=torch.int, device="cuda")

    @property
    def LongTensor(self) -> Callable[..., torch.Tensor]:
        return functools.partial(torch.tensor, dtype=torch.long, device="cuda")

    def register_host_memory(self, address: int, num_bytes: int) -> None:
        result = torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0)
        if int(result) != 0:
            raise RuntimeError(f"cudaHostRegister of {num_bytes} bytes at {address:#x} failed with error {int(result)}")

    def unregister_host_memory(self, address: int) -> None:
        result = torch.cuda.cudart().cudaHostUnregister(address)
        if int(result) != 0:
            raise RuntimeError(f"cudaHostUnregister at {address:#x} failed with error {int(result)}")

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cuda"

    def op_builder_dir(self) -> str:
        return "deepspeed.ops.op_builder"

    def create_op_builder(self, class_name: str) -> Any:
        builder = self.get_op_builder(class_name)
        return None if builder is None else builder()

    def get_op_builder(self, class_name: str) -> type | None:
        return self._find_op_builder(class_name)

    def build_extension(self) -> type:
        from torch.utils.cpp_extension import BuildExtension

        return BuildExtension

    def export_envs(self) -> list[str]:
        return ["NCCL"]

    def visible_devices_envs(self) -> list[str]:
        return ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: list[int]) -> None:
        for variable in self.visible_devices_envs():
            current_env[variable] = ",".join(map(str, local_accelerator_ids))

    def get_compile_backend(self) -> str:
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        self._compile_backend = self._checked_compile_backend(backend)
