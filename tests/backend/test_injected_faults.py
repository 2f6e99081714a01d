"""A fault at any pass, or stage of compilation: the program computes what it was written for.

The fault of a pass comes once the pass has done its work and has spoiled the graph besides: a graph
that is not put back whole shows in the values. Where one rank alone has the fault, the others have
rewritten the program, and must run it as that rank does.

The places come from where they are defined: the passes of all levels, the hooks of Inductor that a
compilation takes, and in our sources each operator that Inductor is taught to lower, and each node
of its that writes code.
"""

import ast
import contextlib
import dataclasses
import functools
import importlib
import itertools
import logging
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._inductor import lowering
from torch._inductor.exc import InductorError
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import IRNode
from torch._inductor.utils import fresh_inductor_cache

from moe_compile import codegen
from moe_compile.backend import rewrite
from moe_compile.config import MegaMoEConfig
from moe_compile.errors import ContractViolation, InvalidConfig
from moe_compile.failed_compilation import compiled_or_as_written
from moe_compile.testing.host_copies import copies_on_cpu
from moe_compile.testing.programs.every_rewrite import LOOPED
from moe_compile.testing.programs.legal import legal
from moe_compile.testing.programs.run import run
from moe_compile.testing.programs.text import source_of
from passes.pipeline import LEVELS, PIN
from tests.capture import CapturedError, dynamo_graphs, state
from tests.layers import GroupedExperts
from tests.slow_parameters import exhaustive_but

ROOT = Path(__file__).parents[2]
OURS = ("moe_compile", "passes")
"""Packages whose code may run inside of Inductor."""
TOKENS = torch.randn(8, 16, dtype=torch.bfloat16, requires_grad=True)
STRICT = {"hardware": "cpu", "chunks": 2, "equal_tokens": True, "strict": True}


def taught_lowerings():
    """Return operator -> the function of ours that teaches Inductor to lower it."""
    found = {}
    for path in sorted(one for name in OURS for one in ROOT.glob(f"{name}/**/*.py")):
        if "register_lowering" not in (text := path.read_text()):
            continue
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        module = importlib.import_module(name)
        here = {
            getattr(module, call.args[0].id): getattr(module, function.name)
            for function in ast.parse(text).body
            for call in ast.walk(function)
            if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "register_lowering"
        }
        assert len(here) == text.count("register_lowering("), f"{name} has one elsewhere"
        found |= here
    return found


def subclasses(kind):
    for one in kind.__subclasses__():
        yield from (one, *subclasses(one))


def writers():
    """Return the nodes of Inductor's that write code of ours, by name."""
    mine = (one for one in subclasses(IRNode) if one.__module__.partition(".")[0] in OURS)
    return {one.__name__: one for one in mine if "codegen" in vars(one)}


LOWERINGS = taught_lowerings()
for teach in LOWERINGS.values():
    teach()
WRITERS = writers()
PASSES = {one.name: type(one) for level in LEVELS for one in level.passes}
WITH_INDUCTOR = tuple(one.name for one in PIN.passes)
"""Passes that edit nothing but what Inductor's code generator reads."""
WITHOUT_INDUCTOR = tuple(name for name in PASSES if name not in WITH_INDUCTOR)
STAGES = ("partitioned", "make_boxed_func")
"""Names in `moe_compile.codegen`: the cut of the joint graph, and what is made of each part."""
INDUCTOR_STAGES = ("run", "codegen", "compile_to_module")
"""Methods of Inductor's GraphLowering, which fail for every program with a pass of ours."""
INNER = "_compile_one"
"""Name in `moe_compile.codegen`: what is called for each graph in place of `compile_fx_inner`."""
ON_A_GPU = ("megamoe::moving_input", "MovingInput", "megamoe::quantize_rows", "NamedSize")
"""For CUDA graphs, of inputs on a device, and for kernels that quantise: here without a fault."""
HOOKED = (*codegen.HOOKS, codegen.PARTITIONER)
INSIDE = tuple(
    pair
    for pair in (
        *(("hook", name) for name in HOOKED),
        *(("lowering", operator.name()) for operator in LOWERINGS),
        *(("code", name) for name in WRITERS),
    )
    if pair[1] not in ON_A_GPU
)
"""Where code of ours runs in Inductor beside passes."""
IN_INDUCTOR = (
    *WITH_INDUCTOR,
    *itertools.product(INDUCTOR_STAGES, ("forward", "backward")),
    INNER,
    *INSIDE,
)
EVERYWHERE = (*WITHOUT_INDUCTOR, *STAGES, *IN_INDUCTOR)
SPREAD = (
    *(level.passes[0].name for level in LEVELS), *STAGES, ("run", "forward"),
    ("compile_to_module", "backward"),
)  # fmt: skip
"""A pass of each level and what comes after: one code puts graphs back, whichever pass failed."""
FAULT = "the fault that was put in"
OTHERWISE = {torch.mul: torch.add, torch.ops.aten.mul.Tensor: torch.ops.aten.add.Tensor}
AS_WRITTEN = "run as written"


BY_INDUCTOR = "'megamoe.codegen': 'inductor', "
OFFLOAD = "'megamoe.offload_budget': 1.0, "
CAPTURE = "'triton.cudagraphs': True, "
ASKED = {
    "offload_activations": OFFLOAD,
    ("hook", codegen.PARTITIONER): OFFLOAD,
    ("lowering", "megamoe::measured_wait"): "'megamoe.measure_waits': True, ",
    ("lowering", "megamoe::step_sizes"): CAPTURE,
    ("lowering", "megamoe::of_step"): CAPTURE,
    ("code", "StepSizes"): CAPTURE,
}
"""Places where code runs only if asked for."""
ROUNDINGS = 1e-5
"""Relative error of chunks in float32 by Inductor, which fuses others than without chunks."""


def text_of(program, options=""):
    if options.startswith(BY_INDUCTOR):
        program = dataclasses.replace(program, dtype="float32")
    text = source_of(legal(program)).replace("\nMIRRORED = True ", "\nMIRRORED = False ")
    if options.startswith(BY_INDUCTOR):
        text = text.replace("\nBOUND = 0.0", f"\nBOUND = {ROUNDINGS}")
    return text.replace("\nOPTIONS = {", "\nOPTIONS = {" + options)


@contextlib.contextmanager
def fault_in_pass(name):
    original = PASSES[name].run

    def spoils(self, graph, state):
        original(self, graph, state)
        for node in graph.nodes:
            node.target = OTHERWISE.get(node.target, node.target)
        raise (ContractViolation if self.is_check else IndexError)(FAULT)

    with mock.patch.object(PASSES[name], "run", spoils):
        yield


@contextlib.contextmanager
def fault_in_stage(name):
    """The first call fails: by then the program is rewritten."""
    original, calls = getattr(codegen, name), []

    def fails(*arguments, **settings):
        calls.append(name)
        if len(calls) == 1:
            raise IndexError(FAULT)
        return original(*arguments, **settings)

    with mock.patch.object(codegen, name, fails):
        yield


@contextlib.contextmanager
def fault_in_inductor(name, direction):
    original, is_faulty = getattr(GraphLowering, name), direction == "backward"

    def fails(self, *arguments):
        if self.is_backward is is_faulty and inductor_config.post_grad_custom_post_pass:
            raise IndexError(FAULT)
        return original(self, *arguments)

    with mock.patch.object(GraphLowering, name, fails), fresh_inductor_cache():
        yield


class Hooked(codegen.LevelPass):
    """A hook that fails once its passes have run, where they are those of `name`."""

    name = ""

    def __init__(self, levels, *others):
        super().__init__(levels, *others)
        self.is_faulty = bool(levels) and {*levels} <= {*codegen.HOOKS[self.name]}

    def __call__(self, graph):
        super().__call__(graph)
        if self.is_faulty:
            raise IndexError(FAULT)


@contextlib.contextmanager
def fault_inside(kind, name):
    def fails(*arguments, **settings):
        raise IndexError(FAULT)

    if kind == "lowering":
        operator = next(one for one in LOWERINGS if one.name() == name)
        fault = mock.patch.dict(lowering.lowerings, {operator: fails})
    elif kind == "code":
        fault = mock.patch.object(WRITERS[name], "codegen", fails)
    elif name == codegen.PARTITIONER:
        fault = mock.patch.object(codegen.Partitioner, "__call__", fails)
    else:
        fault = mock.patch.multiple(codegen, LevelPass=type("At", (Hooked,), {"name": name}))
    with fault, fresh_inductor_cache():
        yield


class Heard(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def with_fault(rank, name, faulty_ranks, text):
    """Run the program on this rank; return its findings and the warnings about the fault.

    What a fault leaves of the program is compared with plain Inductor where Inductor compiles it.
    """
    reference = "inductor" if BY_INDUCTOR in text else "eager"
    heard, logger = Heard(), logging.getLogger("moe_compile")
    logger.addHandler(heard)
    if name in INSIDE:
        fault = functools.partial(fault_inside, *name)
    elif isinstance(name, tuple):
        fault = functools.partial(fault_in_inductor, *name)
    else:
        fault = functools.partial(fault_in_pass if name in PASSES else fault_in_stage, name)
    try:
        with copies_on_cpu(), fault() if rank in faulty_ranks else contextlib.nullcontext():
            found = run(rank, text, reference=reference)
    finally:
        logger.removeHandler(heard)
    return found, [line for line in heard.lines if FAULT in line]


def run_with_fault(pool, name, faulty_ranks, options=""):
    pool.regroup()
    options = (BY_INDUCTOR if name in IN_INDUCTOR else "") + ASKED.get(name, "") + options
    return pool.run(with_fault, name, faulty_ranks, text_of(LOOPED, options))


def names_fault(texts, name):
    """A fault of a check is one of the compilation, as is one of a stage."""
    step = name if name in PASSES and not PASSES[name].is_check else "compilation"
    return [text for text in texts if text.startswith(step) and FAULT in text]


@pytest.mark.parametrize(
    "name", exhaustive_but([(x,) for x in SPREAD], [(x,) for x in EVERYWHERE]), ids=str
)
def test_a_fault_of_all_ranks_changes_no_value(two_ranks, name):
    """It is warned of once for each graph, forward and backward.

    With a fault of a stage the program runs as written, also where the backward alone has it.
    """
    (first, _), (second, _) = results = run_with_fault(two_ranks, name, (0, 1))
    assert first.verdicts == second.verdicts
    for found, warned in results:
        assert not found.compiled_error and not found.differences
        dropped = names_fault(found.dropped, name)
        assert len(warned) == len(dropped) in (1, 2), (warned, found.dropped)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", EVERYWHERE, ids=str)
def test_where_one_rank_has_it_all_run_the_program_as_written(two_ranks, name):
    (first, none), (second, warned) = run_with_fault(two_ranks, name, (1,))
    assert not none and warned
    assert names_fault(second.dropped, name) and not first.dropped
    assert [text.partition(":")[0] for text in first.verdicts] == [AS_WRITTEN]
    for found in (first, second):
        assert not found.compiled_error and not found.differences


@pytest.mark.slow
@pytest.mark.parametrize("name", INSIDE, ids=str)
def test_strict_raises_a_fault_of_code_of_ours_in_inductor(fake_ranks, name):
    """Before the program first runs: on these ranks it could not."""
    layer = GroupedExperts(16, 32, 8, 2, fake_ranks)
    asked = ast.literal_eval("{" + ASKED.get(name, "") + "}")
    options = {f"megamoe.{key}": one for key, one in STRICT.items()} | asked
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="megamoe", options=options)
    with copies_on_cpu(), fault_inside(*name), pytest.raises(Exception, match=FAULT):
        compiled(TOKENS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", EVERYWHERE, ids=str)
def test_strict_raises_it(two_ranks, name):
    for found, warned in run_with_fault(two_ranks, name, (0, 1), "'megamoe.strict': True, "):
        assert FAULT in found.compiled_error and not warned


def test_every_hook_of_inductor_that_a_compilation_takes_has_a_fault(fake_ranks, monkeypatch):
    """So do operators and nodes of ours, which come from the sources: none of them is unknown."""
    taken = {}

    def stop(gm, inputs, inner_compile, config_patches):
        taken.update(config_patches, inner_compile=inner_compile)
        raise CapturedError

    monkeypatch.setattr(codegen, "compile_fx", stop)
    gm, *_ = dynamo_graphs(GroupedExperts(16, 32, 8, 2, fake_ranks), TOKENS)
    now, _ = rewrite(gm, MegaMoEConfig(offload_budget=1.0, measure_waits=True, **STRICT))
    with contextlib.suppress(CapturedError):
        codegen.compile_with_inductor(gm, [TOKENS], now, {})
    ours = {
        name for name, one in taken.items()
        if getattr(one, "__module__", type(one).__module__).partition(".")[0] in OURS
    }  # fmt: skip
    assert taken["inner_compile"].func is getattr(codegen, INNER)
    assert ours - {"inner_compile"} == {*HOOKED}


def test_what_inductor_is_taught_has_a_fault_or_needs_a_gpu():
    names = {*(operator.name() for operator in LOWERINGS), *WRITERS}
    assert {name for _, name in INSIDE} | {*ON_A_GPU} == names | {*HOOKED}
    assert {"ListedIntegers", "StepSizes", "MovingInput"} <= {*WRITERS} and len(LOWERINGS) >= 5
    assert {*ASKED} <= {*EVERYWHERE}


@pytest.mark.parametrize(
    ("error", "options", "is_raised"),
    [
        (IndexError(FAULT), {}, False),
        (IndexError(FAULT), {"strict": True}, True),
        (InvalidConfig(FAULT), {}, True),
    ],
)
def test_inductor_wraps_errors_as_dynamo_does(error, options, is_raised):
    """What it wraps counts: an error of Dynamo itself goes on to Dynamo."""

    def fails():
        raise InductorError(error, None)

    now = state(**options)
    if is_raised:
        with pytest.raises(InductorError):
            compiled_or_as_written(fails, lambda: str, now)
    else:
        assert compiled_or_as_written(fails, lambda: str, now) == (str, True)
        assert now.dropped == ["compilation"]
