"""A stretch of a Dynamo graph as a program of its own, to be traced; and the graphs of a program.

Contract
    Its inputs are new fake tensors of the sizes, types and devices that the graph states, so that
    tracing leaves nothing in the compilation at hand: no guard, no symbol, no alias.
    Its text names nodes by their place in it, not in the graph, and a Triton kernel by its source,
    not by torch's number for it: equal layers of a model have equal texts.
    `aot_graphs` gives the forward and the backward graph that AOTAutograd makes; no code is
    generated.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import torch
import torch.fx as fx
from functorch.compile import min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from moe_compile.cost.amounts import ranks_of
from moe_compile.graph.edit import Emitter, erase_dead, recompute_all, replace_uses
from moe_compile.graph.inner_graphs import CONSTANTS, KERNEL, launched_kernel
from moe_compile.graph.modes import changes_autocast, changes_grad_mode, changes_mode, modes_around
from moe_compile.graph.query import is_launch, overload_name, value_of
from moe_compile.regions.fused_sums import FusedSums, emit_sums
from moe_compile.regions.grouped_products import EightBits, compute_in_eight_bits

ORIGIN: Final = "megamoe_origin"
"""Key in a node's `custom` annotation, which AOTAutograd hands on: place of the Dynamo node."""

NO_PRODUCTS: Final[Mapping[fx.Node, EightBits]] = MappingProxyType({})

OF_TORCH: Final = frozenset(
    {"aten", "prims", "c10d", "_c10d_functional", "_c10d_functional_autograd", "megamoe"}
)
"""Namespaces of operators that are the same wherever torch and megamoe are the same."""
OF_PYTHON: Final = frozenset({"torch", "_operator", "builtins", "math", "passes", "moe_compile"})
NUMBERS: Final = re.compile(rf"\b({KERNEL}|{CONSTANTS}) = \d+")
WRITTEN: Final = (bool, int, float, str, torch.dtype, type(None))
"""Types of a kernel's constants whose text is all there is to them."""
Partition: TypeAlias = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]

AOT: Final = functools.partial(aot_autograd, keep_inference_input_mutations=True)
"""Functionalization as Inductor asks for it: writes into inputs stay, `x.data = y` among them."""


@dataclass(slots=True)
class LayerProgram:
    """Nodes of a Dynamo graph as a graph module, with its inputs."""

    module: fx.GraphModule
    inputs: list[torch.Tensor]
    """Tensors on the graph's own fake mode; only sizes, types and devices are read."""
    origins: list[fx.Node] = field(default_factory=list)
    """The Dynamo node at each place."""
    objects: list[Any] = field(default_factory=list)
    """Inputs that are no tensors: meshes of distributed tensors."""
    is_recomputed: bool = False
    """Whether the backward recomputes all but the rows that exchanges received."""
    rows: int = 1
    """Size that `NominalSizes` gives to a number which the host reads and nothing explains."""

    @property
    def is_of_torch(self) -> bool:
        """Whether its text determines it: it has the source of all that is not torch's own."""
        return not self.objects and _is_of_torch(self.module)

    @property
    def text(self) -> str:
        """Return a hash of everything that tracing depends on."""
        given = [
            f"{type(t).__name__} {t.dtype} {t.device} {tuple(t.shape)} {t.stride()} "
            f"{t.requires_grad} {is_weight(t)} {_inner(t)}"
            for t in self.inputs
        ]
        ranks = (str(ranks_of(node)) for node in self.module.graph.nodes if is_launch(node))
        about = (torch.__version__, str(self.rows), str(self.is_recomputed), *modes_around())
        parts = (*about, *ranks, *given, *map(str, self.objects), *_code(self.module))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def graphs(self) -> tuple[fx.Graph, ...]:
        """Return AOTAutograd's forward graph, and backward graph where there is a gradient."""
        if self.is_recomputed:
            recompute_all(self.module.graph)
        with _apart() as mode:
            inputs = [_fresh(t, mode) for t in self.inputs]
            return tuple(gm.graph for gm in aot_graphs(self.module, inputs))


def is_weight(tensor: torch.Tensor) -> bool:
    """Whether an input of a program is a weight; another may be a result of a layer before."""
    return isinstance(tensor, torch.nn.Parameter)


def program_of(
    graph: fx.Graph,
    nodes: Collection[fx.Node],
    sums: Iterable[FusedSums] = (),
    products: Mapping[fx.Node, EightBits] = NO_PRODUCTS,
) -> LayerProgram:
    """Return the program of `nodes`, less those that are given a size which only a run knows.

    Such nodes finish the layer before: the rows its experts send back are no tokens yet.
    Switches of grad mode and autocast before and behind it are part of it, where they matter.
    Each of `sums` that lies among the nodes becomes one operator, and each of `products` one in
    eight bits.
    """
    stretch = fx.Graph()
    program = LayerProgram(fx.GraphModule({}, stretch), [])
    owner = graph.owning_module
    env: dict[fx.Node, fx.Node] = {}
    body = _body(graph, nodes)
    inside = set(body)
    given = dict.fromkeys(a for n in body for a in n.all_input_nodes if a not in inside)
    tensors = [n for n in given if n.op != "get_attr" and _object(value_of(n)) is None]
    for place, node in enumerate(tensors):
        env[node] = stretch.placeholder(f"given_{place}")
        program.inputs.append(value_of(node))
    for node in given:
        if node not in env and node.op != "get_attr":
            name = f"object_{len(program.objects)}"
            program.objects.append(_object(value_of(node)))
            setattr(program.module, name, program.objects[-1])
            env[node] = stretch.create_node("get_attr", name)
    for place, node in enumerate(n for n in given if n.op == "get_attr"):
        _set_attribute(program.module, f"attr_{place}", _attribute(owner, str(node.target)))
        env[node] = stretch.get_attr(f"attr_{place}")
    for place, node in enumerate(body):
        args = fx.map_arg((_without_message(node), node.kwargs), env.__getitem__)
        env[node] = stretch.create_node(node.op, node.target, *args, name=f"n{place}")
        env[node].meta["custom"] = {ORIGIN: place}
        program.origins.append(node)
    for node in filter(products.__contains__, body):
        compute_in_eight_bits(env[node], products[node])
    for form in sums:
        _fuse(form, env)
    read = [n for n in body if any(u not in inside for u in n.users)]
    stretch.output([env[n] for n in read if isinstance(value_of(n), torch.Tensor | None)])
    program.module.recompile()
    return program


def _fuse(form: FusedSums, env: dict[fx.Node, fx.Node]) -> None:
    """Replace sums of rows in a program by one operator."""
    total = form.sums.total
    if not {total, *form.dead} <= env.keys():
        return
    made = emit_sums(Emitter(env[total]), form, env.__getitem__)
    replace_uses({env[total]: made})
    erase_dead([env.pop(node) for node in form.dead])
    env[total] = made


def _body(graph: fx.Graph, nodes: Collection[fx.Node]) -> list[fx.Node]:
    inside: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op.startswith("call") and (node in nodes or changes_mode(node)):
            given = (a for a in node.all_input_nodes if a not in inside)
            if all(a.op == "get_attr" or _is_known(value_of(a)) for a in given):
                inside.add(node)
    return _without_idle_switches(node for node in graph.nodes if node in inside)


def _without_idle_switches(body: Iterable[fx.Node]) -> list[fx.Node]:
    """Leave out switches of a mode that are undone or repeated before anything else runs."""
    kept: list[fx.Node] = []
    for node in body:
        if changes_grad_mode(node):
            if kept and changes_grad_mode(kept[-1]):
                kept.pop()
            if node.args == (_grad_mode_after(kept),):
                continue
        elif changes_autocast(node) and kept and kept[-1] in node.all_input_nodes:
            kept.pop()
            continue
        kept.append(node)
    return kept


def _grad_mode_after(body: Sequence[fx.Node]) -> object:
    switches = (node.args[0] for node in reversed(body) if changes_grad_mode(node) and node.args)
    return next(switches, torch.is_grad_enabled())


def _without_message(node: fx.Node) -> tuple[Any, ...]:
    """Return a node's arguments; an assertion's without its text, which names symbols."""
    is_assertion = overload_name(node) == "aten::_assert_scalar"
    return (node.args[0], "") if is_assertion else node.args


@contextmanager
def _apart() -> Iterator[FakeTensorMode]:
    """Trace with a fake mode and symbols of its own."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with tracing(TracingContext(mode)):
        yield mode


def _fresh(tensor: Any, mode: FakeTensorMode) -> Any:
    """Return a new tensor of the same size, type and device; any other object as it is."""
    if not isinstance(tensor, torch.Tensor):
        return tensor  # a distributed tensor's mesh, say
    if is_traceable_wrapper_subclass(tensor):
        names, context = tensor.__tensor_flatten__()
        inner = {name: _fresh(getattr(tensor, name), mode) for name in names}
        shape, stride = tensor.shape, tensor.stride()
        made: Any = type(tensor).__tensor_unflatten__(inner, context, shape, stride)
    else:
        with mode:
            made = torch.empty_strided(
                tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=tensor.device
            )
    fresh: torch.Tensor = made.detach().requires_grad_(tensor.requires_grad)
    with mode:
        return fresh.clone() if fresh.requires_grad else fresh  # a leaf may not be written in place


def _is_known(value: Any) -> bool:
    """Whether `value` is a tensor of known size, or neither tensor nor number."""
    if not isinstance(value, torch.Tensor):
        return _object(value) is not None
    return all(type(size) is int for size in (*value.shape, *value.stride()))


def _object(value: Any) -> Any:
    """Return the object of Python that a fake value of the tracer stands for; None for another."""
    return None if isinstance(value, torch.Tensor) else getattr(value, "real_obj", None)


def _inner(tensor: torch.Tensor) -> str:
    return str(tensor.__tensor_flatten__()[1]) if is_traceable_wrapper_subclass(tensor) else ""


def _attribute(owner: torch.nn.Module | None, name: str) -> Any:
    found: Any = owner
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _set_attribute(module: fx.GraphModule, name: str, value: Any) -> None:
    if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
        module.register_buffer(name, value)
    else:
        setattr(module, name, value)


def _code(module: fx.GraphModule) -> Sequence[str]:
    """Return the code of a module and of the modules that its higher-order operators call."""
    inner = [line for _, child in module.named_children() for line in _code(child)]
    tensors = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    shapes = [f"{name} {t.dtype} {tuple(t.shape)}" for name, t in sorted(tensors.items())]
    code = NUMBERS.sub(r"\1", getattr(module, "code", str(module)))
    launched = filter(None, map(launched_kernel, _nodes(module)))
    kernels = [f"{_source(kernel)} {constants}" for kernel, constants in launched]
    return [code, *kernels, *shapes, *inner]


def _nodes(module: torch.nn.Module) -> Iterable[fx.Node]:
    graph = getattr(module, "graph", None)
    return graph.nodes if isinstance(graph, fx.Graph) else ()


def _source(kernel: Any) -> str:
    """Return Triton's hash of a kernel's source and of all it calls.

    Its identity in this process for a kernel that Triton tunes, or interprets.
    """
    return getattr(kernel, "cache_key", "") or f"{kernel} {id(kernel)}"


def _is_of_torch(module: torch.nn.Module) -> bool:
    """Whether the text of a module has the source of all that it calls and is not torch's own."""
    calls_known = all(map(_calls_torch, _nodes(module)))
    return calls_known and all(map(_is_of_torch, module.children()))


def _calls_torch(node: fx.Node) -> bool:
    if node.op != "call_function":
        return True
    if isinstance(node.target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return overload_name(node).partition("::")[0] in OF_TORCH
    if (launched := launched_kernel(node)) is not None:
        kernel, constants = launched
        is_written = all(isinstance(value, WRITTEN) for value in constants.values())
        return is_written and hasattr(kernel, "cache_key")
    module = getattr(node.target, "__module__", None) or "torch"  # its functions in C have none
    return str(module).partition(".")[0] in OF_PYTHON


class _Traced(Exception):
    """Carries graphs out of AOTAutograd."""

    def __init__(self, *graphs: fx.GraphModule) -> None:
        super().__init__()
        self.graphs = graphs


def aot_graphs(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    partition: Partition = min_cut_rematerialization_partition,
) -> tuple[fx.GraphModule, ...]:
    """Return the forward and the backward graph; the forward alone where nothing has a gradient."""

    def stop_after(joint: fx.GraphModule, joint_inputs: Any, **settings: Any) -> Any:
        raise _Traced(*partition(joint, joint_inputs, **settings))

    def stop(forward: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        del inputs
        raise _Traced(forward)

    try:
        AOT(fw_compiler=stop, bw_compiler=stop, partition_fn=stop_after)(gm, list(example_inputs))
    except _Traced as traced:
        return traced.graphs
    raise ValueError("AOTAutograd partitioned nothing")
