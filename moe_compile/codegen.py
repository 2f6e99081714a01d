"""Hand a Dynamo graph to Inductor, or run it node by node, with our later passes on the way.

Contract
    Passes already registered on Inductor's hooks, in `options=` or in its configuration, run
    before ours; none is lost.
    The identity of our passes in cache keys covers every source file, those of rewrites and
    transports of other distributions too, the options and the hardware profile.
    A program in which a pass failed is not kept in a cache: torch has no public way to take it out,
    so the compilation ends there and begins again without the pass, under keys of its own. Every
    process meets the failure, whether its code then comes from a cache or not.
    A backward that passes run on is compiled beside its forward, before the program first runs:
    there it is not too late to begin again, or to run the program as written on all ranks.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Self

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.fx as fx
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._inductor import custom_graph_pass
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass

from moe_compile.cost.layer_program import AOT, aot_graphs
from moe_compile.cost.sizes import NominalSizes, nominal_hints
from moe_compile.entry_points import hash_of_packages
from moe_compile.errors import InvalidConfig
from moe_compile.failed_compilation import forget_unfinished_symbols
from moe_compile.graph.edit import note_receivers
from moe_compile.graph.query import is_tangent
from moe_compile.journal.entries import Dropped
from moe_compile.ops.host_copies import why_no_copies
from moe_compile.plan.state import CompileState, Partitioned
from moe_compile.recompute.partition import option_that_decides, partitioned
from moe_compile.second_backward import keep_saved_tensors, keeps_host_reads
from moe_compile.source_hash import hash_of_sources
from moe_compile.torch_quirks.aot_cache_allowlist import cacheable_functions
from moe_compile.torch_quirks.cuda_graphs import (
    Inputs,
    asks_for_captures,
    why_no_captures,
    why_no_captures_of,
)
from moe_compile.torch_quirks.inductor_settings import settings_of_ours, switched_off
from passes.bisected import is_bisecting
from passes.pipeline import (
    JOINT,
    PARTITIONED,
    PIN,
    POST_GRAD,
    POST_GRAD_EARLY,
    RECORD,
    Level,
    run_level,
)
from passes.quantize_where_made import is_quantised_on_gpu
from passes.save_overwritten import mark_overwritten

EARLY: Final = "post_grad_custom_pre_pass"
HOOKS: Final = {
    "joint_custom_post_pass": (JOINT,),
    EARLY: (POST_GRAD_EARLY,),
    "post_grad_custom_post_pass": (POST_GRAD, RECORD, PIN),
}

AHEAD: Final = "force_non_lazy_backward_lowering"
FUSIONS: Final = "pre_grad_fusion_options"
PARTITIONER: Final = "custom_partitioner_fn"

EVERY_LEVEL: Final = tuple(itertools.chain.from_iterable(HOOKS.values()))
"""Levels that run on a graph with work for them."""

AFTER_PARTITION: Final = (POST_GRAD_EARLY, POST_GRAD, RECORD)
"""Levels that run on the forward and the backward graph separately, in order."""


class FailedPass(Exception):
    """Ends a compilation in which a pass failed, before anything of that graph is kept."""


class LevelPass(CustomGraphPass):
    """Levels of our pipeline on one of Inductor's hooks, after the passes already there."""

    def __init__(
        self, levels: Sequence[Level], state: CompileState, before: CustomGraphPass | None
    ) -> None:
        """Run `before` first, then `levels` in order with `state`."""
        self._levels = levels
        self._state = state
        self._before = before

    def __call__(self, graph: fx.Graph) -> None:
        """Run on `graph` in place; raise FailedPass where a pass failed."""
        if self._before is not None:
            self._before(graph)
        for level in self._levels:
            if run_on_aot_graph(level, graph, self._state):
                raise FailedPass(*self._state.dropped)

    def uuid(self) -> Any:
        """Return the identity of this pass in cache keys; None when it cannot be identified.

        Nor can it be while torch's bisector leaves passes out.
        """
        if is_bisecting():
            return None
        mine = _identity(self._state)
        if self._before is None:
            return mine
        uuid = getattr(self._before, "uuid", None)
        theirs = uuid() if callable(uuid) else None
        return None if theirs is None else (theirs, mine)


def _sources() -> str:
    """Return hashes that identify the versions of megamoe and of packages that extend it."""
    return f"{hash_of_sources()} {hash_of_packages()}"


def _identity(state: CompileState) -> str:
    """Return the identity of our passes, and of those left out, in cache keys."""
    given = f"{state.config.digest_text()} {state.hardware} {state.site} {state.plan_digest}"
    if state.is_captured:
        given += (
            f" {state.num_inputs} {sorted(state.steady_inputs)} {sorted(state.gathered_inputs)}"
        )
    return " ".join([_sources(), given, *sorted(state.dropped)])


def run_on_aot_graph(level: Level, graph: fx.Graph, state: CompileState) -> bool:
    """Run one level on a graph of AOTAutograd; return whether a pass failed on it.

    Sets `state.is_backward`.
    """
    state.is_backward = any(map(is_tangent, graph.nodes))
    if level not in (POST_GRAD, RECORD, PIN):  # these come later on their graph
        state.measures, state.timeline = {}, ""
    direction = "backward" if state.is_backward else "forward"
    state.graph_name = "joint" if level is JOINT else direction
    results = run_level(level, graph, state)
    failed = [one for one in results if isinstance(one, Dropped) and one.is_failure]
    state.dropped += [f"{one.pass_name} {state.graph_name}" for one in failed]
    if failed and state.on_pass_failed is not None:
        state.on_pass_failed()
    return bool(failed)


def plan_of(state: CompileState) -> str:
    """Return a digest of the rewrites of a compiled program; "" where it runs as written.

    Passes that failed on the graphs compiled so far, or that torch's bisector left out, are part of
    it: other ranks may have none.
    """
    if not _levels(state):
        return ""
    made = (
        state.plan_digest,
        _sources(),
        torch.__version__,
        *sorted(state.dropped),
        *state.left_out,
    )
    return hashlib.sha256(" ".join(made).encode()).hexdigest()[:32]


def _levels(state: CompileState) -> tuple[Level, ...]:
    """Return the levels that run on a graph; none leaves it to Inductor as it came."""
    if state.has_work:
        return EVERY_LEVEL
    if state.config.gradient_wire == "same":
        return ()
    return (POST_GRAD_EARLY, RECORD) if state.is_compared else (POST_GRAD_EARLY,)


def compile_with_inductor(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    state: CompileState,
    patches: Mapping[str, Any],
) -> Callable[..., Any]:
    """Compile by Inductor; a graph that needs no pass, exactly as Inductor alone does.

    If the graph keeps host reads, its backward still keeps the saved tensors.
    """
    levels = _levels(state)
    ours = _settings(gm, state, patches)
    state.is_captured = _captures(gm, state, patches)
    inputs = Inputs.of(gm)
    state.num_inputs = inputs.number
    state.steady_inputs, state.gathered_inputs = inputs.steady, inputs.gathered
    passes = dict[str, LevelPass]()
    for hook, all_levels in HOOKS.items():
        if here := tuple(level for level in all_levels if level in levels):
            passes[hook] = LevelPass(here, state, _stood_on(hook, patches))
    if not passes and keeps_host_reads(gm):
        passes[EARLY] = LevelPass((), state, _stood_on(EARLY, patches))
    if passes:
        ours.update(_let_into_cache(gm, patches))
    decides = option_that_decides(state.config)
    if JOINT in levels and (decides or state.config.offload_budget):
        ours[PARTITIONER] = Partitioner(state, _other_partitioner(patches, decides))
    settings = {**patches, **ours, **passes}
    with _backward_ahead() if levels else contextlib.nullcontext():
        inner_compile = functools.partial(_compile_one, {}) if passes else compile_fx_inner
        return _compile_without_failures(gm, example_inputs, state, inner_compile, settings)


def _compile_one(
    known: dict[str, int], gm: fx.GraphModule, *arguments: Any, **settings: Any
) -> Any:
    """Compile one graph by Inductor, whose backward writes into no saved tensor.

    Inductor fuses kernels over rows only if it has hints of their number. It is given ours where
    rows are quantised in the kernel that makes them; `known` has those of the forward. Neither is
    done on a hook of Inductor's passes: these do not run where Inductor has the code in its cache,
    and hints are part of its key.
    """
    keep_saved_tensors()
    if not any(map(is_quantised_on_gpu, gm.graph.nodes)):
        return compile_fx_inner(gm, *arguments, **settings)
    sizes = NominalSizes(known)
    sizes.learn(gm.graph)
    with nominal_hints(gm.graph, sizes):
        return compile_fx_inner(gm, *arguments, **settings)


def _other_partitioner(patches: Mapping[str, Any], decides: str) -> Any:
    """Return the partitioner that the user has put on Inductor's hook, None for none.

    Raises InvalidConfig where it decides what is kept and the option `decides` asks megamoe to
    decide that, and where this torch lacks the hook.
    """
    option = decides or "offload_budget"
    remedy = "offload_budget = 0"
    if decides:
        by_price = decides.startswith("recompute =")
        remedy = "recompute = 'save_exchanges'" if by_price else "recompute_modules = []"
    if PARTITIONER not in inductor_config.get_config_copy():
        why = f"needs Inductor's {PARTITIONER}, which this torch does not have"
    elif (other := _stood_on(PARTITIONER, patches)) is not None and decides:
        why = (
            f"and Inductor's {PARTITIONER} both decide which tensors are kept for the backward pass"
        )
    else:
        return other
    raise InvalidConfig(f"megamoe.{option} {why}; write megamoe.{remedy}")


def _backward_ahead() -> contextlib.AbstractContextManager[None]:
    """Have AOTAutograd compile backward graphs ahead, and raise their errors.

    Without this setting it compiles them as they first run, or, where sizes are read, ahead, but
    keeps an error until then. Nothing changes in a torch without the setting.
    """
    known = hasattr(functorch_config, AHEAD)
    patch: contextlib.AbstractContextManager[None] = functorch_config.patch(
        {AHEAD: True} if known else {}
    )
    return patch


def _compile_without_failures(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    state: CompileState,
    inner_compile: Callable[..., Any],
    settings: Mapping[str, Any],
) -> Callable[..., Any]:
    """Compile by Inductor, again where a pass failed: `state` then lists those to leave out.

    `inner_compile` makes the code of one graph of AOTAutograd, or finds it in Inductor's cache.
    """
    reported = len(state.journal.records)
    while True:
        known = len(state.dropped)
        try:
            compiled: Callable[..., Any] = compile_fx(
                gm,
                list(example_inputs),
                inner_compile=inner_compile,
                config_patches=dict(settings),
            )
        except Exception:
            if len(state.dropped) == known:
                raise
            state.journal.forget_all_but_failures(reported)
            forget_unfinished_symbols()
        else:
            return compiled


def _stood_on(hook: str, patches: Mapping[str, Any]) -> Any:
    """Return the pass that stands on one of Inductor's hooks, if any."""
    return patches.get(hook, getattr(inductor_config, hook))


def _let_into_cache(gm: fx.GraphModule, patches: Mapping[str, Any]) -> dict[str, object]:
    """Prepare a graph for AOTAutograd's cache; return the settings with which it is taken.

    Inductor's fusions on Dynamo graphs, which are off unless asked for, take an example value for
    a tensor, also where none is known: with such fusions the graph stays as it is, and no cache
    takes it.
    """
    if not patches.get(FUSIONS, getattr(inductor_config, FUSIONS)):
        note_receivers(gm.graph)
    return cacheable_functions(patches)


def _settings(
    gm: fx.GraphModule, state: CompileState, patches: Mapping[str, Any]
) -> dict[str, object]:
    """Return Inductor's settings for a graph that our passes work on; {} for any other."""
    if not state.has_work:
        return {}
    is_scheduled = POST_GRAD in _levels(state) and state.config.schedule
    captured = patches if _captures(gm, state, patches) else None
    return settings_of_ours(is_scheduled=is_scheduled, captured=captured)


def _captures(gm: fx.GraphModule, state: CompileState, patches: Mapping[str, Any]) -> bool:
    is_asked = state.has_work and asks_for_captures(patches)
    return is_asked and not why_not_captured(gm, state, patches)


def why_not_captured(gm: fx.GraphModule, state: CompileState, patches: Mapping[str, Any]) -> str:
    """Return why CUDA graphs are off in a graph that our passes work on, "" where they are not."""
    return why_no_captures(patches, state.config.disable_passes) or why_no_captures_of(gm)


def settings_switched_off(
    gm: fx.GraphModule, state: CompileState, patches: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return the settings of Inductor that were asked for and are off in this compilation."""
    if state.config.codegen != "inductor":
        return ()
    return switched_off(patches, _settings(gm, state, patches))


def compile_with_fx(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    state: CompileState,
    patches: Mapping[str, Any],
) -> Callable[..., Any]:
    """Run AOTAutograd's graphs node by node in our order: eager's bits, for tests."""
    del patches  # settings of Inductor, which does not run
    levels = _levels(state)

    def compile_graph(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        del inputs
        keep_saved_tensors()
        for level in AFTER_PARTITION:
            if level in levels:
                run_on_aot_graph(level, graph_module.graph, state)
        graph_module.recompile()
        return make_boxed_func(graph_module.forward)

    has_passes = JOINT in levels
    partition = partition_with_passes(state) if has_passes else _partition_as_written
    aot = AOT(fw_compiler=compile_graph, bw_compiler=compile_graph, partition_fn=partition)
    with _backward_ahead() if levels else contextlib.nullcontext():
        return aot(gm, list(example_inputs))


def _partition_as_written(joint: fx.GraphModule, joint_inputs: Any, **settings: Any) -> Any:
    """Partition a graph that no pass rewrites so that its results have eager's bits.

    The min-cut partitioner may recompute from an input that a write has changed since;
    AOTAutograd's default one may leave a dropout of the forward in the backward graph, which draws
    once more.
    """
    mark_overwritten(joint.graph)
    return min_cut_rematerialization_partition(joint, joint_inputs, **settings)


def partition_with_passes(state: CompileState, *, is_run: bool = True) -> Callable[..., Any]:
    """Return AOTAutograd's partitioner with our passes on the joint graph before it, and on both
    graphs behind it; `is_run` as `Partitioned` has it.
    """

    def partition(joint: fx.GraphModule, joint_inputs: Any, **settings: Any) -> Any:
        run_on_aot_graph(JOINT, joint.graph, state)
        graphs = partitioned(joint, joint_inputs, state, **settings)
        run_on_both_graphs(graphs, settings["num_fwd_outputs"], state, is_run=is_run)
        return graphs

    return partition


def run_on_both_graphs(
    graphs: Sequence[fx.GraphModule],
    num_results: int,
    state: CompileState,
    *,
    is_run: bool = True,
) -> bool:
    """Run the level on the forward and the backward graph of one joint graph, where asked for.

    Returns whether a pass failed. `num_results` outputs of the forward graph are the program's.
    """
    if not state.config.offload_budget:
        return False
    forward, backward = graphs
    state.partitioned = Partitioned(backward.graph, num_results, is_run)
    try:
        failed = run_on_aot_graph(PARTITIONED, forward.graph, state)
    finally:
        state.partitioned = None
    forward.recompile()
    backward.recompile()
    return failed


_Base: type = getattr(custom_graph_pass, "CustomPartitionerFn", object)


class Partitioner(_Base):
    """Inductor's partitioner: torch's, one chosen by price or the user's, then our passes."""

    def __init__(self, state: CompileState, before: Any) -> None:
        """Partition by `before`, where it is None as `state` asks, then run the passes."""
        self._state, self._before = state, before

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **settings: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return both graphs; raise FailedPass where a pass failed."""
        if self._before is None:
            graphs = partitioned(gm, joint_inputs, self._state, **settings)
        else:
            graphs = self._before(gm, joint_inputs, **settings)
        if run_on_both_graphs(graphs, settings["num_fwd_outputs"], self._state):
            raise FailedPass(*self._state.dropped)
        return graphs

    def uuid(self) -> Any:
        """Return the identity of the partitioner in cache keys; None where it has none."""
        theirs = self._before.uuid() if self._before is not None else "torch's"
        lacks = why_no_copies(torch.device("cpu"))
        is_known = theirs is not None and not is_bisecting()
        return (theirs, lacks, _identity(self._state)) if is_known else None

    def __deepcopy__(self, memo: Any) -> Self:
        """Return itself: Inductor copies its settings, which this is one of."""
        del memo
        return self

    def __reduce__(self) -> Any:
        """Pickle as its identity: Inductor pickles its settings for cache keys."""
        if (identity := self.uuid()) is None:
            raise TypeError(
                "a partitioner must have an identity (a string) that goes into the cache "
                "key; got none"
            )
        return str, (repr(identity),)


def trace_both(
    gm: fx.GraphModule, example_inputs: Sequence[Any], state: CompileState
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return AOTAutograd's forward and backward graph after every pass; no code is generated.

    Raises ValueError for a graph that needs no backward.
    """
    graphs = trace_graphs(gm, example_inputs, state, EVERY_LEVEL)
    if len(graphs) != 2:
        raise ValueError(
            "no tensor in this graph needs a gradient, so the graph has no backward pass"
        )
    return graphs[0], graphs[1]


def trace_graphs(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    state: CompileState,
    levels: Sequence[Level] | None = None,
) -> Sequence[fx.GraphModule]:
    """Return AOTAutograd's forward graph, and the backward if there is one, after passes.

    `levels` are those to run, None for the usual ones.
    """
    levels = _levels(state) if levels is None else levels
    has_passes = JOINT in levels
    partition = partition_with_passes(state, is_run=False) if has_passes else _partition_as_written
    graphs = aot_graphs(gm, example_inputs, partition)
    for graph_module, level in itertools.product(graphs, AFTER_PARTITION):
        if level in levels:
            run_on_aot_graph(level, graph_module.graph, state)
    return graphs
