"""Settings of the training systems whose published runs the simulator is compared with.

Contract
    Values stated in a paper are taken from it; assumptions are noted beside the value.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Final

from moe_compile.hardware.cluster import ClusterProfile, Fit, load_cluster
from moe_compile.simulator.method import (
    AttentionSharding,
    ExpertSharding,
    Method,
    Overlap,
    Products,
)
from moe_compile.simulator.models import find_model
from moe_compile.simulator.step import Job, Setting

MEGATRON: Final = Method(
    attention=AttentionSharding.HEADS,
    experts=ExpertSharding.SLICES,
    fuses_gradient_sum=False,
    has_slow_operators=True,
)
"""Megatron-LM as MegaScale-MoE section 6.1 runs it: tensor parallelism in the node, nothing of a
layer overlapped. Unfused gradient sums and slow operators are inferred from its step time."""
MEGASCALE: Final = Method(overlap=Overlap.TILES, rebuilds=True)
"""MegaScale-MoE: Ulysses and expert parallelism in the node, fused tiles, rematerialization."""
ABLATION: Final = (
    (
        "TP + TP, nothing overlapped",
        Method(attention=AttentionSharding.HEADS, experts=ExpertSharding.SLICES, rebuilds=True),
    ),
    ("SP + EP", replace(MEGASCALE, overlap=Overlap.SEQUENTIAL)),
    ("+ inter-op overlap", replace(MEGASCALE, overlap=Overlap.INTER_OP)),
    ("+ intra-op overlap", MEGASCALE),
)
"""MegaScale-MoE table 5, cumulative."""
MEGATRON_JOB: Final = Job(gpus=1440, pipeline=15)
"""Pipeline 15 is stated; that it is not interleaved is inferred from how the step time scales."""
MEGASCALE_JOB: Final = Job(gpus=1440, pipeline=15, virtual_stages=4, gradient_bytes=2)
"""Pipeline 15 and bf16 gradients are stated; four virtual stages are assumed."""
DEEPSEEK: Final = Method(
    attention=AttentionSharding.WHOLE,
    ranks=1,
    expert_ranks=64,
    dispatch_bytes=1.0,
    products=Products.ALL,
    overlap=Overlap.TWO_BATCHES,
)
"""DeepSeek-V3 report, section 3: 64 expert ranks, fp8 dispatch, bf16 combine, DualPipe."""
DUALPIPE_BUBBLE: Final = 14.0 / 3.0
"""Table 2 there, 16 stages: idle 7 * (F&B + B - 3W), at B = 2F, W = F, F&B = 3F, in times of 3F."""
DEEPSEEK_JOB: Final = Job(
    gpus=2048,
    pipeline=16,
    global_batch=15360,
    seq_len=4096,
    bubble_stages=DUALPIPE_BUBBLE,
)


@functools.cache
def shipped(name: str) -> ClusterProfile:
    """Return a profile that comes with megamoe; these do not change while it runs."""
    return load_cluster(name)


def megatron(gpus: int, fit: Fit | None = None) -> Setting:
    """Return the 352B model on `gpus` H800 as Megatron-LM trains it."""
    return _on_h800("352b", MEGATRON, replace(MEGATRON_JOB, gpus=gpus), fit)


def megascale(gpus: int, fit: Fit | None = None, method: Method = MEGASCALE) -> Setting:
    """Return the 352B model on `gpus` H800 as MegaScale-MoE trains it, or by another method."""
    return _on_h800("352b", method, replace(MEGASCALE_JOB, gpus=gpus), fit)


def deepseek(overlap: Overlap, fit: Fit) -> Setting:
    """Return DeepSeek-V3 on 2,048 H800, under its own overlap or another for comparison."""
    return _on_h800("deepseek-v3", replace(DEEPSEEK, overlap=overlap), DEEPSEEK_JOB, fit)


def _on_h800(model: str, method: Method, job: Job, fit: Fit | None) -> Setting:
    profile = shipped("h800")
    return Setting(
        model=find_model(model),
        profile=profile,
        fit=fit or profile.fit("bytedance"),
        method=method,
        job=job,
    )


def with_batch(setting: Setting, global_batch: int | None) -> Setting:
    """Return the setting with another global batch; None leaves it."""
    if global_batch is None:
        return setting
    return replace(setting, job=replace(setting.job, global_batch=global_batch))
