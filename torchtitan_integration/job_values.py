"""Values of a job that are of the right kind and cannot train, said before a process starts.

Contract
    Every fault names the key, its value, and what to write. torch is imported only to look up a
    name that is not of the common ones.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final

from moe_compile.errors import InvalidConfig, nearest
from moe_compile.hardware import load_profile
from torchtitan_integration.job_file import JobFile, names_in_list
from torchtitan_integration.layout import DEGREES, KEYS

LEAST: Final[Mapping[str, int]] = {
    "training.steps": 1,
    "training.seq_len": 1,
    "training.local_batch_size": 1,
    "training.gc_freq": 1,
    "metrics.log_freq": 1,
    "checkpoint.interval": 1,
    "checkpoint.keep_latest_k": 0,
    "validation.freq": 1,
    "validation.seq_len": 1,
    "validation.local_batch_size": 1,
    "profiling.profile_freq": 1,
    "lr_scheduler.warmup_steps": 0,
    "parallelism.pipeline_parallel_microbatch_size": 1,
    "training.global_batch_size": 1,
    "validation.steps": 1,
    "checkpoint.load_step": 0,
    **{KEYS[name]: 1 for name in (*DEGREES, "ep", "etp")},
}
"""The least value of a whole number."""
OPEN: Final = frozenset(
    {"training.global_batch_size", "validation.steps", "checkpoint.load_step", KEYS["dp_shard"]}
)
"""Keys of these that -1 leaves open."""
NOT_NEGATIVE: Final = (
    "optimizer.lr",
    "optimizer.eps",
    "optimizer.weight_decay",
    "training.max_norm",
)
LOCAL: Final = "training.local_batch_size"
MICRO: Final = "parallelism.pipeline_parallel_microbatch_size"
GLOBAL: Final = "training.global_batch_size"
SIZES: Final[Mapping[str, int]] = {LOCAL: 8, MICRO: 1, GLOBAL: -1}
"""Their defaults in torchtitan."""
BACKENDS: Final = ("inductor", "eager", "aot_eager", "megamoe")
NEEDS_DEVICE: Final = ("profiling.enable_profiling", "profiling.enable_memory_snapshot")


def value_faults(job: JobFile) -> Iterator[str]:
    """Yield what is wrong with numbers and names of a job."""
    yield from _numbers(job)
    yield from _batches(job)
    yield from _names(job)


def run_faults(job: JobFile, *, on_cpu: bool) -> Iterator[str]:
    """Yield what keeps a job from running on this machine: folders, and a device it lacks."""
    yield from _folders(job)
    for key in NEEDS_DEVICE:
        if on_cpu and str(job.read(key, False)).lower() == "true":
            yield f"{key} is true, and torchtitan profiles GPUs alone; write {key} = false on a CPU"
    if on_cpu and job.read("checkpoint.async_mode") == "async_with_pinned_mem":
        yield (
            'checkpoint.async_mode is "async_with_pinned_mem", and memory is pinned for a GPU; '
            'write checkpoint.async_mode = "async" on a CPU'
        )


def _numbers(job: JobFile) -> Iterator[str]:
    for key, least in LEAST.items():
        value = _number(job, key)
        if value is None or value >= least or (value == -1 and key in OPEN):
            continue
        instead = f"{least} or more" + (", or -1" if key in OPEN else "")
        yield f"{key} is {value}; write {instead}"
    for key in NOT_NEGATIVE:
        value = _number(job, key, float)
        if value is not None and not value >= 0:
            yield f"{key} is {value}; write a number of at least 0"


def _number(job: JobFile, key: str, kind: Callable[[str], Any] = int) -> Any:
    """Return a number of the job; None where it is left out, or is no number."""
    try:
        return kind(str(job.read(key, "")))
    except ValueError:
        return None


def _batches(job: JobFile) -> Iterator[str]:
    sizes = {key: _number(job, key) or least for key, least in SIZES.items()}
    degrees = {name: _number(job, KEYS[name]) or 1 for name in DEGREES}
    is_piped = degrees["pp"] > 1
    key = MICRO if is_piped else LOCAL
    parts = _number(job, "megamoe.batch_parts") or 1
    if min(sizes[LOCAL], sizes[MICRO]) < 1:
        return
    if parts > sizes[key]:
        yield (
            f"megamoe.batch_parts is {parts}, and a batch of {key} = {sizes[key]} has fewer "
            f"sequences; write {key} = {parts} or more, or megamoe.batch_parts = {sizes[key]}"
        )
    validated = _number(job, "validation.local_batch_size") or 8
    if str(job.read("validation.enable", False)).lower() == "true" and parts > validated:
        yield (
            f"megamoe.batch_parts is {parts}, and validation.local_batch_size = {validated} has "
            f"fewer sequences; write validation.local_batch_size = {parts} or more"
        )
    if is_piped and sizes[LOCAL] % sizes[MICRO]:
        yield f"{LOCAL} is {sizes[LOCAL]}; write a multiple of {MICRO} = {sizes[MICRO]}"
    shards = _number(job, KEYS["dp_shard"]) or -1
    whole = sizes[LOCAL] * shards * degrees["dp_replicate"]
    if sizes[GLOBAL] > 0 and whole > 0 and sizes[GLOBAL] % whole:
        yield f"{GLOBAL} is {sizes[GLOBAL]}; write a multiple of {whole}, what ranks take at once"


def _names(job: JobFile) -> Iterator[str]:
    yield from _backend(str(job.read("compile.backend", BACKENDS[0])))
    yield from _module(str(job.read("experimental.custom_import", "")))
    hardware = str(job.read("megamoe.hardware", "detect"))
    if hardware != "detect":
        yield from said(lambda: load_profile(hardware))
    if passes := names_in_list(job.read("megamoe.disable_passes", [])):
        pipeline: Any = importlib.import_module("passes.pipeline")  # imports torch
        yield from said(lambda: pipeline.check_names(passes))
    transport = str(job.read("megamoe.transport", "functional"))
    if transport != "functional":
        outside: Any = importlib.import_module("passes.outside")
        yield from said(lambda: outside.find_transport(transport))


def said(check: Callable[[], object]) -> Iterator[str]:
    """Yield what `check` raises as InvalidConfig."""
    try:
        check()
    except InvalidConfig as error:
        yield str(error)


def _backend(name: str) -> Iterator[str]:
    added = [entry.name for entry in entry_points(group="torch_dynamo_backends")]
    if name in (*BACKENDS, *added):
        return
    compiler: Any = importlib.import_module("torch.compiler")
    known = {*BACKENDS, *added, *compiler.list_backends(exclude_tags=())}
    if name not in known:
        yield f"compile.backend is {name!r}, which torch does not know.{nearest(name, known)}"


def _module(name: str) -> Iterator[str]:
    """Yield that there is no module `name`; the module itself is not run."""
    sys.path.append(str(Path.cwd()))  # as `python -m`, by which ranks are started, has it
    try:
        if name and importlib.util.find_spec(name) is None:
            yield f"experimental.custom_import = {name!r}: there is no such module"
    except ImportError as error:
        yield f"experimental.custom_import = {name!r}: {error}"
    finally:
        sys.path.pop()


def _folders(job: JobFile) -> Iterator[str]:
    folder = Path(str(job.read("job.dump_folder", "outputs")))
    if why := _why_not_written(folder):
        yield f"job.dump_folder = {str(folder)!r} cannot be written: {why}"
    if not (named := str(job.read("megamoe.report", ""))):
        return
    if Path(named).is_dir():
        yield f"megamoe.report = {named!r} is a folder; write the name of a file"
    elif why := _why_not_written(Path(named).parent):
        yield f"megamoe.report = {named!r} cannot be written: {why}"


def _why_not_written(folder: Path) -> str:
    """Return why no file can be made in a folder that may not exist yet, "" where one can."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        return f"{there} is a file"
    return "" if os.access(there, os.W_OK | os.X_OK) else f"{there} may not be written to"
