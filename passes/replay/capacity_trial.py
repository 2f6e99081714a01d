"""Whether chunks of experts with a capacity run the operators of the whole: tried without values.

Contract
    Nothing is refused only where every node of every chunk runs, forward and backward, the
    operators that it runs of the whole region, moves of data apart. Nothing is written: the replay
    runs on the tracer's values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.fx as fx

from moe_compile.capacity.capacity_regions import CapacityRegion
from moe_compile.capacity.fake_run import FakeRun
from moe_compile.graph.modes import modes
from moe_compile.graph.observation import fake_mode_of
from moe_compile.graph.query import operator_at, value_of
from moe_compile.proof.kernel_bits import bits
from moe_compile.proof.operator_call import SAME_VALUES, Call
from moe_compile.proof.row_trace import UNTRACEABLE
from passes.replay.capacity_chunks import CapacityChunk, pieces_of

NOT_TRIED: Final = "its operators could not be tried without values"


MOVES: Final = SAME_VALUES | frozenset(
    {
        "_unsafe_view", "cat", "stack", "repeat", "slice_backward", "select_backward",
        "split_backward", "new_zeros", "zeros", "zeros_like", "empty_like", "new_empty_strided",
        "empty", "ones_like", "fill", "zero", "constant_pad_nd",
    }
)  # fmt: skip
"""Operators that move elements, or make constants, beside those that give views."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What was found; "" is nothing."""

    refused: str = ""
    """Why a chunk does not run the operators of the whole."""
    last_bits: str = ""
    """Why last bits may depend on which experts a chunk has."""


def try_chunks(region: CapacityRegion, bounds: Sequence[range]) -> Trial:
    """Try chunks of these experts."""
    try:
        whole, parts = _whole(region), _parts(region, bounds)
    except (*UNTRACEABLE, NotImplementedError) as error:
        first_line = str(error).partition("\n")[0]
        return Trial(refused=f"{NOT_TRIED}: {type(error).__name__}: {first_line}")
    pairs = [
        (n, _arithmetic(whole.get(n, [])), _arithmetic(c)) for p in parts for n, c in p.items()
    ]
    for node, all_of_it, some in pairs:
        if [call.func for call in all_of_it] != [call.func for call in some]:
            said = "runs other operators for a part of the experts"
            return Trial(refused=f"{operator_at(node)}: {said}")
    return Trial(last_bits=next(_last_bits(pairs), ""))


def _last_bits(pairs: Sequence[tuple[fx.Node, list[Call], list[Call]]]) -> Iterator[str]:
    for node, whole, part in pairs:
        if said := bits().experts(whole, part):
            yield f"{operator_at(node)}: {said}"


def _arithmetic(calls: Sequence[Call]) -> list[Call]:
    """Return the operators that compute."""
    return [call for call in calls if not (call.func.is_view or call.name in MOVES)]


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
