"""The parts of fused weights are the ones that the models themselves use, in architectures of every kind.

No layout is written down here: a tiny model runs forward, and the operands of its attention and gated layers
show which rows belong together (``operands``). A weight that is not fused must turn out to be one matrix.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scripts import parts

from ..exhaustive import left_out
from .operands import filled, wrong_parts

transformers: Any = pytest.importorskip("transformers", minversion="5", reason="needs the names of version 5")

TINY: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "n_groups", "mamba_n_groups"), 2),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "head_dim", "mamba_d_head", "mamba_head_dim"), 8),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("n_positions", "max_position_embeddings", "max_seq_len"), 64),
    "vocab_size": 96,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "use_cache": False,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "n_group"), 2),
    **dict.fromkeys(("topk_group", "n_shared_experts", "first_k_dense_replace", "bos_token_id"), 1),
    "q_lora_rank": 12,
    "image_size": 16,
    "mamba_d_ssm": 64,
    "linear_num_key_heads": 2,
    **dict.fromkeys(("rotary_dim", "qk_rope_head_dim", "linear_num_value_heads", "patch_size"), 4),
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
}

MODELS: dict[str, dict[str, Any]] = {
    name: {}
    for name in (
        *("apertus", "arcee", "bart", "bert", "bitnet", "bloom", "clip_text_model", "clip_vision_model"),
        *("codegen", "cohere", "cohere2", "deberta", "deepseek_v2", "deepseek_v3", "dots1", "electra"),
        *("ernie4_5", "ernie4_5_moe", "exaone4", "falcon_mamba", "flex_olmo", "gemma", "gemma2"),
        *("gemma3_text", "glm", "glm4", "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_neox_japanese"),
        *("gpt_oss", "gptj", "granite", "granitemoe", "granitemoehybrid", "granitemoeshared", "helium"),
        *("hunyuan_v1_moe", "jamba", "jetmoe", "llama", "llama4_text", "mamba"),
        *("minimax", "mistral", "mixtral", "modernbert", "modernbert-decoder", "moonshine", "mpt"),
        *("nanochat", "nemotron", "nemotron_h", "olmo", "olmo2", "olmo3", "olmoe", "openai-gpt", "opt"),
        *("persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss"),
        *("siglip_vision_model", "smollm3", "stablelm", "starcoder2", "t5", "vit"),
    )
} | {
    "bamba": {"mamba_expand": 2},
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_heads": 2,
        "linear_head_dim": 8,
        "q_lora_rank": None,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "mllama_text_model": {"cross_attention_layers": [1]},
    "rwkv": {"attention_hidden_size": 32},
    "whisper": {"num_mel_bins": 8, "max_source_positions": 16},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "zamba": {
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "hybrid", "mamba", "hybrid"],
        "mamba_dt_rank": 2,
        "n_mamba_heads": 1,  # zamba runs head after head, so several heads would look like several matrices
        "attention_hidden_size": 64,
        "head_dim": 16,
        "num_key_value_heads": 4,
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"],
        "mamba_ngroups": 2,
        "n_mamba_heads": 8,
        "num_key_value_heads": 4,
        "chunk_size": 8,
    },
}
"""Types of models, and their configs' settings in addition to ``TINY``."""

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, sizes) for name, sizes in MODELS.items()},
    "falcon, new": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon, one key": ("falcon", {"new_decoder_architecture": False, "multi_query": True}),
    "falcon, head by head": ("falcon", {"new_decoder_architecture": False, "multi_query": False}),
    "gpt_bigcode, head by head": ("gpt_bigcode", {"multi_query": False}),
    "phi3, as many keys": ("phi3", {"num_key_value_heads": 4}),
}


def config_of(name: str, **sizes: Any) -> Any:
    kind = transformers.CONFIG_MAPPING[name]
    known = kind()
    fits = {key: value for key, value in TINY.items() if hasattr(known, key)}
    if hasattr(known, "qk_rope_head_dim"):  # latent attention has as many key heads as query heads
        fits = {**fits, "num_key_value_heads": 4, "head_dim": TINY["qk_rope_head_dim"]}
    if name == "falcon":
        del fits["head_dim"]  # derived from the others
    return kind(**{**fits, **sizes})


def build(variant: str) -> nn.Module:
    """A tiny model with weights such that no activation blocks its input."""
    name, sizes = VARIANTS[variant]
    config = config_of(name, **sizes)
    is_mllama = name == "mllama_text_model"
    make = transformers.MllamaTextModel._from_config if is_mllama else transformers.AutoModel.from_config
    model = make(config, attn_implementation="eager").double().eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return filled(model, std=0.1)


def inputs_of(model: Any) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(0)
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=made).double()}
    if model.main_input_name in ("input_values", "input_features"):
        shape = (1, 4000) if model.main_input_name == "input_values" else (1, 8, 32)
        heard = torch.randn(shape, generator=made).double()
        return {model.main_input_name: heard, "decoder_input_ids": torch.arange(4, 10)[None]}
    ids = torch.randint(3, 96, (2, 16), generator=made)
    both: dict[str, Tensor] = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    if "cross_attention_states" in inspect.signature(model.forward).parameters:
        both = {"cross_attention_states": torch.randn(2, 16, 32, generator=made).double()}
    return {"input_ids": ids, **both}


USUAL = (
    *("bloom", "codegen", "deepseek_v3", "falcon, new", "falcon, one key", "gpt2", "gpt_bigcode", "gpt_neox"),
    *("gpt_oss", "jetmoe", "llama", "llama4_text", "mamba", "mamba2", "mixtral", "modernbert", "mpt", "phi3"),
    *("qwen3", "qwen3_next", "t5", "vit", "whisper"),
)
"""Layouts of every kind, for a usual run. The page's table, from all models, holds the other layouts."""


@pytest.mark.parametrize("name", [name if name in USUAL else left_out(name) for name in VARIANTS])
def test_parts_are_those_that_the_model_uses(name: str) -> None:
    model = build(name)
    assert wrong_parts(model, inputs_of(model), experts="muon") == {}


@pytest.mark.parametrize(
    "name", ["deberta", "llama", "qwen3", "phi3", "gpt_neox", "falcon, new", "deepseek_v3", "t5"]
)
def test_heads_apart_are_the_models_heads(name: str) -> None:
    model = build(name)
    assert wrong_parts(model, inputs_of(model), experts="muon", heads="apart") == {}


def test_a_layout_that_is_not_the_models_is_seen() -> None:
    model = build("gpt_neox")
    halves = {"*.query_key_value.weight": (32, 32, 32)}
    assert len(wrong_parts(model, inputs_of(model), parts=halves)) == 2


def test_the_page_shows_todays_table_and_picture() -> None:
    from .parts_table import PAGE, page

    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.hosts.parts_table"
    assert parts.PICTURE.read_text(encoding="utf-8") == parts.draw(), "run python scripts/parts.py"
