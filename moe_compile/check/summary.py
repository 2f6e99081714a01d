"""Run the sections of `megamoe check` and print what they found, in tables and as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from moe_compile.check.culprit import sentences
from moe_compile.check.forms import AS_ASKED
from moe_compile.check.hardware import describe_gpu_machine, said_of_links
from moe_compile.check.ranks import Ranks
from moe_compile.check.sections import passed_before, read_section, run_sections
from moe_compile.check.tables import Section, new_table, print_sections
from moe_compile.entry_points import hash_of_packages
from moe_compile.source_hash import EVERY_SOURCE, ROOT, hash_of_sources

WIDTH: Final = 132
MORE: Final = "megamoe bisect, with the same arguments, finds the pass, and the block"
ALIKE: Final = ("device", "ranks", "sources", "job")
"""What a section that passed must have had in common with this run to stay."""
RECIPE: Final = tuple(sorted((ROOT / "torchtitan_integration").rglob("*.py")))
NO_LINK: Final = (
    "These are times of a CPU without a link between ranks: they do not predict those of a cluster."
)
PARTS: Final = ("total_us", "hidden_us", "exposed_us")
NEAR: Final = 0.1
"""Share by which a constant may be off and still be as the profile has it."""


def table_of_where(section: Section) -> Table:
    """Return a row of each collective: predicted and measured, total, hidden and exposed."""
    title = (
        "Collectives, ms: total, hidden and exposed time, first predicted, then measured on the "
        "worst rank"
    )
    names = ("total", "hidden", "exposed")
    table = new_table(title, "collective", *names, *names, "error", "rank", "explained by")
    table.columns[-1].justify = "left"
    table.columns[0].no_wrap = True
    graph = ""
    for row in section["rows"]:
        if row["graph"] != graph:
            graph = row["graph"]
            table.add_row(_short(graph))
        planned = row["predicted"] or dict.fromkeys(PARTS)
        table.add_row(
            f" {row['number']} {row['collective'].removesuffix('_single')} {_short(row['where'])}",
            *(_ms(planned[part]) for part in PARTS),
            *(_ms(row["measured"][part]) for part in PARTS),
            _ms(row["error_us"], "+.2f"),
            str(row["rank"]),
            row["because"],
        )
    return table


def _short(where: str) -> str:
    """Return a place without the name of its function."""
    return where.partition(" in ")[0]


def _ms(us: float | None, form: str = ".2f") -> str:
    return "-" if us is None else format(us / 1e3, form)


def says_where(section: Section) -> str:
    """Return the section's sentence."""
    known = [row for row in section["rows"] if row["predicted"]]
    rest = len(section["rows"]) - len(known)
    sums = {
        who: {part: sum(row[who][part] for row in known) / 1e3 for part in PARTS}
        for who in ("predicted", "measured")
    }
    said = (
        f"{len(known)} collectives, each run once, have {sums['measured']['exposed_us']:.2f} of "
        f"{sums['measured']['total_us']:.2f} ms exposed; predicted were "
        f"{sums['predicted']['exposed_us']:.2f} of {sums['predicted']['total_us']:.2f} ms"
    )
    return f"{said}; {rest} more have no prediction" if rest else said


def constants(section: Section) -> Iterator[str]:
    """Yield what was measured of the profile's constants, and what a measurement cannot show."""
    for link, fit in section["links"].items():
        yield f"{link}: {_link(fit)}"
    for graph, ratio in section["compute"].items():
        if abs(ratio - 1.0) > NEAR:
            yield f"compute of {_short(graph)} takes {ratio:.2g} times the predicted time"
    yield _contention(section)
    if totals := section["all_collectives"]:
        yield (
            f"all collectives of a step, torch's own too: {totals['exposed_ms']:.2f} ms exposed "
            f"and {totals['hidden_ms']:.2f} ms hidden, on the rank with most exposed time"
        )
    yield (
        f"a step took {section['step_ms']:.1f} ms, and {section['profiled_step_ms']:.1f} ms under "
        "the profiler: all figures above include the profiler's own time"
    )
    yield section["limits"]


def _link(fit: Mapping[str, Any]) -> str:
    rate = fit["gb_per_s"]
    latency = f"latency {fit['latency_us']:.0f} us ({fit['planned_latency_us']:.0f} in the profile)"
    told = "bandwidth too high to measure" if rate is None else f"{rate:.3g} GB/s"
    said = f"{latency}; {told} ({fit['planned_gb_per_s']:.3g} in the profile)"
    one_size = (
        "; all its collectives have one size, from which only one of latency and bandwidth can be "
        "told"
    )
    return said if fit["is_separated"] else said + one_size


def _contention(section: Section) -> str:
    if (told := section.get("contention")) is None:
        return f"compute beside collectives: {section.get('pieces', 0)} pieces, too few to compare"
    return (
        f"compute beside a collective takes {told['median']:.2f} ({told['low']:.2f} to "
        f"{told['high']:.2f}) times as long as equal compute alone, over {told['num_pairs']} pieces"
    )


def run_check(
    ranks: Ranks,
    out: Path,
    sections: Mapping[str, float],
    head: Mapping[str, Any],
    asked: argparse.Namespace,
) -> int:
    """Run `sections` on `ranks`, of which this is the first; return the exit status."""
    console = Console(width=WIDTH)
    summary = begun(head)
    if not asked.again:
        summary["sections"] = passed_before(out, summary, ALIKE)
    for name in summary["sections"]:
        console.print(
            f"section {name} passed in an earlier run, whose results are kept (--again runs it "
            "again)"
        )
    limit_s = asked.budget_s
    has_passed = run_sections(out, summary, sections, limit_s, ranks.run, longest_s=limit_s)
    ranks.end()
    print_check(console, out, summary)
    return 0 if has_passed else 1


def begun(head: Mapping[str, Any]) -> dict[str, Any]:
    """Return a summary without sections, of a job, its ranks and its device in `head`."""
    return {
        **head,
        "machine": describe_gpu_machine(str(head["device"])),
        "sources": f"{hash_of_sources((*EVERY_SOURCE, *RECIPE))} {hash_of_packages()}",
        "sections": {},
    }


def print_check(console: Console, out: Path, summary: Mapping[str, Any]) -> None:
    """Print each section's table, how it ended, and what the check cannot show."""
    print_sections(console, out, summary, TABLES)
    for line in verdicts(out, summary):
        console.print(line, markup=False, highlight=False)
    console.print(f"results: {out}", markup=False, highlight=False)


def verdicts(out: Path, summary: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each section, then what this run cannot show."""
    said = []
    for name in summary["sections"]:
        section = read_section(out, name)
        is_whole = section.get("is_complete") and not section.get("failures")
        if is_whole and section.get("rows"):
            said.append(f"{name}: {SAYS[name](section)}")
            if name == "where":
                said += [f"{name}: {line}" for line in constants(section)]
        else:
            said.append(f"{name}: {_why_not(summary['sections'][name], section)}")
        if name == "same" and section.get("failures"):
            said += [f"{name}: {line}" for line in sentences(section.get("culprit", {}))]
            said.append(f"{name}: {MORE}")
    timed = {"faster", "where", "better", "hardware"}
    if summary["device"] == "cpu" and timed & {*summary["sections"]}:
        said.append(f"note: {NO_LINK}")
    if summary["layers"]:
        said.append(
            f"note: only the model's first {summary['layers']} layers ran. The check does not show "
            "the time and memory of all layers, nor how differences add up over depth"
        )
    return [*said, *(f"note: {line}" for line in summary["unseen"])]


def _why_not(ended: Mapping[str, Any], section: Section) -> str:
    """Return what to say of a section that did not come to its end, or found a fault."""
    if section.get("is_complete") and section.get("rows"):
        return "DOES NOT HOLD"
    why = next(
        iter(ended.get("failures", ())), ended.get("why", "the section did not run to its end")
    )
    return f"OPEN: {why} (status {ended['status']}; what ranks printed is beside the results)"


def _says_same(section: Section) -> str:
    rows = {row["form"]: row for row in section["rows"]}
    bits = rows["megamoe, node by node"]
    said = [f"node by node: {bits['found']}"]
    if generated := rows.get("megamoe"):
        said.append(f"generated code: {generated['found']}")
    return "; ".join(said)


def _says_faster(section: Section) -> str:
    rows = {row["form"]: row for row in section["rows"]}
    return (
        f"a step by megamoe takes {_ratio(rows['megamoe'])} times as long as by {section['best']}"
    )


def _says_better(section: Section) -> str:
    if "won" not in section:
        return "no options other than the job's were raced"
    won = (
        f"a step with {_table(section['won'])} takes {_ratio(section)} times as long as with the "
        "job's own options"
    )
    if not section["is_faster"]:
        return f"the job's own options stay; {won}"
    table = "".join(f"\n  {name} = {json.dumps(v)}" for name, v in section["won"].items())
    return f"{won}\n  [megamoe]{table}"


def _table(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {json.dumps(value)}" for name, value in options.items())


def _ratio(row: Mapping[str, Any]) -> str:
    ratio = row["ratio"]
    return f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})"


def _same(section: Section) -> Table:
    table = new_table("Same results", "form", "first loss, last rank", "s", "found")
    table.columns[-1].justify = "left"
    for row in section["rows"]:
        loss = sum(row["losses"])
        table.add_row(row["form"], f"{loss:.7g}", f"{row['seconds']:.0f}", row["found"])
        lines = [*row["regions"], *(f"bits may differ: {why}" for why in row["excuses"])]
        if not row["holds"] and row["passes"]:
            lines.append(f"passes that changed a graph: {', '.join(row['passes'])}")
        for line in lines:
            table.add_row("", "", "", line)
    return table


def _faster(section: Section) -> Table:
    best = section.get("best", "Inductor")
    table = new_table("Steps in turn, ms", "form", "step", f"over {best}", "first step, s")
    for row in section["rows"]:
        table.add_row(
            row["form"], f"{1e3 * row['step_s']:.1f}", _ratio(row), f"{row['first_s']:.1f}"
        )
    return table


def _better(section: Section) -> Table:
    """Each way once, by what it was found to take in its longest race."""
    table = new_table(
        "Options raced, ms",
        "way",
        "rounds",
        "step",
        "over the job's own",
        "place",
        "predicted place",
    )
    rows = {row["form"]: row for row in section["rows"]}  # the last of each
    found = sorted(rows.values(), key=lambda row: (-row["rounds"], row["step_s"]))
    by_time = sorted(rows, key=lambda name: rows[name]["ratio"]["median"])
    predicted = {n: one["us"] for n, one in section.get("predicted", {}).items() if n in rows}
    by_prediction = sorted(predicted, key=lambda name: predicted[name])
    for row in found:
        name = row["form"]
        table.add_row(
            name,
            str(row["rounds"]),
            f"{1e3 * row['step_s']:.1f}",
            _ratio(row),
            str(by_time.index(name) + 1),
            _predicted(name, by_prediction, predicted),
        )
    return table


def _predicted(name: str, order: list[str], us: Mapping[str, float]) -> str:
    """Return a way's place by prediction, and its time over that of the job as asked."""
    if name not in us:
        return ""
    own = us.get(AS_ASKED.name, 0.0)
    return f"{order.index(name) + 1}" + (f" ({us[name] / own:.3f})" if own else "")


def _says_hardware(section: Section) -> str:
    links = (
        ", ".join(said_of_links(section["rows"]))
        or "the job has one rank, so there is no link to measure"
    )
    return f'{links}; to plan by the measured rates, set megamoe.hardware = "{section["profile"]}"'


def _hardware(section: Section) -> Table:
    table = new_table("Measured on this machine", "what", "bytes", "found")
    for row in section["rows"]:
        if "collective" in row:
            name = f"{row['collective']}, {row['ranks']} ranks"
            found = f"{row['us']:.4g} us, {row['gb_per_s']:.3g} GB/s"
            table.add_row(name, str(row["bytes"]), found)
        elif isinstance(row["value"], float):
            table.add_row(row["rate"], "", f"{row['value']:g}")
    return table


SAYS: Final = {
    "same": _says_same,
    "faster": _says_faster,
    "where": says_where,
    "better": _says_better,
    "hardware": _says_hardware,
}
TABLES: Final = {
    "same": _same,
    "faster": _faster,
    "where": table_of_where,
    "better": _better,
    "hardware": _hardware,
}
