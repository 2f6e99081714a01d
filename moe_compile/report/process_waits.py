"""The measured and the predicted waits of this process."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch.distributed as dist

from moe_compile.report.waits import CollectiveWait, Name, RankWaits, predicted_waits_ms, waits_of
from moe_compile.runtime.launch_records import executed_records
from moe_compile.runtime.measured_waits import WAIT_TIMES, parts_of
from moe_compile.schedule.timeline import kept_timeline


def take_waits(steps: int) -> RankWaits:
    """Return what was measured since the last call, in so many steps."""
    found = {parts_of(name): (w.seconds, w.runs) for name, w in WAIT_TIMES.take().items()}
    return RankWaits(rank=_rank(), steps=steps, waits=found)


def measured_waits(steps: int) -> list[CollectiveWait]:
    """Return the same, collective by collective, the longest wait of a step first."""
    return waits_of(predictions(), [take_waits(steps)])


def predictions() -> Mapping[Name, float]:
    """Return the predicted waits of the graphs that ran so far, milliseconds."""
    return _predictions(len(executed_records()))


@functools.lru_cache(maxsize=1)
def _predictions(num_graphs: int) -> Mapping[Name, float]:
    graphs = [
        {
            "where": record["site"],
            "phase": record["phase"],
            "timeline": kept_timeline(record["timeline"]),
        }
        for record in executed_records()[:num_graphs]
    ]
    return predicted_waits_ms({"graphs": graphs})


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
