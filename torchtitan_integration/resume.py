"""May a job go on from the newest checkpoint of its folder? Said before a process starts.

Contract
    Reads names of folders, and whether a checkpoint has more than a model; loads nothing.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from moe_compile.errors import InvalidConfig
from torchtitan_integration.job_file import JobFile

STEP: Final = re.compile(r"step-(\d+)")
METADATA: Final = ".metadata"
WHOLE: Final = b"train_state"
"""In the metadata of a checkpoint that a job can go on from: the step it stands at."""


def check_resume(job: JobFile) -> None:
    """Raise InvalidConfig where the job is over, or its newest checkpoint is of a model alone."""
    if str(job.read("checkpoint.enable", False)).lower() != "true":
        return
    folder = Path(job.read("job.dump_folder", "outputs")) / job.read(
        "checkpoint.folder", "checkpoint"
    )
    steps = _steps(folder)
    asked = int(job.read("checkpoint.load_step", -1))
    if not steps or (asked >= 0 and asked not in steps):
        return  # torchtitan starts anew, or says what it misses
    step, last = asked if asked >= 0 else steps[-1], int(job.read("training.steps", 10000))
    anew = f"to start anew write another checkpoint.folder, or remove {folder}"
    if not (whole := _is_whole(folder, step)) or step >= last:
        raise InvalidConfig(_why(folder, step, last, is_whole=whole) + f"; {anew}")


def _why(folder: Path, step: int, last: int, *, is_whole: bool) -> str:
    if is_whole:
        return (
            f"the job is finished: step {step} of training.steps = {last}; to train on write more"
        )
    goes_on = [n for n in _steps(folder) if n < last and _is_whole(folder, n)]
    said = (
        f"{folder / f'step-{step}'} holds the model alone, as the last step of a finished job does"
    )
    if goes_on:
        said += f"; to train on from before it write checkpoint.load_step = {goes_on[-1]}"
        said += " and training.steps" if step >= last else ""
    return said + " (checkpoint.last_save_model_only = false keeps all of a last step)"


def _steps(folder: Path) -> list[int]:
    found = (STEP.fullmatch(path.name) for path in (folder.iterdir() if folder.is_dir() else ()))
    return sorted(int(m[1]) for m in found if m and (folder / m[0] / METADATA).is_file())


def _is_whole(folder: Path, step: int) -> bool:
    return WHOLE in (folder / f"step-{step}" / METADATA).read_bytes()
