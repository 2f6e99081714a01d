"""Writes and random draws of a node that calls Python, seen by running it on fake tensors.

Contract
    A function or method of Python may write any of its arguments, whatever its name, and draw
    random numbers on its way. It is run once on the values that the tracer stored, under a mode
    that sees every operator of torch it calls; their schemas declare their effects. Nothing is
    computed, and the tracer's values stay as they are.
    A function that is not torch's may do other things where gradients or autocast are on: it runs
    under the node's own modes, on tensors that require gradients where the tracer's do. So does one
    of torch that is given numbers of several types, which it may take under autocast alone.
    A function that fails is taken to write all its inputs and to draw.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.fx as fx
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from moe_compile.graph.inner_graphs import is_higher_order
from moe_compile.graph.memory import plain_tensors, storages_of, tensors_in
from moe_compile.graph.modes import modes, running_under
from moe_compile.graph.query import expression_of, is_launch, is_leaf, is_wait, value_of

OBSERVED: Final = "megamoe_observed"
"""Key of a node's metadata for the observation."""


FAKE_LOG: Final = logging.getLogger("torch._subclasses.fake_tensor")


@dataclass(frozen=True, slots=True)
class Observed:
    """The effects of one node when it ran on values of `inputs`."""

    inputs: tuple[fx.Node, ...]
    written: tuple[fx.Node, ...] = ()
    """Those of `inputs` whose tensors it wrote."""
    draws: bool = False
    """Whether an operator drew random numbers."""
    moves_memory: bool = False
    """Whether an operator gave a tensor other memory."""


MOVES_MEMORY: Final = frozenset(
    {"set_", "set_data", "resize_", "resize_as_", "resize_storage_bytes_", "swap_tensors"}
)
"""Operators, functions and methods that give a tensor other memory; so `x.data = y` is traced."""

ONLY_READS: Final = frozenset({"item", "tolist", "size", "numel", "dim", "stride"})
"""Tensor methods that make no tensor and write none."""


def observed(node: fx.Node) -> Observed | None:
    """Return the observed writes and draws of `node`, None where it is not to be run.

    It is not run if it calls no Python, a function of `operator`, a collective or a host read,
    or if tensors are not all fake, such as inside of `vmap`.
    """
    if not _calls_python(node):
        return None
    inputs = tuple(node.all_input_nodes)
    found: Observed | None = node.meta.get(OBSERVED)
    if found is None or found.inputs != inputs:
        found = _observe(node, inputs)
        node.meta[OBSERVED] = found
    return found


class _Watch(TorchDispatchMode):
    """Notes the tensors that operators write, and whether one draws."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[torch.Tensor] = []
        self.draws = False
        self.moves_memory = False

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        kwargs = kwargs or {}
        self.draws |= draws_by_schema(func, args, kwargs)
        self.moves_memory |= func._schema.name.partition("::")[2] in MOVES_MEMORY
        if func._schema.is_mutable:
            self.written += tensors_in(written_by_schema(func, args, kwargs))
        return func(*args, **kwargs)


def written_by_schema(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Any]:
    """Return the arguments that `func` writes by its schema."""
    return [
        _argument(func, i, args, kwargs)
        for i, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def draws_by_schema(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """Whether `func` draws random numbers; attention has the tag even without dropout."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    named = [i for i, a in enumerate(func._schema.arguments) if a.name == "dropout_p"]
    return all(_argument(func, i, args, kwargs) != 0.0 for i in named)


def _argument(
    func: torch._ops.OpOverload, position: int, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    argument = func._schema.arguments[position]
    given = args[position] if position < len(args) else kwargs.get(argument.name)
    return argument.default_value if given is None else given


def _observe(node: fx.Node, inputs: tuple[fx.Node, ...]) -> Observed | None:
    values = [value_of(i) for i in inputs]
    fake = fake_mode_of([*values, value_of(node)])
    if fake is None or any(value is None for value in values):
        return None
    watch, of_torch = _Watch(), _is_of_torch(node)
    mode = None if of_torch and not _mixes_types(values) else modes(node.graph)[node]
    copy = torch.Tensor.detach if of_torch else alike
    with running_on(fake) as stack:
        if mode is not None:
            stack.enter_context(running_under(mode))
        given = {i: pytree.tree_map_only(torch.Tensor, copy, value_of(i)) for i in inputs}
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), given.__getitem__)
        stack.enter_context(watch)
        try:
            call(node, args, kwargs)
        except Exception:  # noqa: BLE001  (whatever a function raises: it is not followed)
            return Observed(inputs, tuple(i for i in inputs if storages_of(given[i])), draws=True)
    written = storages_of(watch.written)
    writes = tuple(i for i in inputs if storages_of(given[i]) & written)
    return Observed(inputs, writes, watch.draws, watch.moves_memory)


@contextmanager
def running_on(fake: FakeTensorMode) -> Iterator[ExitStack]:
    """Run functions on tensors of `fake` as the tracer of a graph did; sizes stay its symbols.

    A failure is an answer: torch's own log of it, with a trace, would alarm users.
    """
    with ExitStack() as stack:
        stack.enter_context(_without_records())
        stack.enter_context(torch.no_grad())
        stack.enter_context(enable_python_dispatcher())
        stack.enter_context(fake)
        if fake.shape_env is not None:
            stack.enter_context(fake.shape_env.ignore_fresh_unbacked_symbols())
        yield stack


@contextmanager
def _without_records() -> Iterator[None]:
    def drop(record: logging.LogRecord) -> bool:
        del record
        return False

    FAKE_LOG.addFilter(drop)
    try:
        yield
    finally:
        FAKE_LOG.removeFilter(drop)


def alike(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same form, which requires a gradient if this one does.

    One that requires none, or that no operator made, has the memory of this one.
    """
    copy = tensor.detach()
    if not tensor.requires_grad or is_leaf(tensor):
        return copy.requires_grad_(tensor.requires_grad)
    with torch.enable_grad():
        made = copy.requires_grad_() * 1
        strides = [[expression_of(s) for s in t.stride()] for t in (made, tensor)]
        return made if strides[0] == strides[1] else copy.view_as(copy)


def _mixes_types(values: Any) -> bool:
    return len({t.dtype for t in tensors_in(values) if t.is_floating_point()}) > 1


def _is_of_torch(node: fx.Node) -> bool:
    module = str(getattr(node.target, "__module__", None))
    return node.op == "call_method" or module.partition(".")[0] == "torch"


def _calls_python(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target not in ONLY_READS
    if node.op != "call_function" or is_launch(node) or is_wait(node):
        return False
    by_operator = getattr(node.target, "__module__", "") == operator.add.__module__
    is_operator = isinstance(node.target, torch._ops.OpOverload) or is_higher_order(node)
    return not (by_operator or is_operator)


def call(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of `node`, which calls a function or a method, on these arguments."""
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def fake_mode_of(values: Any) -> FakeTensorMode | None:
    """Return the mode that made the tensors among `values`, None where some are of another kind."""
    tensors = list(plain_tensors(values))
    wrapped = any(map(is_functorch_wrapped_tensor, tensors_in(values)))
    if not tensors or wrapped or any(type(tensor) is not FakeTensor for tensor in tensors):
        return None
    return tensors[0].fake_mode
