"""What four ranks do on emulated links of two levels, two to a node; each returns plain data."""

from pathlib import Path

import torch
import torch._dynamo
import torch.distributed as dist
from torch.distributed._functional_collectives import all_gather_tensor_autograd

import moe_compile
from benchmarks.link.emulated_link import make_emulated_groups
from benchmarks.link.link_model import NO_LINK, Topology, Traffic
from benchmarks.link.post_board import PostBoard
from tests.benchmarks.link_scenarios import LAUNCH, STATE, WAIT, HandClock


def open_links(rank, path):
    board = PostBoard(Path(path), rank, 4)
    links = make_emulated_groups(board, HandClock(), Topology(num_ranks=4, num_local=2))
    moe_compile.register_node_groups(*links, host=f"node {rank // 2}")
    STATE["links"] = links


def fresh():
    links = STATE["links"]
    links[0].wire.rate, links[0].wire.traffic = NO_LINK, Traffic()
    return links


def uneven(rank):
    """Exchange over all ranks, the node, equal places; tell what crossed, and if rows are right."""
    links, arrived = fresh(), []
    for link in links:
        ranks = dist.get_process_group_ranks(link)
        sends = [10 * rank + to for to in ranks]
        gets = [10 * sender + rank for sender in ranks]
        x = torch.full((sum(sends), 4), rank, dtype=torch.uint8)
        got = WAIT(LAUNCH(x, gets, sends, link.group_name))
        senders = torch.tensor(ranks).repeat_interleave(torch.tensor(gets))
        arrived.append(torch.equal(got[:, 0].long(), senders))
    return links[0].wire.traffic.crossings, arrived


def gather(rank):
    links = fresh()
    WAIT(all_gather_tensor_autograd(torch.zeros(100, dtype=torch.uint8), 0, links[0]))
    (crossing,) = links[0].wire.traffic.crossings
    return crossing
