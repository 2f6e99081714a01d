"""Grouped products for which the host waits on this GPU: said once, and no number by "auto".

Contract
    Follows from the program and the kind of GPU. Ranks with other GPUs may decide otherwise; they
    then run the program as it is written, as for any difference between plans.
"""

from __future__ import annotations

import functools
import logging
from typing import Final

from moe_compile.graph.query import called_name, tensor_of
from moe_compile.hardware.chip_limits import waits_in_products
from moe_compile.regions.regions import MoERegion

LOG: Final = logging.getLogger(__name__)
GROUPED: Final = frozenset({"_grouped_mm", "grouped_mm"})


def products_wait(region: MoERegion) -> bool:
    """Whether the experts of `region` have a product for which the host waits; then says so."""
    products = [node for node in region.row_side if called_name(node) in GROUPED]
    values = [value for node in products if (value := tensor_of(node)) is not None]
    if not any(waits_in_products(value.device) for value in values):
        return False
    _warn()
    return True


@functools.cache
def _warn() -> None:
    LOG.warning(
        "megamoe: torch has no kernel of grouped products (torch._grouped_mm) for this GPU: for "
        "each the host waits for the device and copies offsets from it, so that less is launched "
        "ahead, and less hidden, than predicted. To do: compute experts one after another on "
        "rows.split(sizes), as torchtitan's use_grouped_mm = False does"
    )
