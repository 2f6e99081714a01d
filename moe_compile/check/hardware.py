"""Section `hardware`: the rates of this machine's device and links, as a profile to use.

Contract
    Rates of the device are those of `megamoe calibrate`, of the first rank's. Links are measured
    between the ranks of the check, over its own process groups; one rank has none.
    The profile lies beside the results. Nothing else of the check uses it.
    What was not measured stays as the profile started from has it. Fits are left out. What is
    written loads.
    Within a machine measured numbers are the node's link, among several machines the network's;
    the slowdowns of compute and collectives side by side go to the link that all ranks have.
"""

from __future__ import annotations

import importlib.util
import tomllib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

import pynvml
import torch

from moe_compile.check.links import check_links, link_of, node_ranks
from moe_compile.check.sections import Record, say
from moe_compile.check.team import Team
from moe_compile.config import MegaMoEConfig
from moe_compile.hardware.detect import NO_GPU, detected_profile
from moe_compile.hardware.links import CTAS, NETWORK, NODE, spread_of
from moe_compile.hardware.measure import measured_rates
from moe_compile.hardware.profile import load_profile, read_profile
from moe_compile.hardware.sourced_file import dump_sourced, put_number
from moe_compile.report.provenance import describe_machine

MESSAGE_BYTES: Final[Mapping[str, tuple[int, ...]]] = {
    "cuda": tuple(4**n * 2**10 for n in range(10)),  # 1 KB to 256 MB
    "cpu": tuple(4**n * 2**10 for n in range(7)),  # to 4 MB
}
REPEATS: Final = 7
"""Times that a collective is timed at each size."""
RATES: Final = "rates of the device"
PROFILE: Final = "profile"
FILE: Final = "measured.toml"
DIGITS: Final = 3


def check_hardware(team: Team, config: MegaMoEConfig) -> None:
    """Run the section; the profile starts from that of the job."""
    start = _start(team.device, config)
    team.run(RATES, partial(_rates, team, start), _judge_rates)
    if team.num_ranks > 1:
        check_links(team, MESSAGE_BYTES[team.device], REPEATS, node_ranks(team.num_ranks))
    elif team.record is not None:
        team.record.skip("links", "the job has one rank, so there is no link to measure")
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


def write_profile(
    out: Path,
    start: str,
    machine: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    *,
    beside: Mapping[str, float] | None = None,
    rates: Mapping[str, Any] | None = None,
) -> Path:
    """Write the profile into folder `out` and return its path.

    `rows` are of `links`, of all ranks that were measured together; `beside` has the `contention`
    and `overlap_slowdown` of the link that all ranks have, `rates` those of a device by their path
    in a profile. Raises LookupError where a collective was not measured.
    """
    sizes = sorted({row["ranks"] for row in rows})
    table = tomllib.loads(read_profile(start).path.read_text())
    table.pop("fit", None)
    table["name"] = Path(FILE).stem
    chip = machine["cpu"] if machine["gpu"].startswith("none") else machine["gpu"]
    origin = f"measured: {datetime.now(UTC).date()} on {chip}, torch {machine['torch']}"
    for path, value in (rates or {}).items():
        put_number(table, path, value, origin)
    for num_ranks in sizes:
        is_all = num_ranks == sizes[-1]
        name = NETWORK if is_all and len(sizes) > 1 else NODE
        numbers = link_of(rows, num_ranks)
        if name == NETWORK:  # the other bytes stay on a machine
            of_gathers = spread_of(num_ranks, sizes[0], is_gather=True).between
            numbers["gb_per_s"] *= spread_of(num_ranks, sizes[0], is_gather=False).between
            numbers["gather_gb_per_s"] *= of_gathers
        more = beside or {} if is_all else {}
        for path, value in _numbers(table, name, numbers, more).items():
            put_number(table, path, _short(value), f"{origin}, {num_ranks} ranks")
    for link in table.get("link", []) if beside else ():
        if "contention" in link:  # measured, in place of what follows from them
            link.pop(CTAS, None)
    file = out / FILE
    file.write_text(dump_sourced(table))
    load_profile(str(file))
    return file


def _numbers(
    table: Mapping[str, Any], name: str, numbers: Mapping[str, float], beside: Mapping[str, float]
) -> dict[str, float]:
    """Return what is measured of a link by its path in the profile."""
    found: dict[str, float] = {}
    places = [i for i, link in enumerate(table.get("link", [])) if link["name"] == name]
    if name == NETWORK or not places:  # the compiler's own link
        found |= {"link_gb_per_s": numbers["gb_per_s"], "link_latency_us": numbers["latency_us"]}
    for place in places:
        peak = table["link"][place]["gb_per_s"]["value"]
        found |= {
            f"link.{place}.exchange_share": min(numbers["gb_per_s"] / peak, 1.0),
            f"link.{place}.gather_share": min(numbers["gather_gb_per_s"] / peak, 1.0),
            f"link.{place}.latency_us": numbers["latency_us"],
            **{f"link.{place}.{key}": value for key, value in beside.items()},
        }
    return found


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def describe_gpu_machine(device: str) -> dict[str, Any]:
    """Return hardware and versions; nothing is allocated on the device."""
    found = describe_machine()
    found["triton"] = importlib.util.find_spec("triton") is not None
    found["cuda"] = torch.version.cuda
    return {**found, **(_gpu() if device == "cuda" else {"gpu": "none: smoke run"})}


def _gpu() -> dict[str, Any]:
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        found = {
            "gpu": pynvml.nvmlDeviceGetName(handle),
            "driver": pynvml.nvmlSystemGetDriverVersion(),
            "memory_mb": pynvml.nvmlDeviceGetMemoryInfo(handle).total // 2**20,
            "sm_clock_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
            "max_sm_clock_mhz": pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM),
            "power_limit_w": pynvml.nvmlDeviceGetPowerManagementLimit(handle) // 1000,
            "pcie": f"gen {pynvml.nvmlDeviceGetCurrPcieLinkGeneration(handle)}, "
            f"{pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle)} lanes, at rest",
        }
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return {"gpu": f"unknown: {error}"}
    return found
