"""The arguments that the rules of the row proof look at, by operator.

Contract
    A call that gives any other argument a value other than its default is refused: what is not
    looked at may change which rows meet, or how a gradient is summed.
"""

from __future__ import annotations

from typing import Final

from moe_compile.journal.reasons import Reason
from moe_compile.proof.operator_call import Call
from moe_compile.regions.row_domain import Unproven

WITHIN_ROWS: Final = frozenset(
    {
        "self", "input", "dim", "keepdim", "dtype", "correction", "unbiased", "half_to_float",
        "ord", "p", "k", "largest", "sorted", "descending", "stable",
    }
)  # fmt: skip
"""Of reductions, scans and sorts: what they do is theirs, along which dimensions is looked at."""

UNDERSTOOD: Final[dict[str, frozenset[str]]] = {
    "view": frozenset({"self", "size"}),
    "_unsafe_view": frozenset({"self", "size"}),
    "reshape": frozenset({"self", "shape"}),
    "_reshape_alias": frozenset({"self", "size", "stride"}),
    "permute": frozenset({"self", "dims"}),
    "transpose": frozenset({"self", "dim0", "dim1"}),
    "t": frozenset({"self"}),
    "unsqueeze": frozenset({"self", "dim"}),
    "expand": frozenset({"self", "size"}),
    "squeeze": frozenset({"self", "dim"}),
    "select": frozenset({"self", "dim", "index"}),
    "unbind": frozenset({"self", "dim"}),
    "slice": frozenset({"self", "dim", "start", "end", "step"}),
    "split": frozenset({"self", "split_size", "dim"}),
    "split_with_sizes": frozenset({"self", "split_sizes", "dim"}),
    "cat": frozenset({"tensors", "dim"}),
    "stack": frozenset({"tensors", "dim"}),
    "constant_pad_nd": frozenset({"self", "pad", "value"}),
    "native_layer_norm": frozenset({"input", "normalized_shape", "weight", "bias", "eps"}),
    "_fused_rms_norm": frozenset({"input", "normalized_shape", "weight", "eps"}),
    "mm": frozenset({"self", "mat2"}),
    "addmm": frozenset({"self", "mat1", "mat2"}),
    "bmm": frozenset({"self", "mat2"}),
    "_grouped_mm": frozenset({"self", "mat2", "offs", "out_dtype"}),
    "index": frozenset({"self", "indices"}),
    "index_select": frozenset({"self", "dim", "index"}),
    "gather": frozenset({"self", "dim", "index"}),
    "embedding": frozenset({"weight", "indices"}),
    "index_put": frozenset({"self", "indices", "values", "accumulate"}),
    "_unsafe_index_put": frozenset({"self", "indices", "values", "accumulate"}),
    "index_copy": frozenset({"self", "dim", "index", "source"}),
    "index_add": frozenset({"self", "dim", "index", "source"}),
    "scatter": frozenset({"self", "dim", "index", "src"}),
    "scatter_add": frozenset({"self", "dim", "index", "src"}),
    "repeat_interleave": frozenset({"repeats", "output_size"}),
    "nonzero": frozenset({"self"}),
    "histc": frozenset({"self", "bins", "min", "max"}),
    **dict.fromkeys(
        (
            "sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "var", "std",
            "var_mean", "prod", "any", "all", "logsumexp", "linalg_vector_norm", "norm",
            "_softmax", "_log_softmax", "cumsum", "cumprod", "topk", "sort", "glu",
        ),
        WITHIN_ROWS,
    ),
}  # fmt: skip


def check_arguments(call: Call) -> None:
    """Raise Unproven where an argument that no rule looks at has another value than its default."""
    understood = UNDERSTOOD.get(call.name)
    if understood is None:
        return
    for declared in call.func._schema.arguments:
        if declared.name not in understood:
            given, default = call.argument(declared.name), declared.default_value
            # types first: a size known only at run time has no value to compare
            if (type(given), given) != (type(default), default):
                raise Unproven(Reason.UNKNOWN_OPERATOR, f"{call.name} with {declared.name}")
