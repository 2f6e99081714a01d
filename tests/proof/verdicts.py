"""The prover's verdict on a layer, as its backend would ask for it."""

import pytest
import torch

from moe_compile.graph.facts import GraphFacts
from moe_compile.journal.reasons import Left
from moe_compile.proof.row_proof import prove_rows_independent
from moe_compile.regions.detect_moe import find_moe_regions
from tests.capture import dynamo_graphs

WIDTH, HIDDEN, EXPERTS, TOP_K = 16, 24, 8, 2
LOCAL = 4


def tokens(dtype=torch.bfloat16):
    return torch.randn(32, WIDTH, dtype=dtype, requires_grad=True)


def judge(layer, x):
    """Return the verdict on the one region of `layer`: a proof, or what refused it.

    Where this torch cannot capture the layer at all, the test is skipped with its words.
    """
    verdicts = []
    try:
        graphs = dynamo_graphs(layer, x)
    except torch._dynamo.exc.UserError as error:
        pytest.skip(f"this torch cannot capture the layer: {error.msg.splitlines()[0]}")
    for gm in graphs:
        regions, refused = find_moe_regions(GraphFacts(gm.graph))
        verdicts += [prove_rows_independent(region) for region in regions]
        verdicts += [Left(r.reason, r.detail) for r in refused if r.is_region]
    (verdict,) = verdicts
    return verdict


def layer_of(style, group, dtype=torch.bfloat16):
    return style(WIDTH, HIDDEN, EXPERTS, TOP_K, group, dtype)
