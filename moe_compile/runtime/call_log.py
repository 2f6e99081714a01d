"""What this rank ran on one process group: compiled calls one by one, and all collectives by count.

Contract
    Positions count the user's collectives, not calls: one rank may launch in two calls, as a
    `print` breaks its graph, what others launch in one.
    Noting a call takes 1.3 microseconds and talks to nobody. The newest `REMEMBERED` calls can be
    looked up from another thread while the main thread goes on.
    Ranks of a group launch alike, so that ranks which are at one place of their programs have one
    `LaunchCount`. It is torch's own: asking takes a microsecond, and talks to nobody.
    gloo's counter has messages between two ranks in it, which need not be alike. What torch's
    flight recorder kept has collectives alone: `exact` and `recent` read that, in some ten
    milliseconds, and are asked where something new runs, ranks seem to differ, or nothing moves.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

GLOO: Final = "gloo"
"""The backend whose counter has sends and receives in it."""
READERS: Final = {GLOO: "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
"""What reads the flight recorder of a backend; not in every torch."""


class LaunchCount:
    """The counter of one group."""

    def __init__(self, group: str) -> None:
        """Find the counter of `group`."""
        self._group = group
        process_group = dist.distributed_c10d._resolve_process_group(group)
        backends = [process_group._get_backend(device) for device in process_group._device_types]
        apart = list({id(backend): backend for backend in backends}.values())
        # none: a group written in Python, which counts nothing
        self._read = apart[0]._get_sequence_number_for_group if len(apart) == 1 else None
        self._name = str(apart[0].name()) if len(apart) == 1 else ""
        reader = READERS.get(self._name, "")
        self._recorder: Callable[[], bytes] | None = getattr(
            torch._C._distributed_c10d, reader, None
        )
        self._known: tuple[int, int | None] = 0, 0

    def at_most(self) -> int | None:
        """Return the number of collectives, on some backends more; None where torch counts none.

        None too for a group of several backends: their launches have no common order.
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
        except (KeyError, RuntimeError, ValueError):  # it is torch's own business what it records
            return {}
        return found if max(found, default=0) <= (self.at_most() or 0) else {}

    def _is_ours(self, entry: dict[str, Any]) -> bool:
        return entry["process_group"][0] == self._group and not entry["is_p2p"]


def _said(entry: dict[str, Any]) -> str:
    """Return what a collective is on every rank: a rank that only receives has no number format."""
    operator = entry["profiling_name"].rpartition(":")[2].replace("to_allv", "to_all")
    is_alike = operator.startswith(("all", "reduce_scatter"))
    return f"{operator}({', '.join(entry['input_dtypes'])})" if is_alike else operator


REMEMBERED: Final = 4096
"""Calls; no rank can be so far ahead of another one that it exchanges with."""
NEED_ALL: Final = ("all_", "reduce_scatter")
"""How names of collectives begin that no rank finishes before all have launched them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledProgram:
    """What one compiled callable is to the other ranks of a group."""

    order: str
    """Digest of the user's collectives on that group."""
    plan: str
    """Digest of what we made of the program, and of the order across groups in which the user
    wrote it; "" where it runs as the user wrote it."""
    collectives: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    site: str = ""
    """Where in the user's source it stands, the options, and the sizes of its weights: programs
    of one site are those between which a call may choose by the sizes of its inputs."""
    is_promised: bool = False
    """Whether ranks promise to have equal sizes, and so to choose alike."""
    is_differentiated: bool = False
    """Whether its backward launches collectives on that group."""
    left: str = field(default="", compare=False)
    """What an option asked for and this program did not get, and what to do; "" for nothing."""

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
    """How many of the user's collectives were launched on the group before."""
    program: CompiledProgram
    launched: int | None = None
    """How many collectives of any kind were at most (`LaunchCount`); None where unknown."""
    is_again: bool = False
    """Whether a backward pass runs it, as activation checkpointing does."""

    @property
    def end(self) -> int:
        """Return where the next call begins."""
        return self.start + len(self.program.collectives)


def is_in_backward() -> bool:
    """Whether autograd runs a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1


class CallLog:
    """The calls of one group, and the plans its ranks agreed on."""

    def __init__(self, key: str, group: str, ranks: list[int], count: LaunchCount) -> None:
        """Start empty; `key` is what all ranks of the group call it in the store."""
        self.key = key
        self.group = group
        self.ranks = ranks
        self.count = count
        self.num_calls = 0
        self.end = 0
        """How many of the user's collectives these calls launch."""
        self._rewritten: set[tuple[str, ...]] = set()
        """The user's collectives that all ranks ran by some plan."""
        self._plans: dict[tuple[str, str], set[str]] = {}
        """The same by place too, of programs that ranks may choose between apart."""
        self.published: set[int] = set()
        """Where calls begin that this rank published before it ran them."""
        self.newest: ProgramCall | None = None
        """The last of these, which may still wait."""
        self._recent: list[ProgramCall | None] = [None] * REMEMBERED
        """What ran; each one object, as another thread reads."""

    def note(self, program: CompiledProgram) -> None:
        """Take down that the next call runs `program`; said before it launches anything."""
        number = self.num_calls + 1
        call = ProgramCall(number, self.end, program, self.count.at_most(), is_in_backward())
        self._recent[number % REMEMBERED] = call
        self.end = call.end
        self.num_calls = number  # last: what another thread finds by it is there

    def publish(self, program: CompiledProgram) -> ProgramCall:
        """Take down that `program` is about to be published; return it as the call to come."""
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
        """Whether others may not launch what `program` launches, for all that this rank knows.

        What is rewritten always: another rank may run these collectives anew too, and otherwise.
        The user's own order needs no consent as long as ranks ran nothing in another one. Once they
        did, one of them may be in what it knows, and say nothing of it: what begins with a
        collective that needs all of them waits, as that would, and so does what they ran, or the
        first of which they ran, in another order.
        """
        mine = program.collectives
        return bool(program.plan) or any(
            mine[0].startswith(NEED_ALL) or all(a == b for a, b in zip(mine, known, strict=False))
            for known in self._rewritten
        )

    def is_second(self, program: CompiledProgram) -> bool:
        """Whether all ranks ran the like of `program` by another plan, or by none, before.

        With both to choose from, by its own sizes, a rank would run one while others run the other.
        """
        return bool(program.plan and self.plans_of(program) - {program.plan})

    def plans_of(self, program: CompiledProgram) -> set[str]:
        """Return the plans by which all ranks ran the like of `program`."""
        return self._plans.get((program.order, program.site), set())

    def agree(self, program: CompiledProgram) -> None:
        """All ranks run `program`."""
        if program.plan:
            self._rewritten.add(program.collectives)
        if not program.is_promised:
            key = program.order, program.site
            self._plans.setdefault(key, set()).add(program.plan)
