"""Each fault that is worked around, on torch alone: a test fails where torch has mended its fault.

That is the torch which `make test` installs. In others, which `make lanes` installs, it is skipped.
"""

import re
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn.attention import SDPBackend, sdpa_kernel

from moe_compile.graph.inner_graphs import bodies
from moe_compile.hardware.chip_limits import leaves_empty_groups
from passes import pin_order
from tests.graph import test_pinning
from tests.this_torch import ends_graphs_at_lists
from tests.torch_quirks.test_python311_frames import CALLS, most_pages
from tests.torch_quirks.test_results_given_twice import filled
from tests.torch_quirks.test_size_constants import Capacity
from tests.torch_quirks.test_unbacked_shapes import masks


@pytest.fixture(autouse=True)
def reads_in_graphs():
    """As megamoe has them, and none of its callbacks."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True, suppress_errors=False):
        yield
    torch._dynamo.reset()


MAKEFILE = Path(__file__).parents[2] / "Makefile"
INSTALLED = re.search(r"^TORCH := (\S+)", MAKEFILE.read_text(), re.MULTILINE)[1]


def gone(name, shown, *, is_known=False):
    """End a test that did not show its fault; `is_known` where only older releases have it."""
    if shown:
        return
    mended = f"torch {torch.__version__} has mended it: once it is the least, {name} may go"
    if not is_known and torch.__version__.partition("+")[0] == INSTALLED:
        pytest.fail(f"{mended}. Until then say here that it is known, and there where it was seen")
    pytest.skip(mended)


def test_calls_at_the_edge_of_a_chunk_take_memory_each_time():
    """In a thread, whose frames begin in a chunk of their own."""
    pages = []
    thread = threading.Thread(target=lambda: pages.append(most_pages()))
    thread.start()
    thread.join()
    gone("python311_frames", pages[0] >= CALLS // 3, is_known=sys.version_info[:2] != (3, 11))


def test_a_choice_of_attention_kernels_is_refused_by_the_cache():
    def attention(x):
        with sdpa_kernel(SDPBackend.MATH):
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    counted = torch._dynamo.utils.counters["aot_autograd"]
    counted.clear()
    torch.compile(attention, backend="inductor", fullgraph=True)(torch.ones(1, 1, 2, 4))
    gone("aot_cache_allowlist", counted["autograd_cache_bypass"] > 0)


def test_beyond_its_limit_dynamo_runs_code_eagerly():
    graphs = []

    def count(gm, example_inputs):
        graphs.append(gm)
        return gm

    compiled = torch.compile(lambda x: x * 2, backend=count, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=False):
        for size in (2, 3):
            compiled(torch.ones(size))
    gone("recompile_limit", len(graphs) == 1)


def test_a_list_indexed_by_a_number_that_is_read_is_an_error():
    gone("untraceable_guards", not ends_graphs_at_lists())


def test_a_number_of_a_symbol_is_its_stand_in():
    program = Capacity()
    compiled = torch.compile(program, backend="aot_eager")
    inputs = [torch.ones(tokens) for tokens in (16, 24, 32)]
    gone("size_constants", not all(torch.equal(compiled(x), program(x)) for x in inputs))


def test_a_shape_that_needs_a_read_value_is_an_error():
    compiled = torch.compile(masks, backend="aot_eager")
    try:
        for size, classes in ((8, 8), (8, 4), (12, 4)):
            compiled(torch.arange(size) % 3, classes)
    except (torch._dynamo.exc.BackendCompilerFailed, GuardOnDataDependentSymNode):
        return
    gone("unbacked_shapes", shown=False)


def test_the_body_of_a_function_hands_on_all_that_it_makes():
    class Raised(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2 + 1

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    graphs = []

    def keep(gm, example_inputs):
        graphs.append(gm)
        return gm

    torch.compile(Raised.apply, backend=keep)(torch.ones(2, requires_grad=True))
    (function,) = (n for n in graphs[0].graph.nodes if "autograd_function" in str(n.target))
    results = bodies(function)[0].graph.output_node().args[0][0]
    is_all = isinstance(results, tuple | list) and len(results) > 1
    gone("the places that are read in passes/function_exchanges.py", is_all, is_known=True)


@pytest.mark.slow
def test_nothing_is_held_behind_a_tuple(monkeypatch):
    monkeypatch.setattr(pin_order, "_take_elements_at_once", lambda graph: None)
    try:
        test_pinning.test_fusion_does_not_pull_a_wait_over_attention()
    except AssertionError:
        return
    gone("the elements in passes/pin_order.py", shown=False, is_known=True)


@pytest.mark.slow
def test_inductor_lowers_no_slice_with_an_open_end_of_unknown_length():
    def cut(x, places):
        rows = torch.cat([x, x.new_zeros(places.tolist()[0], 2)])  # 8 and more, so that 2 is known
        return rows[2:] * 2

    try:
        torch.compile(cut, backend="inductor", fullgraph=True)(torch.ones(8, 2), torch.tensor([5]))
    except torch._inductor.exc.InductorError:
        return
    gone("the end of slices in passes/replay/replayed.py", shown=False, is_known=True)


@pytest.mark.gpu
def test_a_group_without_rows_leaves_its_gradient_unwritten():
    """On GPUs of compute capability 10 alone: elsewhere there is no pass to do without."""
    device = torch.device("cuda")
    if not leaves_empty_groups(device):
        pytest.skip("no fault of this GPU is known")
    left, right = torch.randn(2, 64, 128, device=device, dtype=torch.bfloat16)
    held = torch.full((8, 128, 128), torch.nan, device=device, dtype=torch.bfloat16)
    del held  # what the product is written into
    ends = torch.tensor([8, 8, 24, 24, 40, 40, 64, 64], device=device, dtype=torch.int32)
    out = torch._grouped_mm(left.t(), right, offs=ends)
    gone("zero_empty_groups", bool((out[1::2] != 0).any()))


def test_a_result_that_is_written_in_place_has_no_gradient():
    torch._dynamo.reset()
    x = torch.ones(3, requires_grad=True)
    torch.compile(filled, backend="eager")(x).sum().backward()
    gone("results_given_twice", not x.grad.any(), is_known=True)
