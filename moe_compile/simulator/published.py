"""Published measurements of MoE training, as data, and which of them fits use.

Contract
    Numbers stand as printed in their source. `is_fitted` marks every row that a constant of a
    profile was fitted on; all others are held out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

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
    """Attention counted in full, not causal."""
    is_fitted: bool = False


EOS_SEQ_LEN: Final = 4096
EOS_VIRTUAL_STAGES: Final = 7
"""Of every row: one layer, or half of one, per chunk."""


def _rows(
    model: str, degrees: tuple[int, int, int], cells: str, *, is_folded: bool = True
) -> tuple[EosRow, ...]:
    """Return rows from cells `gpus/batch=mfu`; a star marks the one fitted on."""
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
"""Pre-training on 2,048 H800."""
DEEPSEEK_TOKENS: Final = 14.8e12
DEEPSEEK_TOKENS_PER_GPU_S: Final = DEEPSEEK_TOKENS / DEEPSEEK_GPU_HOURS / 3600.0
WEAK_SCALING: Final = ((480, 360), (960, 720), (1440, 1080))
"""GPUs and global batch of MegaScale-MoE figure 12."""
WEAK_SCALING_SPEEDUPS: Final = (1.74, 1.79)
"""Lowest and highest there; the rows in between are bars without numbers."""
FIGURE_14_GAINS: Final = (1.149, 1.329)
"""Least and greatest gain in MFU of SP + EP over TP + TP, six models on 8 H800."""
