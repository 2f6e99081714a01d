"""Hugging Face transformers' MoE models, small and random: on one rank, and expert-parallel.

Expert-parallel as `base_model_ep_plan` of each model says, by `AllToAllEP`, on two ranks with
tokens of their own, in bfloat16, for which transformers calls torch's grouped products; once in
float32, for which it calls its own. Its forward has a branch on whether any row came, at which
Dynamo breaks the graph; "without its branch" is the same without, registered as transformers
registers its own.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.acceptance.subject import Call, Case, Subject

VOCABULARY: Final = 64
SIZES: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "use_cache": False,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT: Final[dict[str, Any]] = {
    "n_routed_experts": 4,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 0,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
MODELS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "Mixtral": ("Mixtral", {"num_local_experts": 4}),
    "Qwen3-MoE": ("Qwen3Moe", {"num_experts": 4, "moe_intermediate_size": 48}),
    "DeepSeek-V3": ("DeepseekV3", LATENT),
    "OLMoE": ("Olmoe", {"num_experts": 4}),
    "gpt-oss": ("GptOss", {"num_local_experts": 4, "layer_types": ["full_attention"]}),
}
IMPLEMENTATIONS: Final = {
    "expert-parallel": "all_to_all",
    "expert-parallel without its branch": "without_branch",
}


def small_model(name: str, experts: str, dtype: torch.dtype) -> nn.Module:
    """Return a model of one of `MODELS`, the same on every rank."""
    import transformers

    stem, own = MODELS[name]
    config = getattr(transformers, f"{stem}Config")(**(SIZES | own))
    torch.manual_seed(3)
    family = getattr(transformers, f"{stem}ForCausalLM")
    return family._from_config(config, experts_implementation=experts).to(dtype).train()


def _subject(model: nn.Module, rank: int) -> Subject:
    generator = torch.Generator().manual_seed(100 + rank)
    tokens = (torch.randint(VOCABULARY, (2, n), generator=generator) for n in (12, 20))
    return Subject(model=model, calls=[Call(kwargs={"input_ids": x}) for x in tokens])


def _whole(rank: int, name: str, experts: str) -> Subject:
    return _subject(small_model(name, experts, torch.float32), rank)


def _parallel(
    rank: int, name: str, implementation: str, dtype: torch.dtype = torch.bfloat16
) -> Subject:
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    _register_without_branch()
    model = small_model(name, "grouped_mm", dtype)
    sizes = (dist.get_world_size(), 1)
    mesh = dist.device_mesh.init_device_mesh("cpu", sizes, mesh_dim_names=("experts", "tensor"))
    plan = model._expand_parallel_plan(model.ep_plan)
    apply_expert_parallelism(
        model, mesh["experts"], mesh["tensor"], plan, ep_implementation=implementation
    )
    return _subject(model, rank)


def _register_without_branch() -> None:
    from transformers.distributed.expert_parallel import AllToAllEP, EPImplementationInterface

    class WithoutBranch(AllToAllEP):
        def __call__(self, hidden: Any, experts: Any, weights: Any) -> Any:
            tokens, ids, ones, state = self._dispatch_tokens(hidden, experts, weights)
            return self._combine_tokens(self.experts_forward(tokens, ids, ones), state)

    EPImplementationInterface.register("without_branch", WithoutBranch)


CASES = (
    *(
        Case(
            name=f"{name}, one rank",
            package="transformers",
            build=functools.partial(_whole, name=name, experts="grouped_mm"),
        )
        for name in MODELS
    ),
    Case(
        name="Mixtral, one rank, loop of experts",
        package="transformers",
        build=functools.partial(_whole, name="Mixtral", experts="eager"),
    ),
    *(
        Case(
            name=f"{name}, {title}",
            package="transformers",
            build=functools.partial(_parallel, name=name, implementation=implementation),
            num_ranks=2,
        )
        for title, implementation in IMPLEMENTATIONS.items()
        for name in MODELS
        if name in ("Mixtral", "gpt-oss") or implementation == "without_branch"
    ),
    Case(
        name="Mixtral, expert-parallel without its branch, float32",
        package="transformers",
        build=functools.partial(
            _parallel, name="Mixtral", implementation="without_branch", dtype=torch.float32
        ),
        num_ranks=2,
    ),
)
