"""`python -m benchmarks.gpu.one_section NAME ...`: one section, in a process of its own.

Contract
    The exit code is 0 when nothing failed. What was found is on disk whatever happens.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import torch

from benchmarks.gpu.host_copies import check_trace
from benchmarks.gpu.kernels import check_kernels
from benchmarks.gpu.layer_check import check_layer
from benchmarks.gpu.link_rounds import check_link
from benchmarks.gpu.sizes import SIZES, Sizes
from benchmarks.gpu.sliced_products import check_slices
from benchmarks.gpu.unit_tests import check_tests
from moe_compile.check.sections import Record

SECTIONS: Final[Mapping[str, Callable[[Record, Sizes], None]]] = {
    "kernels": check_kernels,
    "slices": check_slices,
    "layer": check_layer,
    "trace": check_trace,
    "link": check_link,
    "tests": check_tests,
}


def main() -> int:
    """Run the section named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("section", choices=SECTIONS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=sorted(SIZES), required=True)
    parser.add_argument("--budget-s", type=float, required=True)
    arguments = parser.parse_args()
    return run_section(
        arguments.section,
        SIZES[arguments.device],
        arguments.out / f"{arguments.section}.json",
        arguments.budget_s,
    )


def run_section(name: str, sizes: Sizes, path: Path, budget_s: float) -> int:
    """Run one section; returns 1 when anything in it failed."""
    record = Record(path=path, deadline=time.monotonic() + budget_s)
    if sizes.device == "cuda":
        record.attempt("device", lambda: torch.cuda.set_device(0))
    began = time.monotonic()
    record.attempt(name, lambda: SECTIONS[name](record, sizes))
    record.put(seconds=round(time.monotonic() - began, 1), is_complete=True)
    return 1 if record.data["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
