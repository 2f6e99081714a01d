"""The choices of generated programs that concern a rank's own tokens: which are sent, and summed.

Contract
    As in `choices.py`: the first member is the plainest, values are for people.
"""

from __future__ import annotations

import enum


class Padding(enum.Enum):
    """What becomes of tokens that are padding: of an expert that does not exist, sorted last."""

    NONE = "there are none"
    SENT = "order[:sum(sent)]"
    NARROWED = "order.narrow to the sum of what is sent"
    COUNTED = "cut off by the sum of counts, read by itself"


class Weighing(enum.Enum):
    """How sorted rows find their scores."""

    COLUMN = "scores[order][:, None]"
    NEW_AXIS = "scores.flatten()[order, None]"
    UNSQUEEZED = "scores.unsqueeze(1)[order]"
    SELECTED = "index_select, viewed as a column"


class Unsort(enum.Enum):
    """How tokens take the rows that came back."""

    INDEX_ADD = "index_add into zeros"
    IN_PLACE = "index_add_ into zeros"
    COLUMN_INDEX = "gather and scatter_add by an index expanded over columns"
    EMPTY = "new[order] = rows in empty_like memory, times scores, summed"
    COLUMNS = "new[order, :] = rows in memory of as many rows, times scores, summed"
    INVERSE = "rows[torch.argsort(order)], times scores, summed"
    EINSUM = "index_copy_ into memory of as many rows, einsum with scores"


class Loss(enum.Enum):
    """Losses that a layer computes in the graph and returns."""

    CROSS_ENTROPY = "cross entropy of the result"
    MSE = "mean square of the result less other rows"
    Z_LOSS = "mean square of the router's logsumexp"
    SEQUENCE = "balance of each sequence by scatter_add of what its tokens chose"
