"""Several ranks as processes of this machine, kept alive between calls.

Contract
    `run` calls one function on every rank and returns their results in rank order; a failure on
    any rank raises here with that rank's traceback. Ranks that use no CPU until the timeout count
    as hanging and are ended; slow ranks on a loaded machine are not.
    After a failure the ranks are ended, since nobody knows what they still wait for, and the next
    call has new ones; `renew` does so on request. `regroup` leaves the processes and gives them a
    process group of their own.
    Leaving the context ends every process it started, and no other.
    Pools of several programs may start at once: the system chooses a pool's port while it is bound.
    Ranks are processors joined by gloo, or GPUs of this machine, one each, joined by NCCL; with
    torch's deterministic algorithms, as a sum in any order differs from run to run.

The setup of a first compilation takes seconds, so one process does it once (`warm_start.py`), and
every rank is a copy of that one, megamoe's backend loaded; a rank has the environment that its
pool's owner had when the rank started. With an accelerator each rank does it for itself: a copy of
a process that has looked for devices cannot use them.

`Idleness` tells a hang from slowness by the CPU time that processes use. A process whose CPU time
the system does not report counts as idle.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import multiprocessing as mp
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch
import torch.distributed as dist

from moe_compile.testing.cpu_rounding.cpu_bits import use_bits_of_environment
from moe_compile.testing.process_groups import be_deterministic, forget_groups, join
from moe_compile.torch_quirks.python311_frames import with_frame_space
from moe_compile.torch_quirks.untraceable_guards import install_eager_fallback

HOST: Final = "127.0.0.1"
START_TIMEOUT_S: Final = 120.0
SLOWEST: Final = 10.0
"""Times the timeout that a call may take while ranks compute."""
SETTLED_S: Final = 2.0
"""Seconds that ranks are waited for after an answer once the call is settled."""
IMPORTED_ONCE: Final = ("torch._inductor.compile_fx", "moe_compile.testing.warm_start")


def meeting_point() -> dist.TCPStore:
    """Return the store where ranks on this machine meet; it serves as long as it is referred to.

    A port that is looked for first and bound later may be another program's by then.
    """
    return dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """Address, size and settings of the group that a rank joins."""

    num_ranks: int
    port: int
    timeout_s: float
    device: str
    backend: str


class RankFailure(AssertionError):
    """A function failed on a rank; carries that rank's traceback."""


class RankPool:
    """`num_ranks` processes joined by one group; use as a context manager."""

    def __init__(
        self,
        num_ranks: int,
        *,
        device: str = "cpu",
        backend: str = "",
        timeout_s: float = 300.0,
        collective_timeout_s: float | None = None,
        vain_s: float | None = None,
        at_start: Callable[[], None] | None = None,
    ) -> None:
        """Prepare; processes start on entry.

        `device` is "cpu" or "cuda"; `backend` that of the group, gloo or NCCL by the device if "".
        `timeout_s` bounds the time in one call of `run` in which no rank computes; ten times as
        long bounds the call, and a collective unless `collective_timeout_s` is given. Where that is
        less than `timeout_s` a collective that does not end is an error that says where.
        `vain_s` is how long ranks may do nothing once another rank has answered, for programs in
        which that means they wait for it in vain; `timeout_s` by default.
        Every process calls `at_start` before anything else: imports that must come first.
        """
        self.num_ranks = num_ranks
        self._device, self._backend = device, backend
        self.timeout_s = timeout_s
        self._collective_s = collective_timeout_s or self._longest_s
        self._vain_s = vain_s or timeout_s
        self._at_start = at_start
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._store: dist.TCPStore | None = None

    def __enter__(self) -> RankPool:
        """Start the ranks and wait until they have joined."""
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the ranks."""
        self._stop()

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        settles: Callable[[Any], bool] = lambda _: False,
    ) -> list[Any]:
        """Call `function(rank, *args)` on every rank; it and its results must pickle.

        Once a rank's result settles the call, ranks that do not answer soon are ended, and None
        stands in place of their results.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # `_collect` says that it ended
                pipe.send((function, args))
        return self._collect(self.timeout_s, self._longest_s, settles)

    def renew(self) -> None:
        """End the processes and their state; the next call has new ones."""
        self._stop()

    def regroup(self) -> None:
        """Put the ranks into a new group, in place of all they have, and forget what they compiled.

        All other state of the processes stays.
        """
        store = meeting_point()
        self.run(_regroup, self._meeting(store))
        self._store = store

    def _meeting(self, store: dist.TCPStore) -> Meeting:
        return Meeting(
            num_ranks=self.num_ranks,
            port=store.port,
            timeout_s=self._collective_s,
            device=self._device,
            backend=self._backend,
        )

    def _start(self) -> None:
        context: Any = mp.get_context(_start_method())
        if context.get_start_method() == "forkserver":
            _prepare_copies(context)
        self._store = meeting_point()
        for rank in range(self.num_ranks):
            here, there = context.Pipe()
            meeting = self._meeting(self._store)
            arguments = (rank, meeting, there, dict(os.environ), self._at_start)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        self._collect(START_TIMEOUT_S, SLOWEST * START_TIMEOUT_S, lambda _: False)

    @property
    def _longest_s(self) -> float:
        return SLOWEST * self.timeout_s

    def _stop(self, patience_s: float = 5.0) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(patience_s)
            if process.is_alive():
                process.kill()
                process.join()
        self._pipes, self._processes, self._store = [], [], None

    def _collect(
        self, idle_s: float, longest_s: float, settles: Callable[[Any], bool]
    ) -> list[Any]:
        """Return all ranks' results; a failed rank is reported before a rank that hangs for it."""
        began = answered = time.monotonic()
        idleness = Idleness([process.pid for process in self._processes])
        results: dict[int, Any] = {}
        settled = False
        while len(results) < self.num_ranks and time.monotonic() - began <= longest_s:
            idle = min(idleness.seconds(), time.monotonic() - answered)
            if idle > (min(idle_s, self._vain_s) if results else idle_s):
                break
            if settled and time.monotonic() - answered > SETTLED_S:
                self._stop(patience_s=0.0)
                return [results.get(rank, (True, None))[1] for rank in range(self.num_ranks)]
            for rank, pipe in enumerate(self._pipes):
                if rank not in results and pipe.poll(0.01):
                    results[rank] = _receive(rank, pipe)
                    answered = time.monotonic()
                    settled |= results[rank][0] and settles(results[rank][1])
        failed = (f"rank {r}:\n{text}" for r, (ok, text) in sorted(results.items()) if not ok)
        said = "\n".join(failed)
        if missing := sorted(set(range(self.num_ranks)) - set(results)):
            waited, idle = time.monotonic() - began, idleness.seconds()
            said = (
                f"ranks {missing} did not answer within {waited:.0f} s; for the last {idle:.0f} s "
                f"none computed\n{said}"
            )
        if said:
            self._stop(patience_s=0.0)
            raise RankFailure(said)
        return [results[rank][1] for rank in range(self.num_ranks)]


def _start_method() -> str:
    copies = "forkserver" in mp.get_all_start_methods() and not torch.accelerator.is_available()
    return "forkserver" if copies else "spawn"


def _prepare_copies(context: Any) -> None:
    """Start the process that ranks are copies of, unless it runs.

    It finds modules where this one does: Python 3.11 leaves it to look for itself.
    """
    context.set_forkserver_preload(list(IMPORTED_ONCE))
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before


def _receive(rank: int, pipe: Connection) -> tuple[bool, Any]:
    try:
        answer: tuple[bool, Any] = pipe.recv()
    except (EOFError, ConnectionResetError):
        return False, f"process of rank {rank} ended"
    return answer


@with_frame_space
def _serve(
    rank: int,
    meeting: Meeting,
    pipe: Connection,
    environment: dict[str, str],
    at_start: Callable[[], None] | None,
) -> None:
    faulthandler.enable()  # where a process ends by a signal its stderr says in which call
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    use_bits_of_environment()
    if at_start is not None:
        at_start()
    _join(rank, meeting)
    collect_seldom()
    pipe.send((True, None))
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send((True, function(rank, *args)))
        except Exception:  # noqa: BLE001  (whatever it was, the caller is told)
            with contextlib.suppress(BrokenPipeError):  # the owner has ended: so does `recv`
                pipe.send((False, traceback.format_exc()))
    if dist.is_initialized():  # a function may have ended it
        dist.destroy_process_group()


def _join(rank: int, meeting: Meeting) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(meeting.num_ranks), LOCAL_RANK=str(rank))
    if meeting.device == "cuda":
        be_deterministic()
    timeout_s = meeting.timeout_s
    timeout = datetime.timedelta(seconds=timeout_s)
    join(
        dist.TCPStore(HOST, meeting.port, is_master=False, timeout=timeout),
        rank,
        meeting.num_ranks,
        device=meeting.device,
        local_rank=rank,
        timeout_s=timeout_s,
        backend=meeting.backend,
    )


def _regroup(rank: int, meeting: Meeting) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    forget_groups()
    begin_again()
    _join(rank, meeting)


def collect_seldom() -> None:
    """Let Python's garbage collector look at new objects alone, and at them less often.

    Torch's modules are 400,000 objects, which it would go through again and again while graphs are
    traced: 6 % of the CPU time of a program of one or two layers.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 10)


def begin_again() -> None:
    """Forget all compiled code, and have the garbage collector pass over what is left.

    For a rank between two calls: objects of a call that runs would never be collected.
    """
    forget_compiled()
    gc.freeze()


def forget_compiled() -> None:
    """Let go of all compiled code, and of the process groups that it holds.

    `torch._dynamo.reset` leaves compiled code among the globals of the module that called it.
    A gloo group that is held keeps three threads, each of which wakes 100 times a second.
    It forgets the callbacks of the backend too, which are as after an import again.
    """
    torch._dynamo.reset()
    install_eager_fallback()
    modules = [m for m in [*sys.modules.values()] if isinstance(m, ModuleType)]
    for module in modules:
        for name in [n for n in vars(module) if n.startswith("__compiled_fn_")]:
            delattr(module, name)
    gc.collect()


SAMPLE_S: Final = 0.5
BUSY: Final = 0.1
"""Share of one core between two samples; the polling threads of a gloo group use less."""


class Idleness:
    """Watches processes from now on."""

    def __init__(self, pids: Sequence[int]) -> None:
        """Watch the processes `pids` together."""
        self._pids = pids
        self._sampled = self._busy_at = time.monotonic()
        self._used_s = self._cpu_s()

    def seconds(self) -> float:
        """Return for how long all of them together have used less than a tenth of a core."""
        now = time.monotonic()
        if now - self._sampled >= SAMPLE_S:
            used_s = self._cpu_s()
            if used_s - self._used_s >= BUSY * (now - self._sampled):
                self._busy_at = now
            self._sampled, self._used_s = now, used_s
        return now - self._busy_at

    def _cpu_s(self) -> float:
        return sum(map(_cpu_s, self._pids))


def _cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process and of the children that it has waited for."""
    try:
        _, _, fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")
    except OSError:  # it has ended, or this is not Linux
        return 0.0
    ticks = sum(map(int, fields.split()[11:15]))  # utime, stime, cutime, cstime: proc(5)
    return ticks / os.sysconf("SC_CLK_TCK")
