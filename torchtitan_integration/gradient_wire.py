"""FSDP2's reduce-scatter of float32 gradients with half the bytes: bfloat16 out, float32 sums.

Contract
    Each rank's contribution is rounded once, after it has been accumulated, and the sum over
    ranks is float32; so are the all-reduce over HSDP's replicas and all that follows.
    No memory is taken beyond that of the float32 reduce-scatter but `STAGED` values and, on a
    CPU, one more output.
    A gradient reduced in another type than float32 goes the way torch sends it.

FSDP2 hands its buffers over on its reduce-scatter stream, and frees the input only after what this
stream was given: rounding, exchange and sum are all put there, in this order, and the input is
free to be overwritten.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from moe_compile.errors import ContractViolation
from moe_compile.ops.rounded_sum import round_in_place, sum_contributions

_REDUCE_SCATTER: Final[Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
"""Newer torch has the first name, and warns of the second."""


class RoundedReduceScatter:
    """What `FSDPModule.set_custom_reduce_scatter` takes."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a buffer for FSDP2 to fill, or to read the result from."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Reduce `input_tensor` over `group` into `output_tensor`; return a Work if `async_op`.

        The input's values are lost. With `async_op` the sum is made when the Work is waited for,
        on the stream that waits.
        """
        if input_tensor.dtype != torch.float32:
            return _REDUCE_SCATTER(
                output_tensor, input_tensor, op=op, group=group, async_op=async_op
            )
        scale = _scale(op, group.size())
        halves = round_in_place(input_tensor)
        launched = dist.all_to_all_single(
            halves.free, halves.rounded, group=group, async_op=async_op
        )

        def finish() -> None:
            sum_contributions(halves.free, output_tensor, scale)

        if async_op:
            return _SumWhenWaited(launched, finish)
        finish()
        return None


class _SumWhenWaited(dist.Work):
    """An exchange on its way, and the sum that is due after it."""

    def __init__(self, exchange: Any, finish: Callable[[], None]) -> None:
        super().__init__()
        self._exchange = exchange
        self._finish = finish
        self._is_done = False

    def is_completed(self) -> bool:
        """Return whether the sum has been made."""
        return self._is_done

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        """Wait for the exchange, then sum; 0 is the group's own timeout."""
        if not self._is_done:
            self._exchange.wait(timeout)
            self._finish()
            self._is_done = True
        return True


def _scale(op: Any, ranks: int) -> float:
    """Return the factor by which a reduction's result differs from a sum."""
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return 1.0 / ranks
    if op == dist.ReduceOp.PREMUL_SUM:
        factor = op.__getstate__()[1]  # the only way to read it; torch pickles operations so
        return float(factor)
    raise ContractViolation(f"gradient_wire: FSDP2 asked for reduction {op}, not sum or average")


def round_gradients(model: nn.Module) -> None:
    """Give every FSDP module of `model` the reduce-scatter of this file."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(RoundedReduceScatter())  # type: ignore[arg-type]
