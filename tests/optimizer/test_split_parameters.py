"""Only hidden matrices go to Muon, and only if no tie gives them another role."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from muon_tutorial import Muon, UsageError, split_parameters


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4, bias=False)


class GPT(nn.Module):
    """The usual shape: token and position embeddings, blocks, a final norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(9, 4)
        self.pos_emb = nn.Parameter(torch.zeros(5, 4))
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.lm_head: nn.Module = nn.Linear(4, 9, bias=False)


HIDDEN = [f"blocks.{i}.{name}.weight" for i in range(2) for name in ("up", "down")]


def names(model: nn.Module, **options) -> tuple[list[str], list[str]]:
    split = split_parameters(model, **options)
    return split.hidden_names, split.rest_names


def bare(kind: str = "Module", /, **shapes: tuple[int, ...]) -> Any:
    """A module whose class has this name, with parameters of its own."""
    module = type(kind, (nn.Module,), {})()
    for name, shape in shapes.items():
        module.register_parameter(name, nn.Parameter(torch.zeros(shape)))
    return module


def tied_to_a_table() -> nn.ModuleDict:
    model = nn.ModuleDict({"first": nn.Linear(4, 9, bias=False), "table": nn.Embedding(9, 4)})
    model["first"].weight = model["table"].weight
    return model


LAYER = nn.Linear(4, 4, bias=False)
SMALL: dict[str, tuple[nn.Module, list[str], list[str]]] = {
    "a layer's own output": (nn.ModuleList([nn.ModuleDict({"output": LAYER})]), ["0.output.weight"], []),
    "a shared layer": (nn.Sequential(LAYER, LAYER), ["0.weight"], []),
    "a head, too": (nn.ModuleDict({"first": LAYER, "lm_head": LAYER}), [], ["first.weight"]),
    "a matrix tied to an embedding": (tied_to_a_table(), [], ["first.weight"]),
    "complex": (nn.Linear(3, 3, bias=False, dtype=torch.complex64), [], ["weight"]),
    "a foreign embedding": (bare("VocabParallelEmbedding", weight=(9, 4)), [], ["weight"]),
    "convolution": (nn.Sequential(nn.Conv1d(4, 4, 3)), [], ["0.weight", "0.bias"]),
    "bag": (nn.Sequential(nn.EmbeddingBag(9, 4)), [], ["0.weight"]),
    "norm": (nn.Sequential(nn.LayerNorm(4)), [], ["0.weight", "0.bias"]),
    "PReLU": (nn.Sequential(nn.PReLU()), [], ["0.weight"]),
}


@pytest.mark.parametrize(("module", "hidden", "rest"), SMALL.values(), ids=SMALL)
def test_modules_are_split_by_what_they_are(module: nn.Module, hidden: list[str], rest: list[str]) -> None:
    assert names(module) == (hidden, rest)


@pytest.mark.parametrize("first", ["wte", "lm_head"])
def test_tied_weights_go_to_the_rest_once(first: str) -> None:
    model = GPT()
    model.lm_head.weight = model.wte.weight
    if first == "lm_head":  # the embedding is registered last, so its weight is found under the head's name
        model.wte = model._modules.pop("wte")  # type: ignore[assignment]
    hidden, rest = names(model)
    assert hidden == HIDDEN
    assert [name for name in rest if name.startswith(("wte", "lm_head"))] == [f"{first}.weight"]


class Normalize(nn.Module):
    """The first module of a model that takes images as they are."""


def test_a_head_after_a_normalization_goes_to_the_rest_and_a_layers_heads_do_not() -> None:
    hidden, rest = names(nn.Sequential(Normalize(), GPT()))
    assert (hidden, rest[-1]) == ([f"1.{name}" for name in HIDDEN], "1.lm_head.weight")
    layers = [nn.ModuleDict({"heads": nn.Linear(4, 4, bias=False)}) for _ in range(3)]
    for some in (layers[:1], layers, [Normalize(), *layers]):
        assert names(nn.Sequential(*some))[1] == []


@pytest.mark.parametrize("name", ["first", "second"])
@pytest.mark.parametrize("stacked", [False, True])
def test_a_tied_weight_may_be_named_by_any_of_its_names(name: str, stacked: bool) -> None:
    model = nn.ModuleDict({key: bare(weight=(2, 6, 6) if stacked else (6, 6)) for key in ("first", "second")})
    model["second"].weight = model["first"].weight
    parts = ("stack", 2, 4) if stacked else (2, 4)
    (group,) = split_parameters(model, parts={f"{name}.*": parts}, transposed=[f"{name}.*"]).hidden
    assert [key for key, _ in group["params"]] == ["first.weight"]
    assert (group["parts"], group["transposed"]) == (parts, True)


def test_frozen_parameters_are_left_out_unless_asked_for() -> None:
    model = GPT()
    model.blocks[0].requires_grad_(False)
    model.wte.requires_grad_(False)
    split = split_parameters(model)
    assert split.hidden_names == HIDDEN[2:]
    left_out = {verdict.name for verdict in split.verdicts if verdict.who == "left out"}
    assert {"wte.weight", *HIDDEN[:2]} <= left_out
    assert not left_out & {*split.hidden_names, *split.rest_names}
    assert "and 46.0 % is left out" in str(split)
    assert names(model, include_frozen=True) == names(GPT())


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    ([nn.Linear(2, 2)], {}, "got list"),
    (GPT(), {"exclude": ["layers.*", "wte.*"]}, r"exclude matches no parameter of the model: 'layers\.\*'"),
    (GPT(), {"experts": "sgd"}, r"experts must be '\w+' or '\w+', got 'sgd'"),
    (GPT(), {"fused": "sgd"}, r"fused must be '\w+' or '\w+', got 'sgd'"),
    (GPT(), {"heads": "alone"}, "heads must be 'together' or 'apart', got 'alone'"),
    (GPT(), {"parts": {"*.Wqkv.weight": 4}}, "parts matches no parameter of the model: '\\*.Wqkv.weight'"),
    (GPT(), {"parts": {"*.0.up.weight": (4, 2)}}, "does not split the 8 rows"),
    (GPT(), {"parts": {"*.0.up.weight": ("by heads", 4)}}, "does not split the 8 rows"),
    (GPT(), {"parts": {"*.0.up.weight": ("interleaved", 5)}}, "does not split the 8 rows"),
]


@pytest.mark.parametrize(("model", "options", "said"), REFUSED, ids=lambda it: str(it)[:30])
def test_wrong_models_and_options_are_refused(model: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        split_parameters(model, **options)


# --- wrappers -----------------------------------------------------------------------------------------------


class Shell(nn.Module):
    """Wraps a model and has nothing else, like DDP."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


compiled: Callable[[nn.Module], Any] = torch.compile


def with_layers(wrap: Callable[[nn.Module], Any]) -> GPT:
    model = GPT()
    model.blocks[0], model.lm_head = wrap(model.blocks[0]), wrap(model.lm_head)
    return model


WRAPPED: dict[str, Callable[[], nn.Module]] = {
    "compiled": lambda: compiled(GPT()),
    "layers compiled": lambda: with_layers(compiled),
    "checkpointed": lambda: with_layers(checkpoint_wrapper),
    "FSDP": lambda: with_layers(lambda it: nn.ModuleDict({"_fsdp_wrapped_module": it})),
    "DDP": lambda: Shell(GPT()),
    "DDP, compiled": lambda: compiled(Shell(GPT())),
    "DDP of a checkpointed model": lambda: Shell(with_layers(checkpoint_wrapper)),
}


@pytest.mark.parametrize("wrapped", WRAPPED.values(), ids=WRAPPED)
def test_wrappers_change_neither_names_nor_the_split(wrapped: Callable[[], nn.Module]) -> None:
    assert names(wrapped()) == names(GPT())


def test_patterns_may_name_wrappers() -> None:
    hidden, _ = names(compiled(GPT()), exclude=["_orig_mod.blocks.1.*", "blocks.0.up.*"])
    assert hidden == ["blocks.0.down.weight"]


def test_a_layer_called_module_keeps_its_name() -> None:
    model = nn.ModuleDict({"module": nn.Linear(2, 2), "other": nn.Linear(2, 2)})
    assert names(model)[0] == ["module.weight", "other.weight"]


# --- who steps what -----------------------------------------------------------------------------------------


def within(path: str, module: nn.Module) -> nn.Module:
    for word in reversed(path.split(".")):
        module = nn.ModuleDict({word: module})
    return module


def having(name: str, what: nn.Module | tuple[int, ...] | int) -> nn.Module:
    """A model with this parameter: ``what`` is its module, its shape, or a linear layer's number of rows."""
    path, _, own = name.rpartition(".")
    if isinstance(what, tuple):
        module = bare(**{own: what})
    else:
        module = nn.Linear(4, what, bias=False) if isinstance(what, int) else what
    model = within(path.removesuffix(".parametrizations.weight"), module) if path else module
    if path.startswith("layers.0.mlp") and "router" not in path:  # the parameter is beside experts
        model.get_submodule("layers.0.mlp").experts = nn.ModuleList([nn.Linear(4, 4)])
    return model


STAYS: dict[str, tuple[str, nn.Module | tuple[int, ...] | int]] = {
    **{
        f"a head called {name}": (f"{name}.weight", 2)
        for name in ("head", "output", "unembed", "classifier", "embed_out", "score")
    },
    "question answering": ("qa_outputs.weight", 2),
    "a head of two layers": ("classifier.dense.weight", 4),
    "a reward model's head": ("v_head.summary.weight", 1),
    "biases of experts": ("layers.0.experts.up_proj_bias", (3, 4)),
    "a matrix of biases": ("layers.0.attention_bias", (3, 4)),
    "relative positions": ("relative_position_bias_table", (3, 4)),
    "positions": ("positional_table", (3, 4)),
    "learned tokens": ("register_tokens", (3, 4)),
    "experts folded into rows": ("layers.0.experts.w1", (12, 4)),
    "decay rates of a state space": ("layers.0.mixer.A_log", (8, 4)),
    "its skip": ("layers.0.mixer.D", (8, 4)),
    "its step sizes": ("layers.0.mixer.dt_bias", (8,)),
    "its convolution": ("layers.0.mixer.conv1d.weight", nn.Conv1d(8, 8, 4, groups=8, bias=False)),
    "a router": ("layers.0.mlp.router.weight", 3),
    "a router in two modules": ("layers.0.mlp.router.layer.weight", 3),
    "a router by its class": ("layers.0.mlp.choose.weight", bare("Router", weight=(3, 4))),
    "a gate beside experts": ("layers.0.mlp.gate.weight", 3),
    "a gate in two modules": ("layers.0.mlp.gate.wg.weight", 3),
    "a router in a list of gates": ("layers.0.mlp.gates.0.wg.weight", 3),
    **{
        f"a router called {name}": (f"layers.0.mlp.{name}", (4, 3))
        for name in ("w_gate", "w_noise", "gate_weight", "router_weight")
    },
    "a shared expert's gate": ("layers.0.mlp.shared_expert_gate.weight", 1),
    "a norm over two dimensions": ("layers.0.norm.weight", nn.LayerNorm([4, 4])),
    "weight norm's gain": (
        "layers.0.up.parametrizations.weight.original0",
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    ),
    **{
        f"a gain called {name}": (f"layers.0.attn.{name}", (4, 4))
        for name in ("weight_g", "log_scale", "layer_gain", "attention_biases", "lora_E", "oft_r")
    },
    "a row": ("layers.0.up.weight", 1),
    "a column": ("layers.0.kernel", (4, 1)),
    "IA3's gains": ("layers.0.ia3_l.default", nn.ParameterDict({"default": torch.zeros(4, 4)})),
}


GOES: dict[str, str] = {
    "a gated projection": "layers.0.mlp.gate_proj.weight",
    "a gate without experts": "layers.0.ffn.gate.weight",
    "an expert of its own": "layers.0.moe.experts.0.weight",
    "an expert's gated projection": "layers.0.experts.0.gate_proj.weight",
    "a layer's own score": "layers.0.score.weight",
    "attention heads of a layer": "layers.0.heads.0.weight",
}


@pytest.mark.parametrize(
    ("name", "what", "rest"),
    [*((*it, True) for it in STAYS.values()), *((name, 4, False) for name in GOES.values())],
    ids=[*STAYS, *GOES],
)
def test_only_hidden_matrices_go_to_muon_whatever_their_names(name: str, what: Any, rest: bool) -> None:
    assert name in names(having(name, what))[rest]


class Says(nn.Module):
    """A model that names its embeddings in transformers' way; the parameters' names tell nothing."""

    def __init__(self, inputs: Any, outputs: Any) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.d = nn.Parameter(torch.zeros(4, 4))
        self.inputs, self.outputs = inputs, outputs

    def get_input_embeddings(self) -> Any:
        return self._said(self.inputs)

    def get_output_embeddings(self) -> Any:
        return self._said(self.outputs)

    def _said(self, what: Any) -> Any:
        if what is NotImplementedError:
            raise NotImplementedError
        return what and getattr(self, what)


@pytest.mark.parametrize(
    ("inputs", "outputs", "rest"),
    [
        ("a", "c", ["a.weight", "c.weight"]),
        ("d", None, ["d"]),
        (NotImplementedError, "b", ["b.weight"]),
        (NotImplementedError, None, []),
    ],
)
def test_a_model_is_asked_for_its_embeddings(inputs: Any, outputs: Any, rest: list[str]) -> None:
    says = Says(inputs, outputs)
    assert sorted(names(says)[1]) == rest
    assert sorted(names(Shell(says))[1]) == rest


# --- stacks of experts --------------------------------------------------------------------------------------


class Mixture(nn.Module):
    """A layer with experts in three dimensions, next to a hidden matrix.

    ``Llama4TextExperts`` is known by its name to store (E, in, out); other classes may say so by an attribute
    ``is_transposed``.
    """

    def __init__(self, kind: str = "Module", says: bool | None = None) -> None:
        super().__init__()
        stored = kind == "Llama4TextExperts" if says is None else says
        up, down = ((3, 4, 12), (3, 6, 4)) if stored else ((3, 12, 4), (3, 4, 6))
        self.dense = nn.Linear(4, 4, bias=False)
        self.experts = bare(kind, gate_up_proj=up, down_proj=down, up_proj_bias=(3, 12))
        if says is not None:
            self.experts.is_transposed = says


STACKS = ["experts.gate_up_proj", "experts.down_proj"]


def test_experts_stay_with_adamw_and_users_who_did_not_choose_are_told() -> None:
    said = (
        r'AdamW: 216 parameters, 80\.6 % of the model, are stacks of matrices; experts="muon" gives them to'
    )
    with pytest.warns(UserWarning, match=said) as caught:
        split_parameters(Mixture())
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        split = split_parameters(Mixture(), experts="adamw")
        split_parameters(Mixture(), experts="muon")
        split_parameters(nn.ModuleList([Mixture(), nn.Linear(20, 20)]))
    assert set(STACKS) <= set(split.rest_names)
    assert re.search(said, str(split))


@pytest.mark.parametrize(
    ("kind", "says", "transposed"),
    [
        ("Module", None, False),
        ("Llama4TextExperts", None, True),
        ("Module", True, True),
        ("Llama4TextExperts", False, False),
    ],
)
def test_experts_go_to_muon_matrix_by_matrix(kind: str, says: bool | None, transposed: bool) -> None:
    split = split_parameters(Mixture(kind, says), experts="muon")
    stored = {"transposed": True} if transposed else {}
    assert [{**group, "params": [name for name, _ in group["params"]]} for group in split.hidden] == [
        {"params": ["dense.weight"]},
        {"params": STACKS[:1], "parts": ("stack", 6, 6), **stored},
        {"params": STACKS[1:], "parts": "stack", **stored},
    ]
    assert split.rest_names == ["experts.up_proj_bias"]
    assert "Experts stay" not in str(split)


# --- weights stored (in, out), and several in one -----------------------------------------------------------


class Conv1D(nn.Module):
    """Hugging Face's linear layer, which stores (in, out)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.zeros(nx, nf))


def gpt2() -> nn.Module:
    layer = {"c_attn": Conv1D(12, 4), "c_proj": Conv1D(4, 4), "dense": nn.Linear(4, 4, bias=False)}
    return nn.ModuleList([nn.ModuleDict(layer)])


def test_weights_stored_in_out_are_told_and_fused_ones_cut_along_columns() -> None:
    hidden, rest = split_parameters(gpt2())
    told = [{**group, "params": [name for name, _ in group["params"]]} for group in hidden]
    assert told == [
        {"params": ["0.dense.weight"]},
        {"params": ["0.c_proj.weight"], "transposed": True},
        {"params": ["0.c_attn.weight"], "parts": (4, 4, 4), "transposed": True},
    ]
    assert rest == []
    assert Muon(hidden).param_groups[2]["transposed"]


def test_fused_weights_stay_whole_if_asked() -> None:
    split = split_parameters(gpt2(), fused="whole")
    assert [group.get("parts") for group in split.hidden] == [None, None]
    assert "hidden matrix, fused, taken whole, transposed" in str(split)


def test_fused_weights_are_taken_apart() -> None:
    """Keys and values of GPT-2's cross-attention, torch's own attention, and a subclass of its LSTM."""
    (fused,) = split_parameters(nn.ModuleDict({"c_attn": Conv1D(8, 4)})).hidden
    assert fused["parts"] == (4, 4)
    whole, fused = split_parameters(nn.MultiheadAttention(4, 2)).hidden
    assert (whole.get("parts"), fused["parts"]) == (None, (4, 4, 4))
    (fused,) = split_parameters(type("MyLSTM", (nn.LSTM,), {})(4, 4, bias=False)).hidden
    assert fused["parts"] == (4, 4, 4, 4)


def test_a_convolution_of_the_same_name_is_none() -> None:
    module = bare("Conv1D", weight=(4, 6))
    module.nf = 7
    assert split_parameters(within("layers.0", module)).hidden[0].keys() == {"params"}


# --- the table ----------------------------------------------------------------------------------------------


def test_the_table_names_each_parameter_its_shape_who_and_why() -> None:
    assert str(split_parameters(GPT(), exclude=["blocks.1.down.*"])).splitlines() == [
        "parameter                 shape  who    why",
        "pos_emb                   5 × 4  AdamW  embedding",
        "wte.weight                9 × 4  AdamW  embedding",
        "blocks.*.norm.weight, ×2  4      AdamW  not a matrix",
        "blocks.*.norm.bias, ×2    4      AdamW  bias",
        "blocks.*.up.weight, ×2    8 × 4  Muon   hidden matrix",
        "blocks.*.up.bias, ×2      8      AdamW  bias",
        "blocks.0.down.weight      4 × 8  Muon   hidden matrix",
        "blocks.1.down.weight      4 × 8  AdamW  excluded",
        "lm_head.weight            9 × 4  AdamW  head",
        "Muon has 38.1 % of 252 parameters, AdamW 61.9 %.",
    ]


# --- fused weights whose sizes do not show their parts, with a user's options -------------------------------


def unknown() -> nn.Module:
    """A layer whose name says that it is fused, in a module that states no sizes."""
    return within("layers.0.attn", nn.ModuleDict({"qkv": nn.Linear(4, 12, bias=False)}))


def test_an_uncertain_layout_is_warned_of_with_the_words_to_write() -> None:
    name = r"layers\.\*\.attn\.qkv\.weight"
    said = rf'The names of {name} \(12 × 4\) .*parts=\{{"{name}": …\}}'
    with pytest.warns(UserWarning, match=said) as caught:
        split = split_parameters(unknown())
    assert caught[0].filename == __file__
    assert "parts" not in split.hidden[0]
    assert "fused, kept whole: state its layout with parts=" in str(split)


def attention(dim: int = 8, inputs: int = 8, **stated: Any) -> nn.Module:
    """An attention whose queries, keys and values have ``dim`` rows, with the sizes that it states."""
    module = nn.Module()
    for name, width in {"q_proj": 8, "k_proj": inputs, "v_proj": inputs}.items():
        module.add_module(name, nn.Linear(width, dim, bias=False))
    for name, size in stated.items():
        setattr(module, name, size)
    return module


def test_wide_queries_of_a_users_own_attention_are_not_cut() -> None:
    """They may hold a gate beside each query, as in Qwen3-Next, or have heads wider than the model's."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (group,) = split_parameters(attention(16, num_heads=2, d_k=8)).hidden
    assert "parts" not in group
    with pytest.warns(UserWarning, match=r"names of q_proj.weight \(16 × 8\) suggest several matrices"):
        split_parameters(attention(16, num_heads=2, head_dim=4))


TABLES = "query latents_1d latent_query memory_bank index_kpool_compress_ape wte object_pointer"


@pytest.mark.parametrize("name", TABLES.split())
def test_a_bare_parameter_that_may_be_a_table_is_named_in_a_warning(name: str) -> None:
    model = nn.ModuleDict({"a": bare(**{name: (8, 4)}), "dense": nn.Linear(4, 4)})
    with pytest.warns(UserWarning, match=rf"steps a\.{name} \(8 × 4\) because .*exclude=\[.a\.{name}.\]"):
        split = split_parameters(model)
    assert split.hidden_names == [f"a.{name}", "dense.weight"]
    assert "a matrix by its shape alone" in str(split)


def test_one_warning_lists_all_bare_parameters_and_a_word_on_each_ends_it() -> None:
    model = nn.ModuleList([bare(query=(8, 4), gate=(4, 4)) for _ in range(2)])
    said = r"steps \*\.query \(8 × 4\), \*\.gate \(4 × 4\) because .*pass parts=\{\"\*\.query\": None\}"
    with pytest.warns(UserWarning, match=said) as caught:
        split_parameters(model)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        split = split_parameters(model, exclude=["*.query"], parts={"*.gate": None})
    assert split.hidden_names == ["0.gate", "1.gate"]
    assert "alone" not in str(split)


def named_layers() -> nn.ModuleDict:
    return nn.ModuleDict({"wte": nn.Embedding(9, 4), "c_attn": nn.Linear(4, 12), "rnn": nn.LSTM(4, 4)})


def rounded(layer: nn.Module, name: str) -> None:
    nn.utils.parametrize.register_parametrization(layer, name, nn.Identity())


NORMS = (nn.utils.parametrizations, nn.utils)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize(
    "change", [rounded, *(it.weight_norm for it in NORMS), *(it.spectral_norm for it in NORMS)]
)
def test_a_parametrized_weight_is_sorted_like_a_plain_one(change: Callable) -> None:
    model = named_layers()
    for name, layer in model.items():
        change(layer, "weight_hh_l0" if name == "rnn" else "weight")
    found, plain = (
        {
            (it.name.split(".")[0], it.who, it.parts)
            for it in split_parameters(its).verdicts
            if it.why != "gain"
        }
        for its in (model, named_layers())
    )
    assert found == plain


MATRICES: dict[str, nn.Module] = {
    "a linear layer": nn.Linear(4, 4),
    "attention": nn.MultiheadAttention(4, 2),
    "attention with other keys": nn.MultiheadAttention(4, 2, kdim=6, vdim=8),
    "recurrent": nn.LSTM(4, 4, num_layers=2, bidirectional=True, proj_size=2),
    "weight norm": nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    "orthogonal": nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)),
    "by hand": bare(w=(4, 4), w1=(8, 4), wq=(4, 4), w_out=(4, 8), up_proj=(8, 4), kernel=(4, 4)),
    "named projections": bare(mm_input_projection_weight=(4, 4), prompts_visual_projection=(4, 4)),
    "a list": within("weights", nn.ParameterList([torch.zeros(4, 4)])),
    "a dict": within("lora_A", nn.ParameterDict({"default": torch.zeros(2, 4)})),
    "fused": bare(qkv=(12, 4)),
}


@pytest.mark.parametrize("model", MATRICES.values(), ids=MATRICES)
def test_a_parameter_that_is_named_like_a_matrix_is_in_no_warning(model: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Muon steps")
        warnings.filterwarnings("ignore", message="The names of")
        assert split_parameters(model).hidden


@pytest.mark.parametrize("parts", [(4, 4, 4), ("interleaved", 2, 2), 4, None], ids=str)
def test_the_users_own_parts_are_taken_without_a_warning(parts: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (group,) = split_parameters(unknown(), parts={"*.qkv.weight": parts}).hidden
    assert group.get("parts") == parts


@pytest.mark.parametrize(
    "options", [{"parts": {"lm_head.*": (3, 6)}}, {"transposed": ["lm_head.*"]}], ids=str
)
def test_a_layout_of_weights_that_adamw_steps_is_warned_of(options: dict[str, Any]) -> None:
    said = rf"^{next(iter(options))} has no effect for 'lm_head\.\*': AdamW steps what it matches \(head\)"
    with pytest.warns(UserWarning, match=said) as caught:
        assert names(GPT(), **options) == names(GPT())
    assert len(caught) == 1
    frozen = GPT()
    frozen.blocks[0].requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        names(frozen, parts={"*.0.up.weight": (4, 4)}, transposed=["*"])


def test_a_stack_that_the_user_names_goes_to_muon() -> None:
    model = nn.ModuleDict({"stack": bare(weight=(2, 6, 4)), "dense": nn.Linear(4, 4, bias=False)})
    assert "stack.weight" in split_parameters(model).rest_names
    _, group = split_parameters(model, parts={"stack.*": ("stack", 3, 3)}).hidden
    assert group["parts"] == ("stack", 3, 3)
    named = {"stack.*": ("stack", 3, 3), "*": None}
    assert split_parameters(GPT(), parts={"*": None}).rest_names == split_parameters(GPT()).rest_names
    assert split_parameters(model, parts=named).hidden_names == ["stack.weight", "dense.weight"]


class Adapted(nn.Module):
    """peft's replacement of a linear layer: LoRA, or a similar adapter under another name."""

    def __init__(self, into: int, out: int, rank: int = 4) -> None:
        super().__init__()
        self.in_features = into
        self.base_layer: nn.Module = nn.Linear(into, out, bias=False).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(into, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, out, bias=False)})


class ParamWrapper(Adapted):
    """peft's replacement of a stack of experts."""


class Saved(nn.Module):
    """peft's wrapper of a layer in ``modules_to_save``: the frozen layer, and a trained copy."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.original_module = copy.deepcopy(layer).requires_grad_(False)
        self.modules_to_save = nn.ModuleDict({"default": layer})


def test_a_copy_of_a_layer_that_peft_trains_is_taken_apart_as_the_layer_is() -> None:
    mlp = nn.ModuleDict({"gate_up_proj": nn.Linear(8, 32, bias=False), "down_proj": nn.Linear(16, 8)})
    mlp["gate_up_proj"] = Saved(mlp["gate_up_proj"])
    for model in (mlp, Saved(nn.ModuleDict({"c_attn": nn.Linear(8, 24, bias=False)}))):
        (parts,) = (group["parts"] for group in split_parameters(model).hidden if "parts" in group)
        assert parts in [(16, 16), (8, 8, 8)]


def test_an_adapter_of_a_fused_weight_is_taken_apart_as_the_weight_is() -> None:
    attention = Adapted(8, 24)
    attention.base_layer = nn.MultiheadAttention(8, 2).requires_grad_(False)
    model = nn.ModuleDict({"c_attn": Adapted(8, 24), "o_proj": Adapted(8, 8), "attn": attention})
    model.update({"gate_up_proj": Adapted(8, 32), "down_proj": Adapted(16, 8)})
    said = {it.name: (it.who, it.parts) for it in split_parameters(model).verdicts}
    assert said["c_attn.lora_B.default.weight"] == ("Muon", (8, 8, 8))
    assert said["c_attn.lora_A.default.weight"] == ("Muon", None)
    assert said["o_proj.lora_B.default.weight"] == ("Muon", None)
    assert said["attn.lora_B.default.weight"] == ("Muon", (8, 8, 8))
    assert said["gate_up_proj.lora_B.default.weight"] == ("Muon", (16, 16))
    assert said["c_attn.base_layer.weight"] == ("left out", None)


def test_adapters_of_stacked_experts_and_rotations_go_to_adamw() -> None:
    rotated = within("oft_R.default", nn.Linear(6, 8, bias=False))
    model = nn.ModuleDict({"experts": ParamWrapper(8, 24), "q": rotated, "up": nn.Linear(8, 8, bias=False)})
    assert split_parameters(model).hidden_names == ["up.weight"]


def test_a_users_own_stacks_are_said_by_parts_and_transposed() -> None:
    """Stacked experts, stored (E, in, out), under names that say nothing."""
    bank = bare(w_in=(3, 4, 10), w_out=(3, 5, 4))
    parts: dict[str, Any] = {"w_in": ("stack", 5, 5), "w_out": "stack"}
    groups = split_parameters(bank, parts=parts, transposed=["w_*"]).hidden
    assert [(it["parts"], it["transposed"]) for it in groups] == [(("stack", 5, 5), True), ("stack", True)]
    with pytest.raises(UsageError, match=r"w_in: .* 4 rows .*; the numbers fit its columns: .* transposed="):
        split_parameters(bank, parts=parts)
    with pytest.raises(UsageError, match="transposed matches no parameter of the model: 'w'"):
        split_parameters(bank, transposed=["w"])
    with pytest.warns(UserWarning, match='finds no experts in the names of w_in, w_out, .* "stack"'):
        assert split_parameters(bank, experts="muon").hidden == []


def test_heads_can_be_orthogonalized_apart() -> None:
    """Grouped queries: four heads of queries, two of keys and values."""
    attention = bare(**{f"{name}_proj": (rows, 12) for name, rows in (("q", 12), ("k", 6), ("o", 12))})
    attention.num_heads, attention.num_key_value_heads, attention.head_dim = 4, 2, 3
    together = split_parameters(attention)
    assert [group.get("parts") for group in together.hidden] == [None]
    whole, heads = split_parameters(attention, heads="apart").hidden
    assert [name for name, _ in whole["params"]] == ["o_proj"]
    assert [name for name, _ in heads["params"]] == ["q_proj", "k_proj"]
    assert heads["parts"] == ("heads", 3)


APART: dict[str, tuple[nn.Module, dict[str, Any]]] = {
    "heads wider than the model's, as in T5": (attention(16, n_heads=2), dict.fromkeys("qkv", 8)),
    "narrower, as in SAM": (attention(4, num_attention_heads=2), dict.fromkeys("qkv", 2)),
    "cross attention": (attention(8, inputs=12, num_heads=4), dict.fromkeys("qkv", 2)),
    "latent": (
        attention(24, num_heads=2, head_dim=4, qk_nope_head_dim=8, qk_rope_head_dim=4),
        {"q": 12, "k": 4, "v": 4},
    ),
    "DeltaNet": (
        attention(24, num_heads=4, head_k_dim=6, head_v_dim=12),
        {"q": 6, "k": 6, "v": 12},
    ),
    "heads that do not divide": (attention(10, num_heads=4), dict.fromkeys("qkv")),
    "a table of queries beside them": (
        attention(8, num_heads=2, query=nn.Parameter(torch.zeros(8, 8))),
        {**dict.fromkeys("qkv", 4), "query": None},
    ),
    "torch's": (nn.MultiheadAttention(8, 2), {"in": 4, "out": None}),
    "torch's, with other keys": (
        nn.MultiheadAttention(8, 2, kdim=6),
        {**dict.fromkeys("qkv", 4), "out": None},
    ),
}


@pytest.mark.parametrize(("model", "heads"), APART.values(), ids=APART)
@pytest.mark.filterwarnings("ignore:Muon steps query")
def test_heads_are_counted_from_rows(model: nn.Module, heads: dict[str, int | None]) -> None:
    verdicts = split_parameters(model, heads="apart").verdicts
    found = {it.name.partition("_")[0]: it.parts for it in verdicts if it.who == "Muon"}
    assert found == {name: rows and ("heads", rows) for name, rows in heads.items()}
