"""Start the ranks of a job on this machine, and end them on a signal.

Contract
    The exit status is torchrun's. An interrupt, a hang-up or a termination ends every rank:
    torchrun gets one signal, and kills ranks that do not end within its own limit of 30 seconds.
    torchrun is not killed, so that it may end its ranks. Where this process is killed torchrun gets
    a signal as well, and where torchrun is killed so are the ranks (Linux).
    Variables that ranks on GPUs need are set where the user has not set them, and printed.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Final

import pynvml

from moe_compile.check.parent import with_parent

RANK: Final = "torchtitan_integration.rank"
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ON_GPUS: Final[Mapping[str, str]] = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "TORCH_NCCL_HIGH_PRIORITY": "1",
}
"""Variables of ranks on GPUs, unless the user set them; docs/first-run.md has the reasons."""
OTHER_NAMES: Final[Mapping[str, str]] = {"PYTORCH_CUDA_ALLOC_CONF": "PYTORCH_ALLOC_CONF"}
"""Other names by which torch reads the same setting."""


def train_command(
    config: Path, ranks: int, overrides: list[str], logs: Path, *, shown_rank: int = 0
) -> list[str]:
    """Return the torchrun command.

    `logs` is the folder for the ranks' output; `shown_rank` prints on this terminal as well.
    """
    module = "torchtitan_integration." + ("cpu_launcher" if uses_cpu(ranks) else "train")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    shown = ["--local-ranks-filter", str(shown_rank), "--role", "rank"]
    shown += ["--tee", "3", "--log-dir", str(logs)]
    job = ["-m", RANK, module, "--job.config_file", str(config), *overrides]
    return [*torchrun, "--nproc-per-node", str(ranks), *shown, *job]


def uses_cpu(ranks: int) -> bool:
    """Return whether the ranks train on the CPU: there are fewer GPUs than ranks."""
    return num_gpus() < ranks


def num_gpus() -> int:
    """Return the number of GPUs this process may use."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    try:
        pynvml.nvmlInit()
        try:
            return int(pynvml.nvmlDeviceGetCount())
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return 0


def settings_on_gpus(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for ranks on GPUs that an environment lacks."""
    return {
        name: value
        for name, value in ON_GPUS.items()
        if not {name, OTHER_NAMES.get(name, name)} & environment.keys()
    }


def allow_open_files() -> int:
    """Raise the limit of open files of this process and its children; return the limit.

    Every connection of a rank is one, and the host of the ranks' store has one to each rank.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


def run(
    command: list[str],
    show: Callable[[Iterable[str]], None],
    settings: Mapping[str, str] | None = None,
) -> int:
    """Run torchrun; return its status, or 128 + a signal's number.

    `show` is given torchrun's output lines as they come. `settings` join its environment.
    """
    environment = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **os.environ}
    environment |= settings or {}
    received: list[int] = []
    process: subprocess.Popen[str] | None = None

    def end(number: int, frame: FrameType | None) -> None:
        del frame
        if process is not None and not received:
            process.terminate()
        received.append(number)

    before = {number: signal.signal(number, end) for number in SIGNALS}
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            preexec_fn=with_parent(signal.SIGTERM),
        )
        if received:
            process.terminate()
        assert process.stdout is not None
        show(process.stdout)
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 + received[0] if received else status
