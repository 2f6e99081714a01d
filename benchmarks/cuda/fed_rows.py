"""What generated code does to rows between the wait for them and the product that multiplies them.

Contract
    Rows are what an all-to-all receives as a matrix. Of the code behind its wait each kernel counts
    that reads the rows, or what another such kernel made of them, up to the first grouped product
    that reads either. Rows that no grouped product reads are left out, as those of a combine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from benchmarks.cuda.amounts import bytes_in, nbytes_of
from benchmarks.cuda.calls import Call, Kind, Tensor, Wrapper


@dataclass(frozen=True, kw_only=True, slots=True)
class FedRows:
    """The rows of one exchange, on their way to a product."""

    received_bytes: float
    read_bytes: float
    """Bytes that kernels on the way read."""
    written_bytes: float
    num_kernels: int


def fed_rows(wrapper: Wrapper, sizes: Mapping[str, int]) -> Iterator[FedRows]:
    """Return what is done to the rows of each exchange that reach a product, in order of waits."""
    received: dict[str, Tensor] = {}
    for place, call in enumerate(wrapper.calls):
        if call.kind is Kind.LAUNCH and call.splits is not None:
            received |= {t.storage: t for t in call.writes if t.shape and len(t.shape) == 2}
        elif call.kind is Kind.WAIT:
            for rows in (received.pop(t.storage) for t in call.reads if t.storage in received):
                if (way := _way(wrapper.calls[place + 1 :], rows)) is not None:
                    yield _counted(way, rows, sizes)


def _way(calls: list[Call], rows: Tensor) -> list[Call] | None:
    """Return the kernels between rows and the product that reads them; None if there is none."""
    made, way = {rows.storage}, list[Call]()
    for call in calls:
        if call.kind not in (Kind.TRITON, Kind.EXTERN):
            continue
        written = {t.storage for t in call.writes}
        if made.isdisjoint(t.storage for t in call.reads):
            made -= written  # memory that another result has taken over
            continue
        if "grouped_mm" in call.name:
            return way
        made |= written
        way.append(call)
    return None


def _counted(way: list[Call], rows: Tensor, sizes: Mapping[str, int]) -> FedRows:
    return FedRows(
        received_bytes=nbytes_of(rows, sizes),
        read_bytes=sum(bytes_in(call, tensor, sizes) for call in way for tensor in call.reads),
        written_bytes=sum(bytes_in(call, tensor, sizes) for call in way for tensor in call.writes),
        num_kernels=len(way),
    )
