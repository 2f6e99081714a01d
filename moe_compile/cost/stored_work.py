"""Work of layers that were traced before: in this process, and beside Inductor's cache.

Contract
    What is found is what tracing would give: entries are named by a hash of the layer's program,
    torch's version and every source file of megamoe, and a layer that calls what a user has
    written is not kept on disk. So no decision depends on the cache.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any, Final

from moe_compile.cost.layer_program import LayerProgram
from moe_compile.cost.region_work import Work
from moe_compile.cost.traced_work import TracedWork, trace_work
from moe_compile.source_hash import hash_of_sources
from moe_compile.torch_quirks.cache_files import keep, kept_path

_KNOWN: Final[dict[str, tuple[TracedWork, ...]]] = {}
"""By the text of a program; a process compiles few distinct layers."""


def work_of(program: LayerProgram) -> tuple[TracedWork, ...]:
    """Return the work of the forward, and of the backward where there is one."""
    name = hashlib.sha256(f"{program.text} {hash_of_sources()}".encode()).hexdigest()
    if name not in _KNOWN:
        path = kept_path(f"{name}.json") if program.is_of_torch else None
        found = None if path is None else _load(path)
        _KNOWN[name] = found or trace_work(program)
        if found is None and path is not None:
            keep(path, json.dumps([dataclasses.asdict(phase) for phase in _KNOWN[name]]))
    return _KNOWN[name]


def forget() -> None:
    """Forget what this process has traced; what is on disk stays."""
    _KNOWN.clear()


def _load(path: Path) -> tuple[TracedWork, ...] | None:
    """Return an entry; None where there is none, or what is there is none of ours."""
    try:
        return tuple(map(_traced, json.loads(path.read_text()))) or None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _traced(phase: dict[str, Any]) -> TracedWork:
    return TracedWork(tuple(map(_work, phase["work"])), tuple(phase["origins"]))


def _work(fields: dict[str, Any]) -> Work:
    return Work(**{**fields, "needs": tuple(fields["needs"])})
