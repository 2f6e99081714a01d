"""The forward part of a joint graph as storages, and the steps that make them.

Contract
    A step is a node with work on the device that reads no gradient. Views, waits and numbers of the
    host are no steps: they come with the storage they are of. Inputs of the graph and results of
    the program are held by their callers, so that the backward has them for nothing.
    A step that is computed again reads storages that are kept, held, or computed again themselves;
    it runs once, whatever reads it. Times are whole nanoseconds, so that sums are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch.fx as fx
from torch.utils.checkpoint import CheckpointPolicy

from moe_compile.cost.amounts import is_free
from moe_compile.cost.sizes import NominalSizes
from moe_compile.graph.aliases import AliasClasses
from moe_compile.graph.effects import is_size_query
from moe_compile.graph.query import is_tangent, value_of

AGAIN: Final = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
OF_THE_BACKWARD: Final = ("is_backward", "must_be_in_backward")
"""Tags of torch's partitioner on nodes that read no gradient and run in the backward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One node that makes storages."""

    name: str
    makes: tuple[int, ...]
    reads: tuple[int, ...]
    """Storages that some step makes; those that are held are left out."""
    is_free_to_choose: bool
    """Whether the backward may compute it again, and need not."""
    is_forced: bool
    """Whether a policy has it computed again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """What follows from a choice of storages to keep."""

    storages: frozenset[int]
    """Those that are kept and that the backward needs."""
    again: frozenset[int]
    """Steps that are computed again."""
    nbytes: int
    again_ns: int


@dataclass(frozen=True, kw_only=True)
class Storages:
    """Steps and storages, by number."""

    steps: tuple[Step, ...]
    nbytes: tuple[int, ...]
    made_by: tuple[int, ...]
    """Storage -> its step."""
    needed: tuple[int, ...]
    """Storages that the backward reads, whatever is kept."""
    places: Mapping[str, int]
    """Name of a node -> a storage of its value, of nodes that lie in one."""

    @classmethod
    def of(cls, graph: fx.Graph, results: Collection[fx.Node], sizes: NominalSizes) -> Storages:
        """Read a joint graph; `results` are the program's, which its callers hold."""
        nodes = list(graph.nodes)
        classes = AliasClasses(nodes)
        backward = set(of_the_backward(nodes))
        forward = [n for n in nodes if n not in backward and n.op == "call_function"]
        inputs = [n for n in nodes if n.op in ("placeholder", "get_attr")]
        held = classes.of(*inputs, *results)
        makers = [n for n in forward if not is_free(n)]
        maker: dict[int, int] = {}
        for number, node in enumerate(makers):
            for storage in classes.of(node) - held:
                maker.setdefault(storage, number)
        numbers: dict[int, int] = {}
        nbytes: list[int] = []
        for node in forward:  # the identity of a storage is an address: numbers follow the nodes
            if len(lies_in := classes.of(node)) == 1 and (one := min(lies_in)) in maker:
                if one not in numbers:
                    numbers[one] = len(nbytes)
                    nbytes.append(0)
                size = sizes.nbytes(value_of(node))
                nbytes[numbers[one]] = max(nbytes[numbers[one]], size)

        def known(*of: fx.Node) -> tuple[int, ...]:
            return tuple(sorted(numbers[s] for s in classes.of(*of) if s in numbers))

        readers = (n for n in backward if not is_size_query(n))
        read = [known(a) for n in readers for a in n.all_input_nodes if a not in results]
        return cls(
            steps=tuple(_step(node, known) for node in makers),
            nbytes=tuple(nbytes),
            made_by=tuple(maker[storage] for storage in numbers),
            needed=tuple(sorted({s for of in read for s in of})),
            places={n.name: of[0] for n in nodes if len(of := known(n)) == 1},
        )

    def kept(self, chosen: Collection[int], ns: Sequence[int]) -> Kept:
        """Return what follows from keeping the storages `chosen`, at prices `ns` of the steps.

        A storage that may not be computed again is kept where it is needed, chosen or not; one that
        a policy has computed again never is.
        """
        todo, seen = [*self.needed], set(self.needed)
        stored: set[int] = set()
        again: set[int] = set()
        while todo:
            storage = todo.pop()
            number = self.made_by[storage]
            step = self.steps[number]
            if not step.is_forced and (storage in chosen or not step.is_free_to_choose):
                stored.add(storage)
            elif number not in again:
                again.add(number)
                todo += (s for s in step.reads if s not in seen)
                seen.update(step.reads)
        return Kept(
            storages=frozenset(stored),
            again=frozenset(again),
            nbytes=sum(self.nbytes[s] for s in stored),
            again_ns=sum(ns[number] for number in again),
        )

    def not_made_by(self, again: Collection[int]) -> frozenset[int]:
        """Return the storages that other steps than those `again` make."""
        return frozenset(s for s, number in enumerate(self.made_by) if number not in again)


def _step(node: fx.Node, known: Callable[..., tuple[int, ...]]) -> Step:
    policy = node.meta.get("recompute")
    return Step(
        name=node.name,
        makes=known(node),
        reads=() if is_size_query(node) else known(*node.all_input_nodes),
        is_free_to_choose=policy is None,
        is_forced=policy in AGAIN,
    )


def of_the_backward(nodes: Sequence[fx.Node]) -> Iterator[fx.Node]:
    """Yield the nodes that need a gradient, that torch tags so, and the output."""
    found: set[fx.Node] = set()
    for node in nodes:
        reads = not found.isdisjoint(node.all_input_nodes)
        is_tagged = node.meta.get("partitioner_tag") in OF_THE_BACKWARD
        if is_tangent(node) or reads or is_tagged or node.op == "output":
            found.add(node)
            yield node
