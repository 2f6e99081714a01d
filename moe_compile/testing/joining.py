"""Join the default process group on a device of this rank's own, and ask which device that is.

Contract
    On GPUs a rank has the device of its number on the machine.
"""

from __future__ import annotations

import datetime
import os
from typing import Final

import torch
import torch.distributed as dist

BACKENDS: Final = {"cpu": "gloo", "cuda": "nccl"}
"""Of a device, where no other is asked for."""
WORKSPACE: Final = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""With which cuBLAS is deterministic; read when it is first called."""


def join(
    store: dist.Store,
    rank: int,
    num_ranks: int,
    *,
    device: str = "cpu",
    local_rank: int = 0,
    timeout_s: float = 1800.0,
    backend: str = "",
) -> None:
    """Make the default group; `local_rank` is the number of this rank's GPU on its machine."""
    place = None
    if device == "cuda":
        place = torch.device("cuda", local_rank)
        torch.cuda.set_device(place)
    dist.init_process_group(
        backend or BACKENDS[device],
        store=store,
        rank=rank,
        world_size=num_ranks,
        timeout=datetime.timedelta(seconds=timeout_s),
        device_id=place,
    )


def be_deterministic() -> None:
    """Have torch compute the same bits in every run, and fill new memory with NaN.

    On a GPU sums of rows in any order would differ from run to run. What reads memory that nobody
    wrote shows.
    """
    os.environ.setdefault(*WORKSPACE)
    torch.use_deterministic_algorithms(True, warn_only=True)


def rank_device() -> torch.device:
    """Return the device of this rank's tensors: its GPU in a group of NCCL, else the processor."""
    if dist.is_initialized() and "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
