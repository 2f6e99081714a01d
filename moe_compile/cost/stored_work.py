"""Work of layers that were traced before: in this process, and beside Inductor's cache.

Contract
    What is found is what tracing would give: entries are named by a hash of the layer's program,
    torch's version and every source file of megamoe, and a layer that calls what a user has
    written is not kept on disk. So no decision depends on the cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any, Final

import torch._inductor.config as inductor_config
from torch._inductor.runtime.cache_dir_utils import cache_dir

from moe_compile.cost.layer_program import LayerProgram
from moe_compile.cost.region_work import Work
from moe_compile.cost.traced_work import TracedWork, trace_work
from moe_compile.source_hash import hash_of_sources

_KNOWN: Final[dict[str, tuple[TracedWork, ...]]] = {}
"""By the text of a program; a process compiles few distinct layers."""


def work_of(program: LayerProgram) -> tuple[TracedWork, ...]:
    """Return the work of the forward, and of the backward where there is one."""
    name = hashlib.sha256(f"{program.text} {hash_of_sources()}".encode()).hexdigest()
    if name not in _KNOWN:
        path = _path(name) if program.is_of_torch else None
        found = None if path is None else _load(path)
        _KNOWN[name] = found or trace_work(program)
        if found is None and path is not None:
            _store(path, _KNOWN[name])
    return _KNOWN[name]


def forget() -> None:
    """Forget what this process has traced; what is on disk stays."""
    _KNOWN.clear()


def _path(name: str) -> Path | None:
    """Return where the entry is kept, or None where Inductor keeps nothing either."""
    if inductor_config.force_disable_caches or not inductor_config.fx_graph_cache:
        return None
    return Path(cache_dir()) / "megamoe" / f"{name}.json"


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


def _store(path: Path, phases: tuple[TracedWork, ...]) -> None:
    """Write the entry, whole or not at all; a full or read-only disk only costs the next trace."""
    text = json.dumps([dataclasses.asdict(phase) for phase in phases])
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(text)
        Path(file.name).replace(path)
