"""What generated code is held to; each bar against the same program in one chunk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

MORE_LAUNCHES: Final = {2: 15, 4: 45}
"""Chunks -> launches of Triton kernels and operators more than in one chunk."""
MORE_BYTES: Final = {"weight_bytes": 1.10, "activation_bytes": 1.02}
MOST_OUTSIDE: Final = 0.40
"""Share of launches, in one chunk, that may stand outside of CUDA graphs where these are asked
for."""
MOST_FED_BYTES: Final = 1.10
"""Bytes that kernels read, and those that they write, between the wait for rows in eight bits and
their product, over the bytes received: a copy in bfloat16 would be 1.94."""
MOST_FED_KERNELS: Final = 2
PHASES: Final = ("forward", "backward")


def missed(
    name: str, by_chunks: Mapping[str, Any], parts: int = 1, *, is_fed: bool = False
) -> Iterator[str]:
    """Return the bars that a program misses, one line each; `by_chunks` has its figures.

    Every one of `parts` of its batch has the launches and the copy to the host of a whole. Products
    of its forward are given the rows of every chunk as they came, where it `is_fed`.
    """
    whole = by_chunks.get("1", {})
    for chunks, figures in sorted(by_chunks.items()):
        where = f"{name}, {chunks} chunks"
        if "error" in figures:
            yield f"{where}: not generated: {figures['error']}"
            continue
        for phase in PHASES:
            if phase in figures:
                reads = parts * (phase == "forward")
                yield from _missed_alone(f"{where}, {phase}", reads, figures[phase])
                if is_fed and phase == "forward":
                    yield from _missed_by_fed(where, parts * int(chunks), figures[phase]["fed"])
                most = MOST_OUTSIDE if chunks == "1" else 1.0
                yield from _missed_by_parts(f"{where}, {phase}", most, figures[phase])
                if phase in whole and int(chunks) in MORE_LAUNCHES:
                    most = parts * MORE_LAUNCHES[int(chunks)]
                    less = whole[phase]
                    yield from _missed_beside(f"{where}, {phase}", most, figures[phase], less)


def _missed_alone(where: str, reads: int, figures: Mapping[str, Any]) -> Iterator[str]:
    if figures["one_element"]:
        yield f"{where}: {figures['one_element']} kernels of one element"
    if figures["to_host"] > reads:
        yield f"{where}: {figures['to_host']} copies to the host, of {reads}"
    if figures["items"]:
        yield f"{where}: {figures['items']} integers taken one by one"
    if not figures["keeps_order"]:
        yield f"{where}: not the scheduler's order but {figures['order']}"
    if apart := figures.get("quantised_apart"):
        yield f"{where}: {apart} products whose rows are quantised apart from what makes them"
    for fault in figures["faults"]:
        yield f"{where}: {fault}"


def _missed_by_parts(where: str, most: float, figures: Mapping[str, Any]) -> Iterator[str]:
    """Return what captured parts miss; figures of before there were any have none."""
    if not figures.get("parts"):
        return
    launches = figures["triton"] + figures["extern"]
    if figures["outside"] > most * launches:
        yield f"{where}: {figures['outside']} of {launches} launches outside of CUDA graphs"
    if figures["part_sizes"]:
        yield f"{where}: captured parts are given {figures['part_sizes']} sizes of the step"


def _missed_by_fed(
    where: str, num_exchanges: int, fed: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """Return what the rows of each exchange miss on their way to a product."""
    if len(fed) != num_exchanges:
        yield f"{where}: products are given rows of {len(fed)} of {num_exchanges} exchanges"
    for number, rows in enumerate(fed):
        for done in ("read", "written"):
            share = rows[f"{done}_bytes"] / rows["received_bytes"]
            if share > MOST_FED_BYTES:
                said = f"x {share:.2f} of what came {done} before the product"
                yield f"{where}, exchange {number}: {said}, of {MOST_FED_BYTES:.2f}"
        if rows["num_kernels"] > MOST_FED_KERNELS:
            kernels = f"{rows['num_kernels']} kernels before the product"
            yield f"{where}, exchange {number}: {kernels}, of {MOST_FED_KERNELS}"


def _missed_beside(
    where: str, most_launches: int, figures: Mapping[str, Any], less: Mapping[str, Any]
) -> Iterator[str]:
    more = sum(figures[kind] - less[kind] for kind in ("triton", "extern"))
    if more > most_launches:
        yield f"{where}: {more} launches more, of {most_launches}"
    for kind, most in MORE_BYTES.items():
        ratio = figures[kind] / less[kind]
        if ratio > most:
            yield f"{where}: {kind.replace('_', ' ')} x {ratio:.2f}, of {most:.2f}"
