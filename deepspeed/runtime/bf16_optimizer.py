# SPDX-License-Identifier: Apache-2.0
"""Stage 1 with bf16 weights and fp32 accumulation, under the class name that outside code looks for."""

from typing import Any

import torch

from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer


class BF16_Optimizer(DeepSpeedZeroOptimizer):
    """``DeepSpeedZeroOptimizer`` at stage 1, with the attributes that go by other names here; all of them are views.

    A rank keeps its slice of the gradient, so what is called a gradient here is this rank's part of it.

    Args:
        bfloat16_config: section ``bf16`` of the config, for ``check_grad_overflow`` and the dtype of the masters.
        norm_type: 2; there is no other norm.
        grad_acc_dtype: dtype of accumulation; None: fp32.
        settings: further arguments of ``DeepSpeedZeroOptimizer``.

    Raises:
        ValueError: another ``norm_type``.
    """

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        param_names: dict[torch.nn.Parameter, str],
        bfloat16_config: Any = None,
        mpu: Any = None,
        clip_grad: float = 0.0,
        norm_type: int = 2,
        allgather_bucket_size: int = 5000000000,
        dp_process_group: Any = None,
        timers: Any = None,
        grad_acc_dtype: torch.dtype | None = None,
        has_moe_layers: bool = False,
        **settings: Any,
    ) -> None:
        if norm_type != 2:
            raise ValueError(f"BF16_Optimizer: the gradient norm is the L2 norm, got norm_type={norm_type!r}")
        if bfloat16_config is not None:
            settings.setdefault("check_grad_overflow", bfloat16_config.check_grad_overflow)
            settings.setdefault("bf16_master_weights_and_gradients", bfloat16_config.bf16_master_weights_and_grads)
            settings.setdefault("bf16_optimizer_states", bfloat16_config.bf16_optimizer_states)
        settings.setdefault("gradient_accumulation_dtype", grad_acc_dtype or torch.float32)
        super().__init__(
            init_optimizer,
            param_names,
            timers,
            mpu=mpu,
            clip_grad=clip_grad,
            allgather_bucket_size=allgather_bucket_size,
            dp_process_group=dp_process_group,
            has_moe_layers=has_moe_layers,
            **(settings | {"partition_grads": False}),
        )

    @property
    def bf16_groups(self) -> list[list[torch.nn.Parameter]]:
        """Parameters, per flat group."""
        return self.bit16_groups

    @property
    def bf16_groups_flat(self) -> list[torch.Tensor]:
        """All weights of each flat group, 1-D, in the model's dtype."""
        return self.weights.flats

    @property
    def fp32_groups_flat_partition(self) -> list[torch.Tensor]:
        """This rank's slice of the masters of each flat group: 1-D fp32."""
        return self.weights.masters

    @property
    def group_paddings(self) -> list[int]:
        """Elements of padding at the end of this rank's slice of each flat group."""
        return self.groups_padding

    @property
    def fp32_groups_gradients_flat(self) -> list[torch.Tensor | None]:
        """This rank's slice of each flat group's reduced gradient; None while nothing is reduced."""
        return [shard.flat() if self.reducer.ledger.reduced else None for shard in self.reducer.shards]

    @property
    def fp32_groups_gradients(self) -> list[list[torch.Tensor]]:
        """The same in pieces, one for each parameter of which this rank owns something."""
        return [pieces or [] for pieces in self.averaged_gradients.values()]

    @property
    def fp32_groups_gradient_dict(self) -> dict[int, list[torch.Tensor]]:
        """The same by number of the flat group."""
        return dict(enumerate(self.fp32_groups_gradients))

    @property
    def fp32_groups_has_gradients(self) -> list[list[bool]]:
        """For each parameter of each flat group whether this window has a gradient, pending or reduced."""
        reduced, waiting = self.reducer.ledger.reduced, set(self.reducer.ledger.waiting())
        return [[reduced or record in waiting for record in group.records] for group in self.reducer.layout.groups]
