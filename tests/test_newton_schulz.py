"""Newton–Schulz: a batch gives its members' bits, other coefficients work, and bad input is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from muon_tutorial.errors import UsageError
from muon_tutorial.evidence.memory import PeakMemory
from muon_tutorial.newton_schulz import (
    CANS,
    KELLER_JORDAN,
    POLAR_EXPRESS,
    YOU_JIACHENG,
    coefficients_per_step,
    with_safety,
    zeropower_via_newtonschulz,
)

SHAPES = [
    *[(1, 1), (1, 7), (9, 1), (2, 3), (8, 8), (16, 48)],
    *[(48, 16), (37, 53), (65, 33), (64, 64), (100, 300)],
]
SCHEDULES = {"you_jiacheng": YOU_JIACHENG, "polar_express": with_safety(POLAR_EXPRESS, 1.01), "cans": CANS}


def matrix(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(("shape", "members"), [*((shape, 3) for shape in SHAPES), ((16, 16), 300)], ids=str)
def test_a_batch_is_its_members_one_by_one(shape: tuple[int, int], members: int) -> None:
    # torch.baddbmm would round five of the 300 members differently from torch.addmm.
    G = torch.stack([matrix(*shape, seed=seed) * 10 ** (seed % 3) for seed in range(members)])
    batched = zeropower_via_newtonschulz(G)
    assert torch.equal(batched, torch.stack([zeropower_via_newtonschulz(member) for member in G]))


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 4, 3), (2, 0, 3)], ids=str)
def test_empty_input_gives_empty_output(shape: tuple[int, ...]) -> None:
    assert zeropower_via_newtonschulz(torch.zeros(shape)).shape == shape


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_bring_singular_values_near_one(name: str) -> None:
    # Singular values go down to 1e-2 of the largest. The bounds are the schedules' own, plus bf16 rounding.
    basis, _ = torch.linalg.qr(matrix(32, 32))
    G = basis @ torch.diag(torch.logspace(0, -2, 32)) @ torch.linalg.qr(matrix(48, 32, seed=1))[0].T
    values = torch.linalg.svdvals(zeropower_via_newtonschulz(G, 5, SCHEDULES[name]).float())
    assert values.max() < 1.2
    assert values.min() > 0.8


def test_a_safety_factor_is_positive() -> None:
    with pytest.raises(UsageError, match="positive"):
        with_safety(CANS, 0.0)


@pytest.mark.parametrize(
    ("G", "says"),
    [
        (torch.zeros(3), "shape (3,)"),
        (torch.zeros(1, 2, 3, 4), "shape (1, 2, 3, 4)"),
        (torch.zeros(2, 2, dtype=torch.complex64), "complex"),
        (torch.zeros(2, 2).to_sparse(), "sparse"),
    ],
    ids=["vector", "4-D", "complex", "sparse"],
)
def test_other_than_matrices_are_refused(G: Tensor, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        zeropower_via_newtonschulz(G)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("coefficients", "steps", "says"),
    [
        (KELLER_JORDAN, 100, "0 to 99 steps, got 100"),
        (KELLER_JORDAN, -1, "got -1"),
        (YOU_JIACHENG, 4, "got 5 for 4 steps"),
        ((1.0, 2.0), 5, "three numbers"),
        (((1.0, 2.0, 3.0), (1.0, 2.0)), 2, "three numbers"),
        ((), 5, "got 0 for 5 steps"),
        ("abc", 5, "three numbers"),
    ],
)
def test_coefficients_that_do_not_fit_are_refused(coefficients, steps: int, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        coefficients_per_step(coefficients, steps)


@pytest.mark.parametrize("shape", [(128, 128), (96, 384), (384, 96)], ids=str)
def test_temporary_bytes_are_no_more_than_torchs(shape: tuple[int, int]) -> None:
    G = matrix(*shape)
    theirs = made_bytes(lambda: _zeropower_via_newtonschulz(G, KELLER_JORDAN, 5, 1e-7))
    ours = made_bytes(lambda: zeropower_via_newtonschulz(G))
    assert ours.peak <= theirs.peak
    assert ours.total < theirs.total / 2  # freed memory is reused, not allocated again


@dataclass(eq=False)
class Made(PeakMemory):
    """Counts, in addition to the peak, all bytes that were ever allocated."""

    total: int = 0

    def add(self, tensor: Tensor) -> None:
        before = self.now
        super().add(tensor)
        self.total += self.now - before


def made_bytes(run: Callable[[], object]) -> Made:
    mode = Made()
    with mode:
        run()
    return mode
