"""Models of transformers, with the optimizer of every parameter written down by hand.

Configs are tiny, on the meta device: nothing is downloaded, and no weights are made. Names and layouts are
those of transformers 5; version 4 stores the experts of some models one by one. ``test_model_parts`` checks
the parts of each weight against the models themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from torch import nn

from muon_tutorial import split_parameters

from .test_model_parts import config_of, transformers

ADAMW = (
    *("*embed*", "*.wte.weight", "*.wpe.weight", "shared.weight"),
    *("lm_head.weight", "score.weight", "qa_outputs.*", "classifier.*"),
    *("*norm*.weight", "*LayerNorm.weight", "*.ln_?.weight"),
    *("*.bias", "*_bias", "*_bias.weight", "*.sinks"),
    *("*.conv1d.weight", "*.conv?.weight", "*.A_log", "*.D"),
    *("*.mlp.gate.weight", "*.router.weight"),
)
LEFT_OUT = ("model.encoder.embed_positions.weight",)
"""Parameters that AdamW steps, and parameters that are not stepped. Muon steps all other parameters."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model's class, the type of its config, and a pattern of the matrices that are stored [in, out]."""

    model: str
    kind: str
    sizes: Mapping[str, Any] = field(default_factory=dict)
    transposed: str = ""

    def build(self) -> nn.Module:
        with torch.device("meta"):
            return getattr(transformers, self.model)(config_of(self.kind, **self.sizes))


CASES: dict[str, Case] = {
    "GPT-2": Case("GPT2LMHeadModel", "gpt2", transposed="transformer.h.*"),
    "Llama": Case("LlamaForCausalLM", "llama"),
    "Llama, tied": Case("LlamaForCausalLM", "llama", {"tie_word_embeddings": True}),
    "Llama, classifier": Case("LlamaForSequenceClassification", "llama"),
    "Llama, questions": Case("LlamaForQuestionAnswering", "llama"),
    "Mistral": Case("MistralForCausalLM", "mistral"),
    "Qwen3": Case("Qwen3ForCausalLM", "qwen3"),
    "Gemma 3": Case("Gemma3ForCausalLM", "gemma3_text"),
    "OLMo 2": Case("Olmo2ForCausalLM", "olmo2"),
    "Phi-3": Case("Phi3ForCausalLM", "phi3"),
    "Mixtral": Case("MixtralForCausalLM", "mixtral"),
    "Qwen3 MoE": Case("Qwen3MoeForCausalLM", "qwen3_moe"),
    "GPT-OSS": Case("GptOssForCausalLM", "gpt_oss", transposed="*.experts.*"),
    "DeepSeek-V3": Case("DeepseekV3ForCausalLM", "deepseek_v3"),
    "Llama 4": Case(
        "Llama4ForCausalLM", "llama4_text", {"interleave_moe_layer_step": 2}, transposed="*.experts.*"
    ),
    "Mamba": Case("MambaForCausalLM", "mamba"),
    "Mamba 2": Case("Mamba2ForCausalLM", "mamba2", {"num_heads": 8}),
    "BERT, classifier": Case("BertForSequenceClassification", "bert"),
    "BERT, masked": Case("BertForMaskedLM", "bert"),
    "T5": Case("T5ForConditionalGeneration", "t5", {"feed_forward_proj": "gated-gelu"}),
    "ViT": Case("ViTForImageClassification", "vit"),
    "Whisper": Case("WhisperForConditionalGeneration", "whisper", {"num_mel_bins": 8}),
}


def fits(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_parameter_goes_where_it_should(case: Case) -> None:
    wrong = {}
    for it in split_parameters(case.build(), experts="muon").verdicts:
        expected = "Muon"
        if fits(it.name, LEFT_OUT):
            expected = "left out"
        elif fits(it.name, ADAMW):
            expected = "AdamW"
        stored = expected == "Muon" and fits(it.name, [case.transposed])
        if (it.who, bool(it.transposed)) != (expected, stored):
            wrong[it.name] = (it.who, it.transposed)
    assert wrong == {}
