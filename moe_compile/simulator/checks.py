"""Predictions beside published figures, and their errors.

Contract
    Every row says whether a constant was fitted on it; errors are summed over the others only.

Published measurements of MoE training are data here, with a mark for each that a fit uses.
Numbers stand as printed in their source. `is_fitted` marks every row that a constant of a
profile was fitted on; all others are held out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from moe_compile.hardware.cluster import Fit
from moe_compile.simulator import setups
from moe_compile.simulator.method import AttentionSharding, Method, Overlap
from moe_compile.simulator.models import find_model
from moe_compile.simulator.step import Job, Setting, predict_step

RATIO: Final = "x"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One published figure and its prediction."""

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
    """Name of the fit that the predictions use."""
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
        source=MEGASCALE_TABLE_3,
        constants="h800, fit bytedance",
        rows=tuple(_step_rows(fit)),
    )


def check_speedups() -> Check:
    """Return the speed-ups that follow from table 3's times."""
    return Check(
        title="352B on H800, MegaScale-MoE over Megatron-LM",
        source=MEGASCALE_TABLE_3 + ", ratio of its times",
        constants="h800, fit bytedance",
        rows=tuple(
            Row(
                label=f"{row.gpus} GPUs",
                unit=RATIO,
                published=row.megatron_s / row.megascale_s,
                predicted=_speedup(row.gpus),
                is_fitted=row.megatron_is_fitted or row.megascale_is_fitted,
            )
            for row in TABLE_3
        ),
    )


def check_table_5(fit: Fit | None = None) -> Check:
    """Return the paper's ablation; fitted, so no evidence."""
    steps = [
        predict_step(setups.megascale(TABLE_5_GPUS, fit, method)).seconds
        for _, method in setups.ABLATION
    ]
    names = [name for name, _ in setups.ABLATION]
    return Check(
        title="352B on 240 H800, speed-up over TP + TP without overlap",
        source=MEGASCALE_TABLE_5,
        constants="h800, fit bytedance",
        rows=tuple(
            Row(label=name, unit=RATIO, published=speedup, predicted=steps[0] / s, is_fitted=True)
            for name, speedup, s in list(zip(names, TABLE_5, steps, strict=True))[1:]
        ),
    )


def check_weak_scaling() -> Check:
    """Return the mean speed-up when the batch grows with the GPUs."""
    ratios = [_speedup(gpus, batch) for gpus, batch in WEAK_SCALING]
    low, high = WEAK_SCALING_SPEEDUPS
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
        for row in EOS
    )
    return Check(
        title="Mixtral and Qwen2 on H100 (Eos)",
        source=FOLDING_TABLES,
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
        source=DEEPSEEK_REPORT,
        constants=f"h800, imbalance {imbalance}",
        rows=tuple(
            Row(
                label=name,
                unit="tok/s/GPU",
                published=DEEPSEEK_TOKENS_PER_GPU_S,
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


def eos_mfu_percent(row: EosRow, fit: Fit | None = None) -> float:
    """Return the predicted MFU of a row in its own convention: attention counted in full."""
    profile, model = setups.shipped("h100"), find_model(row.model)
    method = Method(
        attention=AttentionSharding.HEADS,
        ranks=row.tensor,
        expert_ranks=row.expert,
        expert_slices=1 if row.is_folded else row.tensor,
    )
    job = Job(
        gpus=row.gpus,
        pipeline=row.pipeline,
        virtual_stages=EOS_VIRTUAL_STAGES,
        global_batch=row.global_batch,
        seq_len=EOS_SEQ_LEN,
    )
    fit = fit or profile.fit("eos")
    step = predict_step(Setting(model=model, profile=profile, fit=fit, method=method, job=job))
    full = model.flops_per_token(job.seq_len, is_causal=False)
    return 100.0 * step.mfu * full / model.flops_per_token(job.seq_len)


def deepseek_tokens_per_gpu_s(overlap: Overlap, fit: Fit) -> float:
    """Return the tokens per second and GPU of DeepSeek-V3's run under an overlap."""
    setting = setups.deepseek(overlap, fit)
    return predict_step(setting).tokens_per_s / setting.job.gpus


def _step_rows(fit: Fit | None) -> Iterator[Row]:
    for row in TABLE_3:
        yield Row(
            label=f"Megatron-LM, {row.gpus} GPUs",
            unit="s",
            published=row.megatron_s,
            predicted=predict_step(setups.megatron(row.gpus, fit)).seconds,
            is_fitted=row.megatron_is_fitted,
        )
    for row in TABLE_3:
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


def _eos_label(row: EosRow) -> str:
    kind = "folded" if row.is_folded else "MCore"
    return f"{row.model} {kind}, {row.gpus} GPUs, batch {row.global_batch}"


MEGASCALE_TABLE_3: Final = "MegaScale-MoE (arXiv 2505.11432) table 3"
MEGASCALE_TABLE_5: Final = "MegaScale-MoE (arXiv 2505.11432) table 5"
FOLDING_TABLES: Final = "MoE Parallel Folding (arXiv 2504.14960) tables 1, 3 and 4"
DEEPSEEK_REPORT: Final = "DeepSeek-V3 report (arXiv 2412.19437) table 1"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRow:
    """Iteration times of the 352B model, global batch 720, on so many H800."""

    gpus: int
    megatron_s: float
    megascale_s: float
    megatron_is_fitted: bool = False
    megascale_is_fitted: bool = False


TABLE_3: Final = (
    StepRow(gpus=240, megatron_s=39.94, megascale_s=21.61),
    StepRow(gpus=480, megatron_s=19.56, megascale_s=11.83, megascale_is_fitted=True),
    StepRow(gpus=720, megatron_s=13.70, megascale_s=7.97, megatron_is_fitted=True),
    StepRow(gpus=960, megatron_s=10.82, megascale_s=6.12),
    StepRow(gpus=1440, megatron_s=7.90, megascale_s=4.19, megascale_is_fitted=True),
)
TABLE_5: Final = (1.0, 1.13, 1.22, 1.28)
"""Speed-ups at 240 GPUs, in the order of `systems.ABLATION`; all but the first are fitted."""
TABLE_5_GPUS: Final = 240


@dataclass(frozen=True, kw_only=True, slots=True)
class EosRow:
    """MFU of one run on H100, sequence 4096, routing forced to be balanced."""

    model: str
    is_folded: bool
    """Whether attention and experts have meshes of their own; else experts are sliced by TP."""
    gpus: int
    global_batch: int
    tensor: int
    expert: int
    pipeline: int
    mfu_percent: float
    """MFU with attention counted in full, not causal."""
    is_fitted: bool = False


EOS_SEQ_LEN: Final = 4096
EOS_VIRTUAL_STAGES: Final = 7
"""Virtual stages of every row: one layer, or half of one, per chunk."""


def _rows(
    model: str, degrees: tuple[int, int, int], cells: str, *, is_folded: bool = True
) -> tuple[EosRow, ...]:
    """Return rows from cells `gpus/batch=mfu`; a star marks the row fitted on."""
    tensor, expert, pipeline = degrees
    rows = []
    for cell in cells.split():
        left, mfu = cell.rstrip("*").split("=")
        gpus, batch = left.split("/")
        rows.append(
            EosRow(
                model=model,
                is_folded=is_folded,
                gpus=int(gpus),
                global_batch=int(batch),
                tensor=tensor,
                expert=expert,
                pipeline=pipeline,
                mfu_percent=float(mfu),
                is_fitted=cell.endswith("*"),
            )
        )
    return tuple(rows)


EOS: Final = (
    *_rows(
        "mixtral-8x22b",
        (2, 8, 8),
        "128/256=49.3 128/1024=52.2* 256/1024=50.7 512/1024=48.9 1024/1024=44.9",
    ),
    *_rows(
        "mixtral-8x22b",
        (2, 4, 8),
        "128/256=46.3 128/1024=49.4 256/1024=48.0 512/1024=45.5 1024/1024=42.3",
        is_folded=False,
    ),
    *_rows(
        "qwen2-57b-a14b",
        (2, 4, 4),
        "64/256=39.0 64/1024=39.9 128/1024=39.7 256/1024=38.1 512/1024=36.6 1024/1024=33.4",
    ),
    *_rows(
        "mixtral-8x22b-g8t8",
        (4, 8, 8),
        "128/256=28.8 128/1024=30.0 256/1024=29.3 512/1024=26.7 1024/1024=25.5",
    ),
)
DEEPSEEK_GPU_HOURS: Final = 2.664e6
"""GPU hours of pre-training on 2,048 H800."""
DEEPSEEK_TOKENS: Final = 14.8e12
DEEPSEEK_TOKENS_PER_GPU_S: Final = DEEPSEEK_TOKENS / DEEPSEEK_GPU_HOURS / 3600.0
WEAK_SCALING: Final = ((480, 360), (960, 720), (1440, 1080))
"""GPUs and global batch of MegaScale-MoE figure 12."""
WEAK_SCALING_SPEEDUPS: Final = (1.74, 1.79)
"""Lowest and highest speed-up there; the rows in between are bars without numbers."""
FIGURE_14_GAINS: Final = (1.149, 1.329)
"""Least and greatest gain in MFU of SP + EP over TP + TP, six models on 8 H800."""
