# SPDX-License-Identifier: Apache-2.0
"""Asynchronous reads and writes of files: ``AsyncIOBuilder().load().aio_handle(...)``."""

from deepspeed.ops.op_builder import AsyncIOBuilder as AsyncIOBuilder
