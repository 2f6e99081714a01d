"""What collectives of each message size take, and what that says of the links between ranks.

Contract
    A rate is of what leaves a rank, by the slowest rank, in medians. Of a link there are told the
    time of the least message and the rates of the greatest. Ranks of a node are measured apart from
    all where there are several nodes, in a group of each node, all nodes at once.
    `num_bytes` is what a rank sends of its own, its part for itself among it: of an exchange its
    whole message, of a gather its shard, of a reduce-scatter all that it gives.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist

from moe_compile.check.sections import Record, say
from moe_compile.check.team import Team, slowest
from moe_compile.hardware.measure import elapsed_s, synchronize
from moe_compile.testing.process_groups import rank_device

NEEDS_S: Final = 20.0
"""What one collective takes at all sizes."""
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


def node_ranks(num_ranks: int) -> int:
    """Return how many ranks share a machine: torchrun says so, by itself all do."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))


def check_links(team: Team, message_bytes: tuple[int, ...], repeats: int, node_ranks: int) -> None:
    """Measure every collective; `node_ranks` is how many ranks share a machine.

    Messages go from the least to the greatest, each `repeats` times.
    """
    for num_ranks in sorted({node_ranks, team.num_ranks}):
        for name in NAMES:
            team.run(
                f"{name}, {num_ranks} ranks",
                partial(_times, name, message_bytes, repeats, num_ranks),
                partial(judge_times, name, num_ranks, message_bytes),
                needs_s=NEEDS_S,
            )


def _times(
    name: str, message_bytes: tuple[int, ...], repeats: int, num_ranks: int
) -> list[list[float]]:
    """Return the seconds of each size, of several runs, of the slowest rank."""
    group = None if num_ranks == dist.get_world_size() else _of_node(num_ranks)
    return [seconds_alone(launcher(name, n, group), repeats) for n in message_bytes]


def _of_node(num_ranks: int) -> Any:
    """Return the group of as many ranks that follow one another, this rank's among all."""
    group, _ = dist.new_subgroups(num_ranks)
    return group


def judge_times(
    name: str,
    num_ranks: int,
    message_bytes: tuple[int, ...],
    record: Record,
    found: list[list[list[float]]],
) -> None:
    """Record a row for each size; what took no time, or no number, fails."""
    rates = []
    for place, num_bytes in enumerate(message_bytes):
        seconds = max(statistics.median(times[place]) for times in found)  # of groups side by side
        is_time = math.isfinite(seconds) and seconds > 0.0
        why = f"{num_bytes} bytes took {seconds} s"
        if not record.expect(is_time, f"{name}, {num_ranks} ranks", why):
            return
        rates.append(leaving_bytes(num_bytes, num_ranks) / seconds / 1e9)
        record.add_row(
            {
                "collective": name,
                "ranks": num_ranks,
                "bytes": num_bytes,
                "us": 1e6 * seconds,
                "gb_per_s": rates[-1],
            }
        )
    say(f"links: {name}, {num_ranks} ranks: up to {max(rates):.3g} GB/s")


def link_of(rows: Sequence[Mapping[str, Any]], num_ranks: int) -> dict[str, float]:
    """Return what a section's rows say of the link among so many ranks.

    Raises LookupError where a collective was not measured.
    """

    def of(name: str) -> list[Mapping[str, Any]]:
        chosen = [r for r in rows if (r["collective"], r["ranks"]) == (name, num_ranks)]
        if not chosen:
            raise LookupError(f"{name} among {num_ranks} ranks")
        return sorted(chosen, key=lambda row: row["bytes"])

    exchange, gather = of(EXCHANGE), of(GATHER)
    return {
        "latency_us": exchange[0]["us"],
        "gb_per_s": exchange[-1]["gb_per_s"],
        "gather_gb_per_s": gather[-1]["gb_per_s"],
    }
