"""Write operators on rows out in plain operators where no kernel of ours runs, for Inductor.

Contract
    Requires  FUNCTIONAL.
    Keeps     every value: the operators' own references are written out.

On a GPU the operators stay: each is one Triton kernel. On a CPU Inductor fuses the written-out form
with its neighbours. With `codegen = "fx"` they run as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
import torch.fx as fx
from torch._guards import detect_fake_mode
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from moe_compile.graph.edit import Emitter, substitute
from moe_compile.graph.query import tensor_of
from moe_compile.journal.entries import PassReport, Verdict
from moe_compile.journal.reasons import Reason
from moe_compile.ops.quantized_rows import REFERENCES, has_kernel
from moe_compile.ops.row_sums import (
    DOTS_OF_PLACES,
    SUM_OF_PLACES,
    dots_of_places,
    sum_of_places,
)
from moe_compile.plan.state import CompileState
from passes.contract import Fact, GraphPass

WRITTEN_OUT: Final[Mapping[Any, Callable[..., torch.Tensor]]] = {
    **REFERENCES,
    SUM_OF_PLACES: sum_of_places,
    DOTS_OF_PLACES: dots_of_places,
}


@dataclass(frozen=True)
class LowerRowOps(GraphPass):
    """See the module docstring."""

    name: ClassVar[str] = "lower_row_ops"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.FUNCTIONAL})
    after: ClassVar[frozenset[str]] = frozenset({"fold_row_moves"})

    def run(self, graph: fx.Graph, state: CompileState) -> PassReport:
        """Write out every operator that Inductor can fuse."""
        nodes = [n for n in graph.nodes if n.target in WRITTEN_OUT]
        left = {n: verdict for n in nodes if (verdict := _left(n, state)) is not None}
        chosen = [n for n in nodes if n not in left]
        names = tuple(n.name for n in chosen)
        for node in chosen:
            _write_out(node)
        return PassReport(pass_name=self.name, applied=names, skipped=tuple(left.values()))


def _left(node: fx.Node, state: CompileState) -> Verdict | None:
    if state.config.codegen == "fx":
        detail = (
            "megamoe.codegen = 'fx' runs operators one by one, so there is no kernel to fuse into"
        )
        return Verdict(candidate=node.name, reason=Reason.NOT_ASKED, detail=detail)
    value = tensor_of(node)
    assert value is not None
    if not has_kernel(value.device):
        return None
    detail = "a kernel of megamoe runs it already"
    return Verdict(candidate=node.name, reason=Reason.ALREADY_DONE, detail=detail)


def _write_out(node: fx.Node) -> None:
    inputs = list(dict.fromkeys(node.all_input_nodes))

    def run(*values: Any) -> Any:
        known = dict(zip(inputs, values, strict=True))
        args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
        return WRITTEN_OUT[node.target](*args, **kwargs)

    values = [n.meta["val"] for n in inputs]
    mode = detect_fake_mode(values) or contextlib.nullcontext()  # fake without tensors too
    with mode:
        traced = make_fx(run, decomposition_table=select_decomp_table())(*values)
    emit = Emitter(node)
    env: dict[fx.Node, Any] = dict(
        zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True)
    )
    for inner in traced.graph.nodes:
        if inner.op == "output":
            substitute(node, env[inner.args[0]])
        elif inner.op != "placeholder":
            env[inner] = emit.copy(inner, env)
            env[inner].meta["val"] = inner.meta["val"]
