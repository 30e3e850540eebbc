"""Reads a model's shape from its ``config.json``; types that it does not know are built by transformers.

Each linear layer is a family of matrices. Layers that a model stores fused (q, k and v; gate and up) are
listed separately, as in ``module_shapes``. The counts of elements are the same as in the models that
transformers builds. Layers that predict further tokens (DeepSeek-V3, GLM-4.5) are not counted, because
transformers builds none; a note says so.

Tensor parallelism cuts as Megatron-LM does: q, k, v, gate and up by rows (column parallel), o and down by
columns (row parallel; megatron/core/transformer/attention.py and mlp.py). In latent attention the
down-projections are whole on every rank, and the up-projections are cut by rows
(megatron/core/transformer/multi_latent_attention.py). Experts are whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

from ..errors import UsageError
from ..plan.layout import Replicate, Shard
from .model_shape import Cut, MatrixFamily, ModelShape, OtherFamily
from .transformers_models import shape_from_transformers

ROWS, COLUMNS, WHOLE = Shard(0), Shard(1), Replicate()

Flag = bool | tuple[str, bool]
"""Whether a model has something: True, False, or the config's key for it and the key's default."""

ATTENTION_BIAS: Flag = ("attention_bias", False)
MLP_BIAS: Flag = ("mlp_bias", False)


@dataclass(frozen=True, slots=True)
class Mixture:
    """The keys under which the configs of a model type hold the sizes of its experts.

    ``width``: the key of the experts' inner size. ``shared``: the key of the number of experts that see all
    tokens. ``dense``: the key that says which layers have no experts.
    """

    width: str = "moe_intermediate_size"
    shared: Literal["none", "n_shared_experts"] = "none"
    dense: Literal["none", "first_k_dense_replace", "decoder_sparse_step"] = "none"
    bias: bool = False


FIRST_DENSE = Mixture(shared="n_shared_experts", dense="first_k_dense_replace")


@dataclass(frozen=True, slots=True)
class Architecture:
    """The properties of a model type that its ``config.json`` does not state.

    ``head_norms``: whether q and k are normalized by head. ``kv_heads``: whether the config must state the
    number of key-value heads; if not, the default is the number of heads. ``head``: whether the config must
    state the width of a head; if not, the default is the model's width divided by the heads.
    """

    attention: Literal["grouped", "latent"] = "grouped"
    qkv_bias: Flag = False
    o_bias: Flag = False
    mlp_bias: Flag = False
    head_norms: Flag = False
    sinks: bool = False
    kv_heads: Literal["stated", "heads"] = "stated"
    head: Literal["stated", "width / heads"] = "width / heads"
    mixture: Mixture | None = None


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        qkv_bias=ATTENTION_BIAS, o_bias=ATTENTION_BIAS, mlp_bias=MLP_BIAS, kv_heads="heads"
    ),
    "mistral": Architecture(),
    "mixtral": Architecture(mixture=Mixture("intermediate_size")),
    "qwen2": Architecture(qkv_bias=True),
    "qwen3": Architecture(qkv_bias=ATTENTION_BIAS, o_bias=ATTENTION_BIAS, head_norms=True, head="stated"),
    "qwen3_moe": Architecture(
        qkv_bias=ATTENTION_BIAS,
        o_bias=ATTENTION_BIAS,
        head_norms=True,
        mixture=Mixture(dense="decoder_sparse_step"),
    ),
    "deepseek_v2": Architecture("latent", mlp_bias=MLP_BIAS, mixture=FIRST_DENSE),
    "deepseek_v3": Architecture("latent", mixture=FIRST_DENSE),
    "glm4_moe": Architecture(qkv_bias=ATTENTION_BIAS, head_norms=("use_qk_norm", False), mixture=FIRST_DENSE),
    "gpt_oss": Architecture(
        qkv_bias=("attention_bias", True),
        o_bias=("attention_bias", True),
        sinks=True,
        head="stated",
        mixture=Mixture("intermediate_size", bias=True),
    ),
    "phi3": Architecture(kv_heads="heads"),
}
"""Model types that are read without transformers, besides ``gpt2``, whose keys have other names."""

SAME_AS = {"kimi_k2": "deepseek_v3"}
"""Model types with the layout of another type. Kimi K2's model card says that its layout is DeepSeek-V3's."""

MODEL_TYPES = tuple(sorted({"gpt2", *ARCHITECTURES, *SAME_AS}))

Family = MatrixFamily | OtherFamily


LARGEST = 10**8
"""The largest size in a config. With larger sizes, a matrix could have more elements than torch can count."""


@dataclass(frozen=True, slots=True)
class ConfigKeys:
    """The keys of a ``config.json``; errors name the file and the key."""

    where: str
    held: Mapping[str, Any]

    def size(self, *keys: str, least: int = 1) -> int:
        """The number under the first of these keys that the config has.

        Raises:
            UsageError: the config has none of these keys, or the value is not a whole number >= ``least``.
        """
        found = self.size_or(None, *keys, least=least)
        if found is None:
            raise UsageError(f"{self.where} lacks {' or '.join(map(repr, keys))}")
        return found

    def size_or(self, otherwise: Any, *keys: str, least: int = 1) -> Any:
        """The number under the first of these keys that the config has, or ``otherwise``."""
        for key in keys:
            value = self.held.get(key)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise UsageError(f"{self.where}: {key!r} is a whole number, at least {least}; got {value!r}")
            if value > LARGEST:
                raise UsageError(f"{self.where}: {key!r} is at most {LARGEST:,}; got {value!r:.40}")
            return value
        return otherwise

    def flag(self, flag: Flag) -> bool:
        if isinstance(flag, bool):
            return flag
        key, otherwise = flag
        value = self.held.get(key)
        if value is not None and not isinstance(value, bool):
            raise UsageError(f"{self.where}: {key!r} is true or false; got {value!r}")
        return otherwise if value is None else value


def shape_from_config(held: Any, name: str, source: str, where: str) -> ModelShape:
    """The shape of the model that a ``config.json`` describes; ``where`` names the file in errors.

    Types that are not in ``MODEL_TYPES`` are built by transformers, if it is installed. For a multimodal
    model, only the language model in ``text_config`` is read, and the shape's notes say so.

    Raises:
        UsageError: the model type cannot be read, or a size is missing or wrong.

    >>> sizes = {"n_layer": 2, "n_embd": 8, "n_head": 2, "n_positions": 4, "vocab_size": 9}
    >>> shape = shape_from_config({"model_type": "gpt2", **sizes}, "tiny", "written here", "the config")
    >>> [(family.name, family.shape, family.count) for family in shape.families][-1]
    ('layers.*.mlp.down', (8, 32), 2)
    """
    if not isinstance(held, dict):
        raise UsageError(f"{where} is not a JSON object")
    if held.get("model_type") is None:
        raise UsageError(f"{where} lacks 'model_type'")
    model_type, inner = str(held["model_type"]), held.get("text_config")
    if model_type in MODEL_TYPES:
        keys = ConfigKeys(where, held)
        architecture = ARCHITECTURES.get(SAME_AS.get(model_type, model_type))
        layers, heads, kv_heads, found = _decoder(keys, architecture) if architecture else _gpt2(keys)
        families = tuple(one for one in found if isinstance(one, MatrixFamily))
        others = tuple(one for one in found if isinstance(one, OtherFamily))
        experts = max((family.experts for family in families), default=0)
        met = keys.size_or(0, "num_experts_per_tok") if experts else 0
        if met > experts:
            raise UsageError(f"{where}: 'num_experts_per_tok' is {met}, more than the {experts} experts")
        sizes = (layers, heads, kv_heads, experts)
        return ModelShape(name, source, *sizes, families, others, met or None, _notes(keys))
    if isinstance(inner, dict) and inner.get("model_type"):
        # An inner config leaves out the values that are transformers' defaults.
        read = shape_from_config if "num_hidden_layers" in inner else shape_from_transformers
        shape = read(inner, name, source, f"{where}: text_config")
        said = f"Only the language model is planned: 'text_config' of the {model_type} config."
        return replace(shape, notes=(said, *shape.notes))
    shape = shape_from_transformers(held, name, source, where)
    return replace(shape, notes=(*shape.notes, *_notes(ConfigKeys(where, held))))


def _notes(keys: ConfigKeys) -> tuple[str, ...]:
    """Notes about a config: which layers the plan does not count."""
    further = keys.size_or(0, "num_nextn_predict_layers", least=0)
    layers, are = ("1 layer", "is") if further == 1 else (f"{further} layers", "are")
    said = f"{layers} for predicting further tokens ('num_nextn_predict_layers') {are} not counted."
    return (said,) if further else ()


def _decoder(keys: ConfigKeys, architecture: Architecture) -> tuple[int, int, int, list[Family]]:
    """The numbers of layers, heads and key-value heads, and the families."""
    layers, heads = keys.size("num_hidden_layers"), keys.size("num_attention_heads")
    latent = architecture.attention == "latent"
    attention = _latent_attention(keys) if latent else _grouped_attention(keys, architecture)
    sparse = _sparse_layers(keys, architecture.mixture, layers)
    width, tied = keys.size("hidden_size"), keys.flag(("tie_word_embeddings", False)) or _has_no_head(keys)
    table = keys.size("vocab_size") * width
    families: list[Family] = [
        OtherFamily("embedding", table, ROWS, (0,)),
        *(() if tied else (OtherFamily("head", table, ROWS, (layers - 1,)),)),
        *attention,
        *_mlps(keys, architecture, sparse, tuple(layer for layer in range(layers) if layer not in sparse)),
        *_norms(width, layers),
    ]
    return layers, heads, heads if latent else _kv_heads(keys, architecture), families


def _gpt2(keys: ConfigKeys) -> tuple[int, int, int, list[Family]]:
    """What ``_decoder`` returns, for GPT-2's layout and keys."""
    if keys.flag(("add_cross_attention", False)):
        raise UsageError(
            f"{keys.where}: a GPT-2 with 'add_cross_attention' is not supported. "
            "For other models, use module:function"
        )
    layers, width, heads = keys.size("n_layer"), keys.size("n_embd"), keys.size("n_head")
    _even_head(keys, "n_embd", width, heads)
    inner, each = keys.size_or(4 * width, "n_inner"), tuple(range(layers))
    tied = keys.flag(("tie_word_embeddings", True)) or _has_no_head(keys)
    table = keys.size("vocab_size") * width
    qkv = (_linear(f"layers.*.attention.{part}", width, width, ROWS, each, bias=True) for part in "qkv")
    families: list[Family] = [
        OtherFamily("embedding", table, ROWS, (0,)),
        OtherFamily("positions", keys.size("n_positions") * width, WHOLE, (0,)),
        *(() if tied else (OtherFamily("head", table, ROWS, (layers - 1,)),)),
        *chain.from_iterable(qkv),
        *_linear("layers.*.attention.o", width, width, COLUMNS, each, bias=True),
        *_linear("layers.*.mlp.up", inner, width, ROWS, each, bias=True),
        *_linear("layers.*.mlp.down", width, inner, COLUMNS, each, bias=True),
        *_norms(2 * width, layers),
    ]
    return layers, heads, heads, families


_HEADLESS = re.compile(r".*(?<!LMHead)(?<!DoubleHeads)Model|.*For(Sequence|Token)Classification")


def _has_no_head(keys: ConfigKeys) -> bool:
    """Whether ``architectures`` names only classes without a language model's head, such as LlamaModel."""
    named = keys.held.get("architectures")
    classes = [str(each) for each in named] if isinstance(named, list) else []
    return bool(classes) and all(map(_HEADLESS.fullmatch, classes))


def _norms(width: int, layers: int) -> Iterator[Family]:
    yield OtherFamily("layers.*.norms", 2 * width, WHOLE, tuple(range(layers)))
    yield OtherFamily("norm", width, WHOLE, (layers - 1,))


def _linear(
    name: str, out: int, into: int, cut: Cut, layers: tuple[int, ...], bias: bool = False, experts: int = 0
) -> Iterator[Family]:
    """A layer's matrix and its bias. The bias is cut if the matrix is cut by rows."""
    yield MatrixFamily(name, (out, into), cut, layers, experts)
    if bias:
        rows = cut if cut == ROWS else WHOLE
        yield OtherFamily(f"{name}.bias", out * max(1, experts), rows, layers, experts)


def _grouped_attention(keys: ConfigKeys, architecture: Architecture) -> Iterator[Family]:
    """Grouped-query attention: heads of queries that share fewer heads of keys and values."""
    width, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    each = tuple(range(keys.size("num_hidden_layers")))
    kv_heads, head = _kv_heads(keys, architecture), _head(keys, architecture)
    if heads % kv_heads:
        raise UsageError(
            f"{keys.where}: {heads} heads of queries cannot share {kv_heads} heads of keys and values evenly"
        )
    qkv_bias, o_bias = keys.flag(architecture.qkv_bias), keys.flag(architecture.o_bias)
    for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        yield from _linear(f"layers.*.attention.{part}", count * head, width, ROWS, each, qkv_bias)
    yield from _linear("layers.*.attention.o", width, heads * head, COLUMNS, each, o_bias)
    if keys.flag(architecture.head_norms):
        yield OtherFamily("layers.*.attention.norms", 2 * head, WHOLE, each)
    if architecture.sinks:
        yield OtherFamily("layers.*.attention.sinks", heads, ROWS, each)


def _latent_attention(keys: ConfigKeys) -> Iterator[Family]:
    """Multi-head latent attention, down to a low rank and up again (arXiv 2405.04434, section 2.1)."""
    width, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    each = tuple(range(keys.size("num_hidden_layers")))
    rope, plain = keys.size("qk_rope_head_dim"), keys.size("qk_nope_head_dim")
    rank, value = keys.size("kv_lora_rank"), keys.size("v_head_dim")
    whole = keys.held.get("q_lora_rank", 0) is None  # the config says null
    bias, q_rank = keys.flag(ATTENTION_BIAS), 0 if whole else keys.size("q_lora_rank")
    if whole:
        yield from _linear("layers.*.attention.q", heads * (plain + rope), width, ROWS, each)
    else:
        yield from _linear("layers.*.attention.q_a", q_rank, width, WHOLE, each, bias)
        yield from _linear("layers.*.attention.q_b", heads * (plain + rope), q_rank, ROWS, each)
    yield from _linear("layers.*.attention.kv_a_with_mqa[part 0]", rank, width, WHOLE, each, bias)
    yield from _linear("layers.*.attention.kv_a_with_mqa[part 1]", rope, width, WHOLE, each, bias)
    yield from _linear("layers.*.attention.kv_b[part 0]", heads * plain, rank, ROWS, each)
    yield from _linear("layers.*.attention.kv_b[part 1]", heads * value, rank, ROWS, each)
    yield from _linear("layers.*.attention.o", width, heads * value, COLUMNS, each, bias)
    yield OtherFamily("layers.*.attention.norms", q_rank + rank, WHOLE, each)


def _mlps(
    keys: ConfigKeys, architecture: Architecture, sparse: tuple[int, ...], dense: tuple[int, ...]
) -> Iterator[Family]:
    """The MLP of ``dense`` layers; the experts, the router and the shared expert of ``sparse`` layers."""
    width, mixture = keys.size("hidden_size"), architecture.mixture
    if dense:
        inner, bias = keys.size("intermediate_size"), keys.flag(architecture.mlp_bias)
        yield from _gated("layers.*.mlp", inner, width, dense, bias)
    if mixture is None or not sparse:
        return
    inner, bias = keys.size(mixture.width), mixture.bias
    experts = keys.size("num_experts", "num_local_experts", "n_routed_experts")
    shared = 0 if mixture.shared == "none" else keys.size(mixture.shared, least=0) * inner
    if shared:
        yield from _gated("layers.*.shared_expert", shared, width, sparse, keys.flag(architecture.mlp_bias))
    yield from _gated("layers.*.experts.*", inner, width, sparse, bias, experts)
    yield OtherFamily("layers.*.router", experts * (width + bias), WHOLE, sparse)


def _gated(
    name: str, inner: int, width: int, layers: tuple[int, ...], bias: bool, experts: int = 0
) -> Iterator[Family]:
    rows, columns = (WHOLE, WHOLE) if experts else (ROWS, COLUMNS)
    yield from _linear(f"{name}.gate", inner, width, rows, layers, bias, experts)
    yield from _linear(f"{name}.up", inner, width, rows, layers, bias, experts)
    yield from _linear(f"{name}.down", width, inner, columns, layers, bias, experts)


def _kv_heads(keys: ConfigKeys, architecture: Architecture) -> int:
    if architecture.kv_heads == "heads":
        return int(keys.size_or(keys.size("num_attention_heads"), "num_key_value_heads"))
    return keys.size("num_key_value_heads")


def _head(keys: ConfigKeys, architecture: Architecture) -> int:
    if architecture.head == "stated":
        return keys.size("head_dim")
    width, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    if width < heads:
        raise UsageError(f"{keys.where}: 'hidden_size' {width} is not enough for {heads} heads")
    stated = keys.size_or(None, "head_dim")
    return _even_head(keys, "hidden_size", width, heads) if stated is None else int(stated)


def _even_head(keys: ConfigKeys, key: str, width: int, heads: int) -> int:
    if width % heads:
        raise UsageError(f"{keys.where}: {key!r} {width} cannot be divided evenly among {heads} heads")
    return width // heads


def _sparse_layers(keys: ConfigKeys, mixture: Mixture | None, layers: int) -> tuple[int, ...]:
    if mixture is None:
        return ()
    if keys.held.get("moe_layer_freq", 1) != 1:
        raise UsageError(
            f"{keys.where}: only 'moe_layer_freq' 1 is supported; got {keys.held['moe_layer_freq']!r}. "
            "For other models, use module:function"
        )
    first = keys.size("first_k_dense_replace", least=0) if mixture.dense == "first_k_dense_replace" else 0
    if first > layers:
        raise UsageError(f"{keys.where}: 'first_k_dense_replace' is {first}, more than the {layers} layers")
    if mixture.dense != "decoder_sparse_step":
        return tuple(range(first, layers))
    step, dense = keys.size_or(1, "decoder_sparse_step"), keys.held.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise UsageError(f"{keys.where}: 'mlp_only_layers' is a list of layers; got {dense!r}")
    return tuple(layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0)
