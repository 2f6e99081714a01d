"""The lanes as a page: what passed on which torch, and when; what was not run says so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.lanes.steps import LANES, STEPS, steps_of

INTRODUCTION: Final = f"""\
# Which torch

This page says which releases of torch megamoe was run on, and which steps passed on each. `make
lanes` made the table, on CPUs alone. For each release it makes a separate environment, which it
removes again. In this environment it

- imports megamoe, and runs the README's example on two ranks;
- trains the debug recipe for {STEPS} steps, and compares each loss with that of the same job
  without compilation, on the same torch;
- runs the quick tests of those folders of `tests/` that the table names;
- generates the code of three CUDA programs by `benchmarks.cuda`, which then [reads this
  code](testing.md#cuda-code-without-a-gpu).

`make lanes VERSIONS=2.11.0` runs one release. A step that has passed on a release is not run again.

`make test` runs on 2.13.0, and all other pages are about this release. The oldest release that
megamoe supports is 2.11.0, which is also in many GPU images. A cell has the day on which the step
passed. An empty cell means that the step was not run. "no" means that the step failed on that day.
"off 0.02%" means that in every step the recipe's loss differed from the loss in eager mode by at
most 0.02%.

All lanes use Python 3.11. Python 3.12.1 and 3.13.0 compile the sources without a warning (`python
-W error::SyntaxWarning -m compileall`), but nothing was run on these versions. `make lint` refuses
code that 3.11 cannot read, and string escapes about which newer versions warn.

"""


def page_of(record: Mapping[str, Any]) -> str:
    """Return the page."""
    head = "| | " + " | ".join(LANES) + " |\n|" + " --- |" * (len(LANES) + 1) + "\n"
    return INTRODUCTION + head + "".join(_rows(record["lanes"]))


def write_page(record: Mapping[str, Any], path: Path) -> None:
    """Write the page."""
    path.write_text(page_of(record))


def summary_line(version: str, name: str, result: Mapping[str, Any]) -> str:
    """Return one line for a terminal."""
    how = "passed" if result["passed"] else "FAILED"
    return f"torch {version}, {name}: {how}, {result['s']} s: {result['said']}"


def _rows(lanes: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name in (step.name for step in steps_of(LANES[0], 0)):
        cells = (_cell(name, lanes.get(version, {}).get(name)) for version in LANES)
        yield f"| {name} | {' | '.join(cells)} |\n"


def _cell(name: str, result: Mapping[str, Any] | None) -> str:
    if result is None:
        return ""
    if not result["passed"]:
        return f"no, {result['date']}"
    said = f", off {result['said']}" if name == "recipe" else ""
    return f"{result['date']}{said}"
