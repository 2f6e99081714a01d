"""What runs when in an order of a graph's nodes, and the bytes that live meanwhile; kept by name.

Contract
    The result is data as `schedule/timeline_data.py` says. Times are those of
    `schedule/simulate.py`, bytes those of `schedule/liveness.py`.
    A graph carries the name of its timeline alone: every call hands over the text of its record, so
    that has to be short. The timeline is known in the process that compiled the graph, and where
    Inductor keeps code it lies beside it, for processes that find the code there.
    A timeline that is found neither here nor there is "": a cache may have come without it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch.distributed as dist
import torch.fx as fx

from moe_compile.cost.sizes import NominalSizes
from moe_compile.graph.launch_order import PRODUCTS, region_of
from moe_compile.graph.query import (
    operator_of,
    overload_name,
    source_place,
    starts_transfer,
    value_of,
)
from moe_compile.journal.entries import Verdict
from moe_compile.schedule.liveness import Liveness
from moe_compile.schedule.schedule_problem import ScheduleProblem
from moe_compile.schedule.simulate import COMPUTE, COPIES, HOST, Clock, simulate
from moe_compile.schedule.timeline_data import ON_COMPUTE, ON_HOST, ON_LINK, OTHER, PRODUCT
from moe_compile.torch_quirks.cache_files import keep, kept_path

DIGITS: Final = 2
"""Decimals of a microsecond that are kept."""
COPIES_LINK: Final = "link to the host"
NAMES: Final[Mapping[str, str]] = {HOST: ON_HOST, COMPUTE: ON_COMPUTE, COPIES: COPIES_LINK}
"""Names of streams for a reader; a link is `link GROUP`."""
NO_NAMES: Final = ("", "undefined", "default_pg")
"""Descriptions of process groups that say nothing."""
Row = Callable[[int], int]
"""Function from a node to its row in the data."""
MOST: Final = 256
"""Timelines that a process knows: the latest."""
_KNOWN: Final[OrderedDict[str, str]] = OrderedDict()


def timeline_of(
    problem: ScheduleProblem,
    liveness: Liveness,
    sizes: NominalSizes,
    orders: Mapping[str, Sequence[int]],
    verdicts: Mapping[str, Verdict] | None = None,
) -> dict[str, Any]:
    """Return the timeline of each order by its name; `verdicts` are on launches, by node name."""
    rows: dict[int, int] = {}

    def row(node: int) -> int:
        return rows.setdefault(node, len(rows))

    runs = {name: _run(problem, liveness, order, row) for name, order in orders.items()}
    launches = [_launch(problem, node, row(node), sizes, verdicts) for node in problem.launches]
    nodes = [problem.nodes[node] for node in rows]
    return {"nodes": [*map(_named, nodes)], "launches": launches, "runs": runs}


def _named(node: fx.Node) -> list[str]:
    operator = overload_name(node) or operator_of(node).strip("`")
    name = operator.rpartition("::")[2]
    kind = PRODUCT if any(part in name for part in PRODUCTS) else OTHER
    return [node.name, operator, source_place(node), ON_LINK if starts_transfer(node) else kind]


def _run(
    problem: ScheduleProblem, liveness: Liveness, order: Sequence[int], row: Row
) -> dict[str, Any]:
    clock = Clock.that_keeps_spans(problem)
    waits: list[list[float]] = []
    memory = list(_memory(clock, liveness, order, row, waits))
    spans = [
        [row(s.node), stream_name(s.stream), _us(s.start_us), _us(s.end_us - s.start_us)]
        for s in clock.spans()
    ]
    times = simulate(problem, order)
    return {
        "step_us": _us(times.step_us),
        "exposed_us": _us(times.exposed_us),
        "peak_bytes": liveness.peak_bytes(order),
        "spans": spans,
        "memory": memory,
        "waits": waits,
    }


def _memory(
    clock: Clock, liveness: Liveness, order: Sequence[int], row: Row, waits: list[list[float]]
) -> Iterator[list[float]]:
    """Run `order` on `clock`; yield the live bytes where they change, and keep the `waits`."""
    known = 0
    for node, (during, after) in zip(order, liveness.live_bytes(order), strict=True):
        start_us = clock.now_us
        clock.run(node)
        launch = clock.problem.awaits.get(node)
        if launch is not None and launch not in clock.problem.copy_us:
            waits.append([row(launch), _us(clock.now_us - start_us)])
        for us, live in ((start_us, during), (clock.now_us, after)):
            if live != known:
                yield [_us(us), live, row(node)]
            known = live


def _launch(
    problem: ScheduleProblem,
    launch: int,
    row: int,
    sizes: NominalSizes,
    verdicts: Mapping[str, Verdict] | None,
) -> dict[str, Any]:
    node = problem.nodes[launch]
    left = (verdicts or {}).get(node.name)
    return {
        "node": row,
        "stream": stream_name(problem.group_of[launch]),
        "bytes": sizes.nbytes(value_of(node)),
        "region": region_of(node),
        "is_moved": verdicts is not None and left is None,
        "reason": left.reason.name if left else "",
        "detail": left.detail if left else "",
    }


def stream_name(stream: str) -> str:
    """Return the name of a stream for a reader: a link is called as the mesh calls its group."""
    if stream in NAMES:
        return NAMES[stream]
    try:
        group = dist.distributed_c10d._resolve_process_group(stream)
    except (RuntimeError, ValueError, KeyError):
        return f"link {stream}"
    said = str(group.group_desc).removeprefix("mesh_")
    return f"link {stream}" if said in NO_NAMES else f"link {said} ({stream})"


def _us(time: float) -> float:
    return round(time, DIGITS)


def keep_timeline(packed: str, *, is_cached: bool) -> str:
    """Keep a packed timeline, in a file where code of its graph `is_cached`; return its name."""
    if not packed:
        return ""
    name = hashlib.sha256(packed.encode()).hexdigest()[:32]
    _KNOWN[name] = packed
    _KNOWN.move_to_end(name)
    while len(_KNOWN) > MOST:
        _KNOWN.popitem(last=False)
    path = kept_path(f"timelines/{name}") if is_cached else None
    if path is not None and not path.exists():
        keep(path, packed)
    return name


def kept_timeline(name: str) -> str:
    """Return the packed timeline of that name, "" where it is not known."""
    if not name or name in _KNOWN:
        return _KNOWN.get(name, "")
    path = kept_path(f"timelines/{name}")
    try:
        return path.read_text() if path is not None else ""
    except OSError:
        return ""
