# SPDX-License-Identifier: Apache-2.0
"""Exceptions that no single module owns."""


class DeprecatedException(Exception):
    """A feature that existed once was asked for."""
