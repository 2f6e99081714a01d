"""Hugging Face transformers' dense models, small and random: nothing there for megamoe to do."""

from __future__ import annotations

import functools
from typing import Any, Final

import torch

from benchmarks.acceptance.subject import Call, Case, Subject

VOCABULARY: Final = 64
HEADS: Final = {"num_hidden_layers": 2, "num_attention_heads": 4}
WIDTHS: Final = {"hidden_size": 32, "intermediate_size": 48, **HEADS}
DECODER: Final = {
    **WIDTHS,
    "vocab_size": VOCABULARY,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2: Final = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
IMAGES: Final = (3, 16, 16)
MODELS: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    "Llama": ("LlamaConfig", "LlamaForCausalLM", DECODER),
    "Qwen3": ("Qwen3Config", "Qwen3ForCausalLM", DECODER),
    "Gemma 2": ("Gemma2Config", "Gemma2ForCausalLM", DECODER),
    "GPT-2": ("GPT2Config", "GPT2LMHeadModel", GPT2),
    "BERT": ("BertConfig", "BertForMaskedLM", {**WIDTHS, "vocab_size": VOCABULARY}),
    "ViT": (
        "ViTConfig",
        "ViTForImageClassification",
        {**WIDTHS, "image_size": 16, "patch_size": 4},
    ),
}


def _model(rank: int, name: str) -> Subject:
    import transformers

    config_name, family, sizes = MODELS[name]
    config = getattr(transformers, config_name)(**sizes)
    torch.manual_seed(3)
    model = getattr(transformers, family)._from_config(config).float().train()
    generator = torch.Generator().manual_seed(5 + rank)
    if name == "ViT":
        calls = [{"pixel_values": torch.randn(n, *IMAGES, generator=generator)} for n in (2, 3)]
    else:
        tokens = (torch.randint(VOCABULARY, (2, n), generator=generator) for n in (12, 20))
        calls = [{"input_ids": x} for x in tokens]
    return Subject(model=model, calls=[Call(kwargs=call) for call in calls])


CASES = tuple(
    Case(
        name=name,
        package="transformers",
        build=functools.partial(_model, name=name),
        with_inductor=name == "Llama",
    )
    for name in MODELS
)
