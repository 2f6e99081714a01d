"""A model on a cluster under every schedule there is, ready to be compared.

Memory of one GPU of the first pipeline stage is counted.
Activations follow MegaScale-MoE section 4.1, in units of `tokens * width / ranks` elements per
layer: all of them, or those that selective rematerialization keeps. Allocator, NCCL and
workspaces are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from moe_compile.errors import InvalidConfig, nearest
from moe_compile.hardware.cluster import ClusterProfile, load_cluster
from moe_compile.simulator import setups
from moe_compile.simulator.layer_costs import BF16
from moe_compile.simulator.layer_tasks import bound_us
from moe_compile.simulator.method import HOPS, AttentionSharding, Crossing, Method, Overlap
from moe_compile.simulator.models import find_model
from moe_compile.simulator.step import Job, Setting, predict_step

BASELINE: Final = "megatron-like"
"""Name of the schedule of `setups.MEGATRON`: tensor parallelism, nothing overlapped."""
CHUNKS: Final = (2, 4, 8)
OWN_CHUNKS: Final = (2, 4)
"""Numbers of chunks of experts, by megamoe between nodes."""
PARTS: Final = 2
"""Number of parts of the batch."""
OWN: Final = (Crossing.FLAT, *HOPS)
"""Megamoe's ways of sending rows between nodes."""
GENERAL_JOB: Final = Job(gpus=8, global_batch=1024)
"""The job of a model without a published one."""
DEFAULT_FIT: Final[Mapping[str, str]] = {"h800": "bytedance", "h100": "eos"}
UNFITTED: Final[Mapping[str, str]] = {"deepseek-v3": "routed"}
"""Model on a cluster of others -> fit: one cluster's constants are wrong by 20 % on another."""
DEFAULTS: Final[Mapping[str, tuple[Method, Job]]] = {
    "352b": (setups.MEGASCALE, setups.MEGASCALE_JOB),
    "deepseek-v3": (setups.DEEPSEEK, setups.DEEPSEEK_JOB),
}
"""Model -> method and job of its published runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """One schedule on so many GPUs; the fields are the columns of the JSON output."""

    gpus: int
    schedule: str
    seconds: float
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    mfu_percent: float
    layer_ms: float
    """Time of forward and backward of one layer."""
    exposed_percent: float
    """Share of the layer's time in which nothing is computed."""
    of_bound_percent: float
    """Time of the layer were collectives free, over its time."""
    sent_between_mb: float
    """Rows of one layer and micro-batch that a rank sends to other nodes, forward and backward."""
    sent_within_mb: float
    """The same rows inside its node."""
    memory_gb: float
    """Memory counted, not measured."""
    fits_memory: bool
    is_own: bool
    """Whether megamoe runs a model so."""


def make_setting(
    model: str, cluster: str, *, fit: str | None = None, changes: Mapping[str, Any] | None = None
) -> Setting:
    """Return `model` on `cluster` with the defaults of its published runs.

    `changes` replace fields of the method and the job by name; None leaves a default. Raises
    InvalidConfig for names that do not exist and impossible numbers.
    """
    shape, profile = find_model(model), load_cluster(cluster)
    method, job = DEFAULTS.get(model, (Method(), replace(GENERAL_JOB, seq_len=shape.seq_len)))
    given = {key: value for key, value in (changes or {}).items() if value is not None}
    names = [{field.name for field in fields(kind)} for kind in (Method, Job)]
    for key in given:
        if key not in names[0] | names[1]:
            raise InvalidConfig(f"there is no setting {key!r}.{nearest(key, names[0] | names[1])}")
    chosen = fit or default_fit(model, profile)
    return Setting(
        model=shape,
        profile=profile,
        fit=profile.fit(chosen),
        method=replace(method, **{k: v for k, v in given.items() if k in names[0]}),
        job=replace(job, **{k: v for k, v in given.items() if k in names[1]}),
    )


def default_fit(model: str, profile: ClusterProfile) -> str:
    """Return the name of the fit a model is simulated with unless told."""
    name = UNFITTED.get(model, DEFAULT_FIT.get(profile.name, "none"))
    return name if name in profile.fits else "none"


def schedules(setting: Setting, wanted: Sequence[str] = ()) -> dict[str, Setting]:
    """Return the setting under each schedule by name, or under those `wanted`.

    Raises InvalidConfig for an unknown name.
    """
    methods = _methods(setting)
    if setting.costs.link is setting.profile.network:
        methods = {**_own_methods(setting), **methods}
    found = {name: _with(setting, method) for name, method in methods.items()}
    if setting.method.attention is not AttentionSharding.WHOLE:
        found = {BASELINE: _baseline(setting), **found}
    if unknown := [name for name in wanted if name not in found]:
        raise InvalidConfig(
            f"there is no schedule {unknown[0]!r} for this setting.{nearest(unknown[0], found)}"
        )
    return {name: found[name] for name in wanted} if wanted else found


def predict(name: str, setting: Setting) -> Prediction:
    """Return one row: `setting` under the schedule it already has, called `name`."""
    step, job = predict_step(setting), setting.job
    layer_us = step.layer.total_us
    nbytes, sent = count_memory(setting).total, setting.costs.sent_per_layer
    return Prediction(
        gpus=job.gpus,
        schedule=name,
        seconds=step.seconds,
        tokens_per_s=step.tokens_per_s,
        tokens_per_s_per_gpu=step.tokens_per_s / job.gpus,
        mfu_percent=100.0 * step.mfu,
        layer_ms=layer_us / 1e3,
        exposed_percent=100.0 * step.layer.exposed_us / layer_us,
        of_bound_percent=100.0 * bound_us(setting.costs) / layer_us,
        sent_between_mb=sent.between / 1e6,
        sent_within_mb=sent.within / 1e6,
        memory_gb=nbytes / 1e9,
        fits_memory=nbytes <= setting.profile.memory.capacity_gb * 1e9,
        is_own=is_own(setting),
    )


def is_own(setting: Setting) -> bool:
    """Return whether megamoe runs a model so: by its scheduler, chunks or parts, its own hops."""
    is_ours = setting.method.overlap in (Overlap.INTER_OP, Overlap.CHUNKS)
    crosses = setting.costs.link is setting.profile.network
    return is_ours and (setting.method.crossing in OWN if crosses else True)


def _methods(setting: Setting) -> dict[str, Method]:
    method = replace(setting.method, overlap=Overlap.SEQUENTIAL, num_chunks=1)
    plain = [overlap for overlap in Overlap if overlap is not Overlap.CHUNKS]
    found = {overlap.value: replace(method, overlap=overlap) for overlap in plain}
    local = setting.model.num_experts // method.expert_ranks
    for number in CHUNKS:
        chunks = replace(method, overlap=Overlap.CHUNKS, num_chunks=number)
        if number <= local:
            found[f"{number} chunks of experts"] = replace(chunks, chunks_tokens=False)
        found[f"{number} chunks of tokens"] = replace(chunks, chunks_tokens=True)
    if method.remote_nodes(setting.model, setting.profile):
        return found
    parts = replace(method, overlap=Overlap.INTER_OP, batch_parts=PARTS)
    return {**found, f"{PARTS} parts of the batch": parts}


def _own_methods(setting: Setting) -> dict[str, Method]:
    """Return megamoe's methods where rows cross nodes; the first is the model as written.

    Chunks are of experts, slices of tokens, parts of the batch; with the operators that the
    rewrite adds.
    """
    local = setting.model.num_experts // setting.method.expert_ranks
    numbers = [number for number in OWN_CHUNKS if number <= local]
    first = f"{Crossing.FLAT.value}: {Overlap.SEQUENTIAL.value}"
    as_written = replace(setting.method, overlap=Overlap.SEQUENTIAL, crossing=Crossing.FLAT)
    found = {first: replace(as_written, num_chunks=1)}
    for crossing in OWN:
        whole = replace(
            as_written, overlap=Overlap.INTER_OP, crossing=crossing, replays_chunks=True
        )
        chunks = {n: replace(whole, overlap=Overlap.CHUNKS, num_chunks=n) for n in numbers}
        named = {"1 chunk": whole} | {f"{n} chunks": m for n, m in chunks.items()}
        if crossing in HOPS:
            slices = replace(whole, overlap=Overlap.CHUNKS, num_chunks=2, chunks_tokens=True)
            named["2 slices"] = slices
        named[f"{PARTS} parts"] = replace(whole, batch_parts=PARTS)
        if numbers:
            both = replace(chunks[numbers[0]], batch_parts=PARTS)
            named[f"{PARTS} parts {numbers[0]} chunks"] = both
        found |= {f"{crossing.value}: {name}": method for name, method in named.items()}
    return found


def _with(setting: Setting, method: Method) -> Setting:
    """Return the setting under a method; a micro-batch has a sequence for each of its parts."""
    sequences = max(setting.job.micro_batch, method.batch_parts)
    return replace(setting, method=method, job=replace(setting.job, micro_batch=sequences))


def _baseline(setting: Setting) -> Setting:
    """Return tensor parallelism over as many ranks as share attention, as in Megatron-LM."""
    method = replace(setups.MEGATRON, ranks=setting.method.ranks)
    job = replace(setting.job, virtual_stages=1, gradient_bytes=4, bubble_stages=None)
    return replace(setting, method=method, job=job)


FP32: Final = 4
OPTIMIZER_STATE: Final = 12
"""Bytes per parameter: fp32 weight and two moments, sharded over data-parallel ranks (ZeRO-1)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUse:
    """Bytes on one GPU."""

    weights: float
    """Parameters in bf16 and their summed gradients in fp32."""
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        """Return the sum."""
        return self.weights + self.optimizer + self.activations


def count_memory(setting: Setting) -> MemoryUse:
    """Return the peak memory of a GPU of the first stage."""
    job, method, model = setting.job, setting.method, setting.model
    whole = 1 if setting.costs.has_heads else method.ranks  # Ulysses: attention on every rank
    dense = setting.dense_params * whole
    embedding = model.vocab_size * model.width / method.ranks
    held = setting.expert_params + dense + embedding
    shared_out = (setting.dense_params + embedding) / max(setting.replicas, 1.0)
    sharded = setting.expert_params / setting.expert_replicas + shared_out
    return MemoryUse(
        weights=held * (BF16 + FP32),
        optimizer=sharded * OPTIMIZER_STATE,
        activations=_layer_bytes(setting) * model.num_layers / job.pipeline * _in_flight(setting),
    )


def _layer_bytes(setting: Setting) -> float:
    model, method = setting.model, setting.method
    expert, ratio = model.expert_width / model.width, model.heads_per_kv
    if method.rebuilds:
        units = 2 * model.top_k * expert + 4 + 2 / ratio
    else:
        units = 2 * method.ranks + model.top_k * (2 + 3 * expert) + 12 + 5 / ratio
    units += 3 * model.num_shared * expert
    return units * setting.costs.local_tokens * model.width * BF16


def _in_flight(setting: Setting) -> float:
    """Return the number of micro-batches whose activations the first stage holds."""
    job = setting.job
    stages = float(job.pipeline)
    if job.virtual_stages > 1:  # interleaved 1F1B, Megatron-LM (arXiv 2104.04473) section 2.2
        stages *= 1.0 + (job.pipeline - 1) / (job.pipeline * job.virtual_stages)
    return stages + (1.0 if setting.method.overlap is Overlap.TWO_BATCHES else 0.0)
