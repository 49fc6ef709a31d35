# SPDX-License-Identifier: Apache-2.0
"""How much memory training with ZeRO needs for weights, gradients and Adam's state; activations come on top.

``HOLDINGS`` is the table everything is computed from. It says what this implementation holds; a test compares it with
what an engine has allocated.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from deepspeed.utils.z3_leaf_module import z3_leaf_module

GIB = 2**30
BUCKET = 500_000_000  # default of reduce_bucket_size, in elements
PREFETCH = 50_000_000  # default of stage3_prefetch_bucket_size
BIT16 = 2
FP32 = 4


@dataclass(frozen=True)
class Holding:
    """Something held for each trainable parameter.

    Args:
        name: what it is.
        nbytes: per element; None for that of the weights' dtype.
        sharded_from: first ZeRO stage at which a rank holds only its share.
        movable: the config key of offload that moves it to CPU memory.
    """

    name: str
    nbytes: int | None
    sharded_from: int
    movable: str


HOLDINGS = (
    Holding("weights", None, 3, "offload_param"),
    Holding("fp32 master weights", FP32, 1, "offload_optimizer"),
    Holding("fp32 gradients", FP32, 1, "offload_optimizer"),
    Holding("Adam: fp32 exp_avg", FP32, 1, "offload_optimizer"),
    Holding("Adam: fp32 exp_avg_sq", FP32, 1, "offload_optimizer"),
)


def bytes_held(
    total_params: int,
    world_size: int,
    stage: int,
    weight_bytes: int = BIT16,
    bucket: int = BUCKET,
    exchanges: bool = False,
    frozen_params: int = 0,
) -> dict[str, int]:
    """Bytes that one rank holds from its first step on, between steps: by the names of ``HOLDINGS``, and buffers.

    Args:
        total_params: trainable elements of the model.
        world_size: data-parallel ranks.
        stage: 1, 2 or 3.
        weight_bytes: of an element of the weights.
        bucket: ``reduce_bucket_size``.
        exchanges: the ranks are on CPU, where a reduce-scatter receives into the second buffer.
        frozen_params: further elements, that are not trained: they are weights and nothing else.
    """
    share = -(-total_params // world_size)
    held = {
        holding.name: (holding.nbytes or weight_bytes) * (share if stage >= holding.sharded_from else total_params)
        for holding in HOLDINGS
    }
    held["weights"] += weight_bytes * (-(-frozen_params // world_size) if stage >= 3 else frozen_params)
    one_bucket = total_params <= bucket
    largest = total_params if one_bucket else min(bucket, share if stage < 3 else total_params)
    buffers = 2 if not one_bucket or (exchanges and world_size > 1) else 1
    held["communication buffers"] = buffers * largest * weight_bytes
    return held


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Memory for ZeRO-2 with 16-bit weights, Adam and the default bucket size.

    Args:
        total_params: trainable elements.
        cpu_offload: ``offload_optimizer`` to the CPU.
        additional_buffer_factor: on what is in CPU memory, for pinned copies and the allocator's slack. What is on
            the device is counted piece by piece.

    Returns:
        bytes of CPU memory per node, bytes of device memory per rank.
    """
    return _zero2_needs(total_params, 0, num_gpus_per_node, num_nodes, cpu_offload, additional_buffer_factor)


def _zero2_needs(
    trained: int, frozen: int, num_gpus_per_node: int, num_nodes: int, cpu_offload: bool, factor: float
) -> tuple[int, int]:
    held = bytes_held(trained, num_gpus_per_node * num_nodes, stage=2, frozen_params=frozen)
    moved = _moved(held, {"offload_optimizer"} if cpu_offload else set())
    # In backward, gradients lie in .grad until their bucket is complete. At the start, the weights are copied into
    # one tensor while those of the model are still there, and most of the rest is not.
    device = sum(held.values()) - moved + min(trained, BUCKET) * BIT16
    device = max(device, held["weights"] + trained * BIT16)
    # Every rank builds the model in fp32 on the CPU before it moves to the device.
    built = (trained + frozen) * FP32 * num_gpus_per_node
    return int(max(built, moved * num_gpus_per_node) * factor), device


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Memory for ZeRO-3 with 16-bit weights, Adam and default bucket sizes.

    Weights that stay gathered because they are used again soon come on top: up to ``stage3_max_live_parameters``
    elements, which may be set as low as what one layer needs.

    Args:
        total_params: trainable elements.
        largest_layer_params: elements that are gathered at once, those of the largest module.
        cpu_offload: ``offload_optimizer`` to the CPU.
        cpu_offload_params: ``offload_param`` to the CPU; only together with ``cpu_offload``.
        zero_init: the model is built under ``deepspeed.zero.Init``; otherwise each rank builds it whole on the CPU.
        additional_buffer_factor: as for ZeRO-2.

    Returns:
        bytes of CPU memory per node; bytes of device memory per rank, with the next; bytes of the largest layer,
        gathered, with its gradient.
    """
    return _zero3_needs(
        total_params,
        0,
        largest_layer_params,
        num_gpus_per_node,
        num_nodes,
        cpu_offload,
        cpu_offload_params,
        zero_init,
        additional_buffer_factor,
    )


def _zero3_needs(
    trained: int,
    frozen: int,
    largest_layer_params: int,
    num_gpus_per_node: int,
    num_nodes: int,
    cpu_offload: bool,
    cpu_offload_params: bool,
    zero_init: bool,
    factor: float,
) -> tuple[int, int, int]:
    held = bytes_held(trained, num_gpus_per_node * num_nodes, stage=3, frozen_params=frozen)
    keys = {"offload_optimizer", "offload_param"} if cpu_offload_params else {"offload_optimizer"}
    moved = _moved(held, keys if cpu_offload else set())
    layer = largest_layer_params * 2 * BIT16
    ahead = min(trained + frozen, PREFETCH) * BIT16
    device = sum(held.values()) - moved + layer + ahead
    built = (largest_layer_params if zero_init else trained + frozen) * FP32 * num_gpus_per_node
    return int(max(built, moved * num_gpus_per_node) * factor), device, layer


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print what ZeRO-2 needs for ``model`` with and without offload; frozen parameters are weights and no more."""
    _print_zero2(*count_params(model), num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print what ZeRO-2 needs with and without offload, for ``total_params`` trainable elements."""
    _print_zero2(total_params, 0, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print what ZeRO-3 needs for ``model``, partitioned or not, with and without offload and ``zero.Init``; frozen
    parameters are weights and nothing else."""
    _print_zero3(*count_params(model), largest_layer(model), num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print what ZeRO-3 needs with and without offload and ``zero.Init``, for ``total_params`` trainable elements."""
    _print_zero3(total_params, 0, largest_layer_params, num_gpus_per_node, num_nodes, additional_buffer_factor)


def _print_zero2(trained: int, frozen: int, num_gpus_per_node: int, num_nodes: int, factor: float) -> None:
    rows = []
    for cpu_offload in (True, False):
        needs = _zero2_needs(trained, frozen, num_gpus_per_node, num_nodes, cpu_offload, factor)
        rows.append((*needs, f"offload_optimizer={_device(cpu_offload)}"))
    _print_table("ZeRO-2", _size(trained, frozen), num_gpus_per_node, num_nodes, rows)


def _print_zero3(
    trained: int, frozen: int, largest_layer_params: int, num_gpus_per_node: int, num_nodes: int, factor: float
) -> None:
    rows = []
    for optimizer, params in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            cpu, device, _ = _zero3_needs(
                trained,
                frozen,
                largest_layer_params,
                num_gpus_per_node,
                num_nodes,
                optimizer,
                params,
                zero_init,
                factor,
            )
            options = f"offload_param={_device(params)}, offload_optimizer={_device(optimizer)}, zero.Init={zero_init}"
            rows.append((cpu, device, options))
    size = f"{_size(trained, frozen)}, largest layer {_millions(largest_layer_params)}"
    _print_table("ZeRO-3", size, num_gpus_per_node, num_nodes, rows)


def count_params(model: nn.Module) -> tuple[int, int]:
    """Elements of trainable and of frozen parameters, shared ones once, whole sizes of partitioned ones."""
    parameters = list(model.parameters())
    trained = sum(_numel(parameter) for parameter in parameters if parameter.requires_grad)
    return trained, sum(_numel(parameter) for parameter in parameters) - trained


def model_to_params_zero2(model: nn.Module) -> int:
    """Elements of all parameters: ``model_to_params`` of ``stage_1_and_2``."""
    return sum(count_params(model))


def model_to_params_zero3(model: nn.Module) -> tuple[int, int]:
    """Elements of all parameters and of the largest layer: ``model_to_params`` of ``stage3``."""
    return sum(count_params(model)), largest_layer(model)


def largest_layer(model: nn.Module) -> int:
    """Most elements that ZeRO-3 gathers at once: a module's own parameters, all below it for a leaf module."""
    return max(
        sum(_numel(parameter) for parameter in module.parameters(recurse=z3_leaf_module(module)))
        for module in model.modules()
    )


def _numel(parameter: nn.Parameter) -> int:
    return getattr(parameter, "ds_numel", None) or parameter.numel()


def _moved(held: dict[str, int], keys: set[str]) -> int:
    """Bytes that offload moves from the device to CPU memory."""
    return sum(held[holding.name] for holding in HOLDINGS if holding.movable in keys)


def _device(offload: bool) -> str:
    return "cpu" if offload else "none"


def _size(trained: int, frozen: int) -> str:
    return f"{_millions(trained)} parameters" + (f" and {_millions(frozen)} frozen ones" if frozen else "")


def _millions(count: int) -> str:
    return f"{count / 1e6:.0f}M" if count >= 10e6 else f"{count / 1e6:.2f}M"


def _print_table(
    title: str,
    size: str,
    num_gpus_per_node: int,
    num_nodes: int,
    rows: list[tuple[int, int, str]],
    write: Callable[[str], None] = print,
) -> None:
    write(f"{title}, 16-bit weights and Adam: {size}; {num_nodes} node(s) with {num_gpus_per_node} device(s) each.")
    write("Without activations. Device memory with default bucket sizes.")
    write("  CPU per node | per device | configuration")
    for cpu, device, options in rows:
        write(f"  {cpu / GIB:8.2f} GiB | {device / GIB:6.2f} GiB | {options}")
