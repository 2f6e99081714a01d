"""Collectives and compute in a trace of torch's profiler."""

import gzip
import itertools
import json

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from hypothesis import given
from hypothesis import strategies as st

from moe_compile.check.profiler_trace import common, measure, read_trace, trace_of, union, without
from moe_compile.testing.rank_pool import RankPool

SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 10)), max_size=8).map(
    lambda spans: [(begin, begin + length) for begin, length in spans]
)
LAUNCH = "_c10d_functional::all_to_all_single"
WAIT = "_c10d_functional::wait_tensor"


def event(name, begin, length, cat="cpu_op", tid=1, **args):
    span = {"ts": begin, "dur": length}
    return {"ph": "X", "cat": cat, "name": name, "tid": tid, "args": args, **span}


def kernel(name, begin, length, **args):
    return event(name, begin, length, "kernel", 7, **args)


def traced(*events):
    return trace_of({"traceEvents": list(events)})


def points(spans):
    return {x for begin, end in spans for x in range(begin, end)}


@given(SPANS, SPANS)
def test_unions_overlaps_and_rests_cover_what_they_should(first, second):
    a, b = list(union(first)), list(union(second))
    assert points(a) == points(first)
    assert all(x[1] < y[0] for x, y in itertools.pairwise(a))
    assert points(common(a, b)) == points(first) & points(second)
    assert points(without((5, 30), a)) == set(range(5, 30)) - points(first)


def test_nccl_alone_is_exposed_and_under_compute_is_hidden():
    trace = traced(
        kernel("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 1000, 4000),
        kernel("ncclDevKernel_AllGather_RING", 2000, 1000),  # beside the other: counts once
        kernel("sm90_xmma_gemm_bf16", 3000, 6000),
        event("Memcpy HtoD (Pinned -> Device)", 1000, 9000, "gpu_memcpy"),
        event("aten::mm", 0, 9000),
    )
    assert measure(trace) == {"hidden_ms": 2.0, "exposed_ms": 2.0}


@pytest.mark.parametrize(
    "name",
    [
        "void c10d::nvshmem_extension::allToAllV(void*, void*)",
        "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16>(int)",
        "ncclSymkDevKernel_AllGather_LL",
    ],
)
def test_kernels_that_exchange_without_nccls_are_known_by_their_names(name):
    assert measure(traced(kernel(name, 0, 3000))) == {"hidden_ms": 0.0, "exposed_ms": 3.0}


def test_a_copy_to_another_device_is_a_collective_and_one_on_the_device_is_compute():
    trace = traced(
        event("Memcpy PtoP (Device -> Device)", 0, 4000, "gpu_memcpy", 7),
        event("Memcpy DtoD (Device -> Device)", 1000, 1000, "gpu_memcpy", 8),
    )
    assert measure(trace) == {"hidden_ms": 1.0, "exposed_ms": 3.0}


def test_all_kernels_of_a_launch_are_one_collective_whatever_their_names():
    calls = [event("cudaLaunchKernel", t, 1, "cuda_runtime", correlation=t) for t in (12, 14, 50)]
    trace = traced(
        event(LAUNCH, 10, 10),
        *calls,
        kernel("pack_rows", 100, 50, correlation=12),
        kernel("my_transport", 200, 50, correlation=14),
        kernel("gemm", 120, 60, correlation=50),
    )
    (one,) = trace.collectives
    assert (one.begin, one.end, one.launch.operator) == (100, 250, LAUNCH)
    assert trace.hidden_us(one) == 60
    assert [work.key.split()[0] for work in trace.works] == ["gemm"]


def test_a_processor_is_busy_but_where_it_waits():
    trace = traced(
        event(LAUNCH, 0, 10),
        event("c10d::alltoall_base_", 2, 5, **{"Input Dims": [[8], [4]]}),
        event("gloo:all_to_all", 20, 60, "user_annotation", 2, **{"Input Dims": [[4]]}),
        event(WAIT, 50, 40),
        event("aten::mm", 95, 5),
    )
    (one,) = trace.collectives
    assert one.launch.operator == LAUNCH
    assert trace.hidden_us(one) == 30
    assert measure(trace) == {"hidden_ms": 0.03, "exposed_ms": 0.03}


def test_where_torch_waits_unseen_the_host_waits_while_it_runs_no_operator():
    trace = traced(
        event("c10d::allreduce_", 0, 10),
        event("gloo:all_reduce", 20, 60, "user_annotation", 2),
        event("aten::mm", 30, 20),
    )
    assert trace.collectives[0].launch is None
    assert measure(trace) == {"hidden_ms": 0.02, "exposed_ms": 0.04}


def test_of_collectives_of_one_kind_that_pass_one_another_sizes_say_which_is_which():
    first, second = {"Input Dims": [[9], [8]]}, {"Input Dims": [[3], [2]]}
    trace = traced(
        event(LAUNCH, 0, 10),
        event("c10d::alltoall_base_", 2, 5, **first),
        event("c10d::alltoall_base_", 12, 5, **second),  # torch's own, on another group
        event("gloo:all_to_all", 20, 60, "user_annotation", 2, **{"Input Dims": [[2]]}),
        event("gloo:all_to_all", 30, 60, "user_annotation", 3, **{"Input Dims": [[8]]}),
    )
    assert [c.launch is not None for c in trace.collectives] == [False, True]


def test_a_group_written_in_python_shows_no_operator_and_its_launch_is_known():
    trace = traced(
        event(LAUNCH, 0, 10, **{"Input Dims": [[4], []]}),
        event("gloo:all_to_all", 20, 60, "user_annotation", 2, **{"Input Dims": [[4]]}),
        event(WAIT, 50, 40),
    )
    assert trace.collectives[0].launch.operator == LAUNCH
    assert measure(trace) == {"hidden_ms": 0.03, "exposed_ms": 0.03}


def test_a_trace_without_collectives_measures_nothing(tmp_path):
    with torch.profiler.profile() as profile:
        torch.ones(8, 8) @ torch.ones(8, 8)
    path = tmp_path / "trace.json.gz"
    profile.export_chrome_trace(str(path))
    assert measure(read_trace(path)) == {}


def test_a_file_that_is_no_trace_is_named(tmp_path):
    path = tmp_path / "x.json.gz"
    path.write_bytes(gzip.compress(json.dumps([1]).encode()))
    with pytest.raises(ValueError, match=r"x\.json\.gz must be a trace"):
        read_trace(path)


def profiled(rank, folder):
    """Profile one exchange, a gather and a sum of this torch; return what the trace says."""
    x, group = torch.ones(1000, 64), dist.group.WORLD
    with torch.profiler.profile(record_shapes=True) as profile:
        moved = functional.all_to_all_single(x, None, None, group)
        y = x @ x.T
        functional.wait_tensor(moved)
        gathered = functional.all_gather_tensor(x, 0, group)
        functional.wait_tensor(gathered)
        functional.wait_tensor(functional.reduce_scatter_tensor(x, "sum", 0, group))
        dist.all_reduce(y)
    path = folder / f"{rank}.json"
    profile.export_chrome_trace(str(path))
    trace = read_trace(path)
    names = [c.launch and c.launch.operator.split("::")[1] for c in trace.collectives]
    return names, [w.key.split()[0] for w in trace.works], len(trace.waited), measure(trace)


def test_what_gloo_notes_is_read_with_the_launches_of_this_torch(tmp_path):
    with RankPool(2, timeout_s=300) as pool:
        found = pool.run(profiled, tmp_path)
    for names, works, num_waits, measured in found:
        assert names == [
            "all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor", None
        ]  # fmt: skip
        assert "aten::matmul" in works
        assert num_waits >= 3
        assert measured["exposed_ms"] > 0
