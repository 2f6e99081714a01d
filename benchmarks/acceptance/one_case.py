"""`python -m benchmarks.acceptance.one_case NAME FILE`: run one case, write what came of it."""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from benchmarks.acceptance import on_rank
from benchmarks.acceptance.cases import find_case
from moe_compile.testing.rank_pool import RankFailure, RankPool

FX: Final = {"megamoe.codegen": "fx"}
TWO_CHUNKS: Final = FX | {"megamoe.chunks": 2}
BOUNDED: Final = TWO_CHUNKS | {
    "megamoe.numerics": "bounded",
    "megamoe.disable_passes": ("fuse_token_sums",),  # so that there are bits to compare
}
IDLE_S: Final = 120.0
ERROR: Final = re.compile(
    r"^[\w.]*(?:Error|Exception|Unsupported|Failed|Warning|Node): ", re.MULTILINE
)
"""How Python says which error it was; torch's own errors end in other words too."""


def run_case(name: str) -> dict[str, Any]:
    """Return what torch's backends and megamoe made of a case."""
    case = find_case(name)
    with (
        tempfile.TemporaryDirectory() as folder,
        RankPool(case.num_ranks, timeout_s=IDLE_S) as pool,
    ):

        def attempt(function: Callable[..., Any], *arguments: Any) -> Any:
            try:
                return pool.run(function, name, *arguments)
            except RankFailure as failure:  # the next call has new processes
                return {"crash": last_error(str(failure))}

        measures = {}
        wanted = ["aot_eager", *(["inductor"] if case.with_inductor else [])]
        for backend in wanted:
            measures[backend] = attempt(on_rank.keep_measure, backend, folder)
        if isinstance(measures["aot_eager"], list) and case.num_ranks > 1:
            measures[on_rank.STABLE] = attempt(on_rank.keep_measure, on_rank.STABLE, folder)
        if isinstance(measures["aot_eager"], dict):
            measures["none"] = attempt(on_rank.keep_measure, "none", folder)
        kept = [backend for backend, came in measures.items() if isinstance(came, list)]
        runs = {"fx": FX}
        if case.num_ranks > 1:  # else there is nothing to divide
            runs["fx, 2 chunks"] = TWO_CHUNKS
            runs["fx, 2 chunks, bounded"] = BOUNDED
        if case.with_inductor:
            runs["inductor"] = {}
        return {
            "name": name,
            "package": case.package,
            "version": _version(case.package),
            "num_ranks": case.num_ranks,
            "failed_measures": {b: m["crash"] for b, m in measures.items() if b not in kept},
            "runs": {
                title: attempt(on_rank.compare_with, options, kept, folder)
                for title, options in runs.items()
            },
        }


def last_error(trace: str) -> str:
    """Return the last error of a traceback: the line that names it, and those that follow."""
    named = list(ERROR.finditer(trace))
    return trace[named[-1].start() :].strip()[:600] if named else trace.strip()[-600:]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(run_case(sys.argv[1])))
