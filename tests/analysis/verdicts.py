"""The prover's verdict on a layer, as its backend would ask for it."""

import pytest
import torch
from torch import fx

from moe_compile.analysis.detect_moe import find_moe_regions
from moe_compile.analysis.row_proof import prove_rows_independent

WIDTH, HIDDEN, EXPERTS, TOP_K = 16, 24, 8, 2
LOCAL = 4


def tokens(dtype=torch.bfloat16):
    return torch.randn(32, WIDTH, dtype=dtype, requires_grad=True)


class Captured(Exception):
    """Ends a compilation: sizes of ranks that do not exist must not be checked by running."""


def graphs_of(program, *inputs):
    found = []

    def keep(gm, example_inputs):
        found.extend(m for m in gm.modules() if isinstance(m, fx.GraphModule))
        raise Captured

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(program, backend=keep, fullgraph=True)
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="Captured"):
            compiled(*inputs)
    return found


def judge(layer, x):
    """Return the verdict on the one region of `layer`: a proof, or what refused it."""
    verdicts = []
    for gm in graphs_of(layer, x):
        regions, refused = find_moe_regions(gm.graph)
        verdicts += [prove_rows_independent(region) for region in regions]
        verdicts += [r for r in refused if r.is_region]
    (verdict,) = verdicts
    return verdict


def layer_of(style, group, dtype=torch.bfloat16):
    return style(WIDTH, HIDDEN, EXPERTS, TOP_K, group, dtype)
