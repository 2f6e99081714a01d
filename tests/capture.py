"""Dynamo graphs of small programs, as a backend sees them."""

import contextlib
import itertools

import torch
from torch import fx

from moe_compile.config import MegaMoEConfig
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
    return list(normalized(gm))


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
