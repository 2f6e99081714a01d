"""`megamoe doctor`: this machine by NVML, its profile, and the choices in which they differ.

A machine that is not as its profile says may have other best choices. A choice is the fastest of
the schedules a compiler can make, for one layer of each model of MegaScale-MoE's table 2: whole
operators or chunks, with and without an fp8 wire.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from moe_compile.errors import InvalidConfig
from moe_compile.hardware.cluster import ClusterProfile, load_cluster
from moe_compile.hardware.detect import NO_GPU, profile_of_chip
from moe_compile.hardware.devices import Device, Machine, read_machine
from moe_compile.hardware.profile import HardwareProfile, load_profile
from moe_compile.simulator import setups
from moe_compile.simulator.cluster_tables import new_console
from moe_compile.simulator.layer_tasks import time_layer
from moe_compile.simulator.method import Method, Overlap
from moe_compile.simulator.models import TABLE_2, ModelShape
from moe_compile.simulator.step import Setting


def add_doctor(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "doctor",
        help="say which GPUs this machine has, and which options to choose for them",
        description="Ask NVML which GPUs this machine has. Name the hardware profile that is used "
        "for them, say how the GPUs differ from this profile, and which options to choose then. "
        "Nothing on the machine is changed.",
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
            "origins": {number: origin for number, _, origin in _numbers(load_profile(name))},
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
        console.print("- this machine's GPUs match the profile.")
    if choices:
        console.print(_choices(choices))
    return 0


def _profile_of(machine: Machine) -> str:
    """Return the profile for the first GPU; the processor's where no GPU profile fits."""
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
    console.print(f"Profile: {name}. The compiler uses these numbers:")
    for name, value, origin in _numbers(profile):
        console.print(f"  {name} {value:g} ({origin})")


def _numbers(profile: HardwareProfile) -> Iterator[tuple[str, float, str]]:
    """Return the rates of a profile, then those of its links, each with its origin."""
    named = (("", profile), ("node.", profile.node), ("network.", profile.network))
    for label, table in named:
        for number, origin in table.origins.items() if table is not None else ():
            yield f"{label}{number}", getattr(table, number), origin


def _choices(choices: Sequence[ScheduleComparison]) -> Table:
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


NEAR: Final = 0.10
"""Share by which a rate may differ from the profile's before it is reported: NVLink counts
26.6 GB/s per link where data sheets say 25."""
WORTH: Final = 0.02
"""Gain below which the simpler of two schedules is chosen."""
NVLINK_ADVICE: Final = "write a profile whose link nvlink has that rate"


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleComparison:
    """The schedules for one model by the profile and by this machine's links."""

    model: str
    by_profile: str
    here: str
    fp8_wire_gain_by_profile: float
    """Time with a bf16 wire over time with fp8, each under its best schedule."""
    fp8_wire_gain_here: float


def find_findings(machine: Machine, profile: ClusterProfile | None) -> tuple[str, ...]:
    """Return a sentence for each way this machine is not as its profile says.

    `profile` is None where the machine's profile describes no cluster.
    """
    if not machine.devices:
        return (
            f"{machine.message}: profile cpu is used, training runs on the CPU, and predicted "
            "times are not those of a GPU.",
        )
    found = []
    names = sorted({device.name for device in machine.devices})
    if len(names) > 1:
        found.append(
            f"this machine has different GPUs ({', '.join(names)}): give all ranks the same "
            "profile in megamoe.hardware."
        )
    if warning := profile_of_chip(machine.devices[0].name, machine.devices[0].generation).warning:
        found.append(f"{warning}.")
    for device in machine.devices:
        found.extend(f"GPU {device.index}: {said}" for said in _of_device(device))
    if profile is not None:
        found.extend(_of_links(machine, profile))
    return tuple(found)


def find_choices(machine: Machine, profile: ClusterProfile) -> tuple[ScheduleComparison, ...]:
    """Return for each model the best schedules by the profile and by this machine's links.

    Empty where there is nothing to choose: one GPU, or links as the profile has them.
    """
    rate = link_gb_per_s(machine)
    if not rate or _is_near(rate, profile.nvlink.gb_per_s):
        return ()
    here = replace(profile, nvlink=replace(profile.nvlink, gb_per_s=rate))
    return tuple(_choice(model, profile, here) for model in TABLE_2)


def link_gb_per_s(machine: Machine) -> float:
    """Return the rate between GPUs of this machine: NVLink, else PCIe; 0 for a single GPU."""
    if len(machine.devices) < 2:
        return 0.0
    slowest = min(device.nvlink_total_gb_per_s for device in machine.devices)
    return slowest or min(device.pcie_gb_per_s for device in machine.devices)


def best_schedule(model: ModelShape, profile: ClusterProfile, wire_bytes: float) -> Method:
    """Return the fastest method a compiler can make of a layer; the simplest of near ones."""
    methods = _compiler_methods(model, wire_bytes)
    times = [_layer_us(model, profile, method) for method in methods]
    limit = min(times) * (1.0 + WORTH)
    return next(m for m, us in zip(methods, times, strict=True) if us <= limit)


def _of_device(device: Device) -> list[str]:
    said = []
    if device.is_mig:
        said.append(
            "MIG is on: a MIG slice reaches only a part of the profile's rates, and has no NVLink."
        )
    if device.throttling:
        said.append(
            f"its clocks are held down ({', '.join(device.throttling)}), so steps are slower "
            "than predicted."
        )
    if device.fabric_state in ("not started", "in progress"):
        said.append(f"its NVLink fabric is {device.fabric_state}: NCCL will fail or avoid NVLink.")
    return said


def _of_links(machine: Machine, profile: ClusterProfile) -> list[str]:
    if len(machine.devices) < 2:
        return ["one GPU: there is no exchange to hide on this machine."]
    said, rate = [], link_gb_per_s(machine)
    counts = {device.nvlink_count for device in machine.devices}
    if len(counts) > 1:
        said.append(
            f"the GPUs have different numbers of NVLinks, {sorted(counts)}: the slowest GPU holds "
            "up every exchange."
        )
    cliques = {device.fabric_clique for device in machine.devices}
    if len(cliques) > 1:
        said.append(
            f"the GPUs are in {len(cliques)} fabric cliques: exchanges between cliques do not use "
            "NVLink."
        )
    if not rate:
        said.append(
            "the rate between GPUs is unknown: NVML reports it neither for NVLink nor for PCIe."
        )
    elif not _is_near(rate, profile.nvlink.gb_per_s):
        way = "NVLink" if max(counts) else "PCIe (there is no NVLink)"
        said.append(
            f"{way} has {rate:.0f} GB/s, but profile {profile.name} has "
            f"{profile.nvlink.gb_per_s:.0f}: {NVLINK_ADVICE}."
        )
    return said


def _choice(model: ModelShape, profile: ClusterProfile, here: ClusterProfile) -> ScheduleComparison:
    return ScheduleComparison(
        model=model.name,
        by_profile=_said(best_schedule(model, profile, 2.0)),
        here=_said(best_schedule(model, here, 2.0)),
        fp8_wire_gain_by_profile=_wire_gain(model, profile),
        fp8_wire_gain_here=_wire_gain(model, here),
    )


def _wire_gain(model: ModelShape, profile: ClusterProfile) -> float:
    bf16, fp8 = (
        _layer_us(model, profile, best_schedule(model, profile, nbytes)) for nbytes in (2.0, 1.0)
    )
    return bf16 / fp8


def _said(method: Method) -> str:
    if method.overlap is not Overlap.CHUNKS:
        return f"{method.overlap.value}, one chunk"
    return f"{method.num_chunks} chunks by {'tokens' if method.chunks_tokens else 'experts'}"


def _compiler_methods(model: ModelShape, wire_bytes: float) -> list[Method]:
    """Return methods from simple to complicated."""
    plain = Method(overlap=Overlap.INTER_OP, dispatch_bytes=wire_bytes, combine_bytes=wire_bytes)
    local = model.num_experts // plain.expert_ranks
    chunks = [
        replace(plain, overlap=Overlap.CHUNKS, num_chunks=n, chunks_tokens=by_tokens)
        for n in (2, 4, 8)
        for by_tokens in (False, True)
        if by_tokens or n <= local
    ]
    return [plain, *chunks]


def _layer_us(model: ModelShape, profile: ClusterProfile, method: Method) -> float:
    fit, job = profile.fit("none"), setups.MEGASCALE_JOB
    setting = Setting(model=model, profile=profile, fit=fit, method=method, job=job)
    return time_layer(setting.costs).total_us


def _is_near(rate: float, other: float) -> bool:
    return abs(rate / other - 1.0) <= NEAR
