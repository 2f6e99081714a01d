"""A compiled program may go back more than once; its gradients have no gradients of their own.

Contract
    Where passes of ours run on a graph, or it keeps a host read, no backward of it writes into
    tensors its forward saved, so that `retain_graph=True` and a second backward work as in eager
    mode. AOTAutograd learns of a second backward by itself where it compiles a backward as it first
    runs. Sizes that are read make it compile the backward beside the forward, before anybody can
    know.
    A result may take new memory where it could have taken that of a saved tensor which the same
    kernel reads last: at most one tensor more at a time.
    Gradients of gradients (`create_graph=True`) end in SecondOrderGradient as they are asked for;
    gradients alone, also with `create_graph=True`, do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
import torch.fx as fx
from torch._guards import TracingContext

from moe_compile.errors import SecondOrderGradient

COMPILED: Final = "CompiledFunctionBackward"
"""The node that AOTAutograd makes for a whole backward graph."""
DEEPEST: Final = 3
"""Views of results stand between a result and that node, one or two."""


def keep_saved_tensors() -> None:
    """Keep the backward of the program being compiled from writing into saved tensors.

    To be called once AOTAutograd has cut the graph in two. The list belongs to all descriptions of
    the program: emptied, it is empty where the backward is lowered, where it runs and in caches.
    """
    context = TracingContext.try_get()
    donated = getattr(context.fw_metadata, "bw_donated_idxs", None) if context is not None else None
    if donated:
        donated.clear()


def keeps_host_reads(gm: fx.GraphModule) -> bool:
    """Whether some size of the Dynamo graph is known at run time alone."""
    graphs = (module.graph for module in gm.modules() if isinstance(module, fx.GraphModule))
    return any("unbacked_bindings" in node.meta for graph in graphs for node in graph.nodes)


def refuse_second_order(results: Any) -> None:
    """Have gradients of the gradients of `results` raise SecondOrderGradient."""
    seen: Any = None
    for node in _compiled_nodes(results if isinstance(results, Sequence) else (results,)):
        if node is not seen:
            node.register_hook(_refused)
            seen = node


def _compiled_nodes(results: Sequence[Any]) -> Iterator[Any]:
    for result in results:
        node = result.grad_fn if isinstance(result, torch.Tensor) else None
        for _ in range(DEEPEST):
            if node is None or type(node).__name__ == COMPILED:
                break
            node = node.next_functions[0][0] if node.next_functions else None
        if node is not None and type(node).__name__ == COMPILED:
            yield node


def _refused(gradients: tuple[Any, ...], given: Any) -> tuple[Any, ...] | None:
    del given
    if not torch.is_grad_enabled():
        return None
    return tuple(g if g is None or not g.requires_grad else _Refused.apply(g) for g in gradients)


class _Refused(torch.autograd.Function):
    """A gradient without a gradient."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient as it is."""
        del ctx
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Raise SecondOrderGradient."""
        del ctx, gradients
        raise SecondOrderGradient(
            "the program asks for a second-order gradient through a compiled graph "
            "(create_graph=True): torch.compile supports none, with any backend. Compile only "
            "code that the penalty does not differentiate twice, and run the rest in eager mode "
            "(torch.compiler.disable), or take the second-order gradient of a copy of the model "
            "that is not compiled"
        )
