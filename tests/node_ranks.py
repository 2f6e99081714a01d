"""Ranks of one machine that stand for several nodes, and what they send from node to node."""

import contextlib

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from moe_compile.report.process_report import REPORT
from moe_compile.report.region_reports import IN_TWO_HOPS
from moe_compile.runtime.node_groups import register_node_groups
from moe_compile.testing.process_groups import rank_device

ALL_TO_ALL = torch.ops._c10d_functional.all_to_all_single.default


def seat(rank, num_nodes):
    """Divide all ranks into nodes, and say so."""
    num_local = dist.get_world_size() // num_nodes
    kind = rank_device().type
    mesh = init_device_mesh(kind, (num_nodes, num_local), mesh_dim_names=("node", "place"))
    node, cross = mesh.get_group("place"), mesh.get_group("node")
    register_node_groups(dist.group.WORLD, node, cross, host=f"host {rank // num_local}")


@contextlib.contextmanager
def in_two_hops(num_parts=1):
    """Yield a list that has, afterwards, the verdicts on what was compiled and has no two hops.

    In so many parts each, or in as many as there are experts of a rank.
    """
    left, before = [], len(REPORT.compilations)
    yield left
    compiled = REPORT.compilations[before:]
    left += ["nothing was compiled"] * (not compiled)
    regions = [r for c in compiled for r in c.regions]
    left += [r.verdict for r in regions if r.verdict != IN_TWO_HOPS]
    left += [f"{r.num_chunks} parts" for r in regions if r.num_chunks != num_parts]


class BytesBetweenNodes(TorchDispatchMode):
    """Adds up what all-to-alls send to ranks of other nodes: by type and width of a row."""

    def __init__(self, rank, num_nodes):
        super().__init__()
        self.num_local = dist.get_world_size() // num_nodes
        self.node = rank // self.num_local
        self.sent = {}

    @classmethod
    def is_infra_mode(cls):
        """Have Dynamo run what it has compiled."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is ALL_TO_ALL:
            rows, _, splits, group = args
            group = dist.distributed_c10d._resolve_process_group(group)
            ranks = dist.get_process_group_ranks(group)
            away = (r // self.num_local != self.node for r in ranks)
            num_away = sum(n for n, leaves in zip(splits, away, strict=True) if leaves)
            row = (rows.dtype, *rows.shape[1:])
            num_bytes = num_away * rows[:1].numel() * rows.element_size() if len(rows) else 0
            self.sent[row] = self.sent.get(row, 0) + num_bytes
        return func(*args, **(kwargs or {}))
