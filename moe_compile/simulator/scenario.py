"""A model on a cluster under every schedule there is, ready to be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from moe_compile.errors import InvalidConfig, nearest
from moe_compile.hardware.cluster import ClusterProfile, load_cluster
from moe_compile.simulator import systems
from moe_compile.simulator.layer_time import bound_us
from moe_compile.simulator.memory import count_memory
from moe_compile.simulator.method import Attention, Method, Overlap
from moe_compile.simulator.models import find_model
from moe_compile.simulator.step import Job, Setting, predict_step

BASELINE: Final = "megatron-like"
"""Name of the schedule of `systems.MEGATRON`: tensor parallelism, nothing overlapped."""
CHUNKS: Final = (2, 4, 8)
GENERAL_JOB: Final = Job(gpus=8, global_batch=1024)
"""Of a model without a published job."""
DEFAULT_FIT: Final[Mapping[str, str]] = {"h800": "bytedance", "h100": "eos"}
UNFITTED: Final[Mapping[str, str]] = {"deepseek-v3": "routed"}
"""Model on a cluster of others -> fit: one cluster's constants are wrong by 20 % on another."""
DEFAULTS: Final[Mapping[str, tuple[Method, Job]]] = {
    "352b": (systems.MEGASCALE, systems.MEGASCALE_JOB),
    "deepseek-v3": (systems.DEEPSEEK, systems.DEEPSEEK_JOB),
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
    """Forward and backward of one layer."""
    exposed_percent: float
    """Of the layer's time in which nothing is computed."""
    of_bound_percent: float
    """Time of the layer were collectives free, over its time."""
    memory_gb: float
    """Counted, not measured."""
    fits_memory: bool


def make_setting(
    model: str, cluster: str, *, fit: str | None = None, changes: Mapping[str, Any] | None = None
) -> Setting:
    """Return `model` on `cluster` with the defaults of its published runs.

    `changes` replace fields of the method and the job by name; None leaves a default. Raises
    InvalidConfig for names that do not exist and numbers that cannot be.
    """
    shape, profile = find_model(model), load_cluster(cluster)
    method, job = DEFAULTS.get(model, (Method(), replace(GENERAL_JOB, seq_len=shape.seq_len)))
    given = {key: value for key, value in (changes or {}).items() if value is not None}
    names = [{field.name for field in fields(kind)} for kind in (Method, Job)]
    for key in given:
        if key not in names[0] | names[1]:
            raise InvalidConfig(f"no setting {key!r}.{nearest(key, names[0] | names[1])}")
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
    found = {name: replace(setting, method=method) for name, method in _methods(setting).items()}
    if setting.method.attention is not Attention.WHOLE:
        found = {BASELINE: _baseline(setting), **found}
    if unknown := [name for name in wanted if name not in found]:
        raise InvalidConfig(f"no schedule {unknown[0]!r} here.{nearest(unknown[0], found)}")
    return {name: found[name] for name in wanted} if wanted else found


def predict(name: str, setting: Setting) -> Prediction:
    """Return one row: `setting` under the schedule it already has, called `name`."""
    step, job = predict_step(setting), setting.job
    layer_us = step.layer.total_us
    nbytes = count_memory(setting).total
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
        memory_gb=nbytes / 1e9,
        fits_memory=nbytes <= setting.profile.memory.capacity_gb * 1e9,
    )


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
    return found


def _baseline(setting: Setting) -> Setting:
    """Return tensor parallelism over as many ranks as share attention, as Megatron-LM has it."""
    method = replace(systems.MEGATRON, ranks=setting.method.ranks)
    job = replace(setting.job, virtual_stages=1, gradient_bytes=4, bubble_stages=None)
    return replace(setting, method=method, job=job)
