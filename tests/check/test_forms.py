"""Forms of one piece of code in one process, and code in float64."""

import pytest
import torch
import torch.nn.functional as F

from moe_compile.check.forms import (
    AS_WRITTEN,
    PRECISE,
    WITHOUT,
    Form,
    Forms,
    in_high_precision,
    names_without,
)
from moe_compile.config import MegaMoEConfig
from moe_compile.testing.rank_pool import forget_compiled


def test_each_form_has_code_of_its_own_that_is_compiled_once_for_all_places():
    forget_compiled()
    made = []

    def backend(name):
        def compile_graph(gm, inputs):
            del inputs
            made.append(name)
            return lambda *given: (gm.forward(*given)[0] + len(name),)

        return compile_graph

    def forward(x):
        return x * 2

    first, second = Form(name="a", backend=backend("a")), Form(name="bb", backend=backend("bb"))
    forms, x = Forms(), torch.ones(3)
    switches = [forms.switch(forward, {"megamoe.chunks": 2}, forward) for _ in range(3)]
    for form, more in ((AS_WRITTEN, 0), (first, 1), (second, 2), (first, 1), (AS_WRITTEN, 0)):
        with forms.using(form):
            assert all(torch.equal(run(x), x * 2 + more) for run in switches)
    assert made == ["a", "bb"]


def test_a_watcher_sees_the_number_and_the_result_of_every_switch():
    forms, seen = Forms(), []
    switches = [forms.switch(lambda x, n=n: x + n, {}, None) for n in range(2)]
    forms.watcher = lambda number, result: seen.append((number, result))
    assert [run(5) for run in switches] == [5, 6] and seen == [(0, 5), (1, 6)]


REGION = {"num_chunks": 1, "chunk_edges": "even", "dispatch": "all_to_all", "nodes": "off",
          "wires": {}}  # fmt: skip
NOTHING = {"regions": [], "attention": [], "passes": []}


@pytest.mark.parametrize(
    ("report", "wanted"),
    [
        ({}, []),
        ({"regions": [REGION]}, ["schedule"]),
        ({"regions": [{**REGION, "num_chunks": 2}, REGION]}, ["chunks", "schedule"]),
        ({"regions": [{**REGION, "chunk_edges": "load"}]}, ["chunk_edges", "schedule"]),
        ({"regions": [{**REGION, "dispatch": "all_gather"}]}, ["dispatch", "schedule"]),
        ({"regions": [{**REGION, "nodes": "exact"}]}, ["nodes", "schedule"]),
        ({"regions": [{**REGION, "wires": {"dispatch": ("fp8", 8, 4), "combine": ("same", 8, 8)}}]},
         ["dispatch_wire", "schedule"]),
        ({"attention": [{"num_chunks": 2}]}, ["attention_chunks", "schedule"]),
        ({"passes": [{"pass": "split_batch", "applied": ["2 parts"]}]}, ["batch_parts"]),
        ({"passes": [{"pass": "route_exchanges", "applied": ["x"]}]}, ["transport"]),
        ({"passes": [{"pass": "split_batch", "dropped": "x"}]}, []),
    ],
)  # fmt: skip
def test_there_is_a_form_without_each_thing_that_was_done(report, wanted):
    names = names_without(MegaMoEConfig(), {**NOTHING, **report})
    assert names == [f"megamoe without {one}" for one in wanted]
    assert all(name in WITHOUT for name in names)
    unscheduled = names_without(MegaMoEConfig(schedule=False), {**NOTHING, **report})
    assert "megamoe without schedule" not in unscheduled


class Layer(torch.nn.Module):
    """Rounds wherever a layer of experts does: casts, grouped products, writes into buffers."""

    def __init__(self):
        super().__init__()
        shared = torch.Generator().manual_seed(0)
        self.gate = torch.nn.Parameter(torch.randn(16, 2, generator=shared))
        self.experts = torch.nn.Parameter(torch.randn(2, 16, 16, generator=shared))
        self.register_buffer("counts", torch.zeros(2))

    def forward(self, x):
        scores = F.softmax((x @ self.gate).to(torch.float32), dim=-1)
        rows = self.product(x.bfloat16(), self.experts.bfloat16()).type_as(x)
        out = torch.zeros_like(x)
        out[:] = rows * scores[:, :1].float()
        self.counts.add_(torch.ones(2, dtype=torch.float32))
        return out

    @staticmethod
    def product(x, experts):
        ends = torch.tensor([8, 32], dtype=torch.int32)
        return torch._grouped_mm(x, experts, offs=ends)


class Exact(Layer):
    def forward(self, x):
        scores = F.softmax(x @ self.gate, dim=-1)
        rows = torch.cat([x[:8] @ self.experts[0], x[8:] @ self.experts[1]])
        return rows * scores[:, :1]


def test_code_in_float64_rounds_nowhere_between_its_input_and_its_result():
    layer, exact, x = Layer(), Exact().double(), torch.randn(32, 16).requires_grad_()
    wanted, exact_x = exact(twin := x.detach().double().requires_grad_()), twin
    wanted.sum().backward()
    result = in_high_precision(layer.forward)(x)
    result.sum().backward()
    assert result.dtype == x.dtype and torch.equal(result, wanted.float())
    for name, parameter in layer.named_parameters():
        true = exact.get_parameter(name).grad
        assert (parameter.grad - true).norm() < 1e-7 * true.norm(), name
    assert (x.grad - exact_x.grad).norm() < 1e-7 * exact_x.grad.norm()
    assert layer.counts.min() >= 1.0  # written to again where the backward pass computes it again
    assert (layer(x).double() - wanted).norm() > 1e-4 * wanted.norm()  # as written, it rounds


def test_the_precise_form_runs_what_it_is_given_for_it():
    forms = Forms()
    run = forms.switch(lambda x: x + 1, {}, lambda x: x + 2)
    with forms.using(PRECISE):
        assert run(torch.ones(1)).item() == 3.0
    assert run(torch.ones(1)).item() == 2.0
