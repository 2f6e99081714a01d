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

    NOT_MEANT = "it is not of the kind that the rewrite is for"
    NOT_ASKED = "the options leave it off"
    DONE = "it is as wanted"
    NO_GAIN = "it would not pay"
    NOT_POSSIBLE = (
        "it cannot be done in the number of chunks, or in the form, that the options ask for"
    )
    UNPROVEN = "the rewrite would apply here, but is not proven to be safe"


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
    ROUNDS = (
        "its results would be rounded differently than in the program as written",
        Kind.NOT_ASKED,
    )
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
    NO_FEWER_BYTES = "it would send as many bytes as without the rewrite", Kind.NO_GAIN
    PRODUCTS_WAIT = (
        "torch has no grouped GEMM kernel for this GPU, so the host waits for each grouped GEMM "
        "and reads its offsets; chunks would need more grouped GEMMs, so more waits",
        Kind.NO_GAIN,
    )

    # done, or nothing to do
    ALREADY_DONE = "the graph already is as the rewrite would make it", Kind.DONE

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
    BATCH_TOO_SMALL = "the batch has too few sequences for this number of parts", Kind.NOT_POSSIBLE

    # exchanges that are no dispatch
    EVEN_SPLITS = (
        "its split sizes are static, so it would be a dispatch by capacity, but it is not "
        "followed by experts with their own weights",
        Kind.NOT_MEANT,
    )
    NO_ROWS = "it must be an all-to-all of activation rows, and is not", Kind.NOT_MEANT
    NO_COMBINE = (
        "it must be followed by an exchange that sends the rows back by the same two split "
        "lists, swapped, and is not",
        Kind.UNPROVEN,
    )
    NO_COUNT_EXCHANGE = (
        "its split sizes must come from an exchange of integers (counts per expert), and do not",
        Kind.UNPROVEN,
    )

    # experts
    COUNTS_NOT_COUNTED = (
        "the number of counts must be known at compile time, and is not",
        Kind.UNPROVEN,
    )
    UNEVEN_EXPERTS = (
        "the counts must cover the same number of experts on every rank, and do not",
        Kind.UNPROVEN,
    )
    ROWS_MIXED = (
        "an operator of the experts mixes rows, which must stay independent of each other",
        Kind.UNPROVEN,
    )
    ROWS_OUT_OF_ORDER = (
        "the rows sent back are not proven to be in the order received",
        Kind.UNPROVEN,
    )
    VALUE_FROM_COUNTS = (
        "a value computed from the counts enters the arithmetic of the rows",
        Kind.UNPROVEN,
    )
    SHARED_PARAMETER = (
        "rows of several experts are computed with one parameter, so the gradient of that "
        "parameter would be summed in another order than in the program as written",
        Kind.UNPROVEN,
    )
    SIZE_FROM_COUNTS = (
        "the size of a dimension other than the rows depends on the counts",
        Kind.UNPROVEN,
    )
    UNSTABLE_SORT = (
        "a sort that is not stable leaves the order of one expert's rows open, so it may differ "
        "in chunks: write stable=True",
        Kind.UNPROVEN,
    )
    PREMISE_FALSE = (
        "an index and the group sizes that are computed from the counts must put the same rows "
        "into a group, and do not",
        Kind.UNPROVEN,
    )
    PREMISE_UNCHECKED = (
        "an index computed from the counts could not be evaluated on sampled counts, so it is "
        "not checked",
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
        "another exchange runs beside the exchange of the rows, with other split sizes, so it is "
        "not proven that each row has one of its entries",
        Kind.UNPROVEN,
    )
    MUTATES_OUTSIDE = "the experts change in place a tensor made outside the region", Kind.UNPROVEN
    NO_GRADIENT = (
        "the rows of one chunk get no gradient while the rows of other chunks do, so the "
        "exchanges of that chunk would be missing from the backward pass",
        Kind.UNPROVEN,
    )
    EXPERTS_LOST = (
        "the dimension of the local experts could not be traced through an operator",
        Kind.UNPROVEN,
    )
    BY_CAPACITY = (
        "it dispatches by capacity, in equal parts, so it can be split only into chunks of "
        "experts, not as the options ask",
        Kind.NOT_POSSIBLE,
    )
    CAPACITY_AT_RUN_TIME = (
        "it dispatches by a capacity, which needs all sizes of its experts at compile time, and "
        "one is known at run time only",
        Kind.NOT_POSSIBLE,
    )
    OUTER_HOP = (
        "it is the first of two hops, so the region inside it, which takes rows on to their "
        "experts, is split instead",
        Kind.NOT_POSSIBLE,
    )
    TOKENS_GATHERED = (
        "it gathers the tokens of all ranks, and experts pick their tokens from them, so there "
        "is no exchange of rows to split",
        Kind.NOT_POSSIBLE,
    )
    FEW_EXPERTS = "more chunks are asked for than there are local experts", Kind.NOT_POSSIBLE
    EXPERTS_NAMED = (
        "its experts are written out one by one, or their groups are padded in different ways, "
        "so the experts of each chunk must be fixed at compile time",
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
        "too, so the gradient of that tensor would be summed in another order than in the "
        "program as written",
        Kind.UNPROVEN,
    )
    ESCAPES = "an operator outside reads a value that is computed inside it", Kind.UNPROVEN

    # attention
    NOT_BETWEEN_EXCHANGES = (
        "it must be between an all-to-all that trades heads for sequence positions and the "
        "all-to-all back, and is not",
        Kind.NOT_MEANT,
    )
    HEADS_LOST = "the dimension of the heads could not be traced through an operator", Kind.UNPROVEN
    VARIES_BY_HEAD = (
        "its mask varies by head, so groups of heads would need masks of their own",
        Kind.UNPROVEN,
    )
    GRADIENT_BESIDE = (
        "if attention ran in groups of heads, the gradient of a tensor that heads share, or that "
        "no exchange brings, would be summed in another order than in the program as written",
        Kind.UNPROVEN,
    )
    MAY_ROUND = (
        "its last bits may differ when it runs in chunks or in groups of heads: set their "
        "number, or allow the difference by megamoe.numerics = 'lossy'",
        Kind.NO_GAIN,
    )
    FEW_KV_HEADS = "the local KV heads must divide into equal groups, and do not", Kind.NOT_POSSIBLE

    # all-gather dispatch
    ROWS_MAY_DIFFER = (
        "ranks may have different numbers of rows, because tokens are not proven to have k rows "
        "each",
        Kind.UNPROVEN,
    )
    TOKENS_MAY_DIFFER = (
        "ranks may have different numbers of tokens: set megamoe.equal_tokens = true if all "
        "ranks have the same number of tokens in every step",
        Kind.UNPROVEN,
    )
    NOT_PROVEN = "its experts are not proven to treat rows independently", Kind.UNPROVEN
    NO_GATHER = (
        "the rows that are sent must be gathered from tokens by an index, and are not",
        Kind.UNPROVEN,
    )
    NO_SUM = "the combine must be followed by a sum per token, and is not", Kind.UNPROVEN
    NOT_LINEAR = (
        "between the last matrix product of its experts and the combine, operators must only "
        "move or cast rows, and one does more",
        Kind.UNPROVEN,
    )
    NO_SLOTS = (
        "it is not proven that its sums add the same number of rows for every token, and that a "
        "sort puts these rows in order",
        Kind.UNPROVEN,
    )
    OTHER_INDEX = (
        "rows must be summed by the index that gathered them, and are summed by another index",
        Kind.UNPROVEN,
    )
    OTHER_TOKENS = "the sum must have one row for each gathered token, and has not", Kind.UNPROVEN
    ROWS_READ = (
        "before the dispatch or after the combine, an operator outside the region also reads the "
        "rows",
        Kind.UNPROVEN,
    )
    NOT_BY_ROW = (
        (
            "rows must be multiplied by one factor for each row, and are combined with another "
            "tensor"
        ),
        Kind.UNPROVEN,
    )
    WRITTEN = (
        "the rewrite would read a tensor later or elsewhere, but the program writes it in place",
        Kind.UNPROVEN,
    )
    SENT_SIZES = (
        (
            "the experts read how many rows this rank sends, which the rewritten region does not "
            "know"
        ),
        Kind.UNPROVEN,
    )
    GATHERED = "its tokens are all-gathered", Kind.NOT_POSSIBLE

    # dispatch in two hops
    NO_NODE_GROUPS = (
        (
            "the process group has no registered nodes, so it is not known which of its ranks "
            "share a node"
        ),
        Kind.UNPROVEN,
    )
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
        "its experts must multiply rows by a grouped GEMM of bfloat16 that has a form in eight "
        "bits, and have none",
        Kind.UNPROVEN,
    )
    PRODUCTS_TOGETHER = (
        "fp8_products names some of its products, but megamoe cannot tell which products these are",
        Kind.UNPROVEN,
    )
    NO_E4M3 = (
        "this GPU cannot convert to e4m3, which needs compute capability 8.9 or higher",
        Kind.NOT_POSSIBLE,
    )
    SUMS_TRAVEL = "an all-gather dispatch does not support rows in eight bits", Kind.UNPROVEN
    UNKNOWN_FORM = (
        "the result of its launch must be read by one wait alone, and is not",
        Kind.UNPROVEN,
    )
    INTEGERS = (
        "integers (positions or bits) are computed from its rows, and rows in eight bits would "
        "change these integers",
        Kind.UNPROVEN,
    )

    # gradients of parameters
    NO_PARAMETER_GRADIENT = (
        "it must sum the float32 gradient of a parameter, and does not",
        Kind.NOT_MEANT,
    )
    COALESCED = (
        "it must reduce one tensor into a new output, but reduces several in one launch or "
        "writes to a given output",
        Kind.NOT_POSSIBLE,
    )
    SIZE = (
        "its sizes must be static, and dim 0 a multiple of the number of ranks; one of the two "
        "is not so",
        Kind.NOT_POSSIBLE,
    )
    READERS = "its result must be read by exactly one wait, and is not", Kind.NOT_POSSIBLE

    # rows moved once
    NO_ROW_MOVE = (
        "there is no gather of whole rows next to it that its kernel could do too",
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
        "hiding it would raise the peak of memory beyond max_memory_increase",
        Kind.NOT_POSSIBLE,
    )
    USER_STREAMS = (
        "the graph switches streams itself, and megamoe does not change the order of such a graph",
        Kind.NOT_POSSIBLE,
    )

    # parts of a model by name
    NO_PART = "the graph has no part of this name", Kind.NOT_MEANT

    # copies to the host
    MEMORY_STAYS = "copying it to the host would free no memory, or too little", Kind.NO_GAIN
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
    NEEDS_FACT = "it needs the result of another pass, which was left out", Kind.NOT_POSSIBLE
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
