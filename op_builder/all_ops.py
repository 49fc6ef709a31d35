# SPDX-License-Identifier: Apache-2.0
"""``ALL_OPS``: one builder of each op, by op name."""

import importlib

from .builder import OpBuilder

op_builder_dir = "deepspeed.ops.op_builder"


def _builders() -> list[OpBuilder]:
    """One builder of each class of the package that names an op."""
    package = importlib.import_module(__package__)
    classes = {cls for cls in vars(package).values() if isinstance(cls, type) and issubclass(cls, OpBuilder)}
    return [cls() for cls in classes if cls.NAME]


ALL_OPS: dict[str, OpBuilder] = {builder.name: builder for builder in sorted(_builders(), key=lambda op: op.name)}
