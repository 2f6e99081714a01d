"""Whoever ends `megamoe train` ends every process it started."""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")

from tests.integration.titan_jobs import OURS, SAVES, SMALL, STEP, flags_of

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "torchtitan_integration/configs/deepseek_v3_debug_cpu.toml"


def processes_with(mark):
    """Return the processes whose environment holds `mark`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:  # it has just ended, or is not ours
            continue
    return found


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks processes up in /proc")
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, marks=pytest.mark.exhaustive),
        pytest.param(signal.SIGKILL, marks=pytest.mark.exhaustive),
    ],
)
def test_no_process_outlives_the_command(tmp_path, number, request):
    mark = f"INTERRUPT_TEST={uuid.uuid4()}"
    name, _, value = mark.partition("=")
    output = tmp_path / "output"
    flags = ["--nproc=1", "--training.steps=100000", "--model.flavor=tiny", "--compile.no-enable"]
    flags += [f"--parallelism.{of}_degree=1" for of in ("data_parallel_shard", "expert_parallel")]
    flags += ["--experimental.custom_import=tests.integration.tiny_flavors"]
    flags += [f"--job.dump_folder={tmp_path}"]
    with output.open("w") as written:
        command = subprocess.Popen(
            [sys.executable, "-m", "moe_compile.cli", "train", str(CONFIG), *flags],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), name: value},
            stdout=written, stderr=subprocess.STDOUT,
        )  # fmt: skip
        request.addfinalizer(lambda: [os.kill(p, signal.SIGKILL) for p in processes_with(mark)])
        _wait_until(lambda: "step:  2" in output.read_text() or command.poll() is not None, 600)
        assert command.poll() is None, output.read_text()[-4000:]
        assert len(processes_with(mark)) >= 3  # the command, torchrun, its rank
        command.send_signal(number)
        command.send_signal(number)  # impatience must not cut the clean end short
        assert command.wait(300) == (-number if number == signal.SIGKILL else 128 + number)
    _wait_until(lambda: not processes_with(mark), 300)


BELOW_TORCHRUN = """
import subprocess, sys
command = [sys.executable, '-m', 'torchtitan_integration.rank', 'sleeper']
subprocess.run(command, start_new_session=True)
"""
COPIES_OF_A_DRY_RUN = """
import os, time
from torchtitan_integration.dry_run.layers import beside
os.sched_getaffinity = lambda _: {0, 1}
def sleep():
    os.write(1, b'up\\n')  # whole: two write at once
    time.sleep(600)
with beside([sleep, sleep]) as results:
    results()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl is Linux's")
@pytest.mark.parametrize(
    "outer",
    [
        pytest.param(BELOW_TORCHRUN, id="rank"),
        pytest.param(COPIES_OF_A_DRY_RUN, id="copies", marks=pytest.mark.slow),
    ],
)
def test_a_process_ends_though_all_above_it_are_killed(tmp_path, outer):
    """A rank too, to which torchrun gives a session of its own."""
    inner = "import time; print('up', flush=True); time.sleep(600)"
    (tmp_path / "sleeper.py").write_text(inner)
    name, value = "ORPHAN_TEST", str(uuid.uuid4())
    paths = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    parent = subprocess.Popen(
        [sys.executable, "-c", outer],
        env={**os.environ, **paths, name: value}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert parent.stdout.readline() == "up\n"
        assert len(processes_with(f"{name}={value}")) >= 2
        parent.kill()
        parent.wait()
        _wait_until(lambda: not processes_with(f"{name}={value}"), 30)
    finally:
        for process in processes_with(f"{name}={value}"):
            os.kill(process, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks processes up in /proc")
def test_the_same_command_goes_on_after_a_rank_was_killed(tmp_path, request):
    """From its newest whole checkpoint, to the losses of the job that nothing interrupted."""
    mark = f"KILL_TEST={uuid.uuid4()}"
    request.addfinalizer(lambda: [os.kill(p, signal.SIGKILL) for p in processes_with(mark)])
    settings = {**SMALL, **OURS, **SAVES, "training.steps": 12}

    def start(folder):
        flags = flags_of({**settings, "job.dump_folder": tmp_path / folder})
        name, _, value = mark.partition("=")
        return subprocess.Popen(
            [sys.executable, "-m", "moe_compile.cli", "train", "--nproc=2", str(CONFIG), *flags],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), name: value},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def end(job):
        said, _ = job.communicate(timeout=900)
        return job.returncode, {int(step): (loss, norm) for step, loss, norm in STEP.findall(said)}

    status, whole = end(start("whole"))
    assert status == 0 and sorted(whole) == list(range(1, 13))
    job = start("killed")
    _wait_until(lambda: (tmp_path / "killed/checkpoint/step-2/.metadata").is_file(), 900)
    os.kill(rank_of(mark, 1), signal.SIGKILL)
    assert end(job)[0] == 1
    status, rest = end(start("killed"))
    assert status == 0 and min(rest) > 2 and max(rest) == 12
    assert rest == {step: whole[step] for step in rest}


def rank_of(mark, number):
    """Return the process that is rank `number` of the job with `mark`."""
    found = {pid: Path(f"/proc/{pid}/environ").read_bytes() for pid in processes_with(mark)}
    (pid,) = (pid for pid, said in found.items() if f"\0RANK={number}\0".encode() in said)
    return pid


def _wait_until(is_true, seconds):
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.1)
