"""The closed choices of layers whose experts have a capacity, sent by even exchanges.

Contract
    As of `choices.py`: the first member is the plainest, values are for people.
"""

from __future__ import annotations

import enum


class Room(enum.Enum):
    """How many slots an expert has for the rows of a rank; what finds none is dropped."""

    EVEN = "as many as balanced routing needs"
    SCARCE = "half of that"
    AMPLE = "twice that"
    SIXTEEN = "sixteen at least"


class Fill(enum.Enum):
    """How rows get into slots, and back."""

    EINSUM = "masks of one-hots, einsum there and back"
    PRODUCT = "the same masks, a product of matrices back"
    INDEX_COPY = "index_copy into zeros, a slot more for what is dropped"
    GATHER = "slots take rows by their place, what is empty a row of zeros"


class Sent(enum.Enum):
    """The shape in which slots travel."""

    EXPERTS = "experts of all ranks, slots, width"
    RANKS = "ranks, local experts, slots, width"
    MATRIX = "slots of all experts, width"
    FLAT = "ranks, all else"


class Across(enum.Enum):
    """How experts run on the slots they received."""

    EINSUM = "einsum, ranks outermost"
    OUTERMOST = "einsum, experts outermost"
    BATCHED = "batched products"
    MATMUL = "matmul there, baddbmm back"
    CHUNKED = "loop over chunks, concatenated"
    INDEXED = "loop, each takes its slots by index, stacked"
    UNBOUND = "loop over unbound experts, stacked"


class Extra(enum.Enum):
    """What else a layer with a capacity does, and may be chunked with."""

    LOSS = "a balancing loss is returned"
    GATED = "a second product gates the first"
    BIAS = "biases of each expert"
    OWN_NORM = "rows are divided each by its own norm"
    BESIDE = "a shared expert runs between the exchanges"
    SENT_READ = "what is sent is read again between the exchanges"
    HALVED_WRITTEN = "what came back is written in place"
    CHECKPOINT = "experts are checkpointed"
    EXPANDED = "one weight, expanded for all experts"


class Mixing(enum.Enum):
    """What must keep experts with a capacity whole."""

    SHARED_BIAS = "a bias that all experts add"
    MEAN = "rows less their mean over experts"
    NORM = "rows normalised over experts"
    NEXT = "what one expert makes goes on as another's"
    FLIPPED = "results stand in another order than rows"
    IN_PLACE = "received slots are written in place"
    DROPOUT = "dropout inside the experts"
    RECEIVED = "received slots are returned"
    DETACHED = "one expert sends its rows no gradient"
    ONE_WEIGHT = "no experts: all slots pass one layer"
