"""What generated code does to the buffers of a collective or a copy between launch and wait.

Contract
    A buffer that is received into may not be read, written, given up or returned until it was
    waited for; one that is sent may not be written or given up. A captured part reads all that it
    is given: a replay may copy it, and its name is then the copy's, for which nothing waits.
    No buffer is allocated twice in one run: by parts that each write a share of it, say, of which
    the last alone would be left.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.cuda.calls import Call, Kind, Wrapper


def faults(wrapper: Wrapper) -> Iterator[str]:
    """Return what the code does to a buffer in flight, one line each."""
    yield from (f"{name} is allocated more than once" for name in wrapper.allocated_again)
    yield from (f"a captured part is given {name}, a list" for name in wrapper.lists_given)
    in_flight: dict[str, Call] = {}
    """Storage received into -> its launch."""
    for call in wrapper.calls:
        if call.kind in (Kind.WAIT, Kind.COPY_WAIT):
            for tensor in call.reads:
                in_flight.pop(tensor.storage, None)
            continue
        for received, launch in in_flight.items():
            yield from _touched(call, received, launch)
        if call.kind in (Kind.LAUNCH, Kind.COPY):
            in_flight.update((t.storage, call) for t in call.writes)
    for received, launch in in_flight.items():
        yield f"line {launch.line}: {received} is never waited for"


def _touched(call: Call, received: str, launch: Call) -> Iterator[str]:
    read, written = ({t.storage for t in tensors} for tensors in (call.reads, call.writes))
    sent = {t.storage for t in launch.reads} - {received}
    given_up = read if call.kind is Kind.FREE else set()
    by = f"by the {launch.name} of line {launch.line}"
    if received in read | written:
        yield f"line {call.line}: {call.name} touches {received}, which is received into {by}"
    for storage in sorted(sent & (written | given_up)):
        yield f"line {call.line}: {call.name} touches {storage}, which is sent {by}"
