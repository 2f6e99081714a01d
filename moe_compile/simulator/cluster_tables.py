"""Predictions for clusters as tables for a person and as JSON data.

Contract
    Every table names the origin of its figures: predicted by formulas, with which constants, and
    the rows those were fitted on.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from moe_compile.report.explain import LOG_WIDTH
from moe_compile.simulator.checks import Check, Row
from moe_compile.simulator.explain import Change, ScheduleBound
from moe_compile.simulator.method import Products
from moe_compile.simulator.parts_table import PartShares
from moe_compile.simulator.scenario import Prediction

NOTE: Final = "Predicted by formulas; nothing was run."
BETWEEN_NODES: Final = (
    "flat, exact and rounded are megamoe's schedules: a plain all-to-all, two hops for rows that "
    "are copied, and two hops also for rows that are summed. Chunks are chunks of experts, slices "
    "are slices of tokens, parts are parts of the batch with one sequence or more each. All other "
    "schedules send a row once to each node, over both links at once, as DeepEP's kernels do; "
    "tiles also fuses compute and communication, as MegaScale-MoE does; two-batches is the "
    "schedule of DeepSeek-V3. MB: rows that a rank sends to other nodes, and to ranks of its own "
    "node, in one layer for one micro-batch."
)
MORE_THAN_A_GPU: Final = (
    "Every row needs more memory than a GPU has, because all activations are counted, in bf16. A "
    "job of that size recomputes some activations or keeps them in fewer bytes, as DeepSeek-V3 did "
    "(its report, 3.2.3 and 3.3.3)."
)
BOUND_COLUMNS: Final = ("sequential", "inter-op", "best chunks", "tiles", "two-batches")


def new_console() -> Console:
    """Return a console as wide as the terminal, or as a log's line."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = LOG_WIDTH
    return console


IN_EIGHT_BITS: Final = {
    Products.EXPERTS: "Products of experts and of gradients of their rows are in fp8, and "
    "quantising is counted",
    Products.EXPERTS_FREE: "Products of experts and of gradients of their rows are in fp8, and "
    "quantising takes no time: a bound",
    Products.ALL: "All products but those of gradients of weights are in fp8, and quantising takes "
    "no time: a bound",
}


def print_eight_bit_rate(rate: Mapping[str, Any], products: Products, console: Console) -> None:
    """Print which products are in fp8, their rate, and the origins of its factors."""
    origins = "; ".join(f"{name} {rate[name]}: {text}" for name, text in rate["origins"].items())
    console.print(
        f"{IN_EIGHT_BITS[products]}. A large product has {rate['tflops']:.0f} TFLOP/s in fp8, "
        f"{rate['bf16_tflops']:.0f} in bf16 ({origins})."
    )


def print_predictions(rows: Sequence[Prediction], title: str, console: Console) -> None:
    """Print one line per schedule and number of GPUs."""
    table = Table(title=title, box=SIMPLE_HEAD)
    table.add_column("GPUs", justify="right")
    table.add_column("schedule", no_wrap=True)
    fits = any(row.fits_memory for row in rows)
    crosses = any(row.sent_between_mb for row in rows)
    near = ("MB far", "near") if crosses else ("of bound %",)
    for heading in ("step s", "tok/s", "MFU %", "layer ms", "exposed %", *near, "GB"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("over", justify="right", no_wrap=True)
    for gpus, group in itertools.groupby(rows, key=lambda row: row.gpus):
        same = list(group)
        for row in same:
            over = same[0].seconds / row.seconds
            table.add_row(str(gpus), *_figures(row, fits, crosses=crosses), f"{over:.2f}x")
        table.add_section()
    console.print(table)
    console.print(
        f"{NOTE} *: schedules that megamoe runs. exposed: time of collectives while no compute "
        "runs. of bound: time of a step if collectives took no time, divided by its time. GB: "
        "memory without that of the allocator and of NCCL. over: speed, divided by the speed of "
        f"{rows[0].schedule!r}."
    )
    if not fits:
        console.print(MORE_THAN_A_GPU)
    elif not all(row.fits_memory for row in rows):
        console.print("!: more memory than a GPU has.")
    if crosses:
        console.print(BETWEEN_NODES)


def _figures(row: Prediction, fits: bool, *, crosses: bool) -> tuple[str, ...]:
    near: tuple[str, ...] = (f"{row.of_bound_percent:.1f}",)
    if crosses:
        near = (f"{row.sent_between_mb:.0f}", f"{row.sent_within_mb:.0f}")
    return (
        f"{row.schedule} *" if row.is_own else row.schedule,
        f"{row.seconds:.2f}",
        f"{row.tokens_per_s / 1e3:.1f}k",
        f"{row.mfu_percent:.1f}",
        f"{row.layer_ms:.2f}",
        f"{row.exposed_percent:.1f}",
        *near,
        f"{row.memory_gb:.0f}" + ("!" if fits and not row.fits_memory else ""),
    )


def print_checks(checks: Sequence[Check], console: Console) -> None:
    """Print published figures beside predicted ones."""
    for check in checks:
        table = Table(title=f"{check.title} ({check.constants})", box=SIMPLE_HEAD)
        table.add_column(check.source, no_wrap=True)
        for heading in ("published", "predicted", "error %"):
            table.add_column(heading, justify="right")
        table.add_column("")
        for row in check.rows:
            table.add_row(
                row.label,
                f"{row.published:.2f} {row.unit}",
                f"{row.predicted:.2f} {row.unit}",
                f"{row.error_percent:+.1f}",
                "fitted" if row.is_fitted else "held out",
            )
        console.print(table)
        error = check.heldout_mape_percent
        if error is None:
            console.print(
                "Every row was used in the fit, so the errors of this table say nothing "
                "about other runs."
            )
        else:
            console.print(
                f"Mean absolute error of the rows that were not used in the fit: {error:.1f} %."
            )
    console.print(NOTE)


def print_changes(changes: Sequence[Change], own: Change, gpus: int, console: Console) -> None:
    """Print the steps of a speed-up, and the steps that megamoe has."""
    table = Table(title=f"352B on {gpus} H800: one thing after another", box=SIMPLE_HEAD)
    table.add_column("what changes", no_wrap=True)
    for heading in ("step s", "gain", "in all"):
        table.add_column(heading, justify="right")
    table.add_column("in megamoe")
    for change in changes:
        table.add_row(
            change.name,
            f"{change.seconds:.2f}",
            f"{change.gain:.3f}x",
            f"{change.total_gain:.2f}x",
            change.by,
        )
    console.print(table)
    console.print(
        f"megamoe and its recipe have these changes: {own.by}. With these changes alone a step "
        f"is predicted at {own.seconds:.2f} s, {own.total_gain:.2f} times as fast as "
        "Megatron-LM's."
    )
    console.print(
        f"{NOTE} If the changes were made in a different order, each would gain a different amount."
    )


def print_bounds(bounds: Sequence[ScheduleBound], title: str, console: Console) -> None:
    """Print how near schedules come to free collectives."""
    table = Table(title=title, box=SIMPLE_HEAD)
    table.add_column("model", no_wrap=True)
    for heading in ("ideal ms", "its MFU %", "over TP", *BOUND_COLUMNS):
        table.add_column(heading, justify="right")
    for bound in bounds:
        over = bound.tensor_over_ideal
        table.add_row(
            bound.model,
            f"{bound.ideal_ms:.2f}",
            f"{bound.ideal_mfu_percent:.1f}",
            "-" if over is None else f"{over:.2f}x",
            *(_pair(bound, column) for column in BOUND_COLUMNS),
        )
    console.print(table)
    console.print(
        f"{NOTE} Figures are of one layer, forward and backward. ideal: the time if collectives "
        "took no time. Columns of schedules: their speed in % of the ideal speed, first with "
        "bf16 rows, then with fp8 rows. over TP: time of tensor parallelism with nothing "
        "overlapped, divided by the ideal time."
    )


def print_part_shares(rows: Sequence[PartShares], cluster: str, console: Console) -> None:
    """Print how near parts of the batch come to free collectives."""
    table = Table(title=f"Parts of the batch on {cluster}, rows in fp8", box=SIMPLE_HEAD)
    columns = [*rows[0].shares]
    for heading in ("model", "way", "products"):
        table.add_column(heading, no_wrap=True)
    for heading in ("link %", *columns, "limit", "packed apart"):
        table.add_column(heading, justify="right")
    for row in rows:
        shares = (*row.shares.values(), row.limit, row.with_packing)
        link = f"{row.exchange_percent:.0f}"
        figures = (f"{share:.1f}" for share in shares)
        table.add_row(row.model, row.way, row.products, link, *figures)
    console.print(table)
    console.print(
        f"{NOTE} Times are of one layer, forward and backward. A batch of one rank has one "
        "sequence for each part. The cost of megamoe's own operators is included.\n"
        "link %: time of collectives, in % of the time of compute.\n"
        f"{', '.join(columns)}: the time that the layer would take if collectives took no time, "
        "in % of its predicted time. N blocks: N layers are scheduled as one.\n"
        f"limit: the highest figure that any order of the kernels in column {columns[-1]} can "
        "reach.\n"
        f"packed apart: column {columns[-1]}, if separate kernels packed the rows."
    )


def checks_as_data(checks: Sequence[Check], main: Sequence[Check]) -> dict[str, Any]:
    """Return JSON data: the rows of `main` and their held-out error, and all checks."""
    rows = [row for check in main for row in check.rows]
    errors = [abs(row.error_percent) for row in rows if not row.is_fitted]
    return {
        "rows": [_row(row, check.source) for check in main for row in check.rows],
        "heldout_mape_percent": sum(errors) / len(errors),
        "checks": [
            {
                "title": check.title,
                "source": check.source,
                "constants": check.constants,
                "heldout_mape_percent": check.heldout_mape_percent,
                "rows": [_row(row, check.source) for row in check.rows],
            }
            for check in checks
        ],
    }


def _row(row: Row, source: str) -> dict[str, Any]:
    return {
        "source": source,
        "label": row.label,
        "unit": row.unit,
        "published": row.published,
        "predicted": row.predicted,
        "error_percent": row.error_percent,
        "fitted": row.is_fitted,
    }


def as_data(rows: Sequence[Any]) -> list[dict[str, Any]]:
    """Return dataclasses as JSON data."""
    return [dataclasses.asdict(row) for row in rows]


def _pair(bound: ScheduleBound, column: str) -> str:
    near = bound.of_bound_percent
    return f"{near[column]:.0f} / {near[column + ' + fp8 wire']:.0f}"
