"""Log of one process group on this rank: compiled calls one by one, all collectives by count.

Contract
    Positions count the user's collectives, not calls: one rank may launch in two calls, as a
    `print` breaks its graph, the collectives that others launch in one.
    Noting a call takes 1.3 microseconds and talks to nobody. The newest `REMEMBERED` calls can be
    looked up from another thread while the main thread goes on.
    Ranks of a group launch alike, so that ranks at one place of their programs have equal
    `LaunchCount`s. The counter is torch's own: reading it takes a microsecond, and talks to nobody.
    gloo's counter includes messages between two ranks, which need not be alike. Torch's flight
    recorder keeps collectives alone: `exact` and `recent` read that, in some ten milliseconds, and
    are called where something new runs, ranks seem to differ, or nothing moves.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

GLOO: Final = "gloo"
"""The backend whose counter includes sends and receives."""
READERS: Final = {GLOO: "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
"""Function that reads the flight recorder of a backend; some torch versions lack it."""


class LaunchCount:
    """The counter of one group."""

    def __init__(self, group: str) -> None:
        """Find the counter of `group`."""
        self._group = group
        process_group = dist.distributed_c10d._resolve_process_group(group)
        backends = [process_group._get_backend(device) for device in process_group._device_types]
        apart = list({id(backend): backend for backend in backends}.values())
        # a group written in Python has no counter
        self._read = apart[0]._get_sequence_number_for_group if len(apart) == 1 else None
        self._name = str(apart[0].name()) if len(apart) == 1 else ""
        reader = READERS.get(self._name, "")
        self._recorder: Callable[[], bytes] | None = getattr(
            torch._C._distributed_c10d, reader, None
        )
        self._known: tuple[int, int | None] = 0, 0

    def at_most(self) -> int | None:
        """Return the number of collectives, on some backends more; None where torch counts none.

        Also None for a group of several backends: their launches have no common order.
        """
        try:
            return self._read() if self._read is not None else None
        except RuntimeError:
            return None

    def exact(self, *, is_between_launches: bool = True) -> int | None:
        """Return the number of collectives; None where it cannot be known.

        Within a launch the counter is ahead of the recorder. A thread that may look then gets one
        too few, which is not kept.
        """
        number = self.at_most()
        if not number or self._name != GLOO:
            return number
        known = self._known
        if known[0] != number:
            known = number, max(self.recent(), default=None)
        if is_between_launches:
            self._known = known
        return known[1]

    def recent(self) -> dict[int, str]:
        """Return number -> operator and number formats of the last collectives, as recorded."""
        try:
            entries = json.loads(self._recorder())["entries"] if self._recorder else []
            found: dict[int, str] = {}
            for entry in (e for e in entries if self._is_ours(e)):
                number = entry["collective_seq_id"]
                if number < max(found, default=0):  # before, another group had this one's name
                    found = {}
                found[number] = _said(entry)
        except (KeyError, RuntimeError, ValueError):  # torch may change its records
            return {}
        return found if max(found, default=0) <= (self.at_most() or 0) else {}

    def _is_ours(self, entry: dict[str, Any]) -> bool:
        return entry["process_group"][0] == self._group and not entry["is_p2p"]


def _said(entry: dict[str, Any]) -> str:
    """Return a text equal on all ranks: a rank that only receives has no number format."""
    operator = entry["profiling_name"].rpartition(":")[2].replace("to_allv", "to_all")
    is_alike = operator.startswith(("all", "reduce_scatter"))
    return f"{operator}({', '.join(entry['input_dtypes'])})" if is_alike else operator


REMEMBERED: Final = 4096
"""Number of calls; no rank can be so far ahead of another one that it exchanges with."""
NEED_ALL: Final = ("all_", "reduce_scatter")
"""Prefixes of collectives that no rank finishes before all have launched them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledProgram:
    """Description of one compiled callable for the other ranks of a group."""

    order: str
    """Digest of the user's collectives on that group."""
    plan: str
    """Digest of what we made of the program, and of the order across groups in which the user
    wrote it; "" where it runs as the user wrote it."""
    collectives: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    site: str = ""
    """Place in the user's source, the options, and the sizes of its weights: programs
    of one site are those between which a call may choose by the sizes of its inputs."""
    is_promised: bool = False
    """Whether ranks promise to have equal sizes, and so to choose alike."""
    is_differentiated: bool = False
    """Whether its backward launches collectives on that group."""
    left: str = field(default="", compare=False)
    """Rewrite that an option asked for and this program lacks, and the remedy; "" for none."""

    def as_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "order": self.order,
            "plan": self.plan,
            "collectives": list(self.collectives),
            "places": list(self.places),
            "left": self.left,
        }


class ProgramCall(NamedTuple):
    """A program, and where it begins."""

    number: int
    start: int
    """Number of the user's collectives launched on the group before."""
    program: CompiledProgram
    launched: int | None = None
    """Number of collectives of any kind before it, at most (`LaunchCount`); None if unknown."""
    is_again: bool = False
    """Whether a backward pass runs it, as activation checkpointing does."""

    @property
    def end(self) -> int:
        """Return the position where the next call begins."""
        return self.start + len(self.program.collectives)


def is_in_backward() -> bool:
    """Whether autograd runs a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1


class CallLog:
    """The calls of one group, and the plans its ranks agreed on."""

    def __init__(self, key: str, group: str, ranks: list[int], count: LaunchCount) -> None:
        """Start empty; `key` is the log's name in the store, the same on all ranks."""
        self.key = key
        self.group = group
        self.ranks = ranks
        self.count = count
        self.num_calls = 0
        self.end = 0
        """Number of the user's collectives that these calls launch."""
        self._rewritten: set[tuple[str, ...]] = set()
        """The user's collectives that all ranks ran by some plan."""
        self._plans: dict[tuple[str, str], set[str]] = {}
        """Plans that all ranks ran, by order and site, of programs without a promise of equal
        sizes."""
        self.published: set[int] = set()
        """Positions of the calls that this rank published before it ran them."""
        self.newest: ProgramCall | None = None
        """The last published call, which may still wait."""
        self._recent: list[ProgramCall | None] = [None] * REMEMBERED
        """The newest calls; each is one object, as another thread reads them."""

    def note(self, program: CompiledProgram) -> None:
        """Note that the next call runs `program`, before it launches anything."""
        number = self.num_calls + 1
        call = ProgramCall(number, self.end, program, self.count.at_most(), is_in_backward())
        self._recent[number % REMEMBERED] = call
        self.end = call.end
        self.num_calls = number  # set last: another thread then finds the call in place

    def publish(self, program: CompiledProgram) -> ProgramCall:
        """Note that `program` is about to be published; return it as the call to come."""
        number = self.num_calls + 1
        self.newest = ProgramCall(number, self.end, program, self.count.exact(), is_in_backward())
        self.published.add(self.end)
        return self.newest

    def last(self) -> ProgramCall | None:
        """Return the newest call that was noted."""
        return self._recent[self.num_calls % REMEMBERED]

    def between(self, start: int, end: int) -> Iterator[ProgramCall]:
        """Yield the remembered calls that launch one of the collectives [start, end)."""
        for number in range(self.num_calls, 0, -1):
            call = self._recent[number % REMEMBERED]
            if call is None or call.number != number or call.end <= start:
                return
            if call.start < end:
                yield call

    def must_ask(self, program: CompiledProgram) -> bool:
        """Whether, by this rank's knowledge, others may not launch the collectives of `program`.

        A rewritten program always asks: another rank may compile these collectives anew with
        another plan. The user's own order needs no consent as long as ranks ran none other. Once
        they did, one of them may run a program it knows without publishing it. Then a program asks
        that begins with a collective of all ranks, which would wait anyway, or whose collectives,
        or the first of them, ranks ran in another order.
        """
        mine = program.collectives
        return bool(program.plan) or any(
            mine[0].startswith(NEED_ALL) or all(a == b for a, b in zip(mine, known, strict=False))
            for known in self._rewritten
        )

    def is_second(self, program: CompiledProgram) -> bool:
        """Whether all ranks ran a program of this order and site by another plan, or none, before.

        With both to choose from, by its own sizes, a rank would run one while others run the other.
        """
        return bool(program.plan and self.plans_of(program) - {program.plan})

    def plans_of(self, program: CompiledProgram) -> set[str]:
        """Return the plans by which all ranks ran programs of its order and site."""
        return self._plans.get((program.order, program.site), set())

    def agree(self, program: CompiledProgram) -> None:
        """Note that all ranks run `program`."""
        if program.plan:
            self._rewritten.add(program.collectives)
        if not program.is_promised:
            key = program.order, program.site
            self._plans.setdefault(key, set()).add(program.plan)
