# SPDX-License-Identifier: Apache-2.0
"""Errors of state that rests in files."""


class SwapError(RuntimeError):
    """State could not be written to its file, or not be read back. The cause is the ``AsyncIOError`` of the file."""
