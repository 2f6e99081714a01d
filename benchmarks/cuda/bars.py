"""What generated code is held to; each bar against the same program in one chunk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

MORE_LAUNCHES: Final = {2: 15, 4: 45}
"""Chunks -> launches of Triton kernels and operators more than in one chunk."""
MORE_BYTES: Final = {"weight_bytes": 1.10, "activation_bytes": 1.05}
PHASES: Final = ("forward", "backward")


def missed(name: str, by_chunks: Mapping[str, Any]) -> Iterator[str]:
    """Return the bars that a program misses, one line each; `by_chunks` has its figures."""
    whole = by_chunks.get("1", {})
    for chunks, figures in sorted(by_chunks.items()):
        where = f"{name}, {chunks} chunks"
        if "error" in figures:
            yield f"{where}: not generated: {figures['error']}"
            continue
        for phase in PHASES:
            if phase in figures:
                yield from _missed_alone(f"{where}, {phase}", phase, figures[phase])
                if phase in whole and int(chunks) in MORE_LAUNCHES:
                    less = whole[phase]
                    yield from _missed_beside(f"{where}, {phase}", chunks, figures[phase], less)


def _missed_alone(where: str, phase: str, figures: Mapping[str, Any]) -> Iterator[str]:
    if figures["one_element"]:
        yield f"{where}: {figures['one_element']} kernels of one element"
    most = int(phase == "forward")
    if figures["to_host"] > most:
        yield f"{where}: {figures['to_host']} copies to the host, of {most}"
    if not figures["keeps_order"]:
        yield f"{where}: not the scheduler's order but {figures['order']}"
    for fault in figures["faults"]:
        yield f"{where}: {fault}"


def _missed_beside(
    where: str, chunks: str, figures: Mapping[str, Any], less: Mapping[str, Any]
) -> Iterator[str]:
    more = sum(figures[kind] - less[kind] for kind in ("triton", "extern"))
    if more > MORE_LAUNCHES[int(chunks)]:
        yield f"{where}: {more} launches more, of {MORE_LAUNCHES[int(chunks)]}"
    for kind, most in MORE_BYTES.items():
        ratio = figures[kind] / less[kind]
        if ratio > most:
            yield f"{where}: {kind.replace('_', ' ')} x {ratio:.2f}, of {most:.2f}"
