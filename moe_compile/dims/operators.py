"""Rules of aten operators for the factors of the dimensions they read: one table.

Contract
    A rule returns the factors of the dimensions of the result; of several results that differ, a
    tuple. A factor that is in the result is kept: an element comes of elements of the same index.
    The rule closes a factor that is summed over, mixed or moved to other places; one index of a
    factor is picked, and all of them in order are joined again.
    An operator of no known kind is decomposed as torch does, or raises Lost.
    A write in place is followed like its result; whose memory it is, is checked elsewhere.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import torch

from moe_compile.dims.factors import Dims, Factor, Lost, flat, regroup, size_of, unify
from moe_compile.dims.flow import Call, Each, Flow, Followed, Rule, common_picks
from moe_compile.dims.record import SAME_VALUES


def pointwise(call: Call) -> Dims:
    """Follow elements that come of elements, broadcast; a tensor written keeps its dimensions."""
    sizes = call.sizes()
    dims: Dims = [[] for _ in sizes]
    for source in call.inputs:
        given = call.dims(source)
        for i, dim in enumerate(given, len(sizes) - len(given)):
            if call.func._schema.is_mutable and flat(dims[i]) and flat(dim):
                unify(dims[i], dim)
            dims[i] = call.meeting(dims[i], dim)
    found = zip(dims, sizes, strict=True)
    return [dim if size_of(dim) == size else [Factor(size)] for dim, size in found]


def _formed(call: Call) -> Dims:
    """Follow an operator that regroups factors into dimensions, in order, by its sizes."""
    return regroup([factor for dim in call.dims() for factor in dim], call.sizes())


def _turned(call: Call) -> Dims:
    dims = call.dims()
    order = list(range(len(dims)))
    if operator_name(call.func) == "permute":
        order = call.named(len(dims))
    elif len(dims) > 1:
        is_t = operator_name(call.func) == "t"
        pair = (0, 1) if is_t else (call.argument("dim0"), call.argument("dim1"))
        i, j = (call.from_left(d, len(dims)) for d in pair)
        order[i], order[j] = order[j], order[i]
    return [dims[i] for i in order]


def _reduced(call: Call) -> Dims:
    given = call.dims()
    along = call.named(len(given))
    call.close(*(given[d] for d in along))
    if call.outputs[0].dim() == len(given):
        return [[] if i in along else dim for i, dim in enumerate(given)]
    return [dim for i, dim in enumerate(given) if i not in along]


def _along(call: Call) -> Dims:
    """Follow an operator that keeps all dimensions, and mixes only indices of those it names."""
    given, sizes = call.dims(), call.sizes()
    if len(sizes) < len(given):
        return _reduced(call)
    along = _padded(call) if "pad" in call.name else call.named(len(given))
    if call.name == "slice" and sizes == call.flow.sizes(call.inputs[0]):
        along = []  # all of it
    call.close(*(given[d] for d in along))
    dims = [[Factor(sizes[i])] if i in along else dim for i, dim in enumerate(given)]
    return [*dims, *([Factor(size)] for size in sizes[len(given) :])]


def _padded(call: Call) -> list[int]:
    """Return the dimensions that are padded; `pad` has two numbers for each, the last first."""
    last, pad = call.inputs[0].dim() - 1, call.argument("pad") or call.argument("padding")
    return [last - i // 2 for i in range(0, len(pad), 2) if pad[i] != 0 or pad[i + 1] != 0]


def _selected(call: Call) -> Dims:
    dims, index = call.dims(), call.argument("index")
    (at,) = call.named(len(dims))
    if len(dims[at]) == 1 and not dims[at][0].pieces and isinstance(index, int):
        call.picked[0].append((dims[at][0], index % dims[at][0].size))
    else:
        call.close(dims[at])
    return _without(dims, at)


def _without(dims: Dims, at: int) -> Dims:
    return [dim for i, dim in enumerate(dims) if i != at]


def _unbound(call: Call) -> Each:
    dims = call.dims()
    at = call.from_left(call.argument("dim"), len(dims))
    call.cuts()
    if len(dims[at]) == 1 and not dims[at][0].pieces:
        for index, picked in enumerate(call.picked):
            picked.append((dims[at][0], index))
    else:
        call.close(dims[at])
    return tuple(_without(dims, at) for _ in call.outputs)


def _cut(call: Call) -> Each:
    """Follow pieces: each has one index of an outer factor, or is one that was joined before."""
    dims = call.dims()
    at = call.from_left(call.argument("dim"), len(dims))
    sizes = [call.sizes(i)[at] for i in range(len(call.outputs))]
    call.cuts()
    if (outer := _outer_of(dims[at], sizes)) is not None:
        for index, picked in enumerate(call.picked):
            picked.append((outer, index))
        dims = call.dims()
        return tuple([*dims[:at], dims[at][1:], *dims[at + 1 :]] for _ in sizes)
    made = dims[at][0].pieces if len(dims[at]) == 1 else ()
    if [size_of(piece) for piece in made] != sizes:
        call.close(dims[at] if len(sizes) > 1 else [])
        made = tuple([Factor(size)] for size in sizes) if len(sizes) > 1 else (dims[at],)
    return tuple([*dims[:at], flat(piece), *dims[at + 1 :]] for piece in made)


def _outer_of(dim: list[Factor], sizes: list[int]) -> Factor | None:
    """Return the factor of which every piece has one index, if there is one."""
    if len(sizes) < 2 or len({*sizes}) > 1:
        return None
    try:
        outer, _ = regroup(dim, [len(sizes), sizes[0]])
    except Lost:
        return None
    return outer[0] if len(outer) == 1 and not outer[0].pieces else None


def _join(call: Call) -> Factor | None:
    """Give the result the picks that all parts share; return the factor whose indices they are."""
    notes, node = call.flow.notes, call.node
    each = [notes.settled(node, call.flow.of(part).picked) for part in call.inputs]
    joined, shared = common_picks(notes, node, each)
    call.picked[0][:] = shared.items()
    return joined


def _concatenated(call: Call) -> Dims:
    """Follow a concatenation: of all indices of a factor, or of pieces."""
    parts = [part for part in call.inputs if part.dim() == call.outputs[0].dim()]
    at, joined = call.from_left(call.argument("dim"), call.outputs[0].dim()), _join(call)
    for part in parts[1:]:
        for i, (mine, its) in enumerate(zip(call.dims(parts[0]), call.dims(part), strict=True)):
            if i != at or joined is not None:
                unify(mine, its)
    dims = call.dims(parts[0])
    if joined is not None:
        dims[at] = [joined, *dims[at]]
    elif len(parts) > 1:
        pieces = tuple(call.dims(part)[at] for part in parts)
        dims[at] = [Factor(sum(size_of(piece) for piece in pieces), pieces=pieces)]
    return dims


def _stacked(call: Call) -> Dims:
    joined = _join(call)
    dims = call.dims()
    for part in call.inputs[1:]:
        dims = [call.meeting(a, b) for a, b in zip(dims, call.dims(part), strict=True)]
    at = call.from_left(call.argument("dim"), len(dims) + 1)
    return [*dims[:at], [joined or Factor(len(call.inputs))], *dims[at:]]


def _squared(call: Call) -> Dims:
    """Follow an operator that depends on places in the last two dimensions."""
    dims = call.dims()
    call.close(*dims[-2:])
    return dims


def _sampled(call: Call) -> Each:
    """Follow `[N, C, ...]` in which every n is treated apart, and all else is mixed."""
    first, *others = call.dims()
    weights = [dim for other in call.inputs[1:] for dim in call.dims(other)]
    call.close(*others, *weights)
    each = [call.sizes(i) for i in range(len(call.outputs))]
    if any(not sizes or sizes[0] != size_of(first) for sizes in each):
        raise call.lost(
            "returns tensors whose first dimensions differ, which megamoe does not follow"
        )
    return tuple([first, *([Factor(size)] for size in sizes[1:])] for sizes in each)


def _placed(call: Call) -> Dims:
    """Follow places along one dimension, by an index of its own place in all others."""
    given = call.dims()
    at = call.named(len(given))[0]
    for other in call.inputs[1:]:
        dims = call.dims(other)
        for i, (mine, its) in enumerate(zip(given, dims, strict=bool(dims))):
            if i != at:
                unify(mine, its)
        call.close(*dims[at : at + 1])
    call.close(given[at])
    return call.dims(call.argument("index") if call.name == "gather" else call.inputs[0])


def _indexed(call: Call) -> Dims:
    """Follow an index by one tensor of integers along one dimension."""
    dims, given = call.dims(), call.argument("indices")
    if given is None:
        given = [*[None] * call.named(len(dims))[0], call.argument("index")]
    at = [i for i, one in enumerate(given) if one is not None]
    if len(at) != 1 or given[at[0]].dtype is torch.bool:
        raise call.lost("indexes by a tensor")
    call.close(dims[at[0]])
    return [*dims[: at[0]], *call.dims(given[at[0]]), *dims[at[0] + 1 :]]


def _embedded(call: Call) -> Dims:
    rows, *width = call.dims(call.argument("weight"))
    call.close(rows)
    return [*call.dims(call.argument("indices")), *width]


def _masked(call: Call) -> Dims:
    """Follow `x[mask] = number`: an element is written by the mask at its own place."""
    (mask, *others), values = call.argument("indices"), call.argument("values")
    if others or mask is None or mask.dtype is not torch.bool or values.dim():
        raise call.lost("indexes by a tensor")
    for mine, its in zip(call.dims(), call.dims(mask), strict=False):
        unify(mine, its)
    return call.dims()


def _made(call: Call) -> Dims:
    """Begin anew: a tensor of constants has the sizes of another one and none of its values."""
    call.picked[0].clear()
    return [[Factor(size)] for size in call.sizes()]


def _normed(call: Call) -> Each:
    """Follow a norm over the last dimensions, and the numbers that it keeps of each."""
    dims, num_last = call.dims(), len(call.argument("normalized_shape"))
    for other in call.inputs[1:]:
        for mine, its in zip(dims[-num_last:], call.dims(other), strict=True):
            call.meeting(mine, its)
    call.close(*call.dims()[-num_last:])
    outer = call.dims()[:-num_last]
    return (call.dims(), *([*outer, *([] for _ in range(num_last))] for _ in call.outputs[1:]))


def product(call: Call) -> Dims:
    """Follow a product of matrices, batched or not, plus the tensor it is added to."""
    *added, left, right = call.inputs
    (*outer, rows, mine), (*same, its, columns) = call.dims(left), call.dims(right)
    for one, other in zip([*outer, mine], [*same, its], strict=True):
        unify(one, other)
    call.close(flat(mine))
    for operand in (left, right):
        if (origin := call.flow.of(operand).origin) is not None:
            call.flow.notes.weights.append((call.node, origin))
            own, shared = call.flow.factors_of(origin), [f for dim in outer for f in flat(dim)]
            call.flow.notes.products += [(origin, [f]) for f in shared if f in own]
    dims = [flat(dim) for dim in (*outer, rows, columns)]
    for one in added:
        given = call.dims(one)
        for dim, other in zip(dims[len(dims) - len(given) :], given, strict=True):
            if flat(other):
                unify(dim, other)
    return [flat(dim) for dim in dims]


def _attended(call: Call) -> Each:
    """Follow attention: a query sees all keys of its sequence and head."""
    operands = [call.argument(name) for name in ("query", "key", "value")]
    dims = [call.dims(one) for one in operands]
    mask = call.argument("attn_bias")
    if mask is None:
        mask = call.argument("attn_mask")
    num_outer = meet_outer(call.flow, dims)
    if mask is not None:
        query, given = call.dims(operands[0]), call.dims(mask)
        for i in range(max(len(query) - len(given), 0), num_outer):
            if its := given[i - len(query) + len(given)]:
                unify(query[i], its)
    for one in operands:
        call.close(*call.dims(one)[-2:])
    result = [*call.dims(operands[0])[:-1], [Factor(call.sizes()[-1])]]
    return (result, *(None for _ in call.outputs[1:]))  # these are for its gradients


def meet_outer(flow: Flow, each: list[Dims]) -> int:
    """Unify the dimensions that attention treats apart; return their number."""
    if len({len(one) for one in each}) > 1 or len(each[0]) < 3:
        raise flow.lost(
            "must have operands with equally many dimensions, at least three, and has others"
        )
    num_outer = len(each[0]) - 2
    for i in range(num_outer):
        for other in each[1:]:
            if size_of(each[0][i]) == size_of(other[i]):
                unify(each[0][i], other[i])
            else:  # several query heads to a KV head
                flow.close([each[0][i], other[i]])
    return num_outer


def _as_complex(call: Call) -> Dims:
    *dims, parts = call.dims()
    call.close(parts)
    return dims


def _as_real(call: Call) -> Dims:
    return [*call.dims(), [Factor(2)]]


def _rules(rule: Rule, *names: str) -> dict[str, Rule]:
    return dict.fromkeys(names, rule)


RULES: Final[dict[str, Rule]] = {
    **_rules(pointwise, *SAME_VALUES, "fill", "expand"),
    **_rules(_formed, "view", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "squeeze"),
    **_rules(_turned, "permute", "transpose", "t"),
    **_rules(_made, "zeros_like", "ones_like", "full_like", "empty_like"),
    **_rules(_made, "new_zeros", "new_ones", "new_full", "new_empty"),
    # all dimensions but those that they name are kept
    **_rules(_along, "_softmax", "_log_softmax", "_safe_softmax", "glu", "sort", "topk", "slice"),
    **_rules(_along, "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "flip", "roll"),
    **_rules(_along, "unfold", "repeat_interleave", "constant_pad_nd", "reflection_pad1d"),
    **_rules(_along, "reflection_pad2d", "replication_pad1d", "replication_pad2d"),
    **_rules(_along, "_fft_r2c", "_fft_c2c", "_fft_c2r"),
    **_rules(_squared, "tril", "triu"),
    **_rules(_sampled, "convolution", "native_group_norm", "avg_pool2d", "avg_pool3d"),
    **_rules(_sampled, "_adaptive_avg_pool2d", "_adaptive_avg_pool3d"),
    **_rules(_sampled, "max_pool2d_with_indices", "max_pool3d_with_indices"),
    **_rules(_placed, "gather", "scatter", "scatter_add", "scatter_reduce"),
    **_rules(product, "mm", "addmm", "bmm", "baddbmm"),
    **_rules(_normed, "native_layer_norm", "_fused_rms_norm"),
    **_rules(_attended, "scaled_dot_product_attention", "_scaled_dot_product_efficient_attention"),
    **_rules(_attended, "_scaled_dot_product_flash_attention"),
    **_rules(_attended, "_scaled_dot_product_cudnn_attention"),
    **_rules(_indexed, "index", "index_select"),
    "embedding": _embedded,
    "index_put": _masked,
    "select": _selected,
    "unbind": _unbound,
    "split": _cut,
    "split_with_sizes": _cut,
    "cat": _concatenated,
    "stack": _stacked,
    "view_as_complex": _as_complex,
    "view_as_real": _as_real,
}
"""Operator -> its rule for factors, beside those tagged pointwise and reductions."""

UNIFORM: Final = frozenset({"zeros", "ones", "full", "empty", "scalar_tensor", "empty_strided"})
"""Operators without tensor inputs whose results are the same at every index."""


def operator_name(func: torch._ops.OpOverload) -> str:
    """Return `mm` of `aten::mm` and `prims::mm`; other namespaces are kept.

    An operator in place has the name of its functional form.
    """
    name = str(func._schema.name)
    return name.removeprefix("aten::").removeprefix("prims::").removesuffix("_")


@functools.cache
def rule_of(func: torch._ops.OpOverload) -> Rule | None:
    """Return the rule for factors of an operator, None for one of no known kind."""
    name = operator_name(func)
    if (named := RULES.get(name)) is not None:
        return named
    overloads = _overloads(name)  # none of other namespaces
    if any(torch.Tag.pointwise in one.tags for one in (func, *_of_prims(func, overloads))):
        return pointwise
    keeps = any(a.name == "keepdim" for one in overloads for a in one._schema.arguments)
    return _reduced if keeps else None


def _overloads(name: str) -> list[torch._ops.OpOverload]:
    packet: Any = getattr(torch.ops.aten, name, None)
    return [] if packet is None else [getattr(packet, one) for one in packet.overloads()]


def _of_prims(
    func: torch._ops.OpOverload, overloads: list[torch._ops.OpOverload]
) -> list[torch._ops.OpOverload]:
    """Return the operators of aten whose tags are those of `func`: `prims` have none."""
    return overloads if func.namespace == "prims" else []


def is_known(func: torch._ops.OpOverload) -> bool:
    """Whether an operator is followed, or refused, as it is: others are decomposed."""
    return rule_of(func) is not None or func.namespace not in ("aten", "prims")


def follow_operator(call: Call) -> None:
    """Find the factors of the results of an operator from those of its inputs."""
    rule = rule_of(call.func)
    if rule is None:
        raise call.lost(f"runs {call.func}, for which megamoe has no rule that traces dimensions")
    found = rule(call)
    each = found if isinstance(found, tuple) else tuple(found for _ in call.outputs)
    is_form = call.func.is_view or call.name in SAME_VALUES or call.name == "_unsafe_view"
    origin = call.flow.of(call.inputs[0]).origin if is_form else None
    for tensor, dims, picked in zip(call.outputs, each, call.picked, strict=True):
        call.flow.notes.settled(call.node, picked)
        call.flow.put(Followed(tensor, dims, picked, origin))
    for tensor in call.written:
        call.flow.write(call.flow.of(tensor))
