"""The closed choices of layers that gather tokens themselves, whose experts pick theirs.

Contract
    As of `choices.py`: the first member is the plainest, values are for people.
"""

from __future__ import annotations

import enum


class Routed(enum.Enum):
    """Who says which experts a token chose."""

    BESIDE = "each rank of its own tokens, gathered behind these"
    AHEAD = "each rank of its own tokens, gathered ahead of these"
    TOGETHER = "every rank of all tokens, once these are gathered"


class Search(enum.Enum):
    """How the rows of an expert are found among all tokens."""

    WHERE = "torch.where of what was chosen"
    NONZERO = "nonzero of the same"
    ONE_HOT = "torch.where of a row of one-hots, transposed"
    TOKENS = "nonzero of the tokens that chose the expert at all"
    MASK = "a mask of these tokens"
    OFFSETS = "sorted by expert, cut where integers say"
    GROUPED = "the same of all local experts at once, grouped products"
    BEST = "the best of them, as many whatever values say"


class Take(enum.Enum):
    """How rows are taken of the tokens."""

    INDEX = "x[i]"
    SELECT = "index_select"
    COLUMNS = "x[i, :]"
    LEADING = "x[None, i], reshaped"


class Weigh(enum.Enum):
    """Where scores weigh rows."""

    BEHIND = "behind the experts"
    AHEAD = "ahead of the experts"
    COLUMN = "behind the experts, score times row"
    NOWHERE = "nowhere"


class Add(enum.Enum):
    """How results are added to the sums."""

    IN_PLACE = "index_add_"
    NEW = "index_add, a new tensor each time"
    INDEXED = "sums[i] += y"


class Also(enum.Enum):
    """What else a layer does, and may be chunked with."""

    GATED = "a second product gates the first"
    BIAS = "biases of each expert"
    LINEAR = "products by F.linear"
    BATCH_OF_ONE = "rows pass an expert as a batch of one"
    ANEW = "the index is computed again for the sums"
    WIDER_SUMS = "sums in another type, cast before they are reduced"
    FUNCTIONS = "both collectives in Functions of the program"
    TOKENS_WRITTEN = "the tokens are written once they are gathered"
    SHARED_EXPERT = "a shared expert runs in between"
    LOSS = "a loss of the scores is returned"
    READ_AHEAD = "the gathered tokens are read ahead of the experts"
    POSITION = "rows scaled by their position"
    INDEX_READ = "rows scaled by the number of their token"
    CHECKPOINT = "experts are checkpointed"


class Otherwise(enum.Enum):
    """What must keep experts that pick rows whole."""

    MEAN = "rows less their mean, rounded"
    FLIP = "rows upside down, added"
    CUMSUM = "running sum over rows"
    LENGTH = "rows scaled by how many there are"
    DROPOUT = "dropout on rows"
    IN_PLACE = "rows are written in place"
    KEPT = "a sum of the rows is returned"
    READ_LATE = "the gathered tokens are read behind the experts"
    SUMS_READ = "the sums are returned too"
    SUMS_CHANGED = "the sums are doubled before they are reduced"
    ONTO_TOKENS = "the sums begin with the tokens"
    ELSEWHERE = "rows are added to other tokens"
