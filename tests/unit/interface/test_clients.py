# SPDX-License-Identifier: Apache-2.0
"""Calls of client libraries, in the forms that they use, without the libraries.

A is accelerate, T transformers, L lightning, P peft, R trl. What their stage 3 generation does with hooks stands in
``runtime/zero/test_zero3_clients.py``; whole training runs in ``tests/integration``.
"""

from __future__ import annotations

import os
from argparse import Namespace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.launcher import runner
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.lion import DeepSpeedCPULion
from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES
from deepspeed.runtime.utils import move_to_device
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import groups
from deepspeed.utils import logger as utils_logger
from deepspeed.utils.logging import logger
from unit.common import DistributedTest

ROOT = Path(deepspeed.__file__).parents[1]
LARGEST_ASKED = (0, 19, 6)  # A and T compare versions with up to this one


# ------------------------------------------------------------------ the package


@pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="not a source tree")
def test_name_and_scripts_of_the_distribution() -> None:
    """T, A: find the distribution ``deepspeed`` and its console script."""
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    assert 'name = "deepspeed"' in lines and 'deepspeed = "deepspeed.launcher.runner:main"' in lines


def test_the_version_is_high_enough() -> None:
    """A, T, L: compare ``__version__`` and the metadata with the releases whose features they use."""
    assert tuple(int(part) for part in deepspeed.__version__.split("+")[0].split(".")[:3]) >= LARGEST_ASKED


@pytest.mark.parametrize(
    "words",
    [
        "--no_local_rank --hostfile hosts --launcher pdsh --num_gpus 2 train.py",
        "--no_local_rank --exclude a@b:0 --master_port 29501 --launcher openmpi --module train",
        "--include a:0,1 --launcher mvapich --no_python train.sh",
        "--launcher mpich train.py",
        "--launcher slurm train.py",
        "--hostfile hosts --no_ssh --node_rank 1 --master_addr 10.0.0.1 --master_port 1 train.py",
    ],
)
def test_command_lines_are_understood(words: str) -> None:
    """A: builds these for several nodes."""
    args = runner.parse_args(words.split())
    assert args.user_script.startswith("train")
    assert args.no_ssh == ("--no_ssh" in words)


def test_the_environment_file() -> None:
    """A: appends lines to a file of this name in the working directory."""
    assert runner.DEEPSPEED_ENVIRONMENT_NAME == os.environ.get("DS_ENV_FILE", ".deepspeed_env")


def test_what_they_import() -> None:
    from deepspeed.checkpoint.utils import clone_tensors_for_torch_save  # A
    from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer  # L
    from deepspeed.runtime.engine import DeepSpeedEngine  # R
    from deepspeed.runtime.zero.partition_parameters import (  # T
        _orig_torch_arange,
        zero_wrapper_for_fp_tensor_constructor,
    )
    from deepspeed.runtime.zero.partition_parameters import get_accelerator as theirs  # T
    from deepspeed.utils.zero_to_fp32 import (  # L
        get_fp32_state_dict_from_zero_checkpoint,
        get_model_state_file,
        get_optim_files,
    )

    functions = (clone_tensors_for_torch_save, get_fp32_state_dict_from_zero_checkpoint, get_model_state_file)
    assert all(map(callable, (*functions, get_optim_files, zero_wrapper_for_fp_tensor_constructor)))
    assert deepspeed.DeepSpeedEngine is DeepSpeedEngine and deepspeed.DeepSpeedOptimizer is DeepSpeedOptimizer
    assert _orig_torch_arange(3).tolist() == [0, 1, 2] and theirs is get_accelerator
    with pytest.raises(ImportError):  # T: inside try/except, as in the published package
        from deepspeed.utils import is_initialized  # noqa: F401


def test_loggers() -> None:
    """T: ``setLevel`` through ``deepspeed.utils``; L: through ``deepspeed.utils.logging``."""
    before = logger.level
    try:
        utils_logger.setLevel(40)
        assert utils_logger is logger and logger.level == 40
    finally:
        logger.setLevel(before)


@pytest.mark.parametrize("make", [DeepSpeedCPUAdam, DeepSpeedCPUAdagrad, DeepSpeedCPULion])
def test_optimizers_of_host_memory(make: Any) -> None:
    """A: replaces torch's with ``param_groups`` and the defaults that it finds; ``adamw_mode`` for every one."""
    parameter = nn.Parameter(torch.ones(4))
    theirs = torch.optim.SGD([{"params": [parameter], "lr": 0.25}], lr=0.5, weight_decay=0.0)
    ours = make(theirs.param_groups, lr=0.5, weight_decay=0.0, adamw_mode=False)
    parameter.grad = torch.ones(4)
    ours.step()
    assert ours.param_groups[0]["lr"] == 0.25 and parameter.max() < 1.0


def test_names_of_schedules() -> None:
    """A: ``type(scheduler).__name__ in VALID_LR_SCHEDULES``."""
    from deepspeed.runtime import lr_schedules

    assert VALID_LR_SCHEDULES and all(getattr(lr_schedules, name).__name__ == name for name in VALID_LR_SCHEDULES)


def test_warmup_of_no_steps_is_refused() -> None:
    """A, T: clamp it, since releases from 0.19.6 on refuse it."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(ValueError, match="warmup_num_steps"):
        deepspeed.runtime.lr_schedules.WarmupLR(optimizer, warmup_num_steps=0)


def test_moving_nested_batches() -> None:
    """A: its tests."""
    moved = move_to_device({"x": [torch.ones(2)], "y": (torch.ones(1), "text")}, "cpu")
    assert moved["y"][1] == "text" and moved["x"][0].device.type == "cpu"


def test_what_needs_unbuilt_features_says_so() -> None:
    """A: Ulysses; T: tensor parallelism."""
    with pytest.raises(ImportError, match="sequence parallelism is not built"):
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF  # noqa: F401
    with pytest.raises(NotImplementedError, match="tp_model_init.*tensor parallelism"):
        deepspeed.tp_model_init(model=nn.Linear(1, 1), tp_size=2, dtype=torch.float32, config={})


def test_activation_checkpointing_is_configured() -> None:
    """L: these keywords."""
    before = {name: getattr(deepspeed.checkpointing, name) for name in ("PARTITION_ACTIVATIONS", "CPU_CHECKPOINT")}
    deepspeed.checkpointing.configure(
        mpu_=None, partition_activations=False, contiguous_checkpointing=False, checkpoint_in_cpu=False, profile=False
    )
    after = {name: getattr(deepspeed.checkpointing, name) for name in before}
    assert after == {"PARTITION_ACTIVATIONS": False, "CPU_CHECKPOINT": False}
    deepspeed.checkpointing.reset()


# ------------------------------------------------------------------ engines


class Config:
    """Where transformers keeps a model's config; an engine shows its own under the name."""

    hidden_size = 5


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = Config()
        self.first = nn.Linear(5, 5)
        self.last = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x))).square().mean()

    def generate(self) -> str:
        return "text"


# What A writes: "auto" filled, device "none", nvme_path null, steps_per_print infinite, keys of its own and R's.
def config_of_clients(stage: int) -> dict[str, Any]:
    none = {"device": "none", "nvme_path": None}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "steps_per_print": float("inf"),
        "zero_allow_untested_optimizer": True,
        "communication_data_type": "fp32",
        "fp16": {"enabled": False, "auto_cast": True, "loss_scale": 0, "initial_scale_power": 16},
        "bf16": {"enabled": False},
        "msamp": {"enabled": False, "opt_level": "O1"},
        "zero_optimization.reduce_bucket_size": 25,
        "zero_optimization.stage3_prefetch_bucket_size": 22.5,
        "tensor_parallel": {"autotp_size": 0},
        "checkpoint": {"use_node_local_storage": True},
        "activation_checkpointing": {
            "partition_activations": False,
            "cpu_checkpointing": False,
            "contiguous_memory_optimization": False,
            "synchronize_checkpoint_boundary": False,
        },
        "aio": {
            "block_size": 1048576,
            "queue_depth": 8,
            "single_submit": False,
            "overlap_events": True,
            "thread_count": 1,
        },
        "zero_optimization": {
            "stage": stage,
            "offload_optimizer": dict(none),
            "offload_param": dict(none),
            "stage3_gather_16bit_weights_on_model_save": True,
            "stage3_param_persistence_threshold": 0,
            "contiguous_gradients": True,
            "overlap_comm": True,
            "allgather_partitions": True,
            "reduce_scatter": True,
            "allgather_bucket_size": 1000,
            "reduce_bucket_size": 1000,
            "sub_group_size": 1000000000,
        },
    }


def batch_of_rank() -> Tensor:
    return torch.full((2, 5), 1.0 + torch_dist.get_rank())


class TestAccelerate(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    def test_a_training_loop(self, tmpdir: str) -> None:
        """A: ``config_params``, groups, a callable scheduler, the boundary by keyword before every backward."""
        for stage in (0, 1, 2, 3):
            model = Model()
            optimizer = torch.optim.AdamW([{"params": list(model.parameters()), "weight_decay": 0.1}], lr=1e-2)
            made = deepspeed.initialize(
                model=model,
                config_params=config_of_clients(stage),
                optimizer=optimizer,
                model_parameters=[{"params": list(model.parameters())}],
                lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
                mpu=None,
            )
            assert len(made) == 4
            engine, optimizer, _, scheduler = made
            assert isinstance(engine, deepspeed.DeepSpeedEngine) and engine.module is model
            assert isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler)
            engine.train()
            for boundary in (False, True):
                engine.set_gradient_accumulation_boundary(is_boundary=boundary)
                engine.backward(engine(batch_of_rank()), retain_graph=False, scale_wrt_gas=True)
                if boundary:
                    engine.step()
            norm = engine.get_global_grad_norm()
            assert (norm.item() if hasattr(norm, "item") else norm) > 0.0
            assert stage == 0 or optimizer.overflow is False
            if stage > 0:
                assert isinstance(optimizer, deepspeed.DeepSpeedOptimizer)
                assert optimizer.optimizer.param_groups[0]["weight_decay"] == 0.1
            assert engine.zero_gather_16bit_weights_on_model_save()
            if stage == 3:
                whole = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
                assert (whole is None) == (torch_dist.get_rank() != 0)
            folder = f"{tmpdir}/a{stage}"
            assert engine.save_checkpoint(folder, "pytorch_model") is not False
            path, _ = engine.load_checkpoint(folder, "pytorch_model")
            assert path and (Path(folder) / "pytorch_model").is_dir()
            assert (Path(folder) / "zero_to_fp32.py").exists() == (stage > 0)
            assert engine.load_checkpoint(str(Path(folder) / "elsewhere")) == (None, None)
            assert engine.device.type == get_accelerator().device_name()
            engine.compile(backend="eager", compile_kwargs={})
            engine.destroy()

    def test_process_group(self) -> None:
        """A: ``deepspeed.comm`` as dist; ranks of sequence parallelism."""
        assert dist.is_initialized()
        dist.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, timeout=timedelta(seconds=60))
        assert (groups._get_sequence_parallel_world_size(), groups._get_sequence_parallel_rank()) == (1, 0)

    def test_a_mixture_is_one_unit(self) -> None:
        """A: names of its mixture's classes."""
        model = Model()
        found = deepspeed.utils.set_z3_leaf_modules(model, [nn.Linear])
        assert set(found) == {model.first, model.last}


class TestLightning(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    def test_a_training_loop(self, tmpdir: str) -> None:
        """L: a generator of parameters, ``args.device_rank``, tag ``checkpoint``, ``client_state``."""
        deepspeed.init_distributed("gloo", distributed_port=29500, timeout=timedelta(seconds=60))
        for stage in (1, 3):
            with deepspeed.zero.Init(
                enabled=stage == 3, remote_device="cpu", config_dict_or_path=config_of_clients(stage)
            ):
                model = Model()
            assert all(hasattr(p, "ds_id") == (stage == 3) for p in model.parameters())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            engine, optimizer, _, _ = deepspeed.initialize(
                args=Namespace(device_rank=0),
                config=config_of_clients(stage),
                model=model,
                model_parameters=(p for p in model.parameters() if p.requires_grad),
                optimizer=optimizer,
                lr_scheduler=None,
                dist_init_required=False,
            )
            for _ in range(2):
                engine.backward(engine(batch_of_rank()))
                engine.step()
            folder = f"{tmpdir}/l{stage}"
            engine.save_checkpoint(folder, client_state={"epoch": 3}, tag="checkpoint", exclude_frozen_parameters=False)
            with torch.no_grad(), deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
                for parameter in engine.module.parameters():
                    parameter.zero_()
            path, state = engine.load_checkpoint(
                folder,
                tag="checkpoint",
                load_optimizer_states=True,
                load_lr_scheduler_states=False,
                load_module_strict=True,
            )
            assert path and state["epoch"] == 3
            assert engine.load_checkpoint(folder, tag="checkpoint", load_optimizer_states=False)[0]
            self._check_files(Path(folder) / "checkpoint", stage)
            engine.destroy()

    def _check_files(self, folder: Path, stage: int) -> None:
        """L: converts a checkpoint through these functions, and reads its stage."""
        from deepspeed.utils import zero_to_fp32

        optim_files = zero_to_fp32.get_optim_files(str(folder))
        assert len(optim_files) == self.world_size and (folder.parent / "latest").read_text() == "checkpoint"
        state = torch.load(optim_files[0], weights_only=False)
        assert state["optimizer_state_dict"]["zero_stage"] == stage
        assert Path(zero_to_fp32.get_model_state_file(str(folder), stage)).exists()
        weights = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(folder.parent), tag="checkpoint")
        assert set(weights) == set(Model().state_dict())

    def test_without_an_optimizer(self) -> None:
        """L: inference at stage 3."""
        config = {k: v for k, v in config_of_clients(3).items() if k != "gradient_clipping"}
        engine, optimizer, _, _ = deepspeed.initialize(
            args=Namespace(device_rank=None), config=config, model=Model(), optimizer=None, dist_init_required=False
        )
        engine.eval()
        assert engine(batch_of_rank()).isfinite()
        assert all(parameter.ds_numel > 0 for parameter in engine.parameters())
        engine.destroy()


class TestTransformers(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    def test_zero_init_and_the_constructor_it_patches(self) -> None:
        """T: ``config_dict_or_path`` with the batch keys; replaces a global of the module to keep dtypes of arange."""
        from deepspeed.runtime.zero import partition_parameters

        original, targets = partition_parameters.zero_wrapper_for_fp_tensor_constructor, []

        def patched(*args: Any, **kwargs: Any) -> Any:
            targets.append("target_device" in kwargs or len(args) > 2)
            return original(*args, **kwargs)

        partition_parameters.zero_wrapper_for_fp_tensor_constructor = patched
        try:
            config = config_of_clients(3) | {"bf16": {"enabled": True}, "train_batch_size": 8}
            with deepspeed.zero.Init(config_dict_or_path=config):
                model = Model()
        finally:
            partition_parameters.zero_wrapper_for_fp_tensor_constructor = original
        assert targets and all(targets)
        assert model.first.weight.ds_shape == (5, 5) and model.first.weight.dtype is torch.bfloat16
        deepspeed.zero.register_external_parameter(model.first, model.last.weight)
        with deepspeed.zero.GatheredParameters([model.first.weight], modifier_rank=0):
            if dist.get_rank() == 0:
                nn.init.ones_(model.first.weight)
        with deepspeed.zero.GatheredParameters(model.first.weight, modifier_rank=None):
            assert model.first.weight.sum() == 25

    def test_the_engine(self, tmpdir: str) -> None:
        """T: reads the config of the live engine, passes through to the model, finds tags by ``global_step*``."""
        engine = deepspeed.initialize(
            model=Model(), config=config_of_clients(2), optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
        )[0]
        assert engine.config.get("zero_optimization", {}).get("stage") == 2
        assert engine.generate() == "text" and engine.module.config.hidden_size == 5
        for _ in range(2):
            engine.backward(engine(batch_of_rank()))
            engine.step()
        engine.save_checkpoint(str(tmpdir))
        assert [path.name for path in Path(str(tmpdir)).glob("global_step*")] == ["global_step1"]
        path, _ = engine.load_checkpoint(str(tmpdir), load_optimizer_states=True, load_lr_scheduler_states=True)
        assert path is not None


class TestPeftAndTrl(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    def test_gradients_and_gathered_parameters(self) -> None:
        """P: importance of AdaLoRA from ``safe_get_full_grad``; ``fwd_module``; an empty list."""
        engine = deepspeed.initialize(
            model=Model(), config=config_of_clients(3), optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
        )[0]
        weight = engine.module.first.weight
        for _ in range(2):
            engine.backward(engine(batch_of_rank()))
            gradient = deepspeed.utils.safe_get_full_grad(weight)
            assert gradient.shape == weight.ds_shape and gradient.abs().sum() > 0
            engine.step()
        assert weight.numel() == 0 and weight.ds_numel == 25
        with deepspeed.zero.GatheredParameters(engine.module.parameters(), modifier_rank=0, fwd_module=engine.module):
            assert weight.shape == (5, 5)
        with deepspeed.zero.GatheredParameters([], None, engine.module, True):
            pass
        with deepspeed.zero.GatheredParameters([weight], enabled=False):
            assert weight.ds_status is not ZeroParamStatus.AVAILABLE
        engine.destroy()

    def test_reference_models(self) -> None:
        """R: ``model, *_ = initialize(model=, config=)``: stage 3 without optimizer, else stage 0."""
        for stage in (3, 0):
            config = config_of_clients(stage)
            config["zero_optimization"] = {"stage": stage}
            reference, *rest = deepspeed.initialize(model=Model(), config=config)
            reference.eval()
            assert reference(batch_of_rank()).isfinite() and rest[1] is None
            reference.destroy()
