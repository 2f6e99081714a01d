"""One warning in a process that asked for megamoe and in which nothing was rewritten.

Contract
    It comes at the end of the second call of compiled code, counted by function of the user's;
    where calls are fewer, when Python ends. From then on a call costs a look at one attribute.
    It names the first reason, as reports have it.
"""

from __future__ import annotations

import atexit
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import torch._dynamo.utils as dynamo_utils
from torch._guards import CompileContext

from moe_compile.report.explanation_text import why_nothing_was_rewritten
from moe_compile.report.process_report import REPORT, ProcessReport

LOG: Final = logging.getLogger(__name__)
CALLS: Final = 2
"""Calls of each function: after the first, Dynamo may still compile code behind a break."""


class Watch:
    """Counts calls of compiled code until all of it has run twice."""

    def __init__(self, report: ProcessReport) -> None:
        """Watch the compilations in `report`."""
        self._report = report
        self._calls: Counter[Any] = Counter()
        self._is_over = False

    def counted(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Return `compiled`, its calls counted."""
        if self._is_over:
            return compiled
        compiling = CompileContext.current_compile_id()
        function = compiling.frame_id if compiling is not None else None
        if function in self._calls and (compiling is None or not compiling.frame_compile_id):
            self._calls.clear()  # Dynamo was reset, and numbers functions anew
        self._calls[function] += 0

        def run(*arguments: Any) -> Any:
            result = compiled(*arguments)
            if not self._is_over:
                self._note(function)
            return result

        return run

    def _note(self, function: Any) -> None:
        self._calls[function] += 1
        if min(self._calls.values()) >= CALLS:
            self._say()

    def _say(self) -> None:
        self._is_over = True
        if why := why_nothing_was_rewritten(self._report.as_dict()):
            LOG.warning("megamoe: nothing was rewritten in this process so far: %s", why)

    def at_exit(self) -> None:
        """Warn as the process ends, if it had anything compiled, or tried to."""
        tried = dynamo_utils.counters["frames"]["total"]
        given = dynamo_utils.counters["stats"]["unique_graphs"]  # to any backend
        if not self._is_over and (self._report.num_graphs or (tried and not given)):
            self._say()


WATCH: Final = Watch(REPORT)
atexit.register(WATCH.at_exit)
