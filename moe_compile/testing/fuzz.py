"""Fuzz megamoe with generated layer programs: `python -m moe_compile.testing.fuzz --seed 1`.

Contract
    Programs are a function of the seed and the number of workers, and with `--record` of the
    choices the file lacks: those of few rewritten programs are drawn first. Distinct programs are
    counted.
    Interrupted, terminated or out of minutes, it reports and records the programs so far. Exit
    status 1 when a program was wrong, crashed, hung or made a pass fail, or when none ran; each
    kind of failure is made plainer, printed as code and, with `--keep`, written to a folder.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Final

from moe_compile.testing.programs.campaign import Campaign, Limits
from moe_compile.testing.programs.coverage import Coverage, add_record, covered
from moe_compile.testing.programs.grammar import Rewrite
from moe_compile.testing.programs.strategy import PROGRAMS_OF

WORKERS: Final = 2
"""Pairs of ranks at once: while a pair waits for its peers the other computes."""


def main() -> int:
    """Run the campaign that the command line asks for; return the exit status."""
    options = _arguments()
    if options.worker is not None:
        return _work(options)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    coverage, began = Coverage(), time.monotonic()
    commands = [[*_command(options), "--worker", str(i)] for i in range(options.workers)]
    workers = [subprocess.Popen(c, stdout=subprocess.PIPE, text=True) for c in commands]
    try:
        _collect(workers, coverage, options)
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted: what was done so far\n")
    finally:
        for worker in workers:
            worker.terminate()
            worker.wait()
    seconds = time.monotonic() - began
    sys.stdout.write(coverage.table() + "\n" + coverage.summary(seconds) + "\n")
    if seconds >= 60.0 * options.minutes:
        sys.stdout.write(f"out of minutes: {options.minutes:g}, for {options.programs} programs\n")
    for failure in coverage.failures:
        sys.stdout.write(f"\n# {failure['kind']}: {failure['detail']}\n{failure['source']}\n")
    if options.record:
        add_record(Path(options.record), options.seed, coverage, seconds)
    return int(bool(coverage.num_failed) or not coverage.num_valid)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m moe_compile.testing.fuzz")
    parser.add_argument("--seed", type=_seed, default=0, help="a number, or a commit's hash")
    parser.add_argument(
        "--programs", type=int, default=2000, help="distinct programs to run, invalid ones included"
    )
    parser.add_argument(
        "--rewrite", default="", choices=[r.name for r in Rewrite], help="asked in all, as HOPS"
    )
    parser.add_argument("--layers", default="", choices=[*PROGRAMS_OF], help="of all programs")
    parser.add_argument("--minutes", type=float, default=600.0, help="stop after so many")
    parser.add_argument("--workers", type=int, default=WORKERS, help="pairs of ranks at once")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that are a hang")
    parser.add_argument("--trials", type=int, default=40, help="to make one failure plainer")
    parser.add_argument("--first-failure", action="store_true", help="stop at the first failure")
    parser.add_argument("--keep", default="", help="folder for the failing programs")
    parser.add_argument("--record", default="", help="JSON file to add this run to")
    parser.add_argument("--worker", type=int, default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


def _seed(text: str) -> int:
    """Return a number of any size as it is, and a hash as the number it is in base 16."""
    return int(text) if text.isdecimal() else int(text, 16)


def _command(options: argparse.Namespace) -> list[str]:
    names = ("seed", "programs", "minutes", "workers", "timeout", "trials", "keep")
    given = [f"--{name}={getattr(options, name)}" for name in names]
    some = ("rewrite", "layers", "record")
    given += [f"--{name}={chosen}" for name in some if (chosen := getattr(options, name))]
    return [sys.executable, "-m", "moe_compile.testing.fuzz", *given]


def _work(options: argparse.Namespace) -> int:
    """Run as one worker: print one line of JSON for every program."""
    share = options.programs // options.workers
    share += options.worker < options.programs % options.workers
    limits = Limits(
        programs=share,
        seconds=60.0 * options.minutes,
        timeout_s=options.timeout,
        trials=options.trials,
        keep=Path(options.keep) if options.keep else None,
        rewrite=options.rewrite,
        layers=options.layers,
    )
    record = Path(options.record) if options.record else None
    known = covered(record) if record is not None and record.exists() else None
    for line in Campaign(options.seed * 1000 + options.worker, limits, known).run():
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
    return 0


def _collect(
    workers: list[subprocess.Popen[str]], coverage: Coverage, options: argparse.Namespace
) -> None:
    """Add the workers' results to `coverage`, and show their progress."""
    lines: SimpleQueue[str] = SimpleQueue()
    for worker in workers:
        Thread(target=_pass_on, args=(worker, lines), daemon=True).start()
    num_open = len(workers)
    while num_open:
        if not (line := lines.get()):
            num_open -= 1
            continue
        coverage.add(json.loads(line))
        sys.stderr.write(f"\r{coverage.progress()} of {options.programs}")
        sys.stderr.flush()
        if options.first_failure and coverage.num_failed:
            return
    sys.stderr.write("\n")
    if failed := [status for w in workers if (status := w.wait())]:
        raise RuntimeError(
            f"workers failed with exit status {failed}: their tracebacks are printed above"
        )


def _pass_on(worker: subprocess.Popen[str], lines: SimpleQueue[str]) -> None:
    """Pass on every line that `worker` prints, and an empty one at its end."""
    assert worker.stdout is not None
    for line in worker.stdout:
        lines.put(line)
    lines.put("")


if __name__ == "__main__":
    sys.exit(main())
