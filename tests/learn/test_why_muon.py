"""Lesson 01: its checkers know right from wrong, its promise holds, its widget is drawn everywhere."""

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
from muon_tutorial.learn.pictures.picture import Picture

from .answers import assert_quiz, assert_wrong

STEPS = (0, 3)


@pytest.fixture(scope="module", params=STEPS)
def run(request: pytest.FixtureRequest) -> TrainedGPT:
    return small_gpt.train(request.param, seed=request.param)


def svd_muon(G: Tensor) -> Tensor:
    U, _, Vt = torch.linalg.svd(G, full_matrices=False)
    return U @ Vt


def with_full_matrices(G: Tensor) -> Tensor:
    U, _, Vt = torch.linalg.svd(G)
    return U[:, : Vt.shape[0]] @ Vt


def wrongly_transposed(G: Tensor) -> Tensor:
    U, _, Vt = torch.linalg.svd(G, full_matrices=False)
    return U @ Vt.T


WRONG: list[tuple[Callable[[Tensor], Any], str]] = [
    (lambda G: G, "This is G itself"),
    (lambda G: -svd_muon(G), "sign"),
    (lambda G: G / G.norm(), "all of them should be 1"),
    (lambda G: 2 * svd_muon(G), "go from 2.00 to 2.00"),
    (lambda G: svd_muon(G).T, "so must its update be"),
    (lambda G: torch.linalg.svd(G, full_matrices=False), "must return a matrix"),
    (wrongly_transposed, "transposed already"),
    (with_full_matrices, "RuntimeError"),
    (lambda G: torch.eye(64) @ G, "Here G is 6 × 4, U is 6 × 4, and Vt is 4 × 4."),
    (lambda G: None, "returns nothing. Is there a return?"),
    (lambda G: svd_muon(G + 1), "its directions are not those of G"),
]


@pytest.mark.parametrize(("function", "says"), WRONG)
def test_wrong_updates_are_told_what_is_wrong_with_them(function: Callable[[Tensor], Any], says: str) -> None:
    assert_wrong(why_muon.write_muon(), function, says)


def test_u_vt_passes_and_the_stub_is_open() -> None:
    assert why_muon.write_muon().check(svd_muon)
    assert why_muon.write_muon().check(lambda G: ...).passed is None


SPECTRA = [((9.0, 1.0, 1.0, 1.0), 1), ((1.0, 1.0, 1.0, 1.0), 2), ((3.0, 2.0, 2.0, 2.0), 2)]


@pytest.mark.parametrize(("spectrum", "half"), SPECTRA)
def test_the_guess_counts_the_directions_with_half_of_the_energy(
    spectrum: tuple[float, ...], half: int
) -> None:
    G = torch.diag(torch.tensor(spectrum, dtype=torch.float64))
    guess = why_muon.guess_half(G)
    assert guess.check(half)
    assert_wrong(guess, half + 1, "Fewer will do")
    for odd in (0, 5, 1.5, "two"):
        assert_wrong(guess, odd, "whole number from 1 to 4")
    if half > 1:
        assert_wrong(guess, half - 1, "It takes more: the loudest 1 carry")


def test_the_quiz_knows_right_from_wrong(run: TrainedGPT) -> None:
    G = run.gradients[why_muon.EXAMPLE]
    S = torch.linalg.svdvals(G)
    _, rest = split_parameters(run.model)
    right = {"sum": 64, "times": (S[0] / S.median()).item(), "left_out": sum(p.numel() for _, p in rest)}
    wrong = {"sum": (1, "adds 1"), "times": (1, "S.median"), "left_out": (98_304, "rest")}
    assert_quiz(why_muon.quiz(run, G), right, wrong)


def test_no_update_promises_more_than_the_exact_one_and_a_small_step_keeps_it(run: TrainedGPT) -> None:
    drops = why_muon.loss_drops(run, svd_muon)
    best = drops["Muon, exact"].promised
    assert all(drop.promised <= best * (1 + 1e-5) for drop in drops.values())
    assert all(abs(drop.measured - drop.promised) < 0.1 * best for drop in drops.values())


def test_training_gives_the_same_bits_again_on_any_number_of_threads() -> None:
    threads = torch.get_num_threads()
    one = small_gpt.train(2, 0)
    torch.set_num_threads(threads + 1)
    two = small_gpt.train(2, 0)
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)
    assert all(torch.equal(one.gradients[name], two.gradients[name]) for name in one.gradients)


def test_its_pictures_say_what_they_show(run: TrainedGPT) -> None:
    G = run.gradients[why_muon.EXAMPLE]
    drawn: list[tuple[Picture, str]] = [
        (why_muon.picture_of_circle(), "both have length 1"),
        (why_muon.picture_of_gradient(G), "carry half of the energy"),
        (
            why_muon.picture_of_all_updates(run, svd_muon),
            "Muon, exact: loudest 1, median 1, quietest 1",
        ),
        (
            why_muon.picture_of_drops(why_muon.loss_drops(run, svd_muon)),
            "SGD: promised 1.00",
        ),
        (why_muon.picture_of_rows(run), "Lengths of the embedding update's rows"),
    ]
    for picture, says in drawn:
        assert says in picture.alt
        assert picture.width <= 900
