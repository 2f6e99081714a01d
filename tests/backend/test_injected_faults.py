"""A fault at any pass, or stage of compilation: the program computes what it was written for.

The fault of a pass comes once the pass has done its work and has spoiled the graph besides: a graph
that is not put back whole shows in the values. Where one rank alone has the fault, the others have
rewritten the program, and must run it as that rank does.
"""

import contextlib
import logging
from unittest import mock

import pytest
import torch

from moe_compile import codegen
from moe_compile.check.bits import LOOPED
from moe_compile.errors import ContractViolation
from moe_compile.testing.programs.legal import legal
from moe_compile.testing.programs.run import run
from moe_compile.testing.programs.text import source_of
from passes.pipeline import DYNAMO, JOINT, POST_GRAD, POST_GRAD_EARLY, RECORD

PASSES = {
    one.name: type(one)
    for level in (DYNAMO, JOINT, POST_GRAD_EARLY, POST_GRAD, RECORD)
    for one in level.passes
}
"""Passes that run without Inductor; the others edit nothing but what its code generator reads."""
STAGES = ("min_cut_rematerialization_partition", "make_boxed_func")
"""Names in `moe_compile.codegen`: the cut of the joint graph, and what is made of each part."""
FAULT = "the fault that was put in"
OTHERWISE = {torch.mul: torch.add, torch.ops.aten.mul.Tensor: torch.ops.aten.add.Tensor}
AS_WRITTEN = "run as written"


def text_of(program, options=""):
    text = source_of(legal(program)).replace("\nMIRRORED = True ", "\nMIRRORED = False ")
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


class Heard(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def with_fault(rank, name, faulty_ranks, text):
    """Run the program on this rank; return its findings and the warnings about the fault."""
    heard, logger = Heard(), logging.getLogger("moe_compile")
    fault = fault_in_pass if name in PASSES else fault_in_stage
    logger.addHandler(heard)
    try:
        with fault(name) if rank in faulty_ranks else contextlib.nullcontext():
            found = run(rank, text)
    finally:
        logger.removeHandler(heard)
    return found, [line for line in heard.lines if FAULT in line]


def run_with_fault(pool, name, faulty_ranks, options=""):
    pool.regroup()
    return pool.run(with_fault, name, faulty_ranks, text_of(LOOPED, options))


def names_fault(texts, name):
    """A fault of a check is one of the compilation, as is one of a stage."""
    step = name if name in PASSES and not PASSES[name].is_check else "compilation"
    return [text for text in texts if text.startswith(step) and FAULT in text]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PASSES, *STAGES])
def test_a_fault_of_all_ranks_changes_no_value(two_ranks, name):
    """It is warned of once for each graph, forward and backward."""
    (first, _), (second, _) = results = run_with_fault(two_ranks, name, (0, 1))
    assert first.verdicts == second.verdicts
    for found, warned in results:
        assert not found.compiled_error and not found.differences
        dropped = names_fault(found.dropped, name)
        assert len(warned) == len(dropped) in (1, 2), (warned, found.dropped)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [*PASSES, *STAGES])
def test_where_one_rank_has_it_all_run_the_program_as_written(two_ranks, name):
    (first, none), (second, warned) = run_with_fault(two_ranks, name, (1,))
    assert not none and warned
    assert names_fault(second.dropped, name) and not first.dropped
    assert [text.partition(":")[0] for text in first.verdicts] == [AS_WRITTEN]
    for found in (first, second):
        assert not found.compiled_error and not found.differences


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [*PASSES, *STAGES])
def test_strict_raises_it(two_ranks, name):
    for found, warned in run_with_fault(two_ranks, name, (0, 1), "'megamoe.strict': True, "):
        assert FAULT in found.compiled_error and not warned
