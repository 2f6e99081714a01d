"""Section `hardware`: the rates of this machine's device and links, as a profile to use.

Contract
    Rates of the device are those of `megamoe calibrate`, of the first rank's. Links are measured
    between the ranks of the check, over its own process groups; one rank has none.
    The profile lies beside the results. Nothing else of the check uses it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from moe_compile.check.links import check_links, node_ranks
from moe_compile.check.machine import describe_gpu_machine
from moe_compile.check.measured_profile import write_profile
from moe_compile.check.sections import Record, say
from moe_compile.check.team import Team
from moe_compile.config import MegaMoEConfig
from moe_compile.hardware.detect import NO_GPU, detected_profile
from moe_compile.hardware.measure import measured_rates
from moe_compile.hardware.profile import read_profile

MESSAGE_BYTES: Final[Mapping[str, tuple[int, ...]]] = {
    "cuda": tuple(4**n * 2**10 for n in range(10)),  # 1 KB to 256 MB
    "cpu": tuple(4**n * 2**10 for n in range(7)),  # to 4 MB
}
REPEATS: Final = 7
"""Times that a collective is timed at each size."""
RATES: Final = "rates of the device"
PROFILE: Final = "profile"


def check_hardware(team: Team, config: MegaMoEConfig) -> None:
    """Run the section; the profile starts from that of the job."""
    start = _start(team.device, config)
    team.run(RATES, partial(_rates, team, start), _judge_rates)
    if team.num_ranks > 1:
        check_links(team, MESSAGE_BYTES[team.device], REPEATS, node_ranks(team.num_ranks))
    elif team.record is not None:
        team.record.skip("links", "one rank alone has no link")
    if team.record is not None:
        record = team.record
        record.attempt(PROFILE, lambda: _write(record, start, team.device))


def _start(device: str, config: MegaMoEConfig) -> str:
    if device == "cpu":
        return NO_GPU
    return detected_profile() if config.hardware == "detect" else config.hardware


def _rates(team: Team, start: str) -> dict[str, Any]:
    """Return the rates of the first rank's device; other ranks wait."""
    if not team.is_first:
        return {}
    table = tomllib.loads(read_profile(start).path.read_text())
    return measured_rates(team.device, table)


def _judge_rates(record: Record, found: list[dict[str, Any]]) -> None:
    """Record a row for each rate; one that is no positive number fails."""
    for path, value in found[0].items():
        numbers = [value] if isinstance(value, float) else [share for _, share in value]
        record.expect(
            all(number > 0.0 for number in numbers),
            path,
            f"a rate must be above 0, and it is {value}",
        )
        record.add_row({"rate": path, "value": value})
    say(f"hardware: {', '.join(f'{k} {v}' for k, v in found[0].items() if type(v) is float)}")


def _write(record: Record, start: str, device: str) -> None:
    rates = {row["rate"]: row["value"] for row in record.data["rows"] if "rate" in row}
    links = [row for row in record.data["rows"] if "collective" in row]
    folder = Path(record.path).parent
    path = write_profile(folder, start, describe_gpu_machine(device), links, rates=rates)
    record.put(profile=str(path), start=start)


def said_of_links(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the greatest rate of each collective in words, by the number of its ranks."""
    best: dict[tuple[str, int], float] = {}
    for row in rows:
        if "collective" in row:
            key = row["collective"], row["ranks"]
            best[key] = max(best.get(key, 0.0), row["gb_per_s"])
    return [f"{name} among {ranks} {rate:.3g} GB/s" for (name, ranks), rate in best.items()]
