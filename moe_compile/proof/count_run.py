"""Run the part of a region that is computed from counts on real counts, on the CPU.

Contract
    Only steps that the wanted integers need are run; rows are not needed, and not there.
    A step that needs values from outside the region raises Unevaluable.
    Neither the user's tensors nor any random state is touched.
    The counts to try are small, drawn at their real size, large, or of one expert: the same on
    every rank and in every process, drawn from a fixed seed.

Pseudo-code
    needed = steps that make or write the memory of the wanted tensors, found backwards
    per counts: run the needed steps in order; the host's reads give the sizes of later ones

Triton kernels of a graph run on tensors of the CPU, by Triton's own interpreter.
A kernel that the interpreter cannot run is run on the first CUDA device; without one
RuntimeError is raised. Tensors written are written on the CPU.
"""

from __future__ import annotations

import importlib
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import sympy
import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._sympy.functions import FloorDiv, Max
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from moe_compile.dims.record import Operator
from moe_compile.graph.inner_graphs import launched_kernel
from moe_compile.graph.memory import storages_of, tensors_in
from moe_compile.graph.query import value_of
from moe_compile.proof.constants import FILLS
from moe_compile.proof.operator_call import SYMBOLIC
from moe_compile.proof.row_trace import HostRead, NotFollowed, Step, Trace
from moe_compile.regions.count_facts import CountFacts

SEED = 20240229
NUM_DRAWN = 200
"""Vectors drawn at the region's real size."""
MOST_ENUMERATED = 4
"""Counts up to which every vector of small values is tried: `SMALL ** 4` are 256."""
SMALL = range(4)
SKEWED = 70
"""Most rows of a run where few runs hold most rows: beyond twice the alignments in use, 8 to 32."""
LARGE = (300, 5_000, 70_000, 300_000)
"""Rows: more than bfloat16 (256), float16 (2048; infinite from 65520) and int16 hold exactly, and
as many as a rank receives of 8 sequences of 4,096 tokens for 8 experts each."""

Sample = dict[sympy.Symbol, int]


def draw_samples(facts: CountFacts, num_drawn: int = NUM_DRAWN) -> Iterator[Sample]:
    """Yield counts received and sent, one value per symbol."""
    own = [segment.length for segment in facts.root]
    source = random.Random(SEED)
    if len(own) <= MOST_ENUMERATED:
        for values in itertools.product(SMALL, repeat=len(own)):
            yield _filled(facts, dict(zip(own, values, strict=True)), source)
    for i in range(num_drawn):
        yield _filled(facts, _drawn(facts, own, i, source), source)


def single_samples(facts: CountFacts) -> Iterator[Sample]:
    """Yield no rows, then one row, and some, of each local expert alone, as a chunk may have."""
    own = [segment.length for segment in facts.root]
    source = random.Random(SEED)
    yield _filled(facts, dict.fromkeys(own, 0), source)
    for expert in range(facts.num_local_experts):
        mine = [s for s in own if facts.expert_with(s) == expert]
        for values in ([1], [source.choice(SMALL[1:]) for _ in mine]):
            alone = dict(zip(mine, values, strict=False))
            yield _filled(facts, {s: alone.get(s, 0) for s in own}, source)


def large_samples(facts: CountFacts, *, spread: bool = True) -> Iterator[Sample]:
    """Yield counts of `LARGE` rows in all: in one run, and where `spread` in equal runs too."""
    own = [segment.length for segment in facts.root]
    source = random.Random(SEED)
    for size in LARGE:
        values = {symbol: source.choice(SMALL) for symbol in own}
        yield _filled(facts, {**values, source.choice(own): size}, source)
        if spread:
            yield _filled(facts, dict.fromkeys(own, size // len(own)), source)


def _drawn(facts: CountFacts, own: list[sympy.Symbol], i: int, source: random.Random) -> Sample:
    """Return zero, balanced or skewed counts; or those of some experts alone, as of a chunk."""
    num_local = facts.num_local_experts
    if i == 0:
        return dict.fromkeys(own, 0)
    if i % 3 == 0:
        return {s: source.randrange(SKEWED) if source.random() < 0.2 else 0 for s in own}
    values = {s: source.choice(SMALL) for s in own}
    if i % 3 == 1:
        return values
    first = source.randrange(num_local)
    chunk = range(first, source.randint(first, num_local))
    return {s: v if facts.expert_with(s) in chunk else 0 for s, v in values.items()}


def _filled(facts: CountFacts, values: Sample, source: random.Random) -> Sample:
    """Return `values` with small counts added for the symbols that have none."""
    for symbol in (*facts.received, *facts.sent):
        values.setdefault(symbol, source.choice(SMALL))
    if facts.num_ranks == 1:  # what one rank sends it receives
        values |= {s: values[r] for s, r in zip(facts.sent, facts.received, strict=False)}
    return values


class Unevaluable(Exception):
    """Something needed cannot be computed from counts and constants alone."""


class TooLarge(Exception):
    """A tensor would take too much memory with these counts."""


MOST_ELEMENTS: Final = 1 << 26
"""Limit for one tensor, 512 MiB of int64: 5,000 rows compared with each other need less."""

COMPUTED: Final[dict[type, Callable[[list[int]], int]]] = {
    sympy.Add: sum,
    sympy.Mul: math.prod,
    sympy.Max: max,
    Max: max,
    FloorDiv: lambda parts: parts[0] // parts[1],
}


def number(formula: sympy.Expr, values: dict[sympy.Symbol, int]) -> int:
    """Return the value of `formula`; raise Unevaluable where a symbol has no value."""
    if isinstance(formula, sympy.Symbol):
        if formula not in values:
            raise Unevaluable(
                f"sizes must follow from the counts, but the size {formula} comes from "
                "outside the region"
            )
        return values[formula]
    if isinstance(formula, sympy.Integer):
        return int(formula)
    compute = COMPUTED.get(type(formula))
    if compute is not None:  # nearly all sizes are of these; much faster than below
        return int(compute([number(part, values) for part in formula.args]))
    try:
        return int(sympy_interp(PythonReferenceAnalysis, values, formula))
    except KeyError as error:
        raise Unevaluable(
            f"sizes must follow from the counts, but the size {error} comes from outside the region"
        ) from error


class CountRun:
    """The steps of one trace that some integers need."""

    def __init__(self, trace: Trace, facts: CountFacts, wanted: Iterable[torch.Tensor]) -> None:
        """Find the steps that `wanted` and the host's reads need."""
        self.facts = facts
        self.inputs = {id(given.tensor): given.node for given in trace.inputs}
        needed = storages_of(list(wanted))
        needed |= storages_of([s.tensor for s in trace.steps if isinstance(s, HostRead)])
        kept: list[tuple[int, Step]] = []
        for moment, step in reversed(list(enumerate(trace.steps))):
            if isinstance(step, HostRead):
                kept.append((moment, step))
            elif storages_of(_made(step)) & needed:
                kept.append((moment, step))
                needed |= storages_of(_read(step))
        self.steps = tuple(reversed(kept))
        kernels = [step for _, step in kept if isinstance(step, NotFollowed)]
        self.interprets = bool(kernels)
        """Whether a kernel has to be interpreted."""
        operators = [step.func for _, step in kept if isinstance(step, Operator)]
        self.is_plain = not kernels and all(func.namespace == "aten" for func in operators)
        """Whether operators of torch alone have to be run."""

    def on(
        self,
        sample: Sample,
        given: dict[fx.Node, torch.Tensor],
        run: OneRun | None = None,
        *,
        skips: bool = False,
    ) -> Iterator[tuple[int, Step, OneRun]]:
        """Run the steps on `given` counts; yield after each, with the state of the run.

        With `skips`, steps that need values from outside the region are left out, with readers.
        """
        run = run or OneRun(self.facts, sample)
        for key, node in self.inputs.items():
            if node in given:
                run.tensors[key] = given[node]
        for moment, step in self.steps:
            try:
                run.step(step)
            except Unevaluable:
                if not skips or _writes(step):
                    raise
                continue
            yield moment, step, run


def _made(step: Step) -> list[torch.Tensor]:
    if isinstance(step, NotFollowed):
        return [step.tensor]
    if not isinstance(step, Operator):
        return []
    return step.outputs + step.written


def _writes(step: Step) -> bool:
    return isinstance(step, NotFollowed) or (
        isinstance(step, Operator) and step.func._schema.is_mutable
    )


def _read(step: Step) -> list[torch.Tensor]:
    if isinstance(step, NotFollowed):
        return list(step.inputs)
    if not isinstance(step, Operator) or _is_fill(step):
        return []
    return tensors_in((step.args, step.kwargs))


def _is_fill(step: Operator) -> bool:
    name = str(step.func._schema.name).removeprefix("aten::")
    return name in FILLS  # not those in place: they write what others made


@dataclass(slots=True)
class OneRun:
    """The tensors and sizes of one run."""

    facts: CountFacts
    sample: Sample
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    sizes: dict[sympy.Symbol, int] = field(default_factory=dict)
    done: set[fx.Node] = field(default_factory=set)

    def step(self, step: Step) -> None:
        """Run one step."""
        if isinstance(step, Operator):
            self._operator(step)
        elif isinstance(step, HostRead):
            size = value_of(step.node)
            if isinstance(size, torch.SymInt):
                self.sizes[size.node._expr] = int(self.tensor(step.tensor).item())
        elif isinstance(step, NotFollowed) and step.node not in self.done:
            self.done.add(step.node)
            read = dict(step.read)
            run_kernel(step.node, lambda node: self.real(read[node]))

    def tensor(self, fake: torch.Tensor) -> torch.Tensor:
        """Return the real tensor; raise Unevaluable where it was not computed."""
        if not isinstance(fake, FakeTensor):
            return fake.cpu()
        if id(fake) not in self.tensors:
            raise Unevaluable("it reads values from outside the region")
        return self.tensors[id(fake)]

    def size(self, size: Any) -> int:
        """Return the value of a size for the sampled counts."""
        written = size.node._expr
        if written.free_symbols <= self.sizes.keys():
            return number(written, self.sizes)
        return number(self.facts.formula(size), self.sample)

    def real(self, leaf: Any) -> Any:
        """Return the real value of one argument."""
        if isinstance(leaf, torch.Tensor):
            return self.tensor(leaf)
        if isinstance(leaf, list | tuple):
            return [self.real(part) for part in leaf]
        if isinstance(leaf, torch.device):
            return torch.device("cpu")
        return self.size(leaf) if isinstance(leaf, SYMBOLIC) else leaf

    def _shape_only(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return self.real(leaf)
        shape = [s if isinstance(s, int) else self.size(s) for s in leaf.shape]
        return torch.empty((), dtype=leaf.dtype, device="cpu").expand(shape)

    def _operator(self, step: Operator) -> None:
        if torch.Tag.nondeterministic_seeded in step.func.tags:
            raise Unevaluable(f"{step.func} draws random numbers")
        self._check_size(step.out)
        convert = self._shape_only if _is_fill(step) else self.real
        kwargs = {name: convert(value) for name, value in step.kwargs.items()}
        result = step.func(*(convert(value) for value in step.args), **kwargs)
        if isinstance(step.out, torch.Tensor):
            self._note(step.out, result)
            return
        for fake, real in zip(tensors_in(step.out), tensors_in(result), strict=True):
            self._note(fake, real)

    def _check_size(self, out: Any) -> None:
        for fake in tensors_in(out):
            sizes = [s if isinstance(s, int) else self._size_if_known(s) for s in fake.shape]
            if math.prod(sizes) > MOST_ELEMENTS:
                raise TooLarge

    def _size_if_known(self, size: Any) -> int:
        try:
            return self.size(size)
        except Unevaluable:
            return 1

    def _note(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        self.tensors[id(fake)] = real
        for size, found in zip(fake.shape, real.shape, strict=True):
            if isinstance(size, torch.SymInt) and size.node._expr.is_Symbol:
                self.sizes.setdefault(size.node._expr, int(found))


FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError)
"""Exceptions that the interpreter may raise on code it cannot run, apart from its own error."""


def run_kernel(node: fx.Node, value: Callable[[fx.Node], Any]) -> None:
    """Run the kernel of a `triton_kernel_wrapper_mutation` node on `value` of its inputs."""
    launched = launched_kernel(node)
    assert launched is not None
    kernel, constants = launched
    given = fx.node.map_arg((node.kwargs["kwargs"], node.kwargs["grid"]), value)
    tensors, grids = given
    grid = tuple(int(size) for size in grids[0])
    arguments = {**tensors, **constants}
    try:
        _interpret(kernel, grid, arguments)
    except FAILURES as error:
        if not torch.cuda.is_available():
            raise RuntimeError(
                f"an operator must run on a CPU to be evaluated, and cannot: {error}"
            ) from error
        _run_on_device(kernel, grid, arguments)


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
