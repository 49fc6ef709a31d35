# SPDX-License-Identifier: Apache-2.0
"""The contenders: plain torch (DDP, FSDP2) and this package, behind one interface of three calls.

Every contender trains with AdamW in fp32, gradients averaged over ranks in the model's dtype, and the global
gradient norm clipped at ``CLIP``.
"""

import importlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

CLIP = 1.0
ADAMW: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
NAMES = ("ddp", "ddp-flat", "fsdp2", "fsdp2-keep", "zero0", "zero1", "zero2", "zero3")
PEER = "peer-"  # in front of a stage: another installed package of the same name
PEER_NAMES = tuple(f"{PEER}zero{stage}" for stage in range(4))


@dataclass(frozen=True)
class Options:
    """What a contender may be told.

    Attributes:
        dtype: of weights, activations and gradient communication.
        lr: learning rate.
        batch: samples per rank and step, for the package's config.
        bucket: elements per reduce and all-gather bucket of this package; None leaves its default.
        zero: further keys of the package's ``zero_optimization`` section.
        adamw: "fused" or "foreach", for the contenders that run torch's AdamW.
    """

    dtype: torch.dtype
    lr: float
    batch: int
    bucket: int | None = None
    zero: dict[str, Any] = field(default_factory=dict)
    adamw: str = "fused"


class Contender(Protocol):
    """One training step in three parts.

    ``trained()`` are the parameters whose hooks are timed. ``without_sync()``, where there is one, is a context in
    which a step communicates no gradient.
    """

    def trained(self) -> Iterable[Tensor]: ...

    def without_sync(self) -> AbstractContextManager[None] | None: ...

    def forward(self, batch: Tensor) -> Tensor: ...

    def backward(self, loss: Tensor) -> None: ...

    def step(self) -> None: ...


def adamw(parameters: list[Tensor], options: Options) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=options.lr, **ADAMW, **{options.adamw: True})


class DDP:
    """torch DistributedDataParallel, with fp32 master weights by hand unless the model is fp32 itself.

    The fp32 gradients live as long as the run: a fresh copy per step costs more than the copy itself.
    """

    def __init__(self, model: nn.Module, options: Options) -> None:
        model = model.to(options.dtype)
        device = next(model.parameters()).device
        self.model = nn.parallel.DistributedDataParallel(
            model, device_ids=[device.index] if device.type == "cuda" else None, gradient_as_bucket_view=True
        )
        self.weights = list(model.parameters())
        self.make_masters(options)

    def make_masters(self, options: Options) -> None:
        self.has_masters = options.dtype != torch.float32
        self.masters = self.weights
        if self.has_masters:
            self.masters = [weight.detach().float() for weight in self.weights]
            for master in self.masters:
                master.grad = torch.zeros_like(master)
        self.optimizer = adamw(self.masters, options)

    def trained(self) -> Iterable[Tensor]:
        return self.weights

    def without_sync(self) -> AbstractContextManager[None] | None:
        return self.model.no_sync()

    def forward(self, batch: Tensor) -> Tensor:
        return self.model(batch)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    @torch.no_grad()
    def step(self) -> None:
        if self.has_masters:
            torch._foreach_copy_([master.grad for master in self.masters], [weight.grad for weight in self.weights])
        nn.utils.clip_grad_norm_(self.masters, CLIP, foreach=True)
        self.optimizer.step()
        if self.has_masters:
            torch._foreach_copy_(self.weights, self.masters)
        self.model.zero_grad(set_to_none=True)


class FlatDDP(DDP):
    """DDP whose fp32 master weights are one flat parameter: the least work per step that plain torch allows.

    AdamW then updates one tensor, and the norm is taken of one tensor, however many parameters the model has.
    """

    @torch.no_grad()
    def make_masters(self, options: Options) -> None:
        flat = torch.cat([weight.reshape(-1).float() for weight in self.weights])
        flat.grad = torch.zeros_like(flat)
        sizes = [weight.numel() for weight in self.weights]
        shapes = [weight.shape for weight in self.weights]
        self.masters = [view.view(shape) for view, shape in zip(flat.split(sizes), shapes, strict=True)]
        self.master_grads = [view.view(shape) for view, shape in zip(flat.grad.split(sizes), shapes, strict=True)]
        self.flat = flat
        self.optimizer = adamw([flat], options)

    @torch.no_grad()
    def step(self) -> None:
        torch._foreach_copy_(self.master_grads, [weight.grad for weight in self.weights])
        nn.utils.clip_grad_norm_([self.flat], CLIP, foreach=True)
        self.optimizer.step()
        torch._foreach_copy_(self.weights, self.masters)
        self.model.zero_grad(set_to_none=True)


class FSDP2:
    """torch ``fully_shard`` over each block and the root, in the dtype of the run, with fp32 shards."""

    def __init__(self, model: nn.Module, options: Options, reshard_after_forward: bool) -> None:
        try:
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        except ImportError:  # torch 2.4 and 2.5 keep it at its first place
            from torch.distributed._composable.fsdp import MixedPrecisionPolicy, fully_shard
        from torch.distributed.device_mesh import init_device_mesh

        device = next(model.parameters()).device
        policy = MixedPrecisionPolicy(param_dtype=options.dtype, reduce_dtype=options.dtype)
        keywords = {
            "mesh": init_device_mesh(device.type, (torch.distributed.get_world_size(),)),
            "mp_policy": policy,
            "reshard_after_forward": reshard_after_forward,
        }
        for block in model.blocks:
            fully_shard(block, **keywords)
        self.model = fully_shard(model, **keywords)
        self.parameters = list(self.model.parameters())
        self.optimizer = adamw(self.parameters, options)

    def trained(self) -> Iterable[Tensor]:
        return self.parameters

    def without_sync(self) -> AbstractContextManager[None] | None:
        return None

    def forward(self, batch: Tensor) -> Tensor:
        return self.model(batch)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters, CLIP, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class Zero:
    """A package ``deepspeed`` at one ZeRO stage, as a user calls it.

    Args:
        optimizer: the client's; None: the package's own AdamW, by the config.
    """

    def __init__(
        self, model: nn.Module, options: Options, stage: int, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        import deepspeed

        zero: dict[str, Any] = {"stage": stage}
        if options.bucket is not None:
            zero |= {"reduce_bucket_size": options.bucket, "allgather_bucket_size": options.bucket}
        config = {
            "train_micro_batch_size_per_gpu": options.batch,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": CLIP,
            "steps_per_print": 10**9,
            "bf16": {"enabled": options.dtype == torch.bfloat16},
            "zero_optimization": zero | options.zero,
        }
        if optimizer is None:
            config["optimizer"] = {"type": "AdamW", "params": {"lr": options.lr, **ADAMW}}
        self.engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=optimizer)

    def trained(self) -> Iterable[Tensor]:
        return self.engine.module.parameters()

    def without_sync(self) -> AbstractContextManager[None] | None:
        return None

    def forward(self, batch: Tensor) -> Tensor:
        return self.engine(batch)

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def step(self) -> None:
        self.engine.step()


def warm_process(name: str, device: torch.device) -> None:
    """Import what the contender needs and run a toy step, so that neither is counted as the model's memory.

    The first optimizer and the first backward of a process import modules and make thread pools.
    """
    needed = {"zero": ["deepspeed"], "fsdp": ["torch.distributed._composable", "torch.distributed.device_mesh"]}
    for module in needed.get(name.removeprefix(PEER)[:4], []):
        importlib.import_module(module)
    toy = nn.Linear(8, 8).to(device)
    optimizer = torch.optim.AdamW(toy.parameters(), fused=True)
    toy(torch.ones(8, 8, device=device)).sum().backward()
    nn.utils.clip_grad_norm_(toy.parameters(), CLIP, foreach=True)
    optimizer.step()


def make_contender(name: str, model: nn.Module, options: Options) -> Contender:
    """Wrap ``model`` (fp32, on its device) in the contender ``name``.

    Raises:
        KeyError: unknown name.
    """
    if name == "ddp":
        return DDP(model, options)
    if name == "ddp-flat":
        return FlatDDP(model, options)
    if name == "fsdp2":
        return FSDP2(model, options, reshard_after_forward=True)
    if name == "fsdp2-keep":
        return FSDP2(model, options, reshard_after_forward=False)
    if name in ("zero0", "zero1", "zero2", "zero3"):
        return Zero(model, options, stage=int(name[-1]))
    if name in PEER_NAMES:
        # With torch's AdamW, which needs no compiler: a peer's kernels may not be there.
        return Zero(model, options, int(name[-1]), adamw(list(model.parameters()), options))
    raise KeyError(f"unknown contender {name!r}: choose from {', '.join(NAMES + PEER_NAMES)}")
