"""A walk without data predicts a real step's peak of memory, and the memory that each strategy keeps."""

from __future__ import annotations

import pytest
import torch

from muon_tutorial import Grid, Matrix, Shard, launch
from muon_tutorial.evidence.memory import PeakMemory, plan_memory, tensor_bytes
from scripts.lab.benchmarks.measured import AFTER, VARIANTS, read_peaks

from ..exhaustive import left_out

MATRICES = [Matrix(i, f"m{i}", (64, 128), (("tp", Shard(i % 2)),)) for i in range(6)]
ELEMENTS = 6 * 64 * 128
CAP = 70_000


@pytest.mark.parametrize("grid", [left_out(Grid.of(dp=4)), Grid.of(dp=2, tp=2)], ids=str)
def test_the_predicted_peak_is_the_measured_one(grid: Grid) -> None:
    """A backend may free a buffer a moment late, so the measured peak may be larger by the largest buffer."""
    for rank, peaks in enumerate(launch(read_peaks, 4, args=(MATRICES, grid, CAP))):
        for name, peak in peaks.items():
            plan = VARIANTS[name](MATRICES, grid, round_bytes=CAP)
            held = plan_memory(plan, grid.at(rank))
            spare = max(held.flat_gradient, held.gathered)
            assert set(peak.predicted) == set(peak.measured) >= {AFTER}
            for phase, predicted in peak.predicted.items():
                assert predicted <= peak.measured[phase] <= predicted + spare, (name, phase)


@pytest.mark.parametrize("name", VARIANTS)
def test_momentum_is_half_of_adamws_moments_or_a_slice_of_that(name: str) -> None:
    grid = Grid.of(dp=4)
    plan = VARIANTS[name](MATRICES, grid)
    kept = [plan_memory(plan, grid.at(rank)).momentum for rank in grid.ranks]
    copies = 1 if plan.expects == "local" else 4
    assert sum(kept) == copies * 4 * ELEMENTS  # AdamW: 8 bytes an element


def test_gathering_all_holds_two_bytes_of_every_element_of_a_bucket() -> None:
    grid = Grid.of(dp=4)
    whole = plan_memory(VARIANTS["zero1, gather all"](MATRICES, grid), grid.at(0))
    edges = plan_memory(VARIANTS["zero1, boundary"](MATRICES, grid), grid.at(0))
    assert whole.gathered == 2 * ELEMENTS
    assert edges.gathered < whole.gathered


def test_a_storage_counts_once_while_it_lives() -> None:
    with PeakMemory() as seen:
        a = torch.zeros(100)
        b = a.view(10, 10)
        assert seen.now == 400
        del a
        assert seen.now == 400
        del b
        assert seen.now == 0
        torch.ones(50) + torch.ones(50)
    assert (seen.now, seen.peak) == (0, 600)


def test_meta_tensors_count_as_if_they_were_real() -> None:
    with PeakMemory() as seen:
        torch.empty(1 << 40, device="meta", dtype=torch.bfloat16)
    assert seen.peak == 1 << 41


def test_tensor_bytes_counts_local_parts() -> None:
    assert tensor_bytes([torch.zeros(3), torch.zeros(2, dtype=torch.bfloat16)]) == 16
