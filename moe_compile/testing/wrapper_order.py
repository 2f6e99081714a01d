"""The order of exchanges, matrix products and attention in the code Inductor generated.

Contract
    Reads the Python text of a wrapper (CPU or CUDA): one event per call, in the order of calls.
    Only `def call` and the methods of a `Runner` are read; definitions of kernels are not.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Final

from moe_compile.graph.query import WAITS


class EventKind(enum.Enum):
    """Kinds of calls of generated code. Values are the letters of `event_letters`."""

    LAUNCH = "L"
    WAIT = "W"
    GEMM = "m"
    ATTENTION = "a"
    KERNEL = "k"


@dataclass(frozen=True, slots=True)
class Event:
    """One call of generated code."""

    kind: EventKind
    op: str
    """Operator or kernel name."""
    group: str = ""
    """Process group of a launch."""
    names: tuple[str, ...] = ()
    """The buffer a launch makes; the arguments of a wait, among them that buffer."""
    line: str = ""
    """The generated line of a product or an attention: its operands, and where the result goes."""


COLLECTIVE: Final = re.compile(
    r"torch\.ops\.(?:_c10d_functional|megamoe(?=\.measured_wait))\.(\w+?)(?:\.default)?\((.*)"
)
MATMUL: Final = re.compile(
    r"\b(extern_kernels\.\w*mm"
    r"|torch\.ops\.(?:aten|mkldnn|mkl)\.\w*(?:mm|linear)\w*"
    r"|aten\.\w*mm"
    r"|cpp_\w*gemm\w*|triton_tem_\w*)"
    r"(?:\.\w+)?\("
)
ATTENTION: Final = re.compile(
    r"torch\.ops\.aten\.(_scaled_dot_product_\w+)|\b(triton_tem_\w*flex_attention\w*)\.run\("
)
KERNEL: Final = re.compile(r"\b((?:cpp|triton)_\w+)(?:\.run)?\(")
NAME: Final = re.compile(r"[A-Za-z_]\w*")
MEASURED: Final = "measured_wait"
STRING: Final = re.compile(r"'([^']*)'")
DEFINITION: Final = re.compile(r"^\s*def (\w+)\(")
BODIES: Final = ("call", "partition_")


def wrapper_events(source: str) -> tuple[Event, ...]:
    """Return launches, waits, matrix products, attentions and other kernels in their order."""
    events: list[Event] = []
    inside = False
    for line in source.splitlines():
        if definition := DEFINITION.match(line):
            inside = definition[1].startswith(BODIES)
        elif line and not line[0].isspace():
            inside = False
        elif inside and not line.lstrip().startswith(("#", "assert")):
            events.extend(_event(line))
    return tuple(events)


def event_letters(events: tuple[Event, ...], kinds: str = "LWm") -> str:
    """Return one letter per event of `kinds`: L launch, W wait, m gemm, a attention, k kernel."""
    return "".join(e.kind.value for e in events if e.kind.value in kinds)


def products_under(events: tuple[Event, ...]) -> tuple[int, ...]:
    """Return, per launch, the number of matrix products before the first wait for it."""
    running: dict[str, int] = {}
    launches: list[int] = []
    for event in events:
        if event.kind is EventKind.LAUNCH:
            running[event.names[0]] = len(launches)
            launches.append(0)
        elif event.kind is EventKind.WAIT:
            for name in event.names:
                running.pop(name, None)
        elif event.kind is EventKind.GEMM:
            for place in running.values():
                launches[place] += 1
    return tuple(launches)


def _event(line: str) -> list[Event]:
    if found := COLLECTIVE.search(line):
        op, arguments = found.groups()
        if op in (*WAITS, MEASURED):
            names = NAME.findall(STRING.sub("", arguments))
            return [Event(EventKind.WAIT, op, names=tuple(names))]
        strings = STRING.findall(arguments)
        made = line.partition("=")[0].strip()
        return [Event(EventKind.LAUNCH, op, strings[-1] if strings else "", (made,))]
    if found := ATTENTION.search(line):
        return [Event(EventKind.ATTENTION, found[1] or found[2], line=line.strip())]
    if found := MATMUL.search(line):
        return [Event(EventKind.GEMM, found[1].rpartition(".")[2], line=line.strip())]
    if found := KERNEL.search(line):
        return [Event(EventKind.KERNEL, found[1])]
    return []
