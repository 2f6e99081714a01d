"""What became of one MoE region, or of one attention operator, as a report has it.

Contract
    Plain data: names, numbers, reasons. No graph node outlives its compilation through it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Self

from moe_compile.journal.entries import Verdict

AS_WRITTEN: Final = (
    "run as written: ranks compiled it differently, and all run the original program"
)
DOES_NOT_COMPILE: Final = "run as written: what the passes made of it does not compile"
"""The verdict on all regions of a program that the ranks do not agree to run rewritten."""

CHUNKED: Final = "chunked"
ALL_GATHERED: Final = "all-gathered"
IN_TWO_HOPS: Final = "dispatched in two hops"
LEFT_WHOLE: Final = "left whole"
"""Verdicts on regions that are proven; on others it is the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionReport:
    """What became of one MoE region."""

    name: str
    where: str
    """`file.py:line in function` of the dispatch."""
    num_ranks: int
    num_local_experts: int
    num_chunks: int
    num_host_reads: int
    """Blocking reads by the host per forward pass of the region."""
    verdict: str
    """`chunked`, `all-gathered` or `dispatched in two hops`, or why none of these."""
    sized_by: str = "counts"
    """What says how many rows an expert gets: `counts`, or a `capacity` in equal parts."""
    remedy: str = ""
    """What to change where the experts are not proven to run in chunks; "" else."""
    dispatch: str = "all_to_all"
    """What moves the tokens, as the option names it."""
    nodes: str = "off"
    """Whether a token crosses to a node once, as the option names it."""
    hop_slices: int = 1
    """Slices of tokens that hop 1 then goes in, beside the chunks."""
    chunk_edges: str = "even"
    """Where chunks begin and end, as the option names it."""
    num_tokens: int = 0
    """Tokens of each rank where they are gathered and known when compiling, else 0: all ranks must
    have as many, and compare this number before they run."""
    dispatch_figures: dict[str, float] = field(default_factory=dict)
    """Rows per token, bytes per token each way by either; {} if not known."""
    wires: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    """`dispatch` and `combine` -> number format, bytes of a row before, bytes of a row now."""
    decision: dict[str, object] = field(default_factory=dict)
    """What the planner chose, the runner-up, margin, why, advice; {} where it had no say."""
    remarks: tuple[str, ...] = ()
    to_do: tuple[str, ...] = ()
    """What to change so that what was left is done, a sentence for each reason."""

    def as_written(self, why: str) -> Self:
        """Return the same where it runs as the program has it, for the reason `why`."""
        wires = {name: ("same", before, before) for name, (_, before, _) in self.wires.items()}
        return replace(
            self,
            num_chunks=1,
            verdict=why,
            dispatch="all_to_all",
            nodes="off",
            hop_slices=1,
            chunk_edges="even",
            num_tokens=0,
            wires=wires,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionReport:
    """What became of one attention operator."""

    name: str
    where: str
    """`file.py:line in function` of the attention."""
    is_region: bool
    """Whether it stands between exchanges of heads for sequence."""
    num_ranks: int
    num_heads: int
    """Query heads of a rank; 0 where there is no region."""
    num_kv_heads: int
    num_chunks: int
    verdict: str
    """`chunked`, or why not."""
    decision: dict[str, object] = field(default_factory=dict)
    """What the planner chose, the runner-up, margin, why; {} where it had no say."""
    remarks: tuple[str, ...] = ()
    to_do: tuple[str, ...] = ()
    """What to change so that what was left is done, a sentence for each reason."""

    def as_written(self, why: str) -> Self:
        """Return the same where it runs as the program has it, for the reason `why`."""
        return replace(self, num_chunks=1, verdict=why) if self.is_region else self


def edges_remarks(left: Mapping[str, Verdict]) -> list[str]:
    """Return why chunks have as many experts each, where options leave that open."""
    why = left.get("chunk_edges")
    return [f"as many experts in each chunk: {why.why}"] if why is not None else []
