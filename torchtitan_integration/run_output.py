"""The part of a job's output that a person needs: steps, progress of compiling, and errors.

Contract
    Folds torchtitan's notes at INFO with their continuation lines, and warnings of Python. Shows
    steps, warnings and errors of any logger, tracebacks to their end, and torchrun's messages.
    Times are measured: from the time stamps of the rank that is shown.
    `verbose` folds nothing. The ranks' own files have all lines in any case.
    Errors are those of the newest run, as torchrun keeps them (FOLDER/run/attempt/rank/stderr.log);
    a few runs before it are kept. A folder that is not as expected has nothing to say.
    On a terminal a last line shows the job's progress.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Final

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

RANK: Final = re.compile(r"^(?:\[rank\d+\]:)+")
RECORD: Final = re.compile(
    r"^\[titan\] (?P<time>[\d-]+ [\d:]+,\d+) - (?P<name>\S+) - (?P<level>[A-Z]+) - (?P<text>.*)$"
)
"""A line of torchtitan's logger, without the mark of its rank."""
LEVELS: Final = {"W": "warning", "E": "error", "C": "critical"}
TORCHS: Final = re.compile(r"^(?P<level>[A-Z])\d{4} [\d:.]+ \d+ \S+\] (?P<text>.*)$")
"""A line of torch's own loggers."""
COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")
STEP: Final = re.compile(r"step: +(\d+)\b")
BLOCK: Final = re.compile(r"compiling (?:block \d+|blocks \d+ to \d+) of \d+")
"""Log line of torchtitan_integration.parallelize."""
TOTAL: Final = re.compile(r"total steps (\d+)")
PYTHON_WARNING: Final = re.compile(r"^\S+:\d+: \w*Warning: ")
STARTS: Final = "Training starts at step"
TRACEBACK: Final = "Traceback (most recent call last)"
SHOWN: Final = ("Saving the checkpoint", "Loading the checkpoint", "Training completed", "validate")
KNOWN_WARNINGS: Final = (
    "Error running lspci",
    "safetensors.index.json",
    "HF assets path",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "While redistributing from",
)
"""Warnings of torchtitan and torch in sound jobs: `megamoe train` checked their subjects."""
ON_A_CPU: Final = ("Peak flops undefined", "Failed to use grouped mm")
"""Warnings of no use on a CPU; the debug models have grouped products all the same."""
TIME: Final = "%Y-%m-%d %H:%M:%S,%f"


@dataclass(kw_only=True, slots=True)
class RunOutput:
    """Filter of output lines, which also records times of steps."""

    verbose: bool = False
    on_cpu: bool = False
    num_folded: int = 0
    compiles: bool = False
    """Whether a block was about to be compiled."""
    doing: str = ""
    """Current stage of the job, for a progress line; "" before training starts."""
    total: str = ""
    """Steps of the job, "" while it is not known."""
    began: datetime | None = None
    """When training started."""
    steps: list[tuple[int, datetime]] = field(default_factory=list)
    """Logged steps and their times."""
    _shows: bool = True
    """Whether lines that belong to the record before them are shown."""
    _in_torchrun: bool = False
    """Whether the current lines are frames of torchrun."""

    def take(self, line: str) -> list[str]:
        """Return the lines to show for one line of output."""
        shown = self._shown(line.rstrip("\n"))
        self.num_folded += not shown
        return [line.rstrip("\n")] if self.verbose else shown

    def _shown(self, line: str) -> list[str]:
        plain = COLOURS.sub("", line)
        text = RANK.sub("", plain)
        record = RECORD.match(text.strip())
        if record is not None:
            said = self._of_record(record)
            self._shows = bool(said)
            return said
        if (torchs := TORCHS.match(text)) is not None:
            self._shows = bool(said := self._of_torch(torchs))
            return said
        if not RANK.match(plain):
            return self._of_torchrun(line)
        if TRACEBACK in text or PYTHON_WARNING.match(text):
            self._shows = TRACEBACK in text
        return [text] if self._shows and text.strip() else []

    def _of_torch(self, record: re.Match[str]) -> list[str]:
        text, level = record["text"], LEVELS.get(record["level"], "")
        is_known = any(known in text for known in KNOWN_WARNINGS)
        return [f"{level}: {text}"] if level and not is_known else []

    def _of_torchrun(self, line: str) -> list[str]:
        """Return only the end of torchrun's own traceback: the failure is a rank's."""
        if line.startswith(TRACEBACK):
            self._in_torchrun = True
        elif self._in_torchrun and not line.startswith(" "):
            self._in_torchrun = False
        return [] if self._in_torchrun else [line]

    def _of_record(self, record: re.Match[str]) -> list[str]:
        text, when = record["text"], datetime.strptime(record["time"], TIME)
        if record["level"] != "INFO":
            names = (*KNOWN_WARNINGS, *(ON_A_CPU if self.on_cpu else ()))
            is_known = any(known in text for known in names)
            return [] if is_known else [f"{record['level'].lower()}: {text}"]
        if text.startswith(STARTS):
            self.began, self.doing = when, "compiling"
            return [text]
        if block := BLOCK.search(text):
            self.compiles, self.doing = True, block[0]
            return [f"{self.doing}, {self._since(when):.0f} s"]
        if step := STEP.match(text):
            self.steps.append((int(step[1]), when))
            self.doing = f"training, step {step[1]}" + (f" of {self.total}" if self.total else "")
            return [text]
        if total := TOTAL.search(text):
            self.total = total[1]
        return [text] if text.startswith(SHOWN) else []

    def _since(self, when: datetime) -> float:
        return (when - self.began).total_seconds() if self.began is not None else 0.0

    @property
    def first_step_s(self) -> float | None:
        """Seconds of the first step, its compilation included; None where unknown."""
        if self.began is None or not self.steps:
            return None
        return self._since(self.steps[0][1])

    @property
    def later_step_s(self) -> float | None:
        """Median seconds of the logged steps after the first; None without any."""
        pairs = zip(self.steps, self.steps[1:], strict=False)
        each = [(b - a).total_seconds() / (j - i) for (i, a), (j, b) in pairs if j > i]
        return median(each) if each else None

    def measured(self) -> str:
        """Return the line on measured times, "" without any."""
        first, later = self.first_step_s, self.later_step_s
        if first is None:
            return ""
        said = f"Measured on the rank shown: first step {first:.1f} s, compilation included"
        return said + (f"; later steps {later:.3g} s (median)." if later is not None else ".")


ERROR: Final = re.compile(
    r"^(?:\[rank\d+\]: ?)?((?:\w+\.)*\w*(?:Error|Exception|Disagreement)\b.*)"
)
"""The last line of a traceback."""
KEPT_RUNS: Final = 4
"""Runs whose output stays when another begins."""
MOST_RANKS: Final = 4
"""Number of ranks whose errors are shown: those of others repeat them."""


def drop_old(folder: Path) -> None:
    """Remove the output of old runs, except the newest few."""
    for run in runs_in(folder)[:-KEPT_RUNS]:
        shutil.rmtree(run, ignore_errors=True)


def last_errors(folder: Path) -> list[str]:
    """Return `rank N: error` of the first ranks that ended by an error, the last of each."""
    runs = runs_in(folder)
    files = sorted(runs[-1].glob("attempt_*/*/stderr.log"), key=_rank) if runs else []
    found = [(_rank(file), error) for file in files if (error := _last_error(file))]
    return [f"rank {rank}: {error}" for rank, error in found[:MOST_RANKS]]


def runs_in(folder: Path) -> list[Path]:
    """Return the folders of runs, the newest last; links and folders of others are none."""
    found = (path.parent for path in folder.glob("*/attempt_0") if not path.parent.is_symlink())
    return sorted(found, key=lambda run: run.stat().st_mtime_ns)


def _rank(file: Path) -> int:
    return int(file.parent.name) if file.parent.name.isdigit() else 0


def _last_error(file: Path) -> str:
    lines = file.read_text(errors="replace").splitlines()
    errors = [match[1] for line in lines if (match := ERROR.match(line))]
    return errors[-1] if errors else ""


STARTING = "starting the ranks"


def show(lines: Iterable[str], output: RunOutput) -> None:
    """Print the lines that `output` shows; on a terminal a last line shows the progress."""
    console = Console(highlight=False, soft_wrap=True)
    if console.is_terminal and not output.verbose:
        _show_live(lines, output, console)
        return
    for line in lines:
        for shown in output.take(line):
            sys.stdout.write(f"{shown}\n")
            sys.stdout.flush()


def _show_live(lines: Iterable[str], output: RunOutput, console: Console) -> None:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task, doing = progress.add_task(STARTING), output.doing
        for line in lines:
            for shown in output.take(line):
                console.print(shown, markup=False)
            if output.doing and not doing:  # from here on time is that of the job
                progress.remove_task(task)
                task = progress.add_task(output.doing)
            if output.doing != doing:
                doing = output.doing
                progress.update(task, description=doing)
