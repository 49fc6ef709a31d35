# SPDX-License-Identifier: Apache-2.0
"""Reduction operators of the communication façade."""

from enum import Enum


class ReduceOp(Enum):
    """Element-wise reduction of a collective. ``AVG`` is the sum divided by the group's size."""

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BAND = 4
    BOR = 5
    BXOR = 6
    AVG = 7
    UNUSED = 8
