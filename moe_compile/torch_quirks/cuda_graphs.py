"""CUDA graphs in graphs that our passes work on: parts between host reads are captured.

No fault, settings: they are those of the current compilation alone, where CUDA graphs are asked
for by `mode="reduce-overhead"`, in `options=` or for all of Inductor.

Contract
    Outside of captured parts are collectives, waits, copies to host memory, host reads, and kernels
    whose size the host reads in each step. All else on the device is captured, in the order that
    the graph is in.
    Where this torch lacks a setting that this takes, CUDA graphs are off, and it is said why.

Why no collective is captured
    Its splits are read in each step. A capture ends only once streams that it uses have joined: a
    launch and its wait would have to be in one part, with no read between them. And torch counts
    no collective that a replay launches: neither its watchdog nor our agreement of ranks would
    know of it.
Why a collective in flight may read what a captured part made
    Streams: a collective begins behind the work that was launched before it on the compute
    stream, and what comes behind its wait begins once it has ended. A graph replays on the compute
    stream. So only what stands between launch and wait runs beside the collective.
    Memory: parts share one pool, and a part that is recorded takes memory of no tensor that lives
    then. The wrapper names what is sent and received until the wait, and torch's collective holds
    both until then: they live whenever a part between launch and wait is recorded. Before a
    replay torch compares which tensors live with those of the recording. No part is given what is
    being received, nor writes or frees what is sent (`benchmarks/cuda/in_flight.py`).
    Steps: a later step replays the first part again, into the same memory. All waits of the
    step before stand before it on the same stream; a launch has one in its graph
    (`passes/verify_schedule.py`).
Why recording a part cannot hang
    To record torch waits for the device, and so for collectives in flight. Ranks have compared the
    order of all launches by then, so each launch before this place is one that all its ranks come
    to (`runtime/launch_records.py` has the argument).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch._inductor.config as inductor_config
import torch.fx as fx

from moe_compile.graph.query import (
    COPY_WAIT,
    NAMESPACES,
    OFFLOAD,
    RELOAD,
    WAIT_NAMES,
    overload_name,
    tensor_of,
)
from passes.bound_captures import BoundCaptures, write_step_sizes

ASKED: Final = "triton.cudagraphs"
OPS: Final = "custom_should_partition_ops"
SIZES: Final = "cudagraph_unsafe_unbacked_ops"
OURS: Final[Mapping[str, object]] = {
    "graph_partition": True,
    "triton.reorder_for_reducing_graph_partitions": False,
    "triton.cudagraph_skip_dynamic_graphs": False,
    "force_pointwise_cat": True,
}
"""Settings beside the lists of operators. `cudagraph_skip_dynamic_graphs` would keep all kernels
out: torch 2.13 takes the index of a kernel's loop for a size that changes. And where kernels of two
parts write their shares of a concatenation in place, torch 2.13 allocates it in each part, so that
only the last part's share is in the result: a kernel of its own writes all of it."""
UNCAPTURED: Final = (*WAIT_NAMES, OFFLOAD, RELOAD, COPY_WAIT, "megamoe::moving_input")
"""Operators outside of captured parts, beside all of the namespaces of collectives."""
COLLECTIVES: Final = frozenset({*NAMESPACES, "symm_mem"})
SEVERAL: Final = ("_coalesced", "::batch_p2p_ops")
"""How the names end of operators that return a list of tensors in flight."""
WHOLE: Final[Mapping[str, tuple[object, str]]] = {
    "cpp_wrapper": (False, "its C++ wrapper is not divided into parts"),
    "cudagraph_policy": (None, "the policy captures a graph as a whole, its host reads too"),
    "triton.cudagraph_trees": (True, "without them each layer writes over the results of another"),
}
"""Setting -> its value under which parts can be captured, and why under no other."""


def _set(patches: Mapping[str, Any], key: str) -> Any:
    return patches.get(key, inductor_config.get_config_copy().get(key))


def asks_for_captures(patches: Mapping[str, Any]) -> bool:
    """Return whether CUDA graphs are asked for, in `patches` or for all of Inductor."""
    return bool(_set(patches, ASKED))


def why_no_captures(patches: Mapping[str, Any], without: tuple[str, ...] = ()) -> str:
    """Return why no part of a graph can be captured, "" where parts can; `without` these passes."""
    known = inductor_config.get_config_copy()
    lacks = [key for key in (OPS, SIZES, "graph_partition") if key not in known]
    if lacks or not write_step_sizes():
        missing = ", ".join(lacks) or "node of an operator as expected"
        return f"this torch lacks Inductor's {missing}, which keeps host reads out of a capture"
    if BoundCaptures.name in without:
        return f"they need the pass {BoundCaptures.name}, which is left out"
    for key, (needed, why) in WHOLE.items():
        if key in known and (value := _set(patches, key)) != needed:
            return f"Inductor's {key} is {value!r}: {why}"
    return ""


def why_no_captures_of(gm: fx.GraphModule) -> str:
    """Return why no part of a Dynamo graph can be captured, "" where parts can.

    Inductor takes the tensors out of a collective's list in the part behind it, and torch cannot
    record a part that is given a list.
    """
    graphs = [m.graph for m in gm.modules() if isinstance(m, fx.GraphModule)]
    names = (overload_name(node) for graph in graphs for node in graph.nodes)
    several = next((name for name in names if name.endswith(SEVERAL)), "")
    return f"{several} returns several tensors, and no part can be given a list" if several else ""


def capture_settings(patches: Mapping[str, Any]) -> dict[str, object]:
    """Return Inductor's settings for a graph whose parts are captured."""
    theirs = {key: list(_set(patches, key) or ()) for key in (OPS, SIZES)}
    return {
        **OURS,
        OPS: sorted({*theirs[OPS], *UNCAPTURED, *_collectives()}),
        SIZES: sorted({*theirs[SIZES], "megamoe::step_sizes"}),
    }


def _collectives() -> list[str]:
    """Return the operators of `COLLECTIVES` that torch has, without overloads."""
    names = (name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names())
    return [name for name in names if name.partition("::")[0] in COLLECTIVES]


@dataclass(frozen=True, slots=True)
class Inputs:
    """The tensors that a Dynamo graph is given, by number."""

    number: int
    steady: frozenset[int]
    """Parameters that are at one address in every step."""
    gathered: frozenset[int]
    """Parameters that FSDP gathers, each time elsewhere."""

    @classmethod
    def of(cls, gm: fx.GraphModule) -> Inputs:
        """Return those of `gm`."""
        inputs = [n for n in gm.graph.find_nodes(op="placeholder") if tensor_of(n) is not None]
        weights = {place for place, node in enumerate(inputs) if _is_parameter(node)}
        gathered = frozenset(place for place in weights if _is_gathered(inputs[place]))
        return cls(len(inputs), frozenset(weights) - gathered, gathered)


def _is_parameter(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.nn.Parameter)


def _is_gathered(node: fx.Node) -> bool:
    source = getattr(node, "_dynamo_source", None)
    return source is None or bool(source.guard_source.is_fsdp_module())
