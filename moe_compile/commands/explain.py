"""`megamoe explain`: what megamoe does with a job, or did in one, in words and as a page.

Contract
    Of a job it is the dry run: the job is traced and priced, nothing is trained. Of a report, which
    a job has written, nothing is traced. Either is told exchange by exchange, and with `--html` as
    a page with a trace for Perfetto beside it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_compile.errors import InvalidConfig
from moe_compile.report.explain import print_report
from moe_compile.report.explanation_text import explanation_lines
from moe_compile.report.page import PAGE, TRACE, write_page
from moe_compile.report.timelines import timelines_of


def add_explain(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "explain",
        help="say what megamoe does with a job, and write it as a page",
        description="Trace a torchtitan job on any machine, without training: print which "
        "exchanges are found, why the others are not, and what to change; then print regions, "
        "collectives, predicted times and memory. If you give a report instead, print what that "
        "job did.",
        epilog="Flags of torchtitan follow the file and override its keys, as for megamoe train.",
        usage="megamoe explain [-h] [--html PATH] [--world N] [--compare] "
        "JOB.toml|RECIPE|REPORT.json [--section.key value ...]",
        allow_abbrev=False,
    )
    parser.add_argument(
        "config", metavar="JOB", help="a job's TOML file, the name of a recipe, or a JSON report"
    )
    parser.add_argument(
        "--html",
        metavar="PATH",
        type=_page,
        help="write an HTML page: timelines and memory before and after, every collective, graphs",
    )
    parser.add_argument(
        "--world", metavar="N", type=int, help="ranks; default: the product of the TOML's degrees"
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help='also show what "auto" would choose for each value of megamoe.numerics',
    )
    parser.set_defaults(dry_run=True, nproc=None, verbose=False)


def _page(text: str) -> Path:
    if not text.endswith(PAGE):
        raise argparse.ArgumentTypeError(
            f"{text!r}: the page must be an HTML file; write a name that ends in {PAGE}"
        )
    return Path(text)


def explain_report(known: argparse.Namespace) -> int:
    """Tell what the report of a job says; return the exit status. Raises InvalidConfig."""
    path = Path(known.config)
    try:
        report = json.loads(path.read_text())
        exchanges = report["exchanges"]
    except OSError as error:
        raise InvalidConfig(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, LookupError, TypeError):
        raise InvalidConfig(
            f"{path} is not a report of megamoe; name the JSON report that a job wrote"
        ) from None
    del exchanges
    print_report(report, verbose=True)
    tell(report, known.html)
    return 0


def tell(report: Mapping[str, Any], page: Path | None) -> None:
    """Print the findings exchange by exchange, and write the page if it has a path."""
    breaks, graphs = report["graph_breaks"], report["num_graphs"]
    for line in explanation_lines(report["exchanges"], breaks, graphs, is_whole=True):
        _say(line)
    if page is not None:
        tell_of_page(report, page)


def tell_of_page(report: Mapping[str, Any], page: Path) -> None:
    """Write a page and its trace, and print their names."""
    try:
        write_page(report, page)
    except OSError as error:
        _say(f"megamoe: the page {page} cannot be written: {error.strerror}")
        return
    _say(
        f"megamoe: wrote this report as a web page, {page}, and as a trace for Perfetto, "
        f"{page.with_suffix(TRACE)}"
    )


def tell_of_picture(report: Mapping[str, Any], picture: Path) -> None:
    """Draw the timelines of a report, and print the picture's name, or why there is none."""
    if not timelines_of(report):
        return
    try:
        drawing = importlib.import_module("moe_compile.report.timeline_picture")
    except ModuleNotFoundError:
        _say(
            "megamoe: drew no picture of its timelines, which needs matplotlib: pip install "
            "matplotlib"
        )
        return
    drawing.draw_report(report, picture)
    _say(f"megamoe: drew a picture of its timelines: {picture}")


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
