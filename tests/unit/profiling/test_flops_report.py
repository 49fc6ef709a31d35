# SPDX-License-Identifier: Apache-2.0
"""The text of a flops profile, and numbers as text."""

import pytest
import torch
from torch import nn

from deepspeed.profiling.flops_profiler import (
    FlopsProfiler,
    bytes_to_string,
    duration_to_string,
    flops_to_string,
    get_model_profile,
    macs_to_string,
    number_to_string,
    params_to_string,
)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(10, 10, bias=False), nn.ReLU()) for _ in range(2))
        self.norm = nn.LayerNorm(10)
        self.tied = self.norm

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.tied(self.norm(x))


@pytest.mark.parametrize(
    "to_text, value, text",
    [
        (number_to_string, 0, "0"),
        (number_to_string, 999, "999"),
        (number_to_string, 1234567, "1.23 M"),
        (number_to_string, -2500, "-2.5 K"),
        (params_to_string, 4160, "4.16 K"),
        (flops_to_string, 2.5e9, "2.5 GFLOPS"),
        (flops_to_string, 30, "30 FLOPS"),
        (macs_to_string, 1.25e12, "1.25 TMACs"),
        (bytes_to_string, 1500, "1.5 KB"),
        (duration_to_string, 0.0015, "1.5 ms"),
        (duration_to_string, 4200.0, "4200 s"),
        (duration_to_string, 2e-6, "2 us"),
    ],
)
def test_numbers_as_text(to_text, value, text):
    assert to_text(value) == text


def test_units_and_precision_may_be_chosen():
    assert number_to_string(1234567, units="K", precision=1) == "1234.6 K"
    assert flops_to_string(3e9, units="MFLOPS") == flops_to_string(3e9, units="M") == "3000 MFLOPS"
    assert duration_to_string(0.25, units="us") == "250000 us"
    with pytest.raises(ValueError, match="units='Q'"):
        number_to_string(1, units="Q")


def profiled(model):
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(torch.ones(4, 10))
    profiler.stop_profile()
    return profiler


def test_tree_and_totals(capsys):
    model = Model()
    profiled(model).print_model_profile(profile_step=7)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert "flops profile of step 7" in lines[0]
    by_head = {line.strip().split(":")[0]: line for line in lines if line.startswith(" ") or line.startswith("Model:")}
    assert "220 params (100.0 %), 800 MACs (100.0 %)" in by_head["Model"]
    assert by_head["(blocks) ModuleList"].startswith("    (blocks)")
    (first,) = {line for line in lines if line.startswith("        (1) Sequential:")}
    assert "100 params (45.5 %), 400 MACs (50.0 %)" in first
    assert "2 calls" in by_head["(norm) LayerNorm"] and by_head["(tied) LayerNorm"].endswith("counted at norm")
    assert "forward FLOPs               1.6 KFLOPS" in lines
    assert "backward FLOPs (estimated)  3.2 KFLOPS" in lines


def test_depth_and_top_modules(capsys):
    profiler = profiled(Model())
    profiler.print_model_profile(module_depth=1, detailed=True)
    shown = capsys.readouterr().out
    assert "(blocks) ModuleList" in shown and "Sequential:" not in shown
    profiler.print_model_profile(detailed=False)
    assert "(blocks)" not in capsys.readouterr().out
    profiler.print_model_aggregated_profile(module_depth=1, top_modules=1)
    assert "LayerNorm" not in capsys.readouterr().out.split("params")[1].split("\n")[0]
    profiler.print_model_aggregated_profile(module_depth=3, top_modules=2)
    level = capsys.readouterr().out.splitlines()
    assert level[1] == "level 3:" and level[2].split(None, 1)[1] == "Linear 200, ReLU 0"
    assert level[3].split(None, 1)[1] == "Linear 800 MACs, ReLU 0 MACs"


def test_report_goes_to_a_file_in_a_new_folder(tmp_path, capsys):
    path = tmp_path / "new" / "profile.txt"
    flops, macs, params = get_model_profile(Model(), (4, 10), output_file=str(path))
    assert (flops, macs, params) == ("1.6 KFLOPS", "800 MACs", "220")
    assert capsys.readouterr().out == "" and "flops profile" in path.read_text()
    assert "while operations were counted" not in path.read_text()  # time was taken in a forward of its own


def test_ignored_modules_are_named(capsys):
    get_model_profile(Model(), (4, 10), ignore_modules=[nn.LayerNorm])
    assert "    (norm) LayerNorm: ignored\n" in capsys.readouterr().out
