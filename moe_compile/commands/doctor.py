"""`megamoe doctor`: what NVML says of this machine, its profile, and what it makes different."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from moe_compile.errors import InvalidConfig
from moe_compile.hardware.cluster import ClusterProfile, load_cluster
from moe_compile.hardware.detect import NO_GPU, profile_of_chip
from moe_compile.hardware.devices import Device, Machine, read_machine
from moe_compile.hardware.profile import load_profile
from moe_compile.simulator.advice import Choice, find_choices, find_findings
from moe_compile.simulator.cluster_tables import new_console


def add_doctor(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "doctor",
        help="say what this machine is and what that changes",
        description="Ask NVML, without changing anything, what this machine's GPUs are; name "
        "their profile, and say where they differ from it and what to choose then.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=lambda known: doctor(known, read_machine()))


def doctor(known: argparse.Namespace, machine: Machine) -> int:
    """Describe `machine`; return the exit status, 0 also without a GPU."""
    name = _profile_of(machine)
    cluster = _cluster(name)
    findings = find_findings(machine, cluster)
    choices = find_choices(machine, cluster) if cluster else ()
    if known.json:
        data = {
            "driver": machine.driver,
            "message": machine.message,
            "devices": [dataclasses.asdict(device) for device in machine.devices],
            "profile": name,
            "origins": dict(load_profile(name).origins),
            "findings": list(findings),
            "choices": [dataclasses.asdict(choice) for choice in choices],
        }
        print(json.dumps(data, indent=1))  # noqa: T201  (what was asked for)
        return 0
    console = new_console()
    if machine.devices:
        console.print(_devices(machine))
    _print_profile(name, console)
    for finding in findings:
        console.print(f"- {finding}")
    if machine.devices and not findings:
        console.print("- this machine is as its profile says.")
    if choices:
        console.print(_choices(choices))
    return 0


def _profile_of(machine: Machine) -> str:
    """Return the profile for the first GPU; the processor's where none can stand in."""
    if not machine.devices:
        return NO_GPU
    first = machine.devices[0]
    return profile_of_chip(first.name, first.generation).profile or NO_GPU


def _cluster(name: str) -> ClusterProfile | None:
    try:
        return load_cluster(name)
    except InvalidConfig:
        return None  # a profile for the compiler alone


def _devices(machine: Machine) -> Table:
    table = Table(title=f"GPUs, driver {machine.driver or 'unknown'}", box=SIMPLE_HEAD)
    for heading in ("GPU", "name", "GB", "NVLink", "fabric", "PCIe", "SM MHz", "clocks", "MIG"):
        table.add_column(heading)
    for device in machine.devices:
        table.add_row(str(device.index), device.name, *_figures(device))
    return table


def _figures(device: Device) -> Sequence[str]:
    links = "none"
    if device.nvlink_count:
        links = f"{device.nvlink_count} x {_or(device.nvlink_gb_per_s, '.1f')} GB/s"
    fabric = device.fabric_state or "?"
    if device.fabric_state == "completed":
        fabric = f"clique {device.fabric_clique}"
    return (
        _or(device.memory_gb, ".0f"),
        links,
        fabric,
        f"{_or(device.pcie_generation)} x{_or(device.pcie_lanes)}",
        f"{_or(device.sm_clock_mhz)} of {_or(device.max_sm_clock_mhz)}",
        ", ".join(device.clock_reasons) or "free",
        {True: "on", False: "off", None: "?"}[device.is_mig],
    )


def _or(value: float | None, style: str = "") -> str:
    return "?" if value is None else format(value, style)


def _print_profile(name: str, console: Console) -> None:
    profile = load_profile(name)
    console.print(f"Profile: {name}. The compiler counts with")
    for rate, origin in profile.origins.items():
        console.print(f"  {rate} {getattr(profile, rate):g} ({origin})")


def _choices(choices: Sequence[Choice]) -> Table:
    table = Table(
        title="One layer on 8 ranks: what would be chosen, predicted by formulas", box=SIMPLE_HEAD
    )
    for heading in ("model", "by the profile", "here", "fp8 rows gain", "here"):
        table.add_column(heading)
    for choice in choices:
        table.add_row(
            choice.model,
            choice.by_profile,
            choice.here + ("" if choice.here == choice.by_profile else " *"),
            f"{choice.fp8_wire_gain_by_profile:.2f}x",
            f"{choice.fp8_wire_gain_here:.2f}x",
        )
    return table
