"""Why something is left as it is: every reason of every pass, and what kind of reason it is.

Contract
    Closed: what is reported, logged or refused by `strict` has a reason from here, and says what is
    particular to its candidate in the detail. A package that none of them fits uses `OTHER`.
    What to change about each is in `moe_compile.journal.remedies`.
"""

from __future__ import annotations

import enum

from moe_compile.journal.kinds import Kind


class Reason(enum.Enum):
    """Why a candidate is left as it is; values are what reports print."""

    kind: Kind

    def __new__(cls, text: str, kind: Kind) -> Reason:
        """Make a member whose value is its text."""
        member = object.__new__(cls)
        member._value_ = text
        member.kind = kind
        return member

    # options
    NOT_ASKED = "the options leave it off", Kind.NOT_ASKED
    ONE_CHUNK = "one chunk asked for", Kind.NOT_ASKED
    MODEL_POLICY = "the option recompute leaves it to the model", Kind.NOT_ASKED
    RUN_AS_IT_IS = "codegen = 'fx' runs operators one by one", Kind.NOT_ASKED

    # price
    BY_PRICE = (
        "it is predicted to be slower, or faster by less than the prediction may be off",
        Kind.NO_GAIN,
    )
    FEW_ROWS_PER_TOKEN = "all-to-all moves less: k is at most 0.75 n", Kind.NO_GAIN
    NARROW = "a row would not get shorter", Kind.NO_GAIN
    ONE_RANK = "a group of one rank sends nothing", Kind.NO_GAIN
    PRODUCTS_WAIT = (
        "torch has no kernel of grouped products for this GPU: for each the host waits and reads "
        "the offsets, more often in chunks",
        Kind.NO_GAIN,
    )

    # done, or nothing to do
    ALREADY_DONE = "already in the wanted form", Kind.DONE
    ALREADY_HIDDEN = "as much compute as is useful already runs between launch and wait", Kind.DONE
    NOT_CHECKPOINTED = "not inside a checkpointed function: saved anyway", Kind.DONE
    NOT_READ_BACKWARD = "nothing in the backward pass is computed from it", Kind.DONE
    HAS_KERNEL = "a kernel of ours runs it", Kind.DONE
    NO_COLLECTIVE = "it launches no collective", Kind.NOT_MEANT

    # parts of the batch
    NO_BATCH = "no dimension of its inputs divides all of it, experts included", Kind.UNPROVEN
    BATCH_MIXED = "something is computed from several parts of the batch", Kind.UNPROVEN
    BATCH_LOST = "the batch was not followed through an operator", Kind.UNPROVEN
    BATCH_RANDOM = "it draws random numbers, and parts would draw others", Kind.UNPROVEN
    BATCH_CAPACITY = "experts with a capacity drop other rows of a part", Kind.UNPROVEN
    BATCH_TOO_SMALL = "the batch has fewer sequences than parts", Kind.NOT_POSSIBLE

    # exchanges that are no dispatch
    EVEN_SPLITS = (
        "its split sizes are static, and no experts with weights of their own follow",
        Kind.NOT_MEANT,
    )
    INTEGER_PAYLOAD = "it carries integers, not rows of activations", Kind.NOT_MEANT
    NOT_ALL_TO_ALL = "not an all-to-all", Kind.NOT_MEANT
    NO_COMBINE = ("no exchange with the split lists swapped is reachable from it", Kind.UNPROVEN)
    NO_COUNT_EXCHANGE = ("its split sizes do not come from an exchange of integers", Kind.UNPROVEN)

    # experts
    COUNTS_NOT_COUNTED = "how many counts there are is not known when compiling", Kind.UNPROVEN
    UNEVEN_EXPERTS = (
        "the counts do not hold the same number of experts for every rank",
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
        "a parameter is read by rows of several experts: "
        "its gradient would be summed in another order",
        Kind.UNPROVEN,
    )
    SIZE_FROM_COUNTS = (
        "a dimension that does not hold the rows is as long as the counts say",
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
        "what is computed from the counts fails where some experts have no rows",
        Kind.UNPROVEN,
    )
    ROWS_FROM_OUTSIDE = (
        "a tensor from outside the region is combined with rows, row by row",
        Kind.UNPROVEN,
    )
    UNKNOWN_OPERATOR = "an operator whose effect on rows is not known", Kind.UNPROVEN
    HOST_READ_OF_ROWS = "the host reads a value of the rows", Kind.UNPROVEN
    COMMUNICATES = "the experts communicate between dispatch and combine", Kind.UNPROVEN
    SPLIT_OTHERWISE = (
        "an exchange beside that of the rows is not split by the same sizes: what it brings is "
        "not known to be of these rows, one by one",
        Kind.UNPROVEN,
    )
    MUTATES_OUTSIDE = "the experts write a tensor from outside the region", Kind.UNPROVEN
    NO_GRADIENT = (
        "rows of some chunk get no gradient where others do: its exchanges would leave the "
        "backward pass",
        Kind.UNPROVEN,
    )
    EXPERTS_LOST = "the index of the local experts cannot be followed", Kind.UNPROVEN
    BY_CAPACITY = (
        "it dispatches by capacity, in equal parts: it is split in chunks of experts, and "
        "not otherwise",
        Kind.NOT_POSSIBLE,
    )
    CAPACITY_AT_RUN_TIME = (
        "it dispatches by a capacity, and a size of its experts is known at run time only",
        Kind.NOT_POSSIBLE,
    )
    OUTER_HOP = (
        "the first of two hops: what is split is the region inside it, by which rows go on to "
        "their experts",
        Kind.NOT_POSSIBLE,
    )
    TOKENS_GATHERED = (
        "it gathers the tokens of all ranks for experts to pick theirs: no exchange of rows is "
        "there to split",
        Kind.NOT_POSSIBLE,
    )
    ONE_EXPERT = "one local expert: nothing to split by", Kind.NOT_POSSIBLE
    CLAMPED = "more chunks asked for than there are local experts", Kind.NOT_POSSIBLE

    EXPERTS_NAMED = (
        "its experts are written out one by one, or their groups are padded unlike: which of them "
        "a chunk has must be known when compiling",
        Kind.NOT_POSSIBLE,
    )

    # experts and attention alike
    RANDOM = "it draws random numbers", Kind.UNPROVEN
    MUTATED_MEANWHILE = (
        "a tensor that it reads, or its counts, are written before its result",
        Kind.UNPROVEN,
    )
    STATE_CHANGES = "grad mode, autocast or vmap changes inside it", Kind.UNPROVEN
    GRADIENT_ORDER = (
        "a tensor that it reads is read by others meanwhile: its gradient would be summed in "
        "another order",
        Kind.UNPROVEN,
    )
    ESCAPES = "a value inside it is read outside it", Kind.UNPROVEN

    # attention
    NO_EXCHANGE = "no exchange around it", Kind.NOT_MEANT
    TENSOR_PARALLEL = (
        "its heads are sharded by tensor parallelism: gathered before, reduced after",
        Kind.NOT_MEANT,
    )
    COMPUTED_BETWEEN = (
        "an operator between the exchange and attention is no movement of data",
        Kind.NOT_MEANT,
    )
    SEVERAL_EXCHANGES = "an operand is exchanged more than once", Kind.NOT_MEANT
    GROUPS_DIFFER = "its exchanges are over different groups", Kind.NOT_MEANT
    UNEVEN = "an exchange around it is not even", Kind.NOT_MEANT
    NOT_HEADS = "the exchange does not send heads away", Kind.NOT_MEANT
    NOT_SEQUENCE = "the exchange does not gather the sequence", Kind.NOT_MEANT
    NO_EXCHANGE_BACK = (
        "no even exchange of its result alone, by movement of data only, follows",
        Kind.NOT_MEANT,
    )
    NOT_BACK = "the exchange back does not split the sequence that was gathered", Kind.NOT_MEANT
    HEADS_LOST = "the index of the heads cannot be followed", Kind.UNPROVEN
    VARIES_BY_HEAD = "its mask varies by head", Kind.UNPROVEN
    GRADIENT_BESIDE = (
        "a gradient flows into what heads share or no exchange brings: groups would round it "
        "otherwise",
        Kind.UNPROVEN,
    )
    MAY_ROUND = (
        "last bits may differ where it runs in parts: "
        "ask for a number of them, or allow it by megamoe.numerics = 'lossy'",
        Kind.NO_GAIN,
    )
    ONE_KV_HEAD = "one local KV head: nothing to split by", Kind.NOT_POSSIBLE
    NOT_DIVISIBLE = "attention_chunks does not divide the local KV heads", Kind.NOT_POSSIBLE

    # all-gather dispatch
    ROWS_MAY_DIFFER = (
        "ranks may have different numbers of rows: the rows are not proven to be k to a token",
        Kind.UNPROVEN,
    )
    TOKENS_MAY_DIFFER = (
        "ranks may have different numbers of tokens: set megamoe.equal_tokens = true "
        "if in every step all have the same",
        Kind.UNPROVEN,
    )
    NOT_PROVEN = "its experts are not proven to treat rows independently", Kind.UNPROVEN
    NO_GATHER = "the rows sent are not a gather of tokens by an index", Kind.UNPROVEN
    NO_SUM = "what follows the combine is not a sum per token", Kind.UNPROVEN
    NO_SLOTS = (
        "its sums are not of as many rows for every token, put in order by a sort",
        Kind.UNPROVEN,
    )
    OTHER_INDEX = "rows are summed by another index than they were gathered by", Kind.UNPROVEN
    OTHER_TOKENS = "the sum has not one row per token gathered", Kind.UNPROVEN
    ROWS_READ = (
        "rows are read by something else, before the dispatch or after the combine",
        Kind.UNPROVEN,
    )
    NOT_BY_ROW = "rows meet something other than one factor per row", Kind.UNPROVEN
    WRITTEN = ("a tensor that is to be read later or elsewhere is written in place", Kind.UNPROVEN)
    SENT_SIZES = "the experts read how many rows this rank sends", Kind.UNPROVEN
    LOSSY = (
        "auto has no times to go by, and sums per token or their gradients would round otherwise",
        Kind.NOT_ASKED,
    )
    ROUNDS = (
        "its sums would round otherwise, by a known bound: allow it by megamoe.numerics = "
        "'bounded'",
        Kind.NOT_ASKED,
    )
    UNBOUNDED = (
        "how many rows a token has is not proven: no bound of how its sums round is known",
        Kind.NOT_ASKED,
    )
    QUANTISED = "eight bits are asked for, in which an all-gather sends nothing", Kind.NOT_ASKED
    GATHERED_WHOLE = (
        "all-gathered whole: chunks of experts would repeat the reduce-scatter; "
        "chunk_by = tokens splits it",
        Kind.NOT_POSSIBLE,
    )
    UNEVEN_SLICES = (
        "all-gathered whole: the tokens of a rank are not known to split evenly in that many "
        "slices",
        Kind.NOT_POSSIBLE,
    )

    # dispatch in two hops
    NO_NODE_GROUPS = "which of its ranks share a node is not registered", Kind.UNPROVEN
    NO_PRICE = (
        "auto has no times to go by: sizes are not static, or equal_tokens is not promised",
        Kind.NOT_ASKED,
    )
    ONE_NODE = "all its ranks are on one node: no token crosses the network", Kind.NO_GAIN
    CHOSEN_TWICE = "a token is not proven to choose an expert once at most", Kind.UNPROVEN
    TENSOR_FLOAT = (
        "a batched product weights its rows, and TF32 would round the weights",
        Kind.UNPROVEN,
    )
    GATHERED = "its tokens are all-gathered: each crosses to every rank", Kind.NOT_POSSIBLE
    TWO_HOPS = (
        "dispatched in two hops: by torch's collectives, in parts only where their number is given "
        "or has a price, in chunks of as many experts each",
        Kind.NOT_POSSIBLE,
    )

    # exchanges in an autograd.Function of the program
    NOT_AN_EXCHANGE = (
        "an autograd.Function around it does more than exchange its input and, backward, its "
        "gradient",
        Kind.UNPROVEN,
    )

    # rows of eight bits
    NOT_A_MATRIX = (
        "its rows are no matrix of floating-point numbers with a known width",
        Kind.UNPROVEN,
    )
    NO_E4M3 = (
        "this GPU does not convert to e4m3: compute capability 8.9 is the least that does",
        Kind.NOT_POSSIBLE,
    )
    SUMS_TRAVEL = "an all-gather dispatch sends nothing in eight bits", Kind.UNPROVEN
    UNKNOWN_FORM = "its launch is read by something else than one wait", Kind.UNPROVEN
    INTEGERS = (
        "integers are made of its rows: positions or bits, which eight bits do not hold",
        Kind.UNPROVEN,
    )

    # gradients of parameters
    FORWARD = "in a forward graph: no gradient", Kind.NOT_MEANT
    RECOMPUTED = "of what the forward computes, once more: no gradient", Kind.NOT_MEANT
    COALESCED = "several tensors in one launch, or into a given output", Kind.NOT_POSSIBLE
    DTYPE = "it does not reduce float32", Kind.NOT_MEANT
    OPERATION = "it neither sums nor averages", Kind.NOT_MEANT
    SIZE = "a size is symbolic, or the ranks do not divide dim 0", Kind.NOT_POSSIBLE
    READERS = "its result is not read by one wait alone", Kind.NOT_POSSIBLE
    MAY_BE_ACTIVATION = (
        "over a group whose tokens are gathered: it may be a gradient of these",
        Kind.NOT_MEANT,
    )
    ACTIVATION = "the graph computes with its result: the gradient of an activation", Kind.NOT_MEANT

    # rows moved once
    NOT_GATHERED = "no gather of whole rows, read by it alone, makes its rows", Kind.NOT_MEANT
    NOT_PERMUTED = "no gather of whole rows is all that reads its rows", Kind.NOT_MEANT

    # integers of the host
    READ_ALONE = "the host takes it by itself, not with others of one vector", Kind.NOT_MEANT

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
        "the graph switches streams itself; its order is not ours to change",
        Kind.NOT_POSSIBLE,
    )

    NO_MEANS = "this torch lacks what would hold it", Kind.NOT_POSSIBLE

    # passes left out
    DISABLED = "disabled by disable_passes", Kind.NOT_ASKED
    NEEDS_FACT = "needs what a pass that was left out provides", Kind.NOT_POSSIBLE
    FAILED = "it failed", Kind.UNPROVEN

    # what another distribution adds
    OTHER = "for a reason of its own", Kind.NOT_POSSIBLE
