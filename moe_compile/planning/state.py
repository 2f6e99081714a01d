"""What passes hand to one another during one compilation.

Contract
    One state per call of the backend; the forward and the backward graph of that call share it.
    A field speaks of the graph the last Dynamo-level pass left, and is refilled when stale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.fx as fx

from moe_compile.analysis.attention_regions import AttentionRefusal
from moe_compile.analysis.regions import MoERegion, Refused, RowProof
from moe_compile.analysis.token_regions import Unswitched
from moe_compile.config import MegaMoEConfig
from moe_compile.graph.launch_order import mark_region
from moe_compile.hardware import HardwareProfile
from moe_compile.planning.choose_plan import Decision
from moe_compile.planning.dispatch_rules import DispatchCosts, Rounding
from moe_compile.planning.plan import Remark


@dataclass(kw_only=True, slots=True)
class Exchange:
    """One exchange of a region: as the model has it one launch, chunked one per chunk."""

    name: str
    """`dispatch` or `combine`."""
    launches: tuple[fx.Node, ...]
    rows: torch.Tensor | None
    """Fake tensor of the rows it moves, `[R, D]`; None when the tracer kept none."""
    wire: str = "same"
    """Number format its rows travel in, as `dispatch_wire` and `combine_wire` name it."""
    refusal: str = ""
    """Why its rows travel as they are though an option asks for another wire; "" else."""
    row_bytes: int = 0
    """Bytes of a row that travels; 0 when unknown."""
    row_bytes_before: int = 0
    """The same in the model's own number format."""


@dataclass(kw_only=True, slots=True)
class SwitchVerdict:
    """What became of a region's all-to-all: gathered tokens instead, or why not."""

    is_switched: bool = False
    reason: Unswitched = Unswitched.NOT_ASKED
    """Why it is not switched, where it is not."""
    detail: str = ""
    is_exact: bool = True
    """Whether it has room for the rows that come; else for all that may."""
    num_tokens: int = 0
    """Tokens of each rank where they are gathered and known when compiling, else 0."""
    rows_per_token: int = 0
    """Rows of each rank over its tokens where these are gathered, else 0."""
    rounding: Rounding | None = None
    """How its sums per token may differ; None where it is not switched."""
    costs: DispatchCosts | None = None
    """Bytes and padding either way; None where the gather or the sum was not found."""


@dataclass(kw_only=True, slots=True)
class RegionPlan:
    """What to do with one region."""

    region: MoERegion
    proof: RowProof | Refused
    where: str
    """The user's line that dispatches: `file.py:line in function`."""
    num_host_reads: int
    """Times the host waits for integers of the region, as the model is written."""
    dispatch: Exchange
    combine: Exchange
    num_chunks: int = 1
    """Chunks the region runs in; 1 leaves it whole."""
    switch: SwitchVerdict = field(default_factory=SwitchVerdict)
    remark: Remark | None = None
    """Why `num_chunks` is not what was asked for, None when it is."""
    decision: Decision | None = None
    """What the planner chose and against what; None where nothing was left to it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionVerdict:
    """What became of one attention operator; the numbers are those of a region."""

    name: str
    where: str
    """The user's line that calls it: `file.py:line in function`."""
    reason: AttentionRefusal | None
    """Why it is not split; None when it is."""
    detail: str = ""
    is_region: bool = False
    """Whether it stands between exchanges of heads for sequence."""
    group: str = ""
    num_ranks: int = 1
    num_heads: int = 0
    """Query heads of this rank."""
    num_kv_heads: int = 0
    num_chunks: int = 1
    """Groups of heads it runs in."""
    device: str = ""
    """Type of the device its result is on."""
    tp_groups: tuple[str, ...] = ()
    """Under tensor parallelism: the groups that gather before it and reduce after it."""
    async_tp: str = ""
    """What became of these collectives; "" where there are none."""
    rounding: str = ""
    """What groups of heads may change; "" where no bit changes."""
    projections_cut: tuple[str, ...] = ()
    """Which projections run in groups too, and the bound of what that changes."""
    decision: Decision | None = None
    """What the planner chose and against what; None where nothing was left to it."""
    projections_whole: tuple[str, ...] = ()
    """Why a projection that `attention_split` asks to cut is computed whole."""


@dataclass(kw_only=True, slots=True)
class CompileState:
    """The analyses and decisions of one compilation."""

    config: MegaMoEConfig
    hardware: HardwareProfile
    plans: list[RegionPlan] = field(default_factory=list)
    """One per region of the Dynamo graph at hand."""
    decoys: list[Refused] = field(default_factory=list)
    """Exchanges of the Dynamo graph at hand that are no region."""
    attention: list[AttentionVerdict] = field(default_factory=list)
    """One per attention operator of the Dynamo graph at hand."""
    attention_decisions: dict[str, Decision] = field(default_factory=dict)
    """Attention region of the Dynamo graph at hand -> what the planner chose for it."""
    family: str = ""
    """Where in the user's source the compiled code stands; the same on every rank."""
    is_chunked: bool = False
    """Whether some region of the compilation, attention too, runs in more than one chunk."""
    async_tp: bool = False
    """Whether some attention is handed to Inductor's async TP."""
    num_marked: int = 0
    """Regions whose exchanges were told from those of others, in all Dynamo graphs so far."""
    is_compared: bool = False
    """Whether ranks compare what the program launches: Dynamo saw a collective in it."""
    plan_digest: str = ""
    """Hash of what the Dynamo-level passes decided."""
    dropped: list[str] = field(default_factory=list)
    """Passes left out of an AOTAutograd graph, with its direction."""
    tell_dropped: Callable[[str, bool], None] | None = None
    """Called with each of these and its reason, and whether it raised: a backward graph comes when
    the report of its compilation is written."""
    gathered_groups: set[str] = field(default_factory=set)
    """Process groups of regions whose tokens are gathered, of the whole compilation."""
    measures: dict[str, float] = field(default_factory=dict)
    """Figures of the passes that ran on the AOTAutograd graph at hand."""
    is_backward: bool = False
    """Which AOTAutograd graph is at hand."""
    nominal_sizes: dict[str, int] = field(default_factory=dict)
    """Symbol -> nominal value; filled on the forward graph, read on the backward graph."""

    def tell_apart(self, launches: Iterable[fx.Node]) -> None:
        """Note on the exchanges of one region that they are of one."""
        self.num_marked += 1
        mark_region(launches, str(self.num_marked))
