"""Several forms of the same code in one process: as written, by Inductor, by megamoe in some ways.

Contract
    A switch stands where compiled code would be called. It calls the form that is current, and has
    torch compile it at its first call, as in a job. Forms share the weights and all that is around
    the switches. Dynamo keeps the code of each form apart: it looks a program up by the backend,
    options included, that asked for it.
    A switch shows its result to a watcher, and adds nothing else.

One form is PyTorch code in float64, casts of its own included: a reference for roundings.
Every function of torch gets floating tensors as float64, complex ones as complex128, and so are
what it casts to and what it makes. Grouped products are made expert by expert. In-place writes
keep the type of what they write to. The result has the type that the code as written has, of
its first argument; gradients reach parameters through the casts, rounded once. Of what is
between, nothing is kept for the backward pass: it is computed again, as activation
checkpointing does, and what the code writes into buffers may then be written twice.
Discrete choices, as those of experts, may fall otherwise than at lower precision.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from moe_compile.config import OFF, PREFIX, MegaMoEConfig
from moe_compile.report.compilations import Compilation
from moe_compile.report.process_report import REPORT, report_of

Call = Callable[..., Any]

MANY: Final = 256
"""Programs of one piece of code that Dynamo may keep: forms count together, and so do blocks."""
REORDER_PASSES: Final[Mapping[str, Any]] = {
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": [
        "reorder_compute_for_overlap",
        "sink_waits",
        "raise_comms",
    ],
}
"""Inductor's own overlap: the flag alone does nothing, and of its passes these gain the most."""
OURS: Final = "megamoe"
INDUCTOR: Final = "inductor"
EAGER: Final = ""
"""Backend of a form that is not compiled."""
IN_PLACE: Final = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__")
CASTS: Final = ("float", "bfloat16", "half")
GROUPED: Final = "_grouped_mm"


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """One way to run the code."""

    name: str
    backend: str = EAGER
    options: Mapping[str, Any] = field(default_factory=dict)
    """What the form asks for besides the options that every form of its backend has."""
    is_precise: bool = False
    """Whether everything is computed in float64."""
    blocks: frozenset[int] | None = None
    """Numbers of the switches that run it, from 0, the others as written; None for all."""

    @property
    def code(self) -> str:
        """Return a name of the code made for it, which forms of other blocks share."""
        return repr((self.backend, sorted(self.options.items()), self.is_precise))


AS_WRITTEN: Final = Form(name="as written")
AGAIN: Final = Form(name="as written, again")
PRECISE: Final = Form(name="as written, in float64", is_precise=True)
PLAIN: Final = Form(name="Inductor", backend=INDUCTOR)
REORDERED: Final = Form(name="Inductor, reordered", backend=INDUCTOR, options=REORDER_PASSES)
AS_ASKED: Final = Form(name="megamoe", backend=OURS)
NODE_BY_NODE: Final = Form(
    name="megamoe, node by node", backend=OURS, options={PREFIX + "codegen": "fx"}
)


def keep_many_programs() -> None:
    """Have Dynamo keep as many programs as forms need, in this process."""
    torch._dynamo.config.recompile_limit = MANY
    torch._dynamo.config.accumulated_recompile_limit = MANY * MANY


class Forms:
    """The switches of a process, and the form that is current in all of them."""

    def __init__(self) -> None:
        """Start as written."""
        self.current = AS_WRITTEN
        self.watcher: Callable[[int, Any], None] | None = None
        """Called with a switch's number and its result."""
        self.num_switches = 0
        self._compilations: dict[str, list[Compilation]] = {}

    def switch(self, forward: Call, options: Mapping[str, Any], precise: Call) -> Call:
        """Return a callable that runs `forward` in the current form.

        `options` are those of `torch.compile`: megamoe's for megamoe, the others for every backend.
        `precise` is what a form in float64 runs: `forward` without activation checkpointing, which
        would compute again at the precision as written.
        """
        number, made = self.num_switches, dict[str, Call]()
        self.num_switches += 1
        of_all = {k: v for k, v in options.items() if not k.startswith(PREFIX)}

        def run(*args: Any, **kwargs: Any) -> Any:
            form = self.current
            if form.blocks is not None and number not in form.blocks:
                form = AS_WRITTEN
            if form.code not in made:
                given = options if form.backend == OURS else of_all
                code = precise if form.is_precise else forward
                made[form.code] = made_by(form, code, given)
            result = made[form.code](*args, **kwargs)
            if self.watcher is not None:
                self.watcher(number, result)
            return result

        return run

    @contextlib.contextmanager
    def using(self, form: Form) -> Iterator[None]:
        """Have all switches run `form` meanwhile; what megamoe compiles is noted as the form's."""
        before, self.current = self.current, form
        known = len(REPORT.compilations)
        try:
            yield
        finally:
            self.current = before
            self._compilations.setdefault(form.code, []).extend(REPORT.compilations[known:])

    def report(self, form: Form) -> dict[str, Any]:
        """Return what megamoe did in a form that ran, as `REPORT` has it."""
        whole, own = REPORT.as_dict(), self._compilations.get(form.code, [])
        return {
            **report_of(own, [], hardware=str(whole["hardware"])),
            "warnings": whole["warnings"],
            "graph_breaks": whole["graph_breaks"],
        }


def made_by(form: Form, forward: Call, options: Mapping[str, Any]) -> Call:
    """Return `forward` in one form."""
    if form.is_precise:
        return in_high_precision(forward)
    if form.backend == EAGER:
        return forward
    given = {**options, **form.options}
    return torch.compile(forward, backend=form.backend, fullgraph=True, options=given)


def without_passes(form: Form, config: MegaMoEConfig, names: Sequence[str], said: str) -> Form:
    """Return a form without passes, besides those that the job leaves out; `said` ends its name."""
    left_out = (*config.disable_passes, *names)
    return replace(
        form,
        name=f"{form.name}, {said}",
        options={**form.options, PREFIX + "disable_passes": left_out},
    )


WITHOUT: Final[Mapping[str, Form]] = {
    f"megamoe without {name}": Form(
        name=f"megamoe without {name}", backend=OURS, options={PREFIX + name: value}
    )
    for name, value in [*((n, values[0]) for n, values in OFF.items()), ("schedule", False)]
}
"""Forms by megamoe in which one thing is off, by name."""


def names_without(config: MegaMoEConfig, report: Mapping[str, Any]) -> list[str]:
    """Return the names of the forms without each thing that megamoe did, by a report."""
    used = _in_use(report)
    used |= {"schedule"} if config.schedule and report["regions"] + report["attention"] else set()
    return [name for name in WITHOUT if name.removeprefix("megamoe without ") in used]


def _in_use(report: Mapping[str, Any]) -> set[str]:
    """Return the options by whose values a report's regions are not as they were written."""
    regions, applied = report["regions"], {p["pass"] for p in report["passes"] if p.get("applied")}
    used = {
        "chunks": any(one["num_chunks"] > 1 for one in regions),
        "chunk_edges": any(one["chunk_edges"] != "even" for one in regions),
        "dispatch": any(one["dispatch"] != "all_to_all" for one in regions),
        "nodes": any(one["nodes"] != "off" for one in regions),
        "attention_chunks": any(one["num_chunks"] > 1 for one in report["attention"]),
        "batch_parts": "split_batch" in applied,
        "transport": "route_exchanges" in applied,
        "apply_scores": "apply_scores" in applied,
        "expert_compute": "quantize_products" in applied,
    }
    wires = {
        f"{way}_wire": any(one["wires"].get(way, ("same",))[0] != "same" for one in regions)
        for way in ("dispatch", "combine")
    }
    return {name for name, is_used in (used | wires).items() if is_used}


def in_high_precision(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return `forward` computed in float64; results have the type of the first argument."""

    def run(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with _HighPrecision():
            result = forward(_up(first), *args, **kwargs)
        return tree_map(lambda x: _as(first.dtype, x), result)

    return functools.partial(checkpoint, run, use_reentrant=False)


def _as(dtype: torch.dtype, value: Any) -> Any:
    is_number = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if is_number else value


def _up(value: Any) -> Any:
    """Return a tensor or a type in high precision, and anything else as it is."""
    if isinstance(value, torch.dtype):
        if value.is_complex:
            return torch.complex128
        return torch.float64 if value.is_floating_point else value
    if not isinstance(value, torch.Tensor):
        return value
    high = _up(value.dtype)
    return value if value.dtype is high else value.to(high)


class _HighPrecision(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in ("__get__", "__set__"):
            return func(*args, **kwargs)
        if name in CASTS:
            return _up(args[0])
        is_in_place = name in IN_PLACE or (name.endswith("_") and not name.endswith("__"))
        kept = args[:1] if is_in_place else ()
        given = (*kept, *tree_map(_up, args[len(kept) :]))
        if name == GROUPED:
            return _grouped(*given, **tree_map(_up, kwargs))
        return func(*given, **tree_map(_up, kwargs))


def _grouped(
    x: torch.Tensor, weights: torch.Tensor, offs: torch.Tensor, **settings: Any
) -> torch.Tensor:
    """Return rows `[N, D]` of each group times its matrix of `[E, D, F]`; zeros behind the last."""
    del settings
    ends = offs.tolist()
    parts = [
        x[begin:end] @ weight
        for begin, end, weight in zip([0, *ends[:-1]], ends, weights, strict=True)
    ]
    rest = x.new_zeros(x.shape[0] - ends[-1], weights.shape[-1])
    return torch.cat([*parts, rest])
