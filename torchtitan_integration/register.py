"""Registers our train specs; a TOML names this module as `experimental.custom_import`.

Contract
    Importing it gives torchtitan's MoE models a layout by megamoe where `compile.backend` asks for
    it; any other job of these models is laid out by torchtitan. With our layout the model is
    compiled, whatever `compile.components` says. Models and checkpoints are torchtitan's own; so
    are losses except for their gradients (`losses`), and optimizers except for the balancing of
    experts, whatever the backend. Only the registry's public function is used.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any, Final

from torch import nn
from torchtitan.components.metrics import MetricsProcessor, build_metrics_processor
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.protocols.train_spec import TrainSpec, get_train_spec, register_train_spec

from torchtitan_integration.compile_ahead import compiled_ahead
from torchtitan_integration.corpus import (
    DATASET,
    asks_for_one_stream,
    prepare_corpus,
    read_one_stream,
)
from torchtitan_integration.flavors import FLAVORS, VOCAB_SIZE
from torchtitan_integration.fsdp import adapt_to_gloo
from torchtitan_integration.job_config import asks_for_megamoe, with_model_compiled
from torchtitan_integration.layout import MODELS
from torchtitan_integration.losses import EveryLabel, KernelValidator, with_mean_gradients
from torchtitan_integration.metrics import MegaMoEMetrics
from torchtitan_integration.parallelize import parallelize
from torchtitan_integration.routing import build_optimizers

LOG: Final = logging.getLogger(__name__)


def with_corpus(spec: TrainSpec) -> TrainSpec:
    """Return `spec` with "python_stdlib" among the data it trains and validates on."""
    build_tokenizer, build_dataloader = spec.build_tokenizer_fn, spec.build_dataloader_fn
    assert build_tokenizer is not None

    def tokenizer(job: JobConfig) -> Any:
        return build_tokenizer(_with_paths(job))

    def dataloader(*, job_config: JobConfig, **kwargs: Any) -> Any:
        job = _with_paths(job_config)
        if asks_for_one_stream(job_config):
            return read_one_stream(build_dataloader, job, **kwargs)
        return build_dataloader(job_config=job, **kwargs)

    def validator(*, job_config: JobConfig, **kwargs: Any) -> KernelValidator:
        return KernelValidator(job_config=_with_paths(job_config), **kwargs)

    return dataclasses.replace(
        spec,
        build_tokenizer_fn=tokenizer,
        build_dataloader_fn=dataloader,
        build_validator_fn=validator,
    )


def _with_paths(job: JobConfig) -> JobConfig:
    """Return `job` reading our text as local jsonl folders torchtitan can load."""
    changes: dict[str, Any] = {}
    if job.training.dataset == DATASET:
        corpus = prepare_corpus(VOCAB_SIZE)
        changes["model"] = dataclasses.replace(job.model, hf_assets_path=str(corpus.tokenizer))
        changes["training"] = _reading(job.training, corpus.text)
    if job.validation.dataset == DATASET:
        changes["validation"] = _reading(job.validation, prepare_corpus(VOCAB_SIZE).held_out)
    return dataclasses.replace(job, **changes)


def _reading(section: Any, folder: Path) -> Any:
    return dataclasses.replace(section, dataset="c4_test", dataset_path=str(folder))


def make_spec(model: str) -> TrainSpec:
    """Return torchtitan's spec of `model`: our layout where a job asks for it, corpus, flavors."""
    spec = get_train_spec(model)

    def layout(part: nn.Module, dims: ParallelDims, job: JobConfig) -> nn.Module:
        if asks_for_megamoe(job):
            whole = with_model_compiled(job)
            if whole is not job:
                LOG.info("megamoe: the model is compiled though compile.components leaves it out")
            return parallelize(part, dims, whole)
        part = spec.parallelize_fn(part, dims, job)
        adapt_to_gloo(part)
        return part

    def loss(job: JobConfig, *, parallel_dims: ParallelDims, **kwargs: Any) -> Any:
        stock = spec.build_loss_fn(job, parallel_dims=parallel_dims, **kwargs)
        return with_mean_gradients(stock, parallel_dims, job) if asks_for_megamoe(job) else stock

    def dataloader(*, job_config: JobConfig, **kwargs: Any) -> Any:
        stock = spec.build_dataloader_fn(job_config=job_config, **kwargs)
        is_pipeline = job_config.parallelism.pipeline_parallel_degree > 1
        return EveryLabel(stock) if is_pipeline and asks_for_megamoe(job_config) else stock

    def metrics(job: JobConfig, *args: Any, **kwargs: Any) -> MetricsProcessor:
        stock = spec.build_metrics_processor_fn or build_metrics_processor
        return (MegaMoEMetrics if asks_for_megamoe(job) else stock)(job, *args, **kwargs)

    # torchtitan never splits its Qwen3, though its code skips layers that a stage lacks
    split = spec.pipelining_fn or pipeline_llm
    changed = dataclasses.replace(
        spec,
        parallelize_fn=layout,
        pipelining_fn=compiled_ahead(split),
        build_loss_fn=loss,
        build_dataloader_fn=dataloader,
        build_optimizers_fn=build_optimizers,
        build_metrics_processor_fn=metrics,
        model_args={**spec.model_args, **FLAVORS.get(model, {})},
    )
    return with_corpus(changed)


for name in MODELS:
    register_train_spec(name, make_spec(name))
