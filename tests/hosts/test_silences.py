"""Errors that were once silent with FSDP2 and FSDP1. Two ranks take three steps, and note the messages.

``tests/guard/test_guard.py`` tests one process's errors, and ``test_other_hosts`` other packages' errors.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from muon_tutorial import Muon, MuonWithAdamW, TutorialError, build_mesh, launch, split_parameters
from muon_tutorial.optimizer.audit import audit

from ..optimizer.test_split_parameters import Conv1D, bare
from ..oracle import perceptron

STEPS = 3
QUIET: Sequence[str] = ("", "", "")


def network() -> nn.Sequential:
    return nn.Sequential(*perceptron(), nn.LayerNorm(6))


class WithExpert(nn.Module):
    """A dense layer, and an expert that FSDP2 leaves out, whose gradient is zero at first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense, self.expert = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.dense(x) + self.expert(x) * (self.calls > 1)


def listen(model: Any, optimizer: Any, rank: int, parts: str = "own", steps: int = STEPS) -> list[str]:
    """The warnings or the error of each step. With ``parts="same"``, all ranks learn from the same inputs."""
    heard = []
    for step in range(steps):
        optimizer.zero_grad()
        made = torch.Generator().manual_seed(10 * step + (rank if parts == "own" else 0))
        with warnings.catch_warnings(record=True) as caught:
            warnings.filterwarnings("always", module="muon_tutorial|tests")
            warnings.simplefilter("always", UserWarning)
            model(torch.randn(4, 6, generator=made)).square().sum().backward()
            try:
                optimizer.step()
                said = [str(it.message) for it in caught if "random oper" not in str(it.message)]
                heard.append("; ".join(said))
            except Exception as error:
                heard.append(f"{type(error).__name__}: {error}")
    return heard


def pair(model: nn.Module, **settings: Any) -> MuonWithAdamW:
    return MuonWithAdamW.from_model(model, lr=0.02, **settings)


def layers_sharded(model: nn.Sequential) -> nn.Sequential:
    """The model, with both linear layers under FSDP2, and the norm outside."""
    fully_shard(model[0])
    fully_shard(model[2])
    return model


def layers_alone(rank: int) -> list[str]:
    model = layers_sharded(network())
    return listen(model, pair(model, muon={"compare_every": 2}), rank)


def other_norms(rank: int) -> list[str]:
    model = network()
    nn.init.constant_(next(model[3].parameters()), 1.0 + rank)
    return listen(model, pair(layers_sharded(model)), rank)[:1]


def ignored(rank: int, averaged: bool = False) -> list[str]:
    model = network()
    fully_shard(model, ignored_params={*model[3].parameters()})
    for param in model[3].parameters() if averaged else ():
        param.register_post_accumulate_grad_hook(lambda it: dist.all_reduce(it.grad))
    return listen(model, pair(model), rank)


def own_expert(rank: int) -> list[str]:
    model = WithExpert()
    fully_shard(model, ignored_params={*model.expert.parameters()})
    return listen(model, pair(model), rank)


def made_between(rank: int) -> list[str]:
    model = network()
    fully_shard(model[0])
    optimizer = pair(model)
    fully_shard(model[2])
    fully_shard(model)
    return listen(model, optimizer, rank)


def sharded_later(rank: int, which: str) -> list[str]:
    """Muon alone, if its own model is sharded after a step, or if another model is, and has a Muon."""
    model = network()
    muon = matrices_alone(model)
    before, other = listen(model, muon, rank, "same", 1), network() if which == "another" else model
    fully_shard(other)
    its = matrices_alone(other) if which == "another" else None
    return before + listen(other, muon, rank, steps=STEPS - 1)[: 2 + bool(its)]


def made_on_meta(rank: int) -> list[str]:
    """A model made on meta should train in silence, and an audit made after ``to_empty`` should see Muon."""
    with torch.device("meta"):
        model = network()
    fully_shard(model)
    optimizer = pair(model)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for param in model.parameters():
        nn.init.normal_(param, std=0.1)
    seen = audit(optimizer)
    return [*listen(model, optimizer, rank), seen.report().line]


def clipped_in_ddps_buckets(rank: int) -> list[str]:
    """Clip rows that tp has cut by hand, with DDP's gradients in its buckets; then by the whole norm."""
    mesh, heard = build_mesh({"dp": 1, "tp": 2}), []
    for is_static, to_none in product((False, True), (False, True)):
        model = nn.Linear(4, 2, bias=False)
        muon = Muon(model.parameters(), strategy="owner", mesh=mesh)
        ddp = DistributedDataParallel(
            model, process_group=mesh.get_group("dp"), gradient_as_bucket_view=True, static_graph=is_static
        )
        for _ in range(3):
            muon.zero_grad(to_none)
            ddp(torch.full((1, 4), 1.0 + rank)).sum().backward()
            heard.append(refusal(partial(nn.utils.clip_grad_norm_, model.parameters(), 1.0)))
            muon.ready_gradients(1.0)
            muon.step()
    return heard


def laid_out_otherwise(rank: int) -> list[str]:
    """The weights whose layout changes if ``fully_shard`` gives the module around them a class of its own."""
    attention = bare("CodeGenAttention")
    attention.qkv_proj = nn.Linear(8, 24, bias=False)
    experts = bare("Llama4TextExperts", gate_up_proj=(2, 8, 8), down_proj=(2, 4, 8))
    layers = {"a": attention, "experts": experts, "c_fc": Conv1D(8, 4), "rnn": nn.LSTM(4, 4, bias=False)}
    model, found = nn.ModuleDict(layers), []
    for sharded in (False, True):
        for module in layers.values() if sharded else ():
            fully_shard(module)
        split = split_parameters(model, experts="muon")
        found.append({it.name: (it.who, it.why, it.parts, it.transposed) for it in split.verdicts})
    assert len(found[0]) == 6
    return [name for name, its in found[0].items() if found[1][name] != its]


def matrices_alone(model: nn.Module) -> Muon:
    return Muon([param for param in model.parameters() if param.ndim == 2], lr=0.02)


def under_fsdp1(model: nn.Module, use_orig_params: bool, **options: Any) -> nn.Module:
    cpu = torch.device("cpu")
    return FullyShardedDataParallel(model, device_id=cpu, use_orig_params=use_orig_params, **options)


def fsdp1_later(rank: int, use_orig_params: bool, steps_before: int = 0, make: Callable = pair) -> list[str]:
    model = network()
    optimizer = make(model)
    before = listen(model, optimizer, rank, "same", steps_before)
    return before + listen(under_fsdp1(model, use_orig_params), optimizer, rank, steps=STEPS - steps_before)


def fsdp1_unsharded(rank: int) -> list[str]:
    """FSDP1 without sharding should train in silence, because it keeps matrices."""
    model = under_fsdp1(network(), True, sharding_strategy=ShardingStrategy.NO_SHARD)
    optimizer = pair(model)
    seen = audit(optimizer)
    return [*listen(model, optimizer, rank), seen.report().line]


def fsdp1_before(rank: int, use_orig_params: bool) -> list[str]:
    """The errors if Muon is made from the model, from the module inside it, or from all its parameters."""
    model = under_fsdp1(network(), use_orig_params)
    return [
        refusal(lambda: pair(model)),
        refusal(lambda: pair(next(model.children()))),
        refusal(lambda: Muon(model.parameters(), lr=0.02)),
    ]


def refusal(make: Callable[[], object]) -> str:
    try:
        return f"{make()}"
    except TutorialError as error:
        return f"{type(error).__name__}: {error}"


NOT_AVERAGED = r"weight is not the same on all ranks .*no DTensor, so FSDP2 does not average"
NOT_STEPPED = "not in the model yet when this optimizer was made, but trained now"
FSDP1 = r"FSDP1 .* use FSDP2 \(fully_shard, Accelerate's fsdp_version=2\)"
FLAT = rf"0\.weight had shape \(8, 6\) when this optimizer was made, and has .* now: {FSDP1}"
FLAT_MOMENTS = rf"and AdamW's moments of it are float32 of shape \(\d,\) on cpu: {FSDP1}"
IN_A_FLAT_ONE = rf"^UsageError: 0\.weight is in a flat parameter of the model now: {FSDP1}"
IN_ANOTHER_FLAT_ONE = (
    f"^UsageError: a flat parameter has the gradients, and this Muon's parameters have none: {FSDP1}"
)
NO_MATRICES = f"^UsageError: .* has no matrices: {FSDP1}"
NOT_ONE = r"^NotAMatrixError: Muon takes only matrices; these are not: .*\(shape \(\d+,\)\)\. " + FSDP1
AT_ONCE = (NO_MATRICES, NO_MATRICES, NOT_ONE)

CASES: dict[str, tuple[Callable[[int], list[str]], Sequence[str]]] = {
    "a root not sharded": (layers_alone, (f"the gradient of 3.{NOT_AVERAGED}", "", f"^3.{NOT_AVERAGED}")),
    "parameters that FSDP2 ignores": (ignored, (f"the gradient of 3.{NOT_AVERAGED}", "", "")),
    "other first values beside shards": (other_norms, (f"^3.{NOT_AVERAGED}",)),
    "gradients averaged by hand": (lambda rank: ignored(rank, averaged=True), QUIET),
    "an expert without a first gradient": (own_expert, ("", *["gradient of expert.weight is not .*ep"] * 2)),
    "made between two fully_shard": (made_between, (rf"2\.weight, 2\.bias.*{NOT_STEPPED}", "", "")),
    "Muon alone, made before fully_shard": (
        lambda rank: sharded_later(rank, "its own"),
        ("", "^no parameter of this Muon has a gradient", ""),
    ),
    "a step without gradients": (lambda rank: sharded_later(rank, "another"), QUIET),
    "made on the meta device": (made_on_meta, (*QUIET, "^this is Muon")),
    "clipped in DDP's buckets": (
        clipped_in_ddps_buckets,
        ["^GradientError: this gradient is this rank's own"] * 12,
    ),
    "modules sharded by themselves": (laid_out_otherwise, ()),
    "FSDP1 later": (lambda rank: fsdp1_later(rank, True), [FLAT] * 3),
    "FSDP1 later, one flat parameter": (lambda rank: fsdp1_later(rank, False), [IN_A_FLAT_ONE] * 3),
    "FSDP1 after a step": (lambda rank: fsdp1_later(rank, True, 1), ["", FLAT_MOMENTS, FLAT_MOMENTS]),
    "FSDP1 after a step, one flat parameter": (
        lambda rank: fsdp1_later(rank, False, 1),
        ["", IN_A_FLAT_ONE, IN_A_FLAT_ONE],
    ),
    "FSDP1 later, one flat parameter, Muon alone": (
        lambda rank: fsdp1_later(rank, False, make=matrices_alone),
        [IN_ANOTHER_FLAT_ONE] * 3,
    ),
    "FSDP1 without sharding": (fsdp1_unsharded, (*QUIET, "^this is Muon")),
    "FSDP1 before": (lambda rank: fsdp1_before(rank, True), AT_ONCE),
    "FSDP1 before, one flat parameter": (lambda rank: fsdp1_before(rank, False), AT_ONCE),
}


def heard_by(rank: int) -> dict[str, list[str]]:
    return {name: case(rank) for name, (case, _) in CASES.items()}


@pytest.fixture(scope="module")
def heard() -> list[dict[str, list[str]]]:
    return launch(heard_by, 2, timeout=120)


@pytest.mark.parametrize("name", CASES)
def test_it_is_said_on_both_ranks(name: str, heard: list[dict[str, list[str]]]) -> None:
    for said in (its[name] for its in heard):
        for words, pattern in zip(said, CASES[name][1], strict=True):
            assert re.search(pattern, words, re.DOTALL) if pattern else words == "", said
