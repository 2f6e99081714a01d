"""One rank of a generated program: its steps run eagerly, then compiled, and compared.

Contract
    To be called on all ranks at once with the same text. Compared are outputs, other returned
    values, gradients of the input and of every parameter, buffers, integers kept in modules and the
    state of the random generator, after every step, by `torch.equal`. Where the text states a
    bound, or a report says of a region in parts that last bits may differ, floating-point tensors
    are compared by the norm of their difference. Reports say it by the model of `cpu_rounding`:
    where they say nothing, every bit must be the same. Rows that megamoe may send in eight bits are
    left or rounded by the eager program too, row by row, forward and backward: in all its layers or
    in some, since a layer that is not rewritten rounds nothing. A program that may run in parts of
    its batch must equal the eager run of the whole, or of the parts, added up.
    A program that raises eagerly must raise compiled too, in the same step.
    NaNs in the same places are equal.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import itertools
import linecache
import re
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, Final, NamedTuple

import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
import torch.distributed as dist
from torch import nn

from moe_compile.plan.chunk_numbers import LAST_BITS
from moe_compile.report.compilations import Compilation
from moe_compile.report.process_report import REPORT
from moe_compile.report.region_reports import IN_TWO_HOPS, NO_READS
from moe_compile.testing.cpu_rounding.cpu_bits import recorded_bits
from moe_compile.testing.mirrored_rank import TableLayout, become_mirrored
from moe_compile.testing.process_groups import rank_device, register_nodes
from moe_compile.testing.programs.differences import Named, all_differences
from moe_compile.testing.programs.run_again import Noted, run_step, served
from moe_compile.testing.programs.steps import (
    Step,
    accumulated,
    backwards_of,
    divide_layers,
    layers_in_a_row,
    some_layers,
)
from passes.replay.batch_parts import part_sizes

REWRITTEN: Final = ("chunked", "all-gathered", IN_TWO_HOPS)
"""Verdicts on regions that do not run as they were written."""

IN_PIECES: Final = "aot_eager in pieces"
"""AOTAutograd on graphs that end where the host reads an integer."""

PARTS_APART: Final = 1e-3
"""Relative difference of parts from the whole batch in float32: far above roundings, far below that
of experts that read other rows."""

BOUND_OF_LAST_BITS: Final = 64
"""Relative error of a layer, in roundings of the narrowest type of a program, where last bits may
differ: a sum of K products in another order is off by at most K of them (Higham, Accuracy and
Stability of Numerical Algorithms, section 4.2), by about the root of K as a rule. In two bytes it
is `BOUND_OF_TWO_BYTES`."""

LAYER_RUNS: Final = re.compile(r"self\.layer\d+\b(?!\.| =)")
"""Runs of layers in a program's text; roundings of each are carried on to the next."""

BOUND_OF_TWO_BYTES: Final = 0.05
"""Relative error of sums in two bytes: six roundings of bfloat16."""

SUMMED_BY_TORCH: Final = "aot_eager, rows of each expert summed by torch"
"""AOTAutograd on the program that sums rows of experts before the host reads them, not after."""


@dataclass(frozen=True, slots=True)
class InParts:
    """Gradient accumulation over the parts of some steps; the others run whole."""

    steps: frozenset[int]
    reference: str = "eager"
    """Backend of `torch.compile` that runs the program, or "eager"."""


class LayersInParts(NamedTuple):
    """Layers that run in parts, each by itself, eagerly."""

    names: frozenset[str]
    rows: int
    """Number of rows that stay together: those of a sequence, or 1."""


BREAKS: Final = ("graph_break()", "async_op=True")
"""Texts in a program that end a graph between layers."""

Backend = str | Callable[..., Any] | LayersInParts | InParts
"""A backend of `torch.compile`, "eager", or layers or steps that run in parts."""

SUMMED_BY_HOST: Final = re.compile(
    r"sizes = \[runs\[(.+?)\] \+ runs\[(\d+) \+ \1\] for e in range\(\2\)\]"
)
"""Sizes whose concatenation torch 2.13 cannot differentiate: an assertion in its shape analysis."""


@dataclass(kw_only=True, slots=True)
class RankFindings:
    """Findings of one rank."""

    raises: bool = False
    """Whether the program says that it raises."""
    eager_error: str = ""
    compiled_error: str = ""
    differences: list[str] = field(default_factory=list)
    num_rewritten: int = 0
    """Regions, of experts or attention, that ran in chunks, in two hops, or with all ranks' tokens
    gathered."""
    verdicts: list[str] = field(default_factory=list)
    may_differ: bool = False
    """Whether a region ran in parts whose last bits may differ."""
    dropped: list[str] = field(default_factory=list)
    """Passes that failed and were left out."""
    noted: list[Noted] = field(default_factory=list)
    """Of each step without host reads: whether rows had room, and whether it ran again."""
    cpu_s: float = 0.0


def load(text: str) -> ModuleType:
    """Return `text` as a module; tracebacks show its lines."""
    name = f"program_{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    linecache.cache[f"{name}.py"] = (len(text), None, text.splitlines(keepends=True), f"{name}.py")
    module = ModuleType(name)
    exec(compile(text, f"{name}.py", "exec"), module.__dict__)
    return module


def run(rank: int, text: str, backend: str = "megamoe", reference: str = "eager") -> RankFindings:
    """Run the program on this rank by `reference` and by `backend`.

    A reference is "eager", a backend's name, `IN_PIECES` or `SUMMED_BY_TORCH`; the findings call
    it eager.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # older collectives are part of the grammar
        return _compare(rank, text, backend, reference)


def _compare(rank: int, text: str, backend: str, reference: str) -> RankFindings:
    module = load(text)
    captured = getattr(module, "UNKNOWN_LENGTHS", False)  # none in programs of earlier versions
    place = rank_device()  # of tensors that the program makes: none is asked for on a processor
    with (
        dynamo_config.patch(capture_dynamic_output_shape_ops=captured),
        place if place.type != "cpu" else contextlib.nullcontext(),
    ):
        return _compare_module(rank, module, text, backend, reference)


def _compare_module(
    rank: int, module: ModuleType, text: str, backend: str, reference: str
) -> RankFindings:
    torch._dynamo.reset()
    began, known = time.process_time(), len(REPORT.compilations)
    start_ranks(module)
    found = RankFindings(raises=module.RAISES)
    expected, found.eager_error = steps(module, rank, reference)
    if found.eager_error and not (module.MIRRORED or module.RAISES):
        return found  # other ranks may still wait for this one in their eager step
    torch._dynamo.reset()  # a reference that is compiled marks code as seen: megamoe starts afresh
    with recorded_bits():
        actual, found.compiled_error = steps(module, rank, backend, found.noted)
    for compilation in REPORT.compilations[known:]:
        _note(found, compilation, module)
    bound = module.BOUND
    if IN_TWO_HOPS not in found.verdicts:  # two hops asked for, but not made
        bound = getattr(module, "FLAT_BOUND", bound)
    if found.may_differ:
        bound = max(bound, _bound_of_last_bits(module, text))
    found.differences = all_differences(expected, actual, bound)
    others = _other_results(module, rank, text, reference, expected)
    while _on_a_rank(module, found.differences) and (other := next(others, None)) is not None:
        found.differences = found.differences and all_differences(other, actual, bound)
    if len(expected) != len(actual) and not found.compiled_error:
        found.differences.append(f"{len(actual)} steps ran, eagerly {len(expected)}")
    found.cpu_s = time.process_time() - began
    return found


def start_ranks(module: ModuleType) -> None:
    """Make the groups of the program's ranks, and the nodes that they stand on."""
    num_nodes = getattr(module, "NODES", 0)
    if module.MIRRORED:
        become_mirrored(getattr(module, "RANKS", 2), _table_of(module) if num_nodes else None)
    if num_nodes:
        register_nodes(num_nodes)


def _on_a_rank(module: ModuleType, differences: list[str]) -> bool:
    """Whether results differ, on any rank: all of them run the next reference, or none does."""
    if module.MIRRORED or not dist.is_initialized():
        return bool(differences)
    found = torch.tensor(len(differences), device=rank_device())
    dist.all_reduce(found)
    return bool(found)


def _bound_of_last_bits(module: ModuleType, text: str) -> float:
    """Return the relative error allowed where last bits differ."""
    if module.DTYPE.itemsize == 2 or "autocast" in text:
        return BOUND_OF_TWO_BYTES
    layers = max(1, len(LAYER_RUNS.findall(text)))
    return layers * BOUND_OF_LAST_BITS * torch.finfo(module.DTYPE).eps


def _table_of(module: ModuleType) -> TableLayout:
    """Return the layout of the table of a program whose rows are to come in two hops."""
    options = module.OPTIONS
    by_tokens = options.get("megamoe.chunk_by") == "tokens"
    asked = options["megamoe.chunks"] if by_tokens else options.get("megamoe.hop_slices", 1)
    return TableLayout(num_experts=module.LOCAL, num_slices=asked)


def _note(found: RankFindings, compilation: Compilation, module: ModuleType) -> None:
    """Add the verdicts, remarks and dropped passes of a compiled graph to `found`."""
    verdicts = [r.verdict for r in compilation.regions]
    verdicts += [a.verdict for a in compilation.attention]
    found.verdicts += [*verdicts, *compilation.left_alone]
    found.dropped += compilation.dropped
    remarks = [remark for report in compilation.regions for remark in report.remarks]
    remarks += [remark for report in compilation.attention for remark in report.remarks]
    found.may_differ |= any(remark.startswith(LAST_BITS) for remark in remarks)
    if hasattr(module, "PARTS"):
        found.num_rewritten += any("split_batch: applied" in s for s in compilation.rewrites)
    else:
        counted = (IN_TWO_HOPS,) if hasattr(module, "NODES") else REWRITTEN
        counted = (NO_READS,) if _reads_nothing(module) else counted
        found.num_rewritten += sum(verdict in counted for verdict in verdicts)


def _other_results(
    module: ModuleType, rank: int, text: str, reference: str, expected: list[Named]
) -> Iterator[list[Named]]:
    """Yield other correct results of the steps, in the same order on every rank."""
    if hasattr(module, "PARTS"):
        by = reference if reference == "aot_eager" else "eager"
        of_steps = (steps(module, rank, InParts(s, by))[0] for s in _steps_in_parts(module))
        for done in itertools.chain(of_steps, _pieces_in_parts(module, rank, text)):
            apart = [] if _computes_as(done, expected, module, text) else ["another program"]
            if not _on_a_rank(module, apart):
                yield done
    for rounding in _roundings(module, text):
        module.__dict__.update(rounding)
        yield steps(module, rank, reference)[0]


def _computes_as(done: list[Named], whole: list[Named], module: ModuleType, text: str) -> bool:
    """Whether parts compute the outputs of the whole, but for roundings.

    True without a comparison in two bytes, where a rounding may send a token to another expert.
    """
    if module.DTYPE.itemsize <= 2 or "autocast(" in text:
        return True
    pairs = ((a["output"], b["output"]) for a, b in zip(done, whole, strict=False))
    return all((a - b).norm() <= PARTS_APART * b.norm() or b.isnan().any() for a, b in pairs)


def _steps_in_parts(module: ModuleType) -> Iterator[frozenset[int]]:
    """Yield the sets of steps that may run in parts: those of some sizes, all of one size alike.

    A graph of a size not compiled before may be left whole; a rank with fewer sequences than parts
    yields none.
    """
    least = module.PARTS * module.POSITIONS
    sizes = [size for size in dict.fromkeys(module.TOKENS) if min(size) >= least]
    for number in range(len(sizes), 0, -1):
        for some in itertools.combinations(sizes, number):
            yield frozenset(i for i, size in enumerate(module.TOKENS) if size in some)


def _pieces_in_parts(module: ModuleType, rank: int, text: str) -> Iterator[list[Named]]:
    """Yield the correct results where layers are compiled one by one, some in parts, others whole.

    A layer that cannot run in parts, as one that returns a loss, is left out: on every rank, by its
    source.
    """
    program = module.Program()
    compiled: list[frozenset[str]] = []
    if "checkpoint(" in text.partition("class Program")[2]:
        compiled += some_layers(program)
    if any(breaks in text for breaks in BREAKS):
        compiled += layers_in_a_row(program)
    for names in compiled:
        for per in sorted({module.POSITIONS, 1}):
            done, error = steps(module, rank, LayersInParts(names, per))
            if not error:
                yield done


def _roundings(module: ModuleType, text: str) -> list[dict[str, Any]]:
    """Return the layers and gradient modes in which rows may travel in eight bits, or products may
    be in eight bits.

    A layer that is left as it is, or called twice and found once, rounds where others do not.
    """
    if "megamoe.expert_compute" in module.OPTIONS:
        return [{"EIGHT_BITS": True}]
    if "fp8" not in module.OPTIONS.values():
        return []
    layers = [name for name, code in _classes(text).items() if "rounded(" in code]
    some = [c for n in range(len(layers), 0, -1) for c in itertools.combinations(layers, n)]
    modes = [(True, False), (True,), (False,)] if "no_grad" in text else [(True, False)]
    return [{"ROUNDED_LAYERS": names, "ROUNDED_MODES": m} for names in some for m in modes]


def _classes(text: str) -> dict[str, str]:
    """Return the source of each class of a program."""
    tree = ast.parse(text)
    found = (node for node in tree.body if isinstance(node, ast.ClassDef))
    return {node.name: ast.get_source_segment(text, node) or "" for node in found}


def _reads_nothing(module: ModuleType) -> bool:
    return module.OPTIONS.get("megamoe.host_reads") == "none"


def steps(
    module: ModuleType, rank: int, backend: Backend, noted: list[Noted] | None = None
) -> tuple[list[Named], str]:
    """Return the results of every step, and the error that ended them, "" for none.

    Where the host is to read nothing, `noted` gets what each step found about its room.
    """
    if backend == "megamoe" and noted is not None and _reads_nothing(module):
        with served():
            return _steps(module, rank, backend, noted)
    return _steps(module, rank, backend)


def _steps(
    module: ModuleType, rank: int, backend: Backend, noted: list[Noted] | None = None
) -> tuple[list[Named], str]:
    if backend == IN_PIECES:
        with dynamo_config.patch(capture_scalar_outputs=False):
            return steps(module, rank, "aot_eager")
    if backend == SUMMED_BY_TORCH:
        return steps(_summed_by_torch(module), rank, "aot_eager")
    torch.manual_seed(module.SEED + rank)
    program = module.Program()
    function = _compiled(module, program, backend)
    own = torch.Generator().manual_seed(module.SEED + 1000 + rank)
    done: list[Named] = []
    for number, tokens in enumerate(module.TOKENS):
        x, gradient = (_drawn(module, tokens[rank], own) for _ in ("x", "gradient"))
        _poison(module, x)
        try:
            images = getattr(module, "IMAGES", None)
            if images is not None:
                program.images.fill_(images[number])
            # a graph that gave its memory away cannot be used twice: ours gives none away
            several = len(backwards_of(module.BACKWARD, number)) > 1 and backend != "megamoe"
            again = several or isinstance(backend, InParts)
            with functorch_config.patch({"donated_buffer": False} if again else {}):
                in_parts = _in_parts(module, number, program, function, x, gradient, backend)
                step = Step([], gradient, x, program)
                done.append(_step(module, number, function, step, in_parts, noted))
        except Exception as error:  # noqa: BLE001  (whatever a program or a compiler raises)
            return done, f"{type(error).__name__}: {error}"[:1500]
    return done, ""


def _drawn(module: ModuleType, num_rows: int, own: torch.Generator) -> torch.Tensor:
    """Return rows of random numbers."""
    drawn = torch.randn((num_rows, module.WIDTH), generator=own, device="cpu")
    return drawn.to(rank_device(), module.DTYPE)


def _poison(module: ModuleType, x: torch.Tensor) -> None:
    """Set the tokens that the program names to NaN."""
    kind = getattr(module, "POISON", "none")
    x[:1] = torch.nan if kind != "none" else x[:1]
    x[-1:] = torch.nan if kind == "padding" else x[-1:]


def _in_parts(
    module: ModuleType,
    number: int,
    program: nn.Module,
    function: Callable[..., Any],
    x: torch.Tensor,
    gradient: torch.Tensor,
    backend: Backend,
) -> Named:
    """Return the results of a step whose parts run one after another; {} for any other step."""
    if not isinstance(backend, InParts) or number not in backend.steps:
        return {}
    if module.BACKWARD != "accumulated":
        program.zero_grad()
    num_sequences = len(x) // module.POSITIONS
    sizes = [n * module.POSITIONS for n in part_sizes(num_sequences, module.PARTS)]
    return accumulated(program, function, x, gradient, sizes, backwards_of(module.BACKWARD, number))


def _summed_by_torch(module: ModuleType) -> ModuleType:
    """Return the program in which torch, not the host, sums the rows of each expert."""

    def instead(found: re.Match[str]) -> str:
        number, count = found.groups()
        backwards = "" if number == "e" else "[::-1]"
        return f"sizes = flat.reshape(2, {count}).sum(0).tolist(){backwards}"

    text = "".join(linecache.getlines(f"{module.__name__}.py"))
    other = load(SUMMED_BY_HOST.sub(instead, text))
    other.__dict__.update({k: v for k, v in vars(module).items() if k.startswith("ROUNDED_")})
    return other


def _compiled(module: ModuleType, program: nn.Module, backend: Backend) -> Callable[..., Any]:
    if isinstance(backend, LayersInParts):
        divide_layers(program, backend.names, module.PARTS, backend.rows)
        return program
    if isinstance(backend, InParts):
        backend = backend.reference
    if backend == "eager":
        return program
    options = {"megamoe.codegen": "fx", **module.OPTIONS} if backend == "megamoe" else None
    return torch.compile(program, backend=backend, options=options, dynamic=module.DYNAMIC)


def _step(
    module: ModuleType,
    number: int,
    function: Callable[..., Any],
    step: Step,
    instead: Named,
    noted: list[Noted] | None,
) -> Named:
    """Run a step and return its results by name; those of `instead` replace its own."""
    kind, backwards = module.BACKWARD, backwards_of(module.BACKWARD, number)
    x, program, trained = step.x, step.program, bool(backwards)
    if kind != "accumulated":
        program.zero_grad()
    x.requires_grad_(trained)

    def there_and_back() -> tuple[torch.Tensor, list[Any]]:
        with torch.set_grad_enabled(trained):
            output, extra = function(x)
        for left, go_back in zip(reversed(range(len(backwards))), backwards, strict=True):
            go_back(replace(step, values=[output, *extra]), retain=left > 0)
        return output, extra

    if noted is None:
        output, extra = there_and_back()
    else:
        output, extra = run_step(program, x, there_and_back, noted)
    computed: Named = {"output": output, "input gradient": x.grad}
    computed |= {f"extra value {i}": value for i, value in enumerate(extra)}
    computed |= {f"gradient of {name}": p.grad for name, p in program.named_parameters()}
    computed |= {f"buffer {name}": b for name, b in program.named_buffers()}
    for name, part in program.named_modules():
        computed |= {f"{name}.{k}": v for k, v in vars(part).items() if type(v) is int}
    computed["random state"] = torch.get_rng_state()
    computed |= instead
    copied = {name: _copy(value) for name, value in computed.items()}
    for name, parameter in program.named_parameters():
        parameter.grad = instead.get(f"gradient of {name}", parameter.grad)
    if trained and kind != "accumulated":
        _update(program)
    return copied


def _update(program: nn.Module) -> None:
    with torch.no_grad():
        for parameter in program.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.0625)


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
