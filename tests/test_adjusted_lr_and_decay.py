"""The elementwise math gives the same bits under any number of threads, and refuses what does not fit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from muon_tutorial.adjusted_lr_and_decay import ShardRange, adjusted_lr, decay_and_add
from muon_tutorial.errors import UsageError

LR, WEIGHT_DECAY = 0.02, 0.1


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def laid_out_update(rows: int, columns: int, seed: int) -> Tensor:
    """Return a bf16 update in Newton–Schulz's memory layout: column-major if tall."""
    if rows > columns:
        return normal(columns, rows, seed=seed, dtype=torch.bfloat16).T
    return normal(rows, columns, seed=seed, dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("seed", range(6))
def test_pieces_have_one_threads_bits_under_any_number_of_threads(seed: int) -> None:
    shape = (283, 290)  # 20 full blocks, which 3 threads would cut within a vector
    whole, update = normal(*shape, seed=seed, dtype=torch.bfloat16), laid_out_update(*shape, seed=seed + 100)
    expected = whole.clone()
    decay_and_add(expected, update, LR, LR, WEIGHT_DECAY)
    torch.set_num_threads(3)
    decay_and_add(whole, update, LR, LR, WEIGHT_DECAY, ShardRange.whole(shape))
    assert torch.equal(whole, expected)


@pytest.mark.parametrize(
    ("offset", "shape", "start", "stop"),
    [((0, 2), (4, 5), 0, 1), ((-1, 0), (2, 2), 0, 1), ((0, 0), (4, 6), 3, 2), ((0, 0), (4, 6), 0, 25)],
)
def test_a_piece_outside_its_matrix_is_refused(offset, shape, start: int, stop: int) -> None:
    with pytest.raises(UsageError, match="no such range"):
        ShardRange((4, 6), offset, shape, start, stop)


def test_sizes_that_differ_and_unknown_adjustments_are_refused() -> None:
    with pytest.raises(UsageError, match="differ in size"):
        decay_and_add(torch.zeros(3), torch.zeros(3), LR, LR, WEIGHT_DECAY, ShardRange.whole((2, 2)))
    with pytest.raises(UsageError, match="got 'keller'"):
        adjusted_lr(0.1, "keller", (2, 2))
