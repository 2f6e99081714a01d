"""The closed choices of generated layer programs; every member is a named feature.

Contract
    The first member of every choice is the plainest: failing programs shrink towards it.
    Values describe the members for people; no code reads them.
    Choices of layers by counts come first, then those of exchanges, of loops over experts, of a
    rank's own tokens, and of layers whose experts have a capacity.
"""

from __future__ import annotations

import enum
from typing import Final


class Style(enum.Enum):
    """Ways to run experts."""

    LOOP = "loop over pieces by rank and expert"
    SORTED_LOOP = "loop over slices of sorted rows"
    INDEX_ADD = "loop, index_add into zeros"
    INDEX_COPY = "loop, index_copy into zeros"
    ASSIGN = "loop, out[i] = y"
    SEARCHED = "loop, rows found by a search for the expert's label"
    RUNS = "loop over what each rank sent for each expert, by offsets"
    DENSE = "every expert on all rows, masked by label"
    BATCHED = "padded to capacity, batched products"
    STACKED = "padded to the longest expert, stacked, batched products"
    GROUPED = "grouped products"
    FUSED = "grouped products, gate and up in one"
    PADDED = "grouped products of padded groups, found by an index with -1 for padding"


class Order(enum.Enum):
    """Ways to order rows by expert."""

    ARGSORT = "stable argsort of labels"
    UNSTABLE = "argsort of labels that is not stable"
    SORT = "sort of labels"
    DESCENDING = "descending argsort, experts backwards"
    SEARCH = "labels by searchsorted, argsort"
    MISMATCHED = "labels by searchsorted, descending, groups ascending"
    KEY = "argsort of label and position in one key"
    PLACE_AMONG_ALL = "argsort of label, then position modulo three, in one key"
    SEGMENTS = "where each run starts"
    PIECES = "pieces of each rank and expert, cut by integers and joined"
    PLACES = "places counted by a running sum of one-hot labels"


class Back(enum.Enum):
    """Ways to put rows back in the order received."""

    INDEX_COPY = "index_copy into zeros"
    INDEX_PUT = "assignment into empty memory"
    INVERSE = "argsort of the permutation"
    INVERSE_PUT = "inverse by assignment"
    INVERSE_WRITTEN = "the permutation is turned round in place"
    INDEX_ADD = "index_add into zeros"
    SCATTER = "scatter into zeros"
    SCATTER_ADD = "scatter_add_ into zeros, the index written out"
    PIECES = "pieces cut and joined once more, where they were sorted so"
    VIEW_PUT = "assignment into a view of empty memory"
    MORE_ROWS = "assignment into more rows than there are"
    COLUMNS_PUT = "assignment of whole rows, back[i, :] = out, into memory of as many"


class Act(enum.Enum):
    """Activation of an expert."""

    RELU = "relu"
    SILU = "silu"
    GELU = "gelu"
    SIGMOID = "sigmoid"
    TANH = "tanh"
    FUNCTION = "an autograd Function of the program"
    WHERE = "masked by where"
    MASKED_FILL = "masked_fill, clamp"


class Detail(enum.Enum):
    """Further operations on the rows inside an expert, row by row."""

    BIAS = "a bias of each expert"
    DUMMY = "a row of zeros is appended for every expert"
    DUMMY_SUM = "the sum of what an expert makes of zeros, times zero, is added to its rows"
    OWN_MEAN = "the mean over an expert's rows is taken off them"
    NESTED_CAT = "pieces are concatenated in two steps"
    COLUMN_CAT = "gate and up are concatenated along columns"
    IN_PLACE = "the hidden rows are written in place"
    IN_PLACE_ROWS = "the received rows are written in place"
    VIEW_WRITE = "a view of the hidden rows is written"
    ROW_NORM = "rows are normalised each by its own norm"
    PROBS_TRAVEL = "scores travel with a second dispatch"
    SURE = "a number per row comes back with a second combine"
    WIDE = "rows are put in order by a gather of elements"
    CHECKPOINT = "experts are checkpointed"
    AUTOCAST = "experts run under autocast"
    NO_GRAD_TWIN = "rows pass the experts without gradient too"
    ONE_NUMBER = "experts return one number per row"
    POSITIONAL = "the received rows are written, inplace given by position"
    LISTS = "gate and up are written by one operator on lists"
    TIED = "gate and up have one weight, read twice"
    LONGEST = "every expert's rows are padded to the longest"
    EMPTY_JOIN = "pieces are joined to an empty vector"
    OUTER_ROW = "products of each row with itself, a batch of them"
    BESIDE = "an expert's results stand beside some of its input's columns"
    STACKED_MEAN = "mean of two rows, stacked"
    TRANSPOSED = "sums over the columns of transposed rows"
    NAMED = "operators get their arguments by name"
    INFERRED = "rows get a size that torch infers"
    OWN_NORM = "rows are divided each by its own norm, in their own type"
    SUMS_WRITTEN = "sums of counts become running sums in place, once labels are made of them"
    CROSSED = "a weight of grouped products is scaled, then transposed"
    BANK = "rows are multiplied by a weight looked up by label too, one row at a time"


class Decoy(enum.Enum):
    """Operations that must keep a region whole."""

    MEAN = "rows less their mean over all rows"
    EXPAND = "rows expanded over all rows, summed"
    ONES = "as many columns of ones as rows, averaged"
    CUMSUM = "running sum over rows"
    FLIP = "rows upside down, added"
    SOFTMAX = "softmax over rows"
    POSITION = "rows scaled by their position"
    LENGTH = "rows scaled by how many there are"
    COUNT_VALUE = "rows scaled by a count"
    SHARED_WEIGHT = "one norm weight for all experts"
    DROPOUT = "dropout inside the experts"
    RECEIVED = "received rows are returned"
    OUTER = "product of rows with all rows"
    COUNTS_LIST = "counts of two experts change places, written by an operator on lists"
    HALF = "half of the rows scaled, in an order that is not followed"
    BY_COLUMNS = "rows lie behind one another in memory, and are summed"
    GIVEN_BACK = "one gain for all experts, by an operator that gives it back to each"


class Reader(enum.Enum):
    """Reads and writes of the program around the exchanges."""

    RETURNED = "received counts are returned"
    LISTED = "received counts are returned as integers"
    STATISTICS = "received counts are added to a buffer"
    STATISTICS_VIEW = "received counts are added to a view of a buffer"
    LATE_STATISTICS = "counts are added to a buffer after the combine"
    HOST_RATIO = "ratio = buffer * n, then the buffer is written"
    HOST_VIEW = "a view of a buffer * n, then the buffer is written through another"
    HOST_AUTOCAST = "a product scaled by n under autocast"
    HOST_NO_GRAD = "x * n under no_grad, added to the result"
    HOST_DROPOUT = "dropout(x) * n between the exchanges"
    HOST_STATE = "n is kept in an attribute of the module"
    DROPOUT = "dropout before and after the region"
    RANDOM = "random numbers are drawn between the exchanges"
    AUX_LOSS = "a balancing loss from the counts"
    COUNTS_LOSS = "a loss from received counts and the result"
    ROWS_READ = "routed rows are read again between the exchanges"
    ROWS_TWICE = "routed rows are read by two others between the exchanges"
    ROWS_RETURNED = "routed rows are returned"
    ROWS_WRITTEN = "routed rows are written after the dispatch"
    INPUT_WRITTEN = "x is written between the exchanges, and read after"
    INPUT_READ = "x is read differentiably between the exchanges"
    WEIGHT_READ = "a weight is read differentiably between the exchanges"
    COUNTS_WRITTEN = "counts are written between the exchanges"
    ARRIVED_WRITTEN = "received counts are written after the sizes are known"
    CHECK = "torch._check on sizes that holds"
    FAILING_CHECK = "torch._check on sizes that fails"
    OUTPUT_WRITTEN = "the combined rows are written in place"
    BREAK = "a graph break after the region"
    SHARED_EXPERT = "a shared expert runs between the exchanges"
    EARLY_RATIO = "buffer * n ahead of the counts' exchange, then the buffer is written"
    EARLY_FOREACH = "the same, written by an operator on lists"
    EARLY_NORM = "the same, written as the statistics of a batch norm that nobody reads"
    EARLY_DATA = "the same, given other memory by `.data`"
    EARLY_SUBCLASS = "the same of a tensor, written as a part of another kind of tensor"
    EARLY_POSITIONAL = "x * n ahead of the counts' exchange, then x written, inplace by position"
    HOST_VMAP = "x * n inside torch.vmap, between the exchanges"
    EARLY_GAMMA = "random numbers drawn by a distribution * n, ahead of the counts' exchange"
    EARLY_SET = "a view * n ahead of the counts' exchange, then its base gets memory by `set_`"
    METRICS = "sums of the result are reduced over all ranks, one of them by another"
    ROWS_SQUARED = "routed rows are multiplied by themselves"
    ROWS_NORMALIZED = "routed rows are normalised by an operator that reads them twice"
    ROWS_CHECKPOINTED = "routed rows are read twice by a checkpointed function"
    ROWS_VIEWED = "routed rows are a view, its base is written, then read"
    ROWS_HANDED_BACK = "routed rows are handed back by an operator among others, their source read"
    WEIGHT_SQUARED = "a weight is multiplied by itself between the exchanges"
    HOOK_COUNT = "a gradient passes a hook that scales it by n, on a tensor nobody reads after"
    HOOK_ROWS = "the gradient of the received rows passes a hook, set behind the experts"
    ROWS_ACROSS = "routed rows are read across: what comes back lies in memory by columns"
    AUTOCAST_SET = "x times a size under autocast that functions switch on and off"
    CHECK_EQUAL = "torch._check that a number of the host equals another, which holds"
    SHIFT_WRITTEN = "a buffer is added to the received rows, then written"
    SEEN = "self.seen += counts, while tokens are routed"
    NO_DROPOUT = "dropout in training with p = 0, before and after the region"
    EXPANDED = "a parameter, expanded over tokens, joins the result"
    REPEATED = "a parameter, repeated for each token, scales the result"


class Heads(enum.Enum):
    """Attention between exchanges of heads for positions."""

    PLAIN = "as many KV heads"
    GQA = "fewer KV heads"
    REPEATED = "KV heads repeated after they travelled"
    FUSED = "q, k and v in one exchange"
    LATENT = "keys wider than values"
    MASKED = "a causal mask written out"
    BY_POSITION = "positions before heads in memory, two sequences where tokens are even in number"
    OF_FIVE = "head size 5: no row ends on a boundary of 16 bytes"
    OF_EIGHTEEN = "head size 18: rows in float64 do, in float32 not"
    MULTIPLIED = "without a fused kernel, by sdpa_kernel"
    MASK_OF_THREE = "a causal mask of three dimensions"
    MIXED = "decoy: heads are mixed"
    DROPPED = "decoy: dropout in the attention"


class Within(enum.Enum):
    """Attention over sequences of a rank's own tokens."""

    PLAIN = "causal, one head"
    HEADS = "two heads"
    NORM = "behind a norm with a weight"
    MASK = "a causal mask written out"
    TURNED = "positions before sequences in memory, before and after"
    SCALED = "tokens scaled by their positions"
    SUMMED = "the mean of each sequence added"
    GATED = "a gate for each sequence"
    ONTO_ZEROS = "added onto zeros of written sizes"
    ONTO_NEW = "added onto zeros of written sizes and the input's type"
    FOLDED = "a product over positions and features together"
    BY_TOKEN = "tokens in one dimension, cut by a view of written sizes"
    CLASS_TOKEN = "a parameter, expanded over sequences, stands ahead of each"
    QUERIES = "queries are a parameter, repeated for each sequence"
    POSITION_BIAS = "scores get a parameter, expanded over sequences"
    NO_DROPOUT = "dropout of p = 0 in attention and behind it"
    ALL_MEAN = "decoy: the mean of all sequences added"
    ALL_SUM = "decoy: a running sum over tokens"
    TURNED_BACK = "decoy: positions before sequences in memory, taken for sequences after"


MIXES_SEQUENCES: Final = (Within.ALL_MEAN, Within.ALL_SUM, Within.TURNED_BACK)
"""Decoys: a graph with one of them must be left whole."""


class Routing(enum.Enum):
    """Experts that tokens choose."""

    SCORES = "whatever scores choose"
    ONE_EXPERT = "one expert is the first choice of all"
    FIRST_RANK = "experts of rank 0 first"


class Groups(enum.Enum):
    """Process groups that carry the exchanges."""

    WORLD = "the default group"
    LAYERS_APART = "another group of the same ranks for every layer but the first"
    ROWS_APART = "another group of the same ranks for rows than for counts"
    OWN_SUM = "a sum over a group of this rank alone stands beside them"


class Sharing(enum.Enum):
    """Parameters or routing that several layers share."""

    NOTHING = "nothing"
    WEIGHTS = "one layer is called twice"
    ROUTING = "two regions by one routing"
    INSIDE = "another region runs between a region's routing and its dispatch, scaled by its sizes"


class Backward(enum.Enum):
    """Ways to ask for gradients."""

    ONCE = "one backward"
    TWICE = "a second backward through the same graph"
    APART = "one backward from the result, then one from all else that is returned"
    GRAD_TWICE = "autograd.grad of the input, then of the parameters"
    ACCUMULATED = "gradients accumulate over steps"
    NONE = "forward under no_grad"
    EVALUATED = "a step without gradients between training steps"


class Wrapping(enum.Enum):
    """Wrappers around all layers."""

    BARE = "nothing"
    RESIDUAL = "residual sums"
    CHECKPOINT = "every layer is checkpointed"
    AUTOCAST = "autocast"
    NO_GRAD_HALF = "a first pass under no_grad"


class Running(enum.Enum):
    """Conditions under which the first layer runs."""

    ALWAYS = "in every step"
    IF_ANY = "where any of some flags is set, which all ranks have alike"


class Poison(enum.Enum):
    """Tokens that are NaN."""

    NONE = "none"
    TOKEN = "the first one"
    PADDING = "the first and the last one, which are padding"


class Tally(enum.Enum):
    """Ways to count rows per expert."""

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
    """Ways in which counts reach the ranks of the experts."""

    FUNCTIONAL = "functional all-to-all"
    LAZY = "functional all-to-all, waited for on its first use"
    LEGACY = "dist.all_to_all_single into empty memory"
    MATRIX = "functional all-to-all of a matrix"
    GATHERED = "functional all-gather, own columns taken"
    LEGACY_GATHERED = "dist.all_gather_into_tensor, own columns taken"
    LEGACY_LISTED = "dist.all_gather into a list, own parts taken"


class Splits(enum.Enum):
    """Ways in which split sizes become integers of the host."""

    TOLIST = "sums by view, tolist"
    ITEM = "sums by view, item of each"
    UNBIND = "sums of unbound rows, item of each"
    SLICE_SUM = "all counts as a list, sums of its slices"
    CPU = "sums copied to the CPU, tolist"
    RUNNING = "running sums, the first taken off in place before the next is read"


class Move(enum.Enum):
    """Functions that exchange rows."""

    FUNCTIONAL = "all_to_all_single_autograd"
    FUNCTION = "an autograd Function of the program around all_to_all_single"
    OF_ITSELF = "one around dist.all_to_all_single, whose backward is the Function itself"
    TOGETHER = "one of the program's that exchanges all it is given, rows and scores at once"
    WRITTEN_OUT = "one around dist.all_to_all_single, its backward written out"
    HALVED = "one around dist.all_to_all_single, whose backward halves the gradient"
    HANDLE = "dist.all_to_all_single with async_op in one, awaited by its handle"


class Find(enum.Enum):
    """Ways in which a searching loop finds the rows of an expert."""

    WHERE = "torch.where of equal labels"
    NONZERO = "nonzero, squeezed"
    MASK = "a mask of equal labels"
    ONE_HOT = "a row of the one-hot labels, transposed"
    BETWEEN = "labels above one number and below another"


class Put(enum.Enum):
    """Ways in which a searching loop puts results back in the places of the rows."""

    INDEX_ADD = "index_add_ into zeros"
    ASSIGN = "assignment into memory that nothing filled"
    ADDED = "out[i] += y"
    INDEX_PUT = "index_put into zeros, a new tensor each time"
    SCATTER_ADD = "scatter_add_ into zeros, by indices expanded to the width of rows"


class Cut(enum.Enum):
    """Ways in which a loop by offsets cuts rows and joins results."""

    SLICES = "out[a:b] = y"
    NARROWED = "copies into narrowed memory that nothing filled"
    LISTED = "slices, results in a list, concatenated"
    TENSOR_SPLIT = "torch.tensor_split, results concatenated"


class Padding(enum.Enum):
    """Treatment of padding tokens, whose expert does not exist and sorts last."""

    NONE = "there are none"
    SENT = "order[:sum(sent)]"
    NARROWED = "order.narrow to the sum of what is sent"
    COUNTED = "cut off by the sum of counts, read by itself"


class Weighing(enum.Enum):
    """Ways in which sorted rows find their scores."""

    COLUMN = "scores[order][:, None]"
    NEW_AXIS = "scores.flatten()[order, None]"
    UNSQUEEZED = "scores.unsqueeze(1)[order]"
    SELECTED = "index_select, viewed as a column"


class Unsort(enum.Enum):
    """Ways in which tokens take the rows that came back."""

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


class Room(enum.Enum):
    """Number of slots an expert has for the rows of a rank; rows without a slot are dropped."""

    EVEN = "as many as balanced routing needs"
    SCARCE = "half of that"
    AMPLE = "twice that"
    SIXTEEN = "sixteen at least"


class Fill(enum.Enum):
    """Ways to move rows into slots and back."""

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
    """Ways to run experts on the slots they received."""

    EINSUM = "einsum, ranks outermost"
    OUTERMOST = "einsum, experts outermost"
    BATCHED = "batched products"
    MATMUL = "matmul there, baddbmm back"
    CHUNKED = "loop over chunks, concatenated"
    INDEXED = "loop, each takes its slots by index, stacked"
    UNBOUND = "loop over unbound experts, stacked"


class Extra(enum.Enum):
    """Further operations of a layer with a capacity, which may still be chunked."""

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
    """Operations that must keep experts with a capacity whole."""

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
