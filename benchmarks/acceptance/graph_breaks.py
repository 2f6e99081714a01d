"""Where Dynamo's graphs end and why, from its own log."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from typing import Final

import torch

LOGGER: Final = "torch._dynamo.symbolic_convert.__graph_breaks"
BREAK: Final = re.compile(r"in user code at (\S+:\d+)\s+Graph Break Reason: (.*)", re.DOTALL)
GENERAL: Final = ("Encountered graph break", "Failed to handle graph break")
"""Reasons that say what Dynamo does about it; the next paragraph says what is in its way."""


@contextlib.contextmanager
def graph_breaks() -> Iterator[list[tuple[str, str]]]:
    """Collect the place and the reason of every break while this is open, in order."""
    found: list[tuple[str, str]] = []
    handler = _Breaks(found)
    torch._logging.set_logs(graph_breaks=True)
    logging.getLogger(LOGGER).addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger(LOGGER).removeHandler(handler)


class _Breaks(logging.Handler):
    def __init__(self, found: list[tuple[str, str]]) -> None:
        super().__init__()
        self._found = found

    def emit(self, record: logging.LogRecord) -> None:
        if match := BREAK.search(record.getMessage()):
            self._found.append((match[1], reason_of(match[2])))


def reason_of(text: str) -> str:
    """Return what of a break's reason says what stands in the way, on one line."""
    paragraphs = [" ".join(p.split()) for p in re.split(r"\n\s*\n|\n\s*Hint:", text) if p.strip()]
    telling = [p for p in paragraphs if not p.startswith(GENERAL)]
    return (telling or paragraphs or [""])[0]
