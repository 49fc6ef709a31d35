# SPDX-License-Identifier: Apache-2.0
"""``docs/precision.md`` shows what engines do."""

from unit.common import DistributedTest
from unit.runtime import precision_table


class TestPage(DistributedTest):
    world_size = 1

    def test_its_table_is_what_engines_show(self) -> None:
        _, shown, _ = precision_table.parts_of_page()
        assert shown == precision_table.table(), "run python -m unit.runtime.precision_table"
