"""A step in the model's own memory, without flat copies of gradients and parameters, gives the same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from muon_tutorial import STRATEGIES, Grid, Matrix, Plan, Shard, zeropower_via_newtonschulz
from muon_tutorial.engine.collective import Collective
from muon_tutorial.evidence.memory import PeakMemory
from muon_tutorial.evidence.predict import step_over_ones
from muon_tutorial.worlds.shadow import walk_alone

from ..oracle import UNEVEN, assert_alike, assert_own_parts, seated, single_process, whole_gradients

STAYING = ("replicated", "round_robin", "owner", "owner_per_replica")
WIRE = 2  # bytes of a bfloat16
GRIDS = [Grid.of(dp=dp, tp=tp) for dp, tp in ((1, 1), (3, 1), (2, 2))]
META = torch.device("meta")
every_staying = pytest.mark.parametrize("strategy", STAYING)


def column_major(tensor: Tensor) -> Tensor:
    return tensor.T.contiguous().T


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("strategy", [*STAYING, "zero1"])
def test_the_order_of_memory_changes_no_bit(strategy: str, grid: Grid, dtype: torch.dtype) -> None:
    case = replace(UNEVEN, dtype=dtype)
    ranks = seated(grid, strategy, case)
    for param in (param for params in ranks.params for param in params):
        param.data = column_major(param.data)
    for grads in whole_gradients(case):
        ranks.give(grads)
        for param in (param for params in ranks.params for param in params):
            param.grad = None if param.grad is None else column_major(param.grad)
        ranks.step()
    assert_own_parts(ranks.params, single_process(case), case, grid)


@pytest.mark.parametrize("max_norm", [None, 0.5, 1e9])
@every_staying
def test_the_models_gradients_are_not_written_to(strategy: str, max_norm: float | None) -> None:
    ranks, gradients = seated(Grid.of(dp=2, tp=2), strategy), next(whole_gradients(UNEVEN))
    ranks.give(gradients)
    before = [[None if p.grad is None else p.grad.clone() for p in params] for params in ranks.params]
    ranks.ready(max_norm=max_norm)
    ranks.step()
    for params, kept in zip(ranks.params, before, strict=True):
        for param, grad in zip(params, kept, strict=True):
            assert param.grad is not None
            assert grad is not None
            assert torch.equal(param.grad, grad)


def test_a_clipped_step_of_gram_is_the_step_of_the_clipped_gradients() -> None:
    """``test_step`` compares the other strategies with the single process."""
    grid, gradients = Grid.of(dp=2, tp=2), next(whole_gradients(UNEVEN))
    clipped, given = seated(grid, "gram"), seated(grid, "gram")
    clipped.give(gradients)
    (norm, *_) = clipped.ready(max_norm=0.5)
    assert norm is not None
    clipped.step()
    scale = (0.5 / (norm + 1e-6)).float()
    given.give([None if grad is None else grad * scale for grad in gradients])
    given.step()
    for ranks in (clipped, given):
        ranks.give(gradients)  # Newton–Schulz ignores scale, so only a second step shows the clipping
        ranks.step()
    assert_alike(clipped.params, given.params)


# Memory


def peak(plan: Plan, rank: int) -> int:
    """One rank's peak of bytes beyond parameters, gradients and momentum, by a walk without data."""
    step = step_over_ones(plan, plan.grid.at(rank), META)
    step.present = frozenset(range(len(step.parameters)))
    with torch.no_grad(), PeakMemory() as seen:
        walk_alone(step.walk(), lambda request: None)
    return seen.peak


def newton_schulz_buffers(*shape: int) -> int:
    with PeakMemory() as seen:
        zeropower_via_newtonschulz(torch.empty(shape, dtype=torch.bfloat16, device=META))
    return seen.peak


ELEMENTS = 8 * 64 * 128
UNCUT = [Matrix(i, f"m{i}", (64, 128)) for i in range(8)]


@pytest.mark.parametrize("strategy", ["replicated", "owner_per_replica", "owner"])
@pytest.mark.parametrize("dp", [2, 4])
def test_a_step_holds_a_bucket_on_the_wire_and_one_matrix(strategy: str, dp: int) -> None:
    """A step also holds one matrix's Newton–Schulz input, in fp32."""
    plan = STRATEGIES[strategy](UNCUT, Grid.of(dp=dp))
    one = newton_schulz_buffers(64, 128) + 4 * 64 * 128
    held = WIRE * ELEMENTS
    for rank in range(dp):
        assert held <= peak(plan, rank) <= held + one


@pytest.mark.parametrize("grid", [Grid.of(dp=4), Grid.of(dp=2, tp=2)], ids=str)
def test_parts_that_a_rank_has_already_do_not_travel(grid: Grid) -> None:
    """In both directions, ranks send only the parts of a bucket that others need, and nothing to themselves.
    Owners pack a part only once, even if several ranks get it."""
    cuts = (("tp", Shard(0)),) if grid.size("tp") > 1 else ()
    plan = STRATEGIES["owner"]([replace(matrix, cuts=cuts) for matrix in UNCUT], grid)
    sent = 0
    for rank in grid.ranks:
        at, seen = grid.at(rank), list[Collective]()
        step = step_over_ones(plan, at, META)
        step.present = frozenset(range(len(step.parameters)))
        walk_alone(step.walk(), seen.append)
        for request in (one for one in seen if one.kind == "all_to_all"):
            here = at.position(*request.axes)
            assert request.sends is not None
            assert request.receives is not None
            assert (request.sends[here], request.receives[here]) == (0, 0)
            assert request.send is not None
            assert request.send.numel() == request.packed <= ELEMENTS // 4
            sent += sum(request.sends)
    others = ELEMENTS * 3  # without tp, each element goes to three other ranks
    assert sent == (others if grid.size("tp") == 1 else ELEMENTS // 2 + others // 2)


@pytest.mark.parametrize("dp", [2, 4])
def test_zero1_holds_the_flat_gradient_and_its_slice(dp: int) -> None:
    """A rank sends a whole fp32 bucket and receives a slice; later it sends a slice and receives a bucket."""
    plan = STRATEGIES["zero1"](UNCUT, Grid.of(dp=dp))
    slice_ = 4 * ELEMENTS // dp
    for rank in range(dp):
        assert peak(plan, rank) <= 4 * ELEMENTS + slice_ + newton_schulz_buffers(64, 128)
