"""Generated CUDA code is read as what it does; that of a chunked layer holds to its bars."""

import dataclasses
import json
import re
import subprocess
import sys

import pytest
from torch import fx

from benchmarks.cuda.amounts import (
    balanced_sizes,
    bytes_of,
    weights_of_forward,
)
from benchmarks.cuda.bars import missed
from benchmarks.cuda.calls import Kind
from benchmarks.cuda.device_guard import missing
from benchmarks.cuda.fed_rows import fed_rows, quantised_apart
from benchmarks.cuda.findings import _order, findings_in
from benchmarks.cuda.in_flight import faults
from benchmarks.cuda.letters import graph_letters
from benchmarks.cuda.wrapper import read_wrapper
from moe_compile.graph.query import C10D

KERNELS = '''
triton_poi_0 = async_compile.triton('triton_poi_0', """
def triton_poi_0(in_ptr0, out_ptr0, ks0, xnumel, XBLOCK : tl.constexpr):
    pass
""", device_str='cuda')
triton_poi_1 = async_compile.triton('triton_poi_1', """
def triton_poi_1(in_out_ptr0, xnumel, XBLOCK : tl.constexpr):
    pass
""", device_str='cuda')
class Runner:
    def call(self, args):
'''
INPUTS = """
def get_args():
    primals_1 = rand_strided((8, 4), (4, 1), device='cuda:0', dtype=torch.bfloat16)
    primals_2 = rand_strided((4, 4), (4, 1), device='cuda:0', dtype=torch.float32)
    tangents_1 = rand_strided((8, 4), (4, 1), device='cuda:0', dtype=torch.bfloat16)
"""
FORWARD = """
primals_1, primals_2 = args
args.clear()
assert_size_stride(primals_1, (8, 4), (4, 1), 'input')
assert_size_stride(primals_2, (4, 4), (4, 1), 'input')
with torch.cuda._DeviceGuard(0):
    torch.cuda.set_device(0)
    raw_stream0 = get_raw_stream(0)
    buf0 = empty_strided_cuda((4, 4), (4, 1), torch.bfloat16)
    triton_poi_0.run(primals_2, buf0, 16, 16, stream=raw_stream0)
    buf1 = empty_strided_cuda((2, ), (1, ), torch.int64)
    buf2 = empty_strided_cpu((2, ), (1, ), torch.int64)
    buf2.copy_(buf1, False)
    u0 = reinterpret_tensor(buf2, (), (), 0).item()
    u1 = reinterpret_tensor(buf2, (), (), 1).item()
    if not (u0 >= 0):
        raise RuntimeError('u0 >= 0')
    if not (0 <= u0):
        raise RuntimeError('0 <= u0')
    if not ((u0 + u1) == 8):
        raise RuntimeError('Eq(u0 + u1, 8)')
    buf3 = torch.ops._c10d_functional.all_to_all_single.default(primals_1, [u2, u3], [u0, u1], '0')
    assert_size_stride(buf3, (u2 + u3, 4), (4, 1), 'all_to_all_single')
{between}
    torch.ops._c10d_functional.wait_tensor.default(buf3)
    buf4 = buf3; del buf3  # reuse
    triton_poi_1_xnumel = 4*u2 + 4*u3
    triton_poi_1.run(buf4, triton_poi_1_xnumel, stream=raw_stream0)
    buf5 = empty_strided_cuda((u2 + u3, 4), (4, 1), torch.bfloat16)
    extern_kernels.mm(buf4, buf0, out=buf5)
return (buf5, buf0, u0)
"""


def code(body, inputs=INPUTS):
    indented = "".join(f"        {line}\n" for line in body.strip().splitlines())
    return KERNELS + indented + inputs


def forward(between="    pass", items="u2 = reinterpret_tensor(buf2, (), (), 0).item()"):
    more = f"    {items}\n    u3 = reinterpret_tensor(buf2, (), (), 1).item()\n"
    text = FORWARD.replace("    buf3 = torch", more + "    buf3 = torch", 1)
    return read_wrapper(code(text.format(between=between)))


def test_calls_are_read_in_their_order_with_what_they_read_and_write():
    wrapper = forward()
    kinds = [call.kind for call in wrapper.calls]
    assert kinds == [
        Kind.TRITON, Kind.TO_HOST, *[Kind.ITEM] * 4, Kind.LAUNCH, Kind.WAIT, Kind.TRITON,
        Kind.EXTERN, Kind.RETURN,
    ]  # fmt: skip
    cast, in_place = (call for call in wrapper.calls if call.kind is Kind.TRITON)
    assert [t.storage for t in (*cast.reads, *cast.writes)] == ["primals_2", "buf0"]
    assert (cast.symbols, cast.numels) == (["16"], ["16"])
    assert {t.storage for t in (*in_place.reads, *in_place.writes)} == {"buf3"}  # by a later name
    assert {t.buffer for t in (*in_place.reads, *in_place.writes)} == {"buf4"}
    assert in_place.numels == ["4 * u2 + 4 * u3"]
    assert wrapper.num_range_checks == {"u0": 2}
    assert wrapper.num_triton_sources == 2


@pytest.mark.parametrize(
    "call", ["buf2.tolist()", "torch.ops.megamoe.integers.default(buf2, [0, 1])"]
)
def test_integers_of_one_call_are_told_from_those_taken_one_by_one(call):
    one_by_one = "".join(line + "\n" for line in FORWARD.splitlines() if ".item()" in line)
    at_once = f"    buf6 = {call}\n    u0 = buf6[0]\n    u1 = buf6[1]\n    buf6 = None\n"
    wrapper = read_wrapper(code(FORWARD.replace(one_by_one, at_once).format(between="    pass")))
    kinds = [c.kind for c in wrapper.calls]
    assert Kind.ITEM not in kinds and kinds.count(Kind.EXTERN) == 1
    (found,) = (c for c in wrapper.calls if c.kind is Kind.INTEGERS)
    assert (found.integers, [t.buffer for t in found.reads]) == (["u0", "u1"], ["buf2"])
    assert balanced_sizes(wrapper).keys() == {"u0", "u1"}


def test_newer_torch_asserts_and_waits_in_other_words():
    """2.14 and 2.15 assert types, several sizes at once, and wait for several tensors at once."""
    inputs = "".join(line + "\n" for line in FORWARD.splitlines() if "'input'" in line)
    grouped = "assert_size_stride_grouped((primals_1, primals_2), ((8, 4), (4, 4)), (), 'input')\n"
    old = "assert_size_stride(buf3, (u2 + u3, 4), (4, 1), 'all_to_all_single')"
    new = "assert_tensor_metadata(buf3, (u2 + u3, 4), (4, 1), torch.bfloat16, 'all_to_all_single')"
    wait = "_c10d_functional.wait_tensor.default(buf3)"
    text = FORWARD.replace(inputs, grouped).replace(old, new)
    text = text.replace(wait, "_c10d_functional.wait_tensors.default([buf3])").format(between="")
    text = text.replace("buf3 = torch", "u2, u3 = 1, 1\n    buf3 = torch")
    older = FORWARD.format(between="").replace("buf3 = torch", "u2, u3 = 1, 1\n    buf3 = torch")
    assert text != older and inputs
    calls = [
        [(c.kind, c.reads, c.writes) for c in read_wrapper(code(t)).calls] for t in (text, older)
    ]
    assert calls[0] == calls[1]


def test_a_measured_wait_is_a_wait():
    wait = "_c10d_functional.wait_tensor.default(buf3)"
    ours = FORWARD.replace(wait, "megamoe.measured_wait.default(buf3, 'a.py:3|forward|buf3')")
    assert ours != FORWARD
    read = [read_wrapper(code(text.format(between=""))).calls for text in (FORWARD, ours)]
    found = [[(call.kind, call.reads, call.writes) for call in calls] for calls in read]
    assert found[0] == found[1]


def test_a_second_wait_for_the_same_collective_is_none():
    """Newer releases of Inductor leave it out: its order was taken for lost."""
    wait = "    torch.ops._c10d_functional.wait_tensor.default(buf3)\n"
    twice = read_wrapper(code(FORWARD.format(between="    pass").replace(wait, wait + wait)))
    assert _order(twice) == _order(forward()) == "LWm"
    graph = fx.Graph()
    x = graph.placeholder("x")
    launch = graph.call_function(C10D.all_reduce.default, (x, "sum", "0"))
    waits = [graph.call_function(C10D.wait_tensor.default, (launch,))]
    waits.append(graph.call_function(C10D.wait_tensor.default, (waits[0],)))
    assert graph_letters(graph) == "LW"
    other = fx.Graph()
    other.call_function(C10D.wait_tensor.default, (other.placeholder("landed"),))
    assert graph_letters(other) == ""


@pytest.mark.parametrize(
    ("between", "said"),
    [
        ("    pass", ""),
        ("    triton_poi_1.run(buf3, 8, stream=raw_stream0)", "touches buf3, which is received"),
        ("    extern_kernels.mm(buf3, buf0, out=buf9)", "touches buf3, which is received"),
        ("    triton_poi_1.run(primals_1, 8, stream=s)", "touches primals_1, which is sent"),
        ("    del primals_1", "touches primals_1, which is sent"),
        ("    buf8 = primals_1; del primals_1", ""),
    ],
)  # fmt: skip
def test_what_is_done_to_a_buffer_in_flight_is_told(between, said):
    found = list(faults(forward(between)))
    assert (len(found), said in "".join(found)) == (bool(said), True)


COPIES = """
primals_1, = args
buf0 = empty_strided_cuda((4, 4), (4, 1), torch.bfloat16)
triton_poi_1.run(buf0, 16, stream=s)
buf1 = torch.ops.ao.offload.default(buf0)
buf2 = buf1
{between}
buf3 = torch.ops.ao.wait_tensor.default(buf2, None, buf0)
del buf0
buf4 = torch.ops.ao.reload.default(primals_1, device(type='cuda', index=0), [8, 4], [4, 1])
{back}
buf5 = torch.ops.ao.wait_tensor.default(buf4, None, primals_1)
triton_poi_1.run(buf5, 8, stream=s)
return (buf3, )
"""


@pytest.mark.parametrize(
    ("between", "back", "said"),
    [
        ("pass", "pass", ""),
        ("triton_poi_1.run(buf0, 16, stream=s)", "pass", "touches buf0, which is sent"),
        ("del buf0", "pass", "touches buf0, which is sent"),
        ("buf6 = buf0; del buf0  # reuse", "pass", ""),
        ("pass", "triton_poi_1.run(buf4, 8, stream=s)", "touches buf4, which is received"),
        ("pass", "del primals_1", "touches primals_1, which is sent"),
    ],
)
def test_what_is_done_to_a_copy_in_flight_is_told(between, back, said):
    wrapper = read_wrapper(code(COPIES.format(between=between, back=back)))
    kinds = [c.kind for c in wrapper.calls if c.kind in (Kind.COPY, Kind.COPY_WAIT)]
    assert kinds == [Kind.COPY, Kind.COPY_WAIT] * 2
    found = list(faults(wrapper))
    assert (bool(found), said in "".join(found)) == (bool(said), True)
    unawaited = "\n".join(line for line in COPIES.splitlines() if "wait_tensor" not in line)
    unawaited = unawaited.replace("buf3, ", "primals_1, ").replace("run(buf5", "run(primals_1")
    lost = list(faults(read_wrapper(code(unawaited.format(between="pass", back="pass")))))
    assert sum("never waited for" in line for line in lost) == 2


def test_a_launch_that_nobody_waits_for_is_told():
    text = FORWARD.replace("    torch.ops._c10d_functional.wait_tensor.default(buf3)\n", "")
    found = list(faults(read_wrapper(code(text.format(between="    pass")))))
    assert any("never waited for" in line for line in found)


@pytest.mark.parametrize(
    ("lines", "buffer"),
    [
        ("buf1 = reinterpret_tensor(buf0, (16, ), (1, ), 0); del buf0  # reuse", "buf1"),
        ("buf1 = buf0; del buf0  # reuse", "buf1"),
        (
            "buf1 = reinterpret_tensor(buf0, (16, ), (1, ), 0)\ns = get_raw_stream(0)\ndel buf0",
            "buf0",
        ),
    ],
)
def test_a_storage_is_taken_over_where_it_is_given_up_at_once(lines, buffer):
    """A view that outlives the name it was made of shows the same buffer."""
    made = "buf0 = empty_strided_cuda((4, 4), (4, 1), torch.bfloat16)"
    body = f"{made}\n{lines}\ntriton_poi_1.run(buf1, 16, stream=s)\nreturn (buf1, )"
    wrapper = read_wrapper(code(body))
    (call,) = (c for c in wrapper.calls if c.kind is Kind.TRITON)
    assert [(t.storage, t.buffer) for t in call.writes] == [("buf0", buffer)]
    assert wrapper.results == (buffer,)


def test_bytes_are_those_of_balanced_routing_weights_apart():
    wrapper = forward()
    sizes = balanced_sizes(wrapper)
    assert sizes == {"u0": 4, "u1": 4, "u2": 4, "u3": 4}
    weights = weights_of_forward(wrapper, [1])
    assert weights == {"primals_2", "buf0"}
    moved = bytes_of(wrapper, sizes, weights)
    assert moved.weights == 64 + 32 + 32  # read, cast, read again
    assert moved.activations == 4 * 64  # in place: read, written; read, written by the product
    assert moved.collectives == 64


def test_bars_are_against_the_same_program_in_one_chunk():
    def figures(**changes):
        fine = {
            "triton": 10, "extern": 5, "one_element": 0, "to_host": 1, "items": 0,
            "keeps_order": True, "order": "LW", "faults": (), "weight_bytes": 100.0,
            "activation_bytes": 100.0,
        }  # fmt: skip
        return {"forward": {**fine, **changes}}

    fine = {"1": figures(), "2": figures(triton=25, weight_bytes=110.0), "4": figures(triton=55)}
    assert not list(missed("layer", fine))
    for changes in (
        {"triton": 26}, {"one_element": 1}, {"to_host": 2}, {"items": 1}, {"keeps_order": False},
        {"faults": ("line 3: ...",)}, {"weight_bytes": 111.0}, {"activation_bytes": 103.0},
    ):  # fmt: skip
        assert len(list(missed("layer", {**fine, "2": figures(**changes)}))) == 1
    assert "not generated" in next(missed("layer", {"2": {"error": ["ValueError: x"]}}))
    in_graphs = {"parts": 2, "part_sizes": 0, "outside": 6}
    assert not list(missed("layer", {"1": figures(**in_graphs)}))
    for changes in ({"outside": 7}, {"part_sizes": 1}):
        assert len(list(missed("layer", {"1": figures(**in_graphs | changes)}))) == 1
    in_parts = {"1": figures(to_host=2), "2": figures(to_host=2, triton=40)}
    assert not list(missed("block", in_parts, parts=2))
    for changes in ({"triton": 41, "to_host": 2}, {"to_host": 3}):
        assert len(list(missed("block", {**in_parts, "2": figures(**changes)}, parts=2))) == 1


MESSAGES = """
primals_1, primals_2 = args
buf1 = torch.ops._c10d_functional.all_to_all_single.default(primals_1, [4, 4], [4, 4], '0')
assert_size_stride(buf1, (8, 144), (144, 1), 'received')
torch.ops._c10d_functional.wait_tensor.default(buf1)
{rows}
buf3 = buf2[0]
assert_size_stride(buf3, (8, 128), (128, 1), 'payload')
buf4 = buf2[1]
assert_size_stride(buf4, (8, 1), (1, 1), 'scales')
buf5 = torch.ops.megamoe.quantize_weight.default(primals_2, 'blockwise')
buf6 = torch.ops.megamoe.{product}.default(buf3, buf4, buf5, buf5, None, '', torch.bfloat16)
return (buf6, )
"""
AS_THEY_CAME = """
buf9 = empty_strided_cuda((8, ), (1, ), torch.int64)
buf2 = torch.ops.megamoe.message_rows.default(buf1, buf9, 128)
del buf9
""".strip()
COPIED = """
buf7 = torch.ops.megamoe.unpack_dequantize.default(buf1, 128, torch.bfloat16)
assert_size_stride(buf7, (8, 128), (128, 1), 'rows')
buf2 = torch.ops.megamoe.quantize_rows.default(buf7, 'blockwise')
""".strip()


def fed(way, product="scaled_grouped_mm"):
    rows = "(8, 4), (4, 1), device='cuda:0', dtype=torch.bfloat16"
    messages = "(8, 144), (144, 1), device='cuda:0', dtype=torch.uint8"
    body = MESSAGES.format(rows=way, product=product)
    return list(fed_rows(read_wrapper(code(body, INPUTS.replace(rows, messages))), {}))


def test_a_copy_of_rows_between_their_wait_and_their_product_is_seen():
    """Of 1152 bytes received; a result in several tensors is itself a byte."""
    payload, scales = 8 * 128, 8 * 4
    (direct,) = fed(AS_THEY_CAME)
    assert (direct.received_bytes, direct.num_kernels) == (8 * 144, 1)
    index = 8 * 8
    assert (direct.read_bytes, direct.written_bytes) == (8 * 144 + index, payload + scales + 1)
    (copied,) = fed(COPIED)
    assert copied.num_kernels == 2
    assert copied.read_bytes == 8 * 144 + 2 * payload
    assert copied.written_bytes == 2 * payload + payload + scales + 1
    assert not fed(AS_THEY_CAME, product="sums")  # no product reads them

    def lines(*found, chunks=1):
        figures = {"triton": 1, "extern": 1, "one_element": 0, "to_host": 1, "items": 0}
        figures |= {
            "keeps_order": True,
            "faults": (),
            "fed": [dataclasses.asdict(f) for f in found],
        }
        return list(missed("block", {str(chunks): {"forward": figures}}, is_fed=True))

    assert not lines(direct)
    assert len(lines(copied)) == 2  # read, and written
    assert len(lines(dataclasses.replace(direct, num_kernels=3))) == 1
    assert "1 of 2 exchanges" in lines(direct, chunks=2)[0]


needs_a_compiler = pytest.mark.skipif(bool(missing()), reason=missing() or "there")


def generated(folder, name, chunks, **options):
    command = [sys.executable, "-m", "benchmarks.cuda.generate", name, str(chunks)]
    command += [f"--option={key}={json.dumps(value)}" for key, value in options.items()]
    subprocess.run([*command, "--out", str(folder)], check=True, capture_output=True, timeout=1500)
    return findings_in(folder)


def storages(tensors):
    return {tensor.storage for tensor in tensors}


def made_wrong(text):
    """Yield what is wrong, and code in which it is: each thing that can be, at each launch."""
    lines, calls = text.splitlines(keepends=True), read_wrapper(text).calls

    def without(numbers):
        return [line for number, line in enumerate(lines, 1) if number not in numbers]

    def moved(number, behind):
        place = behind - (number < behind)
        return [*without([number])[:place], lines[number - 1], *without([number])[place:]]

    for number, launch in enumerate(calls):
        if launch.kind is not Kind.LAUNCH:
            continue
        received = storages(launch.writes)
        touching = [c for c in calls[number + 1 :] if received & storages(c.reads)]
        waits = [call for call in touching if call.kind is Kind.WAIT]
        reader = next(call for call in touching if call.kind is not Kind.WAIT)
        yield "never waited for", without([wait.line for wait in waits])
        first = lines[launch.line - 1]
        got = first.partition(" = ")[0]
        read = f"{got} = extern_kernels.mm({got.strip()}, {got.strip()})\n"
        yield "read before the wait", [*lines[: launch.line], read, *lines[launch.line :]]
        made = [c for c in calls[:number] if storages(launch.reads) & storages(c.writes)]
        for writer in made[-1:]:
            if " = " not in lines[writer.line - 1].partition("(")[0]:  # else it has no name yet
                yield "made while it is sent", moved(writer.line, behind=launch.line)
        if len(waits) == 1:
            yield "waited for once it was read", moved(waits[0].line, behind=reader.line)
        indent = " " * (len(first) - len(first.lstrip()))
        sent = re.search(r"default\((?:reinterpret_tensor\()?(\w+),", first)[1]
        written = f"{indent}extern_kernels.mm({sent}, {sent}, out={sent})\n"
        yield "written in flight", [*lines[: launch.line], written, *lines[launch.line :]]


def check_that_wrong_code_is_found(folder):
    """More than two hundred times in the layers below."""
    for phase in ("forward", "backward"):
        text = (folder / f"{phase}.py").read_text()
        made = list(made_wrong(text))
        assert len(made) >= 4 * sum(c.kind is Kind.LAUNCH for c in read_wrapper(text).calls) > 0
        for what, lines in made:
            assert list(faults(read_wrapper("".join(lines)))), what


@pytest.mark.slow
@needs_a_compiler
@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        ("layer-ep8", 2),
        ("deepseek-16b-ep8", 2),
        ("qwen3-ep8-checkpoint", 4),
        ("layer-ep8-fp8_blockwise", 2),
        ("deepseek-16b-ep8-fp8_blockwise", 2),
    ],
)
def test_code_of_a_chunked_layer_keeps_the_schedule_and_reads_the_host_once(tmp_path, name, chunks):
    found = generated(tmp_path, name, chunks)
    assert json.loads((tmp_path / "report.json").read_text())["regions"][0]["num_chunks"] == chunks
    has_flex = "triton_tem_fused_" in (tmp_path / "forward.py").read_text()
    assert has_flex is name.startswith("deepseek")  # as torchtitan has it; qwen3 is on SDPA
    for phase, one in found.items():
        moved = one.weight_bytes + one.activation_bytes
        assert one.estimated_bytes == pytest.approx(moved, rel=0.15)
        assert one.one_element == 0
        assert one.to_host == (phase == "forward")
        assert (one.items, one.integers > 0) == (0, phase == "forward")
        assert one.keeps_order, one.order
        assert not one.faults
        assert one.order.count("L") == (2 * chunks + (phase == "forward"))
        assert ("a" in one.order) is (not name.startswith("layer"))
    figures = {phase: one.as_dict() for phase, one in found.items()}
    assert not list(missed(name, {str(chunks): figures}, is_fed="fp8" in name))
    check_that_wrong_code_is_found(tmp_path)


@pytest.mark.slow
@needs_a_compiler
def test_code_that_copies_activations_to_the_host_touches_none_in_flight(tmp_path):
    """A source is given up behind its wait, and nothing takes its memory before."""
    options = {"offload_budget": 1.0, "equal_tokens": True}
    found = generated(tmp_path, "layer-ep8", 2, **options)
    assert all(one.keeps_order and not one.faults for one in found.values())
    for phase in found:
        text = (tmp_path / f"{phase}.py").read_text()
        lines, calls = text.splitlines(keepends=True), read_wrapper(text).calls
        copies = [call for call in calls if call.kind is Kind.COPY]
        waits = [call for call in calls if call.kind is Kind.COPY_WAIT]
        assert len(copies) == len(waits) > 0
        for copy in copies:
            indent = lines[copy.line - 1].partition("buf")[0]
            (source,) = re.findall(r"default\((\w+)[,)]", lines[copy.line - 1])
            for wrong in (f"extern_kernels.mm({source}, {source}, out={source})", f"del {source}"):
                broken = [*lines[: copy.line], f"{indent}{wrong}\n", *lines[copy.line :]]
                assert list(faults(read_wrapper("".join(broken)))), wrong


@pytest.mark.slow
@needs_a_compiler
@pytest.mark.parametrize(
    ("name", "parts"), [("deepseek-671b-ep64-checkpoint-parts2", 2), ("layer-ep64-hops1", 1)]
)
def test_code_in_parts_and_in_two_hops_reads_the_host_once_a_part(tmp_path, name, parts):
    found = generated(tmp_path, name, 1)
    for phase, one in found.items():
        assert one.one_element == 0
        assert one.to_host == parts * (phase == "forward")
        assert (one.items, one.integers > 0) == (0, phase == "forward")
        assert one.keeps_order, one.order
        assert not one.faults
    assert found["forward"].order.count("a") == parts * name.startswith("deepseek")
    check_that_wrong_code_is_found(tmp_path)


@pytest.mark.slow
@needs_a_compiler
@pytest.mark.parametrize("heads", [("192", "128"), ("256", "256")])
def test_no_kernel_of_attention_with_wide_heads_spills_on_hopper(heads):
    """Heads of DeepSeek-V3, and of Qwen3-Next."""
    command = [sys.executable, "-m", "benchmarks.cuda.attention", *heads]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=1500)
    kernels = json.loads(done.stdout.splitlines()[-1])
    assert any("tem_fused_flex_attention_backward" in kernel["name"] for kernel in kernels)
    assert {kernel["spilled_bytes"] for kernel in kernels} == {0}, kernels


@pytest.mark.slow
@needs_a_compiler
@pytest.mark.parametrize("recipe", ["blockwise", "rowwise"])
def test_one_kernel_of_inductor_makes_rows_and_quantises_them_to_the_same_bytes(tmp_path, recipe):
    """In Triton's interpreter; the rows are written too, in bfloat16."""
    for step in ("write", "run"):
        command = [sys.executable, "-m", "tests.benchmarks.generated_quantiser", step]
        done = subprocess.run(
            [*command, tmp_path / "code.py", recipe], capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, done.stderr[-3000:]


def test_rows_that_another_kernel_quantises_than_makes_them_miss_a_bar():
    (name,) = quantised_apart(
        read_wrapper(code(MESSAGES.format(rows=COPIED, product="scaled_grouped_mm")))
    )
    assert name == "megamoe.quantize_rows"
    came = MESSAGES.format(rows=AS_THEY_CAME, product="scaled_grouped_mm")
    assert not list(quantised_apart(read_wrapper(code(came))))
    fine = {
        "triton": 1, "extern": 1, "one_element": 0, "to_host": 1, "items": 0, "keeps_order": True,
        "faults": (),
    }  # fmt: skip
    assert not list(missed("layer", {"1": {"forward": {**fine, "quantised_apart": 0}}}))
    assert len(list(missed("layer", {"1": {"forward": {**fine, "quantised_apart": 2}}}))) == 1
