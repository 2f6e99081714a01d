"""Follow factors into tensors that ranks share, and through collectives between these ranks.

Contract
    A `DTensor` has the sizes of the whole: each dimension that it shards has the ranks as its
    outer factors. A rank's own part of it has one index of these. A gather by a collective of the
    graph is the same, with the ranks' rows one after another, as torch writes it.
    Only even sharding is followed: every rank has as many indices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch.distributed as dist
import torch.fx as fx
from torch.distributed.tensor import DTensor, Partial, Placement, Shard

from moe_compile.dims.arguments import moved
from moe_compile.dims.factors import Dims, Factor, Lost, regroup, size_of
from moe_compile.dims.tracker import Tracker
from moe_compile.graph.query import (
    called_name,
    group_name,
    is_launch,
    is_reduce_scatter,
    is_wait,
    operator_at,
    overload_name,
    tensor_of,
)

METHODS: Final = frozenset({"to_local", "redistribute"})
MADE_OF: Final = frozenset({"device_mesh", "placements", "run_check", "grad_placements"})
"""Arguments that leave the sizes of a `DTensor` to follow from its ranks' parts."""
ABOUT: Final = frozenset({"device_mesh", "placements"})
"""Attributes of a `DTensor` that are the same for any part of the batch."""


def sharded_rule(node: fx.Node) -> Callable[[Tracker, fx.Node], Dims] | None:
    """Return the rule for factors of `node`, None where it is of another kind."""
    if is_wait(node):
        return _kept
    if is_launch(node):
        return COLLECTIVES.get(overload_name(node).partition("::")[2])
    if node.op == "call_function" and node.target is DTensor.from_local:
        return _from_local
    if node.op == "call_method" and node.target in METHODS and dtensor_of(moved(node)) is not None:
        return _to_local if node.target == "to_local" else _kept
    return None


def dtensor_of(node: fx.Node) -> DTensor | None:
    """Return the fake `DTensor` that the node produces, or None where it is none."""
    tensor = tensor_of(node)
    return tensor if isinstance(tensor, DTensor) else None


def is_about_ranks(node: fx.Node) -> bool:
    """Whether the node reads the mesh or placements of a `DTensor`, and none of its values."""
    is_attribute = called_name(node) == "getattr" and node.args[1] in ABOUT
    source = node.args[0] if is_attribute else None
    return isinstance(source, fx.Node) and dtensor_of(source) is not None


def takes_own_part(node: fx.Node) -> bool:
    """Whether the node takes this rank's part of a `DTensor`."""
    return sharded_rule(node) is _to_local


def keeps_indices(launch: fx.Node) -> bool:
    """Whether the collective gives each rank the values that others have at the same indices."""
    return overload_name(launch).partition("::")[2] in COLLECTIVES


def summed_over(node: fx.Node) -> tuple[int, ...]:
    """Return the ranks, in order, whose inputs of `node` are the terms of one sum."""
    if is_launch(node) and "sum" in node.args:
        op = overload_name(node).partition("::")[2]
        return _ranks_of_group(node) if op in ("all_reduce", "reduce_scatter_tensor") else ()
    whole = dtensor_of(node)
    if node.target is not DTensor.from_local or whole is None:
        return ()
    partial = [p for p in whole.placements if p.is_partial()]
    if any(not isinstance(p, Partial) or p.reduce_op != "sum" for p in partial):
        return ()
    return _along(whole, Placement.is_partial)


def same_on(node: fx.Node) -> tuple[int, ...]:
    """Return the ranks that have the same value of `node`, as a collective or a `DTensor` says."""
    if is_launch(node) and keeps_indices(node) and not is_reduce_scatter(node):
        return _ranks_of_group(node)
    is_taken = node.op == "call_method" and node.target == "to_local"
    whole = dtensor_of(moved(node)) if is_taken else None
    return () if whole is None else _along(whole, Placement.is_replicate)


def _along(whole: DTensor, is_so: Callable[[Placement], bool]) -> tuple[int, ...]:
    """Return the ranks along the mesh axes whose placement of a `DTensor` `is_so`."""
    mesh, place = whole.device_mesh, whole.device_mesh.get_coordinate()
    chosen = [is_so(placement) for placement in whole.placements]
    if place is None or not any(chosen):
        return ()
    at = tuple(slice(None) if one else i for one, i in zip(chosen, place, strict=True))
    return tuple(mesh.mesh[at].flatten().tolist())


def _ranks_of_group(launch: fx.Node) -> tuple[int, ...]:
    group = dist.distributed_c10d._resolve_process_group(group_name(launch))
    return tuple(dist.get_process_group_ranks(group))


def _ranks_of(tensor: DTensor) -> Dims:
    """Return for each dimension new factors for the ranks that share it, outermost first."""
    dims: Dims = [[] for _ in tensor.shape]
    for axis, placement in enumerate(tensor.placements):
        if type(placement) is Shard:
            dims[placement.dim % len(dims)].append(Factor(tensor.device_mesh.size(axis)))
        elif placement.is_shard() or not (placement.is_replicate() or placement.is_partial()):
            raise Lost(
                f"a DTensor has the placement {placement}; megamoe follows only Shard, "
                "Replicate and Partial"
            )
    return dims


def _kept(tracker: Tracker, node: fx.Node) -> Dims:
    return tracker.dims(moved(node))


def _from_local(tracker: Tracker, node: fx.Node) -> Dims:
    whole, local = dtensor_of(node), node.args[0] if node.args else None
    if whole is None or not isinstance(local, fx.Node) or not node.kwargs.keys() <= MADE_OF:
        raise Lost(
            f"{operator_at(node)} is given sizes as arguments, and those of a part of the "
            "batch are not known"
        )
    pairs = zip(_ranks_of(whole), tracker.dims(local), strict=True)
    return [[*ranks, *own] for ranks, own in pairs]


def _to_local(tracker: Tracker, node: fx.Node) -> Dims:
    whole = dtensor_of(moved(node))
    assert whole is not None
    return [
        _one_index(tracker, node, dim, size_of(ranks))
        for ranks, dim in zip(_ranks_of(whole), tracker.dims(moved(node)), strict=True)
    ]


def _one_index(tracker: Tracker, node: fx.Node, dim: list[Factor], num_ranks: int) -> list[Factor]:
    """Return the factors of a dimension that one of `num_ranks` ranks has."""
    if size_of(dim) % num_ranks:
        raise Lost(f"{operator_at(node)} is sharded unevenly")
    ranks, own = regroup(dim, [num_ranks, size_of(dim) // num_ranks])
    tracker.closed.append((node, ranks))
    return own


def _gathered(tracker: Tracker, node: fx.Node) -> Dims:
    first, *rest = tracker.dims(moved(node))
    return [[Factor(tracker.sizes_of(node)[0] // size_of(first)), *first], *rest]


def _scattered(tracker: Tracker, node: fx.Node) -> Dims:
    first, *rest = tracker.dims(moved(node))
    return [_one_index(tracker, node, first, size_of(first) // tracker.sizes_of(node)[0]), *rest]


COLLECTIVES: Final = {
    "all_reduce": _kept,
    "all_gather_into_tensor": _gathered,
    "reduce_scatter_tensor": _scattered,
}
