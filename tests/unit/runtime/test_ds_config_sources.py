# SPDX-License-Identifier: Apache-2.0
"""Where a config can come from, and how its effective values are printed."""

import base64
import json

import pytest

from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigWriter, load_config
from deepspeed.runtime.config_report import describe, main
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
                    "communication_data_type": "bf16",
                    "flops_profiler": {"enabled": True},
                    "zero_optimization": {
                        "stage": 3,
                        "stage3_max_live_parameters": 7,
                        "offload_param": {"device": "none"},
                    },
                }
            )
        )
    )
    expected = {
        "train_micro_batch_size_per_gpu": "2  (user)",
        "gradient_clipping": "1.0  (default)",
        "communication_data_type": "torch.bfloat16  (user)",
        "wall_clock_breakdown": "true  (derived: flops_profiler.enabled)",
        "zero_optimization.overlap_comm": "true  (derived)",
        "zero_optimization.stage3_max_live_parameters": "7  (user)",
        "zero_optimization.stage3_max_reuse_distance": "1000000000  (default)",
        "zero_optimization.offload_param.device": '"none"  (user)',
        "zero_optimization.offload_param.pin_memory": "true  (default)",
        "flops_profiler.enabled": "true  (user)",
    }
    assert {key: lines[key] for key in expected} == expected
    assert lines["train_batch_size"].startswith("2  (derived: computed as")
    assert lines["gradient_accumulation_steps"].startswith("1  (derived: default")


def test_a_value_changed_later_is_printed_as_it_is():
    config = DeepSpeedConfig({"train_batch_size": 4})
    config.train_batch_size = 8
    assert "train_batch_size = 8  (derived: changed after the config was read)" in describe(config)


def test_print_shows_the_effective_and_the_user_config(capsys):
    DeepSpeedConfig(SMALL).print("my config")
    out = capsys.readouterr().out
    assert out.startswith("my config:\n")
    assert "zero_optimization.stage = 2  (user)" in out
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
    assert "train_batch_size = 4  (user)" in out
    assert "NOT SUPPORTED zero_optimization.zero_quantized_gradients" in out
    assert main([]) == 2


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
