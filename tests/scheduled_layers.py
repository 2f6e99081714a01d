"""A MoE layer chunked by hand, and the graphs AOTAutograd makes of it, for tests of scheduling."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

from moe_compile.graph.query import is_launch, is_wait, overload_name

c10d = torch.ops._c10d_functional


def one_rank_group():
    """Return the name of a one-rank gloo group; collectives run for real, in this process."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    return dist.group.WORLD.group_name


def exchange(x, outs, ins, group):
    return c10d.wait_tensor(c10d.all_to_all_single(x, outs, ins, group))


def letters(graph):
    """L launch, W wait, m matrix product, in graph order."""
    calls = [n for n in graph.nodes if n.op == "call_function"]
    kinds = ["L" if is_launch(n) else "W" if is_wait(n) else overload_name(n) for n in calls]
    return "".join("m" if k.endswith("mm") else k for k in kinds if k in "LW" or k.endswith("mm"))


class ChunkedMoE(nn.Module):
    """dispatch c -> experts c -> combine c for c in range(chunks), and a shared expert."""

    def __init__(self, hidden, inner, experts, top_k, group, chunks, ranks=1, shared=0):
        super().__init__()
        self.experts, self.top_k, self.group = experts, top_k, group
        self.chunks, self.ranks, self.local = chunks, ranks, experts // ranks
        dtype = torch.bfloat16
        self.router = nn.Parameter(torch.randn(hidden, experts, dtype=dtype) * 0.2)
        shape = (self.local, hidden, inner)
        self.w1 = nn.Parameter(torch.randn(shape, dtype=dtype) * hidden**-0.5)
        self.w3 = nn.Parameter(torch.randn(shape, dtype=dtype) * hidden**-0.5)
        self.w2 = nn.Parameter(torch.randn(self.local, inner, hidden, dtype=dtype) * inner**-0.5)
        self.up = nn.Linear(hidden, shared, bias=False, dtype=dtype) if shared else None
        self.down = nn.Linear(shared, hidden, bias=False, dtype=dtype) if shared else None

    def forward(self, x):
        n, r, e = self.chunks, self.ranks, self.local // self.chunks
        scores, chosen = torch.topk(torch.softmax((x @ self.router).float(), -1), self.top_k, -1)
        by_chunk = chosen.reshape(-1, 1) // self.local * e + chosen.reshape(-1, 1) % e
        by_chunk = by_chunk + chosen.reshape(-1, 1) % self.local // e * (r * e)
        order = torch.argsort(by_chunk.view(-1), stable=True)
        counts = (by_chunk == torch.arange(self.experts)[None]).sum(0).view(n, r, e)
        received = exchange(counts.transpose(0, 1).contiguous(), [1] * r, [1] * r, self.group)
        ins = counts.sum(2).view(-1).tolist()
        outs = received.sum(2).t().reshape(-1).tolist()
        per_chunk = [(ins[c * r : c * r + r], outs[c * r : c * r + r]) for c in range(n)]
        rows = torch.split(x[order // self.top_k], [sum(i) for i, _ in per_chunk])
        results = []
        for c, (send, receive) in enumerate(per_chunk):
            mine = exchange(rows[c], receive, send, self.group)
            done = self.run_experts(mine, received[:, c], c * e, sum(receive))
            results.append(exchange(done, send, receive, self.group))
        weighted = torch.cat(results) * scores.view(-1)[order][:, None].to(x.dtype)
        y = torch.zeros_like(x).index_add(0, order // self.top_k, weighted)
        return y if self.up is None else y + self.down(F.silu(self.up(x)))

    def run_experts(self, rows, counts, first, num_rows):
        e = counts.shape[1]
        ids = torch.arange(e).repeat(self.ranks)
        ids = torch.repeat_interleave(ids, counts.reshape(-1), output_size=num_rows)
        perm = torch.argsort(ids, stable=True)
        offs = torch.cumsum(counts.sum(0), 0, dtype=torch.int32)
        x = rows[perm]
        w1, w3, w2 = (w[first : first + e] for w in (self.w1, self.w3, self.w2))
        h = F.silu(torch._grouped_mm(x, w1, offs=offs)) * torch._grouped_mm(x, w3, offs=offs)
        y = torch._grouped_mm(h, w2, offs=offs)
        return torch.zeros_like(y).index_copy(0, perm, y)


def run_layer(layer, x, dynamic=None, edit=None):
    """Compile by AOTAutograd, run, and return (y, gradients, [forward graph, backward graph]).

    `edit(graph)` is called on each graph before it first runs, as Inductor's last hook would.
    """
    found = []

    def keep(gm, example_inputs):
        if edit is not None:
            edit(gm.graph)
            gm.recompile()
        found.append(gm)
        return make_boxed_func(gm.forward)

    backend = aot_autograd(
        fw_compiler=keep,
        bw_compiler=keep,
        decompositions=select_decomp_table(),
        partition_fn=min_cut_rematerialization_partition,
    )
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        y = torch.compile(layer, backend=backend, fullgraph=True, dynamic=dynamic)(x)
        gradients = torch.autograd.grad(y.float().square().sum(), [x, *layer.parameters()])
    return y, gradients, found


def post_grad_graphs(layer, x, dynamic=None):
    """Return the forward and the backward GraphModule of AOTAutograd for `layer(x)`."""
    return run_layer(layer, x, dynamic)[2]
