"""Exchanges and gathers of so many bytes, and their times on this rank and the slowest.

Contract
    `num_bytes` is what a rank sends of its own, its part for itself among it: of an exchange its
    whole message, of a gather its shard, of a reduce-scatter all that it gives.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist

from moe_compile.check.device_time import slowest, synchronize
from moe_compile.hardware.measure import elapsed_s
from moe_compile.testing.process_groups import rank_device

EXCHANGE: Final = "all-to-all"
GATHER: Final = "all-gather"
SCATTER: Final = "reduce-scatter"
NAMES: Final = (EXCHANGE, GATHER, SCATTER)
ITEM_BYTES: Final = 2
"""Of a bfloat16."""


def launcher(name: str, num_bytes: int, group: Any = None) -> Callable[[], Any]:
    """Return what launches a collective and returns its handle."""
    num_ranks, place = dist.get_world_size(group), rank_device()
    count = max(num_bytes // ITEM_BYTES // num_ranks, 1) * num_ranks

    def new(size: int) -> torch.Tensor:
        return torch.ones(size, device=place, dtype=torch.bfloat16)

    if name == EXCHANGE:
        given, got = new(count), new(count)
        return lambda: dist.all_to_all_single(got, given, group=group, async_op=True)
    if name == GATHER:
        shard, whole = new(count // num_ranks), new(count)
        return lambda: dist.all_gather_into_tensor(whole, shard, group=group, async_op=True)
    shard, whole = new(count // num_ranks), new(count)
    return lambda: dist.reduce_scatter_tensor(shard, whole, group=group, async_op=True)


def leaving_bytes(num_bytes: int, num_ranks: int) -> float:
    """Return the bytes that leave a rank, of so many of all ranks together for a gather."""
    return num_bytes * (num_ranks - 1) / num_ranks


def seconds_alone(launch: Callable[[], Any], repeats: int) -> list[float]:
    """Return the seconds of each of `repeats` runs, of the slowest rank, one after another."""
    device = rank_device().type
    for _ in range(2):
        launch().wait()
    return slowest([_once(device, launch) for _ in range(repeats)])


def _once(device: str, launch: Callable[[], Any]) -> float:
    synchronize(device)
    dist.barrier()
    if device == "cpu":
        began = time.perf_counter()
        launch().wait()
        return time.perf_counter() - began
    return elapsed_s(device, lambda: launch().wait())
