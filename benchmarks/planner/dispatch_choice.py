"""`python -m benchmarks.planner.dispatch_choice`: how far "auto" is from the better dispatch.

Simulated on eight ranks of a node with eight experts a token (simulated_dispatch.py), and looked up
in the steps recorded on the emulated link of four ranks (recorded_dispatch.py).
"""

from __future__ import annotations

import argparse
import sys
from typing import Final

from rich.console import Console
from rich.table import Table

from benchmarks.planner.chunk_choice import PROFILES
from benchmarks.planner.dispatch_layers import GATHERED
from benchmarks.planner.recorded_dispatch import RecordedChoice, recorded_choices
from benchmarks.planner.simulated_dispatch import (
    TOP_K,
    SimulatedChoice,
    best_of,
    choose,
    simulated_layers,
)

WIDTH: Final = 170


def main() -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planner.dispatch_choice", description=__doc__
    )
    parser.add_argument("--top-k", type=int, default=TOP_K, help="of the simulated layers")
    parser.add_argument("--whole", action="store_true", help="simulated regions in one chunk")
    arguments = parser.parse_args()
    top_k, chunks = arguments.top_k, 1 if arguments.whole else "auto"
    console = Console(width=WIDTH)
    console.print(_recorded_table(list(recorded_choices())))
    layers = simulated_layers(top_k)
    choices = [choose(layer, name, chunks) for layer in layers for name in PROFILES]
    console.print(_simulated_table(choices, top_k))
    return 0


def _recorded_table(choices: list[RecordedChoice]) -> Table:
    table = _table(
        "Recorded, four ranks: what the choice had taken",
        ("k", "ratio", "chunks", "chosen", "why", "ms", "best ms", "regret", "of the dispatch"),
    )
    for choice in choices:
        table.add_row(
            str(choice.case.top_k),
            choice.ratio,
            str(choice.chunks),
            str(choice.decision.chosen.candidate),
            choice.decision.why.name.lower(),
            f"{choice.chosen_ms:.1f}",
            f"{min(choice.recorded_ms.values()):.1f}",
            f"{choice.regret:.1%}",
            f"{choice.dispatch_regret:.1%}",
        )
    return table


def _simulated_table(choices: list[SimulatedChoice], top_k: int) -> Table:
    table = _table(
        f"Simulated, eight ranks of a node, {top_k} experts a token: milliseconds of a layer",
        (
            "model", "profile", "chosen", "why", "all-to-all", "gathered", "regret",
            "simulate: all-to-all", "gathered", "regret", "of the dispatch",
        ),
    )  # fmt: skip
    for choice in choices:
        own, simulated = choice.own_us, choice.simulated_us
        table.add_row(
            choice.layer.shape.name,
            choice.profile,
            str(choice.decision.chosen.candidate),
            choice.decision.why.name.lower(),
            _ms(best_of(own, "all_to_all")),
            _ms(own[GATHERED]),
            f"{choice.regret(own):.1%}",
            _ms(best_of(simulated, "all_to_all")),
            _ms(simulated[GATHERED]),
            f"{choice.regret(simulated):.1%}",
            f"{choice.dispatch_regret(simulated):.1%}",
        )
    return table


def _table(title: str, headings: tuple[str, ...]) -> Table:
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading)
    return table


def _ms(us: float) -> str:
    return f"{us / 1e3:.2f}"


if __name__ == "__main__":
    sys.exit(main())
