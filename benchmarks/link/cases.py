"""What is measured: layers, ratios of compute to communication, variants, rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One layer on some ranks; sizes as in benchmarks/link/layer.py, tokens per rank."""

    name: str
    num_ranks: int
    tokens: int
    experts: int
    width: int = 512
    hidden: int = 512
    top_k: int = 2
    shared_expert: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCase(Case):
    """A transformer block, or several in one graph; tokens per rank are its share of `batch`
    sequences."""

    batch: int
    heads: int = 16
    kv_heads: int = 8
    blocks: int = 1
    rank_load: float = 1.0
    """Rows of the fullest rank, the first, over the mean of ranks; the others have as many each."""

    def __post_init__(self) -> None:
        """Refuse what some plan cannot divide."""
        for name in ("kv_heads", "heads", "hidden", "experts", "sequence"):
            if getattr(self, name) % self.num_ranks:
                raise ValueError(f"{name} must be a multiple of {self.num_ranks} ranks")

    @property
    def sequence(self) -> int:
        """Return the length of each sequence, over all ranks."""
        return self.tokens * self.num_ranks // self.batch


@dataclass(frozen=True, kw_only=True, slots=True)
class NodesCase(Case):
    """A layer whose ranks share nodes, each with a link inside and one to other nodes."""

    num_local: int
    """Ranks of a node."""
    shares_adapter: bool = False
    """Whether they have one adapter to other nodes among them, else one each."""
    inside_speed: float = 6.0
    """Rate of a rank's link inside its node over its share of that between nodes: 270 and 45 GB/s
    in the profile h100."""

    @property
    def sharing_adapter(self) -> int:
        """Return how many ranks have an adapter among them."""
        return self.num_local if self.shares_adapter else 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How a block is divided over the ranks."""

    attention: str
    """"tp": by heads, sequence gathered; "sp": by sequence, heads exchanged (Ulysses); "dp": by
    sequences, nothing exchanged."""
    experts: str
    """"tp": every expert in slices; "a2a": whole experts, rows exchanged."""


ROUTED: Final = Case(name="routed", num_ranks=2, tokens=2048, experts=8)
SHARED: Final = Case(name="shared", num_ranks=2, tokens=2048, experts=8, shared_expert=True)
BLOCKS: Final = (
    BlockCase(name="block-2", num_ranks=2, tokens=1024, batch=2, experts=8),
    BlockCase(name="block-4", num_ranks=4, tokens=1024, batch=4, experts=16),
)
"""Sequences of 1024, two query heads to a KV head."""
PARTS: Final = (
    BlockCase(name="parts-2", num_ranks=2, tokens=2048, batch=4, experts=8),
    BlockCase(name="parts-4", num_ranks=4, tokens=1024, batch=8, experts=16),
)
"""Two whole sequences on each rank."""
STACKS: Final = tuple(
    replace(case, name=case.name.replace("parts", "blocks"), blocks=2) for case in PARTS
)
"""Two blocks to a graph."""
QUARTERS: Final = tuple(
    replace(PARTS[0], name=f"quarters-{ranks}{suffix}", num_ranks=ranks, batch=4 * ranks,
            experts=4 * ranks, blocks=2, rank_load=load)
    for load, suffix in ((1.0, ""), (1.3, "-load-1.3"))
    for ranks in (2, 4)
)  # fmt: skip
"""Two blocks to a graph, four whole sequences of 512 on each rank."""
DISPATCHES: Final = tuple(
    Case(name=f"top-{k}", num_ranks=4, tokens=1024, experts=16, top_k=k) for k in range(1, 5)
)
"""Rows exchanged are k / n of the tokens gathered: 1/4 to as many."""
TWO_NODES: Final = NodesCase(
    name="nodes-2x2", num_ranks=4, num_local=2, tokens=512, experts=32, top_k=8
)
NODES: Final = (
    TWO_NODES,
    replace(TWO_NODES, name="nodes-2x4", num_ranks=8, num_local=4, tokens=256),
    replace(TWO_NODES, name="nodes-2x2-shared-expert", shared_expert=True),
    replace(TWO_NODES, name="nodes-2x2-one-adapter", shares_adapter=True),
)
"""Two nodes: a token's eight rows need both, all but seldom. As many rows for each expert."""
FOUR_RANKS: Final = Case(name="four-ranks", num_ranks=4, tokens=1024, experts=16)

RATIOS: Final[Mapping[str, float]] = {"2:1": 2.0, "1:1": 1.0, "1:2": 0.5, "1:4": 0.25}
"""Compute over communication, as plain Inductor's layer has them."""
EVEN: Final = "1:1"
NO_LINK_RATIO: Final = "inf"
"""Name of the control in results: infinite bandwidth, no latency."""

LATENCY_S: Final = 50e-6
"""Of one exchange; a small all-to-all between nodes takes tens of microseconds."""

INSIDE_LATENCY_S: Final = 10e-6
"""Of one inside a node, about a quarter of that, as in the profile h100."""

BASELINE: Final = "inductor"
REORDERED: Final = "inductor reorder"
BLOCK_BASELINE: Final = "tp+tp inductor"
BLOCK_REORDERED: Final = "tp+tp inductor reorder"
"""Of a block: tensor parallelism throughout."""
PARTS_BASELINE: Final = "dp+a2a inductor"
PARTS_REORDERED: Final = "dp+a2a inductor reorder"
"""Of a block whose attention exchanges nothing."""
QUANTIZED: Final = "fp8"
"""In the name of every variant whose rows travel quantised."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """One run of the benchmark."""

    cases: tuple[Case, ...]
    variants: tuple[str, ...]
    """Names in benchmarks/link/variants.py; the baseline must be among them."""
    control_rounds: int = 20
    """Rounds at infinite bandwidth; at least 20, since every bar leans on this ratio."""
    rounds: int = 11
    """Rounds at each ratio."""
    timeout_s: float = 1800.0
    """For which no rank may do nothing; ten times that for one case, compilation included."""
    ratios: tuple[str, ...] = tuple(RATIOS)
    told: str = EVEN
    """The ratio whose link megamoe is told of; what it compiles is the same for all ratios."""
    baseline: str = BASELINE
    """Its compute and its exchanges set the link, for all variants."""
    reordered: str = REORDERED

    def __post_init__(self) -> None:
        """Refuse a preset without the baseline that everything is divided by."""
        if self.baseline not in self.variants:
            raise ValueError(f"variants must include {self.baseline!r}")


PARTS_PRESET: Final = Preset(
    cases=PARTS,
    variants=(
        PARTS_BASELINE,
        PARTS_REORDERED,
        "dp+a2a N=1",
        "dp+a2a N=2",
        "dp+a2a parts",
        "dp+a2a parts N=2",
    ),
    ratios=("2:1", "1:1", "1:2"),
    baseline=PARTS_BASELINE,
    reordered=PARTS_REORDERED,
)

PRESETS: Final[Mapping[str, Preset]] = {
    "quick": Preset(
        cases=(ROUTED,),
        variants=(BASELINE, REORDERED, "megamoe N=2"),
        control_rounds=24,
        rounds=15,
        timeout_s=600.0,
    ),
    "bars": Preset(
        cases=(ROUTED, SHARED),
        variants=(BASELINE, REORDERED, "megamoe N=1", "megamoe N=2", "megamoe N=4"),
        control_rounds=24,
        rounds=11,
        timeout_s=900.0,
    ),
    "wire": Preset(
        cases=(ROUTED, SHARED),
        variants=(
            BASELINE,
            REORDERED,
            "megamoe N=1",
            "megamoe N=2",
            "megamoe N=4",
            "megamoe N=1 fp8",
            "megamoe N=2 fp8",
            "megamoe N=4 fp8",
        ),
        control_rounds=24,
        rounds=11,
        timeout_s=1800.0,
    ),
    "full": Preset(
        cases=(ROUTED, SHARED, FOUR_RANKS),
        variants=(
            "eager",
            BASELINE,
            REORDERED,
            "token halves reorder",
            "token halves in our order",
            "megamoe N=1",
            "megamoe N=2",
            "megamoe N=4",
        ),
        control_rounds=30,
        rounds=15,
        timeout_s=3600.0,
    ),
    "block": Preset(
        cases=BLOCKS,
        variants=(
            BLOCK_BASELINE,
            BLOCK_REORDERED,
            "tp+a2a N=2",
            "sp+a2a inductor",
            "sp+a2a inductor reorder",
            "sp+a2a N=1",
            "sp+a2a N=2",
            "sp+a2a N=4",
            "tp+ag/rs N=2",
            "sp+ag/rs N=2",
        ),
        ratios=("2:1", "1:1", "1:2"),
        baseline=BLOCK_BASELINE,
        reordered=BLOCK_REORDERED,
    ),
    "parts": PARTS_PRESET,
    "blocks": replace(
        PARTS_PRESET,
        cases=STACKS,
        variants=(PARTS_BASELINE, PARTS_REORDERED, "dp+a2a N=2", "dp+a2a parts"),
        ratios=("1:1", "1:2"),
    ),
    "quarters": replace(
        PARTS_PRESET,
        cases=QUARTERS,
        variants=(PARTS_BASELINE, PARTS_REORDERED, "dp+a2a N=2", "dp+a2a parts", "dp+a2a 4 parts"),
        ratios=("1:1", "1:2"),
    ),
    "nodes": Preset(
        cases=NODES,
        variants=(
            BASELINE,
            REORDERED,
            "flat N=1",
            "flat N=2",
            "flat N=4",
            "flat 2 parts N=1",
            "flat 2 parts N=2",
            "exact",
            "exact experts N=2",
            "exact experts N=4",
            "exact tokens N=2",
            "exact 2 parts",
            "exact 2 parts experts N=2",
            "rounded",
            "rounded experts N=2",
            "rounded experts N=4",
            "rounded tokens N=2",
            "rounded 2 parts",
            "rounded 2 parts experts N=2",
        ),
        ratios=("1:2",),
        told="1:2",
    ),
    "dispatch": Preset(
        cases=DISPATCHES,
        variants=(
            BASELINE,
            "megamoe N=1",
            "megamoe N=2",
            "megamoe N=4",
            "ag/rs exact N=1",
            "ag/rs exact N=2",
        ),
        ratios=("1:1", "1:2"),
    ),
}
