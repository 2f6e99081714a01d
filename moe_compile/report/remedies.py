"""What the user can change where a region is not found, or found and left whole.

Contract
    Each line says what to write, and leaves every bit of the model's result to the user.
"""

from __future__ import annotations

from typing import Final

from moe_compile.journal.reasons import Reason

SAME_GRAPH: Final = (
    "in the same graph: moe_compile.explain(model, *inputs) says where a graph breaks; around "
    "DistributedDataParallel Dynamo cuts graphs unless torch._dynamo.config.optimize_ddp = False"
)
REMEDIES: Final = {
    Reason.NOT_AN_EXCHANGE: "let the Function exchange and do no more, what else it does before it "
    "or after it, and its backward the same exchange with the split lists swapped",
    Reason.NO_COMBINE: "send the rows back by an all-to-all with the same two split lists, swapped"
    f", {SAME_GRAPH}",
    Reason.NO_COUNT_EXCHANGE: "take the split sizes from an exchange of the counts per expert, an "
    f"all-to-all or an all-gather of integers, {SAME_GRAPH}",
    Reason.COUNTS_NOT_COUNTED: "say how many: torch.bincount(chosen, minlength=E)[:E]",
    Reason.UNEVEN_EXPERTS: "give every rank the same number of experts",
    Reason.EVEN_SPLITS: "nothing if it dispatches no tokens; dispatch by capacity, in equal "
    "parts, is not rewritten in this version",
    Reason.INTEGER_PAYLOAD: "nothing if nothing but integers is to be exchanged here; if these are "
    f"counts, dispatch and combine the rows {SAME_GRAPH}",
    Reason.ROWS_MIXED: "compute each row of the experts from that row alone; sum or normalise over "
    "rows before the dispatch or after the combine",
    Reason.ROWS_OUT_OF_ORDER: "put the rows back in the order in which they came before they are "
    "sent back, by the inverse of the permutation they were sorted by",
    Reason.VALUE_FROM_COUNTS: "use counts for sizes and indices of rows alone; scale by them "
    "before the dispatch or after the combine",
    Reason.SHARED_PARAMETER: "give each expert a parameter of its own, or apply the shared one "
    "before the dispatch or after the combine",
    Reason.SIZE_FROM_COUNTS: "let counts size the rows alone, no other dimension",
    Reason.ROUNDED_BY_POSITION: "nothing on a GPU; on a CPU make the rows' width a multiple of 64 "
    "bytes (128 for functions such as SiLU)",
    Reason.UNSTABLE_SORT: "torch.argsort(labels, stable=True)",
    Reason.PREMISE_FALSE: "make permutation and group sizes from the same received counts",
    Reason.PREMISE_UNCHECKED: "make permutation and group sizes from the received counts alone, by "
    "operators of torch",
    Reason.FAILS_WITHOUT_ROWS: "let the experts run where any of them has no rows",
    Reason.ROWS_FROM_OUTSIDE: "send that tensor with the rows, as further columns, or apply it "
    "before the dispatch or after the combine",
    Reason.HOST_READ_OF_ROWS: "read sizes from the counts, nothing from the rows",
    Reason.COMMUNICATES: "launch that collective before the dispatch or after the combine",
    Reason.MUTATES_OUTSIDE: "write that tensor before the dispatch or after the combine",
    Reason.MUTATED_MEANWHILE: "write that tensor before the dispatch or after the combine",
    Reason.GRADIENT_ORDER: "read that tensor before the dispatch or after the combine",
    Reason.ESCAPES: "return nothing from between dispatch and combine",
    Reason.ONE_EXPERT: 'place more experts on each rank, or write megamoe.chunk_by = "tokens"',
    Reason.RANDOM: "draw random numbers (dropout) before the dispatch or after the combine",
    Reason.STATE_CHANGES: "switch grad mode or autocast before the dispatch or after the combine",
}
"""What to change; of exchanges without a region the most telling reason first."""
OTHERWISE: Final = "the operator named is what to change, or nothing if this is no expert dispatch"


def remedy_of(reason: Reason) -> str:
    """Return what the user can do about `reason`."""
    return REMEDIES.get(reason, OTHERWISE)
