"""Pools of ranks, started once and shared."""

import contextlib
import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Inductor would start a process of its own to compile in, for each rank that compiles anything
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# graphs with a size for every count seldom repeat an operator's shapes: remembering costs more
os.environ.setdefault("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0")
# Dynamo would collect garbage after each compilation: a tenth of a rank's CPU time
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")
# ranks of pools refuse what a CPU may round otherwise in parts: what is rewritten must be equal
os.environ["TESTS_HAVE_STRICT_BITS"] = "1"

import torch
import torch.distributed as dist
from hypothesis import settings
from torch._dynamo.variables import distributed as known_to_dynamo
from torch.testing._internal.distributed.fake_pg import FakeStore
from xdist.scheduler import LoadFileScheduling

from moe_compile.report.graph_breaks import forget_frames
from moe_compile.testing.cpu_rounding.cpu_bits import use_bits_of_environment
from moe_compile.testing.mirrored_rank import MirroredGroup, become_mirrored
from moe_compile.testing.rank_pool import RankPool, begin_again, collect_seldom
from moe_compile.torch_quirks.python311_frames import with_frame_space
from tests.capture import TRACED

use_bits_of_environment()  # and so does this process


FOLDERS = ("integration", "equivalence", "backend", "benchmarks", "check")
LONGEST = tuple(f"tests/{folder}/" for folder in FOLDERS)
"""What takes longest first, so that no worker has much of it left when the other is done."""


def place(item):
    folders = [item.nodeid.startswith(folder) for folder in LONGEST]
    return folders.index(True) if any(folders) else len(LONGEST)


def pytest_collection_modifyitems(items):
    items.sort(key=place)
    for item in items:
        item.obj = with_frame_space(item.obj)


def pytest_collection_finish(session):
    collect_seldom()


OWN_PROCESSES = ("test_cli", "test_configs", "test_dry_run", "test_interrupt", "test_torchtitan")
"""Files of `LONGEST[0]` whose jobs are processes of their own: they share no ranks."""


class ByWhatIsShared(LoadFileScheduling):
    """A file's tests run in one worker, and so do all that share ranks which import torchtitan."""

    def _split_scope(self, nodeid):
        scope = super()._split_scope(nodeid)
        shares = scope.startswith(LONGEST[0]) and Path(scope).stem not in OWN_PROCESSES
        return LONGEST[0] if shares else scope


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return ByWhatIsShared(config, log)


# tests run beside others, and an example's time says nothing then
settings.register_profile("beside others", deadline=None, max_examples=40)
settings.load_profile("beside others")


TIMEOUT_S = 900.0
"""Ends what hangs, and nothing that is slow: calls of this length take a hundredth of it."""


POOLS = []


@contextlib.contextmanager
def kept_pool(num_ranks):
    with RankPool(num_ranks, timeout_s=TIMEOUT_S) as pool:
        POOLS.append(pool)
        yield pool


def pytest_runtest_teardown(item, nextitem):
    """End the ranks of torchtitan's jobs after the last of them: they keep threads of gloo."""
    trains = [test is not None and test.nodeid.startswith(LONGEST[0]) for test in (item, nextitem)]
    if trains == [True, False]:
        for pool in POOLS:
            pool.renew()


@pytest.fixture(scope="session")
def kept_two_ranks():
    with kept_pool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def kept_four_ranks():
    with kept_pool(4) as pool:
        yield pool


@pytest.fixture(scope="session")
def kept_mirrored_ranks():
    with RankPool(1, timeout_s=TIMEOUT_S) as pool:
        yield pool


def mirror(rank):
    begin_again()
    become_mirrored()


def can_mirror():
    """Whether Dynamo takes groups that are written in Python: older releases take torch's alone."""
    old = getattr(known_to_dynamo, "ProcessGroupVariable", None)
    return old is None or old.is_process_group(MirroredGroup())


@pytest.fixture(scope="module")
def mirrored_ranks(request):
    """Two ranks at half the price: one, and its mirror image that does not exist.

    An exchange gives back what was put in, so rows sent to a wrong rank do not show: for tests of
    what is computed between exchanges and around them. Two ranks where it cannot be.
    """
    if not can_mirror():
        return request.getfixturevalue("two_ranks")
    kept = request.getfixturevalue("kept_mirrored_ranks")
    kept.run(mirror)
    return kept


@pytest.fixture(scope="module")
def two_ranks(kept_two_ranks):
    kept_two_ranks.regroup()
    return kept_two_ranks


@pytest.fixture(scope="module")
def four_ranks(kept_four_ranks):
    kept_four_ranks.regroup()
    return kept_four_ranks


ON_DEVICES = [
    pytest.param("cpu", id="gloo"),
    pytest.param("cuda", id="nccl", marks=pytest.mark.multigpu),
]
"""Where a test runs that several GPUs can run as well: the same ranks, one way and the other."""


@pytest.fixture(scope="session")
def kept_gpus():
    """Pools of ranks on GPUs by number, started where a test first asks for them."""
    with contextlib.ExitStack() as stack:
        pools = {}

        def pool_of(num_ranks):
            if num_ranks not in pools:
                pool = RankPool(num_ranks, device="cuda", timeout_s=TIMEOUT_S)
                pools[num_ranks] = stack.enter_context(pool)
            return pools[num_ranks]

        yield pool_of


def devices(request, num_ranks, by_gloo):
    if request.param == "cpu":
        return request.getfixturevalue(by_gloo)
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} CUDA devices, torch sees {torch.cuda.device_count()}")
    pool = request.getfixturevalue("kept_gpus")(num_ranks)
    pool.regroup()
    return pool


@pytest.fixture(scope="module", params=ON_DEVICES)
def two_devices(request):
    """Two ranks by gloo, and again on GPUs by NCCL where tests marked `multigpu` run."""
    return devices(request, 2, "two_ranks")


@pytest.fixture(scope="module", params=ON_DEVICES)
def four_devices(request):
    """Four, as `two_devices`."""
    return devices(request, 4, "four_ranks")


@pytest.fixture(scope="module", autouse=True)
def no_group_stays():
    """One module's process group is not the next one's, nor what torch left to Python in it."""
    yield
    TRACED.clear()
    forget_frames()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def fake_ranks(no_group_stays):
    """This process as rank 0 of two that do not exist: graphs can be traced, not run."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    return dist.group.WORLD
