"""Dynamo graphs of small programs, as a backend sees them."""

import torch
from torch import fx

from moe_compile.config import MegaMoEConfig
from moe_compile.hardware import load_profile
from moe_compile.planning.state import CompileState


def dynamo_graphs(program, *inputs):
    """Return the graph of `program` and those of its higher-order operators' bodies."""
    captured = []

    def keep(gm, example_inputs):
        captured.append(gm)
        return gm

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        torch.compile(program, backend=keep, fullgraph=True)(*inputs)
    (gm,) = captured
    return [m for m in gm.modules() if isinstance(m, fx.GraphModule)]


def state(**options):
    config = MegaMoEConfig(**options)
    return CompileState(config=config, hardware=load_profile("cpu"))
