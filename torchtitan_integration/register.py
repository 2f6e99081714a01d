"""Registers our train specs; a TOML names this module as `experimental.custom_import`.

Contract
    Importing it adds `megamoe_deepseek_v3` to torchtitan's registry, by its public function, and
    nothing else. Models, optimizers, losses and checkpoints are torchtitan's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

from torchtitan.config import JobConfig
from torchtitan.models.deepseek_v3 import DeepSeekV3ModelArgs
from torchtitan.models.moe import MoEArgs
from torchtitan.protocols.train_spec import TrainSpec, get_train_spec, register_train_spec

from torchtitan_integration.corpus import DATASET, prepare_corpus
from torchtitan_integration.layout import SPEC_PREFIX
from torchtitan_integration.parallelize import parallelize

VOCAB_SIZE: Final = 2048
"""Of the debug model and of the tokenizer trained for it."""


@dataclasses.dataclass
class DebugModelArgs(DeepSeekV3ModelArgs):
    """DeepSeek-V3 for a CPU: keeps grouped GEMMs, which torchtitan turns off below SM90."""

    def update_from_config(self, job_config: JobConfig, **kwargs: Any) -> None:
        """Take over a job's settings."""
        grouped = self.moe_args.use_grouped_mm
        super().update_from_config(job_config, **kwargs)
        self.moe_args.use_grouped_mm = grouped


def debug_model_args(**changes: Any) -> DebugModelArgs:
    """Return a model small enough to compile and train on a laptop; two of three layers MoE."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "dim": 128,
        "inter_dim": 256,
        "moe_inter_dim": 128,
        "n_layers": 3,
        "n_dense_layers": 1,
        "n_heads": 4,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "mscale": 0.7,
        "moe_args": MoEArgs(
            num_experts=8,
            num_shared_experts=1,
            top_k=2,
            score_func="softmax",
            score_before_experts=False,
        ),
    }
    return DebugModelArgs(**{**sizes, **changes})


def with_corpus(spec: TrainSpec) -> TrainSpec:
    """Return `spec` with `training.dataset = "python_stdlib"` among the data it knows."""
    build_tokenizer, build_dataloader = spec.build_tokenizer_fn, spec.build_dataloader_fn
    assert build_tokenizer is not None

    def tokenizer(job: JobConfig) -> Any:
        return build_tokenizer(_with_paths(job))

    def dataloader(*args: Any, job_config: JobConfig, **kwargs: Any) -> Any:
        return build_dataloader(*args, job_config=_with_paths(job_config), **kwargs)

    return dataclasses.replace(spec, build_tokenizer_fn=tokenizer, build_dataloader_fn=dataloader)


def _with_paths(job: JobConfig) -> JobConfig:
    """Return `job` reading our text as the local jsonl folder torchtitan can load."""
    if job.training.dataset != DATASET:
        return job
    corpus = prepare_corpus(VOCAB_SIZE)
    return dataclasses.replace(
        job,
        model=dataclasses.replace(job.model, hf_assets_path=str(corpus.tokenizer)),
        training=dataclasses.replace(
            job.training, dataset="c4_test", dataset_path=str(corpus.text)
        ),
    )


def make_spec(model: str, parallelize_fn: Callable[..., Any] = parallelize) -> TrainSpec:
    """Return torchtitan's spec of `model` with our layout, debug flavor and corpus."""
    spec = get_train_spec(model)
    flavors = {**spec.model_args, "debug_cpu": debug_model_args()}
    return with_corpus(dataclasses.replace(spec, parallelize_fn=parallelize_fn, model_args=flavors))


register_train_spec(f"{SPEC_PREFIX}deepseek_v3", make_spec("deepseek_v3"))
