# SPDX-License-Identifier: Apache-2.0
"""The elastic batch size against a search that tries everything, its errors, and the config that uses it."""

import json
import random

import pytest
import torch

import deepspeed
from deepspeed.elasticity import (
    ElasticityConfig,
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
    cli,
    compute_elastic_config,
    elasticity_enabled,
    ensure_immutable_elastic_config,
)
from deepspeed.elasticity.constants import DEEPSPEED_ELASTICITY_CONFIG
from deepspeed.elasticity.elasticity import fitting_counts
from deepspeed.git_version_info import version
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from unit.common import DistributedTest


def elastic(**keys):
    return {"elasticity": {"enabled": True, "max_train_batch_size": 100, "micro_batch_sizes": [2, 3], **keys}}


def compute(config, *args, **keywords):
    return compute_elastic_config(config, version, *args, **keywords)


def by_trying_everything(largest, micros, gpus_allowed, node, model_parallel):
    """Number of GPUs that fit each batch size, from the definition."""
    fitting = {}
    for batch in range(1, largest + 1):
        fitting[batch] = [
            gpus
            for gpus in gpus_allowed
            if gpus % node == 0 and any(batch % (gpus // model_parallel * micro) == 0 for micro in micros)
        ]
    return fitting


@pytest.mark.parametrize("seed", range(12))
def test_no_batch_size_fits_more_numbers_of_gpus(seed):
    draw = random.Random(seed)
    largest, micros = draw.randint(20, 300), draw.sample(range(1, 13), draw.randint(1, 4))
    model_parallel = draw.choice([1, 1, 2])
    node = model_parallel * draw.choice([1, 1, 2, 3])
    low = draw.randint(1, 6)
    high = draw.randint(max(low, node), 60)
    larger = draw.random() < 0.5
    keys = {"min_gpus": low, "max_gpus": high, "num_gpus_per_node": node, "model_parallel_size": model_parallel}
    config = elastic(max_train_batch_size=largest, micro_batch_sizes=micros, prefer_larger_batch=larger, **keys)
    fitting = by_trying_everything(largest, micros, range(low, high + 1), node, model_parallel)
    most = max(len(gpus) for gpus in fitting.values())
    if most == 0:
        with pytest.raises(ElasticityConfigError, match="No train batch size"):
            compute(config)
        return
    batch, gpus = compute(config)
    best = [size for size, found in fitting.items() if len(found) == most]
    assert batch == (max(best) if larger else min(best))
    assert gpus == fitting[batch]


def test_counts_of_every_batch_size():
    fitting = by_trying_everything(200, [4, 6], range(3, 20), 1, 1)
    counts = fitting_counts(200, [4, 6], 3, 19)
    assert counts.tolist() == [0, *(len(fitting[batch]) for batch in range(1, 201))]
    assert counts.max() > 3


def test_a_large_search_with_a_known_answer():
    keys = {"max_train_batch_size": 10000, "micro_batch_sizes": [8, 12, 16, 17], "min_gpus": 32, "max_gpus": 1500}
    batch, gpus = compute(elastic(**keys))
    assert batch == 9792 and len(gpus) == 23 and (gpus[0], gpus[-1]) == (32, 1224)
    for count in gpus:
        assert any(batch % (count * micro) == 0 for micro in keys["micro_batch_sizes"])


def test_micro_batch_of_a_world_size():
    config = elastic(max_gpus=12)
    batch, gpus = compute(config)
    for world in gpus:
        same_batch, same_gpus, micro = compute(config, world)
        assert (same_batch, same_gpus) == (batch, gpus)
        assert batch % (micro * world) == 0
        assert not any(batch % (larger * world) == 0 for larger in (2, 3) if larger > micro)
    assert compute(config, return_microbatch=True) == (batch, gpus, 3)
    missing = next(world for world in range(1, 100) if world not in gpus)
    with pytest.raises(ElasticityIncompatibleWorldSize, match=rf"{batch} does not fit {missing} GPUs"):
        compute(config, missing)


def test_whole_nodes_and_model_parallel_replicas():
    config = elastic(num_gpus_per_node=8, model_parallel_size=4, micro_batch_sizes=[2], max_train_batch_size=48)
    batch, gpus, micro = compute(config, 24)
    assert (batch, micro) == (48, 2)
    assert gpus == [8, 16, 24, 32, 48, 96]  # 48 = 2 samples * replicas of 4 GPUs * steps, on nodes of 8
    with pytest.raises(ElasticityIncompatibleWorldSize):
        compute(config, 12)


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"version": 0.3}, "version"),
        ({"min_gpus": 5, "max_gpus": 4}, "min_gpus"),
        ({"micro_batch_sizes": [101]}, "micro_batch_sizes"),
        ({"micro_batch_sizes": []}, "micro_batch_sizes"),
        ({"micro_batch_sizes": [2, 0]}, "micro_batch_sizes"),
        ({"micro_batch_sizes": [True]}, "micro_batch_sizes"),
        ({"version": 0.1, "model_parallel_size": 2}, "model_parallel_size"),
        ({"model_parallel_size": 2, "num_gpus_per_node": 3}, "divisible"),
        ({"max_train_batch_size": 10, "min_gpus": 6}, "No train batch size"),
    ],
)
def test_sections_that_cannot_be(keys, message):
    with pytest.raises(ElasticityConfigError, match=message):
        compute(elastic(**keys))


@pytest.mark.parametrize("key", ["max_train_batch_size", "micro_batch_sizes"])
def test_what_an_enabled_section_needs(key):
    config = elastic()
    del config["elasticity"][key]
    with pytest.raises(ElasticityConfigError, match=key):
        compute(config)


def test_types_limits_and_misspelt_keys_are_those_of_the_config():
    for keys, error in (({"min_gpus": 0}, ValueError), ({"max_gpus": "4"}, TypeError), ({"min_gpu": 1}, Exception)):
        with pytest.raises(DeepSpeedConfigError) as caught:
            compute(elastic(**keys))
        assert isinstance(caught.value, error)


def test_errors_of_the_call():
    assert issubclass(ElasticityConfigError, ElasticityError)
    assert issubclass(ElasticityIncompatibleWorldSize, ElasticityError)
    with pytest.raises(ElasticityConfigError, match="no section"):
        compute({})
    with pytest.raises(ElasticityError, match="switched off"):
        compute({"elasticity": {"enabled": False}})
    with pytest.raises(ValueError, match="dict"):
        compute("config.json")
    with pytest.raises(ElasticityError, match="0.3.8"):
        compute_elastic_config(elastic(), "0.3.7+abc")
    assert compute_elastic_config(elastic(), "0.10.0") == compute(elastic())
    assert elasticity_enabled(elastic()) and not elasticity_enabled({})


def test_defaults_of_the_section():
    config = ElasticityConfig({})
    assert (config.enabled, config.max_acceptable_batch_size, config.micro_batches) == (False, 2000, [2, 4, 6])
    assert (config.min_gpus, config.max_gpus, config.version, config.min_time) == (1, 10000, 0.2, 0)
    assert config.prefer_larger_batch_size and not config.ignore_non_elastic_batch_info


def test_the_scheduler_must_reckon_with_the_same_section(monkeypatch):
    section = elastic()["elasticity"]
    monkeypatch.delenv(DEEPSPEED_ELASTICITY_CONFIG, raising=False)
    ensure_immutable_elastic_config(section)
    monkeypatch.setenv(DEEPSPEED_ELASTICITY_CONFIG, json.dumps({**section, "min_time": 5}))
    ensure_immutable_elastic_config(section)
    for change in ({"max_train_batch_size": 99}, {"micro_batch_sizes": [2]}, {"version": 0.1}):
        monkeypatch.setenv(DEEPSPEED_ELASTICITY_CONFIG, json.dumps({**section, **change}))
        with pytest.raises(ElasticityConfigError, match=next(iter(change))):
            ensure_immutable_elastic_config(section)
        with pytest.raises(ElasticityConfigError, match=next(iter(change))):
            DeepSpeedConfig(elastic())
    for text in ("[]", "{"):
        monkeypatch.setenv(DEEPSPEED_ELASTICITY_CONFIG, text)
        with pytest.raises(ElasticityConfigError, match="JSON"):
            ensure_immutable_elastic_config(section)


def test_config_before_there_is_a_process_group():
    config = DeepSpeedConfig(elastic(min_gpus=4))
    batch, gpus = compute(elastic(min_gpus=4))
    assert 1 not in gpus
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu) == (batch, 3)
    assert config.gradient_accumulation_steps == batch // 3 and config.elasticity_enabled


def test_batch_keys_beside_the_section(monkeypatch):
    with pytest.raises(ElasticityConfigError, match="train_batch_size"):
        DeepSpeedConfig({"train_batch_size": 8, **elastic()})
    config = DeepSpeedConfig({"train_batch_size": 7, **elastic(ignore_non_elastic_batch_info=True)})
    assert config.train_batch_size == compute(elastic())[0] != 7


def test_a_section_that_is_switched_off_changes_nothing():
    config = DeepSpeedConfig({"train_batch_size": 8, "elasticity": {"enabled": False}})
    assert config.train_batch_size == 8 and not config.elasticity_enabled


class TestBatchSizesOfAJob(DistributedTest):
    world_size = [2, 3]

    def test_every_world_size_trains_with_the_same_batch(self):
        config = DeepSpeedConfig(elastic())
        assert config.train_batch_size == compute(elastic())[0]
        micro, steps = config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
        assert micro * steps * self.world_size == config.train_batch_size
        assert micro == max(m for m in (2, 3) if config.train_batch_size % (m * self.world_size) == 0)

    def test_the_engine_accumulates_as_the_section_says(self):
        config = elastic(micro_batch_sizes=[1], max_train_batch_size=12, max_gpus=12)
        model = torch.nn.Linear(2, 1)
        engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=torch.optim.SGD(model.parameters()))
        assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (12, 1)
        assert engine.gradient_accumulation_steps() == 12 // self.world_size

    def test_a_world_size_that_does_not_fit_is_refused(self):
        config = elastic(micro_batch_sizes=[5], max_train_batch_size=5)
        with pytest.raises(ElasticityIncompatibleWorldSize, match=f"{self.world_size} GPUs"):
            DeepSpeedConfig(config)


def test_ds_elastic(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(elastic(max_gpus=4)))
    cli.main(["-c", str(path), "-w", "4"])
    printed = capsys.readouterr().out
    batch, gpus, micro = compute(elastic(max_gpus=4), 4)
    assert f"train batch size: {batch}" in printed
    assert f"numbers of GPUs ({len(gpus)}): {', '.join(map(str, gpus))}" in printed
    assert f"micro batch {micro}, accumulation steps {batch // micro // 4}" in printed
    for args in (["-c", str(path), "-w", "5"], ["-c", str(tmp_path / "none")]):
        with pytest.raises(SystemExit, match="ds_elastic"):
            cli.main(args)
