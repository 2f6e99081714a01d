"""Forms of `torch.compile` and of training around it: a layer is rewritten, and equals eager.

`docs/torch-compile.md` names these tests row by row, and `tests/test_site.py` holds that each
of them is there. A rank and its mirror image are enough: the forms do not change what is exchanged.
"""

import contextlib
import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import checkpoint

from moe_compile.report.process_report import REPORT
from tests.layers import GroupedExperts
from tests.slow_parameters import slow_but
from tests.this_torch import need, runs_exchanges_without_gradients

OPTIONS = {"megamoe.codegen": "fx", "megamoe.chunks": 2}


class Layer(GroupedExperts):
    """Keeps no process group, which neither `deepcopy` nor `pickle` takes."""

    group = property(lambda self: dist.group.WORLD, lambda self, group: None)


def new_layer(seed=0):
    return Layer(16, 24, 8, 2, dist.group.WORLD, seed=seed)


def rows(number, tokens=24):
    own = torch.Generator().manual_seed(100 * number + dist.get_rank())
    return torch.randn(tokens, 16, generator=own).bfloat16()


def step(function, layer, x):
    """Return output and gradients of a step; gradients are added to those that are there."""
    x = x if x.requires_grad else x.clone().requires_grad_()
    out = function(x)
    out.float().square().sum().backward()
    gradients = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
    return [out.detach(), x.grad, *gradients]


def compiled(layer, **arguments):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return torch.compile(layer, backend="megamoe", options=OPTIONS, **arguments)


def num_graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def are_equal(ours, theirs):
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def chunked_since(known):
    """Whether all that was compiled since was one region in two chunks."""
    verdicts = [(r.verdict, r.num_chunks) for c in REPORT.compilations[known:] for r in c.regions]
    return bool(verdicts) and set(verdicts) == {("chunked", 2)}


def check(found, expected):
    """Raise unless each rank found what is expected."""
    assert found == [expected] * len(found)


def sizes(rank, dynamic, is_marked):
    """Return the graphs after each of three numbers of tokens, and whether steps are as eager's."""
    known, layer, eager = len(REPORT.compilations), new_layer(), new_layer()
    function, graphs, equal = compiled(layer, dynamic=dynamic, fullgraph=True), [], []
    for number, tokens in enumerate((24, 40, 8)):
        x = rows(number, tokens)
        theirs = step(eager, eager, x)
        if is_marked:
            torch._dynamo.mark_dynamic(x.requires_grad_(), 0)
        equal.append(are_equal(step(function, layer, x), theirs))
        graphs.append(num_graphs())
    return graphs, all(equal), chunked_since(known)


@pytest.mark.parametrize(
    ("dynamic", "is_marked", "graphs"),
    [
        pytest.param(None, False, [1, 2, 2], id="default"),
        pytest.param(True, False, [1, 1, 1], id="dynamic"),
        pytest.param(False, False, [1, 2, 3], id="static", marks=pytest.mark.slow),
        pytest.param(None, True, [1, 1, 1], id="mark_dynamic"),
    ],
)
def test_numbers_of_tokens(mirrored_ranks, dynamic, is_marked, graphs):
    check(mirrored_ranks.run(sizes, dynamic, is_marked), (graphs, True, True))


@contextlib.contextmanager
def evaluating(layer):
    layer.eval()
    with torch.no_grad():
        yield
    layer.train()


AROUND = {
    "no_grad": lambda layer: torch.no_grad(),
    "inference_mode": lambda layer: torch.inference_mode(),
    "eval": evaluating,
}


def between(rank, name):
    """Train, run once without gradients, train: all as eager, both forms in chunks."""
    known, layer, eager = len(REPORT.compilations), new_layer(), new_layer()
    function, equal = compiled(layer, fullgraph=True), []
    for number in range(2):
        equal.append(
            are_equal(step(function, layer, rows(number)), step(eager, eager, rows(number)))
        )
        with AROUND[name](layer):
            ours = function(rows(9))
        with AROUND[name](eager):
            theirs = eager(rows(9))
        equal.append(torch.equal(ours, theirs))
    return all(equal), chunked_since(known), num_graphs()


@pytest.mark.parametrize("name", slow_but(["inference_mode"], AROUND))
def test_a_step_without_gradients_between_two_that_train(mirrored_ranks, name):
    need(runs_exchanges_without_gradients)
    check(mirrored_ranks.run(between, name), (True, True, 2))


def in_place(layer):
    layer.compile(backend="megamoe", options=OPTIONS)
    return layer


def its_forward(layer):
    layer.forward = torch.compile(layer.forward, backend="megamoe", options=OPTIONS)
    return layer


def a_function(layer):
    @torch.compile(backend="megamoe", options=OPTIONS)
    def block(x):
        return layer(x) / 2

    return block


def within_another(layer):
    inner = torch.compile(layer, backend="megamoe", options=OPTIONS)
    return torch.compile(lambda x: inner(x * 1.0), backend="megamoe", options=OPTIONS)


def checkpointed(layer):
    function = torch.compile(layer, backend="megamoe", options=OPTIONS)
    return lambda x: checkpoint(function, x, use_reentrant=False)


def of_a_model(layer):
    model = nn.Sequential(nn.Identity(), layer)
    model[1].compile(backend="megamoe", options=OPTIONS)
    return model


def as_a_function_of_its_weights(layer):
    weights = dict(layer.named_parameters())
    call = lambda x: torch.func.functional_call(layer, weights, (x,))  # noqa: E731
    return torch.compile(call, backend="megamoe", options=OPTIONS)


FORMS = (
    in_place,
    its_forward,
    a_function,
    within_another,
    checkpointed,
    of_a_model,
    as_a_function_of_its_weights,
)


def form_of(rank, form):
    torch._dynamo.reset()
    known, layer, eager = len(REPORT.compilations), new_layer(), new_layer()
    theirs = step(halved(eager) if form is a_function else eager, eager, rows(0))
    return are_equal(step(form(layer), layer, rows(0)), theirs), chunked_since(known)


def halved(layer):
    return lambda x: layer(x) / 2


@pytest.mark.parametrize("form", FORMS)
def test_a_part_of_a_program(mirrored_ranks, form):
    check(mirrored_ranks.run(form_of, form), (True, True))


def states(rank):
    """Return names of what is compiled by either way, and whether weights go to and fro."""
    torch._dynamo.reset()
    wrapped, plain, eager = compiled(new_layer()), in_place(new_layer()), new_layer()
    for function in (wrapped, plain):
        function(rows(0))
    before = num_graphs()
    other = new_layer(seed=5)
    plain.load_state_dict(other.state_dict())
    wrapped.load_state_dict({f"_orig_mod.{k}": v for k, v in other.state_dict().items()})
    kept = io.BytesIO()
    torch.save(plain.state_dict(), kept)
    eager.load_state_dict(torch.load(io.BytesIO(kept.getvalue()), weights_only=True))
    expected = eager(rows(1))
    are_taken = all(torch.equal(function(rows(1)), expected) for function in (wrapped, plain))
    names = {name.partition(".")[0] for name in wrapped.state_dict()}
    return names, [*plain.state_dict()] == [*eager.state_dict()], are_taken, num_graphs() - before


def test_weights_are_saved_and_loaded(mirrored_ranks):
    check(mirrored_ranks.run(states), ({"_orig_mod"}, True, True, 0))


def copies(rank):
    """A copy has weights of its own, and is compiled by megamoe too."""
    known, layer = len(REPORT.compilations), new_layer()
    first = compiled(layer)
    before = step(first, layer, rows(0))
    second = copy.deepcopy(first)
    with torch.no_grad():
        second.router.mul_(0.5)
    eager = copy.deepcopy(second._orig_mod)
    eager.zero_grad()
    second.zero_grad()
    are_apart = not torch.equal(first.router, second.router)
    is_equal = are_equal(step(second, second, rows(1)), step(eager, eager, rows(1)))
    return are_apart, is_equal, chunked_since(known), len(before) == 6


def test_a_copy_of_what_is_compiled(mirrored_ranks):
    check(mirrored_ranks.run(copies), (True, True, True, True))


def added_up(rank):
    """Return whether the gradients of two microbatches, and a step of an optimizer, are eager's."""
    known, layer, eager = len(REPORT.compilations), new_layer(), new_layer()
    function, equal = compiled(layer), []
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (layer, eager)]
    for number in range(4):
        equal.append(
            are_equal(step(function, layer, rows(number)), step(eager, eager, rows(number)))
        )
        if number % 2:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return all(equal), num_graphs(), chunked_since(known)


def test_gradients_are_added_up_over_microbatches(mirrored_ranks):
    check(mirrored_ranks.run(added_up), (True, 1, True))


def frozen(rank):
    """Freeze a weight between two steps, and thaw it."""
    known, layer, eager = len(REPORT.compilations), new_layer(), new_layer()
    function, equal = compiled(layer), []
    for number, needs in enumerate((True, False, True)):
        for one in (layer, eager):
            one.zero_grad()
            one.w1.requires_grad_(needs)
        equal.append(
            are_equal(step(function, layer, rows(number)), step(eager, eager, rows(number)))
        )
    return all(equal), num_graphs(), chunked_since(known)


def test_a_weight_is_frozen_between_steps(mirrored_ranks):
    for is_equal, number, is_chunked in mirrored_ranks.run(frozen):
        assert is_equal and is_chunked
        assert number in (1, 2)  # torch 2.11 runs the code of the first step


def reset(rank):
    known, layer, eager = len(REPORT.compilations), new_layer(), new_layer()
    function, equal = compiled(layer), []
    for number in range(2):
        equal.append(
            are_equal(step(function, layer, rows(number)), step(eager, eager, rows(number)))
        )
        torch._dynamo.reset()
    return all(equal), chunked_since(known), len(REPORT.compilations) - known


def test_a_reset_between_steps(mirrored_ranks):
    check(mirrored_ranks.run(reset), (True, True, 2))


def stances(rank):
    """All ranks run eagerly for a step, by a stance, and then compiled again."""
    known, layer, eager = len(REPORT.compilations), new_layer(), new_layer()
    function, equal = compiled(layer), []
    for number, stance in enumerate(("default", "force_eager", "default")):
        with torch.compiler.set_stance(stance):
            ours = step(function, layer, rows(number))
        equal.append(are_equal(ours, step(eager, eager, rows(number))))
    return all(equal), chunked_since(known), num_graphs()


def test_a_stance_that_all_ranks_take(mirrored_ranks):
    check(mirrored_ranks.run(stances), (True, True, 1))


def hooked(rank):
    """Count calls of hooks on the module, its output, and a parameter's gradient."""
    known, layer, eager, seen = len(REPORT.compilations), new_layer(), new_layer(), []
    layer.register_forward_hook(lambda *_: seen.append("forward"))
    layer.w1.register_post_accumulate_grad_hook(lambda _: seen.append("accumulated"))
    layer.w2.register_hook(lambda _: seen.append("gradient"))
    function = compiled(layer)
    is_equal = are_equal(step(function, layer, rows(0)), step(eager, eager, rows(0)))
    return is_equal, sorted(seen), chunked_since(known)


def test_hooks_are_called(mirrored_ranks):
    expected = (True, ["accumulated", "forward", "gradient"], True)
    check(mirrored_ranks.run(hooked), expected)


def by_compiled_autograd(rank):
    """Return also how many backward passes compiled autograd captured."""
    known, layer, eager = len(REPORT.compilations), new_layer(), new_layer()
    function = compiled(layer)
    with compiled_autograd._enable(torch.compile(backend="eager")):
        ours = step(function, layer, rows(0))
    captures = torch._dynamo.utils.counters["compiled_autograd"]["captures"]
    return are_equal(ours, step(eager, eager, rows(0))), chunked_since(known), captures


def test_compiled_autograd(mirrored_ranks):
    check(mirrored_ranks.run(by_compiled_autograd), (True, True, 1))
