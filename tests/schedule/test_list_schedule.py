"""Schedules keep what must precede what, fill exchanges, and stay within memory."""

import dataclasses
import itertools

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from moe_compile.cost.cost_model import estimate_costs
from moe_compile.cost.sizes import NominalSizes
from moe_compile.graph.query import is_launch, is_wait, overload_name
from moe_compile.hardware import HardwareProfile
from moe_compile.schedule.choose_schedule import POLICIES, choose_schedule, launch_early, lean_order
from moe_compile.schedule.list_schedule import (
    Policy,
    first_result,
    incoming_order,
    list_schedule,
    nearest_launch,
)
from moe_compile.schedule.liveness import Liveness, MemoryHeadroom
from moe_compile.schedule.schedule_problem import ScheduleProblem
from moe_compile.schedule.simulate import simulate
from tests.scheduled_layers import ChunkedMoE, c10d, one_rank_group, post_grad_graphs

SLOW_LINK = HardwareProfile(
    name="slow link",
    matmul_tflops=1e-3,
    memory_gb_per_s=1e3,
    op_overhead_us=0.0,
    link_gb_per_s=1e-2,
    link_latency_us=1.0,
)
X = torch.ones(16, 16)


def exchange(x, group=None):
    rows = [x.shape[0]]
    return c10d.wait_tensor(c10d.all_to_all_single(x, rows, rows, group or one_rank_group()))


def problem_of(graph):
    sizes = NominalSizes({})
    sizes.learn(graph)
    return (
        ScheduleProblem.of(graph, estimate_costs(graph, sizes, SLOW_LINK)),
        Liveness.of(tuple(graph.nodes), sizes),
    )


def traced(program, *inputs):
    one_rank_group()
    return problem_of(make_fx(program, tracing_mode="fake")(*inputs).graph)


def letters(problem, order):
    names = [overload_name(problem.nodes[i]) for i in order]
    kinds = (
        "L" if is_launch(problem.nodes[i]) else "W" if is_wait(problem.nodes[i]) else name
        for i, name in zip(order, names, strict=True)
    )
    return "".join("m" if k.endswith("mm") else k for k in kinds if k in "LW" or k.endswith("mm"))


@pytest.fixture(scope="module")
def layer_problems():
    torch.manual_seed(0)
    layer = ChunkedMoE(64, 64, 8, 2, one_rank_group(), 4, shared=64)
    x = torch.randn(128, 64, dtype=torch.bfloat16, requires_grad=True)
    return [problem_of(gm.graph) for gm in post_grad_graphs(layer, x)]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_keeps_all_precedences(layer_problems, policy):
    for problem, _ in layer_problems:
        check_precedences(problem, list_schedule(problem, policy))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("increase", [0.0, 0.05])
def test_every_policy_stays_within_the_memory_it_is_given(layer_problems, policy, increase):
    for problem, liveness in layer_problems:
        known = incoming_order(problem)
        allowed = (1 + increase) * liveness.peak_bytes(known)
        order = list_schedule(problem, policy, MemoryHeadroom(liveness, known, allowed))
        check_precedences(problem, order)
        assert liveness.peak_bytes(order) <= allowed


def check_precedences(problem, order):
    place = {node: i for i, node in enumerate(order)}
    assert sorted(order) == list(range(len(problem.nodes)))
    assert all(place[p] < place[n] for n, ps in enumerate(problem.before) for p in ps)
    assert all(place[a] < place[b] for a, b in itertools.pairwise(problem.launches))


def test_without_being_given_one_some_need_more_memory(layer_problems):
    for problem, liveness in layer_problems:
        peaks = [liveness.peak_bytes(list_schedule(problem, policy)) for policy in POLICIES]
        assert max(peaks) > liveness.peak_bytes(incoming_order(problem))


def test_the_incoming_order_changes_launches_only(layer_problems):
    for problem, _ in layer_problems:
        check_precedences(problem, incoming_order(problem))


def test_an_order_that_holds_little_keeps_all_precedences(layer_problems):
    for problem, liveness in layer_problems:
        check_precedences(problem, lean_order(problem, liveness))


def test_a_chain_of_elementwise_ops_stays_with_its_reader():
    """Run early it would be fused with other things, or keep more alive."""

    def program(x):
        scaled = (x * 2 + 1).relu()
        received = exchange(x @ x)
        return received @ scaled, x @ x.t()

    problem, _ = traced(program, X)
    order = list_schedule(problem, Policy(key=nearest_launch))
    tail = [problem.nodes[i].name for i in order[-8:-1]]
    assert tail == ["t", "mm_2", "mul", "add", "relu", "wait_tensor", "mm_1"]


def test_a_wait_stands_before_its_first_reader_however_early_its_exchange_is_over():
    def program(x):
        received = exchange(x)
        for _ in range(20):
            x = x @ x
        return received @ x

    problem, _ = traced(program, X)
    order = list_schedule(problem, Policy(key=nearest_launch))
    assert letters(problem, order) == "L" + "m" * 20 + "Wm"


def test_compute_a_launch_needs_goes_before_other_compute():
    def program(x):
        side = x @ x @ x
        return exchange(exchange(x) @ x), side

    problem, _ = traced(program, X)
    order = list_schedule(problem, Policy(key=nearest_launch))
    assert letters(problem, order)[0] == "L"
    assert simulate(problem, order).step_us < simulate(problem, range(len(order))).step_us


def test_what_only_one_result_needs_lives_while_that_result_is_made():
    """Of two products, as the gradient of a weight is of two parts."""

    def program(x):
        received = exchange(x)
        first = [x @ (x + i) for i in range(4)]
        second = [x @ (x - i) for i in range(1, 5)]
        return *(a @ b for a, b in zip(first, second, strict=True)), received

    problem, liveness = traced(program, X)
    by_path = list_schedule(problem, Policy(key=nearest_launch))
    by_result = list_schedule(problem, Policy(key=first_result))
    results = {i for i in range(len(problem.nodes)) if problem.first_result[i] == i}
    products = [i for i in by_result if overload_name(problem.nodes[i]).endswith("mm")]
    assert [i in results for i in products] == [False, False, True] * 4
    assert liveness.peak_bytes(by_result) < liveness.peak_bytes(by_path)


def test_two_groups_have_a_link_each():
    other = torch.distributed.new_group([0], backend="gloo").group_name
    programs = (
        lambda x: exchange(x) + exchange(x + 1),
        lambda x: exchange(x) + exchange(x + 1, other),
    )
    times = []
    for program in programs:
        problem, _ = traced(program, X)
        times.append(simulate(problem, list_schedule(problem, Policy(key=nearest_launch))).step_us)
    one_link, two_links = times
    assert two_links == pytest.approx(one_link / 2, rel=0.05)


@pytest.mark.parametrize("increase", [0.0, 0.1, 9.0])
def test_memory_is_capped_and_more_of_it_never_slower(layer_problems, increase):
    for problem, liveness in layer_problems:
        choice = choose_schedule(problem, liveness, increase)
        least = liveness.peak_bytes(incoming_order(problem))
        allowed = max(least, (1 + increase) * choice.as_it_came.peak_bytes)
        assert choice.chosen.peak_bytes <= allowed
        generous = choose_schedule(problem, liveness, increase + 1)
        assert generous.chosen.score_us <= choice.chosen.score_us * 1.01


def test_too_little_memory_for_the_best_schedule_still_gains_something(layer_problems):
    """A schedule that may not look as far ahead, not the graph as it came."""
    problem, liveness = layer_problems[0]
    best = choose_schedule(problem, liveness, 9.0)
    increase = best.chosen.peak_bytes / best.as_it_came.peak_bytes - 1
    assert increase > 0
    capped = choose_schedule(problem, liveness, increase * 0.99)
    assert capped.is_capped
    assert capped.chosen.score_us < capped.as_it_came.score_us


def test_peaks_count_views_once_and_sent_tensors_until_the_wait():
    def program(x):
        sent = x + 1  # 1 KiB, alive until the wait
        received = exchange(sent.view(-1).view(16, 16))  # 1 KiB
        return received + 1  # 1 KiB

    problem, liveness = traced(program, X)
    assert liveness.peak_bytes(range(len(problem.nodes))) == 2 * X.nbytes


@pytest.mark.parametrize("policy", POLICIES)
def test_early_launches_keep_all_precedences_and_move_nothing_else(layer_problems, policy):
    for problem, _ in layer_problems:
        came = list_schedule(problem, policy)
        for order in (came, incoming_order(problem)):
            early = launch_early(problem, order)
            check_precedences(problem, early)
            assert early == launch_early(problem, early)
            assert others(problem, early) == others(problem, order)
            place = {node: i for i, node in enumerate(early)}
            assert all(place[n] <= order.index(n) for n in problem.launches)


def others(problem, order):
    """What is neither a launch nor a follower, which moves with the launch that needs it."""
    return [n for n in order if n not in problem.group_of and not problem.is_follower[n]]


def test_what_is_as_fast_launches_early():
    """Nothing waits for the product in between, and the exchange is over before it is."""

    def program(x):
        small = x[:1] * 2
        side = x @ x @ x
        received = exchange(small)
        return side @ x + received

    problem, liveness = traced(program, X)
    assert letters(problem, range(len(problem.nodes))) == "mmLWm"
    choice = choose_schedule(problem, liveness, 0.1)
    assert letters(problem, choice.chosen.order)[0] == "L"


def test_memory_that_forbids_it_keeps_a_launch_late():
    def program(x):
        sent = x.repeat(64, 1)
        side = (x @ x.repeat(1, 64)).sum(1)  # 64 KiB that are free again before the launch
        return exchange(sent), side

    problem, liveness = traced(program, X)
    early = launch_early(problem, range(len(problem.nodes)))
    assert letters(problem, early) == "LmW"
    choice = choose_schedule(problem, liveness, 0.0)
    assert choice.chosen.peak_bytes <= choice.as_it_came.peak_bytes < liveness.peak_bytes(early)
    assert letters(problem, choice.chosen.order) == "mLW"


def test_an_order_of_launches_that_needs_more_memory_has_it():
    """Both are made ready before the second is launched, which goes first."""

    def program(x):
        return exchange(x.repeat(64, 1)).sum(0), exchange(x.repeat(64, 1) * 2).sum(0)

    problem, liveness = traced(program, X)
    first, second = problem.launches
    turned = dataclasses.replace(problem, launches=(second, first), next_launch={second: first})
    needed = liveness.peak_bytes(incoming_order(turned))
    assert needed > liveness.peak_bytes(range(len(turned.nodes)))
    choice = choose_schedule(turned, liveness, 0.0)
    assert choice.chosen.peak_bytes <= needed
    assert [n for n in choice.chosen.order if n in turned.group_of] == [second, first]
