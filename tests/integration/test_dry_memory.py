"""The arithmetic of a dry run's memory: rows of the busiest rank, stages, verdict, changes."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")

from moe_compile.cost.sizes import NominalSizes
from moe_compile.schedule.liveness import Liveness
from tests.scheduled_layers import ChunkedMoE, one_rank_group, post_grad_graphs
from torchtitan_integration.dry_run.activations import (
    DOUBLED,
    Activations,
    BusiestRank,
    activations_of,
    busiest_rank,
)
from torchtitan_integration.dry_run.changes import (
    Change,
    Helped,
    device_memory,
    possible_changes,
    skew_line,
    verdict,
)
from torchtitan_integration.dry_run.layers import Traced
from torchtitan_integration.dry_run.stages import ModelState, StageMemory, Stages, first_most_last

EVEN = BusiestRank(skew=0.0, times=DOUBLED)
SKEWED = BusiestRank(skew=1.0, times=1.5)
GIB = 1 << 30
TOKENS, HIDDEN, INNER, TOP_K = 96, 64, 32, 2


@pytest.fixture(scope="module")
def graphs():
    torch.manual_seed(0)
    layer = ChunkedMoE(HIDDEN, INNER, 8, TOP_K, one_rank_group(), 2)
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    return [gm.graph for gm in post_grad_graphs(layer, x, dynamic=True)]


def test_activations_of_the_busiest_rank_grow_by_what_follows_from_its_rows(graphs):
    """Saved are received rows, HIDDEN wide, and results of the experts' products, INNER wide."""
    even, busy, busier = (activations_of(*graphs, received=times) for times in (1.0, 2.0, 3.0))
    assert activations_of(*graphs) == even
    row = 2 * (HIDDEN + 2 * INNER)
    assert busy.saved - even.saved == busier.saved - busy.saved
    assert busy.saved - even.saved >= TOKENS * TOP_K * row
    assert even.saved < busy.saved < 2 * even.saved  # tokens and routing stay as they are
    assert even.peak < busy.peak < busier.peak and 0 <= even.rebuilt <= even.peak
    sizes = NominalSizes({})
    sizes.learn(graphs[0])
    forward = Liveness.of([*graphs[0].nodes], sizes)
    assert forward.peak_bytes(range(len(forward.uses))) > even.saved  # its output is not saved


def rank_of(ep=8, top_k=2, skew=0.0, forces=False, num_experts=16, **changes):
    """Return what is read of a rank."""
    sections = {
        "debug": {"moe_force_load_balance": forces},
        "megamoe": None,
        "job": {"dump_folder": "outputs"},
        "activation_checkpoint": {"mode": "none"},
        "parallelism": {"fsdp_reshard_after_forward": "default"},
        "training": {"local_batch_size": 4},
    }
    job = SimpleNamespace(
        **{name: table and SimpleNamespace(**table) for name, table in sections.items()}
    )
    for key, value in changes.items():
        section, _, name = key.partition("__")
        setattr(getattr(job, section), name, value)
    experts = SimpleNamespace(top_k=top_k, num_experts=num_experts)
    return SimpleNamespace(
        job=job,
        dims=SimpleNamespace(ep=ep, pp=1, dp_shard=8, pp_enabled=False),
        model_args=SimpleNamespace(moe_args=experts),
        batch=job.training.local_batch_size,
    )


def test_rows_of_the_busiest_rank_are_those_of_the_planner(monkeypatch):
    """The table of docs/planner.md: 2.06 for 128 experts, top 8, on 8 ranks under Zipf 1."""
    assert busiest_rank(rank_of()) == EVEN and not EVEN.is_stated
    monkeypatch.setenv("MEGAMOE_ROUTING_SKEW", "1.0")
    stated = busiest_rank(rank_of(ep=8, top_k=8, num_experts=128))
    assert stated.is_stated and stated.times == pytest.approx(2.06, abs=0.005)
    assert busiest_rank(rank_of(top_k=16)).times == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("job", "why"),
    [({"forces": True}, "moe_force_load_balance"), ({"ep": 1}, "expert_parallel_degree is 1")],
)
def test_where_a_job_bounds_the_rows_a_stated_skew_adds_nothing(monkeypatch, job, why):
    monkeypatch.setenv("MEGAMOE_ROUTING_SKEW", "1.0")
    found = busiest_rank(rank_of(**job))
    assert found.times == 1.0 and not found.is_stated and why in found.why_even
    line = skew_line(stage("rank 0", 60, busiest=found))
    assert line.startswith("All ranks have equally many rows: ") and why in line


def state(parameters=0, microbatches=1.0, graphs=None):
    return ModelState(
        parameters=parameters, gathered=0, graphs=graphs or {}, microbatches=microbatches,
        logits=0, exchange_buffers=0,
    )  # fmt: skip


def stage(name, gib, busiest=EVEN, more=0):
    return StageMemory(
        name=name, place=name, state=state(), activations=int(gib * GIB), peak_in_block=0,
        rebuilt=0, added=0, may_add=0, busiest=busiest, more_rows=int(more * GIB),
    )  # fmt: skip


def test_of_the_stages_between_first_and_last_the_one_with_most_is_shown():
    many = [stage("first", 9), stage("little", 1), stage("most", 3), stage("less", 2)]
    last = stage("last", 1)
    assert [s.name for s in first_most_last([*many, last])] == ["first", "most", "last"]
    assert [s.name for s in first_most_last([*many[:1], last])] == ["first", "last"]
    assert [s.name for s in first_most_last(many[:1])] == ["first"]


def traced(kind, saved, peak, busy=(0, 0), before=0.0):
    even = Activations(saved=saved, peak=peak, rebuilt=peak // 2)
    busiest = Activations(saved=saved + busy[0], peak=peak + busy[1], rebuilt=0)
    measures = {"backward": {"peak_bytes": float(peak), "peak_bytes_before": before}}
    return Traced(kind=kind, compilation=None, even=even, busiest=busiest, measures=measures)


@pytest.mark.parametrize("busiest", [EVEN, SKEWED])
def test_memory_of_a_stage_has_all_microbatches_in_flight_and_the_largest_graph(busiest):
    """Two stages; on the second the schedule is allowed a tenth of what it holds in addition."""
    states = (state(100, 3, {"dense": 1, "moe": 2}), state(150, 1, {"moe": 1}))
    stages = Stages(
        names=("rank 0", "rank 4"), states=states, graphs={}, busiest=busiest, schedule_share=0.1
    )
    graphs = [traced("dense", 10, 1000, before=900.0), traced("moe", 20, 70, (8, 40), 60.0)]
    first, last = stages.memory(graphs)
    assert (first.activations, last.activations) == ((10 + 2 * 20) * 3, 20)
    assert (first.peak_in_block, first.rebuilt, first.added) == (1000, 500, 100)
    assert (last.peak_in_block, last.rebuilt, last.added) == (70, 35, 10)
    assert (first.more_rows, last.more_rows) == (2 * 8 * 3, 8 + 40)  # the first's peak stays
    assert (first.may_add, last.may_add) == (0, (150 - 100) * 4 // 10)
    assert last.even == 4 * 150 + 20 + 70 + 20
    assert last.total - last.even == (8 + 40 if busiest.is_stated else 0)
    assert last.place == "rank 4, pipeline stage 2 of 2"
    data = last.as_json()
    assert (data["sum"], data["sum_with_even_routing"]) == (last.total, last.even)
    parts = ("parameters", "gradients", "optimizer_state", "saved_activations", "peak_in_block")
    assert sum(data[part] for part in parts) + data["schedule_may_add"] == last.even


@pytest.mark.parametrize(("saved", "added"), [(50, 20), (110, 10), (130, 0)])
def test_a_forward_adds_only_what_it_needs_beyond_what_it_saves(saved, added):
    """Saved bytes are counted once: in the peak of the forward they do not count again."""
    graph = traced("moe", saved, 0)
    graph.measures = {"forward": {"peak_bytes": 120.0, "peak_bytes_before": 100.0}}
    assert graph.added_by_schedule() == added
    graph.add_input(7)
    assert (graph.even.kept, graph.busiest.kept) == (saved + 7, saved + 7)
    assert graph.added_by_schedule() == added


def test_the_fullest_rank_decides_with_room_for_what_is_not_counted():
    """79.78 GiB of a GPU with 80 passed without a word."""
    gpu = device_memory("h100")
    assert gpu.total == 80 * GIB
    fits = verdict(gpu, [stage("rank 0", 60), stage("rank 8", 70.5)], [])
    assert fits.startswith("fits in 80 GB: 4.50 GiB left on the fullest rank (rank 8); 5 GiB are")
    full = verdict(gpu, [stage("rank 0", 79.78)], [])
    assert full.startswith("does not fit in 80 GB: 4.78 GiB too much on the fullest rank (rank 0)")
    assert "No change of a single key was found that helps" in full
    assert gpu.left([stage("rank 0", 75)]) == 0 > gpu.left([stage("rank 0", 75.1)])


def test_a_stated_skew_counts_and_an_assumed_doubling_does_not():
    gpu = device_memory("h100")
    stated, assumed = stage("rank 0", 70, SKEWED, 6), stage("rank 0", 70, EVEN, 6)
    assert verdict(gpu, [stated], []).startswith("does not fit in 80 GB: 1.00 GiB too much")
    assert verdict(gpu, [assumed], []).startswith("fits in 80 GB: 5.00 GiB left")
    assert "1.50 times as many" in skew_line(stated) and "6.00 GiB more: 76.00" in skew_line(stated)
    assert "70.00 GiB with even routing" in skew_line(stated)
    assert "assumed even" in skew_line(assumed) and "needs 6.00 GiB more: 76" in skew_line(assumed)


@pytest.mark.parametrize("busiest", [EVEN, SKEWED])
def test_where_no_row_is_counted_the_dry_run_says_so(busiest):
    """Tokens that are all-gathered have no exchange that says how many rows a rank has."""
    line = skew_line(stage("rank 0", 70, busiest, 0))
    assert "changes no size that is counted on rank 0" in line and 'dispatch = "all_gather"' in line


def test_the_three_changes_that_help_most_are_named_the_largest_first():
    saved = {"a": 1, "b": 3, "c": 2, "d": 0.5, "e": -1}
    helped = [
        Helped(change=name, saved=int(gib * GIB), fits=gib > 2) for name, gib in saved.items()
    ]
    said = verdict(device_memory("h100"), [stage("rank 0", 78)], helped)
    assert said.endswith("b: 3.00 GiB less (then it fits); c: 2.00 GiB less; a: 1.00 GiB less.")


def test_a_profile_without_memory_has_a_last_line_too():
    said = verdict(device_memory("cpu"), [stage("rank 0", 90)], [])
    assert said.startswith("not known whether it fits") and "needs 90.00 GiB" in said
    assert "write capacity_gb in its table [memory]" in said


def said_of(rank):
    return {change.said(8) for change in possible_changes(rank)}


def test_only_what_a_job_does_not_do_yet_is_proposed(monkeypatch):
    monkeypatch.delenv("NCCL_MAX_P2P_NCHANNELS", raising=False)
    full = 'activation_checkpoint.mode = "full"'
    plain = said_of(rank_of())
    assert full in plain and "megamoe.max_memory_increase = 0" in plain
    assert "training.local_batch_size = 2" in plain and "NCCL_MAX_P2P_NCHANNELS=16" in plain
    assert "parallelism.data_parallel_shard_degree = 16 on 16 ranks" in plain
    assert 'megamoe.recompute_modules = ["layernorm", "moe_act"]' in plain
    assert 'megamoe.recompute = "model"' not in plain
    monkeypatch.setenv("NCCL_MAX_P2P_NCHANNELS", "16")
    monkeypatch.setenv("MEGAMOE_MAX_MEMORY_INCREASE", "0")
    done = said_of(rank_of(activation_checkpoint__mode="full", training__local_batch_size=1))
    assert full not in done
    assert 'megamoe.recompute = "model"' in done
    kept = ("NCCL", "max_memory", "local_batch", "recompute_modules")
    assert not [one for one in done if any(name in one for name in kept)]


def test_a_change_says_what_to_write():
    both = Change(settings={"a.b": 2, "a.c": "x"}, environment={"N": "1"}, times_ranks=2)
    assert both.said(8) == 'a.b = 2 with a.c = "x" with N=1 on 16 ranks'
