"""Generated wrappers, in the shapes Inductor writes them, read back as events."""

import re

from moe_compile.testing.wrapper_order import (
    EventKind,
    event_letters,
    products_under,
    wrapper_events,
)

CPU = """
cpp_fused_add_0 = async_compile.cpp_pybinding(['const float*', 'float*'], r'''
extern "C" void kernel() {}
''')
cpp_bmm_1 = async_compile.cpp_pybinding(['float*'], '''torch.ops.aten.mm(''')

async_compile.wait(globals())
del async_compile

class Runner:
    def __init__(self, partitions):
        self.partitions = partitions

    def call(self, args):
        arg0_1, = args
        args.clear()
        assert_size_stride(arg0_1, (4, 4), (4, 1))
        buf0 = empty_strided_cpu((4, 4), (4, 1), torch.float32)
        # Original ATen: [aten.mm]
        extern_kernels.mm(arg0_1, arg0_1, out=buf0)
        cpp_fused_add_0(buf0, buf1)
        # Original ATen: [_c10d_functional.all_to_all_single]
        buf2 = torch.ops._c10d_functional.all_to_all_single.default(buf0, [u0, u1], [2, 2], '7')
        assert_size_stride(buf2, (4, 4), (4, 1), 'torch.ops._c10d_functional.all_to_all_single.default')
        buf3 = extern_kernels._grouped_mm(buf0, arg0_1, buf1, out_dtype=None)
        buf4 = torch.ops.aten._grouped_mm.default(buf0, arg0_1, buf1)
        torch.ops._c10d_functional.wait_tensor.default(buf2)
        buf5 = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(buf2, buf2, buf2)
        return (buf3, )

runner = Runner(partitions=[])
call = runner.call

def benchmark_compiled_module(times=10):
    torch.ops._c10d_functional.wait_tensor.default(buf2)
"""  # noqa: E501

CUDA = """
triton_poi_fused_add_0 = async_compile.triton('triton_poi_fused_add_0', '''
def triton_poi_fused_add_0(in_ptr0, xnumel):
    pass
''', device_str='cuda')

def call(args):
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        buf0 = torch.ops._c10d_functional.all_gather_into_tensor_out.default(a, 2, 'ep', out=b)
        stream0 = get_raw_stream(0)
        triton_tem_fused_mm_2.run(buf0, arg0_1, 1, 1, 1, stream=stream0)
        triton_per_fused_flex_attention_backward_3.run(buf0, buf5, 16, 128, stream=stream0)
        triton_tem_fused_flex_attention_backward_view_4.run(buf5, buf6, 1, 1, 1, stream=stream0)
        triton_poi_fused_add_0.run(buf0, 16, stream=stream0)
        extern_kernels.addmm(buf0, buf1, buf2, alpha=1, beta=1, out=buf3)
        buf4 = torch.ops._c10d_functional.wait_tensor.default(buf0)
    return (buf0, )
"""


def test_a_cpu_wrapper_is_read_in_order():
    events = wrapper_events(CPU)
    assert event_letters(events, "LWmka") == "mkLmmWa"
    assert events[0].line == "extern_kernels.mm(arg0_1, arg0_1, out=buf0)"
    (launch,) = [e for e in events if e.kind is EventKind.LAUNCH]
    assert (launch.op, launch.group) == ("all_to_all_single", "7")


def test_a_cuda_wrapper_is_read_in_order():
    events = wrapper_events(CUDA)
    assert event_letters(events, "LWmka") == "LmkakmW"
    assert events[0].group == "ep"


def test_definitions_comments_and_benchmarks_are_not_events():
    assert event_letters(wrapper_events(CPU), "W") == "W"
    assert [e.op for e in wrapper_events(CUDA) if e.kind is EventKind.KERNEL] == [
        "triton_per_fused_flex_attention_backward_3",
        "triton_poi_fused_add_0",
    ]


TWO_IN_FLIGHT = """
def call(args):
    buf0 = torch.ops._c10d_functional.all_to_all_single.default(a, [u0], [u1], '7')
    buf1 = torch.ops._c10d_functional.all_to_all_single.default(b, [u2], [u3], '7')
    torch.ops._c10d_functional.wait_tensor.default(buf0)
    extern_kernels.mm(buf0, c, out=buf2)
    torch.ops._c10d_functional.wait_tensor.default(reinterpret_tensor(buf1, (4, 4), (4, 1), 0))
    torch.ops._c10d_functional.wait_tensor.default(buf0)
    extern_kernels.mm(buf1, c, out=buf3)
    return (buf3, )
"""


def test_a_product_runs_under_those_exchanges_that_nobody_has_waited_for():
    assert products_under(wrapper_events(TWO_IN_FLIGHT)) == (0, 1)
    assert products_under(wrapper_events(CPU)) == (2,)


def test_a_measured_wait_is_a_wait():
    wait = re.compile(r"_c10d_functional\.wait_tensor\.default\((buf0)\)")
    text = wait.sub(
        r"megamoe.measured_wait.default(\1, 'a.py:3 in buf1|forward|buf1')", TWO_IN_FLIGHT
    )
    assert text != TWO_IN_FLIGHT
    assert wrapper_events(text)[2].names == wrapper_events(TWO_IN_FLIGHT)[2].names == ("buf0",)
    assert products_under(wrapper_events(text)) == products_under(wrapper_events(TWO_IN_FLIGHT))
