"""Ranks that decide alike run what they compiled; ranks that do not run the user's program.

Each test has a process group of its own: what ranks agree on holds for one group.
"""

import contextlib
import logging
import os
import re
import signal
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce, all_to_all_single_autograd
from torch.utils.checkpoint import checkpoint

from moe_compile.errors import RankDisagreement
from moe_compile.first_run import AsWritten
from moe_compile.hardware.detect import agree_on_profile, detected_profile
from moe_compile.report.process_report import REPORT
from moe_compile.report.region_reports import AS_WRITTEN
from moe_compile.runtime import agree_on_machine, agreement
from moe_compile.runtime.launch_records import executed_records
from moe_compile.testing.rank_pool import RankFailure, RankPool
from passes.rewrite_regions import RewriteRegions
from tests.layers import WAIT, Centred, GroupedExperts

OPTIONS = {"megamoe.codegen": "fx", "megamoe.chunks": 2}
WIDTH = 16
TIMEOUT_S = 20


def compiled(layer, **more):
    options = {**OPTIONS, **{f"megamoe.{name}": value for name, value in more.items()}}
    return torch.compile(layer, backend="megamoe", fullgraph=True, options=options)


def step(layer, x):
    """Return output and gradient of a step, as one tensor's bytes are compared."""
    x = x.clone().requires_grad_()
    out = layer(x)
    out.sum().backward()
    return out.detach(), x.grad


def run_steps(rank, style, tokens, **more):
    """Run a step per number of `tokens`, compiled and as it is; return what ran, and if alike."""
    torch._dynamo.reset()
    layer = style(WIDTH, 24, 8, 2, dist.new_group())
    ours = compiled(layer, **more)
    theirs = torch.compile(layer) if more.get("codegen") == "inductor" else layer
    before = len(executed_records())
    alike = []
    for number, num_tokens in enumerate(tokens):
        torch.manual_seed(10 * number + rank)
        x = torch.randn(num_tokens, WIDTH, dtype=torch.bfloat16)
        pairs = zip(step(ours, x), step(theirs, x), strict=True)
        alike.append(all(torch.equal(a, b) for a, b in pairs))
    records = executed_records()[before:]
    return alike, [(r["phase"], sum(map(len, r["launches"].values()))) for r in records]


def bodies_differ(rank, codegen):
    style, before = (GroupedExperts, Centred)[rank], len(REPORT.compilations)
    ran = run_steps(rank, style, (8, 12 + rank, 9), codegen=codegen)
    regions = [region for c in REPORT.compilations[before:] for region in c.regions]
    return *ran, {(region.verdict, region.num_chunks) for region in regions}


@pytest.mark.slow
@pytest.mark.parametrize("codegen", ["fx", "inductor"])
def test_layers_whose_bodies_differ_by_rank_are_left_whole_on_all(two_ranks, codegen):
    """Ranks were stopped, though the program is right and only our rewrites did not fit."""
    for alike, records, reported in two_ranks.run(bodies_differ, codegen):
        assert alike == [True] * 3
        assert records == []  # no pass of ours is in any graph
        assert reported == {(AS_WRITTEN, 1)}


def compilation_as_written_fails(rank):
    """The bodies differ; rank 1 cannot compile what it wrote. Another program follows."""
    compile_whole = AsWritten.compile
    failing = mock.Mock(side_effect=AssertionError("out of symbols"))
    style = (GroupedExperts, Centred)[rank]
    with contextlib.ExitStack() as stack:
        said = stack.enter_context(warnings_of("moe_compile"))
        if rank == 1:
            broken = mock.patch.object(AsWritten, "compile", lambda w, _: compile_whole(w, failing))
            stack.enter_context(broken)
        ran = run_steps(rank, style, (8,))
    after = run_steps(rank, GroupedExperts, (8,))
    return ran, after[0], [text for text in said if "out of symbols" in text]


@pytest.mark.slow
def test_a_program_that_cannot_be_compiled_as_written_runs_node_by_node(two_ranks):
    """It raised after it had promised its collectives, and the next program was taken for it."""
    found = two_ranks.run(compilation_as_written_fails)
    for (alike, records), after, _ in found:
        assert (alike, records, after) == ([True], [], [True])
    assert [len(said) for _, _, said in found] == [0, 1]


def second_layers_differ(rank, late):
    """Two layers with alike collectives, compiled apart; the second differs by rank."""
    torch._dynamo.reset()
    group = dist.new_group()
    layers = [GroupedExperts(WIDTH, 24, 8, 2, group)]
    layers += [(GroupedExperts, Centred)[rank](WIDTH, 32, 8, 2, group)]
    before, alike = len(executed_records()), []
    torch.manual_seed(0)
    x = torch.randn(8, WIDTH, dtype=torch.bfloat16)
    for layer in layers:
        time.sleep(1.5 * (rank == late))
        pairs = zip(step(compiled(layer), x), step(layer, x), strict=True)
        alike.append(all(torch.equal(a, b) for a, b in pairs))
    return alike, len(executed_records()) - before


@pytest.mark.slow
@pytest.mark.parametrize("late", [1, 0])
def test_what_was_agreed_for_one_layer_does_not_bind_another_like_it(two_ranks, late):
    """Whoever came first had launched the second layer's exchanges: the job was stopped."""
    (alike, first), (others_alike, second) = two_ranks.run(second_layers_differ, late)
    assert alike == others_alike == [True] * 2
    assert first == second > 0  # of the first layer, which stays rewritten


def fail_on_rank_one(rank):
    with contextlib.ExitStack() as stack:
        if rank == 1:
            failing = mock.Mock(side_effect=RuntimeError("out of luck"))
            stack.enter_context(mock.patch.object(RewriteRegions, "run", failing))
        return run_steps(rank, GroupedExperts, (8,))


def test_a_pass_that_fails_on_one_rank_leaves_the_program_whole_on_all(two_ranks):
    for alike, records in two_ranks.run(fail_on_rank_one):
        assert (alike, records) == ([True], [])


def recompile_alone(rank):
    """Rank 1 changes its number of tokens, to one as well, and so recompiles; rank 0 does not."""
    return run_steps(rank, GroupedExperts, (16, 16 + 4 * rank, 16 - 15 * rank, 16))


@pytest.mark.slow
def test_a_rank_that_recompiles_alone_runs_on_with_those_that_do_not(two_ranks):
    (alike, first), (others_alike, second) = two_ranks.run(recompile_alone)
    assert alike == others_alike == [True] * 4
    assert len(first) < len(second)  # rank 1 did compile more graphs
    for phase in ("forward", "backward"):
        assert len({launches for p, launches in (*first, *second) if p == phase}) == 1


class Measured(GroupedExperts):
    """Sums figures over all ranks; with one token one of them does not depend on the others."""

    def forward(self, x):
        y = super().forward(x)
        found = y.detach().float()
        total = self.summed(found.sum())
        spread = (found - total).square() if x.shape[0] > 1 else found * 2
        figures = total + self.summed(spread.sum()) * 2 + self.summed(found.abs().sum()) * 4
        return y + figures.to(y.dtype)

    def summed(self, number):
        return WAIT(all_reduce(number, "sum", self.group))


def recompile_other_dependences(rank):
    return run_steps(rank, Measured, (5, 5 - 4 * rank, 5 * rank, 6))


@pytest.mark.slow
def test_a_rank_whose_graph_depends_otherwise_launches_in_the_same_order(two_ranks):
    """Reductions met others' reductions, silently: their order followed from dependences."""
    for alike, records in two_ranks.run(recompile_other_dependences):
        assert alike == [True] * 4
        assert records


class TwoLayers(torch.nn.Module):
    """The second reads the mean of the first one's result, on rank 0 alone."""

    def __init__(self, *sizes):
        super().__init__()
        self.first, self.second = GroupedExperts(*sizes), GroupedExperts(*sizes)

    def forward(self, x):
        y = self.first(x)
        return y + self.second(x + y.mean() if dist.get_rank() == 0 else x * 2)


def run_two_layers(rank, promised):
    return run_steps(rank, TwoLayers, (8,), equal_tokens=promised)


@pytest.mark.slow
@pytest.mark.parametrize("promised", [False, True])
def test_regions_that_need_one_another_on_one_rank_only_stop_nobody(two_ranks, promised):
    """Orders followed from what the user's code needs there; promised they do: as written."""
    for alike, records in two_ranks.run(run_two_layers, promised):
        assert alike == [True]
        assert bool(records) is not promised


class Breaking(torch.nn.Module):
    """Two layers, each with a sum, in two graphs on ranks where `breaks` says so."""

    def __init__(self, make, group, breaks):
        super().__init__()
        self.first, self.second, self.group, self.breaks = make(), make(), group, breaks

    def forward(self, x):
        y = self.first(x)
        y = y + self.summed(y, "max")
        if self.breaks:
            torch._dynamo.graph_break()
        return self.second(y) + self.summed(y, "sum")

    def summed(self, y, how):
        return WAIT(all_reduce(y.detach().float().sum(), how, self.group)).to(y.dtype)


def break_on_rank_zero(rank, has_experts):
    torch._dynamo.reset()
    group = dist.new_group()
    make = (lambda: GroupedExperts(WIDTH, 24, 8, 2, group)) if has_experts else torch.nn.Identity
    layer, alike = Breaking(make, group, rank == 0), []
    ours = torch.compile(layer, backend="megamoe", options=OPTIONS)
    for tokens in (8, 8, 9 + rank):
        x = torch.randn(tokens, WIDTH, dtype=torch.bfloat16)
        pairs = zip(step(ours, x), step(layer, x), strict=True)
        alike.append(all(torch.equal(a, b) for a, b in pairs))
    return alike


@pytest.mark.parametrize("has_experts", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ranks_may_launch_in_two_calls_what_others_launch_in_one(two_ranks, has_experts):
    """They were stopped as if they launched different collectives, for a `print` on one rank."""
    assert two_ranks.run(break_on_rank_zero, has_experts) == [[True] * 3] * 2


class CheckpointedTwice(GroupedExperts):
    """Two calls of a layer inside of checkpoints; the second has the routing of the input."""

    def forward(self, x):
        routing = self.routing(x)
        y = checkpoint(lambda x: self.routed(x, self.routing(x)), x, use_reentrant=False)
        y = y * (1 + routing[2][0] * 0.125)
        return checkpoint(lambda x: self.routed(x, routing), y, use_reentrant=False)

    def routing(self, x):
        _, chosen = self.route(x)
        flat = chosen.reshape(-1)
        counts = (flat[:, None] == torch.arange(self.num_experts)).sum(0)
        received = self.exchange_counts(counts)
        return torch.argsort(flat, stable=True), received, *self.splits(counts, received)

    def routed(self, x, routing):
        order, received, sent, got = routing
        rows = all_to_all_single_autograd(x[order // self.top_k], got, sent, self.group)
        out = all_to_all_single_autograd(self.experts(rows, received), sent, got, self.group)
        return torch.zeros_like(x).index_add(0, order // self.top_k, out)


def checkpointed_twice(rank, recompute):
    return run_steps(rank, CheckpointedTwice, (3 - 3 * rank, 4), recompute=recompute)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["recompute_exchanges", "model", "save_exchanges"])
def test_a_rank_without_tokens_exchanges_again_what_the_others_do(two_ranks, recompute):
    """Its gradients need less of what is computed again, and later: gloo aborted the process."""
    for alike, _ in two_ranks.run(checkpointed_twice, recompute):
        assert alike == [True] * 2


class CentredBySize(Centred):
    """Mixes rows unless there are five tokens."""

    def forward(self, x):
        self.is_centred = x.shape[0] != 5
        return super().forward(x)

    def experts(self, rows, received):
        if self.is_centred:
            return super().experts(rows, received)
        return GroupedExperts.experts(self, rows, received)


def choose_by_size(rank):
    return run_steps(rank, CentredBySize, (5, 7, 5 + 2 * rank, 5))


@pytest.mark.slow
def test_ranks_that_choose_apart_between_two_agreed_programs_run_them_as_written(two_ranks):
    """Rank 0 ran its chunks while rank 1 ran the program that both had left whole."""
    for alike, records in two_ranks.run(choose_by_size):
        assert alike == [True] * 4
        assert [phase for phase, _ in records] == ["forward", "backward"]  # of the first step


def run_layers_of_other_sizes(rank):
    torch._dynamo.reset()
    group = dist.new_group()
    before = len(executed_records())
    for num_experts in (8, 12):
        layer = compiled(GroupedExperts(WIDTH, 24, num_experts, 2, group))
        step(layer, torch.randn(5 + rank, WIDTH, dtype=torch.bfloat16))
    return [r["phase"] for r in executed_records()[before:]]


@pytest.mark.slow
def test_layers_of_one_class_with_other_weights_keep_a_plan_each(two_ranks):
    """Both ran as written from the second on, as if a rank chose between them by its tokens."""
    for phases in two_ranks.run(run_layers_of_other_sizes):
        assert phases == ["forward", "backward"] * 2


def gather_other_tokens(rank):
    options = {"dispatch": "all_gather", "equal_tokens": True}
    return run_steps(rank, GroupedExperts, (8 + 4 * rank,), **options)


def test_a_broken_promise_of_equal_tokens_costs_the_rewrite_only(two_ranks):
    for alike, records in two_ranks.run(gather_other_tokens):
        assert (alike, records) == ([True], [])


def late(rank, seconds):
    torch._dynamo.reset()
    layer = GroupedExperts(WIDTH, 24, 8, 2, dist.new_group())
    x = torch.randn(8, WIDTH, dtype=torch.bfloat16)
    began = time.monotonic()
    if rank == 1:
        time.sleep(seconds)
    ours = step(compiled(layer), x)
    waited = time.monotonic() - began
    return waited, all(torch.equal(a, b) for a, b in zip(ours, step(layer, x), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [3, 60])
def test_a_late_rank_is_waited_for(two_ranks, seconds):
    for waited, is_alike in two_ranks.run(late, seconds):
        assert waited >= seconds
        assert is_alike


def late_beyond_patience(rank, seconds):
    with mock.patch.object(agreement, "SILENCE_S", 1.0), warnings_of("moe_compile") as said:
        late(rank, seconds)
    return [text for text in said if "goes on waiting" in text]


@contextlib.contextmanager
def warnings_of(name):
    """Yield the messages that the logger `name` gets meanwhile."""
    said = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger(name).addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger(name).removeHandler(handler)


@pytest.mark.slow
def test_a_rank_that_waits_long_says_for_what(two_ranks):
    """A rank that runs the layer eagerly answers never; nothing was said for half an hour."""
    waiting, late_one = two_ranks.run(late_beyond_patience, 3)
    (text,) = waiting
    assert "ranks [1] did not reach collective 1 of compiled code on process group" in text
    assert "at layers.py:" in text
    assert not late_one


def find_other_machines(rank):
    with mock.patch.object(agree_on_machine, "own_profile", lambda: ("h200", "h100")[rank]):
        agree_on_machine.agree_on_machines()
    found = detected_profile()
    agree_on_profile("")  # nor is this the machine of other tests
    return found


def test_ranks_of_a_mixed_cluster_plan_for_one_machine(two_ranks):
    assert two_ranks.run(find_other_machines) == ["h100", "h100"]


def killed(rank):
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    layer = compiled(GroupedExperts(WIDTH, 24, 8, 2, group))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        layer(torch.randn(8, WIDTH, dtype=torch.bfloat16))
    except RankDisagreement as error:
        return time.monotonic() - began, str(error)
    return 0.0, "ran"


@pytest.mark.slow
def test_a_killed_rank_is_waited_for_until_the_groups_own_timeout(tmp_path):
    said = tmp_path / "said"
    ended = pytest.raises(RankFailure, match="process of rank 1 ended")
    with RankPool(2, timeout_s=120) as pool, ended:
        pool.run(keep_what_rank_zero_saw, said)
    waited, message = said.read_text().split("\n", 1)
    assert float(waited) >= TIMEOUT_S
    assert "ranks [1] did not reach collective 1 of compiled code on process group" in message
    assert re.search(rf"at layers.py:\d+ in exchange_counts within {TIMEOUT_S} s, ", message)
    assert "s, the time-out of the process group: these ranks are late" in message


def keep_what_rank_zero_saw(rank, path):
    waited, message = killed(rank)
    path.write_text(f"{waited}\n{message}")


def four_with_two_axes(rank, other, are_both_exchanges=False):
    """Each rank exchanges with one and sums, or exchanges, with another; a body of `other` differs.

    Return whether values are eager's, and how many graphs were recorded.
    """
    torch._dynamo.reset()
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    style, column = Centred if rank == other else GroupedExperts, columns[rank % 2]
    layer = style(WIDTH, 24, 8, 2, rows[rank // 2])
    if are_both_exchanges:
        layer = torch.nn.Sequential(layer, GroupedExperts(WIDTH, 24, 8, 2, column))
    else:
        layer = SummedOver(layer, column)
    x = torch.randn(8, WIDTH, dtype=torch.bfloat16)
    before = len(executed_records())
    pairs = zip(step(compiled(layer), x), step(layer, x), strict=True)
    return all(torch.equal(a, b) for a, b in pairs), len(executed_records()) - before


class SummedOver(torch.nn.Module):
    def __init__(self, experts, group):
        super().__init__()
        self.experts, self.group = experts, group

    def forward(self, x):
        out = self.experts(x)
        return out + torch.distributed._functional_collectives.all_reduce(
            out.detach(), "sum", self.group
        )


@pytest.mark.slow
def test_ranks_decide_with_those_they_exchange_with_only(four_ranks):
    """Ranks 0 and 1 see no difference in their exchanges; sums with 2 and 3 are as written."""
    found = four_ranks.run(four_with_two_axes, 3)
    assert [is_alike for is_alike, _ in found] == [True] * 4
    assert [num_records > 0 for _, num_records in found] == [True, True, False, False]


@pytest.mark.slow
def test_ranks_that_exchanges_connect_decide_together(four_ranks):
    """Rank 0 exchanges with neither 3 nor what differs there, yet must not stay rewritten."""
    assert four_ranks.run(four_with_two_axes, 3, True) == [(True, 0)] * 4


class SumsOneNumber(SummedOver):
    def forward(self, x):
        out = self.experts(x)
        return out + WAIT(all_reduce(out.float().sum().reshape(1), "sum", self.group))


def one_sums_with_a_third(rank, is_compiled):
    """Ranks 0 and 1 exchange; 0 sums with 2, who needs before what 1 sends after its layer."""
    torch._dynamo.reset()
    limit = timedelta(seconds=TIMEOUT_S)
    pair, others = dist.new_group([0, 1], timeout=limit), dist.new_group([0, 2], timeout=limit)
    number = torch.zeros(1)
    if rank == 2:
        dist.recv(number, 1)
        summed = SumsOneNumber(torch.nn.Identity(), others)
        return (compiled(summed) if is_compiled else summed)(number).isfinite().item()
    if rank == 3:
        return True
    layer = GroupedExperts(WIDTH, 24, 8, 2, pair)
    if rank == 0:
        layer = SumsOneNumber(layer, others)
    with torch.no_grad():
        out = compiled(layer)(torch.randn(8, WIDTH, dtype=torch.bfloat16))
    if rank == 1:
        dist.send(number, 2)
    return out.isfinite().all().item()


@pytest.mark.slow
@pytest.mark.parametrize("is_compiled", [True, False])
def test_ranks_with_nothing_rewritten_are_not_waited_for(four_ranks, is_compiled):
    """Rank 0 waited for 2, who waited for what 1 sends once 0 has exchanged with it."""
    assert four_ranks.run(one_sums_with_a_third, is_compiled) == [True] * 4


@pytest.mark.slow
def test_ranks_of_two_axes_that_decide_alike_stay_rewritten(four_ranks):
    """The names of their groups differ, which was taken for a difference of plans."""
    found = four_ranks.run(four_with_two_axes, None)
    assert all(is_alike and num_records > 0 for is_alike, num_records in found), found


def start_anew(rank):
    """Run a layer, make the default process group anew, run on; rank 1 recompiles there alone."""
    torch._dynamo.reset()
    layer = GroupedExperts(WIDTH, 24, 8, 2, dist.group.WORLD)
    ours, before, alike = compiled(layer), len(executed_records()), []
    for number, tokens in enumerate((4, 5, 6, 6 - 5 * rank, 4)):
        if number == 2:
            store = dist.PrefixStore("anew", dist.distributed_c10d._get_default_store())
            dist.barrier()
            dist.destroy_process_group()
            limit = timedelta(seconds=TIMEOUT_S)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
            layer.group = dist.group.WORLD
        torch.manual_seed(10 * number + rank)
        x = torch.randn(tokens, WIDTH, dtype=torch.bfloat16)
        pairs = zip(step(ours, x), step(layer, x), strict=True)
        alike.append(all(torch.equal(a, b) for a, b in pairs))
    return alike, len(executed_records()) - before


@pytest.mark.slow
def test_a_process_group_made_anew_is_agreed_in_anew(two_ranks):
    """Calls were counted for the old one, and a rank that recompiled waited for those uncounted."""
    for alike, num_records in two_ranks.run(start_anew):
        assert alike == [True] * 5
        assert num_records > 0
