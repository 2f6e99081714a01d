"""How a graph would run under other options, and its predicted time: what "auto" would choose.

Contract
    The choices of "auto" are traced for each value of the option `numerics`: options that take
    "auto" have it, except `batch_parts`. That and all other options are as they were asked for, and
    `batch_parts` is 1 where sums may not be in another order.
    Nothing is run, no code is generated; the graph itself is not changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch.fx as fx

from moe_compile.backend import rewrite
from moe_compile.codegen import trace_both
from moe_compile.config import CHOICES, MegaMoEConfig
from moe_compile.graph.snapshot import copy_of_graph
from moe_compile.plan.chunk_numbers import NumericalChange
from moe_compile.plan.state import CompileState
from moe_compile.report.compilations import Compilation
from moe_compile.report.process_report import predicted_measures
from passes.fuse_token_sums import FuseTokenSums
from passes.split_batch import SplitBatch

FREE: Final[Mapping[str, Any]] = {
    "chunks": "auto",
    "chunk_edges": "auto",
    "attention_chunks": "auto",
    "dispatch": "auto",
    "dispatch_wire": "auto",
    "combine_wire": "auto",
    "nodes": "auto",
}

STEP: Final = ("compute_us", "exposed_us")


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One way to run a block."""

    name: str
    """Value of `numerics`, or "as asked" for the job's own options."""
    what: str
    step_us: float
    """Predicted time of forward and backward."""
    exposed_us: float
    least_us: float
    """The least of it that any order of the same graphs could have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewritten:
    """A block as the passes on Dynamo's graph have rewritten it, to be traced."""

    name: str
    """Name of the choice (`Choice.name`)."""
    what: str
    gm: fx.GraphModule
    inputs: Sequence[Any]
    state: CompileState
    compilation: Compilation

    @classmethod
    def of(
        cls,
        name: str,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        config: MegaMoEConfig,
        *,
        keeps_texts: bool = False,
    ) -> Rewritten:
        """Return `gm` rewritten as `config` says: the graph itself is changed."""
        state, compilation = rewrite(gm, config, keeps_texts=keeps_texts)
        what = _described(compilation, state)
        return cls(name=name, what=what, gm=gm, inputs=inputs, state=state, compilation=compilation)

    def traced(self) -> list[fx.GraphModule]:
        """Return the graphs of forward and backward."""
        return [*trace_both(self.gm, self.inputs, self.state)]

    def measured(self) -> list[dict[str, float]]:
        """Return the predicted measures of forward and backward."""
        return [predicted_measures(one.graph) for one in self.traced()]

    def chosen(self, measures: Sequence[Mapping[str, float]]) -> Choice:
        """Return this as a choice, with the predicted times of its phases."""
        return Choice(
            name=self.name,
            what=self.what,
            step_us=sum(phase.get(part, 0.0) for phase in measures for part in STEP),
            exposed_us=sum(phase.get("exposed_us", 0.0) for phase in measures),
            least_us=sum(phase.get("least_exposed_us", 0.0) for phase in measures),
        )


def alternatives(
    gm: fx.GraphModule, inputs: Sequence[Any], config: MegaMoEConfig
) -> list[Rewritten]:
    """Return copies of `gm` rewritten as "auto" chooses, one for each value of `numerics`."""
    found = []
    for numerics in CHOICES["numerics"]:
        free: dict[str, Any] = {**FREE, "numerics": numerics}
        if numerics == "exact":
            free["batch_parts"] = 1
        asked = replace(config, **free)
        found.append(Rewritten.of(numerics, copy_of_graph(gm), inputs, asked))
    return found


def _described(compilation: Compilation, state: CompileState) -> str:
    applied = {line.partition(": ")[0] for line in compilation.rewrites if ": applied" in line}
    parts = [f"{state.num_parts} parts of the batch"] * (SplitBatch.name in applied)
    for region in compilation.regions:
        of_tokens = " of tokens" * (NumericalChange.BY_TOKENS.value in region.remarks)
        parts.append(f"{region.num_chunks} chunk" + "s" * (region.num_chunks > 1) + of_tokens)
        parts += [f"edges by {region.chunk_edges}"] * (region.chunk_edges != "even")
        parts += [region.dispatch.replace("_", "-")] * (region.dispatch != "all_to_all")
        if region.nodes != "off":
            parts.append("two hops" + ", sums on the nodes" * (region.nodes == "rounded"))
            sliced = region.hop_slices > 1
            parts += [f"hop 1 in {region.hop_slices} slices"] * sliced
        parts += [f"{name} {wire[0]}" for name, wire in region.wires.items()]
    for attention in compilation.attention:
        if attention.is_region:
            parts.append(f"attention in {attention.num_chunks}")
    parts += ["sums per token in one kernel"] * (FuseTokenSums.name in applied)
    return ", ".join(dict.fromkeys(parts))


def choices_of(gm: fx.GraphModule, inputs: Sequence[Any], config: MegaMoEConfig) -> list[Choice]:
    """Return how `gm` runs as asked, then as "auto" would have it for each value of `numerics`.

    Those by "auto" are for ranks that promise `equal_tokens`: without it nothing has a price. Equal
    choices are traced once.
    """
    asked = Rewritten.of("as asked", copy_of_graph(gm), inputs, config)
    own = asked.chosen(asked.measured())
    found: dict[str, Choice] = {}
    for one in alternatives(gm, inputs, replace(config, equal_tokens=True)):
        if one.what not in found:
            found[one.what] = one.chosen(one.measured())
        found[one.name] = replace(found[one.what], name=one.name)
    return [own, *(found[name] for name in CHOICES["numerics"])]
