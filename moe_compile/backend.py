"""The entry point of `torch.compile(model, backend="megamoe")`.

Contract
    Without a MoE region, or attention between exchanges, the graph goes to Inductor as it came:
    same code, same cache keys. Only `gradient_wire` and `offload_budget` concern such graphs too,
    which then record their launches, as those with regions do.
    A callable with collectives first runs once all ranks may: see `moe_compile.runtime.agreement`.
    A graph with an all-to-all and no region is warned of, with the reason, once per place.
    torch's configuration is changed only inside our own compilations, with two exceptions: at
    import `torch._dynamo.config.capture_scalar_outputs`, without which Dynamo would break the
    graph at the split sizes before any backend sees it; and `fail_on_recompile_limit_hit`, see
    `torch_quirks.recompile_limit`. docs/limits.md lists their effects on other programs. Also at
    import, grouped products are made known to torch's flop counter, and callbacks around
    compilations to Dynamo (`torch_quirks.untraceable_guards`).

The option `strict` raises for rewrites that were meant and asked for, and could not be proven.
One rule holds for every pass: a verdict names the option that asked for it, and its reason says
that it is meant and not proven. Nothing is raised for code that is no region, that is rewritten
already, or that would not gain: the reasons say which.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import torch._dynamo
import torch.distributed as dist
import torch.fx as fx
from torch._logging import trace_structured

from moe_compile.codegen import (
    compile_with_fx,
    compile_with_inductor,
    plan_of,
    settings_switched_off,
    why_not_captured,
)
from moe_compile.config import OFF, MegaMoEConfig, what_to_lower
from moe_compile.errors import InvalidConfig, RegionRefused
from moe_compile.failed_compilation import compiled_or_as_written
from moe_compile.first_run import AsWritten, agreed_callable, programs_of
from moe_compile.graph.gradient_order import note_outer_gradients
from moe_compile.graph.inner_graphs import names_of_functions, names_of_recomputed
from moe_compile.graph.overflow_output import add_overflow, overflows_of
from moe_compile.graph.snapshot import Snapshot
from moe_compile.graph.user_order import user_order
from moe_compile.hardware import load_profile
from moe_compile.journal.entries import Dropped, Journal, PassReport
from moe_compile.journal.remedies import to_do, with_change
from moe_compile.nothing_rewritten import WATCH
from moe_compile.ops.product_counts import count_grouped_products
from moe_compile.parts_by_price import decide_parts
from moe_compile.plan.plan_digest import groups_rewritten, level_value, plan_digest
from moe_compile.plan.row_rooms import total
from moe_compile.plan.state import CompileState
from moe_compile.predicted_time import predicted_us
from moe_compile.read_options import InvalidOptions, read_options
from moe_compile.report.compilations import Compilation, describe
from moe_compile.report.page import PAGE
from moe_compile.report.process_report import REPORT
from moe_compile.report.region_reports import DOES_NOT_COMPILE
from moe_compile.runtime.rerun import RERUN
from moe_compile.torch_quirks.cuda_graphs import ASKED
from moe_compile.torch_quirks.python311_frames import with_frame_space
from moe_compile.torch_quirks.recompile_limit import forbid_eager_beyond_limit
from moe_compile.torch_quirks.results_given_twice import give_results_once
from moe_compile.torch_quirks.size_constants import refuse_wrong_constants
from moe_compile.torch_quirks.unbacked_shapes import eager_where_a_value_is_needed
from moe_compile.torch_quirks.untraceable_guards import install_eager_fallback
from moe_compile.without_reads import (
    NOT_SERVED,
    Notes,
    with_and_without_reads,
    without_overflow,
)
from passes.normalize_exchanges import NormalizeExchanges
from passes.pipeline import all_names, dynamo_level, run_level

LOG: Final = logging.getLogger(__name__)
FORMS: Final = NormalizeExchanges.name
"""The pass that changes the form of exchanges before it is known whether they are a region's."""

torch._dynamo.config.capture_scalar_outputs = True
IMPORTING_THREAD: Final = threading.get_ident()
count_grouped_products()
install_eager_fallback()


@with_frame_space
def megamoe(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph; the entry point `torch_dynamo_backends` names this function.

    `options` with the prefix `megamoe.` are ours, all others go to Inductor, as `mode` does.
    Raises InvalidConfig for an unknown option or value; RegionRefused when `strict` and a region
    could not be transformed.
    """
    _capture_host_reads()
    install_eager_fallback()
    config, patches = read_options(mode, options)
    refuse_wrong_constants(gm.graph)
    give_results_once(gm)
    if config.host_reads == "needed":
        return compile_program(gm, example_inputs, config, patches)[0]
    if not RERUN.is_served:
        raise InvalidOptions(NOT_SERVED)
    both = functools.partial(compile_program, patches=patches)
    return with_and_without_reads(gm, example_inputs, config, both)


def compile_program(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    config: MegaMoEConfig,
    patches: Mapping[str, Any],
    *,
    stands_in: bool = False,
) -> tuple[Callable[..., Any], Notes | None]:
    """Return the compiled program, and its notes about the room for rows, if it returns any.

    `stands_in` as in `rewrite`.
    """
    order = user_order(gm)
    written = AsWritten.of(gm, example_inputs) if order else None
    weights = _shapes_of_weights(gm)
    is_page = config.report.endswith(PAGE)
    state, compilation = rewrite(gm, config, keeps_texts=is_page, stands_in=stands_in)
    compilation.settings_off = settings_switched_off(gm, state, patches)
    REPORT.add(compilation, config.report, state.hardware.name)
    state.on_pass_failed = functools.partial(REPORT.add_dropped, compilation)
    _log(compilation, why_not_captured(gm, state, patches))
    whole = CompileState(config=_as_written(config), hardware=state.hardware)
    again = functools.partial(_compile, state=whole, patches=patches)
    now = written.compile_now if written is not None and plan_of(state) else None
    with eager_where_a_value_is_needed(is_rewritten=compilation.has_regions):
        compiled, is_whole = compiled_or_as_written(
            lambda: _compile(gm, example_inputs, state, patches),
            functools.partial(now, again) if now is not None else None,
            state,
        )
    if is_whole:
        REPORT.add_as_written(compilation, DOES_NOT_COMPILE)
    compiled = WATCH.counted(compiled)
    if written is None:
        return compiled, None
    notes_overflow = state.notes_overflow and not is_whole
    written.learn_guards()
    if plan := plan_of(state):
        forbid_eager_beyond_limit(compilation.site)

    def compile_whole() -> Callable[..., Any]:
        if is_whole:
            return compiled
        REPORT.add_as_written(compilation)
        program = written.compile(again)
        return without_overflow(program) if notes_overflow else program

    site = f"{compilation.site} {config.digest_text()} {weights}"
    programs = programs_of(
        order,
        plan,
        rewritten=groups_rewritten(state, {g: user.collectives for g, user in order.items()}),
        site=site,
        is_promised=config.equal_tokens,
        left=with_change(str(left), left.reason) if (left := state.journal.first_left()) else "",
    )
    agreed = agreed_callable(
        compiled,
        programs,
        compile_whole if plan else None,
        what_to_lower(config) if compilation.has_regions else "",
    )
    return agreed, Notes(times=total(state.room_times)) if notes_overflow else None


def _capture_host_reads() -> None:
    """Switch on capture of host reads in this thread: the import did so in its own thread only.

    Newer releases of torch keep settings of Dynamo per thread. A setting that a user switched off
    stays off.
    """
    config = torch._dynamo.config
    if config.capture_scalar_outputs or threading.get_ident() == IMPORTING_THREAD:
        return
    config.capture_scalar_outputs = True
    LOG.warning(
        "megamoe: torch._dynamo.config.capture_scalar_outputs was False in thread %r, so the graph "
        "that is compiled now ends at the first host read. megamoe has set it to True for later "
        "graphs of this thread. To do: set it to True at the start of the thread",
        threading.current_thread().name,
    )


def _shapes_of_weights(gm: fx.GraphModule) -> list[tuple[str, list[int]]]:
    """Return types and sizes of the parameters of `gm`, which a rank's tokens do not change."""
    values = (n.meta.get("example_value") for n in gm.graph.find_nodes(op="placeholder"))
    weights = (value for value in values if isinstance(value, torch.nn.Parameter))
    return [(str(weight.dtype), list(map(int, weight.shape))) for weight in weights]


def rewrite(
    gm: fx.GraphModule,
    config: MegaMoEConfig,
    *,
    keeps_texts: bool = False,
    stands_in: bool = False,
) -> tuple[CompileState, Compilation]:
    """Run the Dynamo-level passes on `gm` in place; return the state and the compilation.

    Where it `keeps_texts`, the journal has the texts of graphs, for a page. `stands_in`: the
    program runs where one without host reads must not.
    """
    hardware = load_profile(config.hardware)
    parts = decide_parts(gm, config, rewrite) if config.batch_parts == "auto" else None
    now = config if parts is None else dataclasses.replace(config, chunks=parts.chunks)
    state = CompileState(config=now, hardware=hardware, parts=parts)
    state.journal.texts = [] if keeps_texts else None
    state.predict = lambda graph, new: predicted_us(graph, state, is_rewritten=new)
    compilation = describe(gm, state)
    levels: list[dict[str, Any]] = []
    state.notes_overflow = _run_dynamo_level(gm, state, compilation, levels)
    if stands_in:
        compilation.stand_in()
    state.site = compilation.site
    collectives = {group: order.collectives for group, order in user_order(gm).items()}
    state.is_compared = bool(collectives)
    state.plan_digest = plan_digest(config, levels, collectives)
    return state, compilation


def _compile(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    state: CompileState,
    patches: Mapping[str, Any],
) -> Callable[..., Any]:
    generate = compile_with_fx if state.config.codegen == "fx" else compile_with_inductor
    return generate(gm, example_inputs, state, patches)


def _run_dynamo_level(
    gm: fx.GraphModule,
    state: CompileState,
    compilation: Compilation,
    levels: list[dict[str, Any]],
    name: str = "dynamo",
    *,
    is_recomputed: bool = False,
) -> bool:
    """Run on `gm`, then on its bodies of higher-order operators, as those of checkpointing.

    Bodies of autograd functions are left out: the program defines their derivatives itself.
    Returns whether `gm` returns a note of rows without room as well.
    """
    state.begin_graph(name, is_recomputed=is_recomputed)
    before, bodies = Snapshot(gm.graph), dict(gm.named_children())
    results = run_level(dynamo_level(), gm.graph, state)
    if not any(r.applied for r in results if isinstance(r, PassReport) and r.pass_name != FORMS):
        _put_back(gm, before, bodies)
    state.withdraw({result.pass_name for result in results if isinstance(result, Dropped)})
    _check_groups(state)
    if state.config.strict:
        raise_if_strict(state.journal, compilation.site)
    dropped = [r.pass_name for r in results if isinstance(r, Dropped)]
    levels.append(level_value(gm.graph, state, dropped=dropped))
    compilation.add_level(state)
    overflows = state.overflows
    state.room_times += [one.room_times for one in state.experts if one.plan.room]
    note_outer_gradients(gm.graph)
    recomputed, functions = names_of_recomputed(gm.graph), names_of_functions(gm.graph)
    for child, body in gm.named_children():
        if isinstance(body, fx.GraphModule) and child not in functions:
            again = is_recomputed or child in recomputed
            has_note = _run_dynamo_level(
                body, state, compilation, levels, f"{name}/{child}", is_recomputed=again
            )
            overflows = [*overflows, *(overflows_of(gm.graph, child) if has_note else ())]
    notes = add_overflow(gm.graph, overflows)
    gm.recompile()
    return notes


def _put_back(gm: fx.GraphModule, before: Snapshot, bodies: Mapping[str, torch.nn.Module]) -> None:
    """Restore a graph in which nothing was found."""
    for name, body in bodies.items():
        setattr(gm, name, body)
    before.restore(gm.graph)


def _as_written(config: MegaMoEConfig) -> MegaMoEConfig:
    """Return `config` with every rewrite of ours switched off."""
    names = all_names()
    return dataclasses.replace(
        config, disable_passes=names, gradient_wire="same", recompute_modules=()
    )


def _check_groups(state: CompileState) -> None:
    """Raise InvalidConfig when a region exchanges over a process group that does not exist."""
    found = [(one.found.where, one.plan.group) for one in state.regions if one.plan.group]
    for where, group in found:
        try:
            dist.distributed_c10d._resolve_process_group(group)
        except (RuntimeError, ValueError, KeyError):
            raise InvalidConfig(
                f"the exchange at {where} uses process group {group!r}, which "
                "does not exist in this process: call torch.distributed.init_process_group, and "
                "make the group on every rank, before the compiled model runs"
            ) from None


def _log(compilation: Compilation, why_not_captured: str) -> None:
    if off := compilation.settings_off:
        why = ["benchmarks wait for the device while collectives are in flight"] * (off != (ASKED,))
        why += [f"no part can be captured in a CUDA graph: {why_not_captured}"] * (ASKED in off)
        _warn_once(
            f"megamoe: Inductor's settings {', '.join(off)} are off in graphs with regions, for "
            f"example at {compilation.site}: {', and '.join(why)}. To do: leave the settings out, "
            "or pass them to torch.compile only for code without collectives"
        )
    for warning in compilation.warnings():
        _warn_once(warning)
    if not compilation.has_regions:
        return
    chunks = [region.num_chunks for region in compilation.regions]
    LOG.info("%s: %d MoE regions in %s chunks", compilation.site, len(chunks), chunks)
    groups = [a.num_chunks for a in compilation.attention if a.is_region]
    LOG.info("%s: %d attention regions in %s chunks", compilation.site, len(groups), groups)
    for line in (*compilation.left_alone, *compilation.dropped):
        LOG.debug("%s: left alone: %s", compilation.site, line)
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": "megamoe_report", "encoding": "json"},
        payload_fn=lambda: json.dumps(dataclasses.asdict(compilation), default=str),
    )


@functools.cache
def _warn_once(text: str) -> None:
    LOG.warning("%s", text)


def raise_if_strict(journal: Journal, where: str) -> None:
    """Raise RegionRefused for the first verdict on a rewrite an option asked for and did not get.

    `where` is the place in the user's source that is compiled, for verdicts without their own.
    """
    unmet = next((verdict for verdict in journal.verdicts() if verdict.is_unmet), None)
    if unmet is not None:
        option, off = f"megamoe.{unmet.option}", OFF[unmet.option][0]
        raise RegionRefused(
            f"{unmet.where or where}: {option} was requested but is not applied to {unmet}. To "
            f"do: {to_do(unmet.reason)}. Or set {option} = {off!r}, or megamoe.strict = False, "
            "to run the code without this rewrite"
        )
