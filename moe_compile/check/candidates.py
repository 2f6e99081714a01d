"""The ways to run a job that the planner ranks: what options ask for them, and their prices.

Contract
    The planner is asked with all options "auto" that a race may change, on what `numerics` allows;
    a number format that the job names stays. A way is the options that differ from the job's own.
    A way's price is the sum over the regions that the planner decided on, of all ranks; where it is
    none of a region's candidates, that region counts as it is.
    Of ways that differ in number formats alone the fastest comes first, the others after all ways
    to divide the work: a wrong price may move these past each other.
    Where the planner has no price (`equal_tokens` is not promised) ways are the numbers that it
    would try, without one.
    The planner's own choice is the last way: regions of a job may have different ones.
    Chunks of experts by load are told beside even ones of the same number: how experts are chosen
    in this job no price knows. So are parts of the batch, whose price is that of a whole program.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from moe_compile.choices import FREE
from moe_compile.config import MegaMoEConfig
from moe_compile.parts_by_price import NUMBERS
from moe_compile.plan.candidates import CHUNKS

MOST: Final = 12
"""Ways that are told at most, besides parts of the batch: each is traced once."""
WIRES: Final = ("dispatch_wire", "combine_wire")
Options = Mapping[str, Any]


def freed(config: MegaMoEConfig) -> dict[str, Any]:
    """Return the options with which the planner ranks all that a race may change."""
    named = [wire for wire in WIRES if getattr(config, wire) not in ("same", "auto")]
    free = {**FREE, "chunk_by": "auto", "hop_slices": "auto", "batch_parts": 1}
    free["chunk_edges"] = "auto" if config.routing_skew else "even"
    return {name: value for name, value in free.items() if name not in named}


def found_in(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a report by `freed` options says of candidates, for `ways`."""
    regions = [*report["regions"], *report["attention"]]
    decisions = [one["decision"] for one in regions if one.get("decision")]
    return {
        "ranked": [one["ranked"] for one in decisions],
        "as_it_is_us": [one["as_it_is_us"] for one in decisions],
        "experts": [one["num_local_experts"] for one in report["regions"]],
    }


def ways(found: Sequence[Mapping[str, Any]], config: MegaMoEConfig) -> list[dict[str, Any]]:
    """Return the options of each way over the job's own, the fastest by the planner's price first,
    as `spread` has them.

    `found` has what each rank found. The job as asked is not among them.
    """
    priced = [options for _, options in sorted(_priced(found), key=lambda one: one[0])]
    options = spread(priced)[:MOST] or [*_unpriced(found, config)]
    own = {name: value for name, value in freed(config).items() if value == "auto"}
    of_a_part = own if priced else {"chunks": "auto"}
    in_parts = _in_parts(config, of_a_part)
    all_ways = [*options, *_by_load(options), *in_parts, *([own] if priced else [])]
    told = [over(config, one) for one in all_ways]
    return [one for place, one in enumerate(told) if one and one not in told[:place]]


def spread(ranked: Sequence[Options]) -> list[Options]:
    """Return the first of all options that differ in more than number formats, then the others."""
    first: dict[str, Options] = {}
    for one in ranked:
        first.setdefault(repr({k: v for k, v in one.items() if k not in WIRES}), one)
    return [*first.values(), *(one for one in ranked if one not in first.values())]


def _priced(found: Sequence[Mapping[str, Any]]) -> Iterator[tuple[float, Options]]:
    """Yield price and options of each combination of candidates of experts and of attention."""
    kinds: tuple[list[Any], list[Any]] = [], []
    for one in found:
        for ranked, as_it_is in zip(one["ranked"], one["as_it_is_us"], strict=True):
            is_attention = "attention_chunks" in ranked[0]["options"]
            kinds[is_attention].append((as_it_is, ranked))
    summed = [_summed(decisions) for decisions in kinds if decisions]
    for pairs in itertools.product(*summed) if summed else ():
        yield sum(us for us, _ in pairs), {k: v for _, one in pairs for k, v in one.items()}


def _summed(decisions: Sequence[tuple[float, Any]]) -> list[tuple[float, Options]]:
    """Return the price of each candidate, over all regions of a kind, the fastest first."""
    names: dict[str, Options] = {}
    prices = [
        {repr(one["options"]): one["predicted_us"] for one in ranked} for _, ranked in decisions
    ]
    for _, ranked in decisions:
        names |= {repr(one["options"]): one["options"] for one in ranked}
    whole = [as_it_is for as_it_is, _ in decisions]
    us = {
        name: sum(own.get(name, us) for own, us in zip(prices, whole, strict=True))
        for name in names
    }
    ranked = spread([names[name] for name in sorted(us, key=lambda name: us[name])])[:MOST]
    return [(us[repr(options)], options) for options in ranked]


def _unpriced(found: Sequence[Mapping[str, Any]], config: MegaMoEConfig) -> Iterator[Options]:
    """Yield the numbers of chunks, and the wires, that the planner tries where it has a price."""
    most = max((number for one in found for number in one["experts"]), default=1)
    numbers = [number for number in CHUNKS if number <= most]
    yield from ({"chunks": number, "chunk_by": "experts"} for number in numbers)
    if config.allows("bounded"):
        yield from ({"chunks": number, "chunk_by": "tokens"} for number in CHUNKS if number > 1)
    if config.allows("lossy"):
        yield dict.fromkeys(WIRES, "fp8")
    yield {"attention_chunks": 2}


def _by_load(options: Sequence[Options]) -> Iterator[Options]:
    """Yield the fastest way in chunks of experts with edges by load."""
    for one in options:
        flat = one.get("nodes", "off") == "off" and one.get("dispatch") != "all_gather"
        if flat and one.get("chunks", 1) > 1 and one["chunk_by"] == "experts":
            yield {**one, "chunk_edges": "load"}
            return


def _in_parts(config: MegaMoEConfig, of_a_part: Options) -> Iterator[Options]:
    """Yield the programs in parts that `batch_parts` = "auto" prices: each part as `of_a_part`."""
    if config.allows("bounded"):
        for number in NUMBERS:
            yield {**of_a_part, "batch_parts": number}
            yield {**of_a_part, "batch_parts": number, "chunks": 1}


def over(config: MegaMoEConfig, options: Options) -> dict[str, Any]:
    """Return the options that differ from the job's own."""
    is_default = config.chunk_by == "auto" and options.get("chunk_by") == "experts"
    told = {name: value for name, value in options.items() if getattr(config, name) != value}
    if is_default and told.get("chunks") != "auto":
        told.pop("chunk_by", None)  # "auto" is that where the number is named
    return told
