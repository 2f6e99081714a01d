"""An H100 that is not there, as Inductor and Triton ask for it while they compile.

Contract
    Import after `device_guard.load_guard()`, and before `moe_compile`. Inductor lowers, schedules,
    and writes CUDA wrappers; Triton compiles its kernels to sm_90. Nothing can run, and nothing is
    timed: one configuration per kernel, no padding of shapes. Private names of torch are replaced,
    for good: this is for processes of their own.
"""

from __future__ import annotations

import types
from typing import Any, Final

import torch
import torch._dynamo.device_interface as device_interface
import torch._inductor.config as inductor_config
import triton
from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from benchmarks.cuda.device_guard import store_guard

if torch.version.cuda is None:  # our kernels are registered as their modules are imported
    torch.version.cuda = "13.0"

DEVICE: Final = "cuda:0"
PROPERTIES: Final = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    total_memory=80 * 2**30,
    L2_cache_size=50 * 2**20,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    gcnArchName="",
    is_integrated=0,
    is_multi_gpu_board=0,
    clock_rate=1980000,
)
"""As `torch.cuda.get_device_properties` has them on an H100 SXM5 of 80 GB."""


COMPILED: Final[list[tuple[str, str]]] = []
"""Name and PTX of each Triton kernel that was compiled so far."""


def _always(answer: Any) -> Any:
    return lambda *_, **__: answer


class Driver(DriverBase):
    """What Triton asks while it compiles."""

    def __init__(self) -> None:
        """Load nothing."""

    @classmethod
    def is_active(cls) -> bool:
        """Be the one driver."""
        return True

    def get_current_target(self) -> GPUTarget:
        """Return Hopper."""
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        """Return the device."""
        return torch.device(DEVICE)

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Return `ty`: no launcher is built."""
        return ty

    def get_benchmarker(self) -> Any:
        """Time nothing."""
        raise RuntimeError("there is no GPU to time a kernel on")

    def get_current_device(self) -> int:
        """Return the device's number."""
        return 0

    get_current_stream = staticmethod(_always(0))

    @property
    def utils(self) -> Any:
        """Return what says the device's properties."""
        limits = {
            "max_shared_mem": PROPERTIES.shared_memory_per_block_optin,
            "multiprocessor_count": PROPERTIES.multi_processor_count,
            "max_num_regs": PROPERTIES.regs_per_multiprocessor,
            "warpSize": PROPERTIES.warp_size,
            "sm_clock_rate": PROPERTIES.clock_rate,
            "mem_clock_rate": 2619000,
            "mem_bus_width": 5120,
        }
        return types.SimpleNamespace(get_device_properties=_always(limits))


def install(*, compile_kernels: bool) -> None:
    """Let torch believe in the device; without `compile_kernels` Triton's part is left out."""
    store_guard()
    _answer_for_cuda()
    _answer_for_dynamo()
    FakeTensorMode.avoid_device_init = property(_always(True))
    fake_tensor.init_gpu_context = _always(None)
    triton.runtime.driver.set_active(Driver())
    triton_helpers.set_driver_to_gpu = lambda: None
    _fold_constants_on_cpu()
    inductor_config.use_static_cuda_launcher = False
    inductor_config.compile_threads = 1
    CachingAutotuner.precompile = _compile_first_of if compile_kernels else _compile_nothing


def _answer_for_cuda() -> None:
    random_state = torch.zeros(16, dtype=torch.uint8)
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "is_initialized": False,
        "is_current_stream_capturing": False,
        "_lazy_init": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "set_device": None,
        "get_device_properties": PROPERTIES,
        "get_device_capability": (PROPERTIES.major, PROPERTIES.minor),
        "get_device_name": PROPERTIES.name,
        "mem_get_info": (PROPERTIES.total_memory - 2**30, PROPERTIES.total_memory),
        "is_bf16_supported": True,
        "is_tf32_supported": True,
        "get_arch_list": ["sm_90"],
        "get_rng_state": random_state,
        "set_rng_state": None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, _always(answer))
    torch.cuda.synchronize = _wait_for_the_device
    torch.cuda.default_generators = (torch.Generator(),)  # its state is asked for, no number
    torch._C._cuda_getCurrentRawStream = _always(0)
    torch._C._cuda_cudaCachingAllocator_is_enabled = _always(True)


def _answer_for_dynamo() -> None:
    answers: dict[str, Any] = {
        "get_raw_stream": 0,
        "get_device_properties": PROPERTIES,
        "current_device": 0,
        "device_count": 1,
        "is_available": True,
        "get_compute_capability": 90,
        "is_triton_capable": True,
        "raise_if_triton_unavailable": None,
        "is_bf16_supported": True,
    }
    cuda = device_interface.CudaInterface
    for name, answer in answers.items():
        setattr(cuda, name, staticmethod(_always(answer)))
    cuda.synchronize = staticmethod(_wait_for_the_device)
    for name in ("current_device", "get_device_properties"):
        setattr(cuda.Worker, name, staticmethod(_always(answers[name])))
    device_interface.get_cuda_stream = _always(0)


def _wait_for_the_device(*_: Any) -> None:
    """Refuse: collectives may be in flight that other ranks have not launched yet."""
    raise RuntimeError("the device is waited for while a graph is compiled")


def _fold_constants_on_cpu() -> None:
    """Inductor folds constants of one value by computing them."""
    deduce = UniformValueConstantFolder._deduce_value

    def on_cpu(self: Any, node: Any) -> Any:
        written = node.kwargs
        if node.target is torch.ops.aten.full.default:
            node.kwargs = {**written, "device": torch.device("cpu")}
        try:
            return deduce(self, node)
        except NotImplementedError:
            return self.unknown_value
        finally:
            node.kwargs = written

    UniformValueConstantFolder._deduce_value = on_cpu


def _compile_nothing(self: Any, *_: Any, **__: Any) -> None:
    """Leave a kernel as text."""


def _compile_first_of(self: Any, *_: Any, **__: Any) -> None:
    """Compile the first configuration that would be tried."""
    if not self.compile_results:
        self.configs = self.configs[:1]
        self._precompile_worker()
    COMPILED.extend((self.fn.__name__, r.kernel.asm["ptx"]) for r in self.compile_results)
