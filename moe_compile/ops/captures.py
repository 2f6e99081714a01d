"""Operators that mark what a CUDA graph cannot hold, for Inductor alone.

Contract
    None of the operators computes anything, and no result differs from an operand. None is run
    either: Inductor writes nothing for them, but another name for `moving_input`.
    `moving_input(given)` is `given`. A captured part that reads the result takes it for a tensor of
    the step, wherever it is, and not for an input at a fixed address.
    `step_sizes(sizes)` names the sizes that change from step to step, and `of_step(rows, size)` is
    `rows` for a kernel that is to know one of them.
"""

from __future__ import annotations

from typing import Final

import torch

LIBRARY: Final = torch.library.Library("megamoe", "FRAGMENT")
LIBRARY.define("moving_input(Tensor(a) given) -> Tensor(a)")
LIBRARY.define("step_sizes(SymInt[] sizes) -> ()")
LIBRARY.define("of_step(Tensor rows, SymInt size) -> Tensor")


def _same(given: torch.Tensor) -> torch.Tensor:
    return given


def _nothing(sizes: list[int]) -> None:
    del sizes


def _copy(rows: torch.Tensor, size: int) -> torch.Tensor:
    del size
    return rows.clone()


LIBRARY.impl("moving_input", _same, "CompositeExplicitAutograd")
LIBRARY.impl("step_sizes", _nothing, "CompositeExplicitAutograd")
LIBRARY.impl("of_step", _copy, "CompositeExplicitAutograd")
torch.library.register_fake("megamoe::moving_input", _same, lib=LIBRARY)
torch.library.register_fake("megamoe::step_sizes", _nothing, lib=LIBRARY)
torch.library.register_fake("megamoe::of_step", _copy, lib=LIBRARY)
MOVING_INPUT: Final = torch.ops.megamoe.moving_input.default
STEP_SIZES: Final = torch.ops.megamoe.step_sizes.default
OF_STEP: Final = torch.ops.megamoe.of_step.default
