"""The room for rows that travel without a read by the host, chosen by price.

Contract
    Pure functions of prices and of the room that past steps needed: ranks that are given the same
    choose the same.

Pseudo-code
    price of a room = predicted time with this room
                    + probability that a step has no room x predicted time of the step with reads
    probability = (past steps that needed more + 1) / (past steps + 1)
    take the room of the least price, if it saves more than 1 % over the room at hand

The probability is an upper bound if past steps and the next one are alike: each of them is then as
likely as any other to need the most (order statistics of exchangeable numbers).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moe_compile.config import ROOMS
from moe_compile.cost.rates import Rates
from moe_compile.cost.region_work import RegionWork, Room
from moe_compile.plan.candidates import Candidate
from moe_compile.plan.choose_plan import WORTH
from moe_compile.plan.region_tasks import price_us
from moe_compile.runtime.rerun import RoomTimes


def room_times(work: RegionWork, rooms: Sequence[Room], num_chunks: int, rates: Rates) -> RoomTimes:
    """Return the predicted times of the layer around a region in chunks of tokens.

    `rooms` has the buffers for each of `ROOMS`.
    """
    candidate = Candidate(num_chunks=num_chunks, chunk_by="tokens" if num_chunks > 1 else "experts")
    return RoomTimes(
        us=tuple(price_us(replace(work, room=room), candidate, rates) for room in rooms),
        reads_us=price_us(replace(work, room=None), candidate, rates),
    )


def total(times: Sequence[RoomTimes | None]) -> RoomTimes | None:
    """Return the sum of times; None without any, or where some are not known."""
    known = [one for one in times if one is not None]
    if not known or len(known) < len(times):
        return None
    us = tuple(sum(each) for each in zip(*(one.us for one in known), strict=True))
    return RoomTimes(us=us, reads_us=sum(one.reads_us for one in known))


@dataclass(frozen=True, kw_only=True, slots=True)
class PricedRoom:
    """A room and its price."""

    room: float
    num_short: int
    """Past steps whose rows have no room in it."""
    us: float
    """Price of a step: its predicted time, and its share of the time of steps that run again."""


def price_rooms(needed: Sequence[float], times: RoomTimes) -> list[PricedRoom]:
    """Return the price of each of `ROOMS`; `needed` is the room that each past step needed."""
    found = []
    for room, us in zip(ROOMS, times.us, strict=True):
        num_short = sum(need > room for need in needed)
        share = (num_short + 1) / (len(needed) + 1)
        found.append(PricedRoom(room=room, num_short=num_short, us=us + share * times.reads_us))
    return found


def choose_room(
    needed: Sequence[float], times: RoomTimes, now: float
) -> tuple[PricedRoom, PricedRoom]:
    """Return the room to run with, and the room `now`, one of `ROOMS`, by its price."""
    priced = price_rooms(needed, times)
    (here,) = (one for one in priced if one.room == now)
    best = min(priced, key=lambda one: one.us)
    return best if best.us < (1.0 - WORTH) * here.us else here, here
