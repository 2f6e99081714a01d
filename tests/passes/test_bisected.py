"""Passes that are left out of a graph or of one region, and torch's own bisector, which does so."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import nn
from torch._inductor.compiler_bisector import CompilerBisector
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from moe_compile.backend import megamoe, rewrite
from moe_compile.codegen import LevelPass, plan_of
from moe_compile.config import MegaMoEConfig
from moe_compile.errors import ContractViolation, InvalidConfig
from moe_compile.graph.snapshot import copy_of_graph
from moe_compile.journal.entries import Dropped, PassReport
from moe_compile.journal.reasons import Reason
from moe_compile.report.explain import short_lines
from moe_compile.report.page import page_data
from moe_compile.report.process_report import ProcessReport
from moe_compile.testing.rank_pool import forget_compiled
from passes.contract import GraphPass
from passes.pipeline import (
    DYNAMO,
    JOINT,
    LEVELS,
    POST_GRAD,
    Level,
    check_names,
    names_by_region,
    run_level,
)
from passes.rewrite import Proposed, Rewrite
from tests.added import add_distribution, forget
from tests.block_layers import SerialBlock, block_input
from tests.capture import dynamo_graphs, state
from tests.dispatch_layers import InOrderWeighted
from tests.layers import GroupedExperts


@dataclass(frozen=True)
class Right(GraphPass):
    name: ClassVar[str] = "right"

    def run(self, graph, state):
        return PassReport(pass_name=self.name)


@dataclass(frozen=True)
class Wrong(GraphPass):
    """Turns every sum into a product."""

    name: ClassVar[str] = "wrong"

    def run(self, graph, state):
        sums = [n for n in graph.nodes if "add" in str(n.target)]
        for node in sums:
            node.target = torch.ops.aten.mul.Tensor
        return PassReport(pass_name=self.name, applied=tuple(n.name for n in sums))


@dataclass(frozen=True)
class WrongCheck(Wrong):
    name: ClassVar[str] = "wrong_check"
    is_check: ClassVar[bool] = True


@dataclass(frozen=True)
class WrongAndNeeded(Wrong):
    name: ClassVar[str] = "wrong_and_needed"
    is_needed: ClassVar[bool] = True


def program(x):
    return x * 2 + x


def run_by(level):
    """Return whether values are right of a graph on which a level ran, and what was left out."""
    gm, ours = make_fx(program)(torch.ones(3)), state()
    results = run_level(level, gm.graph, ours)
    gm.recompile()
    return torch.equal(gm(torch.ones(3)), program(torch.ones(3))), results, ours


def of_inductor(level):
    """Return a question for torch's bisector: all but Inductor is right."""

    def is_right():
        return CompilerBisector.get_backend() != "inductor" or run_by(level)[0]

    return is_right


@pytest.mark.parametrize(
    ("level", "subsystem"),
    [(DYNAMO, "pre_grad_passes"), (JOINT, "joint_graph_passes"), (POST_GRAD, "post_grad_passes")],
)
def test_a_wrong_pass_is_found_at_every_level(level, subsystem):
    passes = (Right(), Right(), Wrong(), Right(), Right(), Right())
    found = CompilerBisector.do_bisect(of_inductor(replace(level, passes=passes)))
    assert (found.backend, found.subsystem, found.bisect_number) == ("inductor", subsystem, 2)
    assert found.debug_info == "megamoe's pass wrong, on the dynamo graph"


@pytest.mark.parametrize("wrong", [WrongCheck(), WrongAndNeeded()])
def test_a_check_and_what_mends_torch_is_never_left_out(wrong):
    found = CompilerBisector.do_bisect(of_inductor(Level((Right(), wrong))))
    assert found.backend == "inductor" and found.subsystem is None


def test_a_compiled_program_is_searched_where_torch_keeps_a_backend_that_is_no_name(monkeypatch):
    forget_compiled()
    keep = "test_configs.bisect_keep_custom_backend_for_inductor"
    if keep not in inductor_config.get_config_copy():
        pytest.skip("this torch keeps no backend")
    monkeypatch.setattr("passes.pipeline.DYNAMO", replace(DYNAMO, passes=(Right(), Wrong())))
    x = torch.ones(3)

    def is_right():
        torch._dynamo.reset()
        compiled = torch.compile(program, backend=megamoe, options={"megamoe.codegen": "fx"})
        return torch.equal(compiled(x), program(x))

    with inductor_config.patch(keep, True):
        found = CompilerBisector.do_bisect(is_right)
    assert found.subsystem == "pre_grad_passes" and "pass wrong," in found.debug_info


def test_what_is_left_out_is_compared_among_ranks_and_kept_out_of_caches(monkeypatch):
    def all_but_the_first(backend, subsystem, said):
        del subsystem
        return backend == "inductor" and "wrong" in said()

    level = Level((Right(), Wrong()))
    assert LevelPass((level,), state(), None).uuid() is not None
    monkeypatch.setattr(CompilerBisector, "bisection_enabled", True)
    monkeypatch.setattr(CompilerBisector, "disable_subsystem", all_but_the_first)
    is_right, results, ours = run_by(level)
    assert is_right and results[1] == Dropped(
        "wrong", Reason.DISABLED, "torch's compiler bisector leaves it out of this run"
    )
    ours.has_work, other = True, state()
    other.has_work = True
    assert plan_of(ours) != plan_of(other)
    assert LevelPass((level,), ours, None).uuid() is None


TOKENS = torch.randn(32, 16, dtype=torch.bfloat16, requires_grad=True)
TRANSPORT = "column_halves"
ENTRIES = (
    f"[megamoe.transports]\n{TRANSPORT} = tests.extension.{TRANSPORT}.{TRANSPORT}:ColumnHalves\n"
)
ASKED = {
    "apply_scores": ({"apply_scores": "before_down", "chunks": 1}, InOrderWeighted),
    "rewrite_regions": ({}, GroupedExperts),
    "fuse_token_sums": ({"numerics": "bounded"}, InOrderWeighted),
    "quantize_exchanges": ({"dispatch_wire": "fp8"}, GroupedExperts),
    "quantize_products": ({"expert_compute": "fp8_blockwise"}, GroupedExperts),
    "route_exchanges": ({"transport": TRANSPORT}, GroupedExperts),
}
"""Pass that works by region -> options that ask for it, and a layer that it changes."""


@pytest.fixture
def transport(tmp_path, monkeypatch):
    add_distribution(tmp_path, monkeypatch, ENTRIES)
    yield
    forget()


@pytest.fixture(scope="module")
def two_layers(fake_ranks):
    """Return the Dynamo graph of two layers of a style, which is traced once."""
    traced = {}

    def graph_of(style=GroupedExperts):
        if style not in traced:
            layers = nn.Sequential(*(style(16, 32, 8, 2, fake_ranks) for _ in range(2)))
            (traced[style],) = dynamo_graphs(layers, TOKENS)
        return copy_of_graph(traced[style])

    return graph_of


def rewritten(gm, **options):
    """Return the Dynamo graph after our passes, the state, and the report of each pass."""
    ours, _ = rewrite(gm, MegaMoEConfig(**{"hardware": "cpu", "chunks": 2, **options}))
    reports = [r for _, r in ours.journal.records if isinstance(r, PassReport)]
    return gm.graph, ours, {r.pass_name: r for r in reports}


def of_region(lines, number):
    return [line for line in lines if f"region {number}" in line]


@pytest.mark.parametrize("name", names_by_region())
def test_a_pass_that_works_by_region_is_left_out_of_one_alone(two_layers, transport, name):
    options, style = ASKED[name]
    _, _, whole = rewritten(two_layers(style), **options)
    left_out = (f"{name}:region 1",)
    _, ours, reports = rewritten(two_layers(style), disable_passes=left_out, **options)
    assert of_region(whole[name].applied, 1)
    assert reports[name].applied == tuple(of_region(whole[name].applied, 0))
    left = [v for r in reports.values() for v in r.skipped if v.reason is Reason.DISABLED]
    assert of_region([v.candidate for v in left], 1) == [v.candidate for v in left] != []
    first, second = ours.experts
    other = {
        "rewrite_regions": "num_chunks",
        "quantize_exchanges": "dispatch_wire",
        "quantize_products": "expert_compute",
    }.get(name)
    if other is not None:
        as_written = type(second.plan)(group="", num_ranks=2, num_local_experts=4)
        assert getattr(first.plan, other) != getattr(second.plan, other)
        assert getattr(second.plan, other) == getattr(as_written, other)


def test_a_region_that_rewrites_are_left_out_of_is_as_the_model_wrote_it(two_layers):
    """The nodes of the other one that die are those that die where it is alone."""
    written, _, _ = rewritten(two_layers(), disable_passes=("rewrite_regions",))
    both = tuple(f"rewrite_regions:region {number}" for number in (0, 1))
    none, ours, _ = rewritten(two_layers(), disable_passes=both)
    assert [str(n.target) for n in none.nodes] == [str(n.target) for n in written.nodes]
    assert not ours.is_chunked
    left = ((), both[:1], both)
    sizes = [len(rewritten(two_layers(), disable_passes=one)[0].nodes) for one in left]
    assert sizes[0] > sizes[1] > sizes[2]


def test_attention_is_a_region_too(fake_ranks):
    """Its name is that of its node."""
    (gm,) = dynamo_graphs(SerialBlock(fake_ranks, fake_ranks), block_input())
    options = {"attention_chunks": 2, "disable_passes": ("rewrite_regions:o",)}
    _, ours, _ = rewritten(gm, **options)
    found = {one.found.name: one.plan.num_chunks for one in ours.regions}
    assert found == {"region 0": 2, "o": 1}


def test_a_region_of_a_checkpointed_function_has_the_name_of_its_body_too(fake_ranks):
    layers = [GroupedExperts(16, 32, 8, 2, fake_ranks) for _ in range(2)]

    def program(x):
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    (gm, *_) = dynamo_graphs(program, TOKENS)
    options = {"hardware": "cpu", "disable_passes": ("rewrite_regions:wrap_body_1/region 0",)}
    _, compilation = rewrite(gm, MegaMoEConfig(**options))
    found = {one.name: one for one in compilation.regions}
    assert {name: one.num_chunks for name, one in found.items()} == {
        "wrap_body_0/region 0": 2, "wrap_body_1/region 0": 1,
    }  # fmt: skip
    assert Reason.DISABLED.value in found["wrap_body_1/region 0"].remarks


def test_a_region_that_no_graph_has_is_said_at_the_end(two_layers):
    entries = ("rewrite_regions:region 1", "rewrite_regions:region 7")
    config = MegaMoEConfig(hardware="cpu", disable_passes=entries)
    text = "disable_passes: {!r} has no effect, since no graph has this region; {}"
    report = ProcessReport()
    report.add(rewrite(make_fx(program)(TOKENS), config)[1], "", "cpu")
    *_, one, other, _ = short_lines(report.as_dict())
    assert [one, other] == [text.format(entry, "there are no regions") for entry in entries]
    report.add(rewrite(two_layers(), config)[1], "", "cpu")
    *_, before, line, _ = short_lines(report.as_dict())
    assert line == text.format(entries[1], "the regions are region 0, region 1")
    assert not before.startswith("disable_passes")
    assert page_data(report.as_dict())["notes"] == [line]


@pytest.mark.parametrize(
    ("entry", "wanted"),
    [
        ("rewrite_region:region 0", "no pass 'rewrite_region'. Did you mean 'rewrite_regions'"),
        (
            "pin_order:region 0",
            "only these passes can be left out of a single region: apply_scores, ",
        ),
        ("rewrite_regions:", "'apply_scores:region 0'"),
    ],
)
def test_an_entry_for_a_region_that_no_pass_can_take_is_refused(entry, wanted):
    with pytest.raises(InvalidConfig) as caught:
        check_names((entry,))
    assert wanted in str(caught.value)


def test_passes_of_other_levels_know_no_regions():
    assert {p.name for level in LEVELS for p in level.passes if p.by_region} == {*ASKED}


@dataclass(frozen=True)
class Nameless(Rewrite[str]):
    name: ClassVar[str] = "nameless"
    by_region: ClassVar[bool] = True

    def propose(self, graph, state):
        return Proposed(proposals=("something",))

    def apply(self, graph, proposals, state):
        raise AssertionError


def test_a_rewrite_by_region_says_which_region_it_changes():
    gm = make_fx(program)(torch.ones(3))
    with pytest.raises(ContractViolation, match="must name its region; something names none"):
        Nameless().run(gm.graph, state())


@pytest.mark.parametrize("wrong", ["region 0", "region 1"])
def test_torchs_bisector_names_the_region_too(two_layers, wrong):
    def is_right():
        if CompilerBisector.get_backend() != "inductor":
            return True
        report = rewritten(two_layers())[2].get("rewrite_regions")
        return report is None or wrong not in report.applied

    found = CompilerBisector.do_bisect(is_right)
    assert found.debug_info == f"megamoe's pass rewrite_regions, on {wrong} of the dynamo graph"
