"""`python -m benchmarks.paper.fitting`: fits the constants that profiles carry.

Only the rows marked for it are read.

Contract
    A fit is a search over a stated grid for the least sum of squared relative errors. Running it
    again gives the numbers in the profiles; a test does.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from moe_compile.hardware.cluster import Fit
from moe_compile.simulator import checks, setups
from moe_compile.simulator.checks import check_table_5, eos_mfu_percent
from moe_compile.simulator.step import predict_step

COMPUTE_GRID: Final = tuple(round(1.20 + 0.01 * i, 2) for i in range(31))
LINK_GRID: Final = tuple(round(1.00 + 0.05 * i, 2) for i in range(21))
SLOW_GRID: Final = tuple(range(1, 15))
EOS_GRID: Final = tuple(round(0.800 + 0.001 * i, 3) for i in range(401))


def fit_bytedance() -> Fit:
    """Return the fit of H800: compute and link together, then the baseline's slow operators."""
    start = Fit(imbalance=setups.shipped("h800").fit("bytedance").imbalance)
    grid = [
        replace(start, compute=compute, link=link)
        for compute, link in itertools.product(COMPUTE_GRID, LINK_GRID)
    ]
    best = min(grid, key=lambda fit: _squares(_megascale_errors(fit)))
    slow = [replace(best, slow_operators=factor) for factor in SLOW_GRID]
    return min(slow, key=lambda fit: _squares(_megatron_errors(fit)))


def fit_eos() -> Fit:
    """Return the fit of Eos: compute from its one row, link taken over from H800."""
    link = setups.shipped("h800").fit("bytedance").link
    rows = [row for row in checks.EOS if row.is_fitted]
    grid = [Fit(compute=compute, link=link) for compute in EOS_GRID]
    return min(
        grid, key=lambda fit: _squares(eos_mfu_percent(r, fit) / r.mfu_percent - 1.0 for r in rows)
    )


def _megascale_errors(fit: Fit) -> Iterable[float]:
    for row in checks.TABLE_3:
        if row.megascale_is_fitted:
            yield (predict_step(setups.megascale(row.gpus, fit)).seconds / row.megascale_s - 1.0)
    for check in check_table_5(fit).rows:
        yield check.error_percent / 100.0


def _megatron_errors(fit: Fit) -> Iterable[float]:
    for row in checks.TABLE_3:
        if row.megatron_is_fitted:
            yield (predict_step(setups.megatron(row.gpus, fit)).seconds / row.megatron_s - 1.0)


def _squares(errors: Iterable[float]) -> float:
    return sum(error * error for error in errors)


def main() -> int:
    """Print both fits, as the profiles have them."""
    for name, fit in (("bytedance, h800", fit_bytedance()), ("eos, h100", fit_eos())):
        sys.stdout.write(f"{name}: {fit}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
