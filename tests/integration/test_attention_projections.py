"""Attention of torchtitan's models, divided by our recipe, is a region up to its projections."""

import pytest
import torch
from torch import nn

pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")

from torch.distributed.device_mesh import DeviceMesh
from torchtitan.config import JobConfig
from torchtitan.protocols.train_spec import get_train_spec

from moe_compile.attention.detect_attention import find_attention
from moe_compile.attention.head_split import split_projections
from tests.capture import dynamo_graphs
from tests.slow_parameters import slow_but
from torchtitan_integration.ulysses import apply_ulysses


class Attention(nn.Module):
    """The attention of a model's first block, positions given by the tables alone."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x, table):
        return self.attention(x, table, None, None)


MODELS = [("llama3", "freqs_cis", 8), ("llama4", "freqs_cis", 8), ("qwen3", "rope_cache", 4)]


@pytest.mark.parametrize(
    ("name", "table", "kv_heads"),
    slow_but(MODELS[2:], MODELS),
)
def test_projections_and_norms_and_rotations_treat_heads_apart(fake_ranks, name, table, kv_heads):
    spec = get_train_spec(name)
    model = spec.model_cls(spec.model_args["debugmodel"])
    block = model.layers["0"]
    apply_ulysses([block], DeviceMesh("cpu", [0, 1]), JobConfig())
    x = torch.randn(2, 16, spec.model_args["debugmodel"].dim)
    (gm,) = dynamo_graphs(Attention(block.attention), x, getattr(model, table))
    (region,), refused = find_attention(gm.graph)
    split = split_projections(region, qkv=True, out=True)
    assert not refused and not split.kept_whole and not split.cut
    assert (len(split.projections), split.output is not None) == (3, True)
    assert region.num_kv_heads == kv_heads
