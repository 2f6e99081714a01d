"""Two programs of one Dynamo graph: one without host reads, one with; a switch says which runs.

Contract
    Both are compiled before either runs, while Dynamo still learns its guards. Where no region can
    do without its read there is one program, with reads.
    The switch is the process's (`moe_compile.runtime.rerun`): both take and return the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch.fx as fx

from moe_compile.config import MegaMoEConfig
from moe_compile.first_run import AsWritten
from moe_compile.runtime.rerun import RERUN

Compiled = Callable[..., Any]

NOT_SERVED: Final = (
    'megamoe.host_reads is "none", which needs a trainer that runs a step again where rows have no '
    "room: `megamoe train` and the torchtitan recipe have one, a compiler backend alone has not. "
    'Write it in the [megamoe] table of a torchtitan job, or megamoe.host_reads = "needed"'
)


def with_and_without_reads(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    config: MegaMoEConfig,
    compile_program: Callable[
        [fx.GraphModule, Sequence[Any], MegaMoEConfig], tuple[Compiled, bool]
    ],
) -> Compiled:
    """Return a callable that runs the program that the switch names."""
    written = AsWritten.of(gm, example_inputs)
    without, notes_overflow = compile_program(gm, example_inputs, config)
    if not notes_overflow:
        return without
    needed = dataclasses.replace(config, host_reads="needed", report="")
    reading = written.compile_now(lambda copy, inputs: compile_program(copy, inputs, needed)[0])

    def run(*arguments: Any) -> Any:
        if not RERUN.without_reads:
            return reading(*arguments)
        *results, overflow = without(*arguments)
        RERUN.add(overflow)
        return tuple(results)

    return run


def without_overflow(program: Compiled) -> Compiled:
    """Return a program with reads in the place of one that notes rows without room: it has none."""

    def run(*arguments: Any) -> Any:
        return (*program(*arguments), None)

    return run
