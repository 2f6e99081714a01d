"""Computed again by price or by name, no bit changes: dropout, buffers, checkpoints, parts."""

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


class Dropping(Block):
    """Values are dropped inside the dense part."""

    def dense(self, x):
        hidden = F.dropout(F.silu(normed(x) @ self.up) * 2, 0.3)
        return x + hidden @ self.down


class WithoutDropout(Block):
    """Parts of a batch would draw other numbers."""

    def forward(self, x):
        h = x + F.silu(normed(x) @ self.up) @ self.down
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


def compare(rank, build, tokens, asked, more=None):
    """Return the names of what differs, and the records of graphs without `asked` and with it.

    No other test has so many tokens: a process keeps one of equal records.
    """
    del rank
    expected, plain = results(build, tokens, more or {})
    found, records = results(build, tokens, {**(more or {}), **asked})
    differ = [name for name, value in found.items() if not torch.equal(value, expected[name])]
    return differ, plain, records


def by_price(budget):
    return {"megamoe.recompute": "price", "megamoe.activation_budget": budget}


def by_name(*names):
    return {"megamoe.recompute_modules": names}


IN_PARTS = {"megamoe.batch_parts": 2, "megamoe.numerics": "bounded"}
BY_INDUCTOR = {"megamoe.codegen": "inductor"}
BY_PRICE = [(Block, 36, 0.6), (Block, 64, 2), (Checkpointed, 38, 0.6), (Twice, 30, 0.3)]


@pytest.mark.parametrize(("program", "tokens", "budget"), slow_but(BY_PRICE[:1], BY_PRICE))
def test_by_price_no_bit_changes_and_less_is_kept(mirrored_ranks, program, tokens, budget):
    for differ, plain, records in mirrored_ranks.run(compare, program, tokens, by_price(budget)):
        assert differ == []
        launches = [[one["launches"] for one in of] for of in (plain, records)]
        assert launches[0] == launches[1], "exchanges run as often, and in their order"
        (forward,) = (one["measures"] for one in records if one["phase"] == "forward")
        assert forward["kept_bytes"] < 0.9 * forward["kept_bytes_before"]
        assert forward["again_bytes"] > 0 and forward["again_us"] > 0


BY_NAME = [
    (Dropping, 26, ("mlp", "layernorm", "moe_act")),
    (Block, 28, ("layernorm", "moe_act")),
    (Block, 40, ("moe",)),
    (Block, 42, ("megascale_moe",)),
    (Checkpointed, 44, ("layernorm", "moe_act")),
    (Twice, 46, ("moe_act", "mlp")),
]


def num_launches(records):
    return {one["phase"]: len(one["launches"]["0"]) for one in records}


@pytest.mark.parametrize(("program", "tokens", "names"), slow_but(BY_NAME[:1], BY_NAME))
def test_by_name_no_bit_changes(mirrored_ranks, program, tokens, names):
    """Two steps with gradients summed over both, as two microbatches are."""
    for differ, *both in mirrored_ranks.run(compare, program, tokens, by_name(*names)):
        assert differ == []
        before, after = map(num_launches, both)
        assert after["forward"] == before["forward"]
        runs_again = names == ("moe",)
        assert after["backward"] > before["backward"] if runs_again else after == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "tokens", "asked", "more"),
    [
        (WithoutDropout, 34, by_price(0.5), IN_PARTS),
        (WithoutDropout, 48, by_name("layernorm", "moe_act", "mlp"), IN_PARTS),
        (InFloat32, 50, by_price(0.5), BY_INDUCTOR),
        (InFloat32, 52, by_name("mlp", "layernorm"), BY_INDUCTOR),
    ],
)
def test_parts_of_the_batch_and_code_of_inductor_have_the_same_bits(
    mirrored_ranks, program, tokens, asked, more
):
    for differ, _, records in mirrored_ranks.run(compare, program, tokens, asked, more):
        assert differ == []
        if "megamoe.recompute" in asked:
            assert any("kept_bytes" in one["measures"] for one in records)
