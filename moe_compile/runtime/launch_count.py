"""How many collectives this process launched on a group, compiled or not, and which the last were.

Contract
    Ranks of a group launch alike, so that ranks which are at one place of their programs have one
    count. It is torch's own: asking takes a microsecond, and talks to nobody.
    gloo's counter has messages between two ranks in it, which need not be alike. What torch's
    flight recorder kept has collectives alone: `exact` and `recent` read that, in some ten
    milliseconds, and are asked where something new runs, ranks seem to differ, or nothing moves.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist

GLOO: Final = "gloo"
"""The backend whose counter has sends and receives in it."""
READERS: Final = {GLOO: "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
"""What reads the flight recorder of a backend; not in every torch."""


class LaunchCount:
    """The counter of one group."""

    def __init__(self, group: str) -> None:
        """Find the counter of `group`."""
        self._group = group
        process_group = dist.distributed_c10d._resolve_process_group(group)
        backends = [process_group._get_backend(device) for device in process_group._device_types]
        apart = list({id(backend): backend for backend in backends}.values())
        # none: a group written in Python, which counts nothing
        self._read = apart[0]._get_sequence_number_for_group if len(apart) == 1 else None
        self._name = str(apart[0].name()) if len(apart) == 1 else ""
        reader = READERS.get(self._name, "")
        self._recorder: Callable[[], bytes] | None = getattr(
            torch._C._distributed_c10d, reader, None
        )
        self._known: tuple[int, int | None] = 0, 0

    def at_most(self) -> int | None:
        """Return the number of collectives, on some backends more; None where torch counts none.

        None too for a group of several backends: their launches have no common order.
        """
        try:
            return self._read() if self._read is not None else None
        except RuntimeError:
            return None

    def exact(self, *, is_between_launches: bool = True) -> int | None:
        """Return the number of collectives; None where it cannot be known.

        Within a launch the counter is ahead of the recorder. A thread that may look then gets one
        too few, which is not kept.
        """
        number = self.at_most()
        if not number or self._name != GLOO:
            return number
        known = self._known
        if known[0] != number:
            known = number, max(self.recent(), default=None)
        if is_between_launches:
            self._known = known
        return known[1]

    def recent(self) -> dict[int, str]:
        """Return number -> operator and number formats of the last collectives, as recorded."""
        try:
            entries = json.loads(self._recorder())["entries"] if self._recorder else []
            found: dict[int, str] = {}
            for entry in (e for e in entries if self._is_ours(e)):
                number = entry["collective_seq_id"]
                if number < max(found, default=0):  # before, another group had this one's name
                    found = {}
                found[number] = _said(entry)
        except (KeyError, RuntimeError, ValueError):  # it is torch's own business what it records
            return {}
        return found if max(found, default=0) <= (self.at_most() or 0) else {}

    def _is_ours(self, entry: dict[str, Any]) -> bool:
        return entry["process_group"][0] == self._group and not entry["is_p2p"]


def _said(entry: dict[str, Any]) -> str:
    """Return what a collective is on every rank: a rank that only receives has no number format."""
    operator = entry["profiling_name"].rpartition(":")[2].replace("to_allv", "to_all")
    is_alike = operator.startswith(("all", "reduce_scatter"))
    return f"{operator}({', '.join(entry['input_dtypes'])})" if is_alike else operator
