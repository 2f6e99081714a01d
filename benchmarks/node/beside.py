"""Section `beside`: products with and without an exchange beside them, at several CTA budgets.

These two numbers decide what hiding is worth: by how much a GEMM slows while an exchange runs
(`contention`), and an exchange while GEMMs run (`overlap_slowdown`).

Contract
    Each is measured while the other work lasts longer, in most rounds, else the item fails: on a
    GPU. On a processor the two share its cores. Alone and beside are
    timed in turn; a share is the median of the ratios within rounds, less one, of the slowest rank.
    Budgets are torch's public `ProcessGroupNCCL.Options`; where these are not, as with gloo, all
    but the backend's own are skipped.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist

from benchmarks.node.sizes import Sizes
from benchmarks.node.together import Pair, Work, together
from moe_compile.check.links import EXCHANGE, launcher
from moe_compile.check.paired import ratio
from moe_compile.check.sections import Record, say
from moe_compile.check.team import Team, slowest
from moe_compile.testing.process_groups import rank_device

OWN: Final = 0
"""Budget of a group whose options say nothing."""
BUDGETS: Final = (OWN, 4, 8, 16, 32)
"""Most CTAs of a collective."""
PRODUCTS: Final = ("GEMM", "grouped GEMM")
EXPERTS: Final = 4
LONGER: Final = 3.0
"""Times the one that is timed that the other work lasts, as far as times alone tell."""
NEEDS_S: Final = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """One of the two numbers, on all ranks: seconds by round of the slowest."""

    alone_s: list[float]
    beside_s: list[float]
    covered: float
    """Share of the rounds in which the other work lasted longer, on every rank."""


def check_beside(team: Team, sizes: Sizes) -> None:
    """Run the section."""
    for product in PRODUCTS:
        for budget in BUDGETS:
            what = f"{product}, {said_of(budget)}"
            if budget != OWN and not has_budgets(sizes.device):
                if team.record is not None:
                    team.record.skip(what, "this backend has no CTA budget in torch")
                continue
            team.run(
                what,
                partial(_measure, product, budget, sizes),
                partial(judge_shares, product, budget, sizes.least_covered),
                needs_s=NEEDS_S,
            )


def said_of(budget: int) -> str:
    """Return how a budget is called."""
    return f"at most {budget} CTAs" if budget else "the backend's own CTAs"


def has_budgets(device: str) -> bool:
    """Return whether torch lets groups on `device` have a number of CTAs."""
    if device != "cuda" or not hasattr(dist, "ProcessGroupNCCL"):
        return False
    return hasattr(dist.ProcessGroupNCCL.Options().config, "max_ctas")


def group_with(budget: int) -> Any:
    """Return a group of all ranks whose collectives have so many CTAs at most."""
    if budget == OWN:
        return dist.new_group()
    options = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas, options.config.max_ctas = 1, budget
    return dist.new_group(pg_options=options)


def product_of(name: str, sizes: Sizes) -> Work:
    """Return one product, as often as `times`."""
    place, n = rank_device(), sizes.product
    x = torch.randn(n, n, device=place, dtype=torch.bfloat16)
    if name == PRODUCTS[0]:
        y = torch.randn(n, n, device=place, dtype=torch.bfloat16)
        return lambda: torch.mm(x, y)
    weights = torch.randn(EXPERTS, n, n, device=place, dtype=torch.bfloat16)
    ends = torch.arange(1, EXPERTS + 1, device=place, dtype=torch.int32) * (n // EXPERTS)
    return lambda: torch._grouped_mm(x, weights, offs=ends)


def _measure(name: str, budget: int, sizes: Sizes) -> dict[str, Share]:
    group = group_with(budget)
    try:
        product = product_of(name, sizes)
        exchange = launcher(EXCHANGE, sizes.beside_bytes, group)
        return measured(product, exchange, sizes.repeats)
    finally:
        dist.destroy_process_group(group)


def measured(product: Work, exchange: Work, rounds: int) -> dict[str, Share]:
    """Return both numbers of one product and one exchange, each made as often as is needed."""
    run = partial(together, product, exchange)
    for _ in range(2):
        run(1, 1)
    product_s, exchange_s = slowest([run(1, 0).product_s, run(0, 1).exchange_s])
    products = math.ceil(exchange_s / product_s)
    exchanges = math.ceil(product_s / exchange_s)
    cover = math.ceil(LONGER * products * product_s / exchange_s)
    many = math.ceil(LONGER * exchanges * exchange_s / product_s)
    return {
        "contention": _share(run, (products, 0), (products, cover), rounds),
        "overlap_slowdown": _share(run, (0, exchanges), (many, exchanges), rounds),
    }


def _share(
    run: Callable[[int, int], Pair], alone: tuple[int, int], beside: tuple[int, int], rounds: int
) -> Share:
    pairs = [(run(*alone), run(*beside)) for _ in range(rounds)]
    of_product = alone[1] == 0
    timed = [[p.product_s if of_product else p.exchange_s for p in pair] for pair in pairs]
    late = [(p.product_s > p.exchange_s) == of_product for _, p in pairs]
    return Share(
        alone_s=slowest([alone_s for alone_s, _ in timed]),
        beside_s=slowest([beside_s for _, beside_s in timed]),
        covered=1.0 - sum(slowest([float(one) for one in late])) / rounds,
    )


def judge_shares(
    product: str, budget: int, least: float, record: Record, found: list[dict[str, Share]]
) -> None:
    """Record a row; what was not beside the other work to its end, or is no number, fails."""
    what, shares = f"{product}, {said_of(budget)}", found[0]  # all ranks have the slowest's
    row: dict[str, Any] = {"product": product, "budget": said_of(budget)}
    for name, share in shares.items():
        more = ratio(share.beside_s, share.alone_s)
        row[name] = more.median - 1.0
        row[f"{name}_low"], row[f"{name}_high"] = more.low - 1.0, more.high - 1.0
        row[f"{name}_alone_us"] = 1e6 * statistics.median(share.alone_s)
        why = f"{name}: the other work lasted longer in {share.covered:.0%} of the rounds"
        record.expect(share.covered >= least, what, why)
        record.expect(math.isfinite(more.median), what, f"{name} is {more.median}")
    record.add_row(row)
    told = ", ".join(f"{name} {row[name]:.2f}" for name in shares)
    say(f"beside: {what}: {told}")


def of_own_budget(section: Mapping[str, Any]) -> dict[str, float]:
    """Return the two numbers with the backend's own CTAs, of grouped products: what experts are."""
    for row in section.get("rows", []):
        if (row["product"], row["budget"]) == (PRODUCTS[-1], said_of(OWN)):
            return {name: max(row[name], 0.0) for name in ("contention", "overlap_slowdown")}
    raise LookupError("section beside")
