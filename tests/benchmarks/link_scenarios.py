"""What two ranks do on an emulated link whose clock is set by hand; each returns plain numbers."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import (
    all_gather_tensor_autograd,
    all_to_all_single_autograd,
    reduce_scatter_tensor_autograd,
)

from benchmarks.link.emulated_link import make_emulated_group
from benchmarks.link.link_model import LinkRate, Traffic
from benchmarks.link.post_board import PostBoard
from benchmarks.link.step import largest

LAUNCH = torch.ops._c10d_functional.all_to_all_single
WAIT = torch.ops._c10d_functional.wait_tensor
STATE = {}


class HandClock:
    """Moves only when told."""

    name = "hand"

    def __init__(self):
        self.time = 0.0

    def now(self):
        return self.time

    def wait_until(self, moment):
        self.time = max(self.time, moment)

    def align(self, moment):
        self.time = moment


def open_link(rank, path):
    board = PostBoard(Path(path), rank, dist.get_world_size())
    STATE["link"] = make_emulated_group(board, HandClock())


def run(rank, scenario, latency_s, bytes_per_s):
    """Run a scenario below; returns (its result, time it took, bytes, exchanges)."""
    link = STATE["link"]
    link.wire.rate = LinkRate(latency_s=latency_s, bytes_per_s=bytes_per_s)
    link.wire.traffic = Traffic()
    began = largest(link.wire.clock.now())
    link.wire.clock.align(began)
    result = scenario(rank, link, began)
    took = link.wire.clock.now() - began
    return result, took, link.wire.traffic.wire_bytes, link.wire.traffic.num_exchanges


def _exchange(link, rows, width=4):
    """Every rank sends `rows` rows of `width` bytes to each rank."""
    x = torch.zeros(rows * link.size(), width, dtype=torch.uint8)
    splits = [rows] * link.size()
    return LAUNCH(x, splits, splits, link.group_name)


def in_turn(rank, link, began, steps):
    """Do `steps`, and return when each wait ended.

    A step launches an exchange or a gather of 100 bytes for the other rank, computes for so many
    seconds of each rank, or waits for the launch of its number.
    """
    flying, ends = [], []
    for step in steps:
        if step == "exchange":
            flying.append(_exchange(link, 25))
        elif step == "gather":
            flying.append(
                all_gather_tensor_autograd(torch.zeros(25, 4, dtype=torch.uint8), 0, link)
            )
        elif isinstance(step, tuple):
            link.wire.clock.time += step[rank]
        else:
            WAIT(flying[step])
            ends.append(link.wire.clock.now() - began)
    return ends


def uneven(rank, link, began):
    """Rank 0 keeps 7 rows and sends 100 of 4 bytes; rank 1 keeps 50 and sends 10."""
    sends = [[7, 100], [10, 50]]
    gets = [sends[r][rank] for r in range(2)]
    x = torch.full((sum(sends[rank]), 4), rank, dtype=torch.uint8)
    x[:, 1] = torch.arange(len(x)) % 256
    got = WAIT(LAUNCH(x, gets, sends[rank], link.group_name))
    return got.tolist()


def gradient(rank, link, began):
    x = torch.ones(3, 2, requires_grad=True)
    splits = [[1, 2], [2, 1]]
    got = all_to_all_single_autograd(x, splits[rank], splits[rank], link)
    (got * (rank + 1)).sum().backward()
    return x.grad.tolist()


def gather(rank, link, began):
    """50 rows of 4 bytes from each rank."""
    x = torch.arange(200, dtype=torch.float32).to(torch.uint8).view(50, 4) + rank
    return WAIT(all_gather_tensor_autograd(x, 0, link)).tolist()


def reduce(rank, link, began):
    """25 rows of 4 bytes for each rank."""
    x = (torch.arange(25.0 * link.size()) * (rank + 1)).view(-1, 1)
    return WAIT(reduce_scatter_tensor_autograd(x, "sum", 0, link)).flatten().tolist()
