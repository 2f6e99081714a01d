"""Let a compiled callable run once all ranks may launch its collectives.

Contract
    Wraps the backend's compiled code. The graph and Inductor's cache keys stay as they are, so it
    does not matter whether the code was compiled here or came from a cache.
    Ranks that decided differently about a program all run it as the user wrote it: compiled anew
    without any pass of ours, from a copy of the graph as it came. Where ranks promise to have equal
    sizes the copy is kept until then only.
    Each later call costs a look at two attributes and a note per process group. The first backward
    pass of a callable is published to other ranks as it begins.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.fx as fx
from torch._guards import CompileContext, TracingContext, compile_context, tracing

from moe_compile.graph.edit import forget_slice_sizes
from moe_compile.graph.snapshot import copy_of_graph
from moe_compile.graph.user_order import UserOrder
from moe_compile.runtime.agreement import Agreement, Calls, Turn, current_agreement
from moe_compile.runtime.call_log import CompiledProgram
from moe_compile.second_backward import refuse_second_order

LOG: Final = logging.getLogger(__name__)

Compiled = Callable[..., Any]


@dataclass(kw_only=True, slots=True)
class AsWritten:
    """A Dynamo graph as it came, and the contexts for compiling it later."""

    gm: fx.GraphModule
    inputs: list[Any]
    tracing: TracingContext | None
    compiling: CompileContext | None
    guards: frozenset[str] = frozenset()
    """Conditions on sizes under which the compiled code is called."""

    @staticmethod
    def of(gm: fx.GraphModule, inputs: Sequence[Any]) -> AsWritten:
        """Keep `gm` before passes edit it, and Dynamo's contexts while it compiles `gm`.

        Inputs are kept as fakes: Dynamo forgets which sizes of a real tensor it takes for dynamic.
        """
        places = gm.graph.find_nodes(op="placeholder")
        fakes = [
            place.meta["example_value"] if "example_value" in place.meta else inputs[index]
            for index, place in enumerate(places)
        ]
        return AsWritten(
            gm=copy_of_graph(gm),
            inputs=fakes,
            tracing=TracingContext.try_get(),
            compiling=CompileContext.try_get(),
        )

    def learn_guards(self) -> None:
        """Record the guards on sizes that Dynamo is about to write, before it forgets them."""
        self.guards = _guards(self.tracing)

    def compile_now(
        self, compile_graph: Callable[[fx.GraphModule, list[Any]], Compiled]
    ) -> Compiled:
        """Return the graph compiled without a pass of ours while Dynamo still learns its guards."""
        copy = copy_of_graph(self.gm)
        forget_slice_sizes(copy.graph)
        return compile_graph(copy, self.inputs)

    def compile(self, compile_graph: Callable[[fx.GraphModule, list[Any]], Compiled]) -> Compiled:
        """Return the graph compiled without a pass of ours.

        Dynamo has written its guards: code that relied on others would be wrong for other sizes.
        Where the compiler asks for new guards, or fails, the graph runs node by node, which is
        right for all sizes: other ranks may already wait in a collective of this call.
        """
        fallback = copy_of_graph(self.gm)
        forget_slice_sizes(self.gm.graph)
        try:
            with tracing(self.tracing), compile_context(self.compiling):
                compiled = compile_graph(self.gm, self.inputs)
        except Exception as error:  # noqa: BLE001  (whatever a compiler raises)
            LOG.warning(
                "megamoe: a graph runs operator by operator, not compiled, because compiling the "
                "original program failed: %s",
                error,
            )
            return fallback
        if new := sorted(_guards(self.tracing) - self.guards):
            LOG.warning(
                (
                    "megamoe: a graph runs operator by operator, not compiled, because compiling "
                    "the original program would need more guards: %s"
                ),
                new,
            )
            return fallback
        return compiled


def programs_of(
    order: Mapping[str, UserOrder],
    plan: str,
    *,
    rewritten: Collection[str] = (),
    site: str = "",
    is_promised: bool = False,
    left: str = "",
) -> dict[str, CompiledProgram]:
    """Return a callable's descriptions for other ranks, by process group; `plan` "" for no rewrite.

    On groups that are not among `rewritten` it launches the user's order, whatever the plan.
    A plan holds for one order across groups: ranks whose programs have another run as written.
    `site`, `is_promised` and `left` as in `CompiledProgram`.
    """
    return {
        group: CompiledProgram(
            order=user.digest,
            plan=f"{plan} {user.digest_of_numbers}" if plan and group in rewritten else "",
            collectives=user.collectives,
            places=user.places,
            site=site,
            is_promised=is_promised,
            is_differentiated=user.is_differentiated,
            left=left,
        )
        for group, user in order.items()
    }


def agreed_callable(
    compiled: Compiled,
    programs: Mapping[str, CompiledProgram],
    compile_whole: Callable[[], Compiled] | None,
    to_lower: str = "",
) -> Compiled:
    """Return a callable that runs `compiled` once all ranks may, or the result of `compile_whole`.

    `compile_whole` is None for a callable that already runs as the user wrote it. `to_lower` are
    the options that an error of too little memory names, in a note.
    """
    agreed = _Agreed(compiled, programs, compile_whole)

    def run(*arguments: Any) -> Any:
        agreement = current_agreement()
        is_first = not agreed.has_met or agreement is not agreed.agreement or agreed.is_second()
        if is_first:
            agreed.meet(agreement)
        if agreement is not None and agreement.stopped:
            agreement.check()
        for note, program in agreed.notes:
            note(program)
        try:
            results = agreed.current(*arguments)
        except RuntimeError as error:
            _add_notes(error, agreement, agreed.calls if is_first else (), to_lower)
            raise
        refuse_second_order(results)
        if is_first and agreement is not None:
            _compare_backward(agreement, agreed.calls, results)
        return results

    return run


def _add_notes(
    error: RuntimeError, agreement: Agreement | None, calls: Calls, to_lower: str
) -> None:
    """Add to an error of a run which options hold memory, or which ranks did not come."""
    if to_lower and isinstance(error, torch.OutOfMemoryError):
        error.add_note(
            f"megamoe: these options take more memory than the program as written: {to_lower}"
        )
    if agreement is not None:
        agreement.name(error, calls)


def _compare_backward(agreement: Agreement, calls: Calls, results: Any) -> None:
    """Have the first backward pass of `calls`, which gave `results`, compared before it runs."""
    if not any(program.is_differentiated for _, program in calls):
        return
    remaining = [calls]

    @torch.compiler.disable
    def compare(_: Any) -> None:
        if remaining:
            agreement.enter_backward(remaining.pop())

    values = results if isinstance(results, list | tuple) else [results]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    for node in {tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None}:
        node.register_prehook(compare)


class _Agreed:
    """The agreed callable of the current default process group; with a new one, agreed anew."""

    def __init__(
        self,
        compiled: Compiled,
        programs: Mapping[str, CompiledProgram],
        compile_whole: Callable[[], Compiled] | None,
    ) -> None:
        self.current = compiled
        self.has_met = False
        self.agreement: Agreement | None = None
        self.notes: list[tuple[Callable[[CompiledProgram], None], CompiledProgram]] = []
        self._programs, self._compile_whole = programs, compile_whole
        self.calls: Calls = ()

    def is_second(self) -> bool:
        """Whether a program of this place with another plan was met meanwhile."""
        agreement = self.agreement
        if agreement is None or not agreement.has_seconds:
            return False
        return any(journal.is_second(program) for journal, program in self.calls)

    def meet(self, agreement: Agreement | None) -> None:
        turn = agreement.meet(self._programs) if agreement is not None else Turn()
        if agreement is not None and turn.is_left_whole:
            self._leave_whole(agreement)
        if all(program.is_promised or not program.plan for program in self._programs.values()):
            self._compile_whole = None  # lets go of the graph as written and of its inputs
        self.agreement, self.has_met = agreement, True
        self.calls = turn.calls
        self.notes = [(journal.note, program) for journal, program in turn.calls]

    def _leave_whole(self, agreement: Agreement) -> None:
        if self._compile_whole is None:
            agreement.end(
                "ranks decided differently in a new process group, and megamoe no longer has the "
                "program as written: call torch._dynamo.reset() on all ranks after you make the "
                "group"
            )
        self.current = self._compile_whole()
        self._programs = {g: replace(p, plan="") for g, p in self._programs.items()}


def _guards(context: TracingContext | None) -> frozenset[str]:
    mode = context.fake_mode if context is not None else None
    shapes = mode.shape_env if mode is not None else None
    return frozenset(str(guard.expr) for guard in shapes.guards) if shapes else frozenset()
