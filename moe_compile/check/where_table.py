"""The table of section `where`, its sentence, and the constants that it measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rich.table import Table

from moe_compile.check.tables import Section, new_table

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
