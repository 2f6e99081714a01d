"""What generated code of one program comes to, forward and backward, as figures."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.cuda.amounts import (
    balanced_sizes,
    bytes_of,
    copied_by_parts,
    elements_of,
    kept_by_parts,
    places_of_weights,
    weights_of_backward,
    weights_of_forward,
    with_named,
)
from benchmarks.cuda.calls import Call, Kind, Wrapper
from benchmarks.cuda.fed_rows import FedRows, fed_rows, quantised_apart
from benchmarks.cuda.in_flight import faults
from benchmarks.cuda.wrapper import read_wrapper
from moe_compile.testing.wrapper_order import EventKind

FLEX_KERNEL: Final = re.compile(r"triton_tem_\w*flex_attention")
"""Inductor's template of attention; what it fuses around it has other names."""
LETTERS: Final = {Kind.LAUNCH: EventKind.LAUNCH.value, Kind.WAIT: EventKind.WAIT.value}


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """What one graph's code comes to."""

    triton: int
    """Launches of Triton kernels."""
    extern: int
    """Calls of operators of torch, and of ours."""
    outside: int
    """Of both, those that no CUDA graph captures."""
    parts: int
    """Parts that CUDA graphs capture: each is one launch more, and one for what it is given."""
    part_sizes: int
    """Sizes read by the host that parts are given: each part is captured again for each value."""
    copied_bytes: float
    """Activations that parts are given and no part before them made: a replay copies these."""
    copied_weight_bytes: float
    """Weights that parts are given: a replay copies these where FSDP2 gathers them."""
    one_element: int
    """Triton kernels that are run for one element."""
    to_host: int
    """Copies to the host that are waited for."""
    integers: int
    """Integers that the host takes out of tensors."""
    items: int
    """Of these, taken one by one."""
    most_range_checks: int
    """Comparisons of one of these with a constant."""
    sources: int
    """Distinct Triton kernels."""
    most_symbols: int
    """Sizes that one kernel is given as arguments."""
    weight_bytes: float
    activation_bytes: float
    collective_bytes: float
    estimated_bytes: float
    """Of weights and activations, by the costs that it was scheduled by."""
    fed: tuple[FedRows, ...]
    """Rows of each exchange that a grouped product multiplies, on their way to it."""
    quantised_apart: int
    """Products in eight bits whose rows another kernel quantises than the one that makes them."""
    order: str
    """Of launches, waits, matrix products and attention, one letter each."""
    keeps_order: bool
    """Whether the same work stands between launches and waits as in the scheduler's."""
    faults: tuple[str, ...]
    """What is done to a buffer in flight."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return dataclasses.asdict(self)


def findings_in(folder: Path) -> dict[str, Findings]:
    """Return what the code in `folder` comes to, by phase; written by `generate`."""
    scheduled = json.loads((folder / "order.json").read_text())
    said = json.loads((folder / "compilation.json").read_text())
    forward = read_wrapper((folder / "forward.py").read_text())
    parameters = places_of_weights(forward, said["weights"])
    sizes = balanced_sizes(forward, said["hop_rows"])
    weights = weights_of_forward(forward, parameters)
    estimated = said["estimated_bytes"]
    expected = {phase: (scheduled[phase], estimated[phase]) for phase in scheduled}
    found = {"forward": _findings(forward, sizes, weights, *expected["forward"])}
    if (path := folder / "backward.py").exists():
        backward = read_wrapper(path.read_text())
        weights = weights_of_backward(forward, backward, sizes, parameters)
        kept = kept_by_parts(forward, backward)
        found["backward"] = _findings(backward, sizes, weights, *expected["backward"], kept)
    return found


def _findings(
    wrapper: Wrapper,
    sizes: Mapping[str, int],
    weights: set[str],
    scheduled: str,
    estimated_bytes: float,
    kept: Iterable[str] = (),
) -> Findings:
    sizes = with_named(wrapper, sizes)
    triton = [c for c in wrapper.calls if c.kind is Kind.TRITON]
    moved = bytes_of(wrapper, sizes, weights)
    order = _order(wrapper)
    extern = [c for c in wrapper.calls if c.kind is Kind.EXTERN]
    parts = [c for c in wrapper.calls if c.kind is Kind.PART]
    copied = copied_by_parts(wrapper, sizes, weights, kept)
    return Findings(
        triton=len(triton),
        extern=len(extern),
        outside=sum(c.part is None for c in (*triton, *extern)),
        parts=len(parts),
        part_sizes=sum(len(c.symbols) for c in parts),
        copied_bytes=copied.activations,
        copied_weight_bytes=copied.weights,
        one_element=sum(elements_of(c, sizes) == 1 for c in triton),
        to_host=sum(c.kind is Kind.TO_HOST for c in wrapper.calls),
        integers=sum(len(c.integers) for c in wrapper.calls),
        items=sum(c.kind is Kind.ITEM for c in wrapper.calls),
        most_range_checks=max(wrapper.num_range_checks.values(), default=0),
        sources=wrapper.num_triton_sources,
        most_symbols=max((len(c.symbols) for c in triton), default=0),
        weight_bytes=moved.weights,
        activation_bytes=moved.activations,
        collective_bytes=moved.collectives,
        estimated_bytes=estimated_bytes,
        fed=tuple(fed_rows(wrapper, sizes)),
        quantised_apart=sum(1 for _ in quantised_apart(wrapper)),
        order=order,
        keeps_order=_by_exchange(order) == _by_exchange(scheduled),
        faults=tuple(faults(wrapper)),
    )


def _by_exchange(order: str) -> list[str]:
    """Return the launches and waits, and what stands between them in any order."""
    return ["".join(sorted(part)) for part in re.split("([LW])", order)]


def _order(wrapper: Wrapper) -> str:
    """Return a letter for each call; a wait for what has landed already is none."""
    in_flight: set[str] = set()
    letters = []
    for call in wrapper.calls:
        if call.kind is Kind.LAUNCH:
            in_flight |= {t.storage for t in call.writes}
        if call.kind is Kind.WAIT:
            awaited = {t.storage for t in call.reads}
            if not awaited & in_flight:
                continue
            in_flight -= awaited
        letters.append(_letter(call))
    return "".join(letters)


def _letter(call: Call) -> str:
    if call.kind is Kind.EXTERN and "mm" in call.name.rpartition(".")[2]:
        return EventKind.GEMM.value
    if call.kind is Kind.EXTERN and "dot_product" in call.name:
        return EventKind.ATTENTION.value
    if call.kind is Kind.TRITON and FLEX_KERNEL.match(call.name):
        return EventKind.ATTENTION.value
    return LETTERS.get(call.kind, "")
