"""Whether chunks of experts with a capacity have the bits of the whole: tried without values.

Contract
    "" only where every operator of every chunk, forward and backward, is known to round as that of
    the whole region does. Nothing is written: the replay runs on the tracer's values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import torch.fx as fx

from moe_compile.capacity.capacity_regions import CapacityRegion
from moe_compile.capacity.expert_rounding import first_difference
from moe_compile.capacity.fake_run import FakeRun
from moe_compile.graph.modes import modes
from moe_compile.graph.observation import fake_mode_of
from moe_compile.graph.query import operator_at, value_of
from moe_compile.proof.operator_call import Call
from moe_compile.proof.row_trace import UNTRACEABLE
from passes.replay.capacity_chunks import CapacityChunk, pieces_of

NOT_TRIED: Final = "its operators could not be tried without values"


def why_rounds(region: CapacityRegion, bounds: Sequence[range]) -> str:
    """Return what may round otherwise in chunks of these experts, "" where nothing does."""
    try:
        whole, parts = _whole(region), _parts(region, bounds)
    except (*UNTRACEABLE, NotImplementedError) as error:
        first_line = str(error).partition("\n")[0]
        return f"{NOT_TRIED}: {type(error).__name__}: {first_line}"
    for part in parts:
        for node, calls in part.items():
            if found := first_difference(whole.get(node, []), calls):
                return f"{operator_at(node)}: {found}"
    return ""


def _run(region: CapacityRegion) -> FakeRun:
    fake = fake_mode_of([value_of(node) for node in region.body])
    if fake is None:
        raise TypeError("tensors of another kind")
    return FakeRun(fake, modes(region.result.graph), region.result)


def _whole(region: CapacityRegion) -> dict[fx.Node, list[Call]]:
    run, env = _run(region), dict[fx.Node, object]()
    for node in region.body:
        env[node] = run.copy(node, env)
    result = env[region.result]
    assert isinstance(result, torch.Tensor)
    run.go_back(result)
    return run.operators


def _parts(region: CapacityRegion, bounds: Sequence[range]) -> list[dict[fx.Node, list[Call]]]:
    """Return the operators of each node in every chunk."""
    found = []
    for number, experts in enumerate(bounds):
        run = _run(region)
        pieces = pieces_of(region, run, bounds)
        chunk = CapacityChunk(run, region, pieces, experts)
        chunk.env.update({source: pieces.cut(source)[number] for source in region.cut})
        for node in region.body:
            chunk.replay(node)
        run.go_back(chunk.env[region.result])
        found.append(run.operators)
    return found
