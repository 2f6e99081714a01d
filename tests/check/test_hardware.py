"""The section that measures this machine's device and links, and the profile it writes."""

import time
from pathlib import Path

import pytest
import torch.distributed as dist

from moe_compile.check.hardware import check_hardware
from moe_compile.check.sections import Record, read_section
from moe_compile.check.summary import SAYS, TABLES
from moe_compile.check.team import Team
from moe_compile.config import MegaMoEConfig
from moe_compile.hardware import load_profile


def measure(rank, folder):
    """Run the section on two ranks, as if each had a machine of its own, or both one."""
    num_ranks = dist.get_world_size()
    store = dist.FileStore(str(Path(folder) / "store"), num_ranks)
    record = None
    if rank == 0:
        path, deadline = Path(folder) / "hardware.json", time.monotonic() + 600
        record = Record(path=path, deadline=deadline)
    team = Team(store, rank, num_ranks, record=record, makes_groups=False)
    check_hardware(team, MegaMoEConfig())
    return None if record is None else record.data["failures"]


def test_the_profile_has_the_rates_and_the_link_that_were_measured(two_ranks, tmp_path):
    assert two_ranks.run(measure, str(tmp_path))[0] == []
    section = read_section(tmp_path, "hardware")
    profile = load_profile(section["profile"])
    rates = {row["rate"]: row["value"] for row in section["rows"] if "rate" in row}
    assert set(rates) == {"matmul_tflops", "memory_gb_per_s", "op_overhead_us"}
    assert all(getattr(profile, name) == value for name, value in rates.items())
    exchanges = [r for r in section["rows"] if r.get("collective") == "all-to-all"]
    assert profile.link_latency_us == pytest.approx(exchanges[0]["us"], rel=0.01)
    assert profile.link_gb_per_s == pytest.approx(exchanges[-1]["gb_per_s"], rel=0.01)
    origin = profile.origins["link_gb_per_s"]
    assert origin.startswith("measured: ") and origin.endswith("2 ranks")
    assert f'megamoe.hardware = "{section["profile"]}"' in SAYS["hardware"](section)
    assert TABLES["hardware"](section).row_count == len(section["rows"])


def test_one_rank_has_no_link_and_its_profile_keeps_the_one_it_started_from(tmp_path):
    record = Record(path=tmp_path / "hardware.json", deadline=time.monotonic() + 600)
    team = Team(dist.HashStore(), 0, 1, record=record, makes_groups=False)
    check_hardware(team, MegaMoEConfig())
    profile, start = load_profile(record.data["profile"]), load_profile("cpu")
    assert profile.link_gb_per_s == start.link_gb_per_s
    assert record.data["skipped"] == [
        {"what": "links", "why": "the job has one rank, so there is no link to measure"}
    ]
    assert record.data["failures"] == [] and record.data["rows"]
