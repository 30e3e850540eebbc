"""Gradients sent while backward still runs give the same bits as those that wait for the step."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from muon_tutorial import Grid, LiveWorld, LocalWorld, Muon, MuonWithAdamW, build_mesh, launch, zero1
from muon_tutorial.engine.collective import Collective, Label
from muon_tutorial.engine.travel import all_reduce
from muon_tutorial.errors import MismatchError, StrategyError
from muon_tutorial.plan.grid import Coordinate
from muon_tutorial.plan.strategies import Builder, layerwise
from muon_tutorial.step import step as steps

from ..configs.setups import heard

STEPS = 3
SMALL = 3_000  # bytes per bucket: so few that there are several buckets
BUILDERS: dict[str, Builder] = {
    "zero1": partial(zero1, round_bytes=SMALL),
    "zero1 by boundaries": partial(zero1, gather="boundary", round_bytes=SMALL),
    "layerwise": partial(layerwise, round_bytes=SMALL),
}


class Branches(nn.Module):
    """A vector for AdamW, a chain of matrices, and a matrix that takes part only in every second step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.chain = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(6))
        self.extra = nn.Linear(16, 16, bias=False)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor, with_extra: bool) -> Tensor:
        for layer in self.chain:
            x = torch.tanh(layer(x)) * self.scale
        return x + self.extra(x) if with_extra else x


def trained(
    world: LiveWorld, builder: Builder, early: bool, micro: int = 1, max_norm: float | None = None
) -> list[Tensor]:
    """Parameters after some steps, each of ``micro`` backward passes."""
    model = Branches()
    own = {"tp_dim": None, "overlap_grad_reduce": early}
    both = MuonWithAdamW.from_model(model, lr=0.02, strategy=builder, mesh=world, muon=own)
    for step in range(STEPS):
        both.zero_grad()
        for number in range(micro):
            data = torch.Generator().manual_seed(1000 * step + 10 * number + world.at["dp"])
            loss = model(torch.randn(8, 16, generator=data), with_extra=step % 2 == 0).square().mean()
            if number < micro - 1:
                with both.no_sync():
                    loss.backward()
            else:
                loss.backward()
        if max_norm is not None:
            both.ready_gradients(max_norm)
        both.step()
    return [param.detach().clone() for param in model.parameters()]


Case = tuple[str, int, float | None]
CASES: list[Case] = [("zero1", 1, None), *((name, 3, 0.01) for name in BUILDERS)]
"""The strategy, the micro-batches of a step, and the norm to clip to."""


def compared(rank: int, axes: dict[str, int], cases: list[Case]) -> dict[Case, bool]:
    world, found = LiveWorld(build_mesh(axes)), {}
    for name, micro, max_norm in cases:
        late, early = (trained(world, BUILDERS[name], which, micro, max_norm) for which in (False, True))
        found[name, micro, max_norm] = all(map(torch.equal, late, early))
    return found


@pytest.mark.parametrize(
    ("axes", "cases"), [({"dp": 3}, CASES), ({"dp": 2, "tp": 2}, CASES[:2])], ids=lambda it: str(it)[:30]
)
def test_early_and_late_reductions_give_the_same_bits(axes: dict[str, int], cases: list[Case]) -> None:
    for found in launch(compared, Grid.of(**axes).world_size, args=(axes, cases), timeout=120):
        assert found == dict.fromkeys(cases, True)


def asked_when(rank: int) -> tuple[list[str], int]:
    """The requests in order, and the number of them made before ``backward()`` returned."""
    asked: list[str] = []

    def note(request: Collective, at: Coordinate) -> None:
        asked.append(str(request.label))

    world = LiveWorld(build_mesh({"dp": 2}), [note])
    model = Branches()
    hidden = [*model.chain.parameters(), *model.extra.parameters()]
    in_their_order = partial(zero1, cut="bucket", round_bytes=SMALL)  # ``extra`` is last
    muon = Muon(hidden, strategy=in_their_order, mesh=world, overlap_grad_reduce=True)
    asked.clear()
    model(torch.ones(2, 16), with_extra=rank == 0).sum().backward()  # rank 1: no gradient of extra
    before = len(asked)
    muon.step()
    return asked, before


def test_buckets_set_out_during_backward_and_in_the_same_order_everywhere() -> None:
    (first, early), (second, waiting) = launch(asked_when, 2)
    assert first == second  # although rank 1's first bucket was complete only in step()
    reductions = [label for label in first if label.startswith("gradient reduce")]
    assert [label.split()[-1] for label in reductions] == [f"{i}" for i in range(len(reductions))][::-1]
    assert len(reductions) > 2
    assert first[: len(reductions)] == reductions
    assert early == len(reductions)
    assert waiting == 0


def misused(rank: int) -> dict[str, str]:
    world = LiveWorld(build_mesh({"dp": 2}))
    model = Branches()
    chain = list(model.chain.parameters())
    how: dict[str, Any] = {"strategy": BUILDERS["zero1"], "mesh": world}
    muon = Muon(chain, overlap_grad_reduce=True, **how)
    before = [param.detach().clone() for param in model.parameters()]
    told: dict[str, str] = {}

    def backward(scale: float = 1.0) -> None:
        (scale * model(torch.ones(2, 16), with_extra=False).sum()).backward()

    def backward_without_sync() -> None:
        with muon.no_sync():
            backward()

    backward()
    told["dropped on the way"] = heard(muon.zero_grad)
    told["loaded on the way"] = heard(lambda: muon.load_state_dict(muon.state_dict()))
    told["second backward"] = heard(backward)
    told["second backward in no_sync"] = heard(backward_without_sync)
    told["stepped after a second backward"] = heard(muon.step)
    muon.zero_grad()
    backward()
    if rank == 1:
        assert chain[0].grad is not None
        chain[0].grad.data.mul_(2)  # no version counter shows this write
    told["written to"] = heard(muon.step)
    told["unchanged"] = str(all(map(torch.equal, before, model.parameters())))
    muon.zero_grad()
    backward(float("nan") if rank == 0 else 1.0)
    told["nan"] = heard(muon.step)
    muon.zero_grad()
    backward()
    scaler: Any = SimpleNamespace(found_inf=torch.zeros(1), param_groups=muon.param_groups)
    told["scaler"] = heard(lambda: muon.guard.skips_overflow(muon, scaler))
    told["norm"] = heard(lambda: muon.ready_gradients(1.0))
    told["dropped when readied"] = heard(muon.zero_grad)
    backward()
    world.run(all_reduce(torch.ones(1), "dp", world.at, Label("a loss")))  # must not mix with sent gradients
    told["well again"] = heard(muon.step)
    told["on one rank"] = heard(lambda: Muon(chain, overlap_grad_reduce=rank == 0, **how))
    return told


def test_misuse_is_refused_and_changes_nothing() -> None:
    zero, one = launch(misused, 2)
    for told in (zero, one):
        assert told["dropped on the way"].startswith("GradientError: gradients that backward() has begun")
        assert told["loaded on the way"].startswith("UsageError: load_state_dict()")
        for name in ("second backward", "second backward in no_sync"):
            assert told[name].startswith("GradientError: a backward() has added to a gradient")
            assert "no_sync" in told[name]
        assert "gradients have changed since they were sent" in told["stepped after a second backward"]
        assert told["unchanged"] == "True"
        assert told["nan"].startswith("NotFiniteError")
        assert told["scaler"].startswith("UsageError: overlap_grad_reduce sends gradients before GradScaler")
        assert told["norm"] == told["dropped when readied"] == told["well again"] == "nothing"
        assert told["on one rank"].startswith("MismatchError: ranks would step differently: overlap_grad_red")
    assert zero["written to"].startswith("MismatchError: rank 1 cannot take this step")
    assert one["written to"].startswith("GradientError: rank 1: gradients have changed since they were sent")


def refused_and_changed(rank: int, early: bool) -> list[Tensor]:
    """Parameters after a step whose gradients were changed after ``ready_gradients()`` had been refused."""
    model = Branches()
    own = {"tp_dim": None, "overlap_grad_reduce": early}
    both = MuonWithAdamW.from_model(model, lr=0.02, strategy="zero1", mesh=build_mesh({"dp": 2}), muon=own)
    model(torch.full((2, 16), rank + 0.5), with_extra=True).square().sum().backward()
    both.muon.param_groups[0]["lr"] = 0.02 + rank
    with pytest.raises(MismatchError, match="lr"):
        both.ready_gradients()
    both.muon.param_groups[0]["lr"] = 0.02
    for param in model.parameters():
        assert param.grad is not None
        param.grad = param.grad.square()
    both.ready_gradients()
    both.step()
    return [param.detach() for param in model.parameters()]


def test_after_a_refusal_changed_gradients_are_sent_anew() -> None:
    late, early = (launch(refused_and_changed, 2, args=(which,)) for which in (False, True))
    for of_late, of_early in zip(late, early, strict=True):
        assert all(map(torch.equal, of_late, of_early))


def interrupted(rank: int, guard: str) -> list[list[Tensor]]:
    """Parameters after a step, and after one whose ``ready_gradients()`` failed before AdamW's part."""
    found, own = [], {"tp_dim": None, "overlap_grad_reduce": True, "guard": guard}
    for fails in (False, True):
        model, mesh = Branches(), build_mesh({"dp": 2})
        both = MuonWithAdamW.from_model(model, lr=0.02, strategy="zero1", mesh=mesh, muon=own)
        model(torch.full((2, 16), rank + 0.5), with_extra=True).square().sum().backward()
        if fails:
            with patch.object(steps, "average_others", side_effect=MemoryError), pytest.raises(MemoryError):
                both.ready_gradients()
        both.step()
        found.append([param.detach() for param in model.parameters()])
    return found


@pytest.mark.parametrize("guard", ["on", "off"])
def test_after_ready_gradients_has_failed_all_gradients_are_averaged(guard: str) -> None:
    for whole, after in launch(interrupted, 2, args=(guard,)):
        assert all(map(torch.equal, whole, after))


def straddled(rank: int) -> list[str]:
    """What this rank raises if a stack lies in two buckets, and one bucket waits for a missing gradient."""
    world = LiveWorld(build_mesh({"dp": 2}))
    torch.manual_seed(0)
    unused, stack = nn.Parameter(torch.randn(1, 16, 16)), nn.Parameter(torch.randn(4, 16, 16))
    builder = partial(zero1, cut="bucket", round_bytes=3 * 16 * 16 * 4)
    muon = Muon([unused, stack], parts="stack", strategy=builder, mesh=world, overlap_grad_reduce=True)
    assert muon.plan is not None
    assert len(muon.plan.buckets) == 2
    told = []
    for factor in (1.0, 0.5):
        stack.square().sum().backward()
        assert muon.guard.hooks.reduction is not None
        told.append(str(muon.guard.hooks.reduction.begun))
        assert stack.grad is not None
        stack.grad.mul_(factor)
        told.append(heard(muon.step))
        muon.zero_grad()
    return told


def test_a_parameter_in_two_buckets_is_whole_or_refused() -> None:
    for told in launch(straddled, 2):
        assert told[:3] == ["1", "nothing", "1"]
        assert "gradients have changed since they were sent" in told[3]


def sparse_on_one(rank: int) -> str:
    world = LiveWorld(build_mesh({"dp": 2}))
    matrix = nn.Parameter(torch.ones(8, 8))
    muon = Muon([matrix], strategy="zero1", mesh=world, overlap_grad_reduce=True)
    index = torch.zeros(1, dtype=torch.long)
    loss = nn.functional.embedding(index, matrix, sparse=rank == 0).sum()
    loss.backward()
    return heard(muon.step)


def test_a_gradient_that_cannot_be_sent_is_refused_on_all_ranks() -> None:
    zero, one = launch(sparse_on_one, 2)
    assert zero.startswith("GradientError: rank 0: a gradient of bucket 0")
    assert one.startswith("MismatchError: rank 0 cannot take this step")


def test_it_is_refused_where_there_is_nothing_to_send_early() -> None:
    matrix = nn.Parameter(torch.eye(4))
    local = LocalWorld(Grid.of(dp=1)).mesh(0)
    with pytest.raises(StrategyError, match="LocalWorld"):
        Muon([matrix], strategy="zero1", mesh=local, overlap_grad_reduce=True)
    with pytest.raises(StrategyError, match="averages gradients itself"):
        Muon([matrix], strategy="owner", mesh=local, overlap_grad_reduce=True)
    with pytest.raises(StrategyError, match="averages gradients itself"):
        Muon([matrix], overlap_grad_reduce=True)
