"""Finds the matrices in a fused weight, and their layout, from the sizes in a model's modules and configs.

This module knows names of layers, sizes and a few classes. ``split_parameters`` chooses each weight's
optimizer. A layout is certain under two conditions: the sizes in the modules add up to the weight's rows, and
it is known whether parts lie one after the other or alternate head by head. Orthogonalizing q, k and v
separately is common (Keller Jordan's post,
https://kellerjordan.github.io/posts/muon/#empirical-considerations; Megatron-LM's default, ``muon_split_qkv``
in megatron/core/optimizer/optimizer_config.py); GLM-5 does so for each head (arXiv 2602.15763, "Muon Split").
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torch import nn

from ..plan.matrix import Parts
from .split_table import EXPERTS

GROUP_BY_GROUP = re.compile(
    "(GPTNeoX|Bloom|Persimmon|Falcon|GPTBigCode|MiniMaxLightning).*Attention|DisentangledSelfAttention"
)
"""Attention classes that fuse by groups: all q that share a k and a v, then that k, then that v."""

KNOWN_LIBRARIES = ("transformers.", "timm.", "torchvision.", "litgpt.")
"""Libraries in which layers such as ``qkv`` hold q, then k, then v, except in ``GROUP_BY_GROUP`` classes."""

ALTERNATING = re.compile("GptOss|OpenAIPrivacyFilter")
"""Expert classes whose gate and up alternate line by line."""

QKV = ("c_attn", "qkv", "qkv_proj", "Wqkv", "wqkv", "att_proj", "query_key_value", "linear_qkv", "to_qkv")
GATED = (
    *("gate_up_proj", "gate_and_up_proj", "up_gate_proj", "Wi", "input_linear", "linear_fc1", "fc1"),
    *("w12", "w13"),
)
PAIRS = ("kv_proj", "to_kv", "kv", "Wkv", "c_attn", "qk")
HEADS = ("num_heads", "heads", "num_attention_heads", "n_head", "n_heads", "num_q_heads")
GROUPS = ("num_kv_heads", "num_key_value_heads", "n_kv_heads", "n_query_groups", "kv_heads")
HEAD_DIM = ("head_dim", "head_size", "attention_head_size", "d_head", "dim_head")
UP_PROJECTIONS = re.compile(
    r"(q|k|v|query|key|value|wq|wk|wv|c_q|c_k|c_v|q_b_proj|kv_b_proj|[qkv]_proj(_weight)?)"
)
"""Layers that ``heads="apart"`` splits, because their rows divide into heads."""


@dataclass(frozen=True, slots=True)
class Fused:
    """A fused weight's matrices in words, and its layout. ``certain``: the model shows the layout."""

    what: str
    parts: Parts
    certain: bool = True


def parts_word(parts: Parts) -> str:
    """A word for the layout ``parts``; empty if the weight is one matrix."""
    if not isinstance(parts, tuple):
        return "heads" if isinstance(parts, int) else parts or ""
    words = [str(word) for word in parts if isinstance(word, str)]
    return " of ".join(words if words and words != ["stack"] else [*words, "split"])


@dataclass(frozen=True, slots=True, eq=False)
class FusedWeight:
    """Describes a weight for the rules: its layer's name, and the modules around it, innermost first.

    ``lines`` counts its rows (its columns if it is stored transposed). ``inputs`` is the length of a line.
    """

    name: str
    lines: int
    inputs: int
    modules: Sequence[nn.Module]
    library: bool

    def size(self, *names: str) -> int:
        """The first of the sizes ``names`` that the modules or their configs have; 0 if they have none."""
        for module in self.modules:
            for source in (module, getattr(module, "config", None)):
                for name in names:
                    found = getattr(source, name, 0)
                    if isinstance(found, int) and not isinstance(found, bool) and found > 0:
                        return found
        return 0

    @property
    def owner(self) -> str:
        """The class name of the module around the layer."""
        return class_of(self.modules[0]).__name__

    @property
    def head_dim(self) -> int:
        heads = self.size(*HEADS)
        return self.size(*HEAD_DIM) or (self.inputs // heads if heads else 0)


def class_of(module: nn.Module) -> type:
    """Return a module's own class. FSDP2 and parametrizations put classes of torch before it in the MRO."""
    torchs = ("torch.distributed.", "torch.nn.utils.parametrize")
    return next(kind for kind in type(module).__mro__ if not kind.__module__.startswith(torchs))


def fused_parts(it: FusedWeight) -> Fused | None:
    """The matrices in a two-dimensional weight; None if the weight is a single matrix."""
    return next((found for rule in RULES if (found := rule(it)) is not None), None)


def heads_apart(it: FusedWeight) -> Fused | None:
    """Split a query, key or value weight into its heads; None if it has fewer than two heads."""
    fused = _by_class(it) if it.name == "in_proj_weight" else _query_key_value(it)
    if fused is not None and fused.certain:
        runs: tuple[int, ...] = (it.head_dim,)
    elif it.name == "kv_b_proj":
        runs = it.size("qk_nope_head_dim"), it.size("v_head_dim")
    else:
        runs = (_head_rows(it) if UP_PROJECTIONS.fullmatch(it.name) else 0,)
    if not all(runs) or it.lines % sum(runs):
        return None
    return Fused("heads", ("heads", *runs)) if it.lines > sum(runs) or len(runs) > 1 else None


def _head_rows(it: FusedWeight) -> int:
    """The rows of one head in a query, key or value weight; 0 if the model does not show them."""
    is_query = not re.search("[kv]", it.name)
    heads = (0 if is_query else it.size(*GROUPS)) or it.size(*HEADS)
    latent = it.size("qk_head_dim") or it.size("qk_nope_head_dim") + it.size("qk_rope_head_dim")
    if it.name == "q_b_proj" or (is_query and it.lines == heads * latent):
        return latent
    stated = it.size("head_v_dim" if "v" in it.name else "head_k_dim") or it.size(*HEAD_DIM)
    return stated or (it.lines // heads if heads and it.lines % heads == 0 else 0)


def _query_key_value(it: FusedWeight) -> Fused | None:
    disentangled = it.name == "in_proj" and it.owner == "DisentangledSelfAttention"  # DeBERTa
    if it.name not in QKV and not disentangled:
        return None
    what, head, heads = "q, k, v", it.head_dim, it.size(*HEADS)
    known = it.size(*GROUPS)
    groups = known if known and (heads + 2 * known) * head == it.lines else heads
    if it.owner == "CodeGenAttention":  # laid out for four TPU cores; each has its q, v, k
        return Fused("q, v, k", ("interleaved", *(it.lines // 12,) * 3))
    if getattr(it.modules[0], "head_first", False) and heads and it.lines % (3 * heads) == 0:
        return Fused(what, _again((it.lines // heads // 3,) * 3, heads))  # timm's MaxViTs
    if GROUP_BY_GROUP.fullmatch(it.owner) or it.name in ("query_key_value", "linear_qkv"):
        run = (heads // groups * head, head, head) if groups else (0,)
        fits = 0 not in run and sum(run) * groups == it.lines
        certain = fits and bool(GROUP_BY_GROUP.fullmatch(it.owner) or it.name == "linear_qkv")
        return Fused(what, _again(run, groups) if certain else None, certain)
    out = it.size("dim_out")
    for q, k in ((heads * head, groups * head), (it.inputs, it.inputs), (out, out)):
        if q and q + 2 * k == it.lines:
            certain = it.library or it.name == "c_attn"
            return Fused(what, (q, k, k) if certain else None, certain)
    pair = it.name in PAIRS and it.lines == 2 * it.inputs  # GPT-2's cross-attention
    return Fused("k, v", _equal(it, 2)) if pair else Fused(what, None, certain=False)


def _gate_and_up(it: FusedWeight) -> Fused | None:
    """Two halves, if a sibling layer takes half of this layer's outputs, and no sibling takes all of them."""
    if it.name not in (*GATED, *PAIRS) or it.lines % 2:
        return None
    if it.name in PAIRS and it.lines == 2 * it.size(*GROUPS, *HEADS) * it.head_dim:
        what = "q, k" if it.name == "qk" else "k, v"
        return Fused(what, _equal(it, 2) if it.library else None, it.library)
    beside = {getattr(its, "in_features", 0) for its in it.modules[0].children()}  # peft's are no nn.Linear
    if it.lines in beside or it.lines // 2 not in beside:
        return None if it.name == "fc1" else Fused("gate, up", None, certain=it.name == "input_linear")
    return Fused("k, v" if it.name in PAIRS else "gate, up", _equal(it, 2))


def _narrow_keys(it: FusedWeight) -> Fused | None:
    """Attention whose keys are narrower than its values, fused head by head, as in timm's LeViT."""
    key, value, heads = it.size("key_dim"), it.size("val_dim"), it.size(*HEADS)
    run = {"qkv": (key, key, value), "kv": (key, value)}.get(it.name, ())
    if not (it.library and key and value and heads and run) or sum(run) * heads != it.lines:
        return None
    return Fused("q, k, v" if it.name == "qkv" else "k, v", _again(run, heads))


def _latent(it: FusedWeight) -> Fused | None:
    """Two fused weights of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""
    key, value, rope = it.size("qk_nope_head_dim"), it.size("v_head_dim"), it.size("qk_rope_head_dim")
    if it.name.startswith("kv_a_proj") and rope and it.lines == it.size("kv_lora_rank") + rope:
        return Fused("latent, rotary k", (it.lines - rope, rope))
    if it.name == "kv_b_proj" and key and value and it.lines % (key + value) == 0:
        return Fused("k, v", _again((key, value), it.lines // (key + value)))
    return None


def _state_space(it: FusedWeight) -> Fused | None:
    """The fused projections of a mixer: Mamba (arXiv 2312.00752) and Mamba-2 (arXiv 2405.21060)."""
    inner, state = it.size("intermediate_size", "d_inner"), it.size("ssm_state_size", "state_size", "d_state")
    if not re.search("Mamba|Mixer", it.owner):
        return None
    if it.name == "x_proj":
        step = it.lines - 2 * state
        return Fused("dt, B, C", (step, state, state)) if step > 0 else Fused("dt, B, C", None, certain=False)
    if it.name != "in_proj":
        return None
    heads, groups = it.size("num_heads", "nheads"), it.size("n_groups", "ngroups")
    if it.lines == 2 * inner:
        return Fused("x, z", ("interleaved", 1, 1) if it.owner.startswith("ZambaMamba") else (inner, inner))
    sizes = (inner, inner, groups * state, groups * state, heads)
    fits = sum(sizes) == it.lines and 0 not in sizes
    return Fused("z, x, B, C, dt", sizes if fits else None, certain=fits)


def _delta_net(it: FusedWeight) -> Fused | None:
    """Gated DeltaNet (arXiv 2412.06464) as in Qwen3-Next, and queries that are fused with a gate per head."""
    keys, values = it.size("num_k_heads"), it.size("num_v_heads")
    key, value = it.size("head_k_dim"), it.size("head_v_dim")
    if it.name == "in_proj_qkv" and 2 * keys * key + values * value == it.lines:
        return Fused("q, k, v", (keys * key, keys * key, values * value))
    if it.name in ("in_proj_qkvz", "in_proj_ba"):
        each = values // keys if keys else 0
        run = (key, key, each * value, each * value) if it.name == "in_proj_qkvz" else (each, each)
        fits = bool(keys) and sum(run) * keys == it.lines
        what = "q, k, v, z" if it.name == "in_proj_qkvz" else "b, a"
        return Fused(what, _again(run, keys) if fits else None, certain=fits)
    head, heads = it.size(*HEAD_DIM), it.size(*HEADS)
    if it.name == "q_proj" and head and it.lines == 2 * heads * head and not it.size("qk_nope_head_dim"):
        return Fused("q, gate", _again((head, head), heads) if it.library else None, it.library)
    return None


def _by_class(it: FusedWeight) -> Fused | None:
    """LFM2's convolution, torch's multi-head attention, and the gates of torch's LSTM and GRU."""
    if it.name == "in_proj" and "ShortConv" in it.owner and it.lines == 3 * it.inputs:
        return Fused("B, C, x", _equal(it, 3))
    if isinstance(it.modules[0], nn.MultiheadAttention) and it.name == "in_proj_weight":
        return Fused("q, k, v", _equal(it, 3))
    gates = {"LSTM": 4, "LSTMCell": 4, "GRU": 3, "GRUCell": 3}
    kinds = [kind.__name__ for kind in type(it.modules[0]).__mro__ if kind.__name__ in gates]
    if kinds and it.name.startswith(("weight_ih", "weight_hh")):
        return Fused("gates", _equal(it, gates[kinds[0]]))
    return None


def _named_as_fused(it: FusedWeight) -> Fused | None:
    """Weights whose name says that they are fused, in modules without matching sizes."""
    named = re.search(r"qkv|kvz?$|^qk$|_ba$|^in_proj$|^kv_|gate_up|query_key", it.name)
    rows = (it.size(*HEADS) + 2 * it.size(*GROUPS)) * it.head_dim  # litgpt's attn, in an unknown order
    return Fused("matrices", None, certain=False) if named or (it.name, it.lines) == ("attn", rows) else None


RULES: tuple[Callable[[FusedWeight], Fused | None], ...] = (
    *(_by_class, _narrow_keys, _query_key_value, _latent, _state_space, _delta_net, _gate_and_up),
    _named_as_fused,
)


def stacked_parts(name: str, owner: str, lines: int, taken: Collection[int]) -> Fused:
    """Return the matrices in each expert of a stack.

    ``taken`` are the sides of the matrices in the same module. If one of the sides is half of ``lines``, each
    expert holds gate and up.
    """
    is_half = lines % 2 == 0 and lines // 2 in taken
    is_attention = name == "input_linear" and not is_half  # JetMoE's
    if name not in GATED or is_attention:
        return Fused(EXPERTS, "stack")
    if not is_half:
        return Fused("experts, gate and up", "stack", certain=False)
    inside = ("interleaved", 1, 1) if ALTERNATING.search(owner) else (lines // 2, lines // 2)
    return Fused("experts, gate and up", ("stack", *inside))


def _again(run: tuple[int, ...], times: int) -> Parts:
    return run if times == 1 else ("interleaved", *run)


def _equal(it: FusedWeight, parts: int) -> Parts:
    return (it.lines // parts,) * parts
