"""The closed choices of loops over experts that search for rows, or cut them by offsets.

Contract
    As of `choices.py`: the first member is the plainest, values are for people.
"""

from __future__ import annotations

import enum


class Find(enum.Enum):
    """How a loop that searches finds the rows of an expert."""

    WHERE = "torch.where of equal labels"
    NONZERO = "nonzero, squeezed"
    MASK = "a mask of equal labels"
    ONE_HOT = "a row of the one-hot labels, transposed"
    BETWEEN = "labels above one number and below another"


class Put(enum.Enum):
    """How a loop that searches puts results where the rows stood."""

    INDEX_ADD = "index_add_ into zeros"
    ASSIGN = "assignment into memory that nothing filled"
    ADDED = "out[i] += y"
    INDEX_PUT = "index_put into zeros, a new tensor each time"
    SCATTER_ADD = "scatter_add_ into zeros, by indices expanded to the width of rows"


class Cut(enum.Enum):
    """How a loop by offsets cuts rows, and joins results."""

    SLICES = "out[a:b] = y"
    NARROWED = "copies into narrowed memory that nothing filled"
    LISTED = "slices, results in a list, concatenated"
    TENSOR_SPLIT = "torch.tensor_split, results concatenated"
