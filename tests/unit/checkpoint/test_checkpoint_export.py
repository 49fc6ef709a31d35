# SPDX-License-Identifier: Apache-2.0
"""Plain weights from checkpoints: in memory, as files, by the programs that lie beside a checkpoint."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import deepspeed
from deepspeed.checkpoint.utils import (
    clone_tensors_for_torch_save,
    get_layer_ckpt_name_for_rank,
    get_model_ckpt_name_for_rank,
    get_zero_ckpt_name_for_rank,
)
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils import zero_to_fp32
from deepspeed.utils.tensor_fragment import fragment_address
from unit.checkpoint.checkpoint_cases import KeptModel, everything, make_config, make_engine, train
from unit.common import DistributedTest

FROZEN = {"frozen.weight", "frozen.bias"}
TIED = ("words.weight", "head.weight")


def plain_of(engine: Any) -> dict[str, Tensor]:
    """What an export must give: masters in fp32, frozen weights in fp32, buffers as they are. Collective."""
    state = everything(engine)
    plain = {}
    for name, value in engine.module.state_dict().items():
        master = state.get("master of " + (TIED[0] if name in TIED else name), state[name])
        plain[name] = master.float() if value.is_floating_point() else master
    return plain


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name].dtype is value.dtype, name
        assert found[name].shape == value.shape, name
        assert torch.equal(found[name], value), name


def trained_engine(stage: int, dtype: str, **options: Any) -> Any:
    engine = make_engine(make_config(stage, dtype, **options))
    train(engine, 0, 2)
    return engine


class TestTrained(DistributedTest):
    world_size = [1, 3]
    reuse_dist_env = True

    @pytest.mark.parametrize("stage, dtype", [(1, "fp32"), (1, "bf16"), (2, "bf16"), (3, "fp32"), (3, "bf16")])
    def test_state_dict(self, stage: int, dtype: str, tmp_path: Path) -> None:
        engine = trained_engine(stage, dtype)
        expected = plain_of(engine)
        engine.save_checkpoint(str(tmp_path), tag="one")
        engine.save_checkpoint(str(tmp_path), tag="small", exclude_frozen_parameters=True, save_latest=False)
        if dist.get_rank() == 0:
            found = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
            assert_same(found, expected)
            plain = KeptModel().state_dict()
            assert {name: value.shape for name, value in found.items()} == {n: v.shape for n, v in plain.items()}
            assert found[TIED[0]] is found[TIED[1]]
            trained = {name: value for name, value in expected.items() if name not in FROZEN}
            for options in ({"tag": "small"}, {"exclude_frozen_parameters": True}):
                assert_same(zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), **options), trained)
            lazy = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), lazy_mode=True)
            assert isinstance(lazy["inner.weight"], zero_to_fp32.GatheredTensor)
            assert_same({name: value.contiguous() for name, value in lazy.items()}, expected)
            model = zero_to_fp32.load_state_dict_from_zero_checkpoint(KeptModel(seed=5), str(tmp_path))
            assert_same(model.state_dict(), expected)
            for program in ("zero_to_fp32.py", "zero_to_torch.py"):
                assert os.access(tmp_path / program, os.X_OK)
        dist.barrier()
        engine.destroy()


class TestParameterGroupsOfSeveralDtypes(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("stage", [1, 3])
    def test_state_dict(self, stage: int, tmp_path: Path) -> None:
        engine = make_engine(make_config(stage), model=KeptModel(mixed=True))
        train(engine, 0, 2)
        expected = plain_of(engine)
        engine.save_checkpoint(str(tmp_path))
        if dist.get_rank() == 0:
            assert_same(zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path)), expected)
        dist.barrier()
        engine.destroy()


class TestSave16BitModel(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    @pytest.mark.parametrize("stage, dtype", [(0, "bf16"), (1, "fp32"), (2, "bf16"), (3, "fp32"), (3, "bf16")])
    def test_file(self, stage: int, dtype: str, tmp_path: Path) -> None:
        gather = {"stage3_gather_16bit_weights_on_model_save": True} if stage == 3 else {}
        engine = trained_engine(stage, dtype, zero=gather)
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            expected = {name: value.detach().clone() for name, value in engine.module.state_dict().items()}
        assert engine.save_16bit_model(str(tmp_path / "new"), "weights.bin")
        assert engine.save_16bit_model(str(tmp_path / "new"), "small.bin", exclude_frozen_parameters=True)
        if dist.get_rank() == 0:
            found = torch.load(tmp_path / "new" / "weights.bin", weights_only=True)
            assert_same(found, expected)
            assert list(found) == list(KeptModel().state_dict())
            assert found["inner.weight"].dtype is {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
            assert found[TIED[0]].data_ptr() == found[TIED[1]].data_ptr()
            small = torch.load(tmp_path / "new" / "small.bin", weights_only=True)
            assert_same(small, {name: value for name, value in expected.items() if name not in FROZEN})
            # each tensor brings its own memory, not the flat buffer that it is a view of
            assert found["inner.bias"].untyped_storage().nbytes() == found["inner.bias"].nbytes
            assert sorted(os.listdir(tmp_path / "new")) == ["small.bin", "weights.bin"]
        dist.barrier()
        engine.destroy()

    def test_frozen_under_two_names(self, tmp_path: Path) -> None:
        model = KeptModel()
        model.words.weight.requires_grad_(False)
        engine = make_engine(make_config(0), model=model)
        engine.save_16bit_model(str(tmp_path), exclude_frozen_parameters=True)
        if dist.get_rank() == 0:
            assert not set(TIED) & set(torch.load(tmp_path / "pytorch_model.bin", weights_only=True))
        engine.destroy()

    def test_stage3_gathers_only_when_asked(self, tmp_path: Path) -> None:
        engine = make_engine(make_config(3))
        assert engine.save_16bit_model(str(tmp_path / "new")) is False
        assert not (tmp_path / "new").exists()
        engine.destroy()

    def test_stage0_checkpoint_is_refused(self, tmp_path: Path) -> None:
        engine = trained_engine(0, "fp32")
        engine.save_checkpoint(str(tmp_path))
        assert not (tmp_path / "zero_to_fp32.py").exists()
        with pytest.raises(TypeError, match="stage 0"):
            zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
        engine.destroy()


class TestReadByThePublishedPackage(DistributedTest):
    world_size = 1

    def test_stage0_entries(self, tmp_path: Path) -> None:
        """It wants each of these, also where the scale never changes."""
        engine = trained_engine(0, "bf16")
        engine.save_checkpoint(str(tmp_path), tag="one")
        state = torch.load(tmp_path / "one" / "mp_rank_00_model_states.pt", weights_only=True)["optimizer"]
        wanted = {"dynamic_loss_scale", "cur_scale", "cur_iter", "optimizer_state_dict", "fp32_groups"}
        assert wanted <= set(state)
        engine.destroy()


# ---------------------------------------------------------------------------------------------------- laid out by hand


def sizes(*groups: dict[str, tuple[int, ...]]) -> list[OrderedDict[str, torch.Size]]:
    return [OrderedDict((name, torch.Size(shape)) for name, shape in group.items()) for group in groups]


SHAPES = sizes({"a": (5, 3), "b": (2, 11), "empty": (0, 4)}, {"c": (7,), "scalar": ()})
BUFFERS = {"mean": torch.tensor([0.5, 0.25], dtype=torch.bfloat16), "seen": torch.tensor(3)}


def weights() -> dict[str, Tensor]:
    """Another value for every element."""
    result, begin = {}, 1
    for group in SHAPES:
        for name, shape in group.items():
            result[name] = torch.arange(begin, begin + shape.numel(), dtype=torch.float32).view(shape)
            begin += shape.numel()
    return result


def expected_weights() -> dict[str, Tensor]:
    frozen = torch.linspace(-1, 1, 5).bfloat16()
    whole = weights()
    return whole | BUFFERS | {"frozen": frozen.float(), "tied": whole["a"]}


def write(folder: Path, ranks: int, stage: int, bf16_optimizer: bool = False, mappings: bool = True) -> Path:
    """The files of a checkpoint as the published package lays them out; the folder of checkpoints."""
    tag = folder / "step1"
    tag.mkdir(parents=True)
    (folder / "latest").write_text("step1")
    frozen = expected_weights()["frozen"].bfloat16()
    module = {name: value.bfloat16() for name, value in weights().items()}
    module["tied"] = module["a"]
    module = module | BUFFERS | {"frozen": frozen}
    for rank in range(ranks if stage == 3 else 1):
        fragment = torch.cat([frozen, frozen.new_zeros(-5 % ranks)]).chunk(ranks)[rank] if stage == 3 else frozen
        fragment.ds_numel = fragment.numel()  # tensors with attributes are pickled in another way
        content = {
            "module": {n: v if stage < 3 or n in BUFFERS else v.new_empty(0) for n, v in module.items()},
            "buffer_names": list(BUFFERS),
            "param_shapes": SHAPES,
            "frozen_param_shapes": None if stage == 1 else {"frozen": torch.Size([5])},
            "frozen_param_fragments": None if stage == 1 else {"frozen": fragment},
            "shared_params": {"tied": "a"} if rank == 0 else {},
            "ds_version": "0.19.8",
        }
        front = f"zero_pp_rank_{rank}_" if stage == 3 else ""
        torch.save(content, tag / f"{front}mp_rank_00_model_states.pt")
    for rank in range(ranks):
        state = _stage3(rank, ranks) if stage == 3 else _stage_1_and_2(rank, ranks, bf16_optimizer, mappings)
        if not bf16_optimizer:
            state |= {"zero_stage": ZeroStageEnum(stage), "loss_scaler": LossScaler(), "overflow": False}
        front = "bf16_" if bf16_optimizer else ""
        content = {"optimizer_state_dict": state, "ds_version": "0.19.8"}
        torch.save(content, tag / f"{front}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return folder


def _stage_1_and_2(rank: int, ranks: int, padded: bool, mappings: bool) -> dict[str, Any]:
    masters, addresses = [], []
    for group in SHAPES:
        flat = torch.cat([weights()[name].reshape(-1) for name in group])
        padding = -flat.numel() % (2 * ranks)
        part = (flat.numel() + padding) // ranks
        end = (rank + 1) * part if padded else min((rank + 1) * part, flat.numel())
        filled = torch.cat([flat, flat.new_full((padding,), -7.0)])
        masters.append(filled[min(rank * part, end) : end].clone())
        begin, found = 0, OrderedDict()
        for name, shape in group.items():
            low, high = max(begin, rank * part), min(begin + shape.numel(), (rank + 1) * part)
            if low < high:
                found[name] = fragment_address(numel=high - low, start=low - rank * part)
            begin += shape.numel()
        addresses.append(found)
    state = {"single_partition_of_fp32_groups": masters, "partition_count": [ranks] * len(SHAPES)}
    return state | ({"param_slice_mappings": addresses} if mappings else {})


def _stage3(rank: int, ranks: int) -> dict[str, Any]:
    """Sub-groups of one or two parameters."""
    parts = []
    for name in [name for group in SHAPES for name in group]:
        flat = weights()[name].reshape(-1)
        part = -(-flat.numel() // ranks)
        filled = torch.cat([flat, flat.new_full((part * ranks - flat.numel(),), -7.0)])
        parts.append(filled[rank * part : (rank + 1) * part])
    return {"fp32_flat_groups": [parts[0], torch.cat(parts[1:3]), torch.cat(parts[3:])], "partition_count": ranks}


LAYOUTS = {
    "stage 1": {"stage": 1},
    "stage 1, places unsaid": {"stage": 1, "mappings": False},
    "bf16 optimizer": {"stage": 1, "bf16_optimizer": True},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
}


class TestPublishedLayouts:
    @pytest.mark.parametrize("ranks", [1, 2, 12])
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_state_dict(self, layout: str, ranks: int, tmp_path: Path) -> None:
        write(tmp_path, ranks, **LAYOUTS[layout])
        assert_same(zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path)), expected_weights())

    def test_order_of_names(self, tmp_path: Path) -> None:
        found = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(write(tmp_path, 2, 2)))
        assert list(found) == ["mean", "seen", "frozen", "a", "b", "empty", "c", "scalar", "tied"]

    def test_file_names(self, tmp_path: Path) -> None:
        tag = str(write(tmp_path, 12, 3) / "step1")
        found = zero_to_fp32.get_optim_files(tag)
        assert found == [f"{tag}/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(12)]
        assert zero_to_fp32.get_model_state_file(tag, 3) == f"{tag}/zero_pp_rank_0_mp_rank_00_model_states.pt"
        stage, ranks, flat = zero_to_fp32.parse_optim_states(found, tag)
        assert (stage, ranks, len(flat), len(flat[0])) == (3, 12, 12, 3)


class TestErrors:
    def test_no_latest(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="latest"):
            zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))

    def test_no_such_tag(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="step9"):
            zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(write(tmp_path, 2, 1)), tag="step9")

    @pytest.mark.parametrize("stage", [1, 3])
    @pytest.mark.parametrize("rank, error", [(1, FileNotFoundError), (2, ValueError)])
    def test_missing_rank(self, stage: int, rank: int, error: type[Exception], tmp_path: Path) -> None:
        write(tmp_path, 3, stage)
        os.remove(tmp_path / "step1" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        with pytest.raises(error, match=r"ranks \[1\] are missing|3 data-parallel ranks and holds the files of 2"):
            zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))

    def test_damaged_file(self, tmp_path: Path) -> None:
        write(tmp_path, 2, 1)
        path = tmp_path / "step1" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(RuntimeError, match="zero_pp_rank_1.* is damaged"):
            zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))

    def test_model_parallel_ranks(self, tmp_path: Path) -> None:
        write(tmp_path, 1, 1)
        (tmp_path / "step1" / "zero_pp_rank_0_mp_rank_01_optim_states.pt").touch()
        with pytest.raises(ValueError, match="model-parallel"):
            zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))

    def test_shapes_that_do_not_add_up(self, tmp_path: Path) -> None:
        write(tmp_path, 2, 3)
        path = tmp_path / "step1" / "zero_pp_rank_0_mp_rank_00_model_states.pt"
        content = torch.load(path, weights_only=True)
        content["param_shapes"][0]["b"] = torch.Size([2, 13])
        torch.save(content, path)
        with pytest.raises(ValueError, match="elements"):
            zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))

    @pytest.mark.parametrize("size", ["", "5 apples", "0GB", "-1", "5PB"])
    def test_shard_size(self, size: str, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="max_shard_size"):
            zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(str(tmp_path), str(tmp_path), max_shard_size=size)

    def test_another_model(self, tmp_path: Path) -> None:
        write(tmp_path, 2, 1)
        with pytest.raises(RuntimeError, match="no weight of checkpoint"):
            zero_to_fp32.load_state_dict_from_zero_checkpoint(torch.nn.Linear(2, 3), str(tmp_path))

    def test_part_of_a_model(self, tmp_path: Path) -> None:
        model = torch.nn.Module()
        model.c, model.more = torch.nn.Parameter(torch.zeros(7)), torch.nn.Parameter(torch.zeros(1))
        with pytest.warns(UserWarning, match="more"):
            zero_to_fp32.load_state_dict_from_zero_checkpoint(model, str(write(tmp_path, 2, 1)))
        assert torch.equal(model.c, weights()["c"])


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


class TestNothingInAFileIsRun:
    def test_trap(self, tmp_path: Path) -> None:
        write(tmp_path, 1, 1)
        sprung = tmp_path / "sprung"
        path = tmp_path / "step1" / "mp_rank_00_model_states.pt"
        content = torch.load(path, weights_only=True)
        content["client"] = {"trap": Trap(sprung), "counts": Counts(a=1), "words": Words(["x"])}
        torch.save(content, path)
        assert_same(zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path)), expected_weights())
        assert not sprung.exists()
        pickle.loads(pickle.dumps(content["client"]["trap"]))
        assert sprung.exists()  # the trap works


class Counts(dict):
    """A class that a stand-alone program does not have."""


class Words(list):
    """Another one."""


# ---------------------------------------------------------------------------------------------------- files


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Written from the format's description, and checked as strictly: nothing overlaps, nothing is left over."""
    kinds = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64}
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    assert size % 8 == 0
    header = json.loads(data[8 : 8 + size])
    assert header.pop("__metadata__") == {"format": "pt"}
    body, tensors, position = data[8 + size :], {}, 0
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        assert begin == position
        position = end
        raw = torch.frombuffer(bytearray(body[begin:end]), dtype=kinds[entry["dtype"]]) if end > begin else None
        empty = torch.empty(0, dtype=kinds[entry["dtype"]])
        tensors[name] = (empty if raw is None else raw).reshape(entry["shape"])
    assert position == len(body)
    return tensors


def read_export(folder: Path, safe: bool) -> tuple[dict[str, Tensor], list[str]]:
    """All tensors of an export, found through its index where it has one, and the names of its files."""
    single = "model.safetensors" if safe else "pytorch_model.bin"

    def read(name: str) -> dict[str, Tensor]:
        return read_safetensors(folder / name) if safe else torch.load(folder / name, weights_only=True)

    index = folder / f"{single}.index.json"
    if not index.exists():
        return read(single), [single]
    content = json.loads(index.read_text())
    files = sorted(set(content["weight_map"].values()))
    tensors = {file: read(file) for file in files}
    found = {name: tensors[file][name] for name, file in content["weight_map"].items()}
    assert sum(map(len, tensors.values())) == len(found)
    assert content["metadata"]["total_size"] == sum(value.nbytes for value in found.values())
    return found, files


class TestFiles:
    @pytest.mark.parametrize("safe", [False, True])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_one_file(self, dtype: torch.dtype, safe: bool, tmp_path: Path) -> None:
        out = tmp_path / "out"
        write(tmp_path, 2, 3)
        zero_to_fp32.convert_zero_checkpoint_to_state_dict(str(tmp_path), str(out), dtype, safe_serialization=safe)
        found, files = read_export(out, safe)
        assert os.listdir(out) == files
        expected = {n: v.to(dtype) if v.is_floating_point() else v for n, v in expected_weights().items()}
        assert_same(found, expected)

    @pytest.mark.parametrize("safe", [False, True])
    @pytest.mark.parametrize("limit", [200, "0.1KB", 1, "100KiB", None])
    def test_shards(self, limit: Any, safe: bool, tmp_path: Path) -> None:
        out = tmp_path / "out"
        write(tmp_path, 3, 2)
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(str(tmp_path), str(out), limit, safe)
        found, files = read_export(out, safe)
        if not safe:
            assert found["a"].data_ptr() == found["tied"].data_ptr()
        expected = {n: v.float() if v.is_floating_point() else v for n, v in expected_weights().items()}
        assert_same(found, expected)
        front, suffix = ("model", "safetensors") if safe else ("pytorch_model", "bin")
        if limit in (None, "100KiB"):
            assert files == [f"{front}.{suffix}"]
        else:
            count = len(files)
            assert files == [f"{front}-{n:05d}-of-{count:05d}.{suffix}" for n in range(1, count + 1)]
            assert count == {200: 2, "0.1KB": 3 if not safe else 4, 1: 8}[limit], count
        assert sorted(os.listdir(out)) == sorted(files + ([f"{front}.{suffix}.index.json"] if len(files) > 1 else []))

    def test_export_over_an_earlier_one(self, tmp_path: Path) -> None:
        out = tmp_path / "out"
        write(tmp_path, 2, 1)
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(str(tmp_path), str(out))
        (out / "tokenizer.bin").touch()
        for limit, count in ((100, 3), ("5GB", 1)):
            zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(str(tmp_path), str(out), limit)
            expected = {n: v.float() if v.is_floating_point() else v for n, v in expected_weights().items()}
            assert_same(read_export(out, False)[0], expected)
            assert len(os.listdir(out)) == 1 + count + (count > 1), os.listdir(out)

    @pytest.mark.parametrize("safe, most", [(False, 2), (True, 1)])
    def test_memory(self, safe: bool, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """At no time are more parameters in memory than one file has; with safetensors, one parameter."""
        import weakref

        alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
        seen = []
        gather = zero_to_fp32.GatheredTensor.gather

        def counting(self: Any, dtype: torch.dtype) -> Tensor:
            tensor = gather(self, dtype)
            alive.add(tensor)
            seen.append(len(alive))
            return tensor

        monkeypatch.setattr(zero_to_fp32.GatheredTensor, "gather", counting)
        write(tmp_path, 2, 2)
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(str(tmp_path), str(tmp_path / "out"), 100, safe)
        assert 1 <= max(seen) <= most < len(seen)


class TestPrograms:
    def test_alone(self, tmp_path: Path) -> None:
        from deepspeed.checkpoint.export import place_programs

        place_programs(str(write(tmp_path, 2, 3)))
        assert (tmp_path / "zero_to_fp32.py").read_text() == Path(zero_to_fp32.__file__).read_text()
        program = """
import runpy, sys
for name in ("deepspeed", "safetensors", "tqdm", "numpy", "huggingface_hub"):
    sys.modules[name] = None  # importing it is an error
for line in ("zero_to_fp32.py . all --safe_serialization",
             "zero_to_fp32.py . some -t step1 --exclude_frozen_parameters --max_shard_size 100 -d",
             "zero_to_torch.py . half --dtype bf16"):
    sys.argv, sys.path[0] = line.split(), "."
    runpy.run_path(sys.argv[0], run_name="__main__")
"""
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        expected = {n: v.float() if v.is_floating_point() else v for n, v in expected_weights().items()}
        assert_same(read_export(tmp_path / "all", True)[0], expected)
        half, _ = read_export(tmp_path / "half", False)
        assert half["b"].dtype is torch.bfloat16
        some, files = read_export(tmp_path / "some", False)
        assert set(some) == set(expected) - {"frozen"}
        assert len(files) > 1
        assert "b: (2, 11) torch.float32" in done.stderr
        assert "%" not in done.stderr  # no progress bar where nobody looks

    def test_bar_on_a_terminal(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
        zero_to_fp32.main([str(write(tmp_path / "c", 2, 1)), str(tmp_path / "out")])
        assert "100%" in capsys.readouterr().err.split("\r")[-1]

    def test_dtype_is_needed(self, capsys: Any) -> None:
        from deepspeed.utils import zero_to_torch

        for arguments in ([".", "out"], [".", "out", "--dtype", "int8"]):
            with pytest.raises(SystemExit):
                zero_to_torch.main(arguments)
            assert "--dtype" in capsys.readouterr().err

    def test_placed_again(self, tmp_path: Path) -> None:
        from deepspeed.checkpoint.export import place_programs

        place_programs(str(tmp_path))
        program = tmp_path / "zero_to_fp32.py"
        times = program.stat().st_mtime_ns
        place_programs(str(tmp_path))
        assert program.stat().st_mtime_ns == times
        program.write_text("old")
        place_programs(str(tmp_path))
        assert "GatheredTensor" in program.read_text()
        assert os.access(program, os.X_OK)


class TestCloneTensors:
    def test_memory_of_its_own(self) -> None:
        flat = torch.arange(100.0)
        item = {"a": flat[3:5], "list": [flat[10:12], (flat[3:5], "text")], "ordered": OrderedDict(n=7)}
        copied = clone_tensors_for_torch_save(item)
        assert copied["a"].untyped_storage().nbytes() == 8
        assert copied["a"] is copied["list"][1][0]
        assert torch.equal(copied["list"][0], flat[10:12])
        assert copied["list"][1][1] == "text"
        assert copied["ordered"] == OrderedDict(n=7)
        assert type(copied["ordered"]) is OrderedDict
        flat.zero_()
        assert copied["a"].tolist() == [3.0, 4.0]
        assert clone_tensors_for_torch_save(torch.ones(2), device="meta").is_meta
        assert clone_tensors_for_torch_save(5) == 5

    def test_names(self) -> None:
        assert get_model_ckpt_name_for_rank("f", "01") == "f/mp_rank_01_model_states.pt"
        assert get_zero_ckpt_name_for_rank("f", 3, 1) == "f/zero_pp_rank_3_mp_rank_01_optim_states.pt"
        assert get_layer_ckpt_name_for_rank("f", "layer_03", 1) == "f/layer_03-model_01_model_states.pt"
