"""What a user can change about each reason: one table, read by every report, warning and error.

Contract
    Every reason has an entry. For reasons of the kinds `UNPROVEN` and `NOT_POSSIBLE` it says what
    to change, for most others that there is nothing to change, and why.
    `docs/reasons.md` shows each with a program that gives the reason; tests compare the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from moe_compile.journal.reasons import Kind, Reason

PAGE: Final = "docs/reasons.md"
SAME_GRAPH: Final = (
    "in the same graph (moe_compile.explain(model, *inputs) says where a graph breaks; around "
    "DistributedDataParallel, Dynamo cuts graphs unless torch._dynamo.config.optimize_ddp = "
    "False)"
)
NOTHING: Final = "nothing to change"
ACTED_ON: Final = frozenset({Kind.UNPROVEN, Kind.NOT_POSSIBLE})
"""Kinds of which reports say what to change beside the reason."""

_OPTIONS_AND_PRICE: Final = {
    Reason.NOT_ASKED: f"{NOTHING}: set the option that the report names if you want the rewrite",
    Reason.ROUNDS: f"{NOTHING}, unless results may be rounded differently: then set the option "
    "that the detail names",
    Reason.NO_PRICE: "set the option to a value other than \"auto\", megamoe.nodes = 'exact' for "
    "example, or set megamoe.equal_tokens = true if all ranks have the same number of tokens in "
    "every step",
    Reason.BY_PRICE: f'{NOTHING}: the predicted time decides only for "auto", and any other '
    "value of the option is applied",
    Reason.NO_FEWER_BYTES: f"{NOTHING}: the exchange sends no more bytes without the rewrite",
    Reason.ALREADY_DONE: f"{NOTHING}: the pass would add nothing",
    Reason.PRODUCTS_WAIT: f"{NOTHING}, but two changes help: compute the experts in a loop, which "
    "reads all sizes at once (torchtitan's use_grouped_mm = False), or set megamoe.chunks "
    "to a number to get chunks all the same",
}
_BATCH: Final = {
    Reason.NO_BATCH: "give the compiled function whole sequences, [batch, sequence, width], and "
    "route tokens that are computed from these sequences",
    Reason.BATCH_MIXED: "return a sum or a mean over the batch (a loss, for example) beside the "
    "output, and compute everything else that reads the whole batch outside of the compiled "
    "function, or leave batch_parts at 1",
    Reason.BATCH_LOST: "use torch operators that work element by element or along dimensions, "
    "write in place only to memory that the function itself allocates, and use only sizes that "
    "are known at compile time or are products of the inputs' sizes",
    Reason.BATCH_RANDOM: "set the probability of dropout to 0, call dropout outside of the "
    "compiled function, or leave batch_parts at 1",
    Reason.BATCH_CAPACITY: "exchange a row for every chosen expert, without a capacity, or leave "
    "batch_parts at 1 and split the batch outside of the compiled function",
    Reason.BATCH_TOO_SMALL: "set megamoe.batch_parts to at most the number of sequences in a step, "
    "or to half of it if that number is marked as dynamic; the data loader drops a smaller last "
    "batch with DataLoader(drop_last=True)",
}
_EXCHANGES: Final = {
    Reason.NO_COMBINE: "send the rows back by an all-to-all with the same two split lists, swapped"
    f", {SAME_GRAPH}",
    Reason.NO_COUNT_EXCHANGE: "take the split sizes from an exchange of the counts per expert, an "
    f"all-to-all or an all-gather of integers, {SAME_GRAPH}",
    Reason.COUNTS_NOT_COUNTED: "give the number of counts, E: write torch.bincount(chosen, "
    "minlength=E)[:E]",
    Reason.NOT_AN_EXCHANGE: "let the forward of the Function be the exchange and nothing else, "
    "let its backward be the same exchange with the split lists swapped, and move all other "
    "operators before or after the Function",
    Reason.UNEVEN_EXPERTS: "give every rank the same number of experts, and send one count for "
    "each of them",
    Reason.EVEN_SPLITS: "nothing if it dispatches no tokens; to dispatch by capacity, in equal "
    "parts, give each of several local experts weights of its own, and send the rows back by an "
    f"even all-to-all over the same group, {SAME_GRAPH}",
    Reason.SPLIT_OTHERWISE: "send one entry along dim 0 for each row, by the same two split lists "
    "as the rows",
    Reason.NO_ROWS: f"{NOTHING}: it moves no rows to experts",
}
_EXPERTS: Final = {
    Reason.ROWS_MIXED: "compute each row from its own values and its expert's weights alone, and "
    "move operators that need all rows before the dispatch or after the combine",
    Reason.ROWS_OUT_OF_ORDER: "before rows are sent back, put all of them in the order in which "
    "they were received",
    Reason.VALUE_FROM_COUNTS: "use counts to order, split and group rows only; apply factors that "
    "depend on them before the dispatch or after the combine",
    Reason.SHARED_PARAMETER: "give every expert its own parameter, or apply the shared one before "
    "the dispatch or after the combine; or set megamoe.numerics = 'bounded' if the reason "
    "says that this value allows it",
    Reason.SIZE_FROM_COUNTS: "let only the dimension of the rows depend on the counts",
    Reason.UNSTABLE_SORT: "write stable=True; or set megamoe.numerics = 'bounded' if the reason "
    "says that this value allows it",
    Reason.PREMISE_FALSE: "make the index and the group sizes agree for all counts: rows of one "
    "expert together, in the order received, as many as its group has",
    Reason.PREMISE_UNCHECKED: "compute the index by torch operators that run on a CPU, or as "
    "sorts, cumsum and repeat_interleave of the counts, which need no samples",
    Reason.FAILS_WITHOUT_ROWS: "make the computation work for any counts, including zeros: a "
    "chunk has the rows of only some experts",
    Reason.ROWS_FROM_OUTSIDE: "send the tensor with the rows, or apply it before the dispatch or "
    "after the combine",
    Reason.UNKNOWN_OPERATOR: "compute it with operators that treat rows one by one (elementwise "
    "operators, linear layers, grouped GEMMs, sorts by expert), or move it out of the experts",
    Reason.HOST_READ_OF_ROWS: "remove .item(), .tolist() or the branch on values of rows",
    Reason.COMMUNICATES: "move the collective before the dispatch or after the combine",
    Reason.MUTATES_OUTSIDE: "write to the tensor before the dispatch or after the combine",
    Reason.NO_GRADIENT: "let the results of all experts require a gradient, or the results of none",
    Reason.EXPERTS_LOST: "keep the local experts in a dimension of their own, whose size is "
    "known at compile time, from the tensor that is sent to the tensor that comes back, or "
    "compute the experts one by one and join all results in order; write nothing in place",
    Reason.CAPACITY_AT_RUN_TIME: "compute the capacity from Python numbers, as ceil(factor * "
    "tokens / experts), not from values of tensors, and compile with static sizes",
    Reason.BY_CAPACITY: "set megamoe.chunk_by = 'experts', and leave megamoe.dispatch, "
    "megamoe.apply_scores, megamoe.expert_compute and the wire options at their defaults for "
    "layers with a capacity",
    Reason.OUTER_HOP: "nothing: the inner hop already runs in chunks; if you want one exchange in "
    "place of the two hops, dispatch over one group of all ranks",
    Reason.TOKENS_GATHERED: "send rows to their experts and back by all-to-alls whose split "
    "sizes come from an exchange of counts; nothing to change if every rank has a part of every "
    "expert",
    Reason.FEW_EXPERTS: "ask for at most as many chunks as a rank has experts, set "
    "megamoe.chunk_by = 'tokens', or have fewer expert-parallel ranks",
    Reason.EXPERTS_NAMED: "compute all experts by grouped GEMMs whose groups are padded in the "
    "same way, or leave megamoe.chunk_edges at 'even'",
    Reason.RANDOM: "draw random numbers before the first exchange or after the last",
    Reason.MUTATED_MEANWHILE: "write to the tensor after the result is computed, or write to a "
    "copy",
    Reason.STATE_CHANGES: "run the exchanges and everything between them in one grad mode and one "
    "autocast setting, set by `with` statements around them",
    Reason.GRADIENT_ORDER: "let the other operators read the tensor before the dispatch or after "
    "the combine, or let them read a `.clone()` of the tensor",
    Reason.ESCAPES: "outside, read a value that is computed after the last exchange, or compute "
    "the value a second time",
}
_ATTENTION: Final = {
    Reason.NOT_BETWEEN_EXCHANGES: f"{NOTHING}, unless you want groups of heads: then exchange q, "
    "k, v and the result once each, in equal parts over one process group, whole heads for "
    "positions",
    Reason.HEADS_LOST: "keep the heads in a dimension of their own, in one order, from the "
    "projections to the exchange back",
    Reason.VARIES_BY_HEAD: "use one mask for all heads",
    Reason.GRADIENT_BESIDE: "detach the tensor, or send it through the exchange, one part for "
    "each head",
    Reason.MAY_ROUND: f"{NOTHING}, unless last bits may differ: then set "
    "megamoe.attention_chunks to a number, or set megamoe.numerics = 'lossy'",
    Reason.FEW_KV_HEADS: "set megamoe.attention_chunks to a divisor of the KV heads of a rank, or "
    "have fewer ranks in the group, or more KV heads",
}
_DISPATCH_AND_WIRE: Final = {
    Reason.ROWS_MAY_DIFFER: "choose experts by topk inside the graph, so that every token has k "
    "rows",
    Reason.TOKENS_MAY_DIFFER: "set megamoe.equal_tokens = true if all ranks have the same number "
    "of tokens in every step",
    Reason.NOT_PROVEN: "look up the reason that the detail names, and make the change for that "
    "reason",
    Reason.NO_GATHER: "gather the rows that are sent by one index: x[index] or index_select",
    Reason.NO_SUM: "add the rows up per token by index_add, or put them in order and sum over k",
    Reason.NOT_LINEAR: "let the experts end with a matrix product without a bias, and put its rows "
    "back in order; or set megamoe.apply_scores = 'model'",
    Reason.NO_SLOTS: "put rows back in the order of their tokens, k rows to a token, by the same "
    "argsort that sorted them, and sum over k",
    Reason.OTHER_INDEX: "gather and sum rows by the same index tensor, and do not write to that "
    "tensor in between",
    Reason.OTHER_TOKENS: "sum onto as many rows as there are tokens",
    Reason.ROWS_READ: "read tokens or their sums, not the rows, outside the experts",
    Reason.NOT_BY_ROW: "multiply each row by one number, its score, and by nothing else",
    Reason.WRITTEN: "write to a copy",
    Reason.SENT_SIZES: "let the experts read the counts received, not the counts sent",
    Reason.GATHERED: "set megamoe.dispatch = 'all_to_all'; or, to split the gathered tokens, set "
    "megamoe.chunk_by = 'tokens' and set megamoe.chunks to a divisor of a rank's number of "
    "tokens, in graphs whose sizes are known at compile time",
    Reason.NO_NODE_GROUPS: "call moe_compile.register_node_groups on all ranks of the group, "
    "where process groups are created",
    Reason.CHOSEN_TWICE: "choose experts by topk inside the graph, sort its indices, and count "
    "them there in an integer type that holds every possible number of rows, int64 for example",
    Reason.TENSOR_FLOAT: "weight rows by an elementwise multiplication and add them up, or call "
    "torch.set_float32_matmul_precision('highest')",
    Reason.TWO_HOPS: "set megamoe.nodes = 'off' to use a transport that is not torch's, or set "
    "megamoe.chunks to a number to run in parts",
    Reason.NOT_A_MATRIX: "send rows as a matrix of floating-point numbers of a fixed width",
    Reason.NO_GROUPED_PRODUCT: "multiply rows [R, K] by weights [E, K, N] that are plain tensors, "
    "both of bfloat16, by torch._grouped_mm(rows, weights, offs=ends), or set "
    "megamoe.expert_compute = 'same'",
    Reason.PRODUCTS_TOGETHER: 'in megamoe.fp8_products write "gate" and "up" both, or neither, if '
    'one product computes both or the two cannot be told apart; write "gate", "up" and "down" all, '
    "or none of them, if the experts have another form than one or two products of the rows and "
    "then one more",
    Reason.NO_E4M3: "leave megamoe.dispatch_wire, megamoe.combine_wire and megamoe.expert_compute "
    "at 'same' on this GPU",
    Reason.SUMS_TRAVEL: "set megamoe.dispatch = 'all_to_all', or set the wire option to 'same'",
    Reason.UNKNOWN_FORM: "wait for each exchange once, and read only the tensor that the wait "
    "returns",
    Reason.INTEGERS: "compute integers from the rows before the dispatch or after the combine",
}
_GRADIENTS_AND_SCHEDULE: Final = {
    Reason.NO_PARAMETER_GRADIENT: f"{NOTHING}: only float32 sums of parameters' gradients are sent "
    "in half the bytes",
    Reason.COALESCED: "reduce each gradient by a collective of its own",
    Reason.SIZE: "compile with static sizes, and let dim 0 of gradients be a multiple of the "
    "number of ranks",
    Reason.READERS: "wait for each reduction once",
    Reason.NO_ROW_MOVE: f"{NOTHING}: rows are sent and read where they are, without a gather",
    Reason.READ_ALONE: "put the integers that Python needs in one vector, and read them all by "
    "one .tolist()",
    Reason.NO_INDEPENDENT_COMPUTE: "compile more in one graph, or ask for more chunks: compute "
    "that does not need the result of the exchange can run beside it",
    Reason.MEMORY_CAP: "raise megamoe.max_memory_increase",
    Reason.USER_STREAMS: "do not switch streams inside the compiled function",
    Reason.NO_PART: f"{NOTHING}, if another graph has the part; if none has, leave the name out of "
    "megamoe.recompute_modules",
    Reason.MEMORY_STAYS: f"{NOTHING}: a tensor leaves the device only if nothing else holds its "
    "memory",
    Reason.NO_HOST_COPIES: "run on a GPU, with a torch that has the operators ao::offload, "
    "ao::reload and ao::wait_tensor and with a hardware profile that has a table host_link, or "
    "leave megamoe.offload_budget at 0",
    Reason.NO_MEANS: "use a torch with torch._inductor.fx_passes.control_dependencies",
    Reason.DISABLED: f"{NOTHING}: remove the pass from megamoe.disable_passes if you want it",
    Reason.NEEDS_FACT: "remove the pass that it needs from megamoe.disable_passes",
    Reason.FAILED: "report the exception that was raised; to leave the pass out, add its name to "
    "megamoe.disable_passes",
    Reason.OTHER: "do what the detail says",
}
REMEDIES: Final[Mapping[Reason, str]] = {
    **_OPTIONS_AND_PRICE,
    **_BATCH,
    **_EXCHANGES,
    **_EXPERTS,
    **_ATTENTION,
    **_DISPATCH_AND_WIRE,
    **_GRADIENTS_AND_SCHEDULE,
}
"""Reason -> what to change, as a clause without a full stop."""


def allowed_by(numerics: str) -> str:
    """Return which value of the option `numerics` allows what rounds otherwise, as a detail."""
    bound = "a known bound" if numerics == "bounded" else "no known bound"
    return f"the difference has {bound}, and megamoe.numerics = {numerics!r} allows it"


def to_do(reason: Reason) -> str:
    """Return `To do: what to change (page)`."""
    return f"To do: {REMEDIES[reason]} ({PAGE}#{reason.name.lower()})"


def changes_for(reasons: Iterable[Reason]) -> tuple[str, ...]:
    """Return `to_do` of those of `reasons` that ask for a change, each once."""
    return tuple(dict.fromkeys(to_do(reason) for reason in reasons if reason.kind in ACTED_ON))


def with_change(said: str, reason: Reason) -> str:
    """Return `said`, and what to change where `reason` asks for a change."""
    return ". ".join([said, *changes_for([reason])])
