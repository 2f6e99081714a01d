"""`megamoe train`: check a torchtitan job, train by it on this machine, and print the report.

Contract
    Faults of the job are reported before a process starts: file, key, nearest name.
    The exit status is torchrun's. A run that failed says so in its last line.
    The report shown at the end is of this run, never of an earlier one, and stays with the run's
    output. Of a run that failed no tables are shown: its errors are. Where megamoe was asked for
    and rewrote nothing, or its report could not be written, the last line says so, and why.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from moe_compile.commands.explain import tell, tell_of_page, tell_of_picture
from moe_compile.config import what_to_lower
from moe_compile.errors import InvalidConfig
from moe_compile.report.explain import print_report
from moe_compile.report.explanation_text import why_nothing_was_rewritten
from moe_compile.report.page import PAGE, json_of
from moe_compile.report.waits import print_waits, read_waits
from torchtitan_integration.job_checks import (
    checked_ranks,
    folder_faults,
    not_compiled,
    notes_on,
)
from torchtitan_integration.job_config import REPORT_FILE
from torchtitan_integration.job_file import (
    JobFile,
    find_job,
    options_in,
    rank_with_loss,
    read_job,
    recipes,
    uses_megamoe,
)
from torchtitan_integration.job_folder import (
    LATEST,
    held,
    keep_report,
    link_newest,
    linked,
    why_not_written,
)
from torchtitan_integration.launch import (
    allow_open_files,
    num_gpus,
    run,
    settings_on_gpus,
    train_command,
    uses_cpu,
)
from torchtitan_integration.layout import read_layout
from torchtitan_integration.run_output import RunOutput, drop_old, last_errors, runs_in, show
from torchtitan_integration.titan_keys import check_torchtitan

OUT_OF_MEMORY = "OutOfMemoryError"
"""Name of torch's error, in the last line of a rank's traceback."""
SIGNALLED = 128
"""An exit status above it is that of a process which a signal ended."""


def add_train(commands: Any) -> None:
    """Add the subcommand."""
    train = commands.add_parser(
        "train",
        help="train a torchtitan job from a TOML file or a recipe",
        description="Check a torchtitan job, train it on this machine with one process per rank, "
        "and print what megamoe did. With fewer GPUs than ranks the job trains on the CPU.",
        epilog="Flags of torchtitan follow the file and override its keys: --training.steps 100, "
        "--megamoe.chunks 4. The report is written into the job's folder, or to the path in "
        f"megamoe.report. Recipes: {', '.join(recipes())}.",
        usage="megamoe train [-h] [--verbose] [--nproc N | --dry-run [--world N] [--compare]] "
        "CONFIG [--section.key value ...]",
        allow_abbrev=False,
    )
    train.add_argument(
        "config",
        metavar="CONFIG",
        help="TOML file of a job for torchtitan 0.2.2, or the name of a recipe",
    )
    train.add_argument(
        "--nproc",
        metavar="N",
        type=_ranks,
        help="ranks to start; default: the product of the TOML's degrees",
    )
    train.add_argument(
        "--verbose",
        action="store_true",
        help="print every line of the rank that has the loss, and all tables",
    )
    train.add_argument(
        "--dry-run",
        action="store_true",
        help="train nothing: print regions, chunks, collectives and memory, on any machine",
    )
    train.add_argument(
        "--world",
        metavar="N",
        type=_ranks,
        help="number of ranks that a dry run assumes; default: the product of the TOML's degrees",
    )
    train.add_argument(
        "--compare",
        action="store_true",
        help='in a dry run, also show what "auto" would choose for each value of megamoe.numerics; '
        "the dry run then takes two to three times as long",
    )
    train.set_defaults(html=None)


def train(known: argparse.Namespace, overrides: list[str]) -> int:
    """Run the subcommand, or `explain` of a job; return the exit status. Raises InvalidConfig."""
    if known.dry_run and known.nproc:
        raise InvalidConfig(
            f"--dry-run starts no processes, so --nproc has no effect; to assume {known.nproc} "
            f"ranks write --world {known.nproc}"
        )
    if known.world and not known.dry_run:
        raise InvalidConfig(
            f"--world works with --dry-run only; to start {known.world} ranks write --nproc "
            f"{known.world}"
        )
    if known.compare and not known.dry_run:
        raise InvalidConfig(
            "--compare works with --dry-run only; write both, or leave out both to train"
        )
    job = read_job(find_job(known.config), overrides)
    check_torchtitan()
    ranks = checked_ranks(job, known.world or known.nproc, is_run=not known.dry_run)
    for note in notes_on(job):
        _say(f"note: {note}")
    if known.dry_run:
        return _dry_run(job, ranks, known)
    folder = Path(job.read("job.dump_folder", "outputs"))
    with held(folder) as other:
        if other:
            raise InvalidConfig(
                f"{job.path}: job.dump_folder = {str(folder)!r} is in use by another run "
                f"(process {other}): both would write the same report and checkpoints. Wait "
                f"until that run ends, or write another folder: --job.dump_folder {folder}-2"
            )
        return _train(job, ranks, overrides, verbose=known.verbose)


def _ranks(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a valid number of ranks; write 1 or more"
        )
    return int(text)


def _say(text: str) -> None:
    print(f"megamoe: {text}", file=sys.stderr, flush=True)  # noqa: T201  (the user's terminal)


def _dry_run(job: JobFile, world: int, known: argparse.Namespace) -> int:
    importlib.import_module("torchtitan_integration.cpu_launcher").prepare_torch()
    entry = importlib.import_module("torchtitan_integration.dry_run.run")  # after the work-arounds
    report = entry.dry_run(job, world, compares=known.compare, has_page=known.html is not None)
    if known.command == "explain":
        tell(report, known.html)
    return 0


def _train(job: JobFile, ranks: int, overrides: list[str], *, verbose: bool) -> int:
    settings = _settings_of_ranks(ranks)
    folder = Path(job.read("job.dump_folder", "outputs"))
    logs = folder / "ranks"
    drop_old(logs)
    report = json_of(Path(job.read("megamoe.report") or folder / REPORT_FILE))
    before = _written(report)
    command = train_command(job.path, ranks, overrides, logs, shown_rank=rank_with_loss(job, ranks))
    output = RunOutput(verbose=verbose, on_cpu=uses_cpu(ranks))
    status = run(command, lambda lines: show(linked(lines, logs), output), settings)
    link_newest(logs)
    written = _read_new(report, before)
    if written:
        _show_report(written, report, logs, has_failed=0 < status < SIGNALLED, verbose=verbose)
    if measured := output.measured():
        print(measured)  # noqa: T201  (the user's terminal)
    latest = logs / LATEST
    if output.num_folded and not verbose:
        _say(
            f"{output.num_folded} log lines are hidden (--verbose shows all); they are in {latest}"
        )
    if status:
        cut_off = (
            f"{fault}; files in that folder may be incomplete" for fault in folder_faults(job)
        )
        errors = last_errors(logs)
        for line in (*errors, *cut_off, *_what_to_lower(job, errors)):
            _say(line)
        _say(_failure(status, latest))
    elif uses_megamoe(job):
        missing = "" if written or not output.compiles else _unwritten(report)
        if why := missing or _why_nothing(job, written):
            _say(why)
    return status


def _show_report(
    written: dict[str, Any], report: Path, logs: Path, *, has_failed: bool, verbose: bool
) -> None:
    if not has_failed:
        print_report(written, verbose=verbose)
        if ranks := [rank for run in runs_in(logs)[-1:] for rank in read_waits(run)]:
            print_waits(written, ranks, verbose=verbose)
    what = "the report on what was compiled before the job failed," if has_failed else "this report"
    print(f"megamoe: {what} as JSON: {report}", flush=True)  # noqa: T201  (the user's terminal)
    if not has_failed:
        tell_of_page(written, report.with_suffix(PAGE))
        tell_of_picture(written, report.with_suffix(".png"))
    if why := keep_report(report, logs):
        _say(f"the report could not be copied, so the next run in this folder overwrites it: {why}")


def _unwritten(report: Path) -> str:
    """Return the last line of a run that compiled blocks and left no report."""
    why = why_not_written(report) or "see the warnings above"
    return (
        "there is nothing to print about what megamoe compiled, because the report was not "
        f"written to {report}: {why}"
    )


def _settings_of_ranks(ranks: int) -> dict[str, str]:
    """Return variables to add to the environment of the ranks, and print them."""
    allow_open_files()
    if uses_cpu(ranks):
        if num_gpus():
            _say(
                f"the job has {ranks} ranks, but this machine has {num_gpus()} GPU: training "
                "on the CPU"
            )
        return {}
    settings = settings_on_gpus(os.environ)
    if settings:
        _say("set for this run: " + ", ".join(f"{n}={value}" for n, value in settings.items()))
    return settings


def _what_to_lower(job: JobFile, errors: Sequence[str]) -> Iterator[str]:
    """Yield the keys that lower the memory of a job that ended by a lack of it."""
    if not any(OUT_OF_MEMORY in error for error in errors):
        return
    ours = what_to_lower(options_in(job)) if uses_megamoe(job) else ""
    if ours:
        yield f"these options hold more memory than the job as written: {ours}"
    yield (
        "to lower the memory of the job, change training.local_batch_size, training.seq_len or "
        "activation_checkpoint.mode (write 'full'); --dry-run prints the memory of each rank"
    )


def _failure(status: int, logs: Path) -> str:
    """Return the last line of a run that failed."""
    if status > SIGNALLED and status - SIGNALLED in set(signal.Signals):
        name = signal.Signals(status - SIGNALLED).name
        return f"the job was ended by {name}, exit status {status}; what ranks printed: {logs}"
    return f"the job failed, exit status {status}; what ranks printed: {logs}"


def _written(path: Path) -> int:
    """Return the time when the file was written, in nanoseconds; 0 when there is none."""
    return path.stat().st_mtime_ns if path.is_file() else 0


def _read_new(path: Path, before: int) -> dict[str, Any]:
    """Return the report that a run has written, {} where it has written none."""
    return dict(json.loads(path.read_text())) if _written(path) != before else {}


def _why_nothing(job: JobFile, report: dict[str, Any]) -> str:
    """Return the last line of a run in which megamoe rewrote nothing, "" for another."""
    if not report:
        return f"nothing was compiled by megamoe: {not_compiled(job)}"
    why = why_nothing_was_rewritten(report)
    stage = " on rank 0, of the first pipeline stage" if read_layout(job.read).pp > 1 else ""
    return f"nothing was rewritten{stage}: {why}" if why else ""
