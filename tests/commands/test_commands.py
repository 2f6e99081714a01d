"""`megamoe simulate` and `megamoe doctor` print what they compute, and say what is wrong."""

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys

import pytest

from moe_compile.cli import main
from moe_compile.commands.doctor import doctor
from moe_compile.hardware.devices import Machine, read_machine
from moe_compile.simulator.checks import check_table_3
from tests.hardware.test_devices import Library


def run(capsys, *arguments):
    status = main(list(arguments))
    said = capsys.readouterr()
    return status, said.out, said.err


def test_steps_of_a_model_on_a_cluster_as_json(capsys):
    status, out, _ = run(
        capsys, "simulate", "--model", "352b", "--cluster", "h800", "--gpus", "240,1440", "--json"
    )
    data = json.loads(out)
    assert status == 0
    rows = {(row["gpus"], row["schedule"]): row for row in data["rows"]}
    slow, fast = rows[1440, "megatron-like"], rows[1440, "tiles"]
    assert slow["seconds"] / fast["seconds"] == pytest.approx(1.88, rel=0.05)
    assert fast["mfu_percent"] == pytest.approx(27.89, rel=0.05)
    assert rows[240, "ideal"]["exposed_percent"] == pytest.approx(0.0, abs=1e-6)


def test_products_in_fp8_are_predicted_with_the_origin_of_their_rate(capsys):
    asked = ("simulate", "--model", "deepseek-v3", "--cluster", "h100", "--wire", "fp8")
    asked += ("--schedule", "exact: 2 chunks", "--products")
    us, said = {}, {}
    for products in ("bf16", "fp8", "fp8-free", "fp8-all"):
        data = json.loads(run(capsys, *asked, products, "--json")[1])
        assert data["products"] == products
        us[products], said[products] = data["rows"][0]["layer_ms"], data["eight_bit_rate"]
    assert us["bf16"] > us["fp8"] > us["fp8-free"] > us["fp8-all"]
    assert said["bf16"] is None
    assert said["fp8"]["tflops"] == pytest.approx(1978.9 * 0.6)
    assert said["fp8"]["origins"]["fp8_tflops"].startswith("datasheet: NVIDIA H100")
    _, out, _ = run(capsys, *asked, "fp8")
    text = " ".join(out.split())
    assert "1187 TFLOP/s in fp8, 643 in bf16" in text
    assert "datasheet: NVIDIA H100" in text and "quantising is counted" in text
    assert "TFLOP/s in fp8" not in run(capsys, *asked, "bf16")[1]


def test_the_papers_tables_with_errors_as_json(capsys):
    _, out, _ = run(capsys, "simulate", "--table", "megascale", "--json")
    data = json.loads(out)
    rows = data["rows"]
    for row in rows:
        error = 100 * (row["predicted"] / row["published"] - 1)
        assert row["error_percent"] == pytest.approx(error)
    held_out = [abs(row["error_percent"]) for row in rows if not row["fitted"]]
    assert data["heldout_mape_percent"] == pytest.approx(sum(held_out) / len(held_out))
    assert data["heldout_mape_percent"] == pytest.approx(check_table_3().heldout_mape_percent)
    assert {check["heldout_mape_percent"] is None for check in data["checks"]} == {True, False}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--gpus", "480"],
            ("megatron-like", "2 chunks of experts *", "of bound %", "h800", "76  "),
        ),
        (["--gpus", "480"], ("inter-op *", "speed of 'megatron-like'", "tiles  ")),
        (["--table", "megascale"], ("held out", "fitted", "Eos", "DeepSeek-V3", "2.5 %")),
        (
            ["--table", "waterfall"],
            (
                "+ EP for TP of experts",
                "schedule_exchanges",
                "megamoe and its recipe have",
                "1.87x",
            ),
        ),
        (["--table", "bounds", "--cluster", "h200"], ("deepseek-moe-16b", "two-batches")),
        (["--table", "parts", "--cluster", "h200"], ("qwen3-235b", "4 parts", "limit")),
        (
            ["--model", "deepseek-v3", "--cluster", "h100"],
            (
                "2048",
                "flat: sequential  ",
                "exact: 2 slices *",
                "2 parts 2 chunks *",
                "MB far",
                "2 chunks of experts  ",
                "Every row needs more memory than a GPU has",
                "no fit",
            ),
        ),
    ],
)
def test_tables_for_a_person_have_what_they_are_asked_for(capsys, arguments, words):
    status, out, _ = run(capsys, "simulate", *arguments)
    assert status == 0
    assert [word for word in words if word not in out] == []


def test_a_timeline_as_a_trace_has_every_task_once(capsys, tmp_path):
    path = tmp_path / "trace.json"
    _, out, _ = run(
        capsys, "simulate", "--gpus", "480", "--schedule", "inter-op", "--timeline", str(path)
    )
    assert "one layer under inter-op (megamoe)." in " ".join(out.split())
    events = json.loads(path.read_text())["traceEvents"]
    tasks = [event for event in events if event["ph"] == "X"]
    kinds = {"forward", "backward", "weight gradients", "communication"}
    assert {task["cat"] for task in tasks} == kinds
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {"inter-op (megamoe) (predicted)", "compute", "communication"}
    assert {"attention", "experts 1: in", "experts 1 dW", "qkv': in"} - {
        task["name"] for task in tasks
    } == set()
    for thread in (0, 1):
        ends = sorted((t["ts"], t["ts"] + t["dur"]) for t in tasks if t["tid"] == thread)
        assert all(a[1] <= b[0] + 1e-6 for a, b in itertools.pairwise(ends))


def test_a_timeline_has_both_hops_each_on_its_link(capsys, tmp_path):
    path = tmp_path / "trace.json"
    _, out, _ = run(capsys, "simulate", "--model", "deepseek-v3", "--timeline", str(path))
    assert "flat: sequential, flat: 2 chunks (megamoe), exact: 2 chunks (megamoe)" in " ".join(
        out.split()
    )
    events = json.loads(path.read_text())["traceEvents"]
    processes = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"
    }
    streams = {"compute", "communication", "inside the node"}
    for name, pid in processes.items():
        in_hops = name.startswith(("exact", "rounded"))
        assert {s for (p, _), s in threads.items() if p == pid} == (
            streams if in_hops else streams - {"inside the node"}
        )
    pid = processes["rounded: 2 chunks (megamoe) (predicted)"]
    stream_of = {
        e["name"]: threads[pid, e["tid"]] for e in events if e["ph"] == "X" and e["pid"] == pid
    }
    for exchange in ("dispatch", "combine", "combine'", "dispatch'"):
        assert stream_of[f"{exchange}: hop 1"] == "communication"
        for chunk in range(2):
            assert stream_of[f"{exchange}: hop 2 {chunk}"] == "inside the node"


def test_a_timeline_as_a_picture(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "timeline.png"
    _, out, _ = run(capsys, "simulate", "--gpus", "480", "--timeline", str(path))
    said = " ".join(out.split())
    assert f"{path}: one layer under sequential, 2 chunks of experts (megamoe)" in said
    assert "Each timeline has two rows: compute" in said
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "352"], "no model '352'. Did you mean '352b'?"),
        (["--cluster", "h80"], "Did you mean 'h800'?"),
        (["--cluster", "cpu"], "name the profile of a GPU"),
        (["--fit", "bytedanc"], "Did you mean 'bytedance'?"),
        (["--gpus", "100"], "write a multiple of 120"),
        (["--schedule", "inter"], "Did you mean 'inter-op'?"),
        (["--timeline", "x.svg"], "ends in .png or .json"),
        (["--timeline", "/proc/x.json"], "no file can be written in /proc"),
        (["--table", "bounds", "--timeline", "x.png"], "leave out --timeline or --table"),
    ],
)
def test_what_is_wrong_is_said(capsys, arguments, message):
    status, _, err = run(capsys, "simulate", *arguments)
    assert status == 2
    assert message in err


def test_a_reader_that_has_gone_ends_it_silently():
    """It was a traceback."""
    code = "import sys; from moe_compile.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "simulate", "--json"]
    read, write = os.pipe()
    os.close(read)
    run = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=300)
    os.close(write)
    assert (run.returncode, run.stderr) == (128 + signal.SIGPIPE, b"")


def test_an_unknown_flag_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["simulate", "--gpu", "8"])
    said = capsys.readouterr().err
    assert "has no argument '--gpu'" in said and "--gpus GPUS" in said


def test_the_doctor_of_a_machine_without_nvml_says_so_and_succeeds(capsys):
    machine = Machine(devices=(), driver="", message="NVML is not available: not found")
    assert doctor(argparse.Namespace(json=False), machine) == 0
    out = capsys.readouterr().out
    assert "NVML is not available" in out and "Profile: cpu" in out


def test_the_doctor_names_profile_and_choices(capsys):
    machine = read_machine(Library("NVIDIA H800", 8, 4))
    assert doctor(argparse.Namespace(json=True), machine) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["profile"] == "h800"
    assert len(data["choices"]) == 6
    assert "106 GB/s" in data["findings"][0]
    assert doctor(argparse.Namespace(json=False), machine) == 0
    out = capsys.readouterr().out
    assert "8 x" not in out and "4 x 26.6 GB/s" in out and "clique 7" in out


def test_the_command_runs_on_this_machine(capsys):
    assert run(capsys, "doctor")[0] == 0
