"""A dry run says what a job would do, and computes what can be computed by hand."""

import contextlib
import functools
import io
import json
import multiprocessing
import os
import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")

from moe_compile.cli import main
from moe_compile.errors import InvalidConfig
from moe_compile.schedule.timeline_data import AFTER, AS_WRITTEN, BEFORE
from moe_compile.testing.rank_pool import RankPool
from tests.integration.conftest import work_around
from tests.integration.titan_jobs import CONFIG, ROOT, flags_of
from tests.report.test_page import data_of
from torchtitan_integration.dry_run.layers import beside
from torchtitan_integration.dry_run.stages import measure_stages
from torchtitan_integration.dry_run.world import fake_rank
from torchtitan_integration.eight_bit_gathers import said_of_gathers
from torchtitan_integration.job_file import read_job
from torchtitan_integration.parallelize import apply_model_parallelism, bytes_held

DEGREE = "parallelism.{}_degree".format
PROFILES = ROOT / "moe_compile/hardware/profiles"
DIM, EXPERTS = 128, 8
TOKENS, TOP_K = 8 * 128, 2
FLOAT32, INT32, INT64 = 4, 4, 8


@pytest.fixture(scope="module")
def process():
    """One process for all runs: imports take longer than a run does."""
    with RankPool(1, at_start=work_around) as pool:
        yield pool


def begin_again():
    """Leave the group of the pool, and all that an earlier dry run left in this process."""
    if dist.is_initialized():
        dist.destroy_process_group()
    torch._dynamo.reset()
    _clear_sharding_prop_cache()


def run_here(rank, arguments):
    """Return what the command line returns and prints, in a process that has no group."""
    begin_again()
    said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said[0]), contextlib.redirect_stderr(said[1]):
        status = main(arguments)
    return status, *(stream.getvalue() for stream in said)


def arguments_of(world, settings):
    asked = ["--compare"] * settings.pop("compares", False)
    asked += ["--world", str(world)] if world else []
    flags = flags_of({name.replace("__", "."): value for name, value in settings.items()})
    return ["train", str(CONFIG), "--dry-run", *asked, *flags]


@pytest.fixture
def dry_run(process):
    def run(world=None, status=0, **settings):
        ((returned, out, errors),) = process.run(run_here, arguments_of(world, settings))
        assert returned == status, out[-3000:] + errors[-3000:]
        return out if status == 0 else errors

    return run


@pytest.mark.slow
def test_a_job_is_explained_as_a_page(process, tmp_path):
    """The page has the program as it is written beside what the dry run prints."""
    page = tmp_path / "job.html"
    arguments = ["explain", str(CONFIG), "--html", str(page)]
    ((status, out, errors),) = process.run(run_here, arguments)
    assert status == 0, errors[-3000:]
    assert "Memory of one GPU" in out and "1 exchange, 1 found" in out and str(page) in out
    data = data_of(page.read_text())
    assert [graph["phase"] for graph in data["graphs"]] == ["forward", "backward"]
    for graph in data["graphs"]:
        assert [run["name"] for run in graph["runs"]] == [AS_WRITTEN, BEFORE, AFTER]
        assert all("expert_parallel.py" in launch["where"] for launch in graph["launches"])
    assert {"dynamo", "joint", "forward", "backward"} <= {t["graph"] for t in data["texts"]}


def cells(output, label):
    """Return the cells of the table row that begins with `label`."""
    (row,) = re.findall(rf"^ +{re.escape(label)}  +(.*)$", output, re.MULTILINE)
    return row.split()


def gathered_here(rank, flags):
    """Return the bytes that FSDP gathers of the debug model, and what is said of experts."""
    begin_again()
    file, said = read_job(CONFIG, flags), []

    def describe(rank):
        said.append(said_of_gathers(rank.job, rank.dims, rank.model_args.moe_args))

    return measure_stages(file, 2, describe).states[0].gathered, *said


def test_weights_gathered_in_eight_bits_are_counted_by_hand(process):
    """Two blocks of four experts on this rank, each of three weights of one block of numbers."""
    eight = "--megamoe.expert_compute=fp8_blockwise"
    asked = [[], [eight], [eight, "--megamoe.disable_passes=feed_products"]]
    (plain, ours, kept) = (process.run(gathered_here, flags)[0] for flags in asked)
    block = DIM * DIM
    assert plain[0] - ours[0] == 2 * 3 * EXPERTS // 2 * (block * FLOAT32 - (block + FLOAT32))
    assert plain[1] == "" and ours[1].endswith("in eight bits")
    assert kept[0] == plain[0] and kept[1].endswith("disable_passes has feed_products")


@pytest.mark.slow
def test_exchanges_of_a_balanced_routing_are_counted_by_hand(dry_run, tmp_path):
    path = tmp_path / "new" / "report.json"
    output = dry_run(megamoe__report=path)
    report = json.loads(path.read_text())
    assert [region["num_chunks"] for region in report["regions"]] == [2]
    assert [len(graph["launches"]["ep"]) for graph in report["graphs"]] == [5, 4]
    assert report["memory"]["fits"] and len(report["memory"]["ranks"]) == 1
    assert " ".join(output.split()).endswith("NCCL's other buffers and the allocator")
    assert "fits in 80 GB" in output and "Routing is assumed even" in output
    assert f"as JSON: {path}" in output.replace("\n", "")
    assert "chunked, 2 chunks of 4 local experts" in output
    rows = TOKENS * TOP_K * DIM * FLOAT32
    forward = (2 * rows + EXPERTS * INT64) / 1e6  # dispatch, combine, and the counts
    axis, *numbers = cells(output, "all_to_all_single")
    assert axis == "ep"
    assert numbers == ["5", f"{forward:.2f}", "4", f"{2 * rows / 1e6:.2f}"]
    assert "none" in output  # the block without experts has no collective


def shares(output):
    """Return the exposed shares: forward, forward and backward, and the least of any order."""
    said = r"exposed share: (\d+)% forward, (\d+)% forward and backward; .*? less than (\d+)%"
    (found,) = re.findall(said, output.replace("\n", " "))
    return [int(share) / 100 for share in found]


@pytest.mark.slow
def test_the_exposed_share_is_of_the_block_with_nothing_hidden(dry_run):
    """In so small a block the host launches for longer than is sent: chunks win nothing."""
    output = dry_run(megamoe__hardware="h100")
    forward, both, least = shares(output)
    assert 0.0 <= least <= both <= 1.1 and forward <= 1.0
    assert not re.findall(CHOICE, output, re.MULTILINE)
    assert "each value of megamoe.numerics is printed with --compare" in " ".join(output.split())
    assert "exposed share" not in dry_run(megamoe__chunks=1, megamoe__schedule=False)


@pytest.mark.slow
def test_what_each_value_of_numerics_would_choose_is_beside_what_was_asked(dry_run):
    output = dry_run(compares=True, megamoe__hardware="h100", megamoe__dispatch_wire="fp8")
    rows = {row[0]: row for row in re.findall(CHOICE, output, re.MULTILINE)}
    assert list(rows) == ["as asked", "exact", "bounded", "lossy"]
    assert cells(output, "NCCL, all-to-all") == [f"{3.28e9 / 7 / 2**30:.2f}"]
    assert "2 chunks" in rows["as asked"][1] and "dispatch fp8" in rows["as asked"][1]
    assert "fp8" not in rows["exact"][1] + rows["bounded"][1]
    assert re.search(r"sums per token in\b.*\n +one kernel", output)
    steps = {name: tuple(map(float, row[2:4])) for name, row in rows.items()}
    assert all(0 <= int(least) <= int(share) for *_, share, least, _ in rows.values())
    assert [int(share) / 100 for share in rows["as asked"][4:6]] == shares(output)[1:]
    phases = re.findall(r"ward: predicted (\S+) ms .* -> (\S+) ms", output)[-2:]
    compute, exposed = (sum(map(float, column)) for column in zip(*phases, strict=True))
    assert steps["as asked"] == pytest.approx((compute + exposed, exposed), abs=0.02)
    for name in ("exact", "bounded", "lossy"):
        gain = steps[name][0] / steps["as asked"][0] - 1
        assert float(rows[name][6].rstrip("%")) / 100 == pytest.approx(gain, abs=0.02 + gain**2)


CHOICE = r"^ +(as asked|exact|bounded|lossy)  +(.*?)  +(\S+)  +(\S+)  +(\d+)%  +(\d+)% *(\S*) *$"
"""A row of the table of choices: name, what, ms of a step, exposed ms and share, the least of any
order, gain."""


@pytest.mark.slow
def test_gathered_tokens_of_torchtitans_own_layer_are_counted_by_hand(dry_run):
    """Its layer keeps split sizes, and so the exchange of counts."""
    output = dry_run(megamoe__dispatch="all_gather")
    assert "all-gathered, 4 local experts in one piece" in output
    said = (
        "sums of 2 rows per token are added in another order than in the model, so they differ by"
    )
    assert f"{said} at most 2 eps" in " ".join(output.split())
    ranks, tokens, weights = 2, TOKENS * DIM * FLOAT32, TOKENS * TOP_K * FLOAT32
    routing = (EXPERTS + TOKENS * TOP_K) * INT32
    gathers = [(tokens + routing + weights) / 1e6, tokens / 1e6]
    sums = [ranks * tokens / 1e6, ranks * (tokens + weights) / 1e6]
    for name, (forward, backward), numbers in (
        ("all_gather_into_tensor", gathers, (3, 1)),
        ("reduce_scatter_tensor", sums, (1, 2)),
    ):
        expected = [str(numbers[0]), f"{forward:.2f}", str(numbers[1]), f"{backward:.2f}"]
        assert cells(output, name) == ["ep", *expected]
    assert cells(output, "all_to_all_single") == ["ep", "1", "0.00", "0", "0.00"]


@pytest.mark.slow
def test_parameters_are_divided_over_the_axes_that_shard_them(dry_run):
    """Eight ranks; experts over efsdp 2 x ep 4, the rest over fsdp 8."""
    output = dry_run(world=8, **{DEGREE("data_parallel_shard"): 8, DEGREE("expert_parallel"): 4},
                     model__flavor="16B")  # fmt: skip
    held = 15_706_484_224 * FLOAT32 / 8 / 2**30  # DeepSeek-V2-Lite's parameters
    assert float(cells(output, "parameters")[0]) == pytest.approx(held, abs=0.02)
    assert float(cells(output, "optimizer (AdamW)")[0]) == pytest.approx(2 * held, abs=0.03)


def compute_ms(output):
    """Return the compute of the forward and of the backward of the block with experts."""
    found = re.findall(r"predicted (\S+) ms of compute", output.replace("\n", " "))
    return [float(ms) for ms in found[-2:]]


@pytest.mark.slow
def test_flex_attention_is_priced_as_the_causal_kernel_it_is(dry_run):
    """At this length attention is most of the block; its mask keeps half of the pairs."""
    job = {
        "experimental.custom_import": "tests.integration.tiny_flavors",
        "training.seq_len": 65536,
        "training.local_batch_size": 1,
    }
    flex, causal = (
        compute_ms(dry_run(**{**job, "model.flavor": name})) for name in ("tiny_flex", "tiny")
    )
    short = compute_ms(dry_run(**{**job, "model.flavor": "tiny_flex", "training.seq_len": 128}))
    assert flex == pytest.approx(causal, rel=0.05)
    assert min(flex) > 2 * max(short)


@pytest.mark.slow
def test_tensor_and_pipeline_parallelism_show_their_own_collectives_and_stages(dry_run):
    output = dry_run(
        world=16,
        **{DEGREE("data_parallel_shard"): 4, DEGREE("tensor_parallel"): 2},
        **{DEGREE("pipeline_parallel"): 2, DEGREE("expert_parallel"): 4},
        training__local_batch_size=8,
    )
    assert "tp" in output and "rank 8" in output
    assert len(cells(output, "saved activations")) == 2


@pytest.mark.slow
def test_graphs_of_several_blocks_are_those_of_the_stages(dry_run):
    """Stages of two blocks and of one: no graph has three, though three are asked for."""
    output = dry_run(
        world=4, **{DEGREE("data_parallel_shard"): 2, DEGREE("pipeline_parallel"): 2},
        training__local_batch_size=8, megamoe__blocks_per_graph=3,
    )  # fmt: skip
    kinds = re.findall(r"Collectives of one (.*), per\s+rank", output)
    assert kinds == ["graph of blocks: 1 without experts, 1 with experts", "block with experts"]
    assert len(cells(output, "saved activations")) == 2


def noted(seen, number):
    seen.append(number)
    if number > 2:
        raise InvalidConfig("no such number")
    return number, os.getpid()


@pytest.mark.parametrize(
    ("cpus", "has_gpu", "is_daemonic"),
    [(1, False, False), (2, False, False), (2, True, False), (2, False, True)],
)
def test_other_ways_are_traced_in_copies_of_the_process(monkeypatch, cpus, has_gpu, is_daemonic):
    """Here, when their results are asked for, on one CPU, where a GPU is, and in a daemon."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(cpus)})
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_gpu)
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", is_daemonic)
    seen = []
    with beside([functools.partial(noted, seen, number) for number in range(3)]) as results:
        numbers, processes = zip(*results(), strict=True)
    assert numbers == (0, 1, 2)
    is_here = cpus == 1 or has_gpu or is_daemonic
    assert (os.getpid() in processes, seen) == ((True, [0, 1, 2]) if is_here else (False, []))
    with pytest.raises(InvalidConfig, match="no such number"):  # noqa: SIM117
        with beside([functools.partial(noted, seen, number) for number in (1, 3)]) as results:
            results()


def held_twice(_, world, arguments):
    """Return the bytes that a rank holds of a job, by the dry run and by training."""
    begin_again()
    file = read_job(CONFIG, arguments)
    (state,) = measure_stages(file, world, lambda _: None).states
    with fake_rank(file, world, 0) as rank:
        rank.job.compile.enable = False
        model = rank.build_model()
        apply_model_parallelism(model, rank.dims, rank.job)
        return state.held, bytes_held(model, rank.dims)


@pytest.mark.parametrize(("world", "tp", "ep"), [(2, 1, 2), (8, 1, 4), (8, 2, 4)])
def test_training_plans_with_the_memory_that_the_dry_run_shows(process, world, tp, ep):
    """With other bytes training would allow its schedule more, or less, than the dry run did."""
    degrees = {"data_parallel_shard": world // tp, "tensor_parallel": tp, "expert_parallel": ep}
    flags = flags_of({DEGREE(name): degree for name, degree in degrees.items()})
    ((counted, planned),) = process.run(held_twice, world, flags)
    assert planned == pytest.approx(counted, rel=0.001) and counted > 0


@pytest.mark.slow
def test_a_job_that_does_not_fit_is_told_what_helps_by_how_much(dry_run, tmp_path):
    """A GPU with room for a little less: fewer channels of NCCL alone make the job fit."""
    sheet = (PROFILES / "h100.toml").read_text()
    gpu, path = tmp_path / "small.toml", tmp_path / "report.json"
    gpu.write_text(sheet.replace("capacity_gb = { value = 80.0", "capacity_gb = { value = 5.4"))
    output = dry_run(megamoe__hardware=gpu, megamoe__report=path, megamoe__routing_skew=1.0)
    said, memory = " ".join(output.split()), json.loads(path.read_text())["memory"]
    (rank,) = memory["ranks"]
    too_much = rank["sum"] - (5.4 - 5) * 2**30
    assert memory["left_on_fullest_rank"] == pytest.approx(-too_much, abs=1) and not memory["fits"]
    assert f"does not fit in 5.4 GB: {too_much / 2**30:.2f} GiB too much on the fullest" in said
    assert rank["sum"] == rank["sum_with_even_routing"] + rank["more_rows_on_busiest_rank"]
    assert rank["more_rows_on_busiest_rank"] > 0 and memory["rows_of_busiest_rank_over_even"] > 1
    saved = {one["change"]: one["saved"] for one in memory["changes"]}
    channels = "NCCL_MAX_P2P_NCHANNELS=16"
    assert saved[channels] == pytest.approx(rank["nccl_buffers"] / 2, abs=2)
    assert f"each by itself: {channels}: 0.22 GiB less (then it fits); " in said
    assert saved["training.local_batch_size = 4"] > rank["saved_activations"] / 2
    full = saved['activation_checkpoint.mode = "full"']
    assert 0 < full < rank["saved_activations"]
    shards = "parallelism.data_parallel_shard_degree = 4 on 4 ranks"
    held = rank["parameters"] + rank["gradients"] + rank["optimizer_state"]
    assert saved[shards] == pytest.approx(held / 2, rel=0.05)


@pytest.mark.slow
def test_two_hops_of_shared_tokens_are_counted_by_link(dry_run):
    """Two ranks have the same tokens, and send the rows of one half each; two nodes of two ranks.

    Two of eight experts: a token needs one node, unless they are on both.
    """
    output = dry_run(
        compares=True,
        world=4,
        **{DEGREE("data_parallel_shard"): 2, DEGREE("tensor_parallel"): 2},
        **{DEGREE("expert_parallel"): 4, "megamoe.nodes": "exact", "megamoe.node_ranks": 2},
        megamoe__chunks=1,
    )
    assert "dispatched in two hops, 2 local experts in one piece" in output
    tokens, row = TOKENS // 2, DIM * FLOAT32
    far, near = 2 * (round(tokens * 2 * (1 - 6 / 28)) // 2), tokens * TOP_K  # alike to both nodes
    words = 2 + 2 + 1  # of a pair of ranks: its experts' rows, rows of each rank there, tokens
    beside = near * FLOAT32  # weights of rows
    rows = dict(
        re.findall(r"^ +all_to_all_single +(ep\S*(?: \S+)*?)  +(\d.*)$", output, re.MULTILINE)
    )
    assert rows["ep, from node to node"].split() == [
        "2", f"{far * (row + INT32) / 1e6:.2f}", "1", f"{far * row / 1e6:.2f}"
    ]  # fmt: skip
    assert rows["ep, inside a node"].split() == ["1", f"{near * row / 1e6:.2f}"] * 2
    crossing = (far * (row + INT32) + near * row + beside + 4 * words * INT32) / 2
    inside = near * row / 2 + (near * row + beside + 4 * words * INT32) / 4
    said = f"forward {crossing / 1e6:.2f} MB from node to node, {inside / 1e6:.2f} MB inside"
    assert said in " ".join(output.split())
    names = [row[:2] for row in re.findall(CHOICE, output, re.MULTILINE)]
    assert names[0] == ("as asked", "1 chunk, two hops, dispatch same, combine same")
    assert len(names) == 4 and all(what for _, what in names)


@pytest.mark.slow
def test_context_parallelism_exchanges_queries_and_the_result_and_gathers_the_latent(dry_run):
    degrees = {DEGREE("context_parallel"): 2, DEGREE("data_parallel_shard"): 1}
    output = dry_run(**degrees)
    assert "fsdp 2, cp 2, ep 2" in output
    queries, result, latent = 4 * (16 + 16), 4 * 32, 32 + 16
    part = TOKENS // 2 * FLOAT32 / 1e6
    rows = re.findall(r"^ +(\S+) +cp +(.*)$", output, re.MULTILINE)
    exchanged = [f"{part * (queries + result):.2f}"]
    assert [(name, cells.split()) for name, cells in rows[:3]] == [
        ("all_to_all_single", ["2", *exchanged, "2", *exchanged]),
        ("all_gather_into_tensor", ["1", f"{part * latent:.2f}", "0", "0.00"]),
        ("reduce_scatter_tensor", ["0", "0.00", "1", f"{part * 2 * latent:.2f}"]),
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {DEGREE("context_parallel"): 8, DEGREE("data_parallel_shard"): 1},
            "write parallelism.context_parallel_degree = 4",  # the model has four heads
        ),
        (
            {DEGREE("context_parallel"): 2, "model.flavor": "16B"},  # FlexAttention
            "write parallelism.context_parallel_degree = 1",
        ),
        ({"model.flavor": "debug_cpuu"}, "Did you mean 'debug_cpu'?"),
        ({"compile.backend": "inductor"}, 'write compile.backend = "megamoe"'),
        ({DEGREE("data_parallel_shard"): -1}, "say how many with --nproc N"),
    ],
)
def test_what_cannot_run_is_refused_with_what_to_write(dry_run, changes, message):
    assert message in dry_run(status=2, **changes)


def test_degrees_that_do_not_make_the_world_are_refused(dry_run):
    assert "write --world 4" in dry_run(world=6, status=2, **{DEGREE("data_parallel_shard"): 4})
