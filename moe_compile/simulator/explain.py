"""The steps of a speed-up, and the distance of schedules from free communication.

Contract
    A waterfall changes one thing at a time, each step on top of those before it; in another
    order steps would be worth something else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from moe_compile.hardware.cluster import ClusterProfile, Fit
from moe_compile.simulator import setups
from moe_compile.simulator.layer_tasks import bound_us, time_layer
from moe_compile.simulator.method import (
    AttentionSharding,
    ExpertSharding,
    Method,
    Overlap,
    Products,
)
from moe_compile.simulator.models import TABLE_2, ModelShape, find_model
from moe_compile.simulator.step import Setting, predict_step

FP8_BYTES: Final = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One step from the baseline to MegaScale-MoE, or beyond it."""

    name: str
    by: str
    """The part of megamoe that does it, or why none does."""
    seconds: float
    gain: float
    """Time before over time after."""
    total_gain: float
    """Time of the baseline over time after."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleBound:
    """One layer of a model: its time with free collectives, and the schedules' shares of it."""

    model: str
    ideal_ms: float
    ideal_mfu_percent: float
    """MFU of the layer alone, without head and pipeline."""
    tensor_over_ideal: float | None
    """Time of tensor parallelism in a node, nothing overlapped, over the ideal time."""
    of_bound_percent: dict[str, float]
    """Schedule -> ideal time over its time."""


def explain_speedup(gpus: int) -> tuple[Change, ...]:
    """Return the steps from Megatron-LM to MegaScale-MoE on `gpus` H800, and beyond."""
    changes: list[Change] = []
    for name, by, setting in _steps(gpus):
        seconds = predict_step(setting).seconds
        before = changes[-1].seconds if changes else seconds
        first = changes[0].seconds if changes else seconds
        changes.append(
            Change(
                name=name,
                by=by,
                seconds=seconds,
                gain=before / seconds,
                total_gain=first / seconds,
            )
        )
    return tuple(changes)


def predict_own_part(gpus: int) -> Change:
    """Return the baseline with the steps that megamoe and its recipe have for this layout.

    These are interleaving, bf16 gradients, expert parallelism beside TP attention, and exchanges
    beside independent operators. There is one chunk: moving rows to make two costs more than they
    hide. Row operators count as all fast, which no one has measured.
    """
    baseline = setups.megatron(gpus)
    own = _job(baseline, virtual_stages=setups.MEGASCALE_JOB.virtual_stages, gradient_bytes=2)
    own = _method(own, has_slow_operators=False, experts=ExpertSharding.SOME)
    own = _method(own, overlap=Overlap.INTER_OP)
    seconds = predict_step(own).seconds
    gain = predict_step(baseline).seconds / seconds
    by = "interleaving, bf16 gradients, row operators, EP beside TP attention, inter-op"
    return Change(name="megamoe's part", by=by, seconds=seconds, gain=gain, total_gain=gain)


def find_bounds(profile: ClusterProfile, fit: Fit) -> tuple[ScheduleBound, ...]:
    """Return the bound of every model of MegaScale-MoE's table 2, and of DeepSeek-V3."""
    one_node = tuple((model, Method(), setups.MEGASCALE_JOB) for model in TABLE_2)
    far = (find_model("deepseek-v3"), setups.DEEPSEEK, setups.DEEPSEEK_JOB)
    return tuple(
        _bound(Setting(model=model, profile=profile, fit=fit, method=method, job=job))
        for model, method, job in (*one_node, far)
    )


def _steps(gpus: int) -> Iterator[tuple[str, str, Setting]]:
    now = setups.megatron(gpus)
    yield "Megatron-LM", "the baseline", now
    now = _job(now, virtual_stages=setups.MEGASCALE_JOB.virtual_stages)
    yield "+ interleaved pipeline", "the recipe: pipeline_parallel_schedule", now
    now = _job(now, gradient_bytes=2)
    yield "+ bf16 gradients", "compress_gradients: gradient_wire", now
    now = _method(now, has_slow_operators=False)
    yield "+ fast row operators", "lower_row_ops, fold_row_moves: part of it", now
    now = _method(now, fuses_gradient_sum=True)
    yield "+ fused gradient sums", "none: FSDP sums gradients in its own kernels", now
    now = _method(now, rebuilds=True)
    yield "+ rematerialization", "save_exchanges: recompute; for memory", now
    now = _method(now, experts=ExpertSharding.SOME)
    yield "+ EP for TP of experts", "the recipe: expert_parallel_degree", now
    now = _method(now, attention=AttentionSharding.SEQUENCE)
    yield "+ SP for TP of attention", "not here: the recipe has no Ulysses beside a pipeline", now
    now = _method(now, overlap=Overlap.INTER_OP)
    yield "+ inter-op overlap", "schedule_exchanges", now
    fused = _method(now, overlap=Overlap.TILES)
    yield "+ fused tiles", "none; rewrite_regions takes their place", fused
    now = _method(now, overlap=Overlap.IDEAL)
    yield "free collectives", "a bound", now
    now = replace(now, fit=replace(now.fit, imbalance=1.0))
    yield "and balanced experts", "a bound", now
    now = _method(now, products=Products.ALL)
    yield "and fp8 GEMMs", "a bound; weight gradients stay bf16", now


def _bound(setting: Setting) -> ScheduleBound:
    costs = setting.costs
    ideal_us = bound_us(costs)
    near = {}
    for name, methods in _candidates(setting).items():
        near[name] = 100.0 * ideal_us / _fastest_us(setting, methods)
        small = [replace(m, dispatch_bytes=FP8_BYTES, combine_bytes=FP8_BYTES) for m in methods]
        near[f"{name} + fp8 wire"] = 100.0 * ideal_us / _fastest_us(setting, small)
    model, peak = setting.model, setting.profile.compute.bf16_tflops
    work = _layer_flops(model, setting.job.seq_len) * costs.local_tokens
    tensor = Method(attention=AttentionSharding.HEADS, experts=ExpertSharding.SLICES)
    in_node = setting.method.ranks == tensor.ranks
    return ScheduleBound(
        model=model.name,
        ideal_ms=ideal_us / 1e3,
        ideal_mfu_percent=100.0 * work / (ideal_us * 1e6) / peak,
        tensor_over_ideal=_fastest_us(setting, [tensor]) / ideal_us if in_node else None,
        of_bound_percent=near,
    )


def _candidates(setting: Setting) -> dict[str, list[Method]]:
    method = replace(setting.method, overlap=Overlap.INTER_OP, num_chunks=1)
    local = setting.model.num_experts // method.expert_ranks
    chunks = [
        replace(method, overlap=Overlap.CHUNKS, num_chunks=n, chunks_tokens=by_tokens)
        for n in (2, 4, 8)
        for by_tokens in (True, False)
        if by_tokens or n <= local
    ]
    return {
        "sequential": [replace(method, overlap=Overlap.SEQUENTIAL)],
        "inter-op": [method],
        "best chunks": [method, *chunks],
        "tiles": [replace(method, overlap=Overlap.TILES)],
        "two-batches": [replace(method, overlap=Overlap.TWO_BATCHES)],
    }


def _fastest_us(setting: Setting, methods: list[Method]) -> float:
    return min(time_layer(replace(setting, method=m).costs).total_us for m in methods)


def _layer_flops(model: ModelShape, seq_len: int) -> float:
    """Return operations per token of one layer with experts, mean over all layers."""
    head = 6 * model.vocab_size * model.width
    return (model.flops_per_token(seq_len) - head) / model.num_layers


def _method(setting: Setting, **changes: object) -> Setting:
    return replace(setting, method=replace(setting.method, **changes))  # type: ignore[arg-type]


def _job(setting: Setting, **changes: int) -> Setting:
    return replace(setting, job=replace(setting.job, **changes))
