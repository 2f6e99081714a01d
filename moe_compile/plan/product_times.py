"""The predicted time of a region's products in eight bits, beside that of the same in bfloat16."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moe_compile.cost.rates import Rates
from moe_compile.cost.region_work import RegionWork, Work


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductTimes:
    """Microseconds of the forward and the backward, where these are not divided into chunks."""

    products_us: float
    quantising_us: float
    """Time to quantise their rows and weights."""
    as_model_us: float
    """Time of the same products on operands of two bytes."""

    def __str__(self) -> str:
        """Return it as a clause of a report."""
        return (
            f"{self.products_us / 1e3:.2f} ms and {self.quantising_us / 1e3:.2f} ms to quantise, "
            f"{self.as_model_us / 1e3:.2f} ms in bfloat16"
        )


def product_times(work: RegionWork, rates: Rates) -> ProductTimes:
    """Return the times of all products in eight bits in the work around a region."""
    everything = [one for phase in work.phases for one in phase]
    products = [one for one in everything if one.product and one.product.in_eight_bits]
    return ProductTimes(
        products_us=sum(_us(one, rates) for one in products),
        quantising_us=sum(_us(one, rates) for one in everything if one.quantises),
        as_model_us=sum(_us(_in_bfloat16(one), rates) for one in products),
    )


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
