"""The work around a region whose tokens are gathered: what `passes/replay/gathered.py` emits.

Contract
    None where a size is not a number in the graph, or part of the form is outside the work.
    Kept are all other work and its needs, and the exchange of counts where others read it.

Pseudo-code
    the gather of rows      -> all-gather of tokens
    the dispatch            -> exchange of routing, places of rows, rows picked and changed
    experts, what follows   -> the same on the rows there is room for
    the sum per token       -> sums for all ranks' tokens -> reduce-scatter
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch.fx as fx

from moe_compile.analysis.regions import MoERegion
from moe_compile.analysis.token_sums import is_zeros
from moe_compile.graph.query import tensor_of, waits_on
from moe_compile.planning.gathered_sizes import GatheredSizes, GatheredWay
from moe_compile.planning.region_work import RegionWork, Work
from moe_compile.planning.rewrite_costs import PLACE_BYTES, PLACE_KERNELS


def gathered_work(whole: RegionWork, way: GatheredWay) -> RegionWork | None:
    """Return what `whole`, the work around the region as it is, becomes.

    Its parts are the tokens of a rank where each has proven as many rows, else one.
    """
    sizes = GatheredSizes.of(way)
    names = {work.name for work in whole.work}
    tail = [node.name for node in way.found.sums.tail if node.name in names]
    if sizes is None or not tail or not {way.found.gather.name, way.region.dispatch.name} <= names:
        return None
    rewriter = _Rewriter(whole=whole, way=way, sizes=sizes, last=tail[-1])
    inside = {node.name for node in way.region.body}
    experts = sum(w.nbytes for w in whole.work if w.name in inside) / 2.0
    return replace(
        whole,
        work=rewriter.rewritten(),
        num_parts=sizes.tokens if way.found.rows_per_token is not None else 1,
        row_bytes=sizes.part_bytes,
        wire_shares={},
        extra_bytes=sizes.extra_bytes + (way.room - 1.0) * experts,
    )


@dataclass(slots=True)
class _Rewriter:
    """Writes the work of the new form, in graph order."""

    whole: RegionWork
    way: GatheredWay
    sizes: GatheredSizes
    last: str
    """Name of the work after which the sums are there."""
    made: list[Work] = field(default_factory=list)
    now: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Name of an old work -> what stands for it."""
    placed: tuple[int, ...] = ()
    """What tells which rows are this rank's."""
    factors: dict[fx.Node, int] = field(default_factory=dict)

    def rewritten(self) -> tuple[Work, ...]:
        region, found = self.way.region, self.way.found
        written = {
            found.gather.name: self._gather_tokens,
            region.dispatch.name: self._pick_rows,
            self.last: self._sum_rows,
        }
        tail = found.sums.tail
        gone = {n.name for n in (*_counts_alone(region), *found.before, *tail, *_read_by(tail))}
        by_row = {n.name: n for n in (*region.body, *found.after)}
        for work in self.whole.work:
            name = work.name
            if name in written:
                self.now[name] = written[name]()
            elif name in gone:
                self.now[name] = ()
            elif name == region.combine.name:
                self.now[name] = self._needs(work)
            elif name in by_row:
                needs = (*self._needs(work), *self.placed, *self._factors_of(by_row[name]))
                self.now[name] = (self._add_scaled(work, needs),)
            else:
                self.now[name] = (self._add(replace(work, needs=self._needs(work))),)
        return tuple(self.made)

    def _gather_tokens(self) -> tuple[int, ...]:
        s = self.sizes
        nbytes = s.leaving_bytes(s.tokens, s.width * s.token_bytes)
        return (self._collective("gather tokens", nbytes, self._makers(self.way.found.tokens)),)

    def _pick_rows(self) -> tuple[int, ...]:
        """Exchange the routing, place the rows, pick them, and change them row by row."""
        s, region, found = self.sizes, self.way.region, self.way.found
        routing = Work(
            name="gather routing",
            needs=self._makers(found.index, region.counts),
            link_bytes=s.routing_bytes,
            exchange="routing",
            is_gather=True,
            backward=0.0,
        )
        place = Work(
            name="place rows",
            needs=(self._add(routing),),
            nbytes=s.room_rows * PLACE_BYTES,
            num_kernels=PLACE_KERNELS,
            backward=0.0,
            is_chunked=True,
        )
        self.placed = (self._add(place),)
        pick = Work(
            name="pick rows",
            needs=(*self.now[found.gather.name], *self.placed),
            nbytes=2.0 * s.picked_bytes,
            backward_nbytes=s.unpicked_bytes,
            backward_kernels=2,
            is_chunked=True,
        )
        return self._changed(self._add(pick), found.before)

    def _changed(self, rows: int, chain: Iterable[fx.Node]) -> tuple[int, ...]:
        """Add what changes rows before they are sent; return what makes them."""
        old = {work.name: work for work in self.whole.work}
        needs: tuple[int, ...] = (rows,)
        for node in chain:
            needs = (*needs, *self._factors_of(node))
            if node.name in old:
                needs = (self._add_scaled(old[node.name], needs),)
        return needs

    def _add_scaled(self, work: Work, needs: Iterable[int]) -> int:
        """Add work on rows, of as many as there is room for."""
        room, back = self.sizes.room, work.backward_nbytes
        scaled = replace(
            work,
            needs=tuple(dict.fromkeys(needs)),
            operations=work.operations * room,
            nbytes=work.nbytes * room,
            backward_nbytes=None if back is None else back * room,
            is_chunked=True,
        )
        return self._add(scaled)

    def _sum_rows(self) -> tuple[int, ...]:
        """Add rows to the tokens of all ranks, and reduce the sums."""
        s, found = self.sizes, self.way.found
        rows = self._makers(found.after[-1] if found.after else self.way.region.result)
        if (weights := found.sums.weights) is not None:
            needs = (*rows, self._factor(weights))
            weigh = Work(name="weigh", needs=needs, nbytes=2.0 * s.added_bytes, is_chunked=True)
            rows = (self._add(weigh),)
        moved = s.added_bytes + s.sums_bytes
        sums = Work(
            name="sums per token",
            needs=(*rows, *self.placed),
            nbytes=moved,
            num_kernels=2,
            backward=2.0 * s.added_bytes / moved,  # rows gathered
            is_chunked=True,
        )
        nbytes = s.leaving_bytes(s.tokens, s.width * s.sum_bytes)
        done = self._collective("reduce sums", nbytes, (self._add(sums),))
        if found.sums.base is None:
            return (done,)
        needs = (done, *self._makers(found.sums.base))
        return (self._add(Work(name="add sums", needs=needs, nbytes=3.0 * s.part_bytes)),)

    def _factors_of(self, node: fx.Node) -> tuple[int, ...]:
        read = [n for n in node.all_input_nodes if n in self.way.found.factors]
        return tuple(self._factor(n) for n in read)

    def _factor(self, node: fx.Node) -> int:
        """Gather a factor of all ranks' rows and pick those of this rank's, once."""
        if node not in self.factors:
            s, tensor = self.sizes, tensor_of(node)
            each = 0 if tensor is None else tensor.element_size()
            nbytes = s.leaving_bytes(s.rows, each)
            everyone = self._collective(f"gather {node.name}", nbytes, self._makers(node))
            pick = Work(
                name=f"pick {node.name}",
                needs=(everyone, *self.placed),
                nbytes=2.0 * s.room_rows * each,
                is_chunked=True,
            )
            self.factors[node] = self._add(pick)
        return self.factors[node]

    def _collective(self, name: str, nbytes: float, needs: Iterable[int]) -> int:
        launch = Work(
            name=name,
            needs=tuple(needs),
            link_bytes=nbytes,
            exchange="gathered",
            is_gather=True,
            backward=1.0,
            is_chunked=True,
        )
        return self._add(launch)

    def _add(self, work: Work) -> int:
        self.made.append(work)
        return len(self.made) - 1

    def _needs(self, work: Work) -> tuple[int, ...]:
        found = (i for need in work.needs for i in self.now[self.whole.work[need].name])
        return tuple(dict.fromkeys(found))

    def _makers(self, *nodes: fx.Node) -> tuple[int, ...]:
        """Return the work, of what is written so far, that makes `nodes`."""
        found: dict[int, None] = {}
        todo, seen = list(nodes), set(nodes)
        while todo:
            node = todo.pop()
            if node.name in self.now:
                found |= dict.fromkeys(self.now[node.name])
                continue
            todo += [n for n in node.all_input_nodes if n not in seen]
            seen.update(node.all_input_nodes)
        return tuple(sorted(found))


def _counts_alone(region: MoERegion) -> list[fx.Node]:
    """Return the exchange of counts where nothing but the region reads what it brings."""
    brought = [region.count_exchange, *waits_on(region.count_exchange)]
    inside = {*brought, *region.body, region.received_counts}
    readers = {user for node in (*brought, region.received_counts) for user in node.users}
    return [region.count_exchange] if readers <= inside else []


def _read_by(tail: Iterable[fx.Node]) -> list[fx.Node]:
    """Return what nothing but the sums reads: the zeros that rows were added to."""
    nodes = list(tail)
    read = {n for node in nodes for n in node.all_input_nodes}
    return [n for n in read if is_zeros(n) and all(u in nodes for u in n.users)]
