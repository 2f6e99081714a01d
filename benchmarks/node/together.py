"""Products and exchanges that begin at one time: when the last of each is done.

Contract
    On a GPU both wait for one event behind a head start, in which the host launches all of them, so
    that launching does not count. Times are from that event. On a processor a thread waits for the
    exchanges.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

from moe_compile.testing.process_groups import rank_device

HEAD_START_CYCLES: Final = 10_000_000
"""Some milliseconds."""

Work = Callable[[], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Seconds until the products were done, and the exchanges; infinite where there were none."""

    product_s: float = math.inf
    exchange_s: float = math.inf


def together(product: Work, exchange: Work, num_products: int, num_exchanges: int) -> Pair:
    """Run so many of each; an exchange returns its handle."""
    counts = (num_products, num_exchanges)
    if rank_device().type == "cuda":
        return _on_gpu(product, exchange, *counts)
    return _on_processor(product, exchange, *counts)


def _on_gpu(product: Work, exchange: Work, num_products: int, num_exchanges: int) -> Pair:
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    begin, products_end, exchanges_end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    torch.cuda._sleep(HEAD_START_CYCLES)
    begin.record()
    with torch.cuda.stream(side):
        side.wait_event(begin)
        for handle in [exchange() for _ in range(num_exchanges)]:
            handle.wait()
        exchanges_end.record()
    for _ in range(num_products):
        product()
    products_end.record()
    torch.cuda.synchronize()
    return Pair(
        product_s=begin.elapsed_time(products_end) / 1e3 if num_products else math.inf,
        exchange_s=begin.elapsed_time(exchanges_end) / 1e3 if num_exchanges else math.inf,
    )


def _on_processor(product: Work, exchange: Work, num_products: int, num_exchanges: int) -> Pair:
    dist.barrier()
    began = time.perf_counter()
    handles = [exchange() for _ in range(num_exchanges)]
    ended: list[float] = []

    def wait() -> None:
        for handle in handles:
            handle.wait()
        ended.append(time.perf_counter() - began)

    waits = threading.Thread(target=wait)
    waits.start()
    for _ in range(num_products):
        product()
    product_s = time.perf_counter() - began
    waits.join()
    return Pair(
        product_s=product_s if num_products else math.inf,
        exchange_s=ended[0] if num_exchanges else math.inf,
    )
