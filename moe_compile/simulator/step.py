"""Time of a training step on a cluster: layers, pipeline, gradients, optimizer.

Contract
    step = micro-batches * slowest stage + pipeline bubble + gradients + optimizer + a fixed rest.
    The slowest stage has the head. Stages without it wait, and count as busy as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from moe_compile.errors import InvalidConfig
from moe_compile.hardware.cluster import ClusterProfile, Fit
from moe_compile.hardware.links import sent_us
from moe_compile.simulator.kernels import Kernels
from moe_compile.simulator.layer_costs import LayerCosts
from moe_compile.simulator.layer_tasks import LayerTime, time_layer
from moe_compile.simulator.method import AttentionSharding, ExpertSharding, Method, Products
from moe_compile.simulator.models import ModelShape

FIXED_US: Final = 50e3
"""Fixed time of a step: data loader, clipping, logging. Assumed."""
BF16, FP8 = 2, 1
OPTIMIZER_BYTES: Final = 28
"""Bytes Adam reads and writes per parameter: fp32 weight, two moments both ways, gradient, bf16."""
HEAD_BYTES: Final = 20
"""Bytes per logit: softmax and loss in fp32, five passes."""
HEAD_KERNELS: Final = 6
US_PER_S: Final = 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The job: GPUs, pipeline and batch."""

    gpus: int
    pipeline: int = 1
    """Pipeline stages."""
    virtual_stages: int = 1
    """Chunks of layers per stage, interleaved."""
    global_batch: int = 720
    """Sequences per step."""
    seq_len: int = 8192
    micro_batch: int = 1
    """Sequences per micro-batch."""
    gradient_bytes: int = 4
    """Bytes of one gradient element on the wire between data-parallel ranks."""
    bubble_stages: float | None = None
    """Idle time of the pipeline in times of one stage; None: (stages - 1) / virtual_stages."""

    def __post_init__(self) -> None:
        """Raise InvalidConfig for numbers below 1."""
        for name in ("gpus", "pipeline", "virtual_stages", "global_batch", "seq_len"):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"{name} is {getattr(self, name)}; write 1 or more")

    @property
    def bubble(self) -> float:
        """Return the idle time of the pipeline, in times of one stage."""
        if self.bubble_stages is not None:
            return self.bubble_stages
        return (self.pipeline - 1) / self.virtual_stages


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Predicted times of a step."""

    layer: LayerTime
    num_micro_batches: float
    stage_us: float
    """Time of the slowest stage, one micro-batch."""
    bubble_us: float
    gradient_us: float
    """Exposed exchange of gradients and parameters."""
    optimizer_us: float
    tokens: int
    """Tokens per step."""
    flops: float
    """Operations of the model per step, causal attention."""
    gpus: int
    peak_tflops: float

    @property
    def seconds(self) -> float:
        """Return the time of the step."""
        work = self.num_micro_batches * self.stage_us + self.bubble_us
        return (work + self.gradient_us + self.optimizer_us + FIXED_US) / US_PER_S

    @property
    def tokens_per_s(self) -> float:
        """Return the tokens all GPUs train per second."""
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Return the model's operations over the dense bf16 peak, 0 to 1."""
        return self.flops / self.seconds / self.gpus / (self.peak_tflops * 1e12)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A model, a machine, a method and a job."""

    model: ModelShape
    profile: ClusterProfile
    fit: Fit
    method: Method
    job: Job

    @property
    def costs(self) -> LayerCosts:
        """Return the operator costs of one layer."""
        return LayerCosts(
            model=self.model,
            method=self.method,
            profile=self.profile,
            fit=self.fit,
            seq_len=self.job.seq_len,
            tokens=self.job.micro_batch * self.job.seq_len,
        )

    @property
    def replicas(self) -> float:
        """Return how many copies of the dense parameters train on data of their own."""
        return self.job.gpus / (self.job.pipeline * self.method.ranks)

    @property
    def expert_replicas(self) -> float:
        """Return the copies of each expert."""
        return max(self.job.gpus / (self.job.pipeline * self._expert_sharing), 1.0)

    @property
    def expert_params(self) -> float:
        """Return the routed experts' parameters of one stage on one GPU."""
        model = self.model
        return self._stage_layers * model.num_experts * model.expert_weights / self._expert_sharing

    @property
    def dense_params(self) -> float:
        """Return all other parameters of one stage, shared out over the ranks of a layer."""
        model = self.model
        shared = model.num_shared * model.expert_weights
        return self._stage_layers * (model.layer_attention_weights + shared) / self.method.ranks

    @property
    def _stage_layers(self) -> float:
        return self.model.num_layers / self.job.pipeline

    @property
    def _expert_sharing(self) -> int:
        if self.method.experts is ExpertSharding.SLICES:
            return self.method.ranks
        return self.method.expert_ranks * self.method.expert_slices


def predict_step(setting: Setting) -> StepTime:
    """Return the time of one step.

    Raises InvalidConfig when the GPUs or the experts cannot be divided so.
    """
    _check(setting)
    job, profile = setting.job, setting.profile
    layer = time_layer(setting.costs)
    layers_us = setting.model.num_layers / job.pipeline * layer.total_us
    sequences = job.micro_batch * setting.replicas
    return StepTime(
        layer=layer,
        num_micro_batches=job.global_batch / sequences,
        stage_us=layers_us + _head_us(setting),
        bubble_us=job.bubble * layers_us,
        gradient_us=_gradient_us(setting),
        optimizer_us=_optimizer_us(setting),
        tokens=job.global_batch * job.seq_len,
        flops=job.global_batch * job.seq_len * setting.model.flops_per_token(job.seq_len),
        gpus=job.gpus,
        peak_tflops=profile.compute.bf16_tflops,
    )


def _check(setting: Setting) -> None:
    job, method = setting.job, setting.method
    if method.attention is AttentionSharding.WHOLE and method.ranks != 1:
        raise InvalidConfig(
            f"attention is not divided over ranks, so ranks must be 1; got {method.ranks}"
        )
    if job.gpus % (job.pipeline * method.ranks):
        raise InvalidConfig(
            f"{job.gpus} GPUs do not divide into {job.pipeline} stages of {method.ranks} ranks; "
            f"write a multiple of {job.pipeline * method.ranks}"
        )


def _head_us(setting: Setting) -> float:
    """Time of head and loss, forward and backward, on the last stage."""
    kernels = Kernels(setting.profile, setting.fit)
    rows, model = setting.costs.local_tokens, setting.model
    product = kernels.gemm_us(rows, model.vocab_size, model.width)
    return 3 * product + kernels.memory_us(rows * model.vocab_size * HEAD_BYTES, HEAD_KERNELS)


def _gradient_us(setting: Setting) -> float:
    """Time of reduce-scatter of gradients and all-gather of parameters between nodes.

    Parameters are gathered in bf16; those of experts in fp8 where the compiler's products read them
    so, as FSDP2 does in its torchtitan jobs. All but the last of the interleaved chunks hide under
    the backward of others.
    """
    link, copies = setting.profile.network, setting.expert_replicas
    wire = setting.job.gradient_bytes
    experts = setting.expert_params * (copies - 1) / copies
    in_eight_bits = setting.method.products in (Products.EXPERTS, Products.EXPERTS_FREE)
    nbytes = experts * (wire + (FP8 if in_eight_bits else BF16))
    nbytes += setting.dense_params * (wire + BF16)
    return sent_us(nbytes, link.gather_gb_per_s) / setting.job.virtual_stages


def _optimizer_us(setting: Setting) -> float:
    """Time of Adam over the parameters whose state a rank has (ZeRO-1).

    With the time to quantise those of experts, which are gathered in fp8.
    """
    memory = setting.profile.memory
    dense = setting.dense_params / max(setting.replicas, 1.0)
    experts = setting.expert_params / setting.expert_replicas
    nbytes = (experts + dense) * OPTIMIZER_BYTES
    if setting.method.quantises:
        nbytes += experts * (BF16 + FP8)
    return sent_us(nbytes, memory.gb_per_s * memory.share)
