"""The choices of generated programs that concern exchanges: what is counted, sent and read.

Contract
    As in `choices.py`: the first member is the plainest, values are for people.
"""

from __future__ import annotations

import enum


class Tally(enum.Enum):
    """How rows per expert are counted."""

    COMPARE = "labels compared with all experts"
    BINCOUNT = "bincount"
    HISTC = "histc"
    SCATTER_ADD = "scatter_add of ones"
    ONE_HOT = "one-hot"
    SCATTER_ADD_IN_PLACE = "scatter_add_ of ones"
    BINCOUNT_CUT = "bincount, cut to the number of experts"
    BINCOUNT_VIEWED = "bincount, its length told by a view"
    UNIQUE = "unique, put among zeros"


class Counts(enum.Enum):
    """How counts reach the ranks of the experts."""

    FUNCTIONAL = "functional all-to-all"
    LAZY = "functional all-to-all, waited for on its first use"
    LEGACY = "dist.all_to_all_single into empty memory"
    MATRIX = "functional all-to-all of a matrix"
    GATHERED = "functional all-gather, own columns taken"
    LEGACY_GATHERED = "dist.all_gather_into_tensor, own columns taken"
    LEGACY_LISTED = "dist.all_gather into a list, own parts taken"


class Splits(enum.Enum):
    """How split sizes become integers of the host."""

    TOLIST = "sums by view, tolist"
    ITEM = "sums by view, item of each"
    UNBIND = "sums of unbound rows, item of each"
    SLICE_SUM = "all counts as a list, sums of its slices"
    CPU = "sums copied to the CPU, tolist"
    RUNNING = "running sums, the first taken off in place before the next is read"


class Move(enum.Enum):
    """Who exchanges rows."""

    FUNCTIONAL = "all_to_all_single_autograd"
    FUNCTION = "an autograd Function of the program around all_to_all_single"
    OF_ITSELF = "one around dist.all_to_all_single, whose backward is the Function itself"
    TOGETHER = "one of the program's that exchanges all it is given, rows and scores at once"
    WRITTEN_OUT = "one around dist.all_to_all_single, its backward written out"
    HALVED = "one around dist.all_to_all_single, whose backward halves the gradient"
    HANDLE = "dist.all_to_all_single with async_op in one, awaited by its handle"
