# SPDX-License-Identifier: Apache-2.0
"""What ranks run to test the search itself. Imports little: after each failure new ranks do."""

from __future__ import annotations

from deepspeed.runtime.gradients.reducer import GradientReducer
from unit.random_graphs import running
from unit.random_graphs.cases import Case

FAULT = "no division by the accumulation count"  # the mutation that does the same in the source


class BrokenJob(running.CaseJob):
    """A rank in which contributions are not divided by the accumulation count."""

    def run(self, case: Case) -> None:
        GradientReducer._unit = lambda reducer: 1.0 / reducer.window_loss_scale
        super().run(case)
