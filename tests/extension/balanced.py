"""Layers whose loss of balance is reduced over ranks late in the program, and runs of them."""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce

from moe_compile.backend import rewrite
from moe_compile.codegen import LevelPass, plan_of
from moe_compile.config import MegaMoEConfig
from moe_compile.entry_points import hash_of_packages
from moe_compile.errors import InvalidConfig
from moe_compile.graph.query import is_launch, overload_name
from moe_compile.hardware import load_profile
from moe_compile.plan.state import CompileState
from moe_compile.report.process_report import REPORT
from moe_compile.testing.equivalence import differing_tensors
from moe_compile.testing.rank_pool import RankPool
from passes.pipeline import JOINT, all_names
from tests.capture import dynamo_graphs
from tests.layers import GroupedExperts

NAME, ROUTE = "hoist_all_reduce", "route_exchanges"
WIDTH = 16


class Dense(nn.Module):
    """A layer that launches nothing but the reduction."""

    def __init__(self, group):
        super().__init__()
        shared = torch.Generator().manual_seed(0)
        self.router = nn.Parameter(torch.randn(WIDTH, 8, generator=shared).bfloat16())
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=shared).bfloat16())
        self.group = group

    def compute(self, x):
        return torch.tanh(x @ self.weight) @ self.weight

    def forward(self, x):
        probabilities = torch.softmax((x @ self.router).float(), -1)
        chosen = probabilities.argmax(-1)
        load = (chosen[:, None] == torch.arange(8)).float().mean(0)
        out = self.compute(x)
        load = all_reduce(load, "sum", self.group)
        return out + (load * probabilities.mean(0)).sum().to(out.dtype)


class Sparse(GroupedExperts):
    """One of experts, whose exchanges come before the reduction."""

    def __init__(self, group):
        super().__init__(WIDTH, 24, 8, 2, group)

    forward = Dense.forward

    def make_experts(self, width, hidden, rand):
        super().make_experts(width, hidden, rand)
        self.shared = nn.Parameter(rand(width, width) * width**-0.5)

    def compute(self, x):
        """Add a shared expert, whose work stands before the exchanges: a reduction can hide."""
        return torch.relu(x @ self.shared) @ self.shared + GroupedExperts.forward(self, x)


def run(rank, kind, options):
    """Return what differs from eager, where launches stand, and what is reported of the rewrite."""
    layer = {"dense": Dense, "sparse": Sparse}[kind]
    own = torch.Generator().manual_seed(rank)
    pair = [torch.randn(32, WIDTH, generator=own).bfloat16() for _ in range(2)]
    REPORT.compilations.clear()
    settings = {f"megamoe.{name}": value for name, value in options.items()}
    differs = differing_tensors(lambda: layer(dist.group.WORLD), [tuple(pair)], settings)
    passes = REPORT.as_dict()["passes"]
    reported, routed = ([p for p in passes if p["pass"] == name] for name in (NAME, ROUTE))
    said = {"reported": reported, "routed": routed, "lines": REPORT.as_dict()["rewrites"]}
    return {"differs": differs, **said, **planned(layer, pair[0], options)}


def planned(layer, x, options):
    (gm,) = dynamo_graphs(layer(dist.group.WORLD), x.requires_grad_())
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    state, _ = rewrite(gm, MegaMoEConfig(**values))
    nodes = [n for n in gm.graph.nodes if is_launch(n) or n.target is torch.tanh]
    order = [overload_name(n).partition("::")[2] or "tanh" for n in nodes]
    return {"order": order, "has_work": state.has_work, "digest": state.plan_digest}


def identity():
    """Return, as JSON, what identifies our passes in cache keys; the error where there is one."""
    try:
        all_names()
    except InvalidConfig as error:
        return json.dumps({"error": str(error)})
    try:
        load_profile("two_node")
    except InvalidConfig as error:
        unknown = str(error)
    state = CompileState(config=MegaMoEConfig(), hardware=load_profile("cpu"), has_work=True)
    return json.dumps(
        {
            "uuid": LevelPass((JOINT,), state, None).uuid(),
            "plan": plan_of(state),
            "packages": hash_of_packages(),
            "profile": load_profile("two_nodes").name,
            "unknown": unknown,
        }
    )


def run_all():
    """Return, as JSON, what each of the runs that the argument lists gave on two ranks."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    with RankPool(2) as ranks:
        return json.dumps([ranks.run(run, *which) for which in json.loads(sys.argv[1])])
