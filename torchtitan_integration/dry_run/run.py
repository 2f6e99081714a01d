"""The dry run: check a job, trace it, print its plan; `megamoe train --dry-run`.

Contract
    Every number is an estimate before the job ran; the text around a table names its kind.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from moe_compile.errors import InvalidConfig
from moe_compile.report.compilations import regions_not_found
from moe_compile.report.explain import lines_of_named_parts, names_without_effect
from moe_compile.report.page import json_of, write_whole
from moe_compile.report.process_report import report_of
from moe_compile.report.region_reports import RegionReport
from moe_compile.simulator.cluster_tables import new_console
from torchtitan_integration.dry_run.changes import (
    GIB,
    Change,
    DryJob,
    Helped,
    device_memory,
    memory_report,
    possible_changes,
    skew_line,
    try_changes,
    verdict,
)
from torchtitan_integration.dry_run.layers import DEFAULT_HARDWARE, Traced, Wanted
from torchtitan_integration.dry_run.stages import (
    MAY_ADD,
    PEAK,
    StageMemory,
    first_most_last,
    measure_stages,
    trace_stages,
)
from torchtitan_integration.dry_run.world import FakeRank
from torchtitan_integration.eight_bit_gathers import said_of_gathers
from torchtitan_integration.job_file import JobFile, uses_megamoe

MB: Final = 1e6


def print_layers(traced: Sequence[Traced], console: Console) -> None:
    """Print regions with their chunks, collectives, and predicted times of each kind of graph."""
    for layer in traced:
        console.print(_collectives(layer))
        if said := _over_links(layer):
            console.print(f"  sent over links: {said}")
        _print_passes(layer, console)
        for phase, measures in layer.measures.items():
            console.print(f"  {phase}: {_times(measures)}")
        if layer.unhidden_us and all("exposed_us" in m for m in layer.measures.values()):
            console.print(f"  exposed share: {_exposed_share(layer)}")
        if layer.choices:
            console.print(_choices(layer))
    left_out = regions_not_found([layer.compilation for layer in traced])
    for line in (*names_without_effect(_passes(traced)), *left_out):
        console.print(line, highlight=False)


def _print_passes(layer: Traced, console: Console) -> None:
    """Print what the passes made of the regions and parts of a graph."""
    for region in layer.compilation.regions:
        remarks = "".join(f"; {remark}" for remark in (*region.remarks, *region.to_do))
        console.print(f"  {region.where}: {_made_of(region)}{remarks}")
    left = (*layer.compilation.left_alone, *layer.compilation.dropped)
    rewritten = (f"rewrite {line}" for line in layer.compilation.rewrites)
    parts = lines_of_named_parts(_passes([layer]))
    for line in (*(f"left alone: {one}" for one in left), *rewritten, *parts):
        console.print(f"  {line}")


def _passes(traced: Sequence[Traced]) -> dict[str, Any]:
    """Return what passes did on the graphs, as a report has it."""
    compilations = [layer.compilation for layer in traced]
    return {"passes": [{"where": c.site, **d} for c in compilations for d in c.journal.as_data()]}


def _made_of(region: RegionReport) -> str:
    """Return the verdict on a region and the chunks it runs in, if there are several."""
    experts = f"{region.num_local_experts} local experts"
    if region.num_chunks > 1:
        return f"{region.verdict}, {region.num_chunks} chunks of {experts}"
    return f"{region.verdict}, {experts} in one piece"


def _collectives(layer: Traced) -> Table:
    table = Table(title=f"Collectives of one {layer.kind}, per rank", box=SIMPLE_HEAD)
    table.add_column("collective")
    table.add_column("mesh axis")
    for heading in ("forward", "MB sent", "backward", "MB sent"):
        table.add_column(heading, justify="right")
    counts: Counter[tuple[str, str, str]] = Counter()
    sent: Counter[tuple[str, str, str]] = Counter()
    for phase, launches in layer.launches.items():
        for launch in launches:
            counts[launch.operator, launch.axis, phase] += 1
            sent[launch.operator, launch.axis, phase] += launch.sent_bytes
    for operator, axis in dict.fromkeys(key[:2] for key in counts):
        cells = []
        for phase in ("forward", "backward"):
            key = (operator, axis, phase)
            cells += [str(counts[key]), f"{sent[key] / MB:.2f}"]
        table.add_row(operator, axis, *cells)
    if not counts:
        table.add_row("none", "", "0", "", "0", "")
    return table


def _over_links(layer: Traced) -> str:
    """Return a text of the bytes over either link, in groups with registered nodes."""
    phases = []
    for phase, launches in layer.launches.items():
        crossing = sum(launch.crossing_bytes for launch in launches) / MB
        inside = sum(launch.node_bytes for launch in launches) / MB
        if crossing or inside:
            phases.append(
                f"{phase} {crossing:.2f} MB from node to node, {inside:.2f} MB inside nodes"
            )
    return "; ".join(phases) + (", experts chosen evenly" if phases else "")


def _times(measures: dict[str, float]) -> str:
    if "exchange_us" not in measures:
        return "nothing to schedule"
    parts = ("compute_us", "exchange_us", "exposed_us_before", "exposed_us")
    compute, exchange, before, now = (measures.get(part, 0.0) / 1e3 for part in parts)
    return (
        f"predicted {compute:.2f} ms of compute, {exchange:.2f} ms of collectives, exposed "
        f"{before:.2f} -> {now:.2f} ms; peak of live bytes {measures['peak_bytes'] / MB:.0f} MB"
    )


def _exposed_share(layer: Traced) -> str:
    both = tuple(layer.unhidden_us)
    shares = (
        layer.exposed_share("forward"),
        layer.exposed_share(*both),
        layer.exposed_share(*both, measure="least_exposed_us"),
    )
    forward, all_, least = (f"{share:.0%}" for share in shares)
    whole = sum(layer.unhidden_us.values()) / 1e3
    return (
        f"{forward} forward, {all_} forward and backward; 100% are the {whole:.2f} ms that "
        "collectives take without chunking, in the model's own order and dtype; no order of "
        f"these graphs can expose less than {least}"
    )


def _choices(layer: Traced) -> Table:
    table = Table(
        title=f"Predicted for one {layer.kind}, forward and backward: what megamoe.numerics allows",
        box=SIMPLE_HEAD,
    )
    for heading in ("numerics", "runs as"):
        table.add_column(heading)
    for heading in ("block ms", "exposed ms", "share", "bound", "change"):
        table.add_column(heading, justify="right")
    asked, unhidden_us = layer.choices[0], sum(layer.unhidden_us.values())
    for one in layer.choices:
        gain = f"{one.step_us / asked.step_us - 1:+.1%}" if asked.step_us else ""
        ms = (f"{us / 1e3:.2f}" for us in (one.step_us, one.exposed_us))
        exposed = (one.exposed_us, one.least_us)
        shares = (f"{us / unhidden_us:.0%}" if unhidden_us else "" for us in exposed)
        table.add_row(one.name, one.what, *ms, *shares, "" if one is asked else gain)
    return table


def _report(traced: Sequence[Traced], hardware: str) -> dict[str, Any]:
    """Return the JSON report on the graphs of a job, and the choices of `--compare`."""
    found = report_of(
        [layer.compilation for layer in traced],
        [record for layer in traced for record in layer.records],
        hardware=hardware,
        as_written=[timeline for layer in traced for timeline in layer.as_written],
    )
    choices = [dataclasses.asdict(one) for layer in traced for one in layer.choices]
    return {**found, "choices": choices}


def _memory_table(shown: Sequence[StageMemory]) -> Table:
    table = Table(title="Memory of one GPU, GiB", box=SIMPLE_HEAD)
    table.add_column("")
    for stage in shown:
        table.add_column(stage.name, justify="right")

    def add(label: str, values: Sequence[int]) -> None:
        table.add_row(label, *(f"{round(value / GIB, 2) + 0.0:.2f}" for value in values))

    for label in shown[0].rows():
        values = [stage.rows()[label] for stage in shown]
        if label != MAY_ADD or any(values):
            add(label, values)
        parts = shown[0].parts_of_peak() if label == PEAK else ()
        for part in parts:
            add(f"  {part}", [stage.parts_of_peak()[part] for stage in shown])
    table.add_section()
    if shown[0].busiest.is_stated:
        add("sum, even routing", [stage.even for stage in shown])
        add("more rows, busiest rank", [stage.more_rows for stage in shown])
    add("sum", [stage.total for stage in shown])
    return table


def print_memory(stages: Sequence[StageMemory], console: Console) -> None:
    """Print what one GPU holds, one column per pipeline stage looked at, and what skew adds."""
    shown = first_most_last(stages)
    console.print(_memory_table(shown))
    if len(stages) > 1:
        console.print(
            "The table shows one rank of the first pipeline stage, one of the last, and, of the "
            "stages between, the rank with most memory. Activations are saved for "
            f"{', '.join(f'{stage.state.microbatches:g}' for stage in shown)} microbatches."
        )
    console.print(skew_line(max(stages, key=lambda stage: stage.total)))


COMPARE: Final = (
    'What "auto" would choose for each value of megamoe.numerics is printed with --compare, which '
    "takes two to three times as long."
)


def dry_run(
    file: JobFile, world: int, *, compares: bool = False, has_page: bool = False
) -> dict[str, Any]:
    """Print regions, chunks, collectives and memory of a job on `world` ranks.

    Where it `compares`, also print the choices of "auto" for each value of `numerics`. Return the
    JSON report; where it `has_page`, with all that a page has.
    Raises InvalidConfig when the recipe, or torchtitan, does not have the layout.
    """
    if not uses_megamoe(file):
        raise InvalidConfig(
            f'{file.path}: a dry run needs megamoe; write compile.backend = "megamoe"'
        )
    logging.disable(logging.WARNING)  # torchtitan's log lines are about a real run
    warnings.simplefilter("ignore")
    _collect_seldom()
    console, began = new_console(), time.monotonic()
    changes: list[Change] = []

    def begin(rank: FakeRank) -> None:
        _describe(file, rank, console)
        changes[:] = possible_changes(rank)

    stages = measure_stages(file, world, begin)
    wanted = Wanted(compares=compares, has_page=has_page)
    with Console(stderr=True).status("tracing") as status:
        traced = trace_stages(file, world, stages, status.update, wanted)
    print_layers(traced, console)
    if not compares and any(layer.unhidden_us for layer in traced):
        console.print(COMPARE)
    memory, device = stages.memory(traced), device_memory(_hardware(file))
    print_memory(memory, console)
    helped: list[Helped] = []
    if device.total and device.left(memory) < 0:
        job = DryJob(file=file, world=world, stages=stages, traced=traced, device=device)
        with Console(stderr=True).status("what to change") as status:
            helped = try_changes(job, changes, status.update)
    report = {**_report(traced, device.name), "memory": memory_report(device, memory, helped)}
    _write_report(str(file.read("megamoe.report", "")), report, console)
    console.print(f"These are estimates; nothing was run. {time.monotonic() - began:.0f} s.")
    console.print(verdict(device, memory, helped), markup=False)
    return report


def _write_report(named: str, report: dict[str, Any], console: Console) -> None:
    """Write the report, which is that of a run of these graphs, where a path is named."""
    if named:
        path = json_of(Path(named))
        write_whole(path, json.dumps(report, indent=2) + "\n")
        console.print(f"What the passes did, as JSON: {path}")


def _collect_seldom() -> None:
    """Have Python's garbage collector look at new objects alone, and at them less often.

    Graphs of many nodes live to the end of the run, and modules stay: the collector would go
    through them again and again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 10)


def _hardware(file: JobFile) -> str:
    """Return the name of the profile that estimates are for."""
    named = str(file.read("megamoe.hardware", "detect"))
    return DEFAULT_HARDWARE if named == "detect" else named


def _describe(file: JobFile, rank: FakeRank, console: Console) -> None:
    training, axes = rank.job.training, rank.dims.get_all_one_dimensional_meshes()
    degrees = ", ".join(f"{axis} {mesh.size()}" for axis, mesh in axes.items())
    console.print(
        f"Dry run of {file.path}: {rank.job.model.name} {rank.job.model.flavor}, sequence "
        f"{training.seq_len}, local batch {training.local_batch_size}, {rank.dims.world_size} "
        f"ranks ({degrees})"
    )
    if said := said_of_gathers(rank.job, rank.dims, rank.model_args.moe_args):
        console.print(f"{said}.", markup=False)
    if file.read("megamoe.hardware", "detect") == "detect":
        console.print(
            f"Times are for hardware profile {DEFAULT_HARDWARE}, because the file does not set "
            "megamoe.hardware."
        )
