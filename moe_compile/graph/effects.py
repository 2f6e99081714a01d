"""Effects of a node besides producing its value.

Contract
    Answers hold for Dynamo graphs (functions, tensor methods) and for AOTAutograd graphs alike.
    A node is called pure only where its value is all that running it leaves behind: it may run
    later, twice or not at all, as long as its inputs are the same.
"""

from __future__ import annotations

import operator
from collections.abc import Container
from typing import Any, Final

import torch
import torch.fx as fx
from torch._higher_order_ops.effects import has_effects
from torch.utils import _pytree as pytree

from moe_compile.graph.dependence import IN_PLACE_OPERATORS, written_arguments
from moe_compile.graph.inner_graphs import (
    inside,
    is_higher_order,
    is_opaque,
    registers_hook,
    seeded_call,
)
from moe_compile.graph.modes import changes_mode
from moe_compile.graph.observation import MOVES_MEMORY, draws_by_schema, observed
from moe_compile.graph.query import (
    argument_of,
    called_name,
    is_assertion,
    is_launch,
    is_wait,
    overload_name,
    value_of,
)

HOST_ARITHMETIC: Final = frozenset(
    {
        operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg,
        operator.truediv, operator.pow, operator.ge, operator.gt, operator.le, operator.lt,
        operator.eq, operator.ne, operator.and_, operator.or_, operator.not_, torch.sym_sum,
        torch.sym_max, torch.sym_min, torch.sym_ite, torch.sym_float, torch.sym_int, torch.sym_not,
    }
)  # fmt: skip
"""Functions that, given numbers of the host, compute a number and touch nothing else."""

ASKS_A_SIZE: Final = frozenset({"size", "numel", "dim", "stride", "storage_offset"})
"""Tensor methods that read no element."""

RANDOM_NAMES: Final = frozenset(
    {
        "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal",
        "normal_", "bernoulli", "bernoulli_", "multinomial", "poisson", "uniform_", "random_",
        "cauchy_", "exponential_", "geometric_", "log_normal_", "dropout", "dropout1d", "dropout2d",
        "dropout3d", "alpha_dropout", "feature_alpha_dropout", "feature_dropout", "native_dropout",
        "dropout_", "alpha_dropout_", "rrelu", "rrelu_", "gumbel_softmax", "manual_seed", "seed",
        "fractional_max_pool2d", "fractional_max_pool3d", "scaled_dot_product_attention",
        "trunc_normal_", "set_rng_state",
    }
)  # fmt: skip
"""Functions and methods of a Dynamo graph that may move a generator's state."""


SWITCHED_OFF: Final = frozenset({"dropout", "dropout1d", "dropout2d", "dropout3d"})
"""Of these, functions that return their input where nothing is dropped."""

OWN_NAMESPACES: Final = frozenset(
    {
        "aten", "prims", "inductor_prims", "rngprims", "_c10d_functional", "c10d_functional",
        "_c10d_functional_autograd", "c10d", "symm_mem", "_dtensor", "fsdp", "inductor", "streams",
        "quantized", "quantized_decomposed", "mkldnn", "mkl", "profiler", "ao", "megamoe",
    }
)  # fmt: skip
"""Namespaces of the operators of torch and of ours."""

COMMUNICATING: Final = frozenset({"c10d", "symm_mem", "_dtensor"})
"""Of these, namespaces of operators that communicate as a part of their work."""


def may_attend(node: fx.Node) -> bool:
    """Whether the node may run attention, by a function of torch or of others."""
    if is_higher_order(node):
        return is_opaque(node) or any(map(may_attend, inside(node)))
    if node.op != "call_function" or isinstance(node.target, torch._ops.OpOverload):
        return False
    module = str(getattr(node.target, "__module__", ""))
    of_torch = module.startswith(("torch", operator.add.__module__))
    return not of_torch or "attention" in called_name(node)


def draws_random(node: fx.Node) -> bool:
    """Whether the node draws random numbers or moves a generator's state."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        seeded = draws_by_schema(target, node.args, node.kwargs)
        return seeded or "inductor_seed" in target._schema.name
    if isinstance(target, torch._ops.OpOverloadPacket):
        overloads = (getattr(target, name) for name in target.overloads())
        return any(draws_by_schema(overload, node.args, node.kwargs) for overload in overloads)
    if is_higher_order(node):
        if is_opaque(node) or seeded_call(node) is not None:
            return True
        return any(map(draws_random, inside(node)))
    seen = observed(node)
    by_name = called_name(node) in RANDOM_NAMES and not _is_switched_off(node)
    return by_name or (seen is not None and seen.draws)


def may_draw(node: fx.Node) -> bool:
    """Whether the node draws random numbers, or runs an operator that may without declaring it.

    Torch's own operators declare it by a tag; those that others register often do not.
    """
    namespace = overload_name(node).partition("::")[0]
    return draws_random(node) or (bool(namespace) and namespace not in OWN_NAMESPACES)


def communicates(node: fx.Node) -> bool:
    """Whether the node runs a graph that launches collectives."""
    return any(is_launch(inner) or communicates(inner) for inner in inside(node))


def may_communicate(node: fx.Node) -> bool:
    """Whether the node may launch collectives besides its own, as custom operators may."""
    namespace = overload_name(node).partition("::")[0]
    is_others = bool(namespace) and namespace not in OWN_NAMESPACES - COMMUNICATING
    return communicates(node) or is_opaque(node) or is_others


def _is_switched_off(node: fx.Node) -> bool:
    """Whether a dropout, of its own or of attention, has probability 0 or is off."""
    if called_name(node) == "scaled_dot_product_attention":
        return argument_of(node, 4, "dropout_p", 0.0) == 0.0
    return hands_on(node)


def hands_on(node: fx.Node) -> bool:
    """Whether the node is a dropout that drops nothing: its value is its input."""
    if called_name(node) not in SWITCHED_OFF:
        return False
    is_training, p = argument_of(node, 2, "training", True), argument_of(node, 1, "p", 0.5)
    return is_training is False or (type(p) in (int, float) and p == 0)


def moves_memory(node: fx.Node) -> bool:
    """Whether the node gives a tensor other memory, the node itself or a graph it runs.

    The tracer keeps one value of that tensor, with its last memory: earlier aliases of it, and
    writes through them, cannot be told.
    """
    name = overload_name(node).partition("::")[2] or called_name(node)
    run = observed(node)
    by_its_run = run is not None and run.moves_memory
    return name in MOVES_MEMORY or by_its_run or any(map(moves_memory, inside(node)))


def is_size_query(node: fx.Node) -> bool:
    """Whether the node asks a tensor for its size, strides or the like, and reads no element."""
    if node.op == "call_method":
        return node.target in ASKS_A_SIZE
    return overload_name(node).startswith("aten::sym_")


def always_holds(assertion: fx.Node) -> bool:
    """Whether an assertion says that a tensor's size or place in memory is not negative."""
    said = assertion.args[0]
    if assertion.target is torch._check_is_size or not isinstance(said, fx.Node):
        return isinstance(said, fx.Node) and is_size_query(said)
    form, bound = said.args if said.target is operator.ge else (None, None)
    return isinstance(form, fx.Node) and is_size_query(form) and type(bound) is int and bound <= 0


def is_host_arithmetic(node: fx.Node) -> bool:
    """Whether the node computes a number from numbers of the host, or asserts one."""
    if is_assertion(node):
        return True
    if node.op != "call_function" or node.target not in HOST_ARITHMETIC:
        return False
    values = [value_of(i) for i in node.all_input_nodes]
    return not any(isinstance(v, torch.Tensor) for v in (*values, value_of(node)))


def is_pure(node: fx.Node, implied: Container[fx.Node] = ()) -> bool:
    """Whether the node's value is the only effect of running it.

    Assertions in graphs that it runs count as no effect if they are `implied`.
    """
    return not written_arguments(node) and only_writes(node, implied)


def only_writes(node: fx.Node, implied: Container[fx.Node] = ()) -> bool:
    """Whether the node's value and its writes in place are the only effects of running it."""
    if node.op == "get_attr":
        return True
    if node.op not in ("call_function", "call_method") or is_assertion(node):
        return False
    if is_launch(node) or is_wait(node) or changes_mode(node) or draws_random(node):
        return False
    if _has_effect(node) or _is_noticed(node, implied):
        return False
    return _only_computes(node) or makes_a_value(node) or node.target in IN_PLACE_OPERATORS


def _is_noticed(node: fx.Node, implied: Container[fx.Node]) -> bool:
    """Whether graphs that an operator runs, or graphs inside these, have an effect outside.

    Modes that they switch and tensors of their own that they write end with them.
    """
    for inner in inside(node):
        asserts = is_assertion(inner) and not (always_holds(inner) or inner in implied)
        acts = is_launch(inner) or asserts or _has_effect(inner)
        if acts or _is_noticed(inner, implied):
            return True
    return False


def _has_effect(node: fx.Node) -> bool:
    """Whether torch has the operator registered with an effect: its calls stay, in order."""
    target: Any = node.target
    if is_higher_order(node):
        return is_opaque(node) or registers_hook(node) or has_effects(target)
    if isinstance(target, torch._ops.OpOverloadPacket):
        return any(has_effects(getattr(target, name)) for name in target.overloads())
    return isinstance(target, torch._ops.OpOverload) and has_effects(target)


def _only_computes(node: fx.Node) -> bool:
    """Whether a node without a value of the tracer is known to make one and no more."""
    return is_size_query(node) or node.target is operator.getitem or is_host_arithmetic(node)


def makes_a_value(node: fx.Node) -> bool:
    """Whether the tracer kept a tensor or a number of the host as the node's value."""
    kinds = (torch.Tensor, torch.SymInt, torch.SymBool, torch.SymFloat, int, float, bool)
    leaves = pytree.tree_leaves(value_of(node))
    return bool(leaves) and all(isinstance(leaf, kinds) for leaf in leaves)
