"""Matrices of models (a name, config.json or function) are counted and cut as in the models' own code."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from muon_tutorial import Grid, Replicate, Shard
from muon_tutorial.cli import main
from muon_tutorial.errors import GridError, UsageError
from muon_tutorial.timing.model_configs import MODEL_TYPES, SAME_AS, shape_from_config
from muon_tutorial.timing.model_shape import ModelShape, stage_layers, stage_matrices
from muon_tutorial.timing.models import PUBLIC_MODELS, find_model, public_names
from muon_tutorial.timing.module_shapes import shape_from_module

from .test_machine import refused_in_one_line

PUBLIC: dict[str, Any] = json.loads(PUBLIC_MODELS.read_text(encoding="utf-8"))

# Each repository's safetensors.total in the Hub's API (https://huggingface.co/api/models/...), to the unit.
COUNTED: dict[str, float] = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "qwen3-235b-a22b": 235_093_634_560,
    # The makers' figures. GLM-4.5's includes a layer for predicting further tokens, which we do not count.
    "mixtral-8x7b": 46.7e9,  # arXiv 2401.04088 and https://mistral.ai/news/mixtral-of-experts
    "gpt-oss-20b": 20.91e9,  # arXiv 2508.10925, table 1
    "gpt-oss-120b": 116.83e9,
    "glm-4.5": 355e9,  # arXiv 2508.06471
    "glm-4.5-air": 106e9,
    "deepseek-v3": 671e9,  # arXiv 2412.19437
    "kimi-k2": 1.04e12,  # arXiv 2507.20534; 1.5 per cent away, which is the farthest
}

SMALL = {"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 48}
HEADLESS = {**SMALL, "num_key_value_heads": 2, "vocab_size": 40, "pad_token_id": 0}
GROUPED = {**HEADLESS, "head_dim": 8}
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}
MIXED = {**GROUPED, **EXPERTS}
ROUTED = {"n_routed_experts": 6, "n_shared_experts": 2, "first_k_dense_replace": 1}
GROUPS = {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
RANKS = {"kv_lora_rank": 12, "q_lora_rank": 20}
HEADS = {"qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
LATENT = {**HEADLESS, **ROUTED, **GROUPS, **RANKS, **HEADS, "num_key_value_heads": 4}
GPT2 = {"n_layer": 3, "n_embd": 32, "n_head": 4, "n_positions": 16, "vocab_size": 40}

VARIANTS: list[tuple[str, Mapping[str, Any], Mapping[str, Any]]] = [
    ("gpt2", GPT2, {}),
    ("gpt2", GPT2, {"n_inner": 40, "tie_word_embeddings": False}),
    ("llama", GROUPED, {}),
    ("llama", GROUPED, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", GROUPED, {"num_key_value_heads": None, "head_dim": None}),
    ("mistral", GROUPED, {"head_dim": 16}),
    ("mixtral", GROUPED, {"num_local_experts": 6}),
    ("qwen2", HEADLESS, {"tie_word_embeddings": True}),
    ("qwen3", GROUPED, {"attention_bias": True}),
    ("qwen3_moe", MIXED, {"decoder_sparse_step": 2}),
    ("qwen3_moe", MIXED, {"mlp_only_layers": [0, 2], "attention_bias": True}),
    ("deepseek_v2", LATENT, {}),
    ("deepseek_v2", LATENT, {"attention_bias": True, "mlp_bias": True, "q_lora_rank": None}),
    ("deepseek_v3", LATENT, {}),
    ("deepseek_v3", LATENT, {"q_lora_rank": None, "first_k_dense_replace": 3}),
    ("deepseek_v3", LATENT, {"attention_bias": True, "first_k_dense_replace": 0}),
    ("glm4_moe", {**MIXED, **ROUTED}, {"use_qk_norm": True, "attention_bias": True}),
    ("glm4_moe", {**MIXED, **ROUTED}, {"tie_word_embeddings": True}),
    ("gpt_oss", GROUPED, {"num_local_experts": 6}),
    ("gpt_oss", GROUPED, {"num_local_experts": 6, "attention_bias": False}),
    ("phi3", HEADLESS, {}),
]


def built(config: Mapping[str, Any]) -> nn.Module:
    """The model as transformers builds it, on the meta device."""
    transformers = pytest.importorskip("transformers", reason="the extra 'hosts' brings transformers")
    keys = {key: value for key, value in config.items() if key != "model_type"}
    model_type = config["model_type"]
    with torch.device("meta"):
        of_type = transformers.AutoConfig.for_model(SAME_AS.get(model_type, model_type), **keys)
        return transformers.AutoModelForCausalLM.from_config(of_type)


def by_layer(shape: ModelShape) -> Counter[tuple[int, int, tuple[int, int]]]:
    """The number of matrices for each triple of layer, number of experts, and shape."""
    return Counter((layer, it.experts, it.shape) for it in shape.families for layer in it.layers)


def matrices_of(shape: ModelShape) -> Counter[tuple[int, int]]:
    held: Counter[tuple[int, int]] = Counter()
    for family in shape.families:
        held[family.shape] += family.count
    return held


def assert_as_built(shape: ModelShape, model: nn.Module) -> None:
    """Assert that config and module have the same matrices in each layer, and the same number of elements.

    Weights that Muon takes apart need no note.
    """
    of_module = shape_from_module(model, shape.name, "transformers")
    assert shape.parameters == sum(param.numel() for param in model.parameters())
    assert (shape.hidden, shape.rest) == (of_module.hidden, of_module.rest)
    assert (shape.layers, shape.experts) == (of_module.layers, of_module.experts)
    assert by_layer(shape) == by_layer(of_module)
    assert not [note for note in (*shape.notes, *of_module.notes) if "The plan counts" in note]


@pytest.mark.parametrize("name", public_names())
def test_a_public_model_is_counted_as_transformers_builds_it(name: str) -> None:
    assert_as_built(find_model(name), built(PUBLIC[name]["config"]))


@pytest.mark.parametrize(("model_type", "sizes", "more"), VARIANTS)
def test_configs_count_as_built(model_type: str, sizes: Mapping[str, Any], more: Mapping[str, Any]) -> None:
    config = {"model_type": model_type, **sizes, **more}
    assert_as_built(shape_from_config(config, "small", "here", "the config"), built(config))


@pytest.mark.parametrize("name", ["gpt2", "llama-3.1-8b"])
def test_a_model_without_a_head_is_counted_without_one(name: str) -> None:
    config = {**PUBLIC[name]["config"], "tie_word_embeddings": False}
    table = config["vocab_size"] * config.get("hidden_size", config.get("n_embd"))
    without, *others = (
        shape_from_config({**config, "architectures": its}, "small", "here", "the config").rest
        for its in (
            ["AnyModel"],
            ["AnyForCausalLM"],
            ["GPT2LMHeadModel"],
            ["AnyForConditionalGeneration"],
            "odd",
            [],
        )
    )
    assert {*others} == {without + table}


def test_every_known_type_has_a_variant() -> None:
    assert {model_type for model_type, _, _ in VARIANTS} == set(MODEL_TYPES) - set(SAME_AS)


GQA = {(32, 32): 6, (16, 32): 6, (48, 32): 6, (32, 48): 3}
MHA = {(32, 32): 12, (48, 32): 3, (32, 48): 3}
ENCODER_DECODER = {(32, 32): 2 * 4 + 2 * 8, (48, 32): 4, (32, 48): 4}
SPARSE = {"index_n_heads": 2, "index_head_dim": 8, "mlp_layer_types": ["dense", "sparse", "sparse"]}
MAMBA = {"num_hidden_layers": 3, "hidden_size": 32, "num_heads": 8, "head_dim": 8, "n_groups": 1}
JAMBA = {"num_experts": 4, "attn_layer_period": 3, "attn_layer_offset": 1, "mamba_dt_rank": 4}
T5 = {"num_layers": 2, "d_model": 32, "d_ff": 48, "num_heads": 4, "d_kv": 8, "vocab_size": 40}
WHISPER = {
    **dict.fromkeys(["encoder_layers", "decoder_layers"], 2),
    **dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads"], 4),
    **dict.fromkeys(["encoder_ffn_dim", "decoder_ffn_dim"], 48),
    "d_model": 32,
    "vocab_size": 60,
    "pad_token_id": 0,
}
BUILT: dict[str, tuple[dict[str, Any], dict[tuple[int, int], int]]] = {
    "glm_moe_dsa": (
        {**LATENT, **SPARSE},
        {(20, 32): 3, (48, 20): 3, (12, 32): 3, (4, 32): 3, (32, 12): 3, (24, 12): 3}  # latent, except o
        | {(16, 20): 3, (8, 32): 3, (2, 32): 3}  # the indexer
        | {(48, 32): 2 + 2 * 2, (32, 48): 1 + 2}  # a dense MLP; two shared experts, stored as one
        | {(24, 32): 2 * 2 * 6, (32, 24): 3 + 2 * 6},  # six experts in two layers; o has the shape of down
    ),
    "gpt_neox": (SMALL, MHA),
    "falcon": (
        {**SMALL, "new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 48},
        {(32, 32): 6, (16, 32): 6, (48, 32): 3, (32, 48): 3},
    ),
    "mamba2": (MAMBA, {(64, 32): 6, (128, 32): 6, (8, 32): 3, (32, 64): 3}),
    "jamba": (
        {**HEADLESS, **JAMBA},
        {(32, 32): 2, (16, 32): 2}  # attention in the second of three layers
        | {(64, 32): 4, (4, 64): 2, (16, 64): 4, (64, 4): 2, (32, 64): 2}  # Mamba in the others
        | {(48, 32): 4 + 8, (32, 48): 2 + 4},  # four experts in the second
    ),
    "vit": ({**SMALL, "architectures": ["ViTForImageClassification"]}, MHA),
    "t5": (T5, ENCODER_DECODER),
    "whisper": ({**WHISPER, "architectures": ["WhisperForConditionalGeneration"]}, ENCODER_DECODER),
    "gemma2": (GROUPED, GQA),
    "olmo2": (HEADLESS, GQA),
    "llava": ({"text_config": {"model_type": "llama", **GROUPED}, "vision_config": {}}, GQA),
    "gemma3": ({"text_config": {"model_type": "gemma3_text", **GROUPED}}, GQA),
}
"""Configs of types that transformers builds, and the number of matrices of each shape in them."""


@pytest.mark.parametrize("model_type", BUILT)
def test_types_not_read_by_hand_are_read_by_transformers(model_type: str) -> None:
    pytest.importorskip("transformers", reason="the extra 'hosts' brings transformers")
    sizes, matrices = BUILT[model_type]
    shape = shape_from_config({"model_type": model_type, **sizes}, "small", "here", "the config")
    assert matrices_of(shape) == matrices
    assert not [note for note in shape.notes if "The plan counts" in note]


@pytest.mark.parametrize("model_type", ["gemma2", "gpt_neox"])
def test_transformers_own_plan_of_tensor_parallelism_is_followed(model_type: str) -> None:
    pytest.importorskip("transformers", reason="the extra 'hosts' brings transformers")
    shape = shape_from_config({"model_type": model_type, **BUILT[model_type][0]}, "small", "here", "it")
    cuts = {family.shape: family.cut for family in shape.families if 48 in family.shape}
    assert cuts == {(48, 32): Shard(0), (32, 48): Shard(1)}
    with pytest.raises(GridError, match="tp=8 does not divide the 4 heads"):
        stage_matrices(shape, tp=8)


def test_a_public_model_needs_no_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert all(find_model(name).families for name in public_names())
    said = "^the config: only transformers reads model_type 'vit'; install the extra 'hosts' "
    with pytest.raises(UsageError, match=said):
        shape_from_config({"model_type": "vit", **SMALL}, "small", "here", "the config")


LLAMA: dict[str, Any] = {"model_type": "llama", **GROUPED}
DEEPSEEK: dict[str, Any] = {"model_type": "deepseek_v3", **LATENT}
QWEN_MOE: dict[str, Any] = {"model_type": "qwen3_moe", **MIXED}
NEOX: dict[str, Any] = {"model_type": "gpt_neox", **SMALL}
OF_GPT2: dict[str, Any] = {"model_type": "gpt2", **GPT2}
TOO_FEW = ("model_type", "hidden_size", "num_attention_heads", "vocab_size")
FURTHER = "1 layer for predicting further tokens ('num_nextn_predict_layers') is not counted."
SAID: dict[str, tuple[dict[str, Any], str]] = {
    "further tokens": ({**DEEPSEEK, "num_nextn_predict_layers": 1}, FURTHER),
    "further tokens, by transformers": (
        {"model_type": "glm_moe_dsa", **BUILT["glm_moe_dsa"][0], "num_nextn_predict_layers": 1},
        FURTHER,
    ),
    "the language model alone": (
        {"model_type": "llava", **BUILT["llava"][0]},
        "Only the language model is planned: 'text_config' of the llava config.",
    ),
    "a size that transformers fills in": (
        {"model_type": "llava", "text_config": {key: LLAMA[key] for key in TOO_FEW}},
        "Not in the config, so transformers' defaults are taken: num_hidden_layers 32.",
    ),
}


@pytest.mark.parametrize("case", SAID)
def test_notes_say_which_layers_and_sizes_are_not_counted(case: str) -> None:
    pytest.importorskip("transformers", reason="the extra 'hosts' brings transformers")
    config, said = SAID[case]
    assert said in shape_from_config(config, "it", "here", "the config").notes


@pytest.mark.parametrize("name", COUNTED)
def test_counts_are_those_of_the_published_weights_or_near_what_the_makers_say(name: str) -> None:
    rel = 0 if isinstance(COUNTED[name], int) else 0.015
    assert find_model(name).parameters == pytest.approx(COUNTED[name], rel=rel)


def test_every_public_model_names_its_source_and_how_many_experts_a_token_meets() -> None:
    for shape in map(find_model, public_names()):
        assert shape.source.startswith("https://")
        assert not shape.experts or 1 <= (shape.experts_met or 0) < shape.experts, shape.name


def test_tensor_parallelism_cuts_as_megatron_does() -> None:
    cuts = {family.name.split("*.")[-1]: family.cut for family in find_model("deepseek-v3").families}
    assert cuts == {
        **dict.fromkeys(["attention.q_a"], Replicate()),
        **{f"attention.kv_a_with_mqa[part {part}]": Replicate() for part in (0, 1)},
        **dict.fromkeys(["attention.q_b", "attention.kv_b[part 0]", "attention.kv_b[part 1]"], Shard(0)),
        **dict.fromkeys(
            [f"{mlp}.{part}" for mlp in ("mlp", "shared_expert") for part in ("gate", "up")], Shard(0)
        ),
        **dict.fromkeys(["attention.o", "mlp.down", "shared_expert.down"], Shard(1)),
        **dict.fromkeys(["gate", "up", "down"], Replicate()),  # the experts' matrices
    }


GRIDS = [("gpt2", 4, 1, 5), ("mixtral-8x7b", 2, 4, 3), ("deepseek-v3", 8, 16, 16), ("qwen3-30b-a3b", 8, 2, 7)]


@pytest.mark.parametrize(("name", "tp", "ep", "pp"), GRIDS)
def test_stages_hold_every_matrix_once_in_pieces_that_make_it(name: str, tp: int, ep: int, pp: int) -> None:
    shape = find_model(name)
    dense, experts = [], []
    for stage in range(pp):
        of_stage = stage_matrices(shape, tp=tp, ep=ep, pp=pp, stage=stage)
        assert all([it.index for it in held] == list(range(len(held))) for held in of_stage)
        dense += of_stage[0]
        experts += of_stage[1]
    names = [matrix.name for matrix in dense + experts]
    assert len(set(names)) == len(names)
    assert not any("*" in it for it in names)
    assert sum(it.numel for it in dense) + ep * sum(it.numel for it in experts) == shape.hidden
    assert all(it.axes == () for it in experts)
    grid = Grid.of(tp=tp)
    for matrix in dense:
        pieces = [matrix.box(grid.at(rank)) for rank in grid.ranks]
        assert len({piece.shape for piece in pieces}) == 1
        assert sum(piece.numel for piece in pieces) == matrix.numel * (1 if matrix.cuts else tp)


def test_layers_are_divided_as_evenly_as_they_can_be() -> None:
    shape = find_model("deepseek-v3")
    for pp in range(1, 62):
        stages = [stage_layers(shape, pp, stage) for stage in range(pp)]
        assert [layer for stage in stages for layer in stage] == list(range(61))
        assert max(map(len, stages)) - min(map(len, stages)) <= 1


def test_matrices_carry_the_dtypes_asked_for() -> None:
    dense, _ = stage_matrices(find_model("gpt2"))
    assert {(it.dtype, it.grad_dtype) for it in dense} == {(torch.bfloat16, torch.float32)}
    dense, _ = stage_matrices(find_model("gpt2"), dtype=torch.float32, grad_dtype=torch.bfloat16)
    assert {(it.dtype, it.grad_dtype) for it in dense} == {(torch.float32, torch.bfloat16)}


def test_a_config_is_found_by_file_and_by_folder(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    path = tmp_path / "mine" / "config.json"
    path.write_text(json.dumps(PUBLIC["qwen3-8b"]["config"]), encoding="utf-8")
    by_file, by_folder = find_model(str(path)), find_model(str(tmp_path / "mine"))
    assert by_file == by_folder
    assert (by_file.name, by_file.source) == ("mine", str(path))
    assert by_file.families == find_model("qwen3-8b").families


MODULES = """
import sys
import torch
from torch import nn

class Expert(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.up, self.down = nn.Linear(8, 24, bias=bias), nn.Linear(24, 8, bias=False)

class Mixed(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.mix, self.gate = nn.Linear(8, 8), nn.Linear(8, experts)
        self.experts = nn.ModuleList(Expert(i % 2 == 0) for i in range(experts))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.stem = nn.Linear(8, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8), Mixed(4), Mixed(2)])
        self.lm_head = nn.Linear(8, 50, bias=False)

def model():
    return Model()

def on_cpu():
    with torch.device("cpu"):
        return Model()

def needs(size):
    return Model()

embedding = lambda: nn.Embedding(50, 8)
nothing = lambda: None
leaves = lambda: sys.exit(3)
lazy = lambda: nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 8))

def chatty():
    print("building")
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))

class GroupedLinear(nn.Module):
    def __init__(self, experts, into, out):
        super().__init__()
        self.num_routed_experts = experts
        self.weight = nn.Parameter(torch.empty(experts * out, into))

class Folded(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.experts = nn.ModuleDict()
        self.experts["fused_w1w3"] = GroupedLinear(count, 8, 48)
        self.experts["fused_w2"] = GroupedLinear(count, 24, 8)

def folded():
    return nn.ModuleList(Folded(256) for _ in range(2))

def folded_unsaid():
    model = folded()
    for layer in model:
        for expert in layer.experts.values():
            del expert.num_routed_experts
    return model

number = 3
"""


@pytest.fixture
def my_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"of_mine_{random.randrange(10**9)}"  # a new name, so each test imports it again
    (tmp_path / f"{name}.py").write_text(MODULES, encoding="utf-8")
    (tmp_path / f"{name}_broken.py").write_text("1 / 0", encoding="utf-8")
    (tmp_path / f"{name}_leaving.py").write_text("raise SystemExit('gone')", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_a_function_gives_any_module_on_any_device(my_module: str) -> None:
    shape, on_cpu = (find_model(f"{my_module}:{name}") for name in ("model", "on_cpu"))
    assert (shape.families, shape.others) == (on_cpu.families, on_cpu.others)
    found = [(family.name, family.shape, family.layers, family.experts) for family in shape.families]
    assert found == [
        ("stem.weight", (8, 8), (0,), 0),
        ("layers.*.weight", (8, 8), (0,), 0),
        ("layers.*.mix.weight", (8, 8), (1, 2), 0),
        ("layers.*.experts.*.up.weight", (24, 8), (2,), 2),
        ("layers.*.experts.*.up.weight", (24, 8), (1,), 4),
        ("layers.*.experts.*.down.weight", (8, 24), (2,), 2),
        ("layers.*.experts.*.down.weight", (8, 24), (1,), 4),
    ]
    _, experts = stage_matrices(shape, ep=2, pp=3, stage=1)
    names = [f"layers.1.experts.{i}.{part}.weight" for i in (0, 1) for part in ("up", "down")]
    assert [it.name for it in experts] == names
    head = next(other for other in shape.others if other.name == "lm_head.weight")
    assert (head.layers, head.size) == ((2,), 400)
    with pytest.raises(GridError, match=r"it is unknown how tensor parallelism cuts stem\.weight"):
        stage_matrices(shape, tp=2)


def test_experts_folded_into_rows_are_matrices_of_their_own_or_named(my_module: str) -> None:
    """xtuner stores experts in a weight [256 · out, in], which is not one matrix of 12,288 rows."""
    shape = find_model(f"{my_module}:folded")
    assert {it.shape for it in shape.families} == {(24, 8), (8, 24)}
    assert {(it.experts, len(it.layers)) for it in shape.families} == {(256, 2)}
    assert "fused_w1w3, fused_w2. The plan counts q, k, v, gate, up and experts separately" in shape.notes[0]
    dense, experts = stage_matrices(shape, ep=256)
    assert (len(dense), len(experts)) == (0, 6)
    unsaid = find_model(f"{my_module}:folded_unsaid")
    assert matrices_of(unsaid) == {(6144, 8): 4, (2048, 24): 2}
    assert any("fused_w2. The plan counts each weight as one matrix" in note for note in unsaid.notes)


def test_a_functions_own_output_is_not_in_the_answer(my_module: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["plan", f"{my_module}:chatty", "--grid", "dp=2", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)
    assert "building" in err


UNRANKED = {key: value for key, value in LATENT.items() if key != "q_lora_rank"}

CONFIGS: dict[str, tuple[bytes | str | Mapping[str, Any], str]] = {
    "no text": (b"\xff\xfe\x00", "is not JSON"),
    "not json": ("{", "is not JSON"),
    "no table": ("[1]", "is not a JSON object"),
    "no type": ('{"n_layer": 2}', "lacks 'model_type'"),
    "another type": ('{"model_type": "none"}', "model_type 'none' is not known, not even to transformers 5"),
    "what transformers cannot build": ({**NEOX, "hidden_size": "wide"}, "transformers cannot build it: "),
    "more layers than anything has": ({**NEOX, "num_hidden_layers": 10**7}, "at most 10,000; got 10000000"),
    "more dense layers than all": ({**DEEPSEEK, "first_k_dense_replace": 4}, " is 4, more than the 3 layers"),
    "no size": ({**LLAMA, "hidden_size": None}, "lacks 'hidden_size'"),
    "no heads": ({**LLAMA, "model_type": "qwen3", "num_key_value_heads": None}, "'num_key_value_heads'"),
    "no head": ({"model_type": "qwen3", **HEADLESS}, "lacks 'head_dim'"),
    "no rank": ({**DEEPSEEK, "model_type": "kimi_k2", "q_lora_rank": "?"}, "'q_lora_rank' is a whole"),
    "rank left out": ({"model_type": "kimi_k2", **UNRANKED}, "lacks 'q_lora_rank'"),
    "neither true nor false": ({**LLAMA, "mlp_bias": 1}, "'mlp_bias' is true or false; got 1"),
    "layers in no list": ({**QWEN_MOE, "mlp_only_layers": 1}, "'mlp_only_layers' is a list of layers; got 1"),
    "more heads than width": ({**LLAMA, "num_attention_heads": 64}, "not enough for 64 heads"),
    "uneven groups": ({**LLAMA, "num_key_value_heads": 3}, "4 heads of queries cannot share 3 heads of keys"),
    "uneven heads": (
        {"model_type": "llama", **HEADLESS, "num_attention_heads": 5, "num_key_value_heads": 5},
        "cannot be divided evenly among 5 heads",
    ),
    "uneven heads of GPT-2": ({**OF_GPT2, "n_embd": 65}, "'n_embd' 65 cannot be divided evenly among 4"),
    "no experts": ({**LLAMA, "model_type": "mixtral"}, "'num_experts' or 'num_local_experts'"),
    "a word": ({**LLAMA, "vocab_size": "many"}, "'vocab_size' is a whole number, at least 1; got 'many'"),
    "nought": ({**LLAMA, "num_hidden_layers": 0}, "at least 1; got 0"),
    "wider than torch can count": ({**LLAMA, "hidden_size": 10**12}, "is at most 100,000,000"),
    "more digits than Python reads": ('{"model_type": ' + "9" * 5000 + "}", "is not JSON"),
    "deeper than Python reads": ("[" * 100_000, "is not JSON"),
    "more experts met than there are": ({**QWEN_MOE, "num_experts_per_tok": 999}, "is 999, more than"),
    "every other layer": ({**DEEPSEEK, "moe_layer_freq": 2}, "only 'moe_layer_freq' 1 is supported; got 2"),
    "attention to an encoder": (
        {**OF_GPT2, "add_cross_attention": True},
        "a GPT-2 with 'add_cross_attention' is not supported. For other models, use module:function",
    ),
}


ASK_TRANSFORMERS = {"another type", "what transformers cannot build", "more layers than anything has"}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_that_cannot_be_used_says_why(case: str, tmp_path: Path) -> None:
    if case in ASK_TRANSFORMERS:
        pytest.importorskip("transformers", reason="the extra 'hosts' brings it")
    config, said = CONFIGS[case]
    path = tmp_path / "config.json"
    text = json.dumps(config) if isinstance(config, Mapping) else config
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    told = refused_in_one_line(UsageError, lambda: find_model(str(path)))
    assert said in told
    assert str(path) in told


NAMES = {
    "lama-3.1-8b": "did you mean llama-3.1-8b? Known are gpt2, ",
    "GPT-5": "no model is called 'GPT-5'",
    "nowhere/config.json": "nowhere/config.json cannot be read: No such file or directory",
    "deepseek-ai/DeepSeek-V3": "did you mean deepseek-v3?",
    "Qwen/Qwen3-235B": "did you mean qwen3-235b-a22b?",
    "x" * 5000: "no model is called",
    "mine.json": "mine.json cannot be read",
    str(PUBLIC_MODELS.parent): "config.json cannot be read: No such file",
    "": "no model is called ''",
    "{}:nobody": "has no function 'nobody'",
    "{}:number": "has no function 'number'",
    "{}:": "has no function ''",
    "{}:nothing": "must return a torch.nn.Module; it returned NoneType",
    "{}:embedding": "returned Embedding, which has no hidden matrix",
    "{}:needs": "failed: TypeError: needs() missing 1 required positional argument",
    "{}_broken:model": "cannot be imported: ZeroDivisionError",
    "{}:lazy": "0.weight has no shape yet, as in nn.LazyLinear: give that layer its sizes",
    "{}:leaves": "failed: SystemExit: 3",
    "{}_leaving:model": "cannot be imported: SystemExit: gone",
    "{}_missing:model": "cannot be imported: ModuleNotFoundError",
    ":model": "cannot be imported: ValueError",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_leads_nowhere_says_why(name: str, my_module: str) -> None:
    assert NAMES[name] in refused_in_one_line(UsageError, lambda: find_model(name.format(my_module)))


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gpt2-xl", {"tp": 2}, "tp=2 does not divide the 25 heads of gpt2-xl"),
    ("llama-3.1-8b", {"tp": 3}, "tp=3 does not divide the 32 heads"),
    ("glm-4.5-air", {"tp": 12}, "tp=12 must divide the 8 key-value heads of glm-4.5-air, or be a multiple"),
    ("qwen2.5-7b", {"tp": 28}, "tp=28 does not divide the 512 rows of layers.*.attention.k"),
    ("mixtral-8x7b", {"ep": 3}, "ep=3 does not divide the 8 experts"),
    ("gpt2", {"ep": 2}, "gpt2 has no experts for ep=2"),
    ("gpt2", {"pp": 13}, "gpt2 has 12 layers: pp=13"),
    ("gpt2", {"pp": 4, "stage": 4}, "pp=4 has stages 0 to 3; got stage 4"),
    ("gpt2", {"pp": 0}, "at least 1; got 0"),
    ("gpt2", {"tp": -1}, "at least 1; got -1"),
]


@pytest.mark.parametrize(("name", "grid", "said"), REFUSED)
def test_a_grid_that_does_not_fit_says_why(name: str, grid: dict[str, Any], said: str) -> None:
    assert said in refused_in_one_line(GridError, lambda: stage_matrices(find_model(name), **grid))


def test_fewer_heads_of_keys_than_ranks_are_cut_evenly_all_the_same() -> None:
    dense, _ = stage_matrices(find_model("qwen3-235b-a22b"), tp=8, pp=94)
    keys = next(it for it in dense if it.name.endswith("attention.k"))
    assert keys.box(Grid.of(tp=8).at(7)).shape == (64, 4096)
