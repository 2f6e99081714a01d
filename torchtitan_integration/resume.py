"""Checks that a job can load and save by its [checkpoint], before a process starts.

Contract
    Reads names of folders, and whether a checkpoint has more than a model; loads nothing.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Final

from moe_compile.errors import InvalidConfig
from torchtitan_integration.job_file import JobFile

STEP: Final = re.compile(r"step-(\d+)")
METADATA: Final = ".metadata"
HUGGING_FACE: Final = "model.safetensors.index.json"
WHOLE: Final = b"train_state"
"""Name in the metadata of a checkpoint with its step, from which a job can go on."""
BESIDE_MODEL: Final = frozenset({"optimizer", "lr_scheduler", "dataloader", "train_state"})
"""States a job loads beside its model, unless `checkpoint.exclude_from_loading` has them."""


def check_resume(job: JobFile) -> None:
    """Raise InvalidConfig where a job is over, or cannot load or save as it says."""
    if not job.is_true("checkpoint.enable"):
        return
    _check_formats(job)
    folder = Path(job.read("job.dump_folder", "outputs")) / job.read(
        "checkpoint.folder", "checkpoint"
    )
    if not folder.exists():
        _check_initial(job)
        return
    steps = _steps(folder)
    asked = int(job.read("checkpoint.load_step", -1))
    if not steps:
        _check_start(job, folder)
    if not steps or (asked >= 0 and asked not in steps):
        return  # torchtitan starts anew, or says what it misses
    step, last = asked if asked >= 0 else steps[-1], int(job.read("training.steps", 10000))
    whole = step == 0 or _is_whole(job, folder / f"step-{step}")  # of a seed the model is enough
    if not whole or step >= last:
        anew = f"to start again from step 1, write another checkpoint.folder, or remove {folder}"
        raise InvalidConfig(_why(job, folder, step, last, is_whole=whole) + f"; {anew}")


def _why(job: JobFile, folder: Path, step: int, last: int, *, is_whole: bool) -> str:
    if is_whole:
        return (
            f"the job is finished: step {step} of training.steps = {last}; to train on, write a "
            "larger training.steps"
        )
    found = folder / f"step-{step}"
    goes_on = [n for n in _steps(folder) if n < last and _is_whole(job, folder / f"step-{n}")]
    said = f"{found} holds the model only, as the last step of a finished job does"
    if goes_on:
        said += f"; to train on from an earlier step, write checkpoint.load_step = {goes_on[-1]}"
        said += " and training.steps" if step >= last else ""
    in_hf = "" if (found / METADATA).is_file() else ", checkpoint.initial_load_in_hf = true"
    return (
        f"{said}; to start at step 1 with these weights and a new optimizer, write "
        f'checkpoint.initial_load_path = "{found}"{in_hf} and another checkpoint.folder '
        "(checkpoint.last_save_model_only = false keeps all of a last step)"
    )


def _check_formats(job: JobFile) -> None:
    """Refuse safetensors of Hugging Face for anything but a model, which is all they hold."""
    for asked, needs in (
        ("last_save_in_hf", "last_save_model_only"),
        ("initial_load_in_hf", "initial_load_model_only"),
    ):
        if job.is_true(f"checkpoint.{asked}") and not job.is_true(
            f"checkpoint.{needs}", default=True
        ):
            raise InvalidConfig(
                f"checkpoint.{asked} = true: safetensors of Hugging Face hold a model and nothing "
                f"else; write checkpoint.{needs} = true"
            )
        if job.is_true(f"checkpoint.{asked}") and not _has_safetensors():
            raise InvalidConfig(
                f"checkpoint.{asked} = true needs a package that is not installed: pip install "
                "safetensors"
            )


def _has_safetensors() -> bool:
    try:
        importlib.import_module("safetensors")
    except ImportError:
        return False
    return True


def _check_initial(job: JobFile) -> None:
    """Refuse initial weights that are missing, or are less than the job loads."""
    path = job.read("checkpoint.initial_load_path")
    if job.is_true("checkpoint.initial_load_in_hf"):
        key = "checkpoint.initial_load_path" if path else "model.hf_assets_path"
        assets = Path(str(path or job.read("model.hf_assets_path", "./tests/assets/tokenizer")))
        if not any(assets.glob("*.safetensors")):
            raise InvalidConfig(
                f"checkpoint.initial_load_in_hf = true, and {key} = {str(assets)!r} holds no "
                ".safetensors; write the folder of a model of Hugging Face"
            )
        return
    if not path:
        return
    if not (Path(path) / METADATA).is_file():
        instead = "; write the folder of a step, as outputs/checkpoint/step-500"
        if any(Path(path).glob("*.safetensors")):
            instead = " but safetensors; write checkpoint.initial_load_in_hf = true"
        raise InvalidConfig(
            f"checkpoint.initial_load_path = {str(path)!r} holds no checkpoint{instead}"
        )
    if not job.is_true("checkpoint.initial_load_model_only", default=True) and not _is_whole(
        job, Path(path)
    ):
        raise InvalidConfig(
            f"checkpoint.initial_load_path = {str(path)!r} holds the model only, as the last step "
            "of a finished job does; write checkpoint.initial_load_model_only = true"
        )


def _check_start(job: JobFile, folder: Path) -> None:
    """Refuse to begin with other weights than the job names: torchtitan looks at one place only."""
    if job.read("checkpoint.initial_load_path") or job.is_true("checkpoint.initial_load_in_hf"):
        raise InvalidConfig(
            f"{folder} exists and has no complete checkpoint: torchtitan would load nothing, and "
            f"would ignore checkpoint.initial_load_path and initial_load_in_hf; remove {folder}"
        )


def _steps(folder: Path) -> list[int]:
    """Return the steps that torchtitan finds."""
    found = (STEP.fullmatch(path.name) for path in folder.iterdir())
    kinds = (METADATA, HUGGING_FACE)
    return sorted(
        int(m[1]) for m in found if m and any((folder / m[0] / kind).is_file() for kind in kinds)
    )


def _is_whole(job: JobFile, step: Path) -> bool:
    """Whether a checkpoint has all states that the job loads."""
    excluded = job.read("checkpoint.exclude_from_loading") or []
    names = excluded.split(",") if isinstance(excluded, str) else excluded
    if (step / METADATA).is_file() and set(names) >= BESIDE_MODEL:
        return True
    return (step / METADATA).is_file() and WHOLE in (step / METADATA).read_bytes()
