# SPDX-License-Identifier: Apache-2.0
"""Where a config can come from, and how its effective values are printed."""

import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest

import deepspeed
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigWriter, load_config
from deepspeed.runtime.config_report import describe, main
from deepspeed.runtime.config_schema import FREE_SECTIONS, all_keys
from deepspeed.runtime.config_utils import ScientificNotationEncoder, pp_int

SMALL = {"train_batch_size": 4, "zero_optimization": {"stage": 2}}


def test_a_dict_is_kept_by_reference_and_not_changed():
    given = {
        "train_batch_size": 4,
        "zero_optimization": {"stage": 2, "cpu_offload": "auto"},
        "bf16": {"enabled": "auto"},
    }
    before = json.dumps(given)
    config = DeepSpeedConfig(given)
    assert config._param_dict is given
    assert json.dumps(given) == before


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(SMALL),
        "{\n  # a comment\n  train_batch_size: 4\n  zero_optimization: {stage: 2}\n}",
        '{"train_batch_size": 4, // comment\n "zero_optimization": {"stage": 2,},}',
    ],
)
def test_a_file_may_be_json_or_hjson(tmp_path, text):
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    for source in (str(path), path):
        config = DeepSpeedConfig(source)
        assert (config.train_batch_size, config.zero_optimization_stage) == (4, 2)
        assert type(config._param_dict) is dict


def test_a_string_may_be_urlsafe_base64():
    given = {**SMALL, "tensorboard": {"job_name": "~~~???>>>"}}
    text = base64.urlsafe_b64encode(json.dumps(given).encode()).decode()
    assert "-" in text or "_" in text
    assert load_config(text) == given


@pytest.mark.parametrize("source", [None, 3, ["ds_config.json"]])
def test_other_types_are_refused(source):
    with pytest.raises(TypeError, match="must be a dict or a path"):
        DeepSpeedConfig(source)


@pytest.mark.parametrize("source", ["no_such_file.json", "conf", "", base64.urlsafe_b64encode(b"not json").decode()])
def test_a_string_that_is_nothing_is_refused(source):
    with pytest.raises(ValueError, match="neither an existing file nor a urlsafe base64 JSON string"):
        DeepSpeedConfig(source)


@pytest.mark.parametrize("text", ["{", '{"train_batch_size": }', "[1, 2]"])
def test_a_file_that_is_no_object_is_refused_by_name(tmp_path, text):
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="broken.json"):
        DeepSpeedConfig(str(path))


def test_duplicate_keys_are_refused_in_files_and_strings(tmp_path):
    text = '{"train_batch_size": 4, "fp16": {"enabled": true, "enabled": false}}'
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    for source in (str(path), base64.urlsafe_b64encode(text.encode()).decode()):
        with pytest.raises(ValueError, match=r"Duplicate keys.*\['enabled'\]"):
            DeepSpeedConfig(source)


def test_the_writer_round_trips(tmp_path):
    writer = DeepSpeedConfigWriter()
    writer.add_config("train_batch_size", 4)
    writer.write_config(tmp_path / "out.json")
    other = DeepSpeedConfigWriter({"train_batch_size": 5})
    other.load_config(tmp_path / "out.json")
    assert other.data == {"train_batch_size": 4}


def test_effective_values_are_printed_with_their_origin():
    lines = dict(
        line.split(" = ", 1)
        for line in describe(
            DeepSpeedConfig(
                {
                    "train_micro_batch_size_per_gpu": 2,
                    "gradient_clipping": "auto",
                    "bfloat16": {"enabled": True, "check_grad_overflow": "auto"},
                    "fp16": {"hysteresis": 2},
                    "communication_data_type": "bf16",
                    "flops_profiler": {"enabled": True},
                    "zero_optimization": {
                        "stage": 3,
                        "stage3_max_live_parameters": 7,
                        "max_reuse_distance": 8,
                        "offload_param": {"device": "none"},
                        "cpu_offload": True,
                    },
                }
            )
        )
    )
    expected = {
        "train_micro_batch_size_per_gpu": "2  (dict)",
        "gradient_clipping": "1.0  (auto)",
        "prescale_gradients": "false  (default)",
        "bf16.enabled": "true  (dict, by its old name)",
        "fp16.hysteresis": "2  (dict)",
        "communication_data_type": "torch.bfloat16  (dict)",
        "wall_clock_breakdown": "true  (derived: flops_profiler.enabled)",
        "zero_optimization.overlap_comm": "true  (derived)",
        "zero_optimization.stage3_max_live_parameters": "7  (dict)",
        "zero_optimization.stage3_max_reuse_distance": "8  (dict)",
        "zero_optimization.stage3_prefetch_bucket_size": "50000000  (default)",
        "zero_optimization.offload_optimizer.device": '"cpu"  (dict, by its old name)',
        "zero_optimization.offload_param.device": '"none"  (dict)',
        "zero_optimization.offload_param.pin_memory": "true  (default)",
        "flops_profiler.enabled": "true  (dict)",
    }
    assert {key: lines[key] for key in expected} == expected
    assert lines["train_batch_size"].startswith("2  (derived: computed as")
    assert lines["gradient_accumulation_steps"] == "1  (default)"


def test_every_key_is_printed():
    """Those inside of a section that is null have no value."""
    given = {**SMALL, "checkpoint": {"writer": {}}, "zero_optimization": {"offload_param": {}, "offload_optimizer": {}}}
    printed = {line.split(" = ")[0] for line in describe(DeepSpeedConfig(given))}
    free = {*FREE_SECTIONS, "allgather_size", "datastates_ckpt"}
    assert {key.path for key in all_keys() if key.kind != "section"} - free - printed == set()


def test_a_value_changed_later_is_printed_as_it_is():
    config = DeepSpeedConfig({"train_batch_size": 4})
    config.train_batch_size = 8
    assert "train_batch_size = 8  (derived: changed after the config was read)" in describe(config)


def test_print_shows_the_effective_and_the_user_config(capsys):
    DeepSpeedConfig(SMALL).print("my config")
    out = capsys.readouterr().out
    assert out.startswith("my config:\n")
    assert "zero_optimization.stage = 2  (dict)" in out
    assert "user config = {" in out


def test_secrets_are_not_printed(capsys):
    DeepSpeedConfig({**SMALL, "comet": {"api_key": "swordfish", "project": "trout"}}).print("x")
    out = capsys.readouterr().out
    assert "swordfish" not in out
    assert out.count("trout") == 2 and out.count("(hidden)") == 2


def test_only_rank_0_prints(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    config = DeepSpeedConfig(SMALL)
    config.print("x")
    config.print_user_config()
    assert (config.global_rank, capsys.readouterr().out) == (1, "")


def test_command_line(tmp_path, capsys):
    path = tmp_path / "ds_config.json"
    path.write_text('{"train_batch_size": 4, "zero_optimization": {"stage": 1, "zero_quantized_gradients": true}}')
    assert main([str(path)]) == 0
    out = capsys.readouterr().out
    assert "train_batch_size = 4  (file)" in out
    assert "NOT SUPPORTED zero_optimization.zero_quantized_gradients" in out
    assert main([base64.urlsafe_b64encode(b'{"train_batch_size": 4}').decode()]) == 0
    assert "train_batch_size = 4  (base64)" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["--docs", "--schema"], ["ds_config.json", "--docs"]])
def test_command_line_with_nothing_or_too_much_to_do(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2 and "usage" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["deepspeed.runtime.config", "deepspeed.runtime.config_report"])
def test_both_modules_run_as_commands(module, tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(SMALL))
    root = Path(deepspeed.__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-m", module, str(path)], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0 and "zero_optimization.stage = 2  (file)\n" in done.stdout


@pytest.mark.parametrize(
    "value", [5e8, 5, 1234, 1234567, 50257, 123456789, 1.5, 0.1, True, None, "text", [1, 5e9], {"a": {}}]
)
@pytest.mark.parametrize("indent", [None, 4])
def test_scientific_notation_loses_nothing(value, indent):
    assert json.loads(json.dumps({"key": value}, cls=ScientificNotationEncoder, indent=indent)) == {"key": value}


def test_scientific_notation_shortens_round_numbers():
    assert json.dumps(500000000, cls=ScientificNotationEncoder) == "5.000000e+08"


def test_pp_int():
    assert (repr(pp_int(1234567)), pp_int(3) + 1, repr(pp_int(3, "three"))) == ("1,234,567", 4, "three")
