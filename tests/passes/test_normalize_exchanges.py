"""Collectives in the form the passes know: arguments by position, but for those by name alone."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd

from moe_compile.backend import rewrite
from moe_compile.config import MegaMoEConfig
from moe_compile.graph.inner_graphs import is_autograd_function
from moe_compile.graph.query import called_name, is_launch, overload_name, tensor_of, waits_on
from passes.normalize_exchanges import ELSEWHERE
from tests.capture import dynamo_graphs, same_program

C10D = torch.ops._c10d_functional


def launches_of(program):
    (gm,) = dynamo_graphs(program, torch.ones(4, 4))
    return [n for n in gm.graph.nodes if is_launch(n)]


def test_what_is_given_by_name_is_placed(fake_ranks):
    group = fake_ranks.group_name

    def program(x):
        y = C10D.all_reduce(x, group_name=group, reduce_op="sum")
        return C10D.wait_tensor(all_to_all_single_autograd(y, [2, 2], [2, 2], fake_ranks))

    for launch in launches_of(program):
        assert launch.args[-1] == group and not launch.kwargs
    assert launches_of(program)[0].args[1] == "sum"


def test_an_exchange_into_new_memory_is_a_launch_and_a_wait(fake_ranks):
    def program(x):
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=fake_ranks)
        return out * 2

    def expected(x):
        sent = C10D.all_to_all_single(x, [2, 2], [2, 2], fake_ranks.group_name)
        return C10D.wait_tensor(sent) * 2

    graphs = [dynamo_graphs(one, torch.ones(4, 4))[0].graph for one in (program, expected)]
    for graph in graphs:
        graph.eliminate_dead_code()
    assert same_program(*graphs) == ""


def test_what_is_taken_by_name_alone_stays_so(fake_ranks):
    """The gathered tensor became a fourth argument of a function that takes three."""

    def program(x):
        out = x.new_empty(8, 4)
        gathered = C10D.all_gather_into_tensor_out(
            x, group_size=2, group_name=fake_ranks.group_name, out=out
        )
        return C10D.wait_tensor(gathered)

    (launch,) = launches_of(program)
    assert launch.args[1:] == (2, fake_ranks.group_name)
    assert [*launch.kwargs] == ["out"]


def function_of(forward, backward):
    """Return an autograd Function of the two, whose forward is not given a context."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *args):
            return forward(*args)

        @staticmethod
        def backward(ctx, *gradients):
            return backward(*gradients)

    return Function


WAITS = function_of(C10D.wait_tensor, lambda gradient: gradient)
FUNCTIONS = {
    "waits": WAITS,
    "and doubles": function_of(lambda x: C10D.wait_tensor(x) * 2, lambda gradient: gradient * 2),
    "and halves the gradient": function_of(C10D.wait_tensor, lambda gradient: gradient * 0.5),
    "and keeps the gradient": function_of(C10D.wait_tensor, lambda gradient: None),
    "for a row": function_of(
        lambda x: C10D.wait_tensor(x)[0], lambda gradient: gradient.expand(4, 4)
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_only_a_function_that_waits_and_no_more_is_a_wait(fake_ranks, name):
    """Any function of the program that read such a launch was replaced by a wait."""

    def program(x):
        launch = torch.ops._c10d_functional_autograd.all_to_all_single
        return FUNCTIONS[name].apply(launch(x, [2, 2], [2, 2], fake_ranks.group_name))

    gm, *_ = dynamo_graphs(program, torch.ones(4, 4, requires_grad=True))
    (launch,) = [n for n in gm.graph.nodes if is_launch(n)]
    is_plain = overload_name(launch).startswith("_c10d_functional::")
    assert is_plain is (name == "waits")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_only_a_function_that_waits_again_and_no_more_hands_its_rows_on(fake_ranks, name):
    """transformers' experts read rows behind such a function: its effect on rows was not known."""

    def program(x):
        rows = all_to_all_single_autograd(x, [2, 2], [2, 2], fake_ranks)
        return FUNCTIONS[name].apply(rows) * 2

    gm, *_ = dynamo_graphs(program, torch.ones(4, 4, requires_grad=True))
    assert any(map(is_autograd_function, gm.graph.nodes)) is (name != "waits")


BESIDE_ANOTHER = function_of(
    lambda x, other: (C10D.wait_tensor(x), other.view_as(other)), lambda *gradients: gradients
)
GRADIENT_ELSEWHERE = function_of(
    lambda x, other: (C10D.wait_tensor(x), other.sum()), lambda _, of_sum: (None, of_sum)
)


@pytest.mark.parametrize("function", [BESIDE_ANOTHER, GRADIENT_ELSEWHERE], ids=["both", "one"])
def test_a_function_of_two_tensors_is_no_wait(fake_ranks, function):
    """Every tensor that it returned became the awaited one."""

    def program(x):
        launch = torch.ops._c10d_functional_autograd.all_to_all_single
        return function.apply(launch(x, [2, 2], [2, 2], fake_ranks.group_name), x)

    gm, *_ = dynamo_graphs(program, torch.ones(4, 4, requires_grad=True))
    (launch,) = [n for n in gm.graph.nodes if is_launch(n)]
    assert not overload_name(launch).startswith("_c10d_functional::")


def sizes(x):
    """Return rows received from and sent to each of two ranks, known to a run alone."""
    got, sent = x[:, 0].abs().to(torch.int64)[:2].tolist(), x[:, 1].abs().to(torch.int64)[:2]
    return got, sent.tolist()


def exchanged(x, got, sent, group):
    out = x.new_empty(sum(got), x.shape[1])
    dist.all_to_all_single(out, x.contiguous(), got, sent, group=group)
    return out


def exchanging(
    forward=lambda rows, *way: rows,
    backward=lambda gradient, got, sent, group: exchanged(gradient, sent, got, group),
):
    """Return an autograd Function that exchanges rows, then does `forward`; and `backward`."""

    class Exchanges(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, got, sent, group):
            ctx.way = got, sent, group
            return forward(exchanged(x, got, sent, group), got, sent, group)

        @staticmethod
        def backward(ctx, gradient):
            return backward(gradient, *ctx.way), None, None, None

    return Exchanges


def with_a_row_of_zeros(rows, got, sent, group):
    out = rows.new_zeros(sum(got) + 1, rows.shape[1])
    out[1:].copy_(rows)
    return out


EXCHANGES = {
    "exchanges": exchanging(),
    "and scales": exchanging(lambda rows, *way: rows * 2),
    "and scales the gradient": exchanging(
        backward=lambda gradient, got, sent, group: exchanged(gradient * 2, sent, got, group)
    ),
    "sends the gradient on, not to whom it came from": exchanging(
        backward=lambda gradient, got, sent, group: exchanged(gradient, sent, got[::-1], group)
    ),
    "twice": exchanging(lambda rows, got, sent, group: exchanged(rows, sent, got, group)),
    "fills partly": exchanging(
        with_a_row_of_zeros,
        lambda gradient, got, sent, group: exchanged(gradient[1:], sent, got, group),
    ),
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_only_a_function_that_exchanges_and_no_more_is_an_exchange(fake_ranks, name):
    def program(x):
        return EXCHANGES[name].apply(x, *sizes(x), fake_ranks)

    gm, *_ = dynamo_graphs(program, torch.ones(4, 4, requires_grad=True))
    launches = [n for n in gm.graph.nodes if is_launch(n)]
    kept = [n for n in gm.graph.nodes if is_autograd_function(n)]
    assert (len(launches), len(kept)) == ((1, 0) if name == "exchanges" else (0, 1))
    assert [waits_on(launch) != [] for launch in launches] == [True] * len(launches)


def exchanging_both(back):
    """Return an autograd Function that exchanges two tensors, and gradients in the order `back`."""

    class Exchanges(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y, got, sent, group):
            ctx.way = got, sent, group
            return exchanged(x, got, sent, group), exchanged(y, got, sent, group)

        @staticmethod
        def backward(ctx, *gradients):
            got, sent, group = ctx.way
            swapped = (exchanged(gradients[i], sent, got, group) for i in back)
            return *swapped, None, None, None

    return Exchanges


BOTH = {back: exchanging_both(back) for back in ((0, 1), (1, 0))}


@pytest.mark.parametrize("back", BOTH)
def test_a_function_may_exchange_two_tensors(fake_ranks, back):
    """Unless it gives each the other's gradient."""

    def program(x):
        first, second = BOTH[back].apply(x * 2, x * 3, *sizes(x), fake_ranks)
        return first - second

    gm, *_ = dynamo_graphs(program, torch.ones(4, 4, requires_grad=True))
    sent = [n.args[0].args[0].args[1] for n in gm.graph.nodes if is_launch(n)]
    assert sent == ([2, 3] if back == (0, 1) else [])


class Gathers(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        out = x.new_empty(2 * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx, gradient):
        return summed(gradient, ctx.group), None


class Scatters(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return summed(x, group)

    @staticmethod
    def backward(ctx, gradient):
        out = gradient.new_empty(2 * gradient.shape[0], *gradient.shape[1:])
        dist.all_gather_into_tensor(out, gradient.contiguous(), group=ctx.group)
        return out, None


class GathersAndAverages(Gathers):
    @staticmethod
    def backward(ctx, gradient):
        return summed(gradient, ctx.group, dist.ReduceOp.MAX), None


def summed(x, group, operation=dist.ReduceOp.SUM):
    out = x.new_empty(x.shape[0] // 2, *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous(), op=operation, group=group)
    return out


@pytest.mark.parametrize("function", [Gathers, Scatters, GathersAndAverages])
def test_gathers_and_scatters_of_a_function_are_plain_ones(fake_ranks, function):
    gm, *_ = dynamo_graphs(
        lambda x: function.apply(x, fake_ranks), torch.ones(4, 4, requires_grad=True)
    )
    names = [overload_name(n) for n in gm.graph.nodes if is_launch(n)]
    wanted = {Gathers: ["all_gather_into_tensor"], Scatters: ["reduce_scatter_tensor"]}
    assert names == [f"_c10d_functional::{name}" for name in wanted.get(function, [])]


def filled(x, group):
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out * 2


def filled_in_parts(x, group):
    parts = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(parts, x, group=group)
    return parts[0] - parts[1]


def written_after(x, group):
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    out.add_(1)
    return out


def viewed_before(x, group):
    out = torch.empty_like(x)
    first = out[0]
    dist.all_to_all_single(out, x, group=group)
    return first * 2


def into_an_input(x, group):
    dist.all_to_all_single(x, x * 2, group=group)
    return x + 1


def of_another_type(x, group):
    out = torch.empty_like(x, dtype=torch.float64)
    out.copy_(C10D.wait_tensor(C10D.all_to_all_single(x, [2, 2], [2, 2], group.group_name)))
    return out * 2


def without_gradient(x, group):
    out = torch.empty_like(x)
    brought = C10D.wait_tensor(C10D.all_to_all_single(x, [2, 2], [2, 2], group.group_name))
    with torch.no_grad():
        out.copy_(brought)
    return out * x


READ_AS_BROUGHT = (filled, filled_in_parts)
LEFT = (written_after, viewed_before, into_an_input, of_another_type, without_gradient)


@pytest.mark.parametrize("program", [*READ_AS_BROUGHT, *LEFT])
def test_filled_memory_is_what_was_brought_where_nothing_tells(fake_ranks, program):
    x = torch.ones(4, 4, requires_grad=program is without_gradient)
    gm, *_ = dynamo_graphs(lambda x: program(x, fake_ranks), x)
    copies = [n for n in gm.graph.nodes if n.target == "copy_"]
    assert (copies == []) == (program in READ_AS_BROUGHT)


def added(x, index):
    sums = torch.zeros_like(x)
    sums.index_add_(0, index, x)
    return sums * 2 + sums.view(-1, 4)


def added_in_columns(x, index):
    return x.new_zeros(x.shape).scatter_add_(0, index[:, None].expand(-1, 4), x)


def copied(x, index):
    copies = torch.empty_like(x)
    copies.index_copy_(0, index.argsort(), x)
    return copies * 2


def added_twice(x, index):
    sums = torch.zeros_like(x)
    sums.index_add_(0, index, x)
    return sums.index_add_(0, index, x)


def read_before(x, index):
    sums = torch.zeros_like(x)
    first = sums[0]
    sums.index_add_(0, index, x)
    return first * 2


def added_to_an_input(x, index):
    return x.index_add_(0, index, x * 2)


def added_to_what_was_written(x, index):
    sums = torch.empty_like(x)
    sums.fill_(1)
    return sums.index_add_(0, index, x)


ADDED_ELSEWHERE = (added, added_in_columns, copied)
ADDED_THERE = (added_twice, read_before, added_to_an_input, added_to_what_was_written)


@pytest.mark.parametrize("program", [*ADDED_ELSEWHERE, *ADDED_THERE])
def test_what_is_written_by_index_into_new_memory_is_written_to_a_copy(fake_ranks, program):
    x, index = torch.ones(4, 4), torch.tensor([2, 0, 2, 1])
    expected = program(x.clone(), index)
    gm, *_ = dynamo_graphs(program, x.clone(), index)
    in_place = [n for n in gm.graph.nodes if n.target in ELSEWHERE]
    assert (in_place == []) == (program in ADDED_ELSEWHERE)
    (y,) = gm(*(x if n.meta["example_value"].dim() == 2 else index for n in inputs_of(gm)))
    assert torch.equal(y, expected)


def inputs_of(gm):
    return gm.graph.find_nodes(op="placeholder")


def test_counts_are_as_many_as_the_program_asserts(fake_ranks):
    """A vector whose length was a symbol that can only be 8 was no vector of eight counts."""

    def program(x):
        counts = torch.bincount(x, minlength=8).view(2, 4).reshape(-1)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=fake_ranks)
        return received.view(2, 4).sum(1).tolist()

    gm, *_ = dynamo_graphs(program, torch.arange(8))
    (counted,) = [n for n in gm.graph.nodes if called_name(n) == "bincount"]
    assert [type(size) for size in tensor_of(counted).shape] == [int]


def text_of(gm):
    return gm.graph.python_code("self").src, [name for name, _ in gm.named_children()]


def test_a_graph_in_which_nothing_is_found_is_as_it_came(fake_ranks):
    """Tensor parallelism by Functions of the program: what Inductor keeps must be found again."""
    kept = []

    def keep(gm, inputs):
        before = text_of(gm)
        rewrite(gm, MegaMoEConfig(chunks=2))
        kept.append((before, text_of(gm)))
        return gm.forward

    x = torch.ones(4, 4, requires_grad=True)
    torch._dynamo.reset()
    torch.compile(lambda x: filled(Gathers.apply(x, fake_ranks), fake_ranks), backend=keep)(x)
    ((before, after),) = kept
    assert before == after and len(before[1]) == 2
