"""The table over batches shows its costs, at any speed of the machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from muon_tutorial.training.gpt import GPTShape
from scripts.lab.benchmarks.contender_costs import ContenderSeconds
from scripts.lab.benchmarks.contenders import Workload
from scripts.lab.benchmarks.measured import AGAINST, Costs, batches_table, read_batches

NAME = "Muon zero1, DP=4"


@pytest.fixture(scope="module")
def found() -> dict[int, Costs]:
    with pytest.MonkeyPatch.context() as patch:  # DDP's constructor fails under DETAIL
        patch.setenv("TORCH_DISTRIBUTED_DEBUG", "OFF")
        return read_batches(Workload(GPTShape(1, 32, 4, 16), 8), rounds=2, sequences=(4, 8), names=(NAME,))


@pytest.mark.live
def test_it_has_a_row_for_each_batch_from_real_ranks(found: dict[int, Costs]) -> None:
    rows = batches_table(found, 16, "a command").rows
    told = [(row["contender"], row["against"], row["tokens in the batch"]) for row in rows]
    assert told == [(NAME, AGAINST[NAME], 64), (NAME, AGAINST[NAME], 128)]
    for row in rows:
        share = row["optimizer's share"]
        assert isinstance(share, float)
        assert 0 < share < 1


@pytest.mark.live
def test_ratios_are_of_the_slowest_rank_within_a_round(found: dict[int, Costs]) -> None:
    """With known seconds instead of measured ones: 2, 9 and 4 against 1, 3 and 1."""

    def timed(costs: Costs, name: str, slow: tuple[float, ...]) -> Costs:
        fast = ContenderSeconds((0.25,) * 3, (0.25,) * 3, (0.0,) * 3)
        late = ContenderSeconds(tuple(s / 4 for s in slow), tuple(s * 3 / 4 for s in slow), (0.0,) * 3)
        ranks = [replace(r, seconds=late if i == 1 else fast) for i, r in enumerate(costs[name])]
        return {**costs, name: ranks}

    known = timed(timed(found[4], NAME, (2.0, 9.0, 4.0)), AGAINST[NAME], (1.0, 3.0, 1.0))
    row = batches_table({4: known}, 16, "a command").rows[0]
    assert (row["step ms"], row["AdamW's step ms"], row["whole step"]) == (4000.0, 1000.0, 3.0)
    assert row["optimizer's share"] == 3 / 4
