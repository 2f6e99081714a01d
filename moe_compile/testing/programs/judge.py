"""Judge a generated program on its ranks: same, wrong, crashed, hanging, or no program at all.

Contract
    A program that eager torch cannot run, or that plain AOTAutograd cannot compile, is `INVALID`:
    nothing of ours is wrong. A program that AOTAutograd computes differently from eager, as one
    with dropout, whose masks it draws in another way, must equal AOTAutograd bit for bit. A rank
    that does not answer in time is a hang; both processes are then ended and new ones started.
    On a loaded machine gloo may lose a message, in eager as well (seen on torch 2.13, all bytes of
    a send arrived), and a broken link tells nothing of the program: a program that hangs, or whose
    link breaks, is judged once more by new processes, and that judgement counts.
    A process that ends by a signal may have run hundreds of programs before, and any of them may
    have done the harm: its last program fails if one of `AFTER_DEATH` runs by new processes does.
"""

from __future__ import annotations

import enum
import re
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from moe_compile.testing.programs.grammar import NUM_RANKS
from moe_compile.testing.programs.run import IN_PIECES, SUMMED_BY_TORCH, RankFindings, run
from moe_compile.testing.programs.run_again import against
from moe_compile.testing.rank_pool import RankFailure, RankPool

RENEWAL: Final = 300
"""Programs after which the processes are started anew: code that was compiled is never freed."""


STARTS: Final = 5
"""Times that processes are started before giving up: no program is at fault."""


VAIN_S: Final = 20.0
"""Seconds a rank may do nothing once the other has finished: it then waits in vain."""


DIED: Final = re.compile(r"process of rank \d+ ended")
"""Text by which a pool reports that a rank's process is gone."""


AFTER_DEATH: Final = 5
"""Runs that a program has to pass, each by new processes, in which a process once died."""


SAYS_RANKS: Final = re.compile(r"^RANKS, NODES, LOCAL = (\d+), ", re.MULTILINE)
"""Line by which a program gives its number of ranks, if not two."""


BROKEN_LINK: Final = re.compile(r"pair closure|Connection (closed|reset) by peer|[Tt]imed out wait")
"""Texts by which gloo reports that a message did not come."""


class Outcome(enum.Enum):
    """Outcome of a program."""

    SAME = "same"
    AS_TORCH = "as AOTAutograd, which eager differs from"
    WRONG = "wrong"
    CRASH = "crash"
    HANG = "hang"
    DROPPED = "a pass failed"
    INVALID = "invalid"


FAILURES: Final = frozenset({Outcome.WRONG, Outcome.CRASH, Outcome.HANG, Outcome.DROPPED})


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """Outcome of one program, with its details."""

    kind: Outcome
    detail: str = ""
    is_chunked: bool = False
    """Whether a region ran in chunks, or with gathered tokens where the program asks for that."""
    may_differ: bool = False
    """Whether it is compared within a bound: a CPU may round its regions differently in parts."""
    verdicts: tuple[str, ...] = ()
    cpu_s: float = 0.0
    """CPU seconds of all ranks together."""
    is_second: bool = False
    """Whether it was judged once more, since it hung, a link broke or a process died."""

    @property
    def failed(self) -> bool:
        """Whether megamoe is to blame."""
        return self.kind in FAILURES


class Judge:
    """The ranks, one of two mirrored where it can be; use as a context manager."""

    def __init__(self, *, timeout_s: float = 300.0) -> None:
        """Prepare; `timeout_s` is how long a program may take on a busy machine."""
        self._timeout_s = timeout_s
        self._pools: dict[int, RankPool] = {}
        self._num_run: Counter[int] = Counter()

    def __enter__(self) -> Judge:
        """Return the judge; ranks start with the first program."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the ranks."""
        self._end_all()

    def judge(self, text: str) -> Judgement:
        """Run a program's text on all its ranks and return its judgement."""
        judgement = self._judge(text)
        has_died = bool(DIED.search(judgement.detail))
        if judgement.kind is Outcome.HANG or BROKEN_LINK.search(judgement.detail) or has_died:
            for _ in range(AFTER_DEATH if has_died else 1):
                self._end_all()
                judgement = replace(self._judge(text), is_second=True)
                if judgement.failed:
                    break
        return judgement

    def _judge(self, text: str) -> Judgement:
        try:
            found = self._run(text, "megamoe")
        except RankFailure as failure:
            kind = Outcome.HANG if "did not answer" in str(failure) else Outcome.CRASH
            return self._unless_torch_fails(text, Judgement(kind=kind, detail=str(failure)))
        judgement = judgement_of(found)
        return self._unless_torch_fails(text, judgement) if judgement.failed else judgement

    def _unless_torch_fails(self, text: str, judgement: Judgement) -> Judgement:
        """Return `judgement`, or another one where AOTAutograd alone fails as megamoe does."""
        kind = judgement.kind
        if kind is Outcome.DROPPED:
            return judgement
        try:
            if kind is Outcome.WRONG:
                return self._beside_torch(text, judgement)
            fails = self._torch_fails(text)
            if not fails and kind is Outcome.CRASH:
                self._end_all()
                fails = self._torch_fails(text)
        except RankFailure:
            fails = kind is not Outcome.WRONG
        detail = f"AOTAutograd alone too: {judgement.detail}"
        return Judgement(kind=Outcome.INVALID, detail=detail) if fails else judgement

    def _torch_fails(self, text: str) -> bool:
        """Whether AOTAutograd alone raises an error; what was compiled before may matter."""
        plain = judgement_of(self._run(text, "aot_eager"))
        return plain.kind in (Outcome.CRASH, Outcome.INVALID)

    def _beside_torch(self, text: str, judgement: Judgement) -> Judgement:
        """Return the judgement of a wrong program with AOTAutograd as the reference, not eager.

        AOTAutograd may fail on sizes known only at run time, but not where they are computed
        differently, or where the graph ends before each.
        """
        for reference in ("aot_eager", SUMMED_BY_TORCH, IN_PIECES):
            plain = judgement_of(self._run(text, "megamoe", reference=reference))
            if plain.kind is Outcome.SAME:
                return replace(plain, kind=Outcome.AS_TORCH)
            if plain.kind is Outcome.DROPPED:
                return plain
            if reference == "aot_eager" and plain.kind is not Outcome.INVALID:
                break
            self._end_all()
        return judgement

    def _run(self, text: str, backend: str, reference: str = "eager") -> list[RankFindings]:
        num_processes = _num_processes(text)
        pool = self._pool_of(num_processes)
        try:
            found = pool.run(run, text, backend, reference, settles=_is_no_program)
        except RankFailure:
            self._end(num_processes)
            raise
        if None in found:
            self._end(num_processes)
        return [findings or RankFindings() for findings in found]

    def _pool_of(self, num_processes: int) -> RankPool:
        """Return a pool of so many processes, started anew after some number of programs."""
        if self._num_run[num_processes] >= RENEWAL:
            self._end(num_processes)
        if num_processes not in self._pools:
            self._pools[num_processes] = _started(num_processes, self._timeout_s)
        self._num_run[num_processes] += 1
        return self._pools[num_processes]

    def _end_all(self) -> None:
        for num_processes in tuple(self._pools):
            self._end(num_processes)

    def _end(self, num_processes: int) -> None:
        self._num_run[num_processes] = 0
        if num_processes in self._pools:
            self._pools.pop(num_processes).__exit__(None, None, None)


def _is_no_program(found: RankFindings) -> bool:
    """Whether eager torch cannot run the program: others may wait for this rank in vain."""
    return bool(found.eager_error) and not found.raises


def _num_processes(text: str) -> int:
    """Return the number of processes of a program: one for two ranks that mirror each other."""
    if "\nMIRRORED = True" in text:
        return 1
    said = SAYS_RANKS.search(text)
    return NUM_RANKS if said is None else int(said[1])


def _started(num_processes: int, timeout_s: float) -> RankPool:
    """Return a pool whose processes have joined; starting is tried again on a busy machine."""
    for _ in range(STARTS):
        pool = RankPool(
            num_processes,
            timeout_s=timeout_s,
            collective_timeout_s=timeout_s / 2,
            vain_s=min(VAIN_S, timeout_s),
        )
        try:
            return pool.__enter__()
        except RankFailure:
            pool.__exit__(None, None, None)
    raise TimeoutError(f"{num_processes} processes did not start in {STARTS} attempts")


def judgement_of(found: list[RankFindings]) -> Judgement:
    """Return the judgement that the findings of all ranks make."""

    def judged(kind: Outcome, said: list[str]) -> Judgement:
        lines = [f"rank {rank}: {text}" for rank, text in enumerate(said) if text]
        return Judgement(
            kind=kind,
            detail="\n".join(lines),
            is_chunked=any(f.num_rewritten for f in found),
            may_differ=any(f.may_differ for f in found),
            verdicts=tuple(dict.fromkeys(v for f in found for v in f.verdicts)),
            cpu_s=sum(f.cpu_s for f in found),
        )

    eager = [f.eager_error for f in found]
    compiled = [f.compiled_error for f in found]
    if any(eager):
        if not all(f.raises for f in found):
            return judged(Outcome.INVALID, eager)
        if all(compiled):
            return judged(Outcome.SAME, [])
        return judged(Outcome.WRONG, [f"nothing is raised, eagerly {e}" for e in eager])
    if any(compiled):
        return judged(Outcome.CRASH, compiled)
    said = ["\n  ".join([*f.differences, *against([f.noted for f in found])]) for f in found]
    if any(said):
        return judged(Outcome.WRONG, said)
    if any(f.dropped for f in found):
        return judged(Outcome.DROPPED, ["\n  ".join(f.dropped) for f in found])
    return judged(Outcome.SAME, [])


def print_judgement(path: str) -> None:
    """Judge the program in the file `path` and print the findings; exit status 1 if it failed."""
    with Judge() as judge:
        judgement = judge.judge(Path(path).read_text())
    head = f"{judgement.kind.value}; verdicts: {list(judgement.verdicts)}"
    sys.stdout.write(f"{head}\n{judgement.detail}\n")
    raise SystemExit(int(judgement.failed))
