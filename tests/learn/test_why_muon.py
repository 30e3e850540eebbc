"""Lesson 01: its checkers tell right from wrong, its promise holds, and its race is the recorded one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from muon_tutorial import split_parameters
from muon_tutorial.learn import why_muon
from muon_tutorial.learn.inputs import small_gpt
from muon_tutorial.learn.inputs.small_gpt import TrainedGPT
from muon_tutorial.learn.why_muon.exercises import SLIPS, slipped
from muon_tutorial.learn.why_muon.race import RACERS

from .answers import PASSES, assert_quiz, judged

STEPS = (0, 3)


@pytest.fixture(scope="module", params=STEPS)
def run(request: pytest.FixtureRequest) -> TrainedGPT:
    return small_gpt.train(request.param, seed=request.param)


def u_vt(G: Tensor) -> Tensor:
    U, _, Vt = torch.linalg.svd(G, full_matrices=False)
    return U @ Vt


def right_update(G: Tensor, buffer: Tensor, momentum: float = 0.95) -> Tensor:
    buffer.mul_(momentum).add_(G, alpha=1 - momentum)
    return u_vt((1 - momentum) * G + momentum * buffer)


WRONG: list[tuple[Callable[[Tensor, Tensor], Any], str]] = [
    (right_update, PASSES),
    (why_muon.svd_update, PASSES),
    (lambda G, buffer: u_vt(G), "U Vᵀ of G alone, because the buffer has not changed"),
    (lambda G, buffer: u_vt(G.lerp(buffer.lerp(G, 0.05), 0.95)), "in place: lerp makes a new matrix"),
    (lambda G, buffer: u_vt(buffer.lerp_(G, 0.05)), "Nesterov is missing"),
    (lambda G, buffer: -right_update(G, buffer), "sign"),
    (lambda G, buffer: G.lerp(buffer.lerp_(G, 0.05), 0.95), "the average itself"),
    (lambda G, buffer: u_vt(G + 0.95 * buffer.mul_(0.95).add_(G)), "20 times too large"),
    (lambda G, buffer: u_vt(G).lerp(buffer.lerp_(u_vt(G), 0.05), 0.95), "averaged after orthogonalizing"),
    (lambda G, buffer: u_vt(G.lerp(buffer.lerp_(G, 0.5), 0.95)), "0.95 × the old buffer + 0.05 × G"),
    (lambda G, buffer: G / G.norm(), "all of them should be 1"),
    (lambda G, buffer: 2 * right_update(G, buffer), "go from 2.00 to 2.00"),
    (lambda G, buffer: u_vt(G).T, "so must its update be"),
    (lambda G, buffer: torch.linalg.svd(G), "must return a matrix"),
    (lambda G, buffer: torch.eye(64) @ G, "Here G is 4 × 6."),
    (lambda G, buffer: None, "returns nothing. Is there a return?"),
    (lambda G, buffer: u_vt(G.lerp_(buffer.lerp_(G, 0.05), 0.95)), "has changed G itself"),
]


ADD = "W.add_(update, alpha=-lr * factor)"
WHOLE_STEPS: list[tuple[Callable[..., object], str]] = [
    (why_muon.muon_step, PASSES),
    *((slipped(*changes), what) for what, (_, *changes) in SLIPS.items()),
    (slipped(("buffer.lerp_(G, 1 - momentum)", "buffer.mul_(momentum).add_(G)")), "sum of gradients"),
    (slipped(("W.mul_(1 - lr * weight_decay)", "pass"), (ADD, "W = W - lr * update")), "W has not changed"),
    (lambda W, G, buffer, lr, *more: W.mul_(2), "The buffer has not changed"),
    (slipped(("G.lerp(", "G.lerp_(")), "has changed G itself"),
    (lambda W, G, buffer, lr, *more: why_muon.muon_step(W, G, buffer, lr), "use momentum and weight_decay"),
    (slipped((ADD, "W.sub_(lr * factor * update)")), "Right except for the last bits"),
    (lambda W, G, buffer, lr, *more: W.add_(1) + buffer.add_(1), "W is off by up to"),
    (lambda W: W, "TypeError"),
]


@pytest.mark.parametrize("seed", [0, 1])
def test_a_model_that_the_reader_steps_has_torchs_losses(seed: int) -> None:
    mine = why_muon.train_with(why_muon.muon_step, 3, seed)
    assert mine == why_muon.train_with(None, 3, seed)
    assert mine != why_muon.train_with(slipped((" * factor", "")), 3, seed)


def sorted_by(is_hidden: Callable[[str, Tensor], bool]) -> Callable[[torch.nn.Module], Any]:
    def split(model: torch.nn.Module) -> tuple[list[str], list[str]]:
        named = list(model.named_parameters())
        return [n for n, p in named if is_hidden(n, p)], [n for n, p in named if not is_hidden(n, p)]

    return split


SPLITS: list[tuple[Callable[[torch.nn.Module], Any], str]] = [
    (sorted_by(lambda name, p: p.dim() == 2 and name.startswith("blocks.")), PASSES),
    (
        sorted_by(lambda name, p: p.dim() == 2),
        "Muon got embedding.weight, head.weight, but only",
    ),
    (sorted_by(lambda name, p: name.startswith("blocks.")), "a vector has no directions"),
    (sorted_by(lambda name, p: "attention." in name), "AdamW got blocks.0.mlp.down.weight"),
    (lambda model: why_muon.split(model)[::-1], "changed places"),
    (lambda model: (why_muon.split(model)[0], []), "Neither list has blocks.0.attention_norm.weight"),
    (
        lambda model: (why_muon.split(model)[0], [*why_muon.split(model)[0], *why_muon.split(model)[1]]),
        "Both lists have",
    ),
    (lambda model: (["q"], []), "There is no parameter q"),
    (lambda model: None, "Return two lists"),
]


PROMISES: list[tuple[Callable[[Tensor, Tensor], Any], str]] = [
    (lambda G, update: torch.tensor(1.25), "For a gradient of 3 × 5: 1.25, where 0.6773 is right"),
]


test_an_answer_passes_or_is_told_what_is_wrong_with_it = judged(
    (why_muon.write_promise, PROMISES),
    (lambda: why_muon.write_split(small_gpt.train(0, seed=0).model), SPLITS),
    (why_muon.write_update, WRONG),
    (why_muon.write_step, WHOLE_STEPS),
)


def test_the_quiz_knows_right_from_wrong(run: TrainedGPT) -> None:
    G = run.gradients[why_muon.EXAMPLE]
    S = torch.linalg.svdvals(G)
    _, rest = split_parameters(run.model)
    times, left_out = (S[0] / S.median()).item(), sum(p.numel() for _, p in rest)
    assert_quiz(why_muon.quiz(run, G), {"sum": 64, "times": times, "factor": 2, "left_out": left_out})


def test_no_update_promises_more_than_the_exact_one_and_a_small_step_keeps_it(run: TrainedGPT) -> None:
    drops = why_muon.loss_drops(run, why_muon.svd_muon)
    best = drops["Muon, exact"].promised
    assert all(drop.promised <= best * (1 + 1e-5) for drop in drops.values())
    assert all(abs(drop.measured - drop.promised) < 0.1 * best for drop in drops.values())


def test_an_erased_byte_changes_other_rows_of_muons_update_alone(run: TrainedGPT) -> None:
    rows = why_muon.erase_a_byte(run)
    assert rows.changes["SGD"].max() == rows.changes["Adam"].max() == 0
    assert rows.changes["Muon"].median() > 0.01
    assert "Muon  median" in why_muon.say_rows(rows)


def test_training_gives_the_same_bits_again_on_any_number_of_threads() -> None:
    threads = torch.get_num_threads()
    one = small_gpt.train(2, 0)
    torch.set_num_threads(threads + 1)
    two = small_gpt.train(2, 0)
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)
    assert all(torch.equal(one.gradients[name], two.gradients[name]) for name in one.gradients)
    assert all(torch.equal(one.momenta[name], two.momenta[name]) for name in one.momenta)


def test_a_lane_can_be_run_anew_and_begins_where_the_recording_does() -> None:
    race = why_muon.recorded_race()
    lanes = [why_muon.run_lane(who, 0.02, 0.005, 2, seed=0) for who in RACERS]
    assert len({lane.losses for lane in lanes}) == 1  # the losses are measured only before the first step
    assert lanes[0].losses[0] == pytest.approx(race.best("Muon").losses[0], abs=0.2)
