"""What four ranks do on emulated links of two levels, two to a node; each returns plain data."""

from pathlib import Path

import torch
import torch._dynamo
import torch.distributed as dist
from torch.distributed._functional_collectives import all_gather_tensor_autograd

import moe_compile
from benchmarks.link.cases import Case
from benchmarks.link.emulated_link import make_emulated_groups
from benchmarks.link.layer import MoELayer
from benchmarks.link.link_model import NO_LINK, Topology, Traffic
from benchmarks.link.post_board import PostBoard
from moe_compile.testing.equivalence import differing_tensors
from tests.benchmarks.link_scenarios import LAUNCH, STATE, WAIT, HandClock
from tests.node_ranks import in_two_hops

SMALL = Case(name="small", num_ranks=4, tokens=16, experts=8, width=64, hidden=64, top_k=4)


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


def two_hops(rank):
    """Compile a layer in two hops; return, by kind of group, whether bytes went between nodes and
    inside one, and which values differ from eager's."""
    torch._dynamo.reset()
    links = fresh()
    wire = links[0].wire
    wire.events = []
    torch.manual_seed(rank)
    x, gradient = (torch.randn(SMALL.tokens, SMALL.width).bfloat16() for _ in range(2))
    options = {"megamoe.nodes": "exact", "megamoe.strict": True, "megamoe.codegen": "fx"}
    with in_two_hops() as left:
        found = differing_tensors(lambda: MoELayer(SMALL, links[0]), [(x, gradient)], options)
    launched = [event for event in wire.events if event.kind == "launch"]
    wire.events = None
    kinds = {
        kind: tuple(
            any(getattr(e, level) for e in launched if e.span is kind)
            for level in ("wire_bytes", "inside_bytes")
        )
        for kind in {event.span for event in launched}
    }
    return kinds, [*found, *left]
