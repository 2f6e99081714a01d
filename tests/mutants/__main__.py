"""Change the product in one place at a time and see whether its tests tell.

`python -m tests.mutants --seed 0 --count 64`: exit status 1 when fewer than 90 % of the changes
that are no equivalent ones are noticed, or when a survivor has no explanation.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.draw import Mutant, drawn
from tests.mutants.journal import Journal
from tests.mutants.report import Result, is_enough, table, write_record
from tests.mutants.sandbox import ROOT, Outcome, Sandbox
from tests.mutants.suites import GROUPS, Group


def main() -> int:
    """Run what the command line asks for."""
    options = _arguments()
    groups = [g for g in GROUPS if options.only in ("", g.name)]
    mutants = [m for m in drawn(groups, options.seed, options.count) if options.at in str(m)]
    if options.list:
        sys.stdout.write("".join(f"{m}\n" for m in mutants))
        return 0
    used = [g for g in groups if any(m.group is g for m in mutants)]
    unchanged = dict(zip((g.name for g in used), _run_all(used, options.workers), strict=True))
    if not all(o.passed for o in unchanged.values()):
        return 2
    journal = Journal(Path(options.journal) if options.journal else None)
    left = [m for m in mutants if str(m) not in journal.outcomes]
    for mutant, outcome in zip(left, _run_all(left, options.workers, journal), strict=True):
        journal.outcomes[str(mutant)] = outcome
    results = [Result(m, journal.outcomes[str(m)]) for m in mutants]
    results.sort(key=lambda r: str(r.mutant))
    sys.stdout.write(table(results))
    if options.record:
        write_record(Path(options.record), options.seed, unchanged, results)
    return int(not is_enough(results))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--only", default="", choices=["", *(g.name for g in GROUPS)])
    parser.add_argument("--at", default="", help="those whose place or change has this text")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--record", default="", help="JSON file for the results")
    parser.add_argument("--journal", default="", help="file of those killed, not run again")
    parser.add_argument("--list", action="store_true", help="list the changes, run nothing")
    return parser.parse_args()


def _run_all(
    subjects: Sequence[Mutant | Group], workers: int, journal: Journal | None = None
) -> list[Outcome]:
    """Run the tests of every mutant, or of every group with nothing changed, in this order."""
    with ExitStack() as stack:
        idle: SimpleQueue[Sandbox] = SimpleQueue()
        for _ in range(min(workers, len(subjects)) or 1):
            idle.put(stack.enter_context(Sandbox()))
        pool = stack.enter_context(ThreadPoolExecutor(max(workers, 1)))
        return list(pool.map(lambda subject: _run(subject, idle, journal), subjects))


def _run(subject: Mutant | Group, idle: SimpleQueue[Sandbox], journal: Journal | None) -> Outcome:
    sandbox = idle.get()
    try:
        if isinstance(subject, Group):
            outcome, name = sandbox.run(subject.arguments), f"{subject.name}, unchanged"
        else:
            source = subject.changed((ROOT / subject.module).read_text())
            outcome = sandbox.run_changed(subject.module, source, subject.group.arguments)
            name = str(subject)
    finally:
        idle.put(sandbox)
    if journal is not None:
        journal.add(str(subject), outcome)
    word = "passed" if outcome.passed else "failed"
    sys.stderr.write(f"{word} {name} [{outcome.cpu_s:.1f} CPU s] {outcome.said}\n")
    return outcome


if __name__ == "__main__":
    sys.exit(main())
