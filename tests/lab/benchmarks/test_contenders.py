"""Every contender sends exactly the computed bytes, and known seconds give the right table over batches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from muon_tutorial.evidence import formulas
from muon_tutorial.launching.launch import launch
from muon_tutorial.training.gpt import GPTShape
from scripts.lab.benchmarks.contender_costs import ContenderCost, read_contenders
from scripts.lab.benchmarks.contenders import AGAINST, CONTENDERS, Workload
from scripts.lab.benchmarks.measured import Costs, batches_table
from scripts.lab.kernel_counters import tcp_sent

WORK = Workload(GPTShape(layers=1, width=32, heads=4, context=8), batch=4)
ELEMENTS = 32 * 32 * 12 + 2 * 32 + 2 * 256 * 32 + 32
MATRICES = 32 * 32 * 12


@pytest.fixture(scope="module")
def costs() -> dict[str, list[ContenderCost]]:
    """The measurements of each of four ranks, by contender."""
    with pytest.MonkeyPatch.context() as patch:  # the checks of DETAIL would send bytes
        patch.setenv("TORCH_DISTRIBUTED_DEBUG", "OFF")
        by_rank = launch(read_contenders, 4, args=(list(CONTENDERS), WORK, 1), timeout=60)
    return {name: [ranks[i] for ranks in by_rank] for i, name in enumerate(CONTENDERS)}


@pytest.mark.skipif(tcp_sent() is None, reason="only Linux counts a socket's bytes")
@pytest.mark.parametrize("name", CONTENDERS)
def test_what_was_asked_for_is_what_the_kernel_sent(costs: dict[str, list[ContenderCost]], name: str) -> None:
    for cost in costs[name]:
        assert cost.tcp == cost.wire.tcp


def test_ddp_and_fsdp2_send_what_their_formulas_say(costs: dict[str, list[ContenderCost]]) -> None:
    ddp, fsdp2 = costs["AdamW, DDP, DP=4"], costs["AdamW, FSDP2, DP=4"]
    assert [cost.asked.ring for cost in ddp] == [formulas.ddp_adamw(4, ELEMENTS, 4)] * 4
    outside = 2 * 256 * 32 + 32  # embedding, head and last norm stay gathered between forward and backward
    due = formulas.fsdp2_adamw(4, ELEMENTS, 4, 4) - formulas.rho(4) * outside * 4
    assert [cost.asked.ring for cost in fsdp2] == [due] * 4


def test_muon_keeps_half_of_adamws_state_for_each_matrix(costs: dict[str, list[ContenderCost]]) -> None:
    adamw = costs["AdamW, DDP, DP=4"][0].memory.matrix_state
    assert adamw == 8 * MATRICES
    assert costs["torch.optim.Muon, DDP, DP=4"][0].memory.matrix_state * 2 == adamw
    sliced = [cost.memory.matrix_state for cost in costs["Muon zero1, DP=4"]]
    assert sum(sliced) * 2 == adamw


def test_ratios_are_of_the_slowest_rank_within_a_round(costs: dict[str, list[ContenderCost]]) -> None:
    """Known seconds replace measured seconds: Muon's rounds take 2, 9 and 4 s, AdamW's take 1, 3 and 1 s."""
    name = "Muon zero1, DP=4"

    def timed(name: str, slow: tuple[float, ...]) -> Costs:
        ranks = [replace(cost, learn=(0.25,) * 3, finish=(0.25,) * 3) for cost in costs[name]]
        late = tuple(s / 4 for s in slow), tuple(s * 3 / 4 for s in slow)
        ranks[1] = replace(ranks[1], learn=late[0], finish=late[1])
        return {name: ranks}

    known = timed(name, (2.0, 9.0, 4.0)) | timed(AGAINST[name], (1.0, 3.0, 1.0))
    [row] = batches_table({4: known}, 16, "a command").rows
    assert (row["contender"], row["against"], row["tokens in the batch"]) == (name, AGAINST[name], 64)
    assert (row["step ms"], row["AdamW's step ms"], row["whole step"]) == (4000.0, 1000.0, 3.0)
    assert row["optimizer's share"] == 3 / 4
