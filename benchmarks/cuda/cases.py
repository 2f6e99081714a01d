"""What CUDA code is generated of: MoE layers and transformer blocks, laid out in several ways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch._inductor

CHUNKS: Final = (1, 2, 4)
MODELS: Final[Mapping[str, tuple[str, str]]] = {
    "deepseek-16b": ("deepseek_v3", "16B"),
    "deepseek-671b": ("deepseek_v3", "671B"),
    "qwen3": ("qwen3", "235B-A22B"),
    "llama4": ("llama4", "17bx16e"),
    "debug": ("deepseek_v3", "debug_cpu"),
}
"""Block -> torchtitan's name of the model, and its flavor."""
LOCAL_EXPERTS: Final = 8
"""Of the layer that is no model's."""
RANKS_OF_A_NODE: Final = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A layer or block, and how it is laid out; compiled in each number of chunks of `CHUNKS`."""

    block: str
    """`layer`, ours without attention, or a key of `MODELS`."""
    ep: int
    is_checkpointed: bool = False
    """Whether all is computed again in the backward but what exchanges received."""
    tp: int = 1
    parts: int = 1
    """Of its batch, each one sequence."""
    hop_slices: int = 0
    """Of the first of two hops, with sums on nodes of `RANKS_OF_A_NODE`; 0 for one hop."""
    wire: str = "same"
    """Of dispatch and combine."""
    products: str = "same"
    """Number format of experts' products; if it is not the model's, dispatch is in fp8 too."""
    is_captured: bool = False
    """Whether CUDA graphs are asked for."""

    @property
    def name(self) -> str:
        """Return a name that says all."""
        how = {
            "checkpoint": self.is_checkpointed,
            f"tp{self.tp}": self.tp > 1,
            f"parts{self.parts}": self.parts > 1,
            f"hops{self.hop_slices}": self.is_in_hops,
            self.wire: self.wire != "same",
            self.products: self.products != "same",
            "graphs": self.is_captured,
        }
        return "-".join([self.block, f"ep{self.ep}", *(word for word, has in how.items() if has)])

    @property
    def is_in_hops(self) -> bool:
        """Return whether rows come in two hops."""
        return self.hop_slices > 0

    @property
    def is_fed(self) -> bool:
        """Return whether products are given rows as they came."""
        return self.products == "fp8_blockwise"

    @property
    def options(self) -> dict[str, Any]:
        """Return the options it is compiled with, where they are not what they are by default."""
        options: dict[str, Any] = {}
        if self.parts > 1:
            options["batch_parts"] = self.parts
        if self.is_in_hops:
            options |= {"nodes": "rounded", "hop_slices": self.hop_slices}
        if self.wire != "same":
            options |= {"dispatch_wire": self.wire, "combine_wire": self.wire}
        if self.products != "same":
            options |= {"expert_compute": self.products, "dispatch_wire": "fp8"}
        return {**options, "equal_tokens": True, "strict": True} if options else options

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings of Inductor it is compiled with."""
        return torch._inductor.list_mode_options("reduce-overhead") if self.is_captured else {}

    @property
    def experts(self) -> int:
        """Return the experts of the layer that is no model's."""
        return LOCAL_EXPERTS * self.ep

    @property
    def model(self) -> str:
        """Return torchtitan's name of the model."""
        return MODELS[self.block][0]

    @property
    def flavor(self) -> str:
        """Return torchtitan's name of its size."""
        return MODELS[self.block][1]


PROGRAMS: Final = (
    Program(block="layer", ep=8),
    Program(block="layer", ep=64, is_checkpointed=True),
    Program(block="deepseek-16b", ep=8),
    Program(block="deepseek-16b", ep=64, is_checkpointed=True, tp=2),
    Program(block="deepseek-671b", ep=64),
    Program(block="deepseek-671b", ep=64, is_checkpointed=True, tp=2),
    Program(block="deepseek-671b", ep=8, is_checkpointed=True),
    Program(block="qwen3", ep=8, tp=2),
    Program(block="qwen3", ep=64),
    Program(block="qwen3", ep=8, is_checkpointed=True),
    Program(block="llama4", ep=8, tp=2),
    Program(block="llama4", ep=16, is_checkpointed=True),
    Program(block="deepseek-671b", ep=64, is_checkpointed=True, parts=2),
    Program(block="layer", ep=64, hop_slices=1),
    Program(block="deepseek-671b", ep=64, is_captured=True),
    Program(
        block="deepseek-671b", ep=64, is_checkpointed=True, tp=2, parts=2, hop_slices=4, wire="fp8"
    ),
    Program(block="deepseek-671b", ep=64, products="fp8_blockwise"),
)
"""Of every two of block, EP, checkpointing and TP all pairs of values, but where there is none: a
layer by itself has no TP, and Llama 4 has 16 experts, so EP 16 stands for 64. Behind these one in
parts, one in two hops, one whose parts between host reads are captured in CUDA graphs, one in
parts and two hops with messages in eight bits, and one whose experts multiply in eight bits."""
