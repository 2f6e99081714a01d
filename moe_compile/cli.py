"""The command line: `megamoe train CONFIG.toml` trains by torchtitan with our recipe.

`megamoe simulate`, `doctor`, `calibrate` and `options` are in moe_compile/commands.

Contract
    What can be wrong with the file is said before a process starts: file, key, nearest name.
    The exit status is torchrun's; an interrupt ends every process that was started.
    The report shown at the end is of this run, never of an earlier one.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path

from moe_compile.commands.calibrate import add_calibrate
from moe_compile.commands.doctor import add_doctor
from moe_compile.commands.options import add_options
from moe_compile.commands.simulate import add_simulate
from moe_compile.errors import InvalidConfig
from moe_compile.report.explain import print_report
from torchtitan_integration.job_file import JobFile, load_job, num_ranks, rank_with_loss
from torchtitan_integration.launch import num_gpus, run, train_command, uses_cpu


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = _parser()
    known, overrides = parser.parse_known_args(arguments)
    try:
        if known.command != "train":
            if overrides:
                parser.error(f"megamoe {known.command} has no {overrides[0]!r}")
            return int(known.run(known))
        job = load_job(known.config, overrides)
        _require_torchtitan()
        if known.dry_run:
            return _dry_run(job, known.world)
        return _train(job, known.nproc, overrides)
    except InvalidConfig as error:
        print(f"megamoe: {error}", file=sys.stderr)  # noqa: T201  (the user's terminal)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megamoe", description="Train mixture-of-experts models with hidden communication."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser(
        "train",
        help="train by torchtitan from a TOML file",
        description="Check a torchtitan TOML file, train by it on this machine, one process per "
        "rank, and print what megamoe did. With fewer GPUs than ranks it trains on the CPU.",
        epilog="Flags of torchtitan follow the file and win over it: --training.steps 100, "
        "--megamoe.chunks 4. The report is read from the path in megamoe.report.",
        usage="megamoe train [-h] [--nproc N | --dry-run [--world N]] CONFIG "
        "[--section.key value ...]",
        allow_abbrev=False,
    )
    train.add_argument(
        "config", metavar="CONFIG", type=Path, help="torchtitan 0.2.2 job configuration, TOML"
    )
    train.add_argument(
        "--nproc",
        metavar="N",
        type=_ranks,
        help="ranks to start; default: the product of the TOML's degrees",
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
        help="ranks of the machine a dry run is for; default: the product of the TOML's degrees",
    )
    add_simulate(commands)
    add_doctor(commands)
    add_calibrate(commands)
    add_options(commands)
    return parser


def _ranks(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of ranks; write 1 or more")
    return int(text)


def _require_torchtitan() -> None:
    if importlib.util.find_spec("torchtitan") is None:
        raise InvalidConfig(
            "torchtitan is not installed; pip install 'megamoe[titan]' brings the version wanted"
        )


def _dry_run(job: JobFile, world: int | None) -> int:
    importlib.import_module("torchtitan_integration.cpu_launcher").prepare_torch()
    entry = importlib.import_module("torchtitan_integration.dry_run.run")  # after the work-arounds
    entry.dry_run(job, world or num_ranks(job))
    return 0


def _train(job: JobFile, nproc: int | None, overrides: list[str]) -> int:
    ranks = nproc or num_ranks(job)
    if num_gpus() and uses_cpu(ranks):
        print(f"megamoe: {ranks} ranks but {num_gpus()} GPU: training on the CPU")  # noqa: T201
    logs = Path(job.read("job.dump_folder", "outputs")) / "ranks"
    report = Path(job.read("megamoe.report") or os.environ.get("MEGAMOE_REPORT", ""))
    before = _written(report)
    status = run(
        train_command(job.path, ranks, overrides, logs, shown_rank=rank_with_loss(job, ranks))
    )
    _print_report(report, is_new=_written(report) != before, job=job)
    return status


def _written(path: Path) -> int:
    """Return when the file was written, in nanoseconds; 0 when there is none."""
    return path.stat().st_mtime_ns if path.is_file() else 0


def _print_report(path: Path, *, is_new: bool, job: JobFile) -> None:
    if is_new:
        print_report(json.loads(path.read_text()))
        print(f"megamoe: this report as JSON: {path}")  # noqa: T201
    elif job.read("compile.backend") == "megamoe":
        print(  # noqa: T201
            f"megamoe: no report was written to {path}: nothing was compiled"
            if path.name
            else "megamoe: no report was asked for; name a file in megamoe.report to have one"
        )


if __name__ == "__main__":
    sys.exit(main())
