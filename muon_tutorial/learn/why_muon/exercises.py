"""Exercises of lesson 01: write Muon with an SVD, guess the energy of directions, and the quiz."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import split_parameters
from ..exercises.judge import Exercise, numbers, value_of
from ..inputs.small_gpt import TrainedGPT
from .updates import Orthogonalize, energy_shares, half_of_energy, say_size, svd_muon


def write_muon() -> Exercise:
    """The exercise: U Vᵀ, for wide, tall and square matrices."""

    def judge(function: Orthogonalize) -> str | None:
        generator = torch.Generator().manual_seed(0)
        for shape in ((6, 4), (4, 6), (5, 5)):
            G = torch.randn(shape, generator=generator)
            U, _, Vt = torch.linalg.svd(G, full_matrices=False)
            sizes = f"Here G is {say_size(G)}, U is {say_size(U)}, and Vt is {say_size(Vt)}."
            if wrong := _judge_muon(G, value_of(function, G.clone(), told=f"{{}} {sizes}")):
                return wrong
        return None

    hints = (
        "torch.linalg.svd has taken G apart into U, S and Vt. Leave S out when you multiply them again.",
        "Vt is Vᵀ already. Two matrices and one @ are enough.",
    )
    return Exercise(judge, hints, "Same directions, every singular value 1. This is what Muon aims at.")


def _judge_muon(G: Tensor, value: object) -> str | None:
    if value is None:
        return "The function returns nothing. Is there a return?"
    if not isinstance(value, Tensor):
        return f"The function must return a matrix; it returned {type(value).__name__}."
    if value.shape != G.shape:
        return f"G is {say_size(G)}, and so must its update be. Yours is {say_size(value)}."
    wanted = svd_muon(G)
    if torch.allclose(value, wanted, atol=1e-4):
        return None
    values = torch.linalg.svdvals(value)
    if torch.allclose(value, -wanted, atol=1e-4):
        return "The sign is turned round: it would climb. W - lr * update does the minus already."
    if torch.allclose(value, G, atol=1e-4):
        return "This is G itself, its singular values as they were."
    if (values - 1).abs().max() > 1e-3:
        return f"Its singular values go from {values[-1]:.2f} to {values[0]:.2f}; all of them should be 1."
    U, _, Vt = torch.linalg.svd(G, full_matrices=False)
    if Vt.shape[0] == Vt.shape[1] and torch.allclose(value, U @ Vt.T, atol=1e-4):
        return "Vt is transposed already. U @ Vt.T turns it round once more."
    return "All its singular values are 1, but its directions are not those of G."


def guess_half(G: Tensor) -> Exercise:
    """The prediction: how many directions carry half of the energy?"""
    energy, right = energy_shares(G), half_of_energy(G)

    def judge(half: object) -> str | None:
        if not isinstance(half, int) or not 1 <= half <= len(energy):
            return f"Give a whole number from 1 to {len(energy)}."
        if half == right:
            return None
        word = "Fewer will do" if half > right else "It takes more"
        return f"{word}: the loudest {half} carry {energy[half - 1]:.1%} of the energy."

    loud = f"The loudest {right} of {len(energy)} carry {energy[right - 1]:.0%} of the energy."
    return Exercise(judge, ("Most gradients are more one-sided than one thinks.",), loud)


def quiz(run: TrainedGPT, G: Tensor) -> Exercise:
    """Three numbers that the notebook has measured."""
    S = torch.linalg.svdvals(G)
    _, rest = split_parameters(run.model)
    expected = {
        "sum": float(len(S)),
        "times": (S[0] / S.median()).item(),
        "left_out": sum(parameter.numel() for _, parameter in rest),
    }
    why = {
        "sum": "Each direction adds 1. Try torch.linalg.svdvals(orthogonalize(G)).sum(), or count them.",
        "times": "Divide S[0] by S.median().",
        "left_out": "Add up parameter.numel() over rest, not over hidden.",
    }
    return numbers(expected, why, within=0.01)
