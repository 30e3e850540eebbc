"""Schedulers, ``GradScaler`` and clipping work as hosts use them with any optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import lr_scheduler

from muon_tutorial import MuonWithAdamW, UsageError, build_mesh, launch

from ..configs.setups import error_of
from ..oracle import perceptron, whole
from .test_split_parameters import bare

BIG = 3e38  # in fp32, twice this is infinity


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 6)).square().sum().backward()
    optimizer.step()


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]] = {
    "one cycle": lambda it: lr_scheduler.OneCycleLR(it, max_lr=[0.1, 0.01], total_steps=8),
    "cyclic": lambda it: lr_scheduler.CyclicLR(
        it, base_lr=[0.01, 0.001], max_lr=[0.1, 0.01], step_size_up=2, cycle_momentum=True
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_that_cycle_momentum_move_adamws_first_beta_too(name: str) -> None:
    model = perceptron()
    both = MuonWithAdamW.from_model(model, lr=0.1, adamw_lr=0.01)
    scheduler = SCHEDULERS[name](both)
    seen = []
    for _ in range(3):
        train(model, both)
        scheduler.step()
        seen.append((both.muon.param_groups[0]["momentum"], both.adamw.param_groups[0]["momentum"]))
    assert len(set(seen)) > 1
    train(model, both)
    muons, adamws = seen[-1]
    assert muons == adamws == both.adamw.param_groups[0]["betas"][0]
    assert both.adamw.param_groups[0]["betas"][1] == 0.999


def test_one_learning_rate_serves_both_where_updates_are_of_one_size() -> None:
    own: dict[str, Any] = {"muon": {"weight_decay": 0.0}, "adamw": {"betas": (0.9, 0.95)}}
    both = MuonWithAdamW.from_model(perceptron(), lr=3e-4, **own)
    assert [group["lr"] for group in both.param_groups] == [3e-4, 3e-4]
    assert both.muon.param_groups[0]["adjust_lr_fn"] == "match_rms_adamw"
    assert both.muon.param_groups[0]["weight_decay"] == 0
    assert both.adamw.param_groups[0]["betas"] == (0.9, 0.95)
    apart: tuple[dict[str, Any], ...] = ({"adamw_lr": 3e-4}, {"adamw": {"lr": 3e-4}})
    for its in apart:
        two = MuonWithAdamW.from_model(perceptron(), lr=0.02, **its)
        assert two.defaults["lr"] == 0.02  # which some schedulers ask for
        assert [group["lr"] for group in two.param_groups] == [0.02, 3e-4]
        assert two.muon.param_groups[0]["adjust_lr_fn"] is None


def test_decay_and_betas_are_passed_on_as_adamw_had_them() -> None:
    given: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.05, "decay_vectors": False, "betas": (0.8, 0.95)}
    model = nn.Sequential(nn.Embedding(5, 6), nn.Linear(6, 6))
    both = MuonWithAdamW.from_model(model, **given)
    found = [(group["weight_decay"], group["param_names"]) for group in both.param_groups]
    assert found == [(0.05, ["1.weight"]), (0.05, ["0.weight"]), (0.0, ["1.bias"])]
    assert [group["betas"] for group in both.adamw.param_groups] == [(0.8, 0.95)] * 2
    mixer = bare(up_bias=(4, 6), A_log=(6, 4), log_scale=(6, 6))
    others = {"0": nn.Linear(6, 6, bias=False), "1": nn.LayerNorm([2, 2, 2]), "mixer": mixer}
    flat = MuonWithAdamW.from_model(nn.ModuleDict(others), **given)
    assert [group["weight_decay"] for group in flat.param_groups] == [0.05, 0.0]
    plain = MuonWithAdamW.from_model(model, lr=1e-3)
    assert [group["weight_decay"] for group in plain.param_groups] == [0.1, 0.01]


def test_an_argument_that_is_not_known_is_sent_to_the_one_whose_it_is() -> None:
    with pytest.raises(UsageError, match=r"from_model takes no eps: pass Muon's arguments by muon=\{…\}"):
        MuonWithAdamW.from_model(perceptron(), lr=0.1, eps=1e-8)
    both = MuonWithAdamW.from_model(perceptron(), lr=0.1, adamw={"eps": 1e-6})
    assert both.adamw.param_groups[0]["eps"] == 1e-6


@pytest.mark.parametrize("model", [nn.LayerNorm(4), perceptron().requires_grad_(False)])
def test_a_model_without_hidden_matrices_is_sent_to_adamw(model: nn.Module) -> None:
    said = r"has no hidden matrix for Muon: use torch\.optim\.AdamW, or include_frozen=True if .* frozen"
    with pytest.raises(UsageError, match=said):
        MuonWithAdamW.from_model(model, lr=0.1)


def test_a_model_of_matrices_alone_needs_no_adamw() -> None:
    model = nn.Linear(6, 6, bias=False)
    both = MuonWithAdamW.from_model(model, lr=0.1)
    train(model, both)
    state = both.state_dict()
    both.load_state_dict(state)
    assert set(state["state"]) == {0}


def laid_out(layout: str) -> tuple[nn.Module, MuonWithAdamW]:
    model = perceptron()
    if layout in ("fsdp2", "hsdp"):
        sizes, names = ((2,), ("dp",)) if layout == "fsdp2" else ((2, 1), ("copy", "shard"))
        fully_shard(model, mesh=init_device_mesh("cpu", sizes, mesh_dim_names=names))
        return model, MuonWithAdamW.from_model(model, lr=0.1, adamw_lr=0.01)
    mesh = build_mesh({"dp": 2})
    return model, MuonWithAdamW.from_model(model, lr=0.1, adamw_lr=0.01, strategy=layout, mesh=mesh)


def scaled_steps(
    rank: int, layout: str, scaler_type: type, unscale: bool, overflow_on: tuple[int, ...], clip: bool
) -> tuple[Any, list[list[Tensor]]]:
    """Take a good step, one with infinity on some ranks, and a good step; returns scale and all weights."""
    model, both = laid_out(layout)
    scaler = scaler_type(device="cpu", init_scale=2.0, growth_interval=100)
    found: list[list[Tensor]] = []
    for step in range(3):
        both.zero_grad()
        loss = model(torch.ones(2, 6)).sum()
        if step == 1 and rank in overflow_on:
            loss = loss * BIG
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(both)
        if clip:
            norm = both.ready_gradients(1.0)
            assert norm is not None
            assert norm.isinf() == (step == 1)
        kind, said = error_of(partial(scaler.step, both))
        if kind == "GradientError":
            return said, found
        scaler.update()
        found.append([whole(param.detach()).clone() for param in model.parameters()])
    return scaler.get_scale(), found


Scaled = tuple[str, type, bool, tuple[int, ...], bool]
SKIPPED: list[Scaled] = [
    ("zero1", ShardedGradScaler, True, (1,), False),
    ("zero1", ShardedGradScaler, True, (0, 1), False),
    ("zero1", torch.amp.GradScaler, True, (0, 1), False),
    ("replicated", torch.amp.GradScaler, False, (0, 1), False),
    ("owner", torch.amp.GradScaler, True, (0, 1), False),
    ("fsdp2", torch.amp.GradScaler, False, (1,), False),
    ("hsdp", torch.amp.GradScaler, True, (1,), False),
    ("fsdp2", torch.amp.GradScaler, True, (1,), False),
    ("zero1", ShardedGradScaler, True, (1,), True),
    ("owner", ShardedGradScaler, True, (0, 1), True),
]
REFUSED: dict[Scaled, tuple[int, str]] = {
    ("zero1", torch.amp.GradScaler, True, (1,), False): (1, "found infinity on 1 of 2 ranks"),
    ("zero1", torch.amp.GradScaler, False, (1,), False): (0, "may overflow on one rank alone"),
}
"""The steps taken before the refusal, and the refusal."""
SKIPS_ITSELF = {"zero1": True, "owner": True, "fsdp2": False}


def scaled_without_gradients(rank: int) -> tuple[str, str]:
    """A scaler that found no gradient on any rank gives the optimizer a plain zero."""
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    return error_of(partial(scaler.step, laid_out("owner")[1]))


def scaled_after_a_refusal(rank: int) -> list[list[Any]]:
    """Gradients after scaled steps: one not refused, one repeated, and one with new gradients."""
    found = []
    for backwards in ((0,), (1,), (0, 1)):
        model, both = laid_out("owner")
        scaler = torch.amp.GradScaler("cpu")
        for go in (1, 0) if 1 in backwards else (0,):
            if go in backwards:
                both.zero_grad()
                scaler.scale(model(torch.ones(2, 6)).sum()).backward()
            both.muon.param_groups[0]["momentum"] = 0.9 - rank * go / 2
            assert (error_of(partial(scaler.step, both))[0] == "MismatchError") == go
        found.append([param.grad for param in model.parameters()])
    return found


def clip_zero1(rank: int) -> list[str]:
    """The texts of the errors that torch's clip functions raise, with each ``foreach``."""
    heard = []
    clips: list[Callable[..., Any]] = [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_]
    for clip, foreach in product(clips, (None, True, False)):
        model, both = laid_out("zero1")
        model(torch.ones(2, 6)).square().sum().backward()
        heard.append(error_of(partial(clip, model.parameters(), 1.0, foreach=foreach))[1])
        both.ready_gradients(1.0)
        both.step()
    return heard


def unfreeze_and_clip(rank: int) -> list[str]:
    """Two models take turns, as in a GAN: each is frozen during ``zero_grad()``, and unfrozen before its
    ``backward()``."""
    pairs, heard = [laid_out("zero1") for _ in range(2)], []
    for turn in range(4):
        (model, both), (other, its) = pairs[turn % 2], pairs[1 - turn % 2]
        model.requires_grad_(False)
        its.zero_grad()
        both.zero_grad()
        other.requires_grad_(False)
        model.requires_grad_(True)
        model(torch.ones(2, 6)).square().sum().backward()
        heard.append(error_of(partial(nn.utils.clip_grad_norm_, model.parameters(), 1.0))[0])
        both.step()
    return heard


def end_and_clip(rank: int) -> str:
    """After the optimizer is deleted, its marks on parameters are gone too."""
    model, both = laid_out("zero1")
    del both
    model(torch.ones(2, 6)).square().sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return type(next(model.parameters()).grad).__name__


def save_zero1(rank: int) -> list[str]:
    model, both = laid_out("zero1")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        both.state_dict()  # before the first step there is nothing to lose
        assert not caught
        train(model, both)
        both.state_dict()
        both.state_dict()
    return [str(warning.message) for warning in caught]


def everything(rank: int) -> dict[Any, Any]:
    """All cases in one launch; after each, the ranks can go on together."""
    found: dict[Any, Any] = {case: scaled_steps(rank, *case) for case in (*SKIPPED, *REFUSED)}
    found |= {layout: laid_out(layout)[1]._step_supports_amp_scaling for layout in SKIPS_ITSELF}
    cases = (
        scaled_without_gradients,
        scaled_after_a_refusal,
        clip_zero1,
        unfreeze_and_clip,
        end_and_clip,
        save_zero1,
    )
    return found | {case.__name__: case(rank) for case in cases}


Results = list[dict[Any, Any]]


@pytest.fixture(scope="module")
def results() -> Results:
    return launch(everything, 2, timeout=60)


@pytest.mark.parametrize("case", SKIPPED, ids=str)
def test_all_ranks_skip_a_step_that_overflowed(results: Results, case: Scaled) -> None:
    """All ranks also skip such a step if the gradients were clipped."""
    one, other = (of_rank[case] for of_rank in results)
    assert one[0] == other[0] == 1.0  # halved once
    for weights in (one[1], other[1]):
        assert all(map(torch.equal, weights[0], weights[1]))
        assert not any(map(torch.equal, weights[1], weights[2]))
    assert all(map(torch.equal, one[1][2], other[1][2]))


@pytest.mark.parametrize("layout", SKIPS_ITSELF)
def test_only_plain_gradients_leave_skipping_to_the_step(results: Results, layout: str) -> None:
    """For DTensors the scaler asks all ranks. Lightning refuses to clip if the optimizer skips steps."""
    assert [of_rank[layout] for of_rank in results] == [SKIPS_ITSELF[layout]] * 2


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_a_scaler_that_asks_one_rank_alone_is_refused_on_all(results: Results, case: Scaled) -> None:
    steps, complaint = REFUSED[case]
    for answer, weights in (of_rank[case] for of_rank in results):
        assert complaint in answer
        assert "ShardedGradScaler" in answer
        assert len(weights) == steps


def test_a_scaled_step_without_gradients_is_a_step(results: Results) -> None:
    assert [of_rank["scaled_without_gradients"] for of_rank in results] == [("nothing", "")] * 2


def test_a_scaled_step_that_was_refused_is_unscaled_once(results: Results) -> None:
    for found in results:
        once, repeated, anew = found["scaled_after_a_refusal"]
        assert all(map(torch.equal, once, repeated))
        assert all(map(torch.equal, once, anew))


def test_clipping_what_the_step_has_yet_to_average_is_refused_with_the_remedy(results: Results) -> None:
    """Models that were frozen for a while are no exception. Once the optimizer is gone, torch may clip."""
    for of_rank in results:
        assert len(of_rank["clip_zero1"]) == 6
        assert all("call optimizer.ready_gradients(max_norm)" in said for said in of_rank["clip_zero1"])
        assert of_rank["unfreeze_and_clip"] == ["GradientError"] * 4
        assert of_rank["end_and_clip"] == "Tensor"


def test_saving_one_ranks_slice_warns_once_and_names_the_remedy(results: Results) -> None:
    for [said] in (of_rank["save_zero1"] for of_rank in results):
        assert "save_checkpoint()" in said


def test_schedulers_and_hooks_may_be_put_on_the_two_inside() -> None:
    model = perceptron()
    both, seen = MuonWithAdamW.from_model(model, lr=0.1), []
    schedulers = [torch.optim.lr_scheduler.StepLR(some, 1) for some in (both.muon, both.adamw)]
    for name in ("muon", "adamw"):
        inside = getattr(both, name)
        inside.register_step_pre_hook(lambda its, *_, name=name: seen.append(f"before {name}"))
        inside.register_step_post_hook(lambda its, *_, name=name: seen.append(f"after {name}"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, both)
        for scheduler in schedulers:
            scheduler.step()
    assert seen == ["before muon", "after muon", "before adamw", "after adamw"]


def test_a_first_step_of_what_is_frozen_is_no_cause_for_a_warning() -> None:
    """With ``include_frozen=True``, matrices may be frozen at first, so that only a layer's bias trains."""
    model = perceptron()
    for param in model.parameters():
        param.requires_grad_(param.ndim == 1)
    both = MuonWithAdamW.from_model(model, lr=0.1, include_frozen=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, both)
