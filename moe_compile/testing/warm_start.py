"""The one-time work of a process's first compilation, done on import, for a process to be copied.

Torch fills its tables of operators and decompositions, and sympy its caches, while a first program
is compiled: a second of CPU time in every rank that is not a copy of a process that has done so.
No collective is launched, no random number drawn and no thread started. Where compiling fails, the
copies have at least the imports, and the ranks report the cause with programs of their own.
"""

from __future__ import annotations

import gc
import os
import warnings

import torch
import torch.nn.functional as F

import moe_compile.backend  # noqa: F401  (every rank needs it, and it takes a quarter of a second)
from moe_compile.testing.cpu_rounding.cpu_bits import STRICT
from moe_compile.testing.cpu_rounding.position_rounding import try_common_functions


def _multiply_by_label(
    x: torch.Tensor, weights: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """Multiply each row of `x` by the weight of its label; sizes depend on the labels."""
    order = torch.argsort(labels, stable=True)
    counts = F.one_hot(labels, len(weights)).sum(0).tolist()
    parts = zip(torch.split(x[order], counts), weights, strict=True)
    return torch.zeros_like(x).index_add(0, order, torch.cat([F.silu(p @ w) for p, w in parts]))


def _compile_once() -> None:
    x = torch.ones(4, 8, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.ones(2, 8, 8, dtype=torch.bfloat16, requires_grad=True)
    torch._dynamo.mark_dynamic(x, 0)
    with torch._dynamo.config.patch(capture_scalar_outputs=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(_multiply_by_label, backend="aot_eager", fullgraph=True)
        compiled(x, weights, torch.tensor([0, 1, 1, 0])).sum().backward()


torch.set_num_threads(1)  # threads of a product would not be in the copies
# nor would the threads that autograd starts at the first gradient, one for each kind of device it
# finds: in torch 2.11 it finds none before the first compilation and one after it
torch.ones(1, requires_grad=True).sum().backward()
FAILED = ""
"""Error that ended the compilation, "" for none."""
try:
    _compile_once()
except Exception as error:  # noqa: BLE001  (whatever a compiler raises)
    FAILED = f"{type(error).__name__}: {error}"
if STRICT in os.environ:
    try_common_functions()
torch._dynamo.reset()
torch._dynamo.utils.counters.clear()
gc.collect()
gc.freeze()
