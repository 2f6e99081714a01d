"""Dynamo graphs of small programs, as a backend sees them."""

import contextlib
import itertools

import torch
import torch.distributed as dist
from torch import fx

from moe_compile.config import MegaMoEConfig
from moe_compile.graph.snapshot import copy_of_graph
from moe_compile.hardware import load_profile
from moe_compile.journal.entries import PassReport
from moe_compile.journal.reasons import Reason
from moe_compile.plan.state import CompileState
from passes.normalize_exchanges import NormalizeExchanges


class CapturedError(Exception):
    """Ends a run whose graph is known: on ranks that do not exist it would compute garbage."""


def dynamo_graphs(program, *inputs):
    """Return the graph of `program` and those of its higher-order operators' bodies.

    Exchanges are in the form our passes know, whatever form this torch traces them in.
    """
    return list(normalized(_traced(program, *inputs)))


def _traced(program, *inputs):
    captured = []

    def stop(*inputs):
        raise CapturedError

    def keep(gm, example_inputs):
        captured.append(gm)
        return stop

    torch._dynamo.reset()
    capture = torch._dynamo.config.patch(capture_scalar_outputs=True)
    with capture, contextlib.suppress(CapturedError):
        torch.compile(program, backend=keep, fullgraph=True)(*inputs)
    (gm,) = captured
    return gm


def graphs_traced_once(program, *inputs):
    """Return copies of `dynamo_graphs`; a file's layers of one class and sizes are traced once."""
    key = _what_is_traced(program, inputs)
    if key is None:
        return dynamo_graphs(program, *inputs)
    if key not in TRACED:
        TRACED[key] = _traced(program, *inputs)
    return list(normalized(copy_of_graph(TRACED[key])))


TRACED = {}
"""Graphs as Dynamo traced them, by what they follow from."""
OF_ANY = vars(torch.nn.Module())
HOOKS = [name for name in OF_ANY if name.endswith("hooks")]
PLAIN = (bool, int, float, str, type(None), torch.dtype)


def _what_is_traced(program, inputs):
    """Return what the graph of a layer follows from; None where that is not known."""
    if not isinstance(program, torch.nn.Module):
        return None
    modules, tensors = [], [*inputs, *program.parameters(), *program.buffers()]
    for name, module in program.named_modules():
        kind, attributes = type(module), vars(module)
        known = {k: _value(v) for k, v in attributes.items() if k not in OF_ANY or k == "training"}
        is_known = kind.__module__.startswith(("tests.", "torch.nn.modules."))
        if not is_known or UNKNOWN in known.values() or any(attributes[one] for one in HOOKS):
            return None
        modules.append((name, kind, *known.items(), *module._parameters, *module._buffers))
    if not all(type(one) in (torch.Tensor, torch.nn.Parameter) for one in tensors):
        return None
    if any(map(vars, tensors)):  # sizes that are marked as dynamic, among others
        return None
    sizes = [(t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors]
    ranks = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else ()
    modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), *ranks
    return *modules, *sizes, *modes, torch._dynamo.config.get_hash()


UNKNOWN = object()


def _value(value):
    """Return an attribute as part of a key, `UNKNOWN` where it cannot be one."""
    if isinstance(value, dist.ProcessGroup):
        return value.group_name, value.size(), value.rank()
    if isinstance(value, tuple):
        values = tuple(map(_value, value))
        return UNKNOWN if UNKNOWN in values else values
    return value if isinstance(value, PLAIN) else UNKNOWN


def same_program(graph, expected):
    """Return "" where two graphs are one program but for names, else where they part."""
    pairs = itertools.zip_longest(*map(_plain, (graph, expected)), fillvalue="(nothing)")
    return next((f"line {i}: {a}, expected: {b}" for i, (a, b) in enumerate(pairs) if a != b), "")


def _plain(graph):
    """Yield the nodes as text, in which every node is a number."""
    names = {}
    for node in graph.nodes:
        names[node] = _Name(f"%{len(names)}")
        target = node.target if node.op != "placeholder" else ""
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), names.__getitem__)
        yield f"{names[node]} = {node.op} {target} {args} {kwargs}"


class _Name(str):
    __slots__ = ()

    def __repr__(self):
        return str(self)


def normalized(gm):
    NormalizeExchanges().run(gm.graph, state())
    yield gm
    for body in gm.children():
        if isinstance(body, fx.GraphModule):
            yield from normalized(body)


def carried_out(results, option):
    """Return what one option had rewritten, and the verdicts on the rest."""
    reports = {r.pass_name: r for r in results}
    plan, rewrite = reports["plan_regions"], reports["rewrite_regions"]
    skipped = tuple(v for v in plan.skipped if v.option == option)
    left = {v.candidate for v in skipped if v.reason is not Reason.FEW_EXPERTS}
    applied = tuple(name for name in rewrite.applied if name not in left)
    return PassReport(pass_name="", applied=applied, skipped=skipped, measures=rewrite.measures)


def state(**options):
    config = MegaMoEConfig(**options)
    return CompileState(config=config, hardware=load_profile("cpu"))
