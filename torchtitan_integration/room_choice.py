"""`row_room = "auto"` in a job: the room for rows, chosen by price from the steps so far.

Contract
    A choice follows from numbers that all ranks have: the room that each step needed, of which the
    largest of all ranks is agreed on in each step, and predicted times, agreed on as the choice is
    made. It is made after 16 steps, then after 32 more, then 64, up to every 512; and after four
    steps that ran again. It looks at the steps since the last choice, so that it follows a routing
    that changes.
    A new room compiles the graphs again as the next step begins. No bit follows from the room,
    unless the planner chooses other chunks of tokens with it.
    Rank 0 writes the choice into the job's folder. A job that goes on, or begins anew in the same
    folder, begins with that room: rank 0 reads it and tells the others.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from moe_compile.config import ROOM_AT_FIRST, ROOMS
from moe_compile.plan.row_rooms import choose_room
from moe_compile.runtime.rerun import RERUN

LOG: Final = logging.getLogger(__name__)
FILE: Final = "row_room.json"
"""Name of the file in the job's folder."""
FIRST: Final = 16
"""Steps before the first choice: with as many, a room that had room for all of them is taken to be
too small in one step of 17."""
MOST: Final = 512
"""The most steps from a choice to the next."""
AGAIN: Final = 4
"""Steps that ran again before the next choice is made early."""


class RoomChoice:
    """The choices of one job."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        """Begin with the room of an earlier run in the job's `folder`. All ranks do so together."""
        self._path, self._device = folder / FILE, device
        self._needed: list[float] = []
        self._num_again = 0
        RERUN.room, self._wait = self._told()
        LOG.info('megamoe: row_room = "auto": begins with room %g', RERUN.room)

    def _told(self) -> tuple[float, int]:
        """Return the room to begin with, and the steps until the next choice, as rank 0 reads."""
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        told = torch.tensor(self._read() if is_first else (0, 0), dtype=torch.int64)
        if dist.is_initialized():
            told = told.to(self._device)
            dist.broadcast(told, 0)
        place, wait = told.tolist()
        return ROOMS[place], wait

    def _read(self) -> tuple[int, int]:
        """Return the place in `ROOMS` of the room that the file has, and the steps to wait."""
        try:
            found = json.loads(self._path.read_text())
            place, wait = ROOMS.index(found["room"]), int(found["steps_to_next_choice"])
        except FileNotFoundError:
            return ROOMS.index(ROOM_AT_FIRST), FIRST
        except (OSError, ValueError, KeyError, TypeError) as error:
            LOG.warning(
                'megamoe: row_room = "auto": %s is not read (%s: %s): the room begins with %g. To '
                "do: remove the file",
                self._path, type(error).__name__, error, ROOM_AT_FIRST,
            )  # fmt: skip
            return ROOMS.index(ROOM_AT_FIRST), FIRST
        return place, min(max(wait, 1), MOST)

    def end_step(self, *, ran_again: bool) -> bool:
        """Note a step that is over; return whether the next one needs other programs."""
        self._needed.append(RERUN.needed)
        self._num_again += ran_again
        if len(self._needed) < self._wait and self._num_again < AGAIN:
            return False
        return self._choose()

    def _choose(self) -> bool:
        before, needed = RERUN.room, self._needed
        times = RERUN.agreed_times(self._device)
        is_regular = len(needed) >= self._wait
        self._wait = min(2 * self._wait, MOST) if is_regular else self._wait
        self._needed, self._num_again = [], 0
        if times is None:
            LOG.warning(
                'megamoe: row_room = "auto": the room stays %g, because the layers of some rank '
                "have no predicted time, or none runs without reads (the report says why). The "
                "last %d steps needed %.2f at most. To do: write a number",
                before, len(needed), max(needed),
            )  # fmt: skip
            return False
        chosen, here = choose_room(needed, times, before)
        RERUN.room = chosen.room
        self._write()
        stays = chosen.room == before
        LOG.info(
            'megamoe: row_room = "auto": room %g %s. The last %d steps needed %.2f at most; in %d '
            "of them rows have no room. Predicted for the layers with experts, steps that run "
            "again included: %.2f ms a step%s",
            chosen.room,
            "stays" if stays else f"in place of {before:g}; the graphs are compiled again",
            len(needed),
            max(needed),
            chosen.num_short,
            chosen.us / len(needed) / 1e3,
            "" if stays else f", before {here.us / len(needed) / 1e3:.2f} ms",
        )
        return not stays

    def _write(self) -> None:
        if dist.is_initialized() and dist.get_rank() != 0:
            return
        found = {"room": RERUN.room, "steps_to_next_choice": self._wait}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial = self._path.with_suffix(".partial")
            partial.write_text(json.dumps(found))
            partial.replace(self._path)
        except OSError as error:  # training goes on without it
            LOG.warning("megamoe: the room for rows is not kept in %s: %s", self._path, error)


def begin_anew(trainer: Any) -> None:
    """Have the next step of a trainer compile all graphs: those of a pipeline's stages at once."""
    torch.compiler.reset()
    if (schedule := getattr(trainer, "pp_schedule", None)) is not None:
        schedule.num_graphs = None
