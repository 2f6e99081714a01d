"""Operators that mark what a CUDA graph cannot hold, for Inductor alone.

Contract
    None of the operators computes anything, and no result differs from an operand.
    `moving_inputs(given)` is `given`, tensor by tensor. A captured part that reads the result takes
    it for a tensor of the step, wherever it is, and not for an input at a fixed address.
    `step_sizes(sizes)` names the sizes that change from step to step, and `of_step(rows, size)` is
    `rows` for a kernel that is to know one of them. Neither is run: Inductor writes nothing for it.
"""

from __future__ import annotations

from typing import Final

import torch

LIBRARY: Final = torch.library.Library("megamoe", "FRAGMENT")
LIBRARY.define("moving_inputs(Tensor(a)[] given) -> Tensor(a)[]")
LIBRARY.define("step_sizes(SymInt[] sizes) -> ()")
LIBRARY.define("of_step(Tensor rows, SymInt size) -> Tensor")


def _same(given: list[torch.Tensor]) -> list[torch.Tensor]:
    return list(given)


def _nothing(sizes: list[int]) -> None:
    del sizes


def _copy(rows: torch.Tensor, size: int) -> torch.Tensor:
    del size
    return rows.clone()


LIBRARY.impl("moving_inputs", _same, "CompositeExplicitAutograd")
LIBRARY.impl("step_sizes", _nothing, "CompositeExplicitAutograd")
LIBRARY.impl("of_step", _copy, "CompositeExplicitAutograd")
torch.library.register_fake("megamoe::moving_inputs", _same, lib=LIBRARY)
torch.library.register_fake("megamoe::step_sizes", _nothing, lib=LIBRARY)
torch.library.register_fake("megamoe::of_step", _copy, lib=LIBRARY)
MOVING_INPUTS: Final = torch.ops.megamoe.moving_inputs.default
STEP_SIZES: Final = torch.ops.megamoe.step_sizes.default
OF_STEP: Final = torch.ops.megamoe.of_step.default
