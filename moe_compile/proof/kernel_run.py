"""Run a Triton kernel of a graph on tensors of the CPU, by Triton's own interpreter.

Contract
    Where the interpreter cannot run it, it runs on the first CUDA device; where there is none,
    RuntimeError. Tensors written are written on the CPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.fx as fx
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch.utils import _pytree as pytree

FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError)
"""What the interpreter may raise of code it cannot run, apart from its own error."""


def run_kernel(node: fx.Node, value: Callable[[fx.Node], Any]) -> None:
    """Run what a `triton_kernel_wrapper_mutation` node runs, on `value` of the nodes it reads."""
    kernel: Any = kernel_side_table.get_kernel(_index(node, "kernel_idx"))
    constants = kernel_side_table.get_constant_args(_index(node, "constant_args_idx"))
    given = fx.node.map_arg((node.kwargs["kwargs"], node.kwargs["grid"]), value)
    tensors, grids = given
    grid = tuple(int(size) for size in grids[0])
    arguments = {**tensors, **constants}
    try:
        _interpret(kernel, grid, arguments)
    except FAILURES as error:
        if not torch.cuda.is_available():
            raise RuntimeError(f"a kernel that cannot run on a CPU: {error}") from error
        _run_on_device(kernel, grid, arguments)


def _index(node: fx.Node, name: str) -> int:
    index = node.kwargs[name]
    assert isinstance(index, int)
    return index


def _interpret(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> None:
    while not hasattr(kernel, "params") and hasattr(kernel, "fn"):  # behind an autotuner
        kernel = kernel.fn
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    try:
        interpreter.InterpretedFunction(kernel.fn)[grid](**arguments)
    except interpreter.InterpreterError as error:
        raise RuntimeError(str(error)) from error


def _run_on_device(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> None:
    there = pytree.tree_map_only(torch.Tensor, lambda t: t.cuda(), dict(arguments))
    kernel[grid](**there)
    for name, tensor in arguments.items():
        if isinstance(tensor, torch.Tensor):
            tensor.copy_(there[name])
