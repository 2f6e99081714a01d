"""The predicted time of a region's products in eight bits, beside that of the same in bfloat16."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moe_compile.cost.rates import Rates
from moe_compile.cost.region_work import RegionWork, Work
from moe_compile.plan.candidates import Candidate
from moe_compile.plan.region_tasks import price_us
from moe_compile.plan.row_folds import folds_of, unpacked_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductTimes:
    """Microseconds of the forward and the backward, where these are not divided into chunks."""

    products_us: float
    quantising_us: float
    """Time to quantise their rows and weights."""
    as_model_us: float
    """Time of the same products on operands of two bytes."""
    gain: float | None = None
    """Share of the time of the layer that they save, exchanges hidden as planned; None for rows in
    two hops, and for gathered tokens."""

    def __str__(self) -> str:
        """Return it as a clause of a report."""
        said = (
            f"{self.products_us / 1e3:.2f} ms and {self.quantising_us / 1e3:.2f} ms to quantise, "
            f"{self.as_model_us / 1e3:.2f} ms in bfloat16"
        )
        if self.gain is None:
            return said
        changed = "less" if self.gain >= 0 else "more"
        return f"{said}, {abs(self.gain):.1%} {changed} time for the layer"


def product_times(work: RegionWork, rates: Rates, candidate: Candidate) -> ProductTimes:
    """Return the times of all products in eight bits in the work around a region, as it will run.

    Time to quantise is that of the kernels, of rows that feed a product as they came too, and that
    to unpack these for gradients of weights.
    """
    products, quantising_us = list[Work](), 0.0
    for phase in work.phases:
        folds = folds_of(work, phase, candidate)
        for index, one in enumerate(phase):
            if one.product and one.product.in_eight_bits:
                products.append(one)
            elif one.quantises:
                quantising_us += _us(folds.left_of(index, one), rates)
    if unpacked := unpacked_bytes(work, candidate):
        quantising_us += rates.memory_us(unpacked)
    return ProductTimes(
        products_us=sum(_us(one, rates) for one in products),
        quantising_us=quantising_us,
        as_model_us=sum(_us(_in_bfloat16(one), rates) for one in products),
        gain=_gain(work, rates, candidate),
    )


def _gain(work: RegionWork, rates: Rates, candidate: Candidate) -> float | None:
    """Return the share of the layer's time that products in eight bits save."""
    if candidate.nodes != "off" or candidate.dispatch == "all_gather":
        return None
    was = price_us(as_in_model(work), candidate, rates)
    return 1.0 - price_us(work, candidate, rates) / was


def as_in_model(work: RegionWork) -> RegionWork:
    """Return the same work with products in bfloat16 and nothing quantised for them."""

    def in_model(one: Work) -> Work:
        if one.quantises:
            return replace(one, nbytes=0.0, weight_bytes=0.0, num_kernels=0.0, takes_messages=False)
        return _in_bfloat16(one) if one.product and one.product.in_eight_bits else one

    forward, backward = (tuple(map(in_model, phase)) for phase in work.phases)
    return replace(work, forward=forward, backward=backward)


def _us(one: Work, rates: Rates) -> float:
    nbytes = one.nbytes + one.weight_bytes
    return rates.compute_us(one.operations, nbytes, one.num_kernels, one.product)


def _in_bfloat16(one: Work) -> Work:
    """Return a product whose operands, not its result, have twice the bytes."""
    assert one.product is not None
    read = one.nbytes - one.written
    return replace(
        one,
        product=replace(one.product, in_eight_bits=False),
        nbytes=one.written + 2.0 * read,
        weight_bytes=2.0 * one.weight_bytes,
    )
