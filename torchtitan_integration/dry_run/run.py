"""The dry run: check a job, trace it, print what it would do; `megamoe train --dry-run`."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
import warnings
from collections.abc import Iterator
from typing import Final

from rich.console import Console

from moe_compile.errors import InvalidConfig
from torchtitan_integration.dry_run.blocks import graphs_of
from torchtitan_integration.dry_run.layers import DEFAULT_HARDWARE, trace_layers
from torchtitan_integration.dry_run.memory import (
    ModelState,
    add_activations,
    device_memory,
    first_most_last,
    laid_out,
    measure_state,
)
from torchtitan_integration.dry_run.tables import new_console, print_layers, print_memory
from torchtitan_integration.dry_run.world import FakeRank, fake_rank
from torchtitan_integration.job_file import JobFile, first_ranks_of_stages, uses_megamoe

COMPARE: Final = (
    'What "auto" would choose for each value of megamoe.numerics is printed with --compare, which '
    "takes two to three times as long."
)


def dry_run(file: JobFile, world: int, *, compares: bool = False) -> None:
    """Print regions, chunks, collectives and memory of a job on `world` ranks.

    Where it `compares`, also what "auto" would choose for each value of `numerics`.
    Raises InvalidConfig when the recipe, or torchtitan, does not have the layout.
    """
    if not uses_megamoe(file):
        raise InvalidConfig(
            f'{file.path}: a dry run is of megamoe; write compile.backend = "megamoe"'
        )
    logging.disable(logging.WARNING)  # what torchtitan logs is of a run
    warnings.simplefilter("ignore")
    _collect_seldom()
    console = new_console()
    began = time.monotonic()
    graphs: dict[str, tuple[str, ...]] = {}
    states: dict[str, ModelState] = {}
    for number in first_ranks_of_stages(file, world):
        with fake_rank(file, world, number) as rank, _refusals(file):
            if number == 0:
                _describe(file, rank, console)
            parts = laid_out(rank)
            graphs |= graphs_of(parts, rank.job)
            states[f"rank {number}"] = measure_state(rank, parts)
    with (
        fake_rank(file, world, 0) as rank,
        Console(stderr=True).status("tracing") as status,
    ):
        held = states["rank 0"].held + states["rank 0"].exchange_buffers
        traced = trace_layers(rank, graphs, held, status.update, compares=compares)
    print_layers(traced, console)
    if not compares and any(layer.unhidden_us for layer in traced):
        console.print(COMPARE, highlight=False)
    stages = [add_activations(name, state, traced) for name, state in states.items()]
    print_memory(shown := first_most_last(stages), console)
    if len(stages) > 1:
        console.print(
            "Shown are a rank of the first pipeline stage and one of the last, and of those "
            "between the one with most.",
            highlight=False,
        )
    console.print(f"Estimates; nothing was run. {time.monotonic() - began:.0f} s.", highlight=False)
    room = device_memory(_hardware(file))
    for warning in filter(None, map(room.warning, shown)):
        console.print(warning, highlight=False)


def _collect_seldom() -> None:
    """Have Python's garbage collector look at new objects alone, and at them less often.

    Graphs of many nodes are live to the end of it, and modules stay: it would go through them again
    and again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 10)


def _hardware(file: JobFile) -> str:
    """Return the name of the profile that estimates are for."""
    named = str(file.read("megamoe.hardware", "detect"))
    return DEFAULT_HARDWARE if named == "detect" else named


@contextlib.contextmanager
def _refusals(file: JobFile) -> Iterator[None]:
    """Say which file asks for what torch and torchtitan refuse in here."""
    try:
        yield
    except (NotImplementedError, ValueError) as error:  # how they refuse a layout
        raise InvalidConfig(f"{file.path}: this layout cannot be made: {error}") from error


def _describe(file: JobFile, rank: FakeRank, console: Console) -> None:
    training, axes = rank.job.training, rank.dims.get_all_one_dimensional_meshes()
    degrees = ", ".join(f"{axis} {mesh.size()}" for axis, mesh in axes.items())
    console.print(
        f"Dry run of {file.path}: {rank.job.model.name} {rank.job.model.flavor}, sequence "
        f"{training.seq_len}, local batch {training.local_batch_size}, {rank.dims.world_size} "
        f"ranks ({degrees})",
        highlight=False,
    )
    if str(file.read("megamoe.hardware", "detect")) == "detect":
        console.print(f"Times are for {DEFAULT_HARDWARE}: the file names no megamoe.hardware.")
