"""Random programs compute the same bits after scheduling, whatever the link's speed."""

import dataclasses

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from moe_compile.config import MegaMoEConfig
from moe_compile.graph.query import is_launch
from moe_compile.hardware import load_profile
from moe_compile.plan.state import CompileState
from passes.schedule_exchanges import ScheduleExchanges
from passes.verify_schedule import VerifySchedule
from tests.scheduled_layers import c10d, one_rank_group


def schedule(graph, link):
    hardware = dataclasses.replace(load_profile("cpu"), link_gb_per_s=link)
    state = CompileState(config=MegaMoEConfig(max_memory_increase=9.0), hardware=hardware)
    ScheduleExchanges().run(graph, state)
    VerifySchedule().run(graph, state)


class Pool:
    """The tensors of a random program; nothing writes what is in flight."""

    def __init__(self, x, weight, group):
        self.x, self.weight, self.group = x, weight, group
        self.tensors, self.flights = [x + 1, x + 2], []

    def send(self, a, b):
        rows = [a.shape[0]]
        self.flights.append((a, c10d.all_to_all_single(a, rows, rows, self.group)))

    def receive(self, a, b):
        if self.flights:
            self.tensors.append(c10d.wait_tensor(self.flights.pop(0)[1]))

    def matmul(self, a, b):
        self.tensors.append(torch.remainder(a @ self.weight, 7))

    def scale(self, a, b):
        self.tensors.append(torch.remainder(a * 3 + b, 11))

    def view(self, a, b):
        self.tensors.append(a.view(-1).view(a.shape))

    def write(self, a, b):
        storage = a.untyped_storage()._cdata
        if all(sent.untyped_storage()._cdata != storage for sent, _ in self.flights):
            a.add_(b)

    def random(self, a, b):
        self.tensors.append(torch.randint_like(a, 5) + b)

    def host(self, a, b):
        self.tensors.append(a + torch.remainder(b.sum().to(torch.int64), 5).item())

    def store(self, a, b):
        self.x.copy_(b)

    def load(self, a, b):
        self.tensors.append(self.x + b)

    def run(self, steps):
        for kind, i, j in steps:
            getattr(self, kind)(*(self.tensors[-1 - k % len(self.tensors)] for k in (i, j)))
        self.tensors.extend(c10d.wait_tensor(flying) for _, flying in self.flights)
        return [torch.remainder(t, 1009) for t in self.tensors]


KINDS = ["send", "receive", "matmul", "scale", "view", "write", "random", "host", "store", "load"]
STEP = st.tuples(st.sampled_from(KINDS), st.integers(0, 7), st.integers(0, 7))
LINKS = st.sampled_from([1e-6, 1e-3, 1.0])


@settings(max_examples=20, deadline=None)
@given(steps=st.lists(STEP, min_size=4, max_size=30), link=LINKS)
def test_any_program_of_exchanges_and_compute_computes_the_same(steps, link):
    """In-place writes, views, random numbers, host reads and writes into the input included."""
    group = one_rank_group()
    x = torch.arange(32, dtype=torch.float64).view(8, 4)  # small integers: every sum is exact
    weight = torch.arange(16, dtype=torch.float64).view(4, 4)

    def program(x, weight):
        return Pool(x, weight, group).run(steps)

    gm = make_fx(program, tracing_mode="symbolic")(x, weight)
    torch.manual_seed(3)
    untouched = x.clone()
    expected = gm(untouched, weight)

    schedule(gm.graph, link)
    gm.recompile()
    order = [n.name for n in gm.graph.nodes if is_launch(n)]
    torch.manual_seed(3)
    written = x.clone()
    for got, want in zip(gm(written, weight), expected, strict=True):
        assert torch.equal(got, want)
    assert torch.equal(written, untouched)

    schedule(gm.graph, link)
    assert [n.name for n in gm.graph.nodes if is_launch(n)] == order
