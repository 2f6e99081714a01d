"""With `recompute = "price"` bits are as without it: dropout, overwritten buffers, checkpoints."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from moe_compile.runtime.launch_records import executed_records
from tests.layers import GroupedExperts, LoopExperts
from tests.slow_parameters import slow_but

WIDTH, HIDDEN, EXPERTS, TOP_K = 32, 48, 4, 2


def normed(x):
    return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-3).to(x.dtype)


class Block(nn.Module):
    """A dense part that drops values, then experts; a buffer is read, then written."""

    def __init__(self, experts=GroupedExperts, dtype=torch.bfloat16):
        super().__init__()
        self.experts = experts(WIDTH, HIDDEN, EXPERTS, TOP_K, dist.group.WORLD, dtype)
        draw = torch.Generator().manual_seed(3)
        self.up = nn.Parameter(torch.randn(WIDTH, HIDDEN, generator=draw).to(dtype) * 0.2)
        self.down = nn.Parameter(torch.randn(HIDDEN, WIDTH, generator=draw).to(dtype) * 0.2)
        self.register_buffer("shift", torch.linspace(-1, 1, WIDTH))

    def dense(self, x):
        hidden = F.dropout(F.silu(normed(x) @ self.up), 0.3)
        return x + F.dropout(hidden @ self.down, 0.2)

    def forward(self, x):
        h = self.dense(x + self.shift.to(x.dtype))
        self.shift.mul_(0.5)
        return h + self.experts(normed(h))


class Checkpointed(Block):
    """The dense part is checkpointed by the user."""

    def forward(self, x):
        h = checkpoint(self.dense, x, use_reentrant=False)
        return h + self.experts(normed(h))


class Twice(nn.Module):
    """Two blocks in one graph."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(LoopExperts)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class InFloat32(Block):
    """Where code of Inductor rounds nothing that eager would not."""

    def __init__(self):
        super().__init__(LoopExperts, torch.float32)


def results(build, tokens, options):
    """Return tensors by name after two steps, and the new records of graphs that ran."""
    torch._dynamo.reset()
    before = len(executed_records())
    layer = build()
    settings = {
        "megamoe.codegen": "fx", "megamoe.hardware": "h100", "megamoe.equal_tokens": True,
        "megamoe.strict": True, "megamoe.chunks": 2, **options,
    }  # fmt: skip
    compiled = torch.compile(layer, backend="megamoe", fullgraph=True, options=settings)
    draw = torch.Generator().manual_seed(dist.get_rank())
    found = {}
    for step in range(2):
        x, gradient = (torch.randn(tokens, WIDTH, generator=draw) for _ in range(2))
        x = x.to(next(layer.parameters()).dtype).requires_grad_()
        torch.manual_seed(step)
        output = compiled(x)
        output.backward(gradient.to(x.dtype))
        found |= {f"output {step}": output.detach(), f"gradient of x {step}": x.grad}
    found |= {name: weight.grad for name, weight in layer.named_parameters()}
    found |= dict(layer.named_buffers())
    return found, executed_records()[before:]


def compare(rank, build, budget, more=None):
    """Return the names of what differs, the records with a price, and launches with and without."""
    del rank
    options = more or {}
    tokens = 24 + 2 * int(10 * budget)  # of no other test: a process keeps one of equal records
    expected, plain = results(build, tokens, options)
    priced = {"megamoe.recompute": "price", "megamoe.activation_budget": budget}
    found, records = results(build, tokens, {**options, **priced})
    differ = [name for name, value in found.items() if not torch.equal(value, expected[name])]
    return differ, records, [[one["launches"] for one in r] for r in (plain, records)]


PROGRAMS = {"block": Block, "checkpointed": Checkpointed, "two blocks": Twice}
CASES = [("block", 0.6), ("block", 2), ("checkpointed", 0.6), ("two blocks", 0.3)]


@pytest.mark.parametrize(("program", "budget"), slow_but(CASES[:1], CASES))
def test_no_bit_changes_and_less_is_kept(mirrored_ranks, program, budget):
    for differ, records, (plain, launches) in mirrored_ranks.run(
        compare, PROGRAMS[program], budget
    ):
        assert differ == []
        assert launches == plain, "exchanges run as often, and in their order"
        (forward,) = (one["measures"] for one in records if one["phase"] == "forward")
        assert forward["kept_bytes"] < 0.9 * forward["kept_bytes_before"]
        assert forward["again_bytes"] > 0 and forward["again_us"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("parts", [2])
def test_parts_of_the_batch_have_the_same_bits(mirrored_ranks, parts):
    more = {"megamoe.batch_parts": parts, "megamoe.numerics": "bounded"}
    for differ, records, _ in mirrored_ranks.run(compare, WithoutDropout, 0.5, more):
        assert differ == []
        assert any("kept_bytes" in one["measures"] for one in records)


class WithoutDropout(Block):
    """Parts of a batch would draw other numbers."""

    def forward(self, x):
        h = x + F.silu(normed(x) @ self.up) @ self.down
        return h + self.experts(normed(h))


@pytest.mark.slow
def test_code_of_inductor_has_the_same_bits(mirrored_ranks):
    more = {"megamoe.codegen": "inductor"}
    for differ, records, (plain, launches) in mirrored_ranks.run(compare, InFloat32, 0.5, more):
        assert differ == []
        assert launches == plain
        assert any("kept_bytes" in one["measures"] for one in records)
