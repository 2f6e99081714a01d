"""How long collectives are waited for in the steps that torchtitan logs, on one rank.

Contract
    Measured are the steps that are logged, the first one of a process left out, as it compiles;
    nothing of validation. Keys end in their unit.
    At the end a rank leaves what it measured beside its errors, in the folder that torchrun gives
    it; `megamoe train` reads those of all ranks, and no rank waits for another.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from moe_compile.report.process_waits import predictions, take_waits
from moe_compile.report.waits import Name
from moe_compile.runtime.measured_waits import WAIT_TIMES

ERROR_FILE: Final = "TORCHELASTIC_ERROR_FILE"
"""Variable by which torchrun names a rank's file of errors."""


class StepWaits:
    """The waits of this rank's measured steps."""

    def __init__(self) -> None:
        """Measure nothing until a step is announced."""
        WAIT_TIMES.is_on = False
        self._since = 0
        """Steps measured since the last `metrics`."""
        take_waits(0)
        self._all = take_waits(0)

    def end_step(self, *, is_next_measured: bool) -> None:
        """Note that a step is over, and whether the next one is measured."""
        self._since += WAIT_TIMES.is_on
        WAIT_TIMES.is_on = is_next_measured

    def forget(self) -> None:
        """Forget what was measured since the last `metrics`."""
        take_waits(0)

    def metrics(self) -> dict[str, float]:
        """Return the waits of steps measured since the last call; {} where there are none."""
        new, self._since = take_waits(self._since), 0
        self._all = new.and_those_of(self._all)
        if not new.steps or not new.waits:
            return {}
        return {
            "megamoe/measured_waits_ms_per_step": new.ms_per_step(),
            "megamoe/predicted_waits_ms_per_step": new.predicted_ms_per_step(predictions()),
            **{_key(name): 1e3 * s / runs for name, (s, runs) in sorted(new.waits.items())},
        }

    def leave(self, environment: Mapping[str, str] = os.environ) -> None:
        """Write all that was measured, where torchrun has a folder for this rank."""
        WAIT_TIMES.is_on = False
        if errors := environment.get(ERROR_FILE):
            self._all.write(Path(errors).parent)


def _key(name: Name) -> str:
    site, phase, node = name
    return f"megamoe/waits/{site.partition(' in ')[0]}/{phase}/{node}_ms"
