# SPDX-License-Identifier: Apache-2.0
"""From the config's ``optimizer`` section to a torch optimizer: the best implementation of a name that there is.

============  =========================  ======================================  ================
type          parameters on CUDA         on the CPU                              optimizer offload
============  =========================  ======================================  ================
Adam, AdamW   FusedAdam, else torch's    torch's, fused                          DeepSpeedCPUAdam
Adagrad       torch's                    torch's                                 DeepSpeedCPUAdagrad
Lion          FusedLion                  FusedLion (in torch operations)         DeepSpeedCPULion
Lamb          FusedLamb                  FusedLamb (in torch operations)         FusedLamb, the same
Muon          MuonWithAuxAdam            the same                                the same
a torch name  that class of torch.optim  the same                                the same
============  =========================  ======================================  ================
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.fused_kernels import load_kernels
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.config_checks import offloads
from deepspeed.runtime.config_utils import constructor_arguments, without_auto
from deepspeed.runtime.constants import MAX_GRAD_NORM
from deepspeed.runtime.parameter_handover import logical_shape
from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
from deepspeed.runtime.zero.muon.original_muon import ADAM_DEFAULTS, MUON_DEFAULTS

UNBUILT = ("muadam", "muadamw", "musgd")
REMOVED = ("onebitadam", "zerooneadam", "onebitlamb")
WHERE = "optimizer.params"
USE_MUON = "use_muon"
# Parts of a name that tell input and output layers, whose rows are tokens rather than directions of a space.
NOT_HIDDEN = ("embed", "lm_head")


@dataclass
class Request:
    """What a config asks for.

    Args:
        name: as it is written.
        params: the section's ``params``, without those that are "auto".
        parameters: trainable parameters, or groups of them.
        model: whose parameters they are.
        config: all of it.
    """

    name: str
    params: dict[str, Any]
    parameters: list[Any]
    model: torch.nn.Module
    config: DeepSpeedConfig

    @property
    def offloaded(self) -> bool:
        return offloads(self.config.zero_config.offload_optimizer)

    def devices(self) -> set[str]:
        """Types of the devices that the parameters are on."""
        flat = [p for item in self.parameters for p in (item["params"] if isinstance(item, dict) else [item])]
        return {p.device.type for p in flat if isinstance(p, torch.Tensor)}

    def make(self, cls: Callable[..., torch.optim.Optimizer], params: dict[str, Any]) -> torch.optim.Optimizer:
        """An optimizer of ``cls``; DeepSpeedConfigTypeError for an argument that it does not take."""
        return cls(self.parameters, **constructor_arguments(cls, params, WHERE))


def named_optimizer(
    name: str, parameters: list[Any], model: torch.nn.Module, config: DeepSpeedConfig
) -> torch.optim.Optimizer:
    """The optimizer that the config names.

    Raises:
        AssertionError: the name is none of an optimizer.
        NotImplementedError: it is that of one that is not built, or an option of it is not.
        DeepSpeedConfigTypeError: the config gives it an argument that it does not take, or lacks one.
        ValueError: ``max_grad_norm``, or options that exclude each other.
    """
    request = Request(name, without_auto(config.optimizer_params or {}), parameters, model, config)
    if MAX_GRAD_NORM in request.params:
        raise ValueError(f"{WHERE}.{MAX_GRAD_NORM} is not supported, use gradient_clipping at the top level instead")
    kind = name.lower()
    if kind in UNBUILT:
        raise NotImplementedError(f"optimizer.type {name!r} is not built yet")
    if kind in REMOVED:
        raise AssertionError(f"optimizer.type {name!r} does not exist any more: use 'AdamW' or 'Lamb'")
    return _BY_NAME.get(kind, _of_torch)(request)


def _of_torch(request: Request) -> torch.optim.Optimizer:
    cls = getattr(torch.optim, request.name, None)
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise AssertionError(
            f"optimizer.type {request.name!r} is neither an optimizer of this package nor a class of torch.optim"
        )
    return request.make(cls, request.params)


# ---------------------------------------------------------------------------------------------- Adam


def _adam(request: Request) -> torch.optim.Optimizer:
    params = dict(request.params)
    decoupled = params.pop("adam_w_mode", True) or request.name.lower() == "adamw"
    fp32_states = params.pop("fp32_optimizer_states", True)
    torchs = params.pop("torch_adam", False) or "fused" in params or "foreach" in params
    corrected = params.get("bias_correction", True)
    if torchs and not corrected:
        raise ValueError(f"{WHERE}.bias_correction false is not possible with torch's Adam: remove torch_adam")
    if not torchs:
        params.setdefault("weight_decay", 0.0)  # torch's classes have defaults of their own
        if request.offloaded:
            narrow = request.config.bfloat16_config.bf16_optimizer_states
            own = {"adamw_mode": decoupled, "fp32_optimizer_states": fp32_states and not narrow}
            return request.make(DeepSpeedCPUAdam, params | own)
        if not corrected or (request.devices() == {"cuda"} and load_kernels(FusedAdam.BUILDER) is not None):
            return request.make(FusedAdam, params | {"adam_w_mode": decoupled})
    params.pop("bias_correction", None)
    if "foreach" not in params:
        devices = request.devices()
        params.setdefault("fused", True if devices and devices <= {"cpu", "cuda"} else None)
    return request.make(torch.optim.AdamW if decoupled else torch.optim.Adam, params)


# ---------------------------------------------------------------------------------------------- Adagrad, Lion, LAMB


def _adagrad(request: Request) -> torch.optim.Optimizer:
    return request.make(DeepSpeedCPUAdagrad if request.offloaded else torch.optim.Adagrad, request.params)


def _lion(request: Request) -> torch.optim.Optimizer:
    params = dict(request.params)
    if request.offloaded:
        narrow = request.config.bfloat16_config.bf16_optimizer_states
        params["fp32_optimizer_states"] = params.get("fp32_optimizer_states", True) and not narrow
        return request.make(DeepSpeedCPULion, params)
    params.pop("fp32_optimizer_states", None)  # state has the dtype of the masters
    return request.make(FusedLion, params)


def _lamb(request: Request) -> torch.optim.Optimizer:
    return request.make(FusedLamb, request.params)


# ---------------------------------------------------------------------------------------------- Muon


def muon_with_aux_adam(
    parameters: list[Any],
    lr: float | None = None,
    muon_lr: float | None = None,
    adam_lr: float | None = None,
    momentum: float = MUON_DEFAULTS["momentum"],
    ns_method: str | None = None,
    betas: tuple[float, float] = ADAM_DEFAULTS["betas"],
    eps: float = ADAM_DEFAULTS["eps"],
    weight_decay: float = 0.0,
    bias_correction: bool = True,
    adam_w_mode: bool = True,
    per_head_muon: bool = False,
) -> MuonWithAuxAdam:
    """What ``optimizer.params`` means for Muon. ``muon_lr`` and ``adam_lr`` default to ``lr``; a parameter group's own
    numbers come before all others.

    Args:
        parameters: whose attribute ``use_muon`` says which are matrices; or groups of such.
        ns_method: None: ``standard`` on CUDA, where products in bf16 are some ten times as fast as those in fp32, and
            ``gram`` elsewhere.

    Raises:
        NotImplementedError: ``per_head_muon``.
    """
    if per_head_muon:
        raise NotImplementedError(
            f"{WHERE}.per_head_muon is not built: heads are not told apart. Set it to false, or call"
            " muon_update(num_heads=...) in an optimizer of your own"
        )
    if ns_method is None:
        ns_method = "standard" if get_accelerator().device_name() == "cuda" else "gram"
    muon = {"lr": _first(muon_lr, lr, MUON_DEFAULTS["lr"]), "momentum": momentum, "ns_method": ns_method}
    adam = {"lr": _first(adam_lr, lr, ADAM_DEFAULTS["lr"]), "betas": tuple(betas), "eps": eps}
    loose = [item for item in parameters if not isinstance(item, dict)]
    groups = [{"params": loose}, *(item for item in parameters if isinstance(item, dict))]
    cut = []
    for group in groups:
        for use_muon, numbers in ((True, muon), (False, adam | {"bias_correction": bias_correction})):
            chosen = [p for p in group["params"] if bool(getattr(p, USE_MUON, False)) is use_muon]
            if chosen:
                own = {USE_MUON: use_muon, "weight_decay": weight_decay} | numbers | group
                cut.append(own | {"params": chosen})
    return MuonWithAuxAdam(cut, adam_w_mode=adam_w_mode)


def _first(*rates: float | None) -> float:
    return next(rate for rate in rates if rate is not None)


def _muon(request: Request) -> torch.optim.Optimizer:
    mark_matrices(request.model)
    return request.make(muon_with_aux_adam, request.params)


def mark_matrices(model: torch.nn.Module) -> None:
    """Set ``use_muon`` of every parameter that has no such attribute yet: True for the weights of hidden layers, of two
    dimensions or more, and False for embeddings, output layers (by name), gains and biases."""
    embeddings = {
        parameter
        for module in model.modules()
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag))
        for parameter in module.parameters(recurse=False)
    }
    for name, parameter in model.named_parameters():
        if getattr(parameter, USE_MUON, None) is None:
            hidden = parameter not in embeddings and not any(part in name for part in NOT_HIDDEN)
            setattr(parameter, USE_MUON, hidden and len(logical_shape(parameter)) >= 2)


_BY_NAME: dict[str, Callable[[Request], torch.optim.Optimizer]] = {
    "adam": _adam,
    "adamw": _adam,
    "adagrad": _adagrad,
    "lion": _lion,
    "lamb": _lamb,
    "muon": _muon,
}
