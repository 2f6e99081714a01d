"""The named parts of a graph that its backward computes again, said to torch's partitioner.

Contract
    A function of the joint graph and of `recompute_modules`: all ranks with the same graph decide
    alike. A node with a policy, of the model's checkpointing or of a pass before, keeps it.
    Nothing else is computed again that torch's partitioner would not compute again by itself, but
    where `recompute = "price"` decides about the rest.
    No policy of ours is left on the graphs once they are parted.

What is computed again of a part
    its nodes that the backward reads, or that are computed again for these; views of them, too
    not: what never is (`never_again.py`), but random operators of torch, whose generator's state
    torch hands from forward to backward; results of the program, which their callers hold
    exchanges and their waits only as nodes of "moe", and only with `equal_tokens`
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch
import torch.fx as fx
from torch.utils.checkpoint import CheckpointPolicy

from moe_compile.allowed_values import NAMED
from moe_compile.config import MegaMoEConfig
from moe_compile.cost.amounts import is_free, is_part
from moe_compile.graph.aliases import AliasClasses
from moe_compile.graph.effects import is_size_query, may_draw
from moe_compile.graph.query import is_launch, is_wait, tensor_of
from moe_compile.journal.entries import Verdict
from moe_compile.journal.reasons import Reason
from moe_compile.recompute.named_parts import parts_of
from moe_compile.recompute.never_again import communicates_itself, is_fixed
from moe_compile.recompute.storages import of_the_backward

EXCHANGES_OF: Final = "moe"
"""The name that includes exchanges."""
CHECKPOINTED: Final = "the model's own activation checkpointing decides there"
NOT_READ: Final = (
    "the backward pass reads none of its results, or only results that are never computed again"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedAgain:
    """The nodes of each named part that are computed again, and what is said of the other names."""

    nodes: Mapping[str, tuple[str, ...]]
    """Name of a part -> names of its nodes; a node of several parts is of the first."""
    left: tuple[Verdict, ...]

    @classmethod
    def of(
        cls,
        graph: fx.Graph,
        results: Collection[fx.Node],
        config: MegaMoEConfig,
        standing: Collection[str],
    ) -> NamedAgain:
        """Find the parts in a joint graph; nothing is written.

        `results` are the program's; the nodes named in `standing` have a policy of their own.
        """
        parts = parts_of(graph, config.recompute_modules)
        classes = AliasClasses(graph.nodes)
        held = classes.of(*results)
        free = {
            node
            for name, part in parts.items()
            for node in part
            if _may_run_again(node, moves_rows=name == EXCHANGES_OF and config.equal_tokens)
            and node.name not in standing
            and held.isdisjoint(classes.of(node))
        }
        for part in (free, *parts.values()):
            part.update(_views(graph, part & free, standing))
        needed = free & _needed(graph, free)
        taken: set[fx.Node] = set()
        nodes: dict[str, tuple[str, ...]] = {}
        for name, part in parts.items():
            own = [n.name for n in graph.nodes if n in part & needed and n not in taken]
            taken |= part
            if own:
                nodes[name] = tuple(own)
        left = [_why_left(name, part, needed, standing) for name, part in parts.items()]
        left += [_exchanges_left(name, part, config) for name, part in parts.items()]
        return cls(nodes=nodes, left=tuple(verdict for verdict in left if verdict is not None))

    @property
    def names(self) -> frozenset[str]:
        """Return the names of all nodes that are computed again."""
        return frozenset(name for own in self.nodes.values() for name in own)

    def write(self, graph: fx.Graph) -> None:
        """Put the policy on the nodes."""
        _put(graph, self.names, CheckpointPolicy.MUST_RECOMPUTE)

    def keep_the_rest(self, graph: fx.Graph, again: Collection[str]) -> frozenset[str]:
        """Have all that is free to choose kept, but for the nodes named in `again`.

        Returns the names of the nodes that got this policy.
        """
        backward = set(of_the_backward([*graph.nodes]))
        rest = (n for n in graph.nodes if not is_free(n) and n not in backward)
        kept = frozenset(n.name for n in rest if "recompute" not in n.meta and n.name not in again)
        _put(graph, kept, CheckpointPolicy.MUST_SAVE)
        return kept

    def forget(self, graph: fx.Graph, kept: Collection[str], standing: Collection[str]) -> None:
        """Take our policies from the nodes of a graph; those of the nodes `standing` stay.

        torch copies the policy of a random operator to its value.
        """
        for node in graph.nodes:
            is_ours = node.meta.get("recompute") is CheckpointPolicy.MUST_RECOMPUTE
            if node.name in kept or (is_ours and node.name not in standing):
                node.meta.pop("recompute", None)


def _put(graph: fx.Graph, names: Collection[str], policy: CheckpointPolicy) -> None:
    for node in graph.nodes:
        if node.name in names:
            node.meta["recompute"] = policy


def _views(graph: fx.Graph, again: Collection[fx.Node], standing: Collection[str]) -> set[fx.Node]:
    """Return the views of the nodes `again`, and the values of those that have several."""
    found = set(again)
    for node in graph.nodes:
        if is_part(node) and node.name not in standing and not found.isdisjoint(node.args[:1]):
            found.add(node)
    return found


def _may_run_again(node: fx.Node, *, moves_rows: bool) -> bool:
    """Whether a node that is no view may run in the backward, exchanges if it `moves_rows`."""
    if is_part(node):
        return False
    if is_launch(node) or is_wait(node):
        tensor = tensor_of(node)
        return moves_rows and tensor is not None and tensor.is_floating_point()
    if may_draw(node):
        return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return not (communicates_itself(node) or is_fixed(node) or is_size_query(node))


def _needed(graph: fx.Graph, again: Collection[fx.Node]) -> set[fx.Node]:
    """Return the forward nodes that the backward reads if those of `again` are not kept."""
    nodes = [*graph.nodes]
    backward = set(of_the_backward(nodes))
    (output,) = graph.find_nodes(op="output")
    needed: set[fx.Node] = set()
    for node in reversed(nodes):
        if node in backward:
            reads = node is not output and not is_size_query(node)
        else:
            reads = node in needed and (node in again or is_part(node))
        if reads:
            needed.update(node.all_input_nodes)
    return needed - backward


def _why_left(
    name: str,
    part: Collection[fx.Node],
    needed: Collection[fx.Node],
    standing: Collection[str],
) -> Verdict | None:
    """Return why nothing of a part is computed again; None where something is."""
    if not part:
        return Verdict(candidate=name, reason=Reason.NO_PART, option=NAMED)
    if not set(needed).isdisjoint(part):
        return None
    detail = CHECKPOINTED if any(node.name in standing for node in part) else NOT_READ
    return Verdict(candidate=name, reason=Reason.ALREADY_DONE, detail=detail, option=NAMED)


def _exchanges_left(name: str, part: Collection[fx.Node], config: MegaMoEConfig) -> Verdict | None:
    if name != EXCHANGES_OF or config.equal_tokens or not any(map(is_launch, part)):
        return None
    candidate = f"exchanges of {name}"
    return Verdict(candidate=candidate, reason=Reason.TOKENS_MAY_DIFFER, option=NAMED)


def figures(
    named: NamedAgain,
    before: Mapping[fx.Node, int],
    kept: Mapping[fx.Node, int],
    us: Mapping[str, float],
    waited_us: Mapping[str, float],
) -> Iterator[tuple[str, float]]:
    """Yield, for each named part, bytes that are kept no longer and times, each with its key.

    `before` and `kept` are the tensors kept without the option and with it, `us` the times of the
    nodes that are computed again, `waited_us` what of these the backward would wait for a link.
    """
    still = {node.name for node in kept}
    dropped = {node.name: nbytes for node, nbytes in before.items() if node.name not in still}
    for name, own in named.nodes.items():
        yield f"{name}_bytes", float(sum(dropped.get(one, 0) for one in own))
        yield f"{name}_us", sum(us.get(one, 0.0) for one in own)
        yield f"{name}_hidden_us", sum(waited_us.get(one, 0.0) for one in own)
