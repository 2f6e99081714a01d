"""What generated code does to rows between the wait for them and the product that multiplies them.

Contract
    Rows are what an all-to-all receives as a matrix. Of the code behind its wait each kernel counts
    that reads the rows, or what another such kernel made of them, up to the first grouped product
    that reads either. Rows that no grouped product reads are left out, as those of a combine.
    Rows of a product in eight bits are quantised apart where an operator does it, or a kernel that
    reads as many elements of sixteen bits as Inductor has written in another kernel.
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


def quantised_apart(wrapper: Wrapper) -> Iterator[str]:
    """Return the calls that quantise rows which another kernel of Inductor's has made."""
    writer: dict[str, Call] = {}
    for call in wrapper.calls:
        if call.name.endswith("quantize_rows") and call.kind is Kind.EXTERN:
            yield call.name
        if call.name.endswith("scaled_grouped_mm"):
            payload = call.reads[0]
            made = writer.get(payload.storage)
            if made is not None and made.kind is Kind.TRITON and _reads_rows(made, payload, writer):
                yield made.name
        writer |= {tensor.storage: call for tensor in call.writes}


def _reads_rows(quantiser: Call, payload: Tensor, writer: Mapping[str, Call]) -> bool:
    """Whether a kernel reads what Inductor has written, of the shape of its payload."""
    return any(
        tensor.itemsize == 2
        and tensor.shape == payload.shape
        and tensor.storage not in {t.storage for t in quantiser.writes}
        and (made := writer.get(tensor.storage)) is not None
        and made.kind is Kind.TRITON
        for tensor in quantiser.reads
    )


def _counted(way: list[Call], rows: Tensor, sizes: Mapping[str, int]) -> FedRows:
    return FedRows(
        received_bytes=nbytes_of(rows, sizes),
        read_bytes=sum(bytes_in(call, tensor, sizes) for call in way for tensor in call.reads),
        written_bytes=sum(bytes_in(call, tensor, sizes) for call in way for tensor in call.writes),
        num_kernels=len(way),
    )
