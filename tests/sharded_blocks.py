"""Transformer blocks whose ranks have a part of every sequence, and share out what is routed."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import (
    all_gather_tensor_autograd,
    reduce_scatter_tensor_autograd,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.batch_layers import HEADS, WIDTH, Block

SEQUENCE = 1


class GatheredSequence(Block):
    """Gathers the sequence by collectives, and scatters sums over it: Megatron's form."""

    def __init__(self, layer, dtype=torch.float32):
        super().__init__(layer, dtype)
        self.out.bias = None

    def attend(self, x):
        whole = all_gather_tensor_autograd(x, SEQUENCE, dist.group.WORLD)
        heads = self.qkv(whole).view(*whole.shape[:-1], 3, HEADS, -1)
        heads = heads.chunk(dist.get_world_size(), 3)[dist.get_rank()]
        q, k, v = heads.unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mine = self.out.weight.chunk(dist.get_world_size(), 1)[dist.get_rank()]
        partial = F.linear(found.transpose(1, 2).flatten(2), mine)
        return reduce_scatter_tensor_autograd(partial, "sum", SEQUENCE, dist.group.WORLD)

    def forward(self, x):
        x = x + self.attend(self.norms[0](x))
        whole = all_gather_tensor_autograd(self.norms[1](x), SEQUENCE, dist.group.WORLD)
        rows = self.moe(whole.flatten(0, 1)).view(whole.shape)
        return x + self.added_up(rows)

    def added_up(self, rows):
        return reduce_scatter_tensor_autograd(rows, "sum", SEQUENCE, dist.group.WORLD)


class Attention(nn.Module):
    """Heads of a rank's own, on whole sequences; `parallelize_module` divides its projections."""

    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in "qkvo")

    def forward(self, x):
        q, k, v = (w(x) for w in (self.wq, self.wk, self.wv))
        q, k, v = (t.view(*t.shape[:2], -1, WIDTH // HEADS).transpose(1, 2) for t in (q, k, v))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(found.transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """Experts of class `layer` on the tokens of whole sequences, all of them on each rank."""

    def __init__(self, layer, dtype):
        super().__init__()
        self.layer = layer(WIDTH, WIDTH, 8, 2, dist.group.WORLD, dtype)

    def forward(self, x):
        return self.layer(x.flatten(0, 1)).view(x.shape)


class Sharded(nn.Module):
    """The same with `DTensor`s, as torchtitan lays its blocks out."""

    def __init__(self, layer, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)  # equal on all ranks
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.attention = Attention()
        self.to(dtype)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.moe = Experts(layer, dtype)
        split, whole = Shard(SEQUENCE), Replicate()
        plan = {
            "norms.0": SequenceParallel(),
            "norms.1": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=split, desired_input_layouts=whole),
            **{f"attention.w{name}": ColwiseParallel() for name in "qkv"},
            "attention.wo": RowwiseParallel(output_layouts=split),
            "moe": PrepareModuleInputOutput(
                input_layouts=split,
                desired_input_layouts=whole,
                use_local_input=True,
                output_layouts=Partial(),
                desired_output_layouts=split,
            ),
        }
        parallelize_module(self, mesh, plan)

    def forward(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.moe(self.norms[1](x))
