"""Programs the Inductor tests run in processes of their own; prints one JSON object."""

import difflib
import json
import re
import sys

import torch
import torch.distributed as dist
from torch._inductor.utils import run_fw_bw_and_get_code

from moe_compile.testing.wrapper_order import event_letters, wrapper_events
from tests.layers import GroupedExperts

NUMBERED = re.compile(r"# AOT ID: .*")  # counts the compilations of the process


def counters():
    """Return what the caches of graphs, and of whole programs, AOTAutograd's, said."""
    graphs = torch._dynamo.utils.counters["inductor"]
    programs = torch._dynamo.utils.counters["aot_autograd"]
    kinds = ("hit", "miss", "bypass")
    return {
        **{kind: graphs.get(f"fxgraph_cache_{kind}", 0) for kind in kinds},
        **{f"program_{kind}": programs.get(f"autograd_cache_{kind}", 0) for kind in kinds},
    }


def compiled_layer(options):
    """Return the counters after a layer's forward and backward pass, and their generated code."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    layer = GroupedExperts(16, 24, 4, 2, dist.group.WORLD)
    compiled = torch.compile(layer, backend="megamoe", fullgraph=True, options=options)
    x = torch.randn(32, 16, dtype=torch.bfloat16, requires_grad=True)
    _, codes = run_fw_bw_and_get_code(lambda: compiled(x))
    return counters(), codes


def cached(*choices):
    """Return what Inductor's cache said of a layer's two graphs, for each choice of options."""
    return [compiled_layer(options)[0] for options in choices]


def first(options):
    """Return that of the first process, the order of the layer's events, and a dense layer's code.

    The order is launches, waits and GEMMs of the forward and the backward wrapper, a letter each.
    """
    counted, codes = compiled_layer(options)
    letters = [event_letters(wrapper_events(code)) for code in codes]
    return {"cache": counted, "order": letters, "dense": without_regions()}


def without_regions():
    """Return how the generated code of a dense layer differs, by Inductor and by us."""
    dense = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.SiLU(), torch.nn.Linear(16, 8))
    codes = []
    for backend in ("inductor", "megamoe"):
        torch._dynamo.reset()
        compiled = torch.compile(dense, backend=backend)
        with torch._inductor.config.patch(fx_graph_cache=False):
            x = torch.randn(4, 8, requires_grad=True)
            codes.append(run_fw_bw_and_get_code(lambda f=compiled, x=x: f(x))[1])
    plain, ours = ([NUMBERED.sub("", code) for code in both] for both in codes)
    lines = difflib.unified_diff("".join(plain).splitlines(), "".join(ours).splitlines(), n=0)
    return {"difference": list(lines), "graphs": len(plain)}


if __name__ == "__main__":
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    program = {"cached": cached, "first": first}[sys.argv[1]]
    print("RESULT", json.dumps(program(*map(json.loads, sys.argv[2:]))))
    dist.destroy_process_group()
