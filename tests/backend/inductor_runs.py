"""Programs the Inductor tests run in processes of their own; prints one JSON object."""

import difflib
import json
import re
import sys

import torch
import torch.distributed as dist
from torch._inductor.utils import run_fw_bw_and_get_code

from moe_compile.graph.wrapper_order import event_letters, wrapper_events
from tests.layers import GroupedExperts

NUMBERED = re.compile(r"# AOT ID: .*")  # counts the compilations of the process


def counters():
    found = torch._dynamo.utils.counters["inductor"]
    return {key: found.get(f"fxgraph_cache_{key}", 0) for key in ("hit", "miss", "bypass")}


def cached(options):
    """Compile and run a layer once; return what Inductor's cache said of its two graphs."""
    layer = GroupedExperts(16, 24, 4, 2, dist.group.WORLD)
    compiled = torch.compile(layer, backend="megamoe", fullgraph=True, options=options)
    x = torch.randn(32, 16, dtype=torch.bfloat16, requires_grad=True)
    compiled(x).sum().backward()
    return counters()


def order(options):
    """Return launches, waits and GEMMs of the forward and the backward wrapper, one letter each."""
    layer = GroupedExperts(16, 24, 4, 2, dist.group.WORLD)
    compiled = torch.compile(layer, backend="megamoe", fullgraph=True, options=options)
    x = torch.randn(32, 16, dtype=torch.bfloat16, requires_grad=True)
    with torch._inductor.config.patch(force_disable_caches=True):
        _, codes = run_fw_bw_and_get_code(lambda: compiled(x))
    return [event_letters(wrapper_events(code)) for code in codes]


def without_regions(options):
    """Return the generated code of a dense layer, by Inductor and by us."""
    dense = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.SiLU(), torch.nn.Linear(16, 8))
    codes = []
    for backend in ("inductor", "megamoe"):
        torch._dynamo.reset()
        compiled = torch.compile(dense, backend=backend, options=options or None)
        with torch._inductor.config.patch(force_disable_caches=True):
            x = torch.randn(4, 8, requires_grad=True)
            codes.append(run_fw_bw_and_get_code(lambda f=compiled, x=x: f(x))[1])
    plain, ours = ([NUMBERED.sub("", code) for code in both] for both in codes)
    lines = difflib.unified_diff("".join(plain).splitlines(), "".join(ours).splitlines(), n=0)
    return {"difference": list(lines), "graphs": len(plain)}


if __name__ == "__main__":
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    program = {"cached": cached, "order": order, "without_regions": without_regions}[sys.argv[1]]
    print("RESULT", json.dumps(program(json.loads(sys.argv[2]))))
    dist.destroy_process_group()
