"""The model of last bits of torch's kernels for CPUs: which programs must be equal bit for bit.

Contract
    Where nothing is found, a region in parts has the bits of the whole, forward and backward: of
    rows by `position_rounding`, of chunks of experts by `first_difference`, of groups of heads by
    `rounds_by_group`. On CUDA an operator is taken to compute every element by the same code.
    A model that refuses leaves a region as it is where something is found, so that every rewritten
    region must be equal. A model that does not refuse puts it in the report.

Experts. Chunk and whole run the same operators, forward and backward. A chunk is taken to have the
bits of the whole only where every one of them is known to round alike in both: it works on tensors
of the same form, or takes experts one by one. In a scan of some 300,000 products of torch 2.13 on a
CPU (four and eight bytes: up to 256 rows, 128 features; two bytes: up to 128 and 256; 2 to 8
matrices whole, 1 to 4 in a part), a part had the bits of the whole in every case where rows fill
multiples of 64 bytes, in two bytes columns too, on one thread; on several, in four and two bytes
alone, a part of two matrices at least.

Heads. On a CPU the answer is "no" only where groups had the bits of the whole, forward and
backward, in every case of a scan: torch 2.13, eleven head sizes from 4 to 128, 4 to 800 positions,
both orders of heads and positions in memory, heads of their own and shared, 1 to 256 threads. Torch
takes a fused kernel that goes from head to head (`use_flash_attention_cpp` in ATen's
`sdp_utils_cpp.cpp` has its conditions), or else multiplies the matrices of all heads at once, which
rounds by how many there are and how they lie in memory. The fused kernel multiplies by MKL, whose
products of 4- and 8-byte numbers round by where rows begin between boundaries of 16 bytes (float32
with heads of 5 or 6, float64 with heads of 5). The products of a head alone in a batch of one are
split over threads; with several heads each thread has heads of its own. The number of threads is
not read, as ranks may differ in it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
import torch.fx as fx
from torch.fx.experimental.symbolic_shapes import statically_known_true as is_known

from moe_compile.graph.modes import chooses_attention
from moe_compile.graph.query import argument_of, called_name, tensor_of
from moe_compile.proof.kernel_bits import HeadBits, KernelBits, RowBits, bits_by, use_bits
from moe_compile.proof.operator_call import Call, dim_of
from moe_compile.regions.row_domain import Rows, Value
from moe_compile.testing.cpu_rounding import position_rounding as rounding
from moe_compile.testing.cpu_rounding.position_rounding import (
    ALIGNED_BYTES,
    LIE_APART,
    ROUNDED_RIGHT,
    Repeated,
    block_of,
    on_cuda,
    rounds_by_position,
)

REDUCTIONS: Final = ("var", "std", "linalg_vector_norm", "norm")
STRICT: Final = "TESTS_HAVE_STRICT_BITS"
"""Variable of the environment: set, every rank of a `RankPool` has a model that refuses."""


class CpuRows(RowBits):
    """Findings on the rows of one region."""

    def __init__(self, *, refuses: bool) -> None:
        """Begin without findings; if it `refuses`, the proof may learn which nodes need one."""
        super().__init__()
        self._refuses = refuses
        self._repeated = Repeated()
        self._one_expert: Call | None = None

    def follow(self, call: Call, results: Sequence[Value]) -> None:
        """Check `call` with the proven values of its outputs, before anything is written."""
        if call is self._one_expert:
            self.note(call.node, rounding.rows_of_one_expert(call))
        elif results and isinstance(results[0], Rows):
            self.note(call.node, _rounding(call, results[0].dim))
        self.note(call.node, self._repeated.follow(call, results))

    def follow_one_expert(self, call: Call) -> None:
        """Note beforehand that `call` is only known to read all rows of one expert."""
        self._one_expert = call

    def follow_memory(self, call: Call, tensor: torch.Tensor, value: Value) -> None:
        """Note rows that sums may round by their number, which is fixed for rows of one expert."""
        if not isinstance(value, Rows) or not _lie_inside(call, tensor, value.dim):
            return
        expert = call.facts.is_rows_of_one(value.order)
        if expert is None:
            detail = f"rows are not the outermost dimension of shape {list(tensor.shape)}"
            self.note(call.node, detail)
        elif self._refuses:
            call.known.whole.setdefault(call.node, set()).add(expert)

    def follow_gradient(self, gradient: torch.Tensor) -> None:
        """Note the gradient of a function written by hand: it may have repeats."""
        self._repeated.values.add(id(gradient))


class CpuBits(KernelBits):
    """The model of a CPU's last bits."""

    def __init__(self, *, refuses: bool) -> None:
        """Refuse regions with findings if `refuses`, else only report the findings."""
        self.refuses = refuses

    def rows(self) -> CpuRows:
        """Return an empty record of findings on the rows of one region."""
        return CpuRows(refuses=self.refuses)

    def experts(self, whole: Sequence[Call], part: Sequence[Call]) -> str:
        """Return the first finding on chunks of experts with a capacity, "" for none."""
        return first_difference(whole, part)

    def heads(self, core: fx.Node, operands: Sequence[fx.Node], num_kv_heads: int) -> HeadBits:
        """Return the findings on groups of heads of the attention `core`."""
        rounds = rounds_by_group(core, operands, num_kv_heads)
        return HeadBits(
            groups="torch's kernel for these sizes, layouts, masks and backends" if rounds else "",
            alone="threads share the products of one head" if rounds_alone(operands) else "",
        )


def strict_bits() -> AbstractContextManager[None]:
    """Leave regions whole, inside the block, that a CPU may round differently in parts."""
    return bits_by(CpuBits(refuses=True))


def recorded_bits() -> AbstractContextManager[None]:
    """Have reports name, inside the block, what a CPU may round differently in parts."""
    return bits_by(CpuBits(refuses=False))


def use_bits_of_environment() -> None:
    """Refuse in this process what a CPU may round differently in parts, if `STRICT` is set."""
    if STRICT in os.environ:
        use_bits(CpuBits(refuses=True))


def _rounding(call: Call, row_dim: int) -> str:
    """Return the reason why `call`, with rows along `row_dim`, rounds by their place."""
    if call.name in ("mm", "addmm"):
        names = ("self", "mat2") if call.name == "mm" else ("mat1", "mat2")
        return rounding.product(call, call.argument(names[row_dim]), row_dim)
    if call.name == "_grouped_mm":
        return rounding.product(call, call.argument("self"), 0)
    if call.name == "bmm":
        return rounding.batch_product(call)
    if call.name in ("stack", "cat", "constant_pad_nd"):
        return _joined(call, row_dim)
    if call.name in REDUCTIONS:
        return rounding.within_rows(call)
    return rounding.elementwise(call) if call.is_pointwise else ""


def _joined(call: Call, row_dim: int) -> str:
    """Return the reason why products, put into longer rows, round by their place there."""
    ndim = call.outputs[0].dim()
    if call.name == "constant_pad_nd":
        amounts = [*call.argument("pad")]
        padded = [(ndim - 1 - i, amounts[2 * i : 2 * i + 2]) for i in range(len(amounts) // 2)]
        beside = [(d, amount[0]) for d, amount in padded if d != row_dim and any(amount)]
        return next(filter(None, (rounding.parts(call, row_dim, d, [n]) for d, n in beside)), "")
    dim = dim_of(call.argument("dim", 0), ndim)
    if dim == row_dim:
        return ""
    sizes = [1 if call.name == "stack" else int(t.shape[dim]) for t in call.inputs]
    return rounding.parts(call, row_dim, dim, [sum(sizes[:i]) for i in range(len(sizes))])


def _lie_inside(call: Call, rows: torch.Tensor, row_dim: int) -> bool:
    """Whether another dimension lies outside that of the rows, in shape or in memory."""
    others = [d for d, size in enumerate(rows.shape) if d != row_dim and size != 1]
    far = any(d < row_dim or call.facts.depends_on_counts(rows.stride(d)) for d in others)
    return far and rounding.sums_by_place(rows)


PRODUCTS: Final = frozenset({"bmm", "baddbmm"})
ROW_BY_ROW: Final = frozenset(
    {
        "sum", "native_layer_norm", "_fused_rms_norm", "native_layer_norm_backward",
        "_fused_rms_norm_backward",
    }
)  # fmt: skip
"""Operators that sum within an expert, by the same loops for each where experts are outermost."""

NUM_MATRICES: Final = 2
"""Least number of matrices in a batch that are dealt out to threads; a single one is split."""


def first_difference(whole: Sequence[Call], part: Sequence[Call]) -> str:
    """Return the first reason why a part may round differently, "" for none."""
    rounding = {call.name for call in whole if call.is_pointwise and _rounds(call, whole)}
    pairs = zip(whole, part, strict=True)
    return next(filter(None, (_difference(a, b, a.name in rounding) for a, b in pairs)), "")


def _rounds(call: Call, calls: Sequence[Call]) -> bool:
    """Whether an elementwise operator rounds by position; a backward one, as its forward does.

    Facts known of operators hold for their gradients too.
    """
    name = call.name.removesuffix("_backward")
    if name == call.name:
        return rounds_by_position(call)
    forward = next((other for other in calls if other.name == name), None)
    return rounds_by_position(forward) if forward is not None else name not in ROUNDED_RIGHT


def _difference(whole: Call, part: Call, rounds: bool) -> str:
    pairs = list(_pairs(whole, part))
    out = whole.outputs[0]
    if on_cuda(out) or not any(t.dtype.is_floating_point or t.is_complex() for t, _ in pairs):
        return ""
    if all(a.shape == b.shape for a, b in pairs):
        same = all(_lie_alike(a, b) for a, b in pairs)
        if same or (whole.is_pointwise and not rounds):
            return ""
        return (
            f"{whole.name} in {out.dtype}: its inputs have a different layout in memory for "
            "some experts than for all"
        )
    if any(len(_differing(a, b)) > 1 for a, b in pairs):
        return f"{whole.name} in {out.dtype}: the experts are in several dimensions"
    if whole.is_pointwise:
        return _pointwise(whole, pairs) if rounds else ""
    if whole.name in PRODUCTS:
        return _product(whole, pairs)
    if whole.name in ROW_BY_ROW:
        return _by_rows(whole, pairs)
    return f"{whole.name} in {out.dtype}: not known to round by expert"


Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def _pairs(whole: Call, part: Call) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    yield from zip(whole.inputs, part.inputs, strict=True)
    yield from zip(whole.outputs, part.outputs, strict=True)


def _differing(a: torch.Tensor, b: torch.Tensor) -> list[int]:
    """Return the dimensions in which two tensors differ in size."""
    return [d for d, sizes in enumerate(zip(a.shape, b.shape, strict=True)) if sizes[0] != sizes[1]]


def _lie_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    steps = [_steps(t) for t in (a, b)]
    offset = (a.storage_offset() - b.storage_offset()) * a.element_size()
    return steps[0] == steps[1] and offset % ALIGNED_BYTES == 0


def _steps(tensor: torch.Tensor) -> list[int]:
    """Return the strides of the dimensions whose size is not 1."""
    return [s for size, s in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]


def _pointwise(call: Call, pairs: Pairs) -> str:
    block, out = block_of(call), call.outputs[0]
    lies_apart = call.name.removesuffix("_backward") in LIE_APART
    for tensors in pairs:
        for dim in _differing(*tensors):
            if not lies_apart and not all(map(_is_dense, tensors)):
                return f"{call.name} in {out.dtype}: experts that are parts of longer rows"
            if any(not _is_dense(t) or t.stride(dim) % block for t in tensors):
                return (
                    f"{call.name} in {out.dtype}: experts of shape {list(out.shape)} that do not "
                    f"fill blocks of {block}"
                )
    return ""


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements lie without gaps, in whatever order."""
    extent = 1
    walked = zip(tensor.shape, tensor.stride(), strict=True)
    for stride, size in sorted((stride, size) for size, stride in walked if size != 1):
        if stride != extent:
            return False
        extent *= size
    return True


def _product(call: Call, pairs: Pairs) -> str:
    """Check a batch of products: see the module docstring."""
    out = call.outputs[0]
    said = f"{call.name} in {out.dtype}"
    if any(_differing(a, b) not in ([], [0]) for a, b in pairs):
        return f"{said}: the experts are not its batch"
    size, threads = out.element_size(), torch.get_num_threads()
    added = call.inputs[0] if call.name == "baddbmm" else None
    for whole, part in pairs:
        steps = [s for t in (whole, part) for s in (*_steps(t), t.storage_offset()) if s != 1]
        sizes = [int(n) for n in whole.shape[1:]] if size <= 2 and whole is not added else []
        rows = [n * size % ALIGNED_BYTES for n in (*steps, *sizes)]
        if any(rows) or whole.stride()[1:] != part.stride()[1:] or 1 not in whole.stride():
            return f"{said}: matrices of shape {list(whole.shape[1:])}, no multiples of 64 bytes"
    if threads > 1 and (size > 4 or pairs[-1][1].shape[0] < NUM_MATRICES):
        return (
            f"{said}: some of the experts are divided among {threads} threads differently "
            "than all experts"
        )
    return ""


def _by_rows(call: Call, pairs: Pairs) -> str:
    out = call.outputs[0]
    for whole, part in pairs:
        for dim in _differing(whole, part):
            if any(t.stride(dim) != max(t.stride()) or not _is_dense(t) for t in (whole, part)):
                return f"{call.name} in {out.dtype}: the experts are not outermost"
    if torch.get_num_threads() > 1:
        return (
            f"{call.name} in {out.dtype}: threads may divide it differently for some experts "
            "than for all"
        )
    return ""


BOUNDARY: Final = 16
"""Boundary in bytes: products of rows that begin at its multiples round alike."""

FUSED: Final = torch.nn.attention.SDPBackend.FLASH_ATTENTION.name


def rounds_by_group(core: fx.Node, operands: Sequence[fx.Node], num_kv_heads: int) -> bool:
    """Whether attention in any number of groups may differ from the whole in the last bits.

    `operands` are query, key and value. The layout of the result's gradient does not matter: the
    kernel copies it (`flash_attention_backward_kernel_impl`).
    """
    tensors = [tensor for operand in operands if (tensor := tensor_of(operand)) is not None]
    if len(tensors) < 3 or tensors[0].device.type != "cpu":
        return False
    if not is_fused(core, operands):
        return True
    if tensors[0].element_size() < 4:
        return False
    return not all(_rows_lie_alike(tensor, num_kv_heads) for tensor in tensors)


def rounds_alone(operands: Sequence[fx.Node]) -> bool:
    """Whether a group of one query head may differ from the whole in the last bits."""
    query = tensor_of(operands[0])
    return query is None or (query.device.type == "cpu" and not is_known(query.shape[0] > 1))


def is_fused(core: fx.Node, operands: Sequence[fx.Node]) -> bool:
    """Whether the fused kernel of a CPU is proven to compute `core`.

    A sequence without positions is computed by other code, but nothing is summed there either.
    """
    tensors = [tensor for operand in operands if (tensor := tensor_of(operand)) is not None]
    if len(tensors) < 3 or not _is_fused_allowed(core):
        return False
    batches, heads, _, sizes = zip(*(tensor.shape for tensor in tensors), strict=True)
    alike = [*_head_pairs(batches), *_head_pairs(sizes), heads[1] == heads[2]]
    alike += [] if core.kwargs.get("enable_gqa") else _head_pairs(heads)
    dense = all(is_known(tensor.stride(-1) == 1) for tensor in tensors)
    return dense and all(map(is_known, alike)) and _is_mask_fused(core)


def _is_fused_allowed(core: fx.Node) -> bool:
    """Whether the switches allow the fused kernel for `core`: the last one before it decides."""
    allowed = torch.backends.cuda.flash_sdp_enabled()
    for node in itertools.takewhile(lambda node: node is not core, core.graph.nodes):
        if chooses_attention(node):
            backends = argument_of(node, 0, "backends")
            known = isinstance(backends, (list, tuple))
            allowed = known and FUSED in map(_backend_name, backends)
        elif node.op == "call_function" and called_name(node) == "enable_flash_sdp":
            allowed = argument_of(node, 0, "enabled") is True
    return allowed


def _backend_name(backend: Any) -> Any:
    """Return the name of a backend, which is a constant of a graph or a call with its name."""
    if isinstance(backend, fx.Node):
        return backend.args[0] if backend.args else None
    return getattr(backend, "name", None)


def _head_pairs(values: Sequence[Any]) -> list[Any]:
    return [first == other for first, other in itertools.pairwise(values)]


def _is_mask_fused(core: fx.Node) -> bool:
    mask = argument_of(core, 3, "attn_mask")
    if mask is None:
        return True
    tensor = tensor_of(mask) if isinstance(mask, fx.Node) else None
    return tensor is not None and tensor.ndim in (2, 4) and not tensor.requires_grad


def _rows_lie_alike(tensor: torch.Tensor, num_heads: int) -> bool:
    """Whether rows begin at boundaries, in `tensor` and in that of any group of its heads.

    A group has 1 / n of the elements outside of the heads in memory, and the same inside them.
    """
    size = tensor.element_size()
    head_stride = tensor.stride(-3)
    pairs = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    steps = [stride for length, stride in pairs if not is_known(length == 1)]
    return all(
        is_known(step * size % BOUNDARY == 0)
        and (is_known(step <= head_stride) or is_known(step * size % (BOUNDARY * num_heads) == 0))
        for step in (tensor.shape[-1], tensor.storage_offset(), *steps)
    )
