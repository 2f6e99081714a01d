"""Show a job's output as it comes: lines that are wanted, and on a terminal what it is at."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from torchtitan_integration.run_output import RunOutput

STARTING = "starting the ranks"


def show(lines: Iterable[str], output: RunOutput) -> None:
    """Print what `output` lets through; on a terminal a last line says what the job is at."""
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
