"""Give FlexAttention's backward blocks whose kernel keeps its values in registers.

Contract
    Requires  FUNCTIONAL.
    Keeps     every node and its result, up to how a product is cut into blocks. Options that the
              program gives itself are left as they are.

Where attention is compiled alone it is tuned, by running kernels. In a graph of ours nothing is run
while compiling, and for heads of 192 or 256 columns Inductor's default blocks spill more than a
thousand bytes a thread to memory. No kernel was timed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch.fx as fx

from moe_compile.graph.inner_graphs import is_flex_attention
from moe_compile.graph.query import number_of, tensor_of
from moe_compile.hardware.chip_limits import capability_of
from moe_compile.journal.entries import PassReport
from moe_compile.plan.state import CompileState
from passes.contract import Fact, GraphPass

BACKWARD: Final = "flex_attention_backward"
POSITION_OF_OPTIONS: Final = 11
"""Place of the options among the operands of the backward."""
TUNED: Final = ("num_warps", "num_stages", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2")
"""Options that set blocks of the kernel (`torch.nn.attention.flex_attention.FlexKernelOptions`)."""
EIGHT_WARPS: Final[Mapping[str, int]] = {
    "bwd_num_warps": 8, "bwd_BLOCK_M1": 32, "bwd_BLOCK_N2": 32,
}  # fmt: skip
SMALL_BLOCKS: Final[Mapping[str, int]] = {
    **EIGHT_WARPS, "bwd_BLOCK_N1": 32, "bwd_BLOCK_M2": 32,
}  # fmt: skip
OPTIONS: Final[Mapping[tuple[int, int] | None, tuple[tuple[range, Mapping[str, int]], ...]]] = {
    (9, 0): ((range(129, 193), EIGHT_WARPS), (range(193, 257), SMALL_BLOCKS)),
}
"""Compute capability -> columns of a query's head, and options with which its kernel spills
nothing. Other heads have Inductor's defaults."""
KERNELS_OF_TRITON: Final = ("AUTO", "TRITON")
"""Values of the option BACKEND under which the options are those of a Triton kernel."""


@dataclass(frozen=True)
class SizeAttention(GraphPass):
    """See the module docstring."""

    name: ClassVar[str] = "size_attention"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.FUNCTIONAL})
    commutes_with: ClassVar[frozenset[str]] = frozenset({"realize_slices"})

    def run(self, graph: fx.Graph, state: CompileState) -> PassReport:
        """Give every backward of attention the options of its heads that it lacks."""
        del state
        chosen = {node: _options(node) for node in graph.nodes if _is_backward(node)}
        applied = []
        for node, options in chosen.items():
            if options:
                given = node.args[POSITION_OF_OPTIONS]
                assert isinstance(given, Mapping)
                node.update_arg(POSITION_OF_OPTIONS, {**given, **options})
                applied.append(node.name)
        return PassReport(pass_name=self.name, applied=tuple(applied))


def _is_backward(node: fx.Node) -> bool:
    target: Any = node.target
    return is_flex_attention(node) and target.name() == BACKWARD


def _options(node: fx.Node) -> Mapping[str, int]:
    """Return the options that a backward lacks, {} where there are none or it has its own."""
    given: Any = node.args[POSITION_OF_OPTIONS]
    query = tensor_of(node.all_input_nodes[0])
    if query is None or query.dtype.itemsize > 2:
        return {}
    if given.get("BACKEND", "AUTO") not in KERNELS_OF_TRITON:
        return {}
    if any(name in given or f"bwd_{name}" in given for name in TUNED):
        return {}
    head = number_of(query.shape[-1])
    of_chip = OPTIONS.get(capability_of(query.device), ())
    return next((options for heads, options in of_chip if head in heads), {})
