"""Passes that failed while a program was compiled that now comes from a cache.

No pass of ours runs on what comes from AOTAutograd's cache: the code is as it was made. Which
passes failed then is for the report, and for other ranks, which may have compiled it themselves.

Contract
    Notes are kept beside Inductor's caches, by what identifies the passes in their keys. Programs
    of one place, as with other numbers of tokens, share theirs: a rank that is told too much
    differs from the others, and all run the program as it was written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from moe_compile.journal.entries import Dropped
from moe_compile.journal.reasons import Reason
from moe_compile.kept_files import keep, kept_path

SUFFIX: Final = ".json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A pass that raised on one graph."""

    graph: str
    """`joint`, `forward` or `backward`."""
    pass_name: str
    detail: str
    """What it raised."""
    is_late: bool
    """Whether the program ran already, as it may have when its backward graph is compiled: ranks
    compare what is known before."""

    @property
    def as_dropped(self) -> Dropped:
        """Return it as the journal has it."""
        return Dropped(self.pass_name, Reason.FAILED, self.detail)


def note(identity: str, failure: Failure) -> None:
    """Keep a failure of the passes that `identity` stands for."""
    folder = _folder(identity)
    if folder is not None:
        fields = {name: getattr(failure, name) for name in Failure.__slots__}
        keep(folder / f"{failure.graph}-{failure.pass_name}{SUFFIX}", json.dumps(fields))


def noted(identity: str) -> list[Failure]:
    """Return the failures kept of these passes, sorted by graph and pass."""
    folder = _folder(identity)
    paths = sorted(folder.glob(f"*{SUFFIX}")) if folder is not None else []
    return [failure for path in paths for failure in _read(path)]


def _folder(identity: str) -> Path | None:
    return kept_path(f"dropped/{hashlib.sha256(identity.encode()).hexdigest()}")


def _read(path: Path) -> Iterator[Failure]:
    """Return what is noted in a file; nothing of one that is not ours."""
    try:
        yield Failure(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return
