"""Predictions beside published figures, and their errors.

Contract
    Every row says whether a constant was fitted on it; errors are summed over the others only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from moe_compile.hardware.cluster import Fit
from moe_compile.simulator import published as paper
from moe_compile.simulator import setups
from moe_compile.simulator.method import Attention, Method, Overlap
from moe_compile.simulator.models import find_model
from moe_compile.simulator.step import Job, Setting, predict_step

RATIO: Final = "x"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One published figure and what the simulator says."""

    label: str
    unit: str
    published: float
    predicted: float
    is_fitted: bool = False

    @property
    def error_percent(self) -> float:
        """Return predicted over published, less one."""
        return 100.0 * (self.predicted / self.published - 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """Rows of one source."""

    title: str
    source: str
    constants: str
    """Which fit the predictions use."""
    rows: tuple[Row, ...]

    @property
    def heldout_mape_percent(self) -> float | None:
        """Return the mean absolute error of rows nothing was fitted on; None without any."""
        errors = [abs(row.error_percent) for row in self.rows if not row.is_fitted]
        return sum(errors) / len(errors) if errors else None


def check_table_3(fit: Fit | None = None) -> Check:
    """Return iteration times of the 352B model."""
    return Check(
        title="352B on H800, seconds per step",
        source=paper.MEGASCALE_TABLE_3,
        constants="h800, fit bytedance",
        rows=tuple(_step_rows(fit)),
    )


def check_speedups() -> Check:
    """Return the speed-ups that follow from table 3's times."""
    return Check(
        title="352B on H800, MegaScale-MoE over Megatron-LM",
        source=paper.MEGASCALE_TABLE_3 + ", ratio of its times",
        constants="h800, fit bytedance",
        rows=tuple(
            Row(
                label=f"{row.gpus} GPUs",
                unit=RATIO,
                published=row.megatron_s / row.megascale_s,
                predicted=_speedup(row.gpus),
                is_fitted=row.megatron_is_fitted or row.megascale_is_fitted,
            )
            for row in paper.TABLE_3
        ),
    )


def check_table_5(fit: Fit | None = None) -> Check:
    """Return the paper's ablation; fitted, so no evidence."""
    steps = [
        predict_step(setups.megascale(paper.TABLE_5_GPUS, fit, method)).seconds
        for _, method in setups.ABLATION
    ]
    names = [name for name, _ in setups.ABLATION]
    return Check(
        title="352B on 240 H800, speed-up over TP + TP without overlap",
        source=paper.MEGASCALE_TABLE_5,
        constants="h800, fit bytedance",
        rows=tuple(
            Row(label=name, unit=RATIO, published=speedup, predicted=steps[0] / s, is_fitted=True)
            for name, speedup, s in list(zip(names, paper.TABLE_5, steps, strict=True))[1:]
        ),
    )


def check_weak_scaling() -> Check:
    """Return the mean speed-up when the batch grows with the GPUs."""
    ratios = [_speedup(gpus, batch) for gpus, batch in paper.WEAK_SCALING]
    low, high = paper.WEAK_SCALING_SPEEDUPS
    return Check(
        title="352B on H800, batch growing with GPUs",
        source="MegaScale-MoE (arXiv 2505.11432) figure 12: 1.74x to 1.79x, their middle here",
        constants="h800, fit bytedance",
        rows=(
            Row(
                label="480 to 1440 GPUs, mean",
                unit=RATIO,
                published=(low + high) / 2,
                predicted=sum(ratios) / len(ratios),
            ),
        ),
    )


def check_eos(fit: Fit | None = None) -> Check:
    """Return MFU on NVIDIA's Eos; one row calibrates."""
    rows = (
        Row(
            label=_eos_label(row),
            unit="% MFU",
            published=row.mfu_percent,
            predicted=eos_mfu_percent(row, fit),
            is_fitted=row.is_fitted,
        )
        for row in paper.EOS
    )
    return Check(
        title="Mixtral and Qwen2 on H100 (Eos)",
        source=paper.FOLDING_TABLES,
        constants="h100, fit eos",
        rows=tuple(rows),
    )


def check_deepseek() -> Check:
    """Return DeepSeek-V3's own run under every set of constants there is; none saw it."""
    bytedance, eos = (
        setups.shipped("h800").fit("bytedance"),
        setups.shipped("h100").fit("eos"),
    )
    imbalance = bytedance.imbalance
    fits = (
        ("no fit", setups.shipped("h800").fit("routed")),
        ("Eos's fit", Fit(compute=eos.compute, link=eos.link, imbalance=imbalance)),
        ("ByteDance's fit", bytedance),
    )
    return Check(
        title="DeepSeek-V3 on 2,048 H800, tokens per second and GPU",
        source=paper.DEEPSEEK_REPORT,
        constants=f"h800, imbalance {imbalance}",
        rows=tuple(
            Row(
                label=name,
                unit="tok/s/GPU",
                published=paper.DEEPSEEK_TOKENS_PER_GPU_S,
                predicted=deepseek_tokens_per_gpu_s(Overlap.TWO_BATCHES, fit),
            )
            for name, fit in fits
        ),
    )


def rank_deepseek() -> dict[str, float]:
    """Return tokens per second and GPU of DeepSeek-V3's run by overlap, without a fit."""
    fit = setups.shipped("h800").fit("routed")
    order = (Overlap.SEQUENTIAL, Overlap.INTER_OP, Overlap.TWO_BATCHES, Overlap.IDEAL)
    return {overlap.value: deepseek_tokens_per_gpu_s(overlap, fit) for overlap in order}


def eos_mfu_percent(row: paper.EosRow, fit: Fit | None = None) -> float:
    """Return the predicted MFU of a row in its own convention: attention counted in full."""
    profile, model = setups.shipped("h100"), find_model(row.model)
    method = Method(
        attention=Attention.HEADS,
        ranks=row.tensor,
        expert_ranks=row.expert,
        expert_slices=1 if row.is_folded else row.tensor,
    )
    job = Job(
        gpus=row.gpus,
        pipeline=row.pipeline,
        virtual_stages=paper.EOS_VIRTUAL_STAGES,
        global_batch=row.global_batch,
        seq_len=paper.EOS_SEQ_LEN,
    )
    fit = fit or profile.fit("eos")
    step = predict_step(Setting(model=model, profile=profile, fit=fit, method=method, job=job))
    full = model.flops_per_token(job.seq_len, is_causal=False)
    return 100.0 * step.mfu * full / model.flops_per_token(job.seq_len)


def deepseek_tokens_per_gpu_s(overlap: Overlap, fit: Fit) -> float:
    """Return what DeepSeek-V3's run would train per GPU under an overlap."""
    setting = setups.deepseek(overlap, fit)
    return predict_step(setting).tokens_per_s / setting.job.gpus


def _step_rows(fit: Fit | None) -> Iterator[Row]:
    for row in paper.TABLE_3:
        yield Row(
            label=f"Megatron-LM, {row.gpus} GPUs",
            unit="s",
            published=row.megatron_s,
            predicted=predict_step(setups.megatron(row.gpus, fit)).seconds,
            is_fitted=row.megatron_is_fitted,
        )
    for row in paper.TABLE_3:
        yield Row(
            label=f"MegaScale-MoE, {row.gpus} GPUs",
            unit="s",
            published=row.megascale_s,
            predicted=predict_step(setups.megascale(row.gpus, fit)).seconds,
            is_fitted=row.megascale_is_fitted,
        )


def _speedup(gpus: int, batch: int | None = None) -> float:
    settings = setups.megatron(gpus), setups.megascale(gpus)
    slow, fast = (predict_step(setups.with_batch(s, batch)).seconds for s in settings)
    return slow / fast


def _eos_label(row: paper.EosRow) -> str:
    kind = "folded" if row.is_folded else "MCore"
    return f"{row.model} {kind}, {row.gpus} GPUs, batch {row.global_batch}"
