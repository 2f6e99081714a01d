"""Why something is left as it is: every reason of every pass, and what kind of reason it is.

Contract
    Closed: what is reported, logged or refused by `strict` has a reason from here, and says what is
    particular to its candidate in the detail. A package that none of them fits uses `OTHER`.
    `strict` and reports go by the kind alone.
    What to change about each is in `moe_compile.journal.remedies`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Kind(enum.Enum):
    """What a reason says of its candidate."""

    NOT_MEANT = "it is not what the rewrite is for"
    NOT_ASKED = "the options leave it off"
    DONE = "it is as wanted"
    NO_GAIN = "it would not pay"
    NOT_POSSIBLE = "it cannot be done in the number or form asked for"
    UNPROVEN = "the rewrite applies here, but is not proven to be safe"


class Reason(enum.Enum):
    """Why a candidate is left as it is; values are what reports print."""

    kind: Kind

    def __new__(cls, text: str, kind: Kind) -> Reason:
        """Make a member whose value is its text."""
        member = object.__new__(cls)
        member._value_ = text
        member.kind = kind
        return member

    def said(self, detail: str) -> str:
        """Return `reason (detail)`."""
        return self.value + (f" ({detail})" if detail else "")

    # options
    NOT_ASKED = "the options leave it off", Kind.NOT_ASKED
    ROUNDS = "its results would be rounded differently", Kind.NOT_ASKED
    NO_PRICE = (
        "there are no predicted times to decide by, since sizes are not static or equal_tokens is "
        "not set",
        Kind.NOT_ASKED,
    )

    # price
    BY_PRICE = (
        "it is predicted to be slower, or faster by less than the error of the prediction",
        Kind.NO_GAIN,
    )
    NO_FEWER_BYTES = "it would not reduce the bytes that are sent", Kind.NO_GAIN
    PRODUCTS_WAIT = (
        "torch has no grouped GEMM kernel for this GPU: the host waits for each grouped GEMM and "
        "reads its offsets, and chunks need more grouped GEMMs",
        Kind.NO_GAIN,
    )

    # done, or nothing to do
    ALREADY_DONE = "nothing is left to do", Kind.DONE

    # parts of the batch
    NO_BATCH = (
        "no input dimension can be split so that every operator treats the parts independently",
        Kind.UNPROVEN,
    )
    BATCH_MIXED = "a value is computed from several parts of the batch", Kind.UNPROVEN
    BATCH_LOST = "the batch dimension could not be traced through an operator", Kind.UNPROVEN
    BATCH_RANDOM = (
        "it draws random numbers, and parts of the batch would draw different ones",
        Kind.UNPROVEN,
    )
    BATCH_CAPACITY = (
        "experts with a capacity would drop different rows if the batch ran in parts",
        Kind.UNPROVEN,
    )
    BATCH_TOO_SMALL = "the batch has fewer sequences than parts", Kind.NOT_POSSIBLE

    # exchanges that are no dispatch
    EVEN_SPLITS = (
        "its split sizes are static, and it is not followed by experts with their own weights",
        Kind.NOT_MEANT,
    )
    NO_ROWS = "it is not an all-to-all of activation rows", Kind.NOT_MEANT
    NO_COMBINE = (
        "it is not followed by an exchange that sends the rows back by the two split lists, "
        "swapped",
        Kind.UNPROVEN,
    )
    NO_COUNT_EXCHANGE = ("its split sizes do not come from an exchange of integers", Kind.UNPROVEN)

    # experts
    COUNTS_NOT_COUNTED = "the number of counts is not known at compile time", Kind.UNPROVEN
    UNEVEN_EXPERTS = (
        "the counts do not cover the same number of experts on every rank",
        Kind.UNPROVEN,
    )
    ROWS_MIXED = "an operator of the experts mixes rows", Kind.UNPROVEN
    ROWS_OUT_OF_ORDER = (
        "the rows sent back are not proven to be in the order received",
        Kind.UNPROVEN,
    )
    VALUE_FROM_COUNTS = (
        "a value computed from the counts enters the arithmetic of the rows",
        Kind.UNPROVEN,
    )
    SHARED_PARAMETER = (
        "rows of several experts are computed with one parameter: the gradient of that "
        "parameter would be summed in another order",
        Kind.UNPROVEN,
    )
    SIZE_FROM_COUNTS = (
        "the size of a dimension other than the rows depends on the counts",
        Kind.UNPROVEN,
    )
    UNSTABLE_SORT = (
        "a sort that is not stable leaves the order of one expert's rows open: write stable=True",
        Kind.UNPROVEN,
    )
    PREMISE_FALSE = (
        "an index and the group sizes computed from the counts disagree",
        Kind.UNPROVEN,
    )
    PREMISE_UNCHECKED = (
        "an index computed from the counts could not be evaluated on samples",
        Kind.UNPROVEN,
    )
    FAILS_WITHOUT_ROWS = (
        "a computation from the counts fails when some experts have no rows",
        Kind.UNPROVEN,
    )
    ROWS_FROM_OUTSIDE = (
        "a tensor from outside the region is combined with rows, row by row",
        Kind.UNPROVEN,
    )
    UNKNOWN_OPERATOR = "the effect of an operator on the rows is not known", Kind.UNPROVEN
    HOST_READ_OF_ROWS = "the host reads a value of the rows", Kind.UNPROVEN
    COMMUNICATES = "the experts communicate between dispatch and combine", Kind.UNPROVEN
    SPLIT_OTHERWISE = (
        "another exchange runs beside the exchange of the rows, with other split sizes: its "
        "entries are not proven to belong to the rows, one entry to each row",
        Kind.UNPROVEN,
    )
    MUTATES_OUTSIDE = "the experts change in place a tensor made outside the region", Kind.UNPROVEN
    NO_GRADIENT = (
        "the rows of one chunk get no gradient while the rows of other chunks do: the exchanges "
        "of that chunk would be missing from the backward pass",
        Kind.UNPROVEN,
    )
    EXPERTS_LOST = (
        "the dimension of the local experts could not be traced through an operator",
        Kind.UNPROVEN,
    )
    BY_CAPACITY = (
        "it dispatches by capacity, in equal parts: it can be split only into chunks of experts",
        Kind.NOT_POSSIBLE,
    )
    CAPACITY_AT_RUN_TIME = (
        "it dispatches by a capacity, and a size of its experts is known at run time only",
        Kind.NOT_POSSIBLE,
    )
    OUTER_HOP = (
        "it is the first of two hops: the region inside it, which takes rows on to their "
        "experts, is split instead",
        Kind.NOT_POSSIBLE,
    )
    TOKENS_GATHERED = (
        "it gathers the tokens of all ranks, and experts pick their tokens from them: there is "
        "no exchange of rows to split",
        Kind.NOT_POSSIBLE,
    )
    FEW_EXPERTS = "more chunks are asked for than there are local experts", Kind.NOT_POSSIBLE
    EXPERTS_NAMED = (
        "its experts are written out one by one, or their groups are padded in different ways: "
        "the experts of each chunk must be known at compile time",
        Kind.NOT_POSSIBLE,
    )

    # experts and attention alike
    RANDOM = "it draws random numbers", Kind.UNPROVEN
    MUTATED_MEANWHILE = (
        "a tensor that it reads, or the tensor of its counts, is written in place before its "
        "result is computed",
        Kind.UNPROVEN,
    )
    STATE_CHANGES = "grad mode, autocast or vmap changes inside it", Kind.UNPROVEN
    GRADIENT_ORDER = (
        "between its first and its last operator, other operators read a tensor that it reads "
        "too: the gradient of that tensor would be summed in another order",
        Kind.UNPROVEN,
    )
    ESCAPES = "an operator outside reads a value that is computed inside it", Kind.UNPROVEN

    # attention
    NOT_BETWEEN_EXCHANGES = (
        "it is not between an all-to-all that trades heads for sequence positions and the "
        "all-to-all back",
        Kind.NOT_MEANT,
    )
    HEADS_LOST = "the dimension of the heads could not be traced through an operator", Kind.UNPROVEN
    VARIES_BY_HEAD = "its mask varies by head", Kind.UNPROVEN
    GRADIENT_BESIDE = (
        "if attention ran in groups of heads, the gradient of a tensor that heads share, or "
        "that no exchange brings, would be summed in another order",
        Kind.UNPROVEN,
    )
    MAY_ROUND = (
        "its last bits may differ when it runs in parts: set the number of parts, or allow the "
        "difference by megamoe.numerics = 'lossy'",
        Kind.NO_GAIN,
    )
    FEW_KV_HEADS = "the local KV heads do not divide into equal groups", Kind.NOT_POSSIBLE

    # all-gather dispatch
    ROWS_MAY_DIFFER = (
        "ranks may have different numbers of rows: tokens are not proven to have k rows each",
        Kind.UNPROVEN,
    )
    TOKENS_MAY_DIFFER = (
        "ranks may have different numbers of tokens: set megamoe.equal_tokens = true if all "
        "ranks have the same number in every step",
        Kind.UNPROVEN,
    )
    NOT_PROVEN = "its experts are not proven to treat rows independently", Kind.UNPROVEN
    NO_GATHER = "the rows sent are not a gather of tokens by an index", Kind.UNPROVEN
    NO_SUM = "the combine is not followed by a sum per token", Kind.UNPROVEN
    NOT_LINEAR = (
        "between the last matrix product of its experts and the combine, an operator does more "
        "than move or cast rows",
        Kind.UNPROVEN,
    )
    NO_SLOTS = (
        "it is not proven that its sums add the same number of rows for every token, and that a "
        "sort puts these rows in order",
        Kind.UNPROVEN,
    )
    OTHER_INDEX = "rows are summed by another index than the one that gathered them", Kind.UNPROVEN
    OTHER_TOKENS = "the sum does not have one row per gathered token", Kind.UNPROVEN
    ROWS_READ = (
        "rows are also read by another operator, before the dispatch or after the combine",
        Kind.UNPROVEN,
    )
    NOT_BY_ROW = "rows are combined with something other than one factor per row", Kind.UNPROVEN
    WRITTEN = ("a tensor that is to be read later or elsewhere is written in place", Kind.UNPROVEN)
    SENT_SIZES = "the experts read how many rows this rank sends", Kind.UNPROVEN
    GATHERED = "its tokens are all-gathered", Kind.NOT_POSSIBLE

    # dispatch in two hops
    NO_NODE_GROUPS = "nobody registered which of its ranks share a node", Kind.UNPROVEN
    CHOSEN_TWICE = "a token is not proven to choose each expert at most once", Kind.UNPROVEN
    TENSOR_FLOAT = (
        "its rows are weighted by a batched matrix product, in which TF32 would round the weights",
        Kind.UNPROVEN,
    )
    TWO_HOPS = (
        "it is dispatched in two hops, which always use torch's collectives, run in parts only if "
        "the number of parts is set or has a predicted time, and need chunks with equal numbers "
        "of experts",
        Kind.NOT_POSSIBLE,
    )

    # exchanges in an autograd.Function of the program
    NOT_AN_EXCHANGE = (
        "an autograd.Function around it does more than exchange the input in the forward pass "
        "and the gradient in the backward pass",
        Kind.UNPROVEN,
    )

    # rows of eight bits
    NOT_A_MATRIX = (
        "its rows are not a matrix of floating-point numbers with a known width",
        Kind.UNPROVEN,
    )
    NO_GROUPED_PRODUCT = (
        "its experts multiply rows by no grouped GEMM of bfloat16 that has a form in eight bits",
        Kind.UNPROVEN,
    )
    PRODUCTS_TOGETHER = (
        "fp8_products names some of its products, which cannot be told apart from the others",
        Kind.UNPROVEN,
    )
    NO_E4M3 = (
        "this GPU cannot convert to e4m3, which needs compute capability 8.9 or higher",
        Kind.NOT_POSSIBLE,
    )
    SUMS_TRAVEL = "an all-gather dispatch does not support rows in eight bits", Kind.UNPROVEN
    UNKNOWN_FORM = (
        "the result of its launch is read by something other than one wait",
        Kind.UNPROVEN,
    )
    INTEGERS = (
        "integers (positions or bits) are computed from its rows, and rows of eight bits would "
        "change them",
        Kind.UNPROVEN,
    )

    # gradients of parameters
    NO_PARAMETER_GRADIENT = "it is not a float32 sum of a parameter's gradient", Kind.NOT_MEANT
    COALESCED = (
        "it reduces several tensors in one launch, or writes to a given output",
        Kind.NOT_POSSIBLE,
    )
    SIZE = (
        "a size is symbolic, or dim 0 is not a multiple of the number of ranks",
        Kind.NOT_POSSIBLE,
    )
    READERS = "its result is not read by exactly one wait", Kind.NOT_POSSIBLE

    # rows moved once
    NO_ROW_MOVE = (
        "it has no gather of whole rows beside it that its kernel could do too",
        Kind.NOT_MEANT,
    )

    # integers of the host
    READ_ALONE = (
        "the host reads this integer alone, not together with others in one vector",
        Kind.NOT_MEANT,
    )

    # schedule
    NO_INDEPENDENT_COMPUTE = (
        "no compute is independent of the exchange at that point",
        Kind.NOT_POSSIBLE,
    )
    MEMORY_CAP = (
        "hiding it would raise the peak of live bytes beyond max_memory_increase",
        Kind.NOT_POSSIBLE,
    )
    USER_STREAMS = (
        "the graph switches streams itself, and megamoe does not change the order of such a graph",
        Kind.NOT_POSSIBLE,
    )

    # parts of a model by name
    NO_PART = "the graph has no such part", Kind.NOT_MEANT

    # copies to the host
    MEMORY_STAYS = "on the host it would free no memory, or too little", Kind.NO_GAIN
    NO_HOST_COPIES = (
        "its tensors cannot be copied to pinned host memory and back while compute runs",
        Kind.NOT_POSSIBLE,
    )

    NO_MEANS = (
        "this version of torch cannot keep the nodes of a graph in a given order",
        Kind.NOT_POSSIBLE,
    )

    # passes left out
    DISABLED = "disabled by disable_passes", Kind.NOT_ASKED
    NEEDS_FACT = "it needs a result of a pass that was left out", Kind.NOT_POSSIBLE
    FAILED = "it failed", Kind.UNPROVEN

    # what another distribution adds
    OTHER = "no reason in megamoe's list fits", Kind.NOT_POSSIBLE


@dataclass(unsafe_hash=True, slots=True)
class Left(Exception):
    """A candidate is left as it is: raised where a proof ends, or returned in place of a find."""

    reason: Reason
    detail: str = ""
    """The operator or value that the reason is for, "" where there is none."""

    def __str__(self) -> str:
        """Return `reason (detail)`."""
        return self.reason.said(self.detail)
