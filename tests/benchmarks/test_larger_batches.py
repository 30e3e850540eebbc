"""The table over batches says what its readings do, whatever the machine's speed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from muon_tutorial.benchmarks.contender_costs import Seconds
from muon_tutorial.benchmarks.contenders import Work
from muon_tutorial.benchmarks.larger_batches import batches_table, read_batches
from muon_tutorial.benchmarks.measured import AGAINST, Readings
from muon_tutorial.training.gpt import GPTShape

NAME = "Muon zero1, DP=4"


@pytest.fixture(scope="module")
def found() -> dict[int, Readings]:
    with pytest.MonkeyPatch.context() as patch:  # DDP's constructor fails under DETAIL
        patch.setenv("TORCH_DISTRIBUTED_DEBUG", "OFF")
        return read_batches(Work(GPTShape(1, 32, 4, 16), 8), rounds=2, sequences=(4, 8), names=(NAME,))


@pytest.mark.live
def test_it_has_a_row_for_each_batch_from_real_ranks(found: dict[int, Readings]) -> None:
    rows = batches_table(found, 16, "a command").rows
    assert [(row[0], row[1], row[2]) for row in rows] == [
        (NAME, AGAINST[NAME], 64),
        (NAME, AGAINST[NAME], 128),
    ]
    assert all(isinstance(row[8], float) and 0 < row[8] < 1 for row in rows)


@pytest.mark.live
def test_ratios_are_of_the_slowest_rank_within_a_round(found: dict[int, Readings]) -> None:
    """Known seconds in place of read ones: 2, 9 and 4 against 1, 3 and 1."""

    def timed(readings: Readings, name: str, slow: tuple[float, ...]) -> Readings:
        fast = Seconds((0.25,) * 3, (0.25,) * 3, (0.0,) * 3)
        late = Seconds(tuple(s / 4 for s in slow), tuple(s * 3 / 4 for s in slow), (0.0,) * 3)
        ranks = [replace(r, seconds=late if i == 1 else fast) for i, r in enumerate(readings[name])]
        return {**readings, name: ranks}

    known = timed(timed(found[4], NAME, (2.0, 9.0, 4.0)), AGAINST[NAME], (1.0, 3.0, 1.0))
    row = batches_table({4: known}, 16, "a command").rows[0]
    assert row[3:6] == (4000.0, 1000.0, 3.0)
    assert row[8] == 3 / 4
