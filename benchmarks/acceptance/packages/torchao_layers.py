"""torchao's float8 training: linear layers in eight bits, of experts and around them.

`convert_to_float8_training` exchanges `nn.Linear` for `Float8Linear`, by each of torchao's recipes.
A CPU has no product in eight bits: the layers round to eight bits and multiply in the model's type
(`emulate`). One scale for a whole tensor ("tensorwise") makes each row's result depend on all rows
of the product; one per row ("rowwise") does not, but its gradient of the weight scales columns.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from benchmarks.acceptance.packages.deepspeed_layers import layer
from benchmarks.acceptance.packages.repository_layer import SIZES, own_layer
from benchmarks.acceptance.subject import Call, Case, Subject

RECIPES: Final = ("tensorwise", "rowwise")


def _converted(model: nn.Module, recipe: str) -> Any:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    return convert_to_float8_training(model, config=config)


def _experts(rank: int, recipe: str) -> Subject:
    """Return DeepSpeed's layer, whose experts see slots of a capacity, with experts converted."""
    subject = layer(rank, k=4)
    moe: Any = subject.model
    moe.deepspeed_moe.experts = _converted(moe.deepspeed_moe.experts, recipe)
    return subject


class Around(nn.Module):
    """A routed layer beside a shared expert, between two linear layers."""

    def __init__(self, routed: nn.Module, width: int) -> None:
        super().__init__()
        self.routed = routed
        linear = functools.partial(nn.Linear, width, width, dtype=torch.bfloat16)
        self.before, self.shared, self.after = linear(), linear(), linear()

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Return `[T, H]` of tokens `[T, H]`."""
        h_TH = self.before(x_TH)
        return self.after(self.routed(h_TH) + self.shared(h_TH))


def _dense(rank: int, recipe: str) -> Subject:
    subject = own_layer(rank)
    model = _converted(Around(subject.model, SIZES.width), recipe)
    return Subject(model=model, calls=[Call(args=call.args) for call in subject.calls])


def _cases(name: str, package: str, build: Callable[..., Subject]) -> list[Case]:
    return [
        Case(
            name=f"{name}, {recipe}",
            package=package,
            build=functools.partial(build, recipe=recipe),
            num_ranks=2,
        )
        for recipe in RECIPES
    ]


CASES = (
    *_cases("DeepSpeed MoE, top 4, experts of Float8Linear", "torchao", _experts),
    *_cases("own layer, torchao's Float8Linear around it", "megamoe", _dense),
)
