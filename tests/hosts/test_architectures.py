"""Models of transformers, and for every parameter, by hand, its optimizer and its matrices for Muon.

Configs are tiny, on the meta device: nothing is downloaded, and only the last test makes weights. Names and
layouts are those of transformers 5; version 4 stores the experts of some models one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from muon_tutorial import Grid, LocalWorld, Muon, split_parameters
from muon_tutorial.optimizer.parameter_split import ParameterSplit, Verdict

transformers: Any = pytest.importorskip(
    "transformers", minversion="5", reason="needs transformers 5: its names"
)

SIZES = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 48, "pad_token_id": 0}
LATENT = {
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
}
WHISPER = {
    "vocab_size": 96,
    "d_model": 32,
    "num_mel_bins": 8,
    "max_source_positions": 16,
    "max_target_positions": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "pad_token_id": 0,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "decoder_start_token_id": 1,
}

# How Muon must see a parameter: the other options of its group.
ADAMW, OUT = "AdamW", "left out"
MUON: dict[str, Any] = {}
TRANSPOSED: dict[str, Any] = {"transposed": True}
QKV: dict[str, Any] = {"parts": (32, 32, 32), "transposed": True}
STACK: dict[str, Any] = {"parts": "stack"}
STACK_TRANSPOSED: dict[str, Any] = {"parts": "stack", "transposed": True}


def cut(*parts: int | str) -> dict[str, Any]:
    """A weight of several matrices; ``test_model_parts`` checks their layout against the models."""
    return {"parts": parts}


Expected = dict[str, str | dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Case:
    """A model's class and config, and the expected groups as patterns; each parameter matches one."""

    model: str
    config: str
    sizes: dict[str, Any]
    expected: Expected
    wrap: Callable[[Any], Any] | None = None

    def build(self, device: str = "meta") -> nn.Module:
        config = getattr(transformers, self.config)(**self.sizes)
        with torch.device(device):
            model = getattr(transformers, self.model)(config)
        return self.wrap(model) if self.wrap else model


def adamw(*patterns: str) -> Expected:
    return dict.fromkeys(patterns, ADAMW)


def muon(*patterns: str) -> Expected:
    return dict.fromkeys(patterns, MUON)


def layers(at: str, *names: str) -> Expected:
    """Hidden matrices: the weights of linear layers below a module."""
    return muon(*(f"{at}.{name}.weight" for name in names))


QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
EDGES = adamw("model.embed_tokens.weight", "model.norm.weight", "*layernorm.weight")
HEAD = adamw("lm_head.weight")
ATTENTION = layers("model.layers.*.self_attn", *QKVO)
LLAMA: Expected = {**EDGES, **ATTENTION, **layers("model.layers.*.mlp", *MLP)}
QK_NORMS = adamw("*.q_norm.weight", "*.k_norm.weight")


def experts(width: int) -> Expected:
    """Stacks of gate and up, with ``width`` rows each, and of the down projection."""
    gate_up = cut("stack", width, width)
    return {"model.layers.*.mlp.experts.gate_up_proj": gate_up, "model.layers.*.mlp.experts.down_proj": STACK}


GATE = adamw("model.layers.*.mlp.gate.weight")
STATE_SPACE: Expected = {
    **adamw("backbone.embeddings.weight", "backbone.norm_f.weight", "*.A_log", "*.D"),
    **adamw("*.conv1d.weight", "*.conv1d.bias", "backbone.layers.?.norm.weight"),
    **muon("*.mixer.out_proj.weight"),
}
BERT_LAYERS: Expected = {
    "bert.embeddings.*": ADAMW,
    "bert.encoder.*.bias": ADAMW,
    "bert.encoder.*.LayerNorm.weight": ADAMW,
    **layers("bert.encoder.layer.*.attention.self", "query", "key", "value"),
    **layers("bert.encoder.layer.?", "attention.output.dense", "intermediate.dense", "output.dense"),
}
T5_LAYERS: Expected = {
    **adamw("shared.weight", "*layer_norm.weight", "*.relative_attention_bias.weight"),
    **layers("*.SelfAttention", "q", "k", "v", "o"),
    **layers("*.EncDecAttention", "q", "k", "v", "o"),
    **layers("*.DenseReluDense", "wi_0", "wi_1", "wo"),
}
WHISPER_LAYERS: Expected = {
    "model.encoder.embed_positions.weight": OUT,
    "model.decoder.embed_*.weight": ADAMW,
    **adamw("model.encoder.conv?.weight", "*.bias", "*layer_norm.weight"),
    **layers("*_attn", "q_proj", "k_proj", "v_proj", "out_proj"),
    **layers("*.layers.*", "fc1", "fc2"),
}


def compiled(model: nn.Module) -> Any:
    return torch.compile(model)


def checkpointed(model: Any) -> Any:
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = checkpoint_wrapper(layer)
    model.lm_head = checkpoint_wrapper(model.lm_head)
    return model


CASES: dict[str, Case] = {
    "GPT-2": Case(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16},
        {
            **adamw("transformer.wte.weight", "transformer.wpe.weight", "*.ln_?.weight"),
            "*.bias": ADAMW,
            "transformer.h.*.attn.c_attn.weight": QKV,
            "transformer.h.*.attn.c_proj.weight": TRANSPOSED,
            "transformer.h.*.mlp.c_fc.weight": TRANSPOSED,
            "transformer.h.*.mlp.c_proj.weight": TRANSPOSED,
        },
    ),
    "Llama": Case("LlamaForCausalLM", "LlamaConfig", DECODER, {**LLAMA, **HEAD}),
    "Llama, tied": Case("LlamaForCausalLM", "LlamaConfig", {**DECODER, "tie_word_embeddings": True}, LLAMA),
    "Llama, compiled": Case("LlamaForCausalLM", "LlamaConfig", DECODER, {**LLAMA, **HEAD}, compiled),
    "Llama, checkpointed": Case("LlamaForCausalLM", "LlamaConfig", DECODER, {**LLAMA, **HEAD}, checkpointed),
    "Llama, classifier": Case(
        "LlamaForSequenceClassification", "LlamaConfig", DECODER, {**LLAMA, "score.weight": ADAMW}
    ),
    "Llama, questions": Case(
        "LlamaForQuestionAnswering",
        "LlamaConfig",
        DECODER,
        {
            **{name.replace("model.", "transformer."): who for name, who in LLAMA.items()},
            "qa_outputs.*": ADAMW,
        },
    ),
    "Mistral": Case("MistralForCausalLM", "MistralConfig", DECODER, {**LLAMA, **HEAD}),
    "Qwen3": Case(
        "Qwen3ForCausalLM", "Qwen3Config", {**DECODER, "head_dim": 8}, {**LLAMA, **HEAD, **QK_NORMS}
    ),
    "Gemma 3": Case(
        "Gemma3ForCausalLM", "Gemma3TextConfig", {**DECODER, "head_dim": 8}, {**LLAMA, **QK_NORMS}
    ),
    "OLMo 2": Case("Olmo2ForCausalLM", "Olmo2Config", DECODER, {**LLAMA, **HEAD, **QK_NORMS}),
    "Phi-3": Case(
        "Phi3ForCausalLM",
        "Phi3Config",
        DECODER,
        {
            **EDGES,
            **HEAD,
            "model.layers.*.self_attn.qkv_proj.weight": cut(32, 16, 16),
            "model.layers.*.mlp.gate_up_proj.weight": cut(48, 48),
            **layers("model.layers.*", "self_attn.o_proj", "mlp.down_proj"),
        },
    ),
    "Mixtral": Case(
        "MixtralForCausalLM",
        "MixtralConfig",
        {**DECODER, "num_local_experts": 4},
        {**EDGES, **HEAD, **ATTENTION, **GATE, **experts(48)},
    ),
    "Qwen3 MoE": Case(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**DECODER, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16},
        {**EDGES, **HEAD, **ATTENTION, **QK_NORMS, **GATE, **experts(16)},
    ),
    "GPT-OSS": Case(
        "GptOssForCausalLM",
        "GptOssConfig",
        {**DECODER, "head_dim": 8, "num_local_experts": 4},
        {
            **EDGES,
            **HEAD,
            **ATTENTION,
            **adamw("model.layers.*.self_attn.*.bias", "model.layers.*.self_attn.sinks"),
            "model.layers.*.mlp.router.*": ADAMW,
            "model.layers.*.mlp.experts.gate_up_proj": {
                **cut("stack", "interleaved", 1, 1),
                "transposed": True,
            },
            "model.layers.*.mlp.experts.down_proj": STACK_TRANSPOSED,
            "model.layers.*.mlp.experts.*_bias": ADAMW,
        },
    ),
    "DeepSeek-V3": Case(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {**DECODER, **LATENT, "moe_intermediate_size": 16, "first_k_dense_replace": 1},
        {
            **EDGES,
            **HEAD,
            **GATE,
            **experts(16),
            **layers("model.layers.*.self_attn", "q_a_proj", "q_b_proj", "o_proj"),
            "model.layers.*.self_attn.kv_a_proj_with_mqa.weight": cut(8, 4),
            "model.layers.*.self_attn.kv_b_proj.weight": cut("interleaved", 8, 8),
            **layers("model.layers.0.mlp", *MLP),
            **layers("model.layers.*.mlp.shared_experts", *MLP),
        },
    ),
    "Llama 4": Case(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            **DECODER,
            "head_dim": 8,
            "num_local_experts": 4,
            "intermediate_size_mlp": 64,
            "interleave_moe_layer_step": 2,
        },
        {
            **EDGES,
            **HEAD,
            **ATTENTION,
            **layers("model.layers.?.feed_forward", *MLP),
            **layers("model.layers.*.feed_forward.shared_expert", *MLP),
            "model.layers.*.feed_forward.router.weight": ADAMW,
            "model.layers.*.feed_forward.experts.gate_up_proj": {**cut("stack", 48, 48), "transposed": True},
            "model.layers.*.feed_forward.experts.down_proj": STACK_TRANSPOSED,
        },
    ),
    "Mamba": Case(
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
        {
            **STATE_SPACE,
            "*.mixer.in_proj.weight": cut(64, 64),
            "*.mixer.x_proj.weight": cut(2, 8, 8),
            **layers("*.mixer", "dt_proj"),
            "*.mixer.dt_proj.bias": ADAMW,
        },
    ),
    "Mamba 2": Case(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {
            "vocab_size": 96,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "state_size": 8,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 2,
        },
        {
            **STATE_SPACE,
            **HEAD,
            "*.mixer.in_proj.weight": cut(64, 64, 16, 16, 8),
            "*.mixer.dt_bias": ADAMW,
            "*.mixer.norm.weight": ADAMW,
        },
    ),
    "BERT, classifier": Case(
        "BertForSequenceClassification",
        "BertConfig",
        {**SIZES, "intermediate_size": 48},
        {
            **BERT_LAYERS,
            "bert.pooler.dense.weight": MUON,
            "bert.pooler.dense.bias": ADAMW,
            "classifier.*": ADAMW,
        },
    ),
    "BERT, masked": Case(
        "BertForMaskedLM",
        "BertConfig",
        {**SIZES, "intermediate_size": 48},
        {
            **BERT_LAYERS,
            "cls.predictions.transform.dense.weight": MUON,
            "cls.predictions.bias": ADAMW,
            **adamw("cls.predictions.transform.dense.bias", "cls.predictions.transform.LayerNorm.*"),
        },
    ),
    "T5": Case(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": 96,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "feed_forward_proj": "gated-gelu",
        },
        T5_LAYERS,
    ),
    "ViT": Case(
        "ViTForImageClassification",
        "ViTConfig",
        {**SIZES, "intermediate_size": 48, "image_size": 16, "patch_size": 4},
        {
            **adamw("vit.embeddings.*", "vit.layers.*.bias", "vit.layers.*layernorm*.weight"),
            **adamw("vit.layernorm.*", "classifier.*"),
            **layers("vit.layers.*.attention", *QKVO),
            **layers("vit.layers.*.mlp", "fc1", "fc2"),
        },
    ),
    "Whisper": Case("WhisperForConditionalGeneration", "WhisperConfig", WHISPER, WHISPER_LAYERS),
}


def found(verdict: Verdict) -> str | dict[str, Any]:
    """The optimizer of a parameter; for Muon, the options of its group."""
    if verdict.who != "Muon":
        return verdict.who
    said = {"parts": verdict.parts, "transposed": verdict.transposed}
    return {key: value for key, value in said.items() if value}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_parameter_goes_where_it_should(case: Case) -> None:
    split = split_parameters(case.build(), experts="muon")
    expected = {
        it.name: [pattern for pattern in case.expected if fnmatchcase(it.name, pattern)]
        for it in split.verdicts
    }
    assert {name: patterns for name, patterns in expected.items() if len(patterns) != 1} == {}
    assert {pattern for (pattern,) in expected.values()} == set(case.expected)
    wrong = {it.name: found(it) for it in split.verdicts if found(it) != case.expected[expected[it.name][0]]}
    assert wrong == {}


MIXTURES = {name: case for name, case in CASES.items() if "stack" in str(case.expected)}


@pytest.mark.parametrize("case", MIXTURES.values(), ids=MIXTURES)
def test_left_to_adamw_experts_are_counted(case: Case) -> None:
    split = split_parameters(case.build(), experts="adamw")
    experts = [it.param.numel() for it in split.verdicts if it.name.endswith("_proj")]
    assert split.left_experts == sum(experts)
    assert f"Experts stay with AdamW: {sum(experts):,} parameters" in str(split)


def test_the_names_are_the_models_own() -> None:
    plain = CASES["Llama"].build()
    for name in ("Llama, compiled", "Llama, checkpointed"):
        split = split_parameters(CASES[name].build())
        assert [it.name for it in split.verdicts] == [its for its, _ in plain.named_parameters()]


def learned(name: str) -> ParameterSplit:
    """A model with weights and with gradients, the same at every call."""
    torch.manual_seed(0)
    model: Any = CASES[name].build("cpu")
    ids = torch.arange(8)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    return split_parameters(model, experts="muon")


@pytest.mark.parametrize("strategy", ["zero1", "owner"])
@pytest.mark.parametrize("name", ["GPT-2", "GPT-OSS", "Mamba"])
def test_the_groups_step_alone_and_over_ranks(name: str, strategy: str) -> None:
    """The bits are the same: two ranks have the same gradient, so its average is the same too."""
    before, alone = learned(name).hidden_params, learned(name)
    Muon(alone.hidden, lr=0.02).step()
    assert not any(map(torch.equal, before, alone.hidden_params))
    world = LocalWorld(Grid.of(dp=2))
    ranks = [learned(name) for _ in range(2)]
    muons = [Muon(it.hidden, lr=0.02, strategy=strategy, mesh=world.mesh(i)) for i, it in enumerate(ranks)]
    world.run([muon.program() for muon in muons])
    for it in ranks:
        assert all(map(torch.equal, it.hidden_params, alone.hidden_params))
