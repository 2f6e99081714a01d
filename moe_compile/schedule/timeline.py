"""What runs when in an order of a graph's nodes, and the bytes that live meanwhile, as plain data.

Contract
    A timeline is JSON data:
        nodes     of each node that is named below: [name, operator, the user's line]
        launches  collectives, in the order in which they launch: the row of the node, its stream,
                  its result's bytes, the region it is of ("" for none), its verdict
        runs      name of an order -> step_us, exposed_us, peak_bytes;
                  spans: [row of the node, stream, start, length], microseconds;
                  memory: [time, live bytes, row of the node], one where they change
        uncapped_us  time of the fastest order, where memory forbids it
    Times are those of `schedule/simulate.py`, bytes those of `schedule/liveness.py`.
    `packed` text is short enough to travel in a compiled graph; `unpacked` reverses it.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from moe_compile.cost.sizes import NominalSizes
from moe_compile.graph.launch_order import ANNOTATIONS, REGION
from moe_compile.graph.query import operator_of, overload_name, source_place, value_of
from moe_compile.journal.entries import Verdict
from moe_compile.schedule.liveness import Liveness
from moe_compile.schedule.schedule_problem import ScheduleProblem
from moe_compile.schedule.simulate import COMPUTE, HOST, Clock, simulate

AS_WRITTEN: Final = "as written"
BEFORE: Final = "before"
AFTER: Final = "after"
"""Names of orders: of the program without any pass; of the rewritten graph as it came to the
scheduler; of the same graph as it runs."""
DIGITS: Final = 2
"""Decimals of a microsecond that are kept."""
STREAMS: Final[Mapping[str, str]] = {HOST: "host", COMPUTE: "compute"}
"""Names of streams for a reader; a link is `link GROUP`."""


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
    named = [[n.name, overload_name(n) or operator_of(n), source_place(n)] for n in nodes]
    return {"nodes": named, "launches": launches, "runs": runs}


def _run(
    problem: ScheduleProblem, liveness: Liveness, order: Sequence[int], row: Any
) -> dict[str, Any]:
    clock = Clock.that_keeps_spans(problem)
    memory = list(_memory(clock, liveness, order, row))
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
    }


def _memory(
    clock: Clock, liveness: Liveness, order: Sequence[int], row: Any
) -> Iterator[list[float]]:
    """Run `order` on `clock`; yield the live bytes where they change."""
    known = 0
    for node, (during, after) in zip(order, liveness.live_bytes(order), strict=True):
        start_us = clock.now_us
        clock.run(node)
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
        "region": (node.meta.get(ANNOTATIONS) or {}).get(REGION, ""),
        "is_moved": verdicts is not None and left is None,
        "reason": left.reason.name if left else "",
        "detail": left.detail if left else "",
    }


def stream_name(stream: str) -> str:
    """Return a stream's name for a reader."""
    return STREAMS.get(stream, f"link {stream}")


def _us(time: float) -> float:
    return round(time, DIGITS)


def packed(data: Any) -> str:
    """Return JSON data as text of letters and digits, compressed."""
    text = json.dumps(data, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def unpacked(text: str) -> Any:
    """Return the data of a `packed` text."""
    return json.loads(zlib.decompress(base64.b64decode(text)))
