"""What `megamoe check` and `megamoe bisect` run: a torchtitan job, or a function of a script.

Contract
    Faults are reported before a process starts.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from moe_compile.commands.scripts import find_script, flags_of, is_script
from moe_compile.errors import InvalidConfig
from torchtitan_integration.job_checks import checked_ranks, not_compiled, notes_on
from torchtitan_integration.job_file import FOLDER, JobFile, find_job, read_job, uses_megamoe
from torchtitan_integration.titan_keys import check_torchtitan

OF_TITAN: Final = "torchtitan_integration.check.one_rank"
OF_SCRIPTS: Final = "moe_compile.check.script_rank"
"""Modules that are one rank of a section."""
OUTSIDE: Final = {"gradient_wire": "same", "blocks_per_graph": "1"}
"""Options of a torchtitan job that act outside of compiled blocks, alike in every form, and their
defaults."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedJob:
    """A program to be checked, in which no fault was found."""

    path: Path
    ranks: int
    module: str
    """The module that one rank of a section runs."""
    words: Callable[[Path], list[str]]
    """Returns what a rank is told of the program, by the folder of results."""
    folder: Path
    """Where folders of results lie."""
    codegen: str
    said: tuple[str, ...]
    """What makes it another program where the file is the same."""
    notes: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    """What the check does not show of the program's options."""
    not_written: str = ""
    """Why no options can be written into its file; "" where they can."""

    @property
    def generates(self) -> bool:
        """Whether code is generated."""
        return self.codegen != "fx"


def checked_job(known: argparse.Namespace, overrides: list[str]) -> CheckedJob:
    """Return the program that a command line names. Raises InvalidConfig."""
    return _of_script(known, overrides) if is_script(known.config) else _titan(known, overrides)


def _titan(known: argparse.Namespace, overrides: list[str]) -> CheckedJob:
    job = read_job(find_job(known.config), overrides)
    check_torchtitan()
    ranks = checked_ranks(job, known.nproc or _ranks_of_torchrun(), is_run=True)
    _refuse(job)
    is_recipe = job.path.parent == FOLDER
    why = f"the recipe {job.path}, which is the package's; copy it first" if is_recipe else ""
    return CheckedJob(
        path=job.path,
        ranks=ranks,
        module=OF_TITAN,
        words=lambda out: [f"--job.config_file={job.path}", *job.overrides, *_of_check(out)],
        folder=Path(job.read("job.dump_folder", "outputs")),
        codegen=job.read("megamoe.codegen", "inductor"),
        said=job.overrides,
        notes=tuple(notes_on(job)),
        unseen=tuple(_unseen(job)),
        not_written=why,
    )


def _of_script(known: argparse.Namespace, overrides: list[str]) -> CheckedJob:
    script, flags = find_script(known.config), flags_of(overrides)
    if known.layers:
        raise InvalidConfig(
            "--layers works for torchtitan jobs only; a script makes its model in "
            f"{script.function}"
        )
    told = [f"--script={script.path}", f"--function={script.function}"]
    told.append(f"--flags={json.dumps(flags)}")
    return CheckedJob(
        path=script.path,
        ranks=known.nproc or _ranks_of_torchrun() or 1,
        module=OF_SCRIPTS,
        words=lambda _: told,
        folder=Path("outputs", script.path.stem),
        codegen=flags.get("codegen", os.environ.get("MEGAMOE_CODEGEN", "inductor")),
        said=tuple(told),
        not_written=f"{script.path}, which is a script; write these options into the script's "
        "options=",
    )


def _ranks_of_torchrun() -> int | None:
    """Return the number of ranks that torchrun started, None where it started none."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else None


def _refuse(job: JobFile) -> None:
    """Raise InvalidConfig for a job in which there is nothing to check."""
    if not uses_megamoe(job):
        raise InvalidConfig(
            f"{job.path}: compile.backend is {job.read('compile.backend', 'inductor')!r}: this job "
            'does not use megamoe; write backend = "megamoe" under [compile]'
        )
    if not job.is_true("compile.enable"):
        raise InvalidConfig(f"{job.path}: {not_compiled(job)}")


def _unseen(job: JobFile) -> Iterator[str]:
    for name, off in OUTSIDE.items():
        if str(value := job.read(f"megamoe.{name}", off)) != off:
            yield (
                f"megamoe.{name} = {value} acts outside of compiled blocks. It is the same in "
                "every form, so the check shows neither its effect on results nor its gain"
            )
    if job.read("megamoe.expert_compute", "same").startswith("fp8_blockwise"):
        yield (
            "in a check FSDP2 gathers weights of experts in sixteen bits, because forms without "
            "megamoe read them too. So the check does not show what a gather in eight bits gains"
        )


def _of_check(out: Path) -> list[str]:
    """Return torchtitan's flags with which a check writes nothing but its own results."""
    return [
        "--metrics.no-enable-tensorboard",
        "--metrics.no-enable-wandb",
        "--profiling.no-enable-profiling",
        f"--megamoe.report={out / 'report.json'}",
    ]
