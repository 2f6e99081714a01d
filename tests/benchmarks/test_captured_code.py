"""Code whose parts CUDA graphs capture is read as what it does, part by part."""

import re

import pytest

from benchmarks.cuda.amounts import copied_by_parts
from benchmarks.cuda.calls import Kind
from benchmarks.cuda.in_flight import faults
from benchmarks.cuda.wrapper import read_wrapper
from tests.benchmarks.test_cuda_code import code, generated, needs_a_compiler, storages

PARTS = """
def partition_0(args):
    primals_1, primals_2 = args
    args.clear()
    buf5 = empty_strided_cuda((8, 4), (4, 1), torch.bfloat16)
    triton_poi_0.run(primals_1, buf5, 32, 32, stream=s)
    del primals_2
    return (buf5, primals_1, )

def partition_1(args):
    buf5, buf3 = args
    args.clear()
{inside}
    triton_poi_1.run(buf3, 32, stream=s)
    del buf3
    return (buf5, )

"""
CAPTURED = """
primals_1, primals_2 = args
args.clear()
partition0_args = [primals_1, primals_2]
del primals_2
(buf5, primals_1) = self.partitions[0](partition0_args)
del partition0_args
buf3 = torch.ops._c10d_functional.all_to_all_single.default({sent}, [8], [8], '0')
assert_size_stride(buf3, (8, 4), (4, 1), 'all_to_all_single')
{between}
torch.ops._c10d_functional.wait_tensor.default(buf3)
del primals_1
partition1_args = [buf5, buf3{sizes}]
del buf3
(buf5,) = self.partitions[1](partition1_args)
del partition1_args
extern_kernels.mm(buf5, buf5, out=buf5)
return (buf5, )
"""
EARLY = """partition1_args = [buf5, buf3]
(buf5,) = self.partitions[1](partition1_args)
del partition1_args"""
WRITES_BUF5 = "    triton_poi_1.run(buf5, 32, stream=s)"


def captured(between="pass", inside="    pass", sent="buf5", sizes=""):
    body = CAPTURED.format(between=between, sent=sent, sizes=sizes)
    parts = PARTS.format(inside=inside)
    return read_wrapper(code(body).replace("class Runner", f"{parts}class Runner"))


def test_the_calls_of_a_captured_part_stand_where_it_is_called():
    calls = captured().calls
    assert [(c.kind, c.part) for c in calls] == [
        (Kind.PART, None), (Kind.TRITON, 0), (Kind.FREE, 0), (Kind.LAUNCH, None),
        (Kind.WAIT, None), (Kind.FREE, None), (Kind.PART, None), (Kind.TRITON, 1), (Kind.FREE, 1),
        (Kind.EXTERN, None), (Kind.RETURN, None),
    ]  # fmt: skip
    first, second = (call for call in calls if call.kind is Kind.PART)
    assert [t.storage for t in first.reads] == ["primals_1", "primals_2"]
    assert [t.storage for t in second.reads] == ["buf5", "buf3"]
    assert (second.symbols, captured(sizes=", u0").calls[6].symbols) == ([], ["u0"])
    assert not list(faults(captured()))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"between": EARLY}, "touches buf3, which is received"),
        ({"between": EARLY, "inside": WRITES_BUF5}, "touches buf5, which is sent"),
        ({"inside": WRITES_BUF5}, ""),
        ({"sent": "primals_1", "between": "del primals_1\nprimals_1 = buf5"}, "primals_1, which"),
    ],
)
def test_what_a_captured_part_does_to_a_buffer_in_flight_is_told(changes, said):
    """Its kernels are looked at one by one, and it reads all that it is given."""
    found = list(faults(captured(**changes)))
    assert (bool(found), said in "".join(found)) == (bool(said), True)


def test_a_buffer_that_two_parts_allocate_is_told():
    """Of a concatenation in place each part's code allocated all, and had its own share alone."""
    inside = "    buf5 = empty_strided_cuda((8, 4), (4, 1), torch.bfloat16)"
    assert list(faults(captured(inside=inside))) == ["buf5 is allocated more than once"]


def test_a_part_that_is_given_a_list_is_told():
    assert list(faults(captured(inside="    buf6 = buf5[1]"))) == [
        "a captured part is given buf5, a list"
    ]


def test_replays_copy_what_no_part_has_made():
    moved = copied_by_parts(captured(), {}, {"primals_2"})
    assert (moved.weights, moved.activations) == (64, 2 * 64)  # primals_1, and what was received


@pytest.mark.slow
@needs_a_compiler
def test_parts_between_host_reads_are_captured_and_hold_nothing_of_the_step(tmp_path):
    """No collective, wait, host read or size that it reads is in a part; order and flights hold."""
    found = generated(tmp_path, "layer-ep8-graphs", 2)
    outside = {Kind.LAUNCH, Kind.WAIT, Kind.TO_HOST, Kind.INTEGERS, Kind.ITEM}
    for phase, one in found.items():
        assert one.parts > 0 and one.part_sizes == 0
        assert one.outside < 0.7 * (one.triton + one.extern)  # half of a layer is routed experts
        assert one.keeps_order, one.order
        assert not one.faults
        lines = (tmp_path / f"{phase}.py").read_text().splitlines(keepends=True)
        calls = read_wrapper("".join(lines)).calls
        assert {c.part for c in calls if c.kind in outside} == {None}
        inside = [c for c in calls if c.part is not None]
        assert not [c.name for c in inside if "grouped_mm" in c.name]
        assert any(c.name.endswith("mm") for c in inside)  # router, shared expert
        assert not [n for c in inside for n in (*c.numels, *c.symbols) if re.search(r"\bu\d", n)]
        launches = [c for c in calls if c.kind is Kind.LAUNCH]
        for received in (storages(launch.writes) for launch in launches):
            waits = [c.line for c in calls if c.kind is Kind.WAIT and received & storages(c.reads)]
            wrong = [line for number, line in enumerate(lines, 1) if number not in waits]
            assert waits and list(faults(read_wrapper("".join(wrong))))
