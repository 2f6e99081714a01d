"""Two programs of one Dynamo graph: one without host reads, one with; a switch says which runs.

Contract
    Both are compiled before either runs, while Dynamo still learns its guards. Where no region can
    do without its read there is one program, with reads.
    The switch is the process's (`moe_compile.runtime.rerun`): both take and return the same. Where
    `row_room` is "auto", the room is that of the switch when the graph is compiled.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch.fx as fx

from moe_compile.config import MegaMoEConfig
from moe_compile.first_run import AsWritten
from moe_compile.runtime.rerun import RERUN, RoomTimes

Compiled = Callable[..., Any]

NOT_SERVED: Final = (
    'megamoe.host_reads is "none", which needs a trainer that runs a step again where rows have no '
    "room: `megamoe train` and the torchtitan recipe have one, a compiler backend alone has not. "
    'Write it in the [megamoe] table of a torchtitan job, or megamoe.host_reads = "needed"'
)


@dataclasses.dataclass(frozen=True, slots=True)
class Notes:
    """The notes that a program without reads returns."""

    times: RoomTimes | None
    """Predicted times of the program by room; None where they are not known or not asked for."""


def with_and_without_reads(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    config: MegaMoEConfig,
    compile_program: Callable[..., tuple[Compiled, Notes | None]],
) -> Compiled:
    """Return a callable that runs the program that the switch names.

    `compile_program` takes a graph, inputs, options, and whether the program stands in for one
    without reads; it returns what runs, and its notes, if that returns a note of the room for rows
    last.
    """
    written = AsWritten.of(gm, example_inputs)
    without, notes = compile_program(gm, example_inputs, config)
    if notes is None:
        return without
    needed = dataclasses.replace(config, host_reads="needed")
    with_reads = functools.partial(compile_program, config=needed, stands_in=True)
    reading = written.compile_now(lambda copy, inputs: with_reads(copy, inputs)[0])

    def run(*arguments: Any) -> Any:
        if not RERUN.without_reads:
            return reading(*arguments)
        *results, overflow = without(*arguments)
        RERUN.add(overflow)
        RERUN.ran(notes.times)
        return tuple(results)

    return run


def without_overflow(program: Compiled) -> Compiled:
    """Return a program with reads in the place of one that notes rows without room: it has none."""

    def run(*arguments: Any) -> Any:
        return (*program(*arguments), None)

    return run
