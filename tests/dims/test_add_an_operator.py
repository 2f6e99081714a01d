"""The rule of docs/add-an-operator.md is one, its test passes, and experts that call it are cut."""

import importlib
import pathlib
import re

import pytest
import torch

from moe_compile.dims import operators
from moe_compile.journal.reasons import Reason
from moe_compile.proof.kernel_bits import KernelBits, bits_by
from moe_compile.proof.row_proof import RowProof
from moe_compile.testing.programs.grammar import Capacity
from passes.pipeline import DYNAMO, run_level
from tests import layer_programs
from tests.capture import dynamo_graphs, state
from tests.dims import test_operator_rules
from tests.layers import GroupedExperts
from tests.proof.verdicts import judge, layer_of, tokens

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "add-an-operator.md").read_text()
RULE, ENTRY, SAMPLE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module", autouse=True)
def center_rows():
    """Have the operator of the page."""

    @torch.library.custom_op("example::center_rows", mutates_args=())
    def center_rows(x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(-1, keepdim=True)

    center_rows.register_fake(torch.empty_like)
    center_rows.register_autograd(lambda ctx, grad: torch.ops.example.center_rows(grad))
    return center_rows


@pytest.fixture
def added():
    """Have the rule of the page, and its sample."""
    names = vars(importlib.import_module("moe_compile.dims.operators"))
    exec(RULE + ENTRY, names)
    exec(SAMPLE, vars(test_operator_rules))
    operators.rule_of.cache_clear()
    yield
    del operators.RULES["example::center_rows"], test_operator_rules.SAMPLES["centered"]
    operators.rule_of.cache_clear()


def rewritten():
    """Return what is rewritten where rows go back without their means, and what is left."""
    out = "out.contiguous()"
    experts, centered = Capacity(local=4, top_k=2), f"torch.ops.example.center_rows({out})"
    layer = layer_programs.layer_of(experts, out, centered)
    (gm,) = dynamo_graphs(layer, torch.randn(32, 16, requires_grad=True))
    ours = state(chunks=2)
    with bits_by(KernelBits()):  # as users have it
        results = {result.pass_name: result for result in run_level(DYNAMO, gm.graph, ours)}
    return results["rewrite_regions"].applied, ours.found.others, gm.graph


def test_without_a_rule_the_region_is_left_and_says_which_operator_it_runs(fake_ranks):
    applied, (left,), _ = rewritten()
    assert applied == () and left.reason is Reason.EXPERTS_LOST
    said = re.search(r"```text\n(.*?)\n```", PAGE)[1]
    assert left.detail.endswith(said)


def test_with_the_rule_of_the_page_the_region_runs_in_chunks(fake_ranks, added):
    applied, left, graph = rewritten()
    assert applied == ("region 0",) and left == ()
    of_chunks = [n for n in graph.nodes if "center_rows" in str(n.target)]
    assert len(of_chunks) == 2


class CenteredRows(GroupedExperts):
    """Experts that are given rows without their means."""

    def experts(self, rows, received):
        return super().experts(torch.ops.example.center_rows(rows), received)


def test_rows_that_are_split_by_counts_have_the_same_rule(fake_ranks, request):
    def verdict():
        with bits_by(KernelBits()):
            return judge(layer_of(CenteredRows, fake_ranks), tokens())

    assert verdict().reason is Reason.UNKNOWN_OPERATOR
    request.getfixturevalue("added")
    assert isinstance(verdict(), RowProof)


def test_the_sample_of_the_page_passes_and_notices_a_rule_that_closes_nothing(added, monkeypatch):
    def wrong():
        return [one for said in test_operator_rules.claims("centered") for one in said.wrong()]

    assert not wrong()
    names = vars(operators)
    exec(RULE.replace("    call.close(dims[-1])\n", "") + ENTRY, names)
    operators.rule_of.cache_clear()
    assert wrong()
