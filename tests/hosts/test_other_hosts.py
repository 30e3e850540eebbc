"""Packages that are not among the project's extras: adapters, TRL, DeepSpeed, and Accelerate with FSDP1.

``CASES`` has these packages' lines of the table of hosts. A test skips if its package is not installed:
``pip install peft trl deepspeed``.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from muon_tutorial import MuonWithAdamW, UsageError, launch, split_parameters
from muon_tutorial.optimizer.audit import audit

from .test_silences import IN_A_FLAT_ONE, NOT_ONE, listen, network

TARGETS, FEED = ["q_proj", "v_proj"], "down_proj"
WITHOUT_MATRICES = "has no hidden matrix for Muon: use torch.optim.AdamW"
ZERO = r"DeepSpeed's ZeRO flatten"


@dataclass(frozen=True, slots=True)
class Case:
    """A host: the packages it needs, and what its users read in the table and in messages.

    ``said`` is a pattern of the error or warning. The pattern is empty if the host trains without either.
    """

    needs: Sequence[str]
    outcome: str
    said: str = ""


def llama() -> Any:
    transformers: Any = pytest.importorskip("transformers", minversion="5")
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=32, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=48, max_position_embeddings=32,
        )
    )  # fmt: skip


ADAPTERS: dict[str, tuple[Callable[[Any], Any], dict[str, str]]] = {
    "LoRA": (
        lambda peft: peft.LoraConfig(r=4, target_modules=TARGETS),
        {"lora_A": "Muon", "lora_B": "Muon"},
    ),
    "AdaLoRA": (
        lambda peft: peft.AdaLoraConfig(init_r=4, target_r=2, target_modules=TARGETS, total_step=10),
        {"lora_A": "Muon", "lora_B": "Muon", "lora_E": "AdamW"},
    ),
    "IA3": (
        lambda peft: peft.IA3Config(target_modules=["k_proj", FEED], feedforward_modules=[FEED]),
        {"ia3_l": "AdamW"},
    ),
    "OFT": (lambda peft: peft.OFTConfig(r=0, oft_block_size=8, target_modules=TARGETS), {"oft_R": "AdamW"}),
    "BOFT": (
        lambda peft: peft.BOFTConfig(boft_block_size=8, target_modules=TARGETS),
        {"boft_R": "AdamW", "boft_s": "AdamW"},
    ),
}

PEFT, TRL = ("transformers", "peft"), ("transformers", "peft", "trl")
ALL_ADAMWS = Case(PEFT, "refused: all is AdamW's", WITHOUT_MATRICES)
CASES: dict[str, Case] = {
    "peft, LoRA": Case(PEFT, "A and B by Muon"),
    "peft, AdaLoRA": Case(PEFT, "A and B by Muon, E by AdamW"),
    **dict.fromkeys(("peft, IA3", "peft, OFT", "peft, BOFT"), ALL_ADAMWS),
    "SFTTrainer, peft_config, a factory": Case(TRL, "the audit says Muon"),
    "SFTTrainer, made after get_peft_model": Case(TRL, "the audit says Muon"),
    "SFTTrainer, peft_config, made before": Case(
        TRL, "warned: trains nothing", "lora_A.*not in the model yet when this optimizer was made"
    ),
    "DeepSpeed, stage 0": Case(("deepspeed",), "the audit says Muon"),
    **{f"DeepSpeed, stage {stage}": Case(("deepspeed",), "refused by name", ZERO) for stage in (1, 2, 3)},
    "Accelerate, FSDP1": Case(("accelerate",), "refused by name", IN_A_FLAT_ONE),
    "Accelerate, FSDP1, use_orig_params": Case(("accelerate",), "refused by name", NOT_ONE),
    "FSDP1 before": Case((), "refused by name"),
    "FSDP1 before, one flat parameter": Case((), "refused by name"),
    "FSDP1 later": Case((), "refused by name"),
    "FSDP1 later, one flat parameter": Case((), "refused by name"),
}


def skip_unless_installed(name: str) -> None:
    missing = [it for it in CASES[name].needs if importlib.util.find_spec(it) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: pip install {' '.join(missing)}")


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_go_to_muon_if_they_are_matrices(name: str) -> None:
    peft: Any = pytest.importorskip("peft")
    config, expected = ADAPTERS[name]
    model = peft.get_peft_model(llama(), config(peft))
    trained = [it for it in split_parameters(model).verdicts if it.who != "left out"]
    words = [next(word for word in it.name.split(".") if word in expected) for it in trained]
    assert dict(zip(words, (it.who for it in trained), strict=True)) == expected
    if CASES[f"peft, {name}"].said:
        with pytest.raises(UsageError, match=CASES[f"peft, {name}"].said):
            MuonWithAdamW.from_model(model, lr=0.02)
        return
    optimizer = MuonWithAdamW.from_model(model, lr=0.02)
    seen, tokens = audit(optimizer), torch.arange(16)[None]
    for _ in range(3):  # B begins with zeros, so A has no gradient at first
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    assert seen.report().line.startswith("this is Muon")


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("SFT")])
def test_sft_trainer_trains_adapters_or_says_why_not(name: str, tmp_path: Path) -> None:
    trl, peft, datasets = (pytest.importorskip(it) for it in ("trl", "peft", "datasets"))
    tokenizers, transformers = (pytest.importorskip(it) for it in ("tokenizers", "transformers"))
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(32)}, unk_token="w0")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), eos_token="w1", pad_token="w2"
    )
    lora = peft.LoraConfig(r=4, target_modules=TARGETS, task_type="CAUSAL_LM")
    model: Any = llama() if "peft_config" in name else peft.get_peft_model(llama(), lora)
    options: dict[str, Any] = {"peft_config": lora} if "peft_config" in name else {}
    if "factory" in name:
        options["optimizer_cls_and_kwargs"] = (lambda: MuonWithAdamW.from_model, {"lr": 0.02})
    else:
        options["optimizers"] = (MuonWithAdamW.from_model(model, lr=0.02), None)
    settings = trl.SFTConfig(
        output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=4, report_to="none", use_cpu=True,
        bf16=False, save_strategy="no", disable_tqdm=True, gradient_checkpointing=False,
    )  # fmt: skip
    ids = [[(3 + i + j) % 32 for j in range(12)] for i in range(12)]
    data = datasets.Dataset.from_dict({"input_ids": ids})
    trainer = trl.SFTTrainer(model, settings, train_dataset=data, processing_class=tokenizer, **options)
    trainer.create_optimizer()
    seen = None if CASES[name].said else audit(trainer.optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    told = [str(it.message) for it in caught if "optimizer" in str(it.message)]
    if seen is None:
        assert re.search(CASES[name].said, told[0]), told
    else:
        assert seen.report().line.startswith("this is Muon"), told


def under_deepspeed(rank: int, stage: int) -> list[str]:
    deepspeed: Any = importlib.import_module("deepspeed")
    model: Any = network()
    optimizer = MuonWithAdamW.from_model(model, lr=0.02)
    seen = audit(optimizer)
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}}
    config |= {"zero_allow_untested_optimizer": True}
    try:
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        for step in range(3):
            made = torch.Generator().manual_seed(10 * step + rank)
            engine.backward(engine(torch.randn(4, 6, generator=made)).square().sum())
            engine.step()
        return [seen.report().line]
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]


def under_accelerate(rank: int, name: str) -> list[str]:
    """FSDP1, Accelerate's default. On CPUs, Accelerate would use DDP; a hook of the tests forces FSDP1."""
    accelerator = sharding_accelerator()
    accelerator.state.device = torch.device("cpu")  # FSDP1 refuses parameters on another device
    accelerator.state.fsdp_plugin.use_orig_params = "use_orig_params" in name
    model: Any = network()
    try:
        model, optimizer = accelerator.prepare(model, MuonWithAdamW.from_model(model, lr=0.02))
        return [type(model).__name__, *listen(model, optimizer, rank)[:1]]
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]


@cache
def sharding_accelerator() -> Any:
    """The process's only accelerator."""
    os.environ.update(ACCELERATE_USE_FSDP="true", ACCELERATE_USE_CPU="true")
    sys.path.insert(0, str(Path(__file__).parent / "watch"))
    import watching
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    watching._shard_on_cpus()
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=1))
    assert accelerator.state.fsdp_plugin.use_orig_params is False, "Accelerate's default"
    return accelerator


def under(rank: int, names: Sequence[str]) -> dict[str, str]:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), DS_ACCELERATOR="cpu")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")  # required but unused
    heard = {}
    if any(name.startswith("DeepSpeed") for name in names):
        deepspeed: Any = importlib.import_module("deepspeed")
        deepspeed.ops.__compatible_ops__.clear()  # DeepSpeed would compile collectives of its own
        deepspeed.init_distributed("gloo")
    for name in names:
        stage = name.removeprefix("DeepSpeed, stage ")
        said = under_deepspeed(rank, int(stage)) if stage.isdigit() else under_accelerate(rank, name)
        heard[name] = said[-1]
    return heard


@pytest.fixture(scope="module")
def heard() -> list[dict[str, str]]:
    wanted = [name for name in CASES if name.startswith(("DeepSpeed", "Accelerate"))]
    there = [name for name in wanted if all(importlib.util.find_spec(it) for it in CASES[name].needs)]
    return launch(under, 2, args=(there,), timeout=200) if there else []


@pytest.mark.exhaustive  # a usual run tests FSDP1 without a host, in ``test_silences``
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(("DeepSpeed", "Accelerate"))])
def test_a_host_that_flattens_matrices_is_refused_by_name(name: str, heard: list[dict[str, str]]) -> None:
    skip_unless_installed(name)
    for said in heard:
        assert re.search(CASES[name].said or "^this is Muon", said[name], re.DOTALL), said[name]


def rows() -> str:
    """The rows of the table's second part, which says what each of these hosts does."""
    lines = (f"| {name} | {', '.join(it.needs) or 'torch'} | {it.outcome} |" for name, it in CASES.items())
    return "\n".join(["| host | needs | outcome |", "|---|---|---|", *lines]) + "\n"


def test_the_table_has_a_row_for_each_of_these_hosts() -> None:
    kept = (Path(__file__).parent / "hosts_table.md").read_text(encoding="utf-8")
    assert rows() in kept, "run python -m tests.hosts.table"
