# SPDX-License-Identifier: Apache-2.0
"""``ALL_OPS``: one builder of each op, by op name."""

import inspect

from . import not_built
from .builder import NotImplementedBuilder, OpBuilder

op_builder_dir = "deepspeed.ops.op_builder"


def _builders() -> list[OpBuilder]:
    classes = [cls for _, cls in inspect.getmembers(not_built, inspect.isclass) if cls is not NotImplementedBuilder]
    return [cls() for cls in classes]


ALL_OPS: dict[str, OpBuilder] = {builder.name: builder for builder in sorted(_builders(), key=lambda op: op.name)}
