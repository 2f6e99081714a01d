"""`python -m benchmarks.compile_time`: what chunks, and a second start, take to compile.

Contract
    CPU seconds, of compilers too: a machine shared with others takes longer, not more of them.
    Chunks: each compilation in a process of its own, caches off, medians of `--repeats`.
    Starts: caches empty for the first and as it left them for the second, torch's own included.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.compile_time.one_compile import SUBJECTS
from benchmarks.compile_time.starts import Start, start_training
from moe_compile.hardware.measure import cpu_name

BARS: Final = {"layer": 2.0, "block": 1.3}
"""Most that four chunks were meant to take, of what one chunk takes."""
SECOND_START_BAR: Final = 0.4
TIMEOUT_S: Final = 900.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One subject in so many chunks; seconds."""

    subject: str
    chunks: int
    cpu_s: float
    all_cpu_s: tuple[float, ...]
    wall_s: float


def compile_once(subject: str, chunks: int) -> dict[str, float]:
    """Compile in a process of its own; return CPU and wall seconds."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": cache,
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        command = ["-m", "benchmarks.compile_time.one_compile", subject, "--chunks", str(chunks)]
        done = subprocess.run(
            [sys.executable, *command], env=environment, capture_output=True, text=True,
            timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    lines = [text for text in done.stdout.splitlines() if text.startswith("RESULT ")]
    if done.returncode or not lines:
        raise RuntimeError(f"{subject} in {chunks} chunks failed: {done.stderr[-3000:]}")
    found: dict[str, float] = json.loads(lines[0].removeprefix("RESULT "))
    return found


def measure_chunks(
    subjects: Sequence[str], chunks: Sequence[int], repeats: int
) -> Iterator[list[Row]]:
    """Compile every subject in every number of chunks; gives the rows so far after every round."""
    pairs = [(subject, n) for subject in subjects for n in chunks]
    found: dict[tuple[str, int], list[dict[str, float]]] = {pair: [] for pair in pairs}
    for _ in range(repeats):
        for pair in pairs:
            found[pair].append(compile_once(*pair))
        yield [_row(*pair, found[pair]) for pair in pairs]


def _row(subject: str, chunks: int, found: Sequence[dict[str, float]]) -> Row:
    cpu = tuple(round(one["cpu_s"], 2) for one in found)
    return Row(
        subject=subject,
        chunks=chunks,
        cpu_s=statistics.median(cpu),
        all_cpu_s=cpu,
        wall_s=round(statistics.median(one["wall_s"] for one in found), 2),
    )


def measure_starts() -> dict[str, Start]:
    """Return what the first and the second start take, and one that compiles nothing."""
    with tempfile.TemporaryDirectory() as folder:
        places = Path(folder), Path(folder) / "cache"
        first, second = (start_training(*places) for _ in range(2))
        eager = start_training(*places, "--compile.no-enable")
    return {"first": first, "second": second, "uncompiled": eager}


def ratios_of_chunks(rows: Sequence[Row]) -> dict[str, float]:
    """Return the CPU time of the most chunks over that of the fewest, by subject."""
    found = {}
    for subject in dict.fromkeys(row.subject for row in rows):
        mine = sorted((r for r in rows if r.subject == subject), key=lambda r: r.chunks)
        found[subject] = round(mine[-1].cpu_s / mine[0].cpu_s, 3)
    return found


def ratio_of_starts(starts: dict[str, Start]) -> float:
    """Return the second start's CPU time for compilation over the first's."""
    spent = {name: start.cpu_s - starts["uncompiled"].cpu_s for name, start in starts.items()}
    return round(spent["second"] / spent["first"], 3)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table and write JSON, after every round what is known so far."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compile_time", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--subjects", nargs="*", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-starts", action="store_true", help="leave out the recipe's starts")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args(arguments)
    given = sys.argv[1:] if arguments is None else arguments
    starts = {} if options.no_starts else measure_starts()
    rounds = measure_chunks(options.subjects, options.chunks, options.repeats)
    for rows in rounds if options.subjects else [[]]:
        report = _report(rows, starts, given)
        _print(rows, starts, report)
        if options.json:
            options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def _report(
    rows: Sequence[Row], starts: dict[str, Start], arguments: Sequence[str]
) -> dict[str, Any]:
    return {
        "command": " ".join(["python -m benchmarks.compile_time", *arguments]),
        "machine": f"{cpu_name()}, {os.cpu_count()} cores, shared with other work",
        "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
        "chunks": [asdict(row) for row in rows],
        "most_chunks_over_fewest": {
            name: {"cpu": ratio, "bar": BARS[name]}
            for name, ratio in ratios_of_chunks(rows).items()
        },
        "starts": {name: asdict(start) for name, start in starts.items()},
        "second_start_over_first": (
            {"compile_cpu": ratio_of_starts(starts), "bar": SECOND_START_BAR} if starts else {}
        ),
    }


def _print(rows: Sequence[Row], starts: dict[str, Start], report: dict[str, Any]) -> None:
    table = Table(title="Measured: compilation on this machine's CPU, seconds")
    for heading in ("what", "CPU", "wall"):
        table.add_column(heading)
    for row in rows:
        table.add_row(
            f"{row.subject}, {row.chunks} chunks", f"{row.cpu_s:.1f}", f"{row.wall_s:.1f}"
        )
    for name, start in starts.items():
        table.add_row(f"whole job, {name}", f"{start.cpu_s:.1f}", f"{start.wall_s:.1f}")
        table.add_row(f"  of it step 1, {name}", "", f"{start.step_1_s:.1f}")
    console = Console(width=100)
    console.print(table)
    console.print(report["most_chunks_over_fewest"], report["second_start_over_first"])


if __name__ == "__main__":
    sys.exit(main())
