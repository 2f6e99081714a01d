"""`python -m benchmarks.cuda`: generate CUDA code of named programs, read it, hold it to bars.

Contract
    No GPU is needed and nothing runs: code is generated for an H100 and read as text. Every program
    is compiled in a process of its own, in one, two and four chunks. With `--json`, figures are
    kept as they come, and programs that are there are not generated again unless `--again` asks.
    Exit status 1 where a bar is missed or code could not be generated.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from benchmarks.cuda.bars import missed
from benchmarks.cuda.cases import CHUNKS, PROGRAMS
from benchmarks.cuda.device_guard import missing
from benchmarks.cuda.findings import findings_in

TIMEOUT_S: Final = 3600
COLUMNS: Final = {
    "triton": "Triton",
    "extern": "extern",
    "outside": "uncaptured",
    "one_element": "of one element",
    "to_host": "to host",
    "integers": "integers",
    "items": "one by one",
    "sources": "sources",
    "most_symbols": "symbols",
    "weight_bytes": "weights GB",
    "activation_bytes": "activations GB",
    "collective_bytes": "collectives GB",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Generate, read, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda", description=__doc__)
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help="all, if none is named")
    parser.add_argument("--chunks", type=int, nargs="+", default=list(CHUNKS))
    parser.add_argument("--json", type=Path, help="file the figures are kept in")
    parser.add_argument("--again", action="store_true", help="generate what is in the file, too")
    parser.add_argument("--keep", type=Path, help="folder the generated code is left in")
    options = parser.parse_args(arguments)
    if lacks := missing():
        parser.error(f"CUDA code cannot be generated here: {lacks}")
    known = {program.name: program for program in PROGRAMS}
    if unknown := {*options.programs} - {*known}:
        parser.error(f"no program {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    names = options.programs or list(known)
    found: dict[str, Any] = {}
    if options.json is not None and options.json.exists():
        found = json.loads(options.json.read_text())["programs"]
    for name, chunks in ((name, chunks) for name in names for chunks in options.chunks):
        if options.again or str(chunks) not in found.get(name, {}):
            found.setdefault(name, {})[str(chunks)] = _measured(name, chunks, options.keep)
            if options.json is not None:
                _write(options.json, found)
    console = Console(width=160)
    console.print(_table(found, names))
    bars = (
        missed(name, found[name], known[name].parts, is_fed=known[name].is_fed) for name in names
    )
    failures = list(itertools.chain.from_iterable(bars))
    for line in failures:
        console.print(line, highlight=False)
    return int(bool(failures))


def _measured(name: str, chunks: int, keep: Path | None) -> dict[str, Any]:
    """Return the figures of one program in so many chunks."""
    sys.stderr.write(f"{name} in {chunks} chunks ...\n")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if keep is None else keep / f"{name}-{chunks}"
        command = [sys.executable, "-m", "benchmarks.cuda.generate", name, str(chunks)]
        command += ["--out", str(folder), "--kernels"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        if done.returncode:
            return {"error": done.stderr.strip().splitlines()[-1:]}
        kernels = json.loads((folder / "kernels.json").read_text())
        said = json.loads((folder / "compilation.json").read_text())
        return {
            **{phase: one.as_dict() for phase, one in findings_in(folder).items()},
            "cpu_s": said["cpu_s"],
            "torch": said["torch"],
            "num_kernels": len(kernels),
            "most_registers": max((k["registers"] for k in kernels), default=0),
            "spilling": [k["name"] for k in kernels if k["spilled_bytes"]],
        }


def _write(path: Path, found: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    said = {"command": "python -m benchmarks.cuda", "device": "H100, not there", "programs": found}
    path.write_text(json.dumps(said, indent=1) + "\n")


def _table(found: Mapping[str, Any], names: Sequence[str]) -> Table:
    table = Table(title="CUDA code generated for an H100; bytes for balanced routing")
    for heading in ("program", "chunks", "phase", *COLUMNS.values(), "CPU s"):
        table.add_column(heading)
    for name in names:
        for row in _rows(name, found[name]):
            table.add_row(*row)
    return table


def _rows(name: str, by_chunks: Mapping[str, Any]) -> Iterator[list[str]]:
    for chunks, figures in sorted(by_chunks.items()):
        for phase in ("forward", "backward"):
            if phase in figures:
                of = figures[phase]
                before = {"integers": of["items"], "outside": of["triton"] + of["extern"]}
                known = {**before, **of}  # of before, all
                cells = [_cell(key, known[key]) for key in COLUMNS]
                yield [name, chunks, phase, *cells, f"{figures['cpu_s']:.0f}"]


def _cell(key: str, value: float) -> str:
    return f"{value / 1e9:.2f}" if key.endswith("_bytes") else str(value)


if __name__ == "__main__":
    sys.exit(main())
