"""`megamoe check` on two ranks: a correct job, a rewrite that is wrong, and nothing to check."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from moe_compile.cli import main
from moe_compile.commands.check import SECTIONS
from tests.check.wrong_rows import NAME, install

ROOT = Path(__file__).parents[2]
SMALL = (
    "--layers=2", "--steps=2", "--training.seq_len=32", "--training.local_batch_size=2",
)  # fmt: skip
OF_OTHERS = {"--nnodes", "--nproc-per-node", "--megamoe", "--json"}
"""Flags in docs/check.md that are torchrun's, and torchtitan's."""
NODE_BY_NODE = ("--megamoe.codegen=fx",)


def check(folder, *words, path=(), timeout=900, name="check"):
    """Run the command in `folder` and return its status and what it printed."""
    command = [sys.executable, "-m", "moe_compile.cli", name, "deepseek_v3_debug_cpu", *words]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *map(str, path)])}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout,
        check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def forms(folder, section="same"):
    found = json.loads((folder / "outputs/check" / f"{section}.json").read_text())
    return {row["form"]: row for row in found["rows"]}


@pytest.mark.slow
def test_a_correct_job_has_the_bits_of_the_program_as_written_and_is_not_run_again(tmp_path):
    status, said = check(tmp_path, *SMALL, *NODE_BY_NODE)
    assert status == 0, said
    rows = forms(tmp_path)
    assert [row["found"] for row in rows.values()] == ["the same bit for bit"] * 3
    assert rows["megamoe, node by node"]["regions"] == ["2 regions chunked"]
    assert "rewrite_regions" in rows["megamoe, node by node"]["passes"]
    assert "only the model's first 2 layers ran" in said and "faster and where are left out" in said
    status, said = check(tmp_path, *SMALL, *NODE_BY_NODE)
    assert status == 0 and "section same passed in an earlier run" in said


@pytest.mark.slow
def test_a_wrong_value_is_found_with_the_first_tensor_that_has_it(tmp_path):
    install(tmp_path)
    words = (*SMALL, *NODE_BY_NODE, f"--megamoe.transport={NAME}")
    status, said = check(tmp_path, *words, path=[tmp_path])
    assert status == 1, said
    first = forms(tmp_path)["megamoe, node by node"]["first_difference"]
    assert first["name"] == "step 1: output of block 2"
    assert first["found"] != first["written"] > 0.0
    assert "same: DOES NOT HOLD" in said
    assert "same: culprit: pass route_exchanges" in said
    assert "wrong from route_exchanges on" in said


@pytest.mark.slow
def test_the_pass_and_the_block_by_which_values_are_wrong_are_found(tmp_path):
    install(tmp_path)
    words = (*SMALL, *NODE_BY_NODE, f"--megamoe.transport={NAME}")
    status, said = check(tmp_path, *words, path=[tmp_path], name="bisect")
    assert status == 0, said
    found = json.loads((tmp_path / "outputs/bisect/summary.json").read_text())["culprit"]
    assert (found["names"], found["right_up_to"]) == (["route_exchanges"], "rewrite_regions")
    assert (found["block"], found["is_alone"]) == (2, True)
    (region,) = found["regions"]["route_exchanges"]
    left_out = f"--megamoe.disable_passes 'route_exchanges:{region}'"
    assert region.endswith("region 0") and f"to run without the culprit: {left_out}" in said


@pytest.mark.slow
def test_a_job_in_which_nothing_is_rewritten_shows_nothing(tmp_path):
    """The first layer of this model has no experts."""
    status, said = check(tmp_path, *SMALL[1:], *NODE_BY_NODE, "--layers=1")
    assert status == 1 and "megamoe rewrote nothing, so equal results show nothing" in said


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--megamoe.chunk=3"], "Did you mean 'chunks'"),
        (["--compile.backend=inductor"], "this job does not use megamoe"),
        (["--sections=speed"], "there is no section 'speed'; choose from same, faster"),
        (["--sections=faster", "--megamoe.codegen=fx"], "no code is generated"),
        (["--steps=0"], "write a whole number of at least 1"),
    ],
)
def test_what_is_wrong_is_said_before_a_rank_starts(tmp_path, words, wanted):
    status, said = check(tmp_path, *words)
    assert status == 2 and wanted in said
    assert not (tmp_path / "outputs").exists()


def test_the_page_names_flags_and_sections_that_there_are(capsys):
    page = (ROOT / "docs/check.md").read_text()
    for command in ("check", "bisect"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
    said = capsys.readouterr().out
    flags = {*re.findall(r"--[a-z][a-z-]*(?![\w.])", page)} - OF_OTHERS
    assert {"--steps", "--rounds", "--layers", "--write", "--again", "--form-s", "--slow"} <= flags
    assert not [flag for flag in flags if flag not in said]
    assert all(f"**{name}" in page for name in SECTIONS)


@pytest.mark.slow
def test_generated_code_is_no_farther_from_float64_than_inductors_and_is_timed(tmp_path):
    status, said = check(tmp_path, *SMALL, "--rounds=3", timeout=1700)
    assert status == 0, said
    rows = forms(tmp_path)
    assert rows["megamoe"]["reference"] == "as written, in float64"
    assert 0.0 < rows["megamoe"]["distance"] < 0.05 and rows["megamoe"]["share_of_limit"] <= 1.0
    timed = forms(tmp_path, "faster")
    assert {"Inductor", "Inductor, reordered", "megamoe", "megamoe without chunks"} <= {*timed}
    assert all(row["ratio"]["num_pairs"] == 3 for row in timed.values())
    assert "they do not predict those of a cluster" in said
    where = json.loads((tmp_path / "outputs/check/where.json").read_text())
    assert where["warnings"] == [] and len(where["rows"]) == 9  # counts, and two chunks each way
    assert all(row["predicted"]["total_us"] > 0 for row in where["rows"])
    assert all(row["measured"]["total_us"] > 0 for row in where["rows"])
    assert {*where["links"]} == {"link ep"} and where["pieces"] > 0
    assert "collectives, each run once" in said and "gloo runs collectives on threads" in said


@pytest.mark.slow
def test_a_job_that_cannot_start_says_why_and_is_not_tried_again(tmp_path):
    """Its ranks were once started anew until the time was over."""
    status, said = check(tmp_path, *SMALL[1:], *NODE_BY_NODE, "--layers=9")
    assert status == 1 and "--layers is 9, and the model has 3 layers; write 1 to 3" in said
    assert (
        "new ranks skip the item that failed" not in said
        and "same: OPEN: the job's trainer" in said
    )
