"""FlexAttention's backward gets blocks that fit into registers, unless the program says which."""

import pytest
import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensorMode

from passes import size_attention
from passes.size_attention import EIGHT_WARPS, POSITION_OF_OPTIONS, SMALL_BLOCKS, SizeAttention
from tests.capture import state

BACKWARD = torch.ops.higher_order.flex_attention_backward
GIVEN = {"BACKEND": "AUTO", "PRESCALE_QK": False}


def backward_of_attention(head, given, device="cuda", dtype=torch.bfloat16):
    """Return a graph with one backward whose heads have so many columns, and the node."""
    graph = fx.Graph()
    query = graph.placeholder("query")
    with FakeTensorMode():
        query.meta["val"] = torch.empty(1, 2, 128, head, dtype=dtype, device=device)
    node = graph.call_function(BACKWARD, (query,) * POSITION_OF_OPTIONS + ({**given},))
    graph.output(node)
    return graph, node


@pytest.fixture
def capability(monkeypatch):
    def be(major, minor):
        found = {"cuda": (major, minor)}
        monkeypatch.setattr(size_attention, "capability_of", lambda device: found.get(device.type))

    be(9, 0)
    return be


def options_of(*attention, **changes):
    graph, node = backward_of_attention(*attention, **changes)
    report = SizeAttention().run(graph, state())
    found = dict(node.args[POSITION_OF_OPTIONS])
    assert (report.applied == (node.name,)) is (found != attention[1])
    return found


@pytest.mark.parametrize(
    ("head", "options"), [(160, EIGHT_WARPS), (192, EIGHT_WARPS), (256, SMALL_BLOCKS)]
)
def test_wide_heads_get_the_options_of_their_chip(capability, head, options):
    assert options_of(head, GIVEN) == {**GIVEN, **options}
    capability(8, 0)
    assert options_of(head, GIVEN) == GIVEN


@pytest.mark.parametrize(
    "own", [{"num_warps": 4}, {"bwd_BLOCK_M1": 16}, {"bwd_num_stages": 1}, {"BACKEND": "FLASH"}]
)
def test_options_of_the_program_are_left_alone(capability, own):
    assert options_of(192, {**GIVEN, **own}) == {**GIVEN, **own}


@pytest.mark.parametrize(
    ("head", "changes"),
    [(128, {}), (257, {}), (192, {"device": "cpu"}), (192, {"dtype": torch.float32})],
)
def test_other_attention_is_left_alone(capability, head, changes):
    assert options_of(head, GIVEN, **changes) == GIVEN
