"""Peak of live bytes of a graph, for any order of its nodes.

Contract
    Views share their base's storage and a wait its launch's; graph inputs are the caller's and
    do not count; the input of a launch lives until its wait; outputs live to the end.
    A tensor that is copied to the host lives until the wait for the copy, and the copy takes no
    memory of the device. One that is copied back lives from the begin of the copy.

`MemoryHeadroom` tells whether a node may run early: whether the rest of a graph still fits after
it. An order that fits is known. Nodes run one by one, in another order; after each, running the
remaining nodes in the known order stays within the allowance, for as long as only nodes run that
fit. So there is always one left that does: the next of the known order.
Of several nodes that run one after another, none is taken to free anything for the next.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch.fx as fx

from moe_compile.cost.sizes import NominalSizes
from moe_compile.graph.aliases import AliasClasses
from moe_compile.graph.effects import is_size_query
from moe_compile.graph.precedence import awaited
from moe_compile.graph.query import is_offload, is_wait, value_of


@dataclass(frozen=True, slots=True)
class Liveness:
    """Storages that each node allocates and uses, by index of the node."""

    allocates: tuple[tuple[tuple[int, int], ...], ...]
    """(storage, bytes) of storages the node makes; several share its bytes evenly."""
    uses: tuple[tuple[int, ...], ...]
    """Storages that must be alive when the node runs."""

    @classmethod
    def of(cls, nodes: Sequence[fx.Node], sizes: NominalSizes) -> Liveness:
        """Read the nodes of a graph, in its order."""
        classes = AliasClasses(nodes)
        held = classes.of(*(n for n in nodes if n.op in ("placeholder", "get_attr")))
        made: set[int] = set()
        allocates: list[tuple[tuple[int, int], ...]] = []
        uses: list[tuple[int, ...]] = []
        for node in nodes:
            produced = classes.of(node) - held
            mine = produced - made
            made |= mine
            nbytes = 0 if is_offload(node) else sizes.nbytes(value_of(node))
            size = nbytes // max(1, len(produced))
            allocates.append(tuple((memory, size) for memory in sorted(mine)))
            needed = () if is_size_query(node) else (*node.all_input_nodes, *_sent(node))
            uses.append(tuple(sorted((classes.of(*needed) - held) | produced)))
        return cls(tuple(allocates), tuple(uses))

    def peak_bytes(self, order: Sequence[int]) -> int:
        """Return the largest sum of live bytes when nodes run in `order`."""
        return max((during for during, _ in self.live_bytes(order)), default=0)

    def live_bytes(self, order: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield the live bytes during each node of `order`, and those that it leaves."""
        last: dict[int, int] = {}
        for step, node in enumerate(order):
            for storage in self.uses[node]:
                last[storage] = step
        size: dict[int, int] = {}
        live = 0
        for step, node in enumerate(order):
            for storage, nbytes in self.allocates[node]:
                size[storage] = nbytes
                live += nbytes
            during = live
            for storage in self.uses[node]:
                if last[storage] == step:
                    live -= size.get(storage, 0)
            yield during, live


def _sent(node: fx.Node) -> tuple[fx.Node, ...]:
    launch = awaited(node) if is_wait(node) else None
    return tuple(launch.all_input_nodes) if launch is not None else ()


class MemoryHeadroom:
    """Live bytes now, and at the turn of each remaining node of the known order."""

    def __init__(
        self,
        liveness: Liveness,
        order: Sequence[int],
        allowed_bytes: float,
        *,
        looks_ahead: bool = True,
    ) -> None:
        """Start with nothing run; `order` is the known one, of all nodes.

        Unless it `looks_ahead`, only the nodes at hand must fit, not the rest after them.
        """
        self._liveness, self._allowed = liveness, allowed_bytes
        self._looks_ahead = looks_ahead
        self._order = tuple(order)
        self._place = {node: i for i, node in enumerate(order)}
        self._bytes = {s: nbytes for made in liveness.allocates for s, nbytes in made}
        self._users: dict[int, list[int]] = {}
        for i, node in enumerate(order):
            for storage in liveness.uses[node]:
                self._users.setdefault(storage, []).append(i)
        self._now = 0
        self._at: list[float] = self._as_known(order)
        self._first = 0
        """The first place of the known order whose node has not run."""

    def _as_known(self, order: Sequence[int]) -> list[float]:
        live, at = 0, []
        for i, node in enumerate(order):
            live += self._made_by(node)
            at.append(float(live))
            live -= sum(self._size(s) for s in self._liveness.uses[node] if self._users[s][-1] == i)
        return at

    def next_known(self) -> int:
        """Return the node that comes next in the known order."""
        return self._order[self._first]

    def fits(self, nodes: Collection[int]) -> bool:
        """Whether `nodes` may run now, one after another, and all others after them."""
        if self._now + sum(map(self._made_by, nodes)) > self._allowed:
            return False
        if not self._looks_ahead:
            return True
        changes = self._changes(nodes)
        ends = sorted({end for begin, stop, _ in changes for end in (begin, stop)})
        return all(
            max(self._at[begin:stop], default=-math.inf)
            + sum(nbytes for b, s, nbytes in changes if b <= begin and stop <= s)
            <= self._allowed
            for begin, stop in itertools.pairwise(ends)
        )

    def run(self, node: int) -> None:
        """Note that `node` runs now."""
        place = self._place[node]
        self._at[place] = -math.inf
        for begin, stop, nbytes in self._changes([node]):
            for i in range(begin, stop):
                self._at[i] += nbytes
        self._now += self._made_by(node)
        for storage in self._liveness.uses[node]:
            self._users[storage].remove(place)
            if not self._users[storage]:
                self._now -= self._size(storage)
        while self._first < len(self._at) and self._at[self._first] == -math.inf:
            self._first += 1

    def _changes(self, nodes: Collection[int]) -> list[tuple[int, int, int]]:
        """Return (first place, place behind the last, change of live bytes) if `nodes` run now.

        Their results live from now on, not from their places on. A storage that they were the last
        to use lives until another user's place, or no longer.
        """
        places = {self._place[node] for node in nodes}
        changes = [(self._first, self._place[n], self._made_by(n)) for n in nodes]
        for storage in dict.fromkeys(s for node in nodes for s in self._liveness.uses[node]):
            *_, last = users = self._users[storage]
            left = max((user for user in users if user not in places), default=-1)
            changes.append((max(left + 1, self._first), last, -self._size(storage)))
        return [(begin, stop, nbytes) for begin, stop, nbytes in changes if begin < stop and nbytes]

    def _made_by(self, node: int) -> int:
        return sum(nbytes for _, nbytes in self._liveness.allocates[node])

    def _size(self, storage: int) -> int:
        return self._bytes.get(storage, 0)
