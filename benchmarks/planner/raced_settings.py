"""Settings in which `better` is held against trying everything; what is tried, what it costs.

Contract
    What the planner and the schedule are told of the device is wrong: each kind of operator, of
    about one size, takes a share more or less than predicted, and so do the link's latency and its
    bandwidth. These shares are drawn, alike for all ways of one setting.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import frexp
from typing import Any, Final

import torch.fx as fx

from benchmarks.link.cases import Case, NodesCase
from benchmarks.link.link_model import LinkRate, Topology
from moe_compile.check.candidates import Options
from moe_compile.graph.query import overload_name
from moe_compile.parts_by_price import NUMBERS
from moe_compile.plan.candidates import HOP_SLICES, HOPS, WIRES

ERROR: Final = 0.2
"""Share by which a time may be off."""
CHUNKS: Final = (1, 2, 4)


@dataclass(frozen=True, kw_only=True, slots=True)
class Raced:
    """One layer, routed by chance, on one device and link."""

    case: Case
    device: str
    """Name in `prediction_settings.emulated_devices`."""
    ratio: str
    """Predicted compute over communication of the layer as it is written."""

    @property
    def name(self) -> str:
        """Return the name in results."""
        return f"{self.case.name} {self.ratio}"

    @property
    def topology(self) -> Topology:
        """Return which ranks share a node."""
        num_local = self.case.num_local if isinstance(self.case, NodesCase) else 1
        return Topology(num_ranks=self.case.num_ranks, num_local=num_local)


LAYER: Final = Case(name="layer", num_ranks=4, tokens=512, experts=16, width=256, hidden=256)
GPU_LIKE: Final = Case(
    name="top-4, shared expert", num_ranks=4, tokens=512, experts=16, width=256, hidden=128,
    top_k=4, shared_expert=True,
)  # fmt: skip
NODES: Final = NodesCase(
    name="two nodes", num_ranks=4, num_local=2, tokens=256, experts=16, width=256, hidden=128,
    top_k=4,
)  # fmt: skip
SETTINGS: Final = tuple(
    Raced(case=case, device=device, ratio=ratio)
    for case, device, ratios in (
        (LAYER, "cpu", ("2:1", "1:1", "1:2", "1:4")),
        (GPU_LIKE, "gpu-like", ("2:1", "1:1", "1:2", "1:4")),
        (NODES, "gpu-like", ("1:1", "1:2")),
    )
    for ratio in ratios
)


def every_way(case: Case) -> Iterator[Options]:
    """Yield the options of each way that is tried: what the values of options allow."""
    wires = [
        {"dispatch_wire": there, "combine_wire": back}
        for there, back in itertools.product(WIRES, repeat=2)
    ]
    for chunks, wire in itertools.product(_chunks(), wires):
        yield {**chunks, **wire}
    for number in CHUNKS:
        yield {"dispatch": "all_gather", "chunks": number, "chunk_by": "tokens"}
    if isinstance(case, NodesCase):
        for nodes, hops, wire in itertools.product(HOPS, _hops(), wires):
            yield {"nodes": nodes, **hops, **wire}
        return
    for number, chunks, wire in itertools.product(NUMBERS, _chunks(), wires):
        yield {"batch_parts": number, **chunks, **wire}


def _chunks() -> Iterator[Options]:
    """Yield the ways to cut a layer whose rows are exchanged."""
    yield {"chunks": 1}
    for number, axis in itertools.product(CHUNKS[1:], ("experts", "tokens")):
        yield {"chunks": number, "chunk_by": axis}


def _hops() -> Iterator[Options]:
    """Yield the ways to cut a layer whose rows go in two hops."""
    for number, slices in itertools.product(CHUNKS, HOP_SLICES):
        yield {"chunks": number, "chunk_by": "experts", "hop_slices": slices}
    for number in CHUNKS[1:]:
        yield {"chunks": number, "chunk_by": "tokens"}


class DrawnErrors:
    """Times of one setting, each off by a share drawn from its name."""

    def __init__(self, setting: str, share: float = ERROR) -> None:
        """Draw for `setting`; every kind has the same share whenever it is asked for."""
        self._factor = functools.cache(lambda kind: _drawn(f"{setting}: {kind}", share))

    def price(self, node: fx.Node, us: float) -> float:
        """Return the time of a node: of one operator, times of one power of two are off alike."""
        kind = overload_name(node) or getattr(node.target, "__name__", node.op)
        return us * self._factor(f"{kind} {frexp(us)[1]}")

    def link(self, rate: LinkRate) -> LinkRate:
        """Return the link as it is, of the one that is stated."""
        names = ("latency_s", "bytes_per_s", "inside_latency_s", "inside_bytes_per_s")
        return replace(rate, **{name: getattr(rate, name) * self._factor(name) for name in names})


def _drawn(name: str, share: float) -> float:
    return random.Random(name).uniform(1.0 - share, 1.0 + share)


Found = dict[str, Any]
"""What is known of a way: `us` predicted, its `plan`, `seconds` and `error` of its step."""
