"""The forward and the backward graph that AOTAutograd makes of a program; no code is generated."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import torch.fx as fx
from functorch.compile import min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd

Partition: TypeAlias = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]

AOT: Final = functools.partial(aot_autograd, keep_inference_input_mutations=True)
"""Functionalization as Inductor asks for it: writes into inputs stay, `x.data = y` among them."""


class _Traced(Exception):
    """Carries graphs out of AOTAutograd."""

    def __init__(self, *graphs: fx.GraphModule) -> None:
        super().__init__()
        self.graphs = graphs


def aot_graphs(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    partition: Partition = min_cut_rematerialization_partition,
) -> tuple[fx.GraphModule, ...]:
    """Return the forward and the backward graph; the forward alone where nothing has a gradient."""

    def stop_after(joint: fx.GraphModule, joint_inputs: Any, **settings: Any) -> Any:
        raise _Traced(*partition(joint, joint_inputs, **settings))

    def stop(forward: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        del inputs
        raise _Traced(forward)

    try:
        AOT(fw_compiler=stop, bw_compiler=stop, partition_fn=stop_after)(gm, list(example_inputs))
    except _Traced as traced:
        return traced.graphs
    raise ValueError("AOTAutograd partitioned nothing")
