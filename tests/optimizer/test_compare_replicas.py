"""Ranks that should hold the same values begin with equal values, and get an error if they differ later."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from muon_tutorial import Muon, MuonWithAdamW, build_mesh, launch
from muon_tutorial.step.agreement import checksum
from muon_tutorial.step.parameter_state import local_part

from ..configs.setups import error_of
from ..oracle import perceptron


@cache
def mesh_of(layout: str) -> DeviceMesh:
    """Four ranks: two along dp (or HSDP's replicas) times two along tp (or HSDP's shards)."""
    if layout == "hsdp":
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard"))
    return build_mesh({"dp": 2, "tp": 2})


def pair_on(model: nn.Module, layout: str, **muon) -> MuonWithAdamW:
    mesh = mesh_of(layout)
    if layout == "hsdp":
        fully_shard(model, mesh=mesh)
        return MuonWithAdamW.from_model(model, lr=0.0, muon=muon)
    return MuonWithAdamW.from_model(model, lr=0.0, strategy=layout, mesh=mesh, muon={"tp_dim": None, **muon})


def turn_one_sign(tensor: Tensor) -> None:
    """Flip the sign of one element: its highest bit, which a sum modulo a small power of two would miss."""
    tensor.view(-1)[-2:][0] *= -1


def heard_in_a_step(model: nn.Module, both: MuonWithAdamW) -> str:
    both.zero_grad()
    model(torch.ones(2, 6)).sum().backward()
    before = [param.detach().clone() for param in model.parameters()]
    kind, said = error_of(both.step)
    assert kind == "nothing" or all(map(torch.equal, before, model.parameters()))
    return said or kind


def compared(rank: int, layout: str, other: str) -> str:
    """A rank's error in its first step if the last rank began with one sign bit flipped."""
    model = perceptron()
    if rank == 3 and other != "nothing":
        turn_one_sign(model.get_parameter(other).detach())
    return heard_in_a_step(model, pair_on(model, layout, initial_values="compare"))


def begun(rank: int, layout: str) -> tuple[list[Tensor], str]:
    """A rank's parameters after the optimizer is made, if each replica's model has a seed of its own."""
    model = perceptron(seed=rank // 2 if layout == "hsdp" else rank)
    both = pair_on(model, layout)
    held = [local_part(param.detach()).clone() for param in model.parameters()]
    return held, heard_in_a_step(model, both)


def unnamed_and_swapped(rank: int) -> str:
    """A rank's error if rank 1 lists two matrices of equal shape in another order, without names."""
    torch.manual_seed(0)
    up, down = nn.Linear(6, 6), nn.Linear(6, 6)
    weights = [down.weight, up.weight] if rank == 1 else [up.weight, down.weight]
    muon = Muon(weights, strategy="owner", mesh=build_mesh({"dp": 4}))
    both = MuonWithAdamW(muon, torch.optim.AdamW([up.bias, down.bias]))
    return heard_in_a_step(nn.Sequential(up, down), both)


def other_length(rank: int) -> str:
    """A rank's error if rank 2's head has 9 outputs, and the others' have 7."""
    torch.manual_seed(0)
    body, head = nn.Linear(6, 8, bias=False), nn.Linear(8, 9 if rank == 2 else 7, bias=False)
    muon = Muon([("body", body.weight)], strategy="zero1", mesh=build_mesh({"dp": 2, "tp": 2}), tp_dim=None)
    return ": ".join(error_of(lambda: MuonWithAdamW(muon, torch.optim.AdamW([("head", head.weight)]))))


def drifted(rank: int, layout: str, what: str) -> list[str]:
    """A rank's errors in three steps. One sign is flipped on the last rank after the second step, or under
    FSDP2 after the first, because there later steps do not overwrite the parameter."""
    model = perceptron()
    both, heard = pair_on(model, layout, compare_every=2), []
    for step in range(3):
        heard.append(heard_in_a_step(model, both))
        if step == (0 if layout == "hsdp" else 1) and rank == 3:
            turn_one_sign(_held(model, both, what))
    return heard


def other_step_loaded(rank: int) -> str:
    """A rank's error in the step after a load, if AdamW took another number of steps in rank 1's file."""
    model = perceptron()
    both = pair_on(model, "zero1")
    heard_in_a_step(model, both)
    state = both.state_dict()
    state["state"][2]["step"].add_(float(rank == 1))
    both.load_state_dict(state)
    return heard_in_a_step(model, both)


def on_another_axis(rank: int) -> list[str]:
    """The warnings of a first step on an axis that is not called dp, if each rank has its own last bias."""
    model, mesh = perceptron(), init_device_mesh("cpu", (4,), mesh_dim_names=("data",))
    nn.init.constant_(model.get_parameter("2.bias"), rank)
    both = MuonWithAdamW.from_model(model, lr=0.0, strategy="round_robin", mesh=mesh)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert heard_in_a_step(model, both) == "nothing"
    return [str(it.message) for it in caught]


def unfrozen(rank: int, layout: str) -> list[str]:
    """A rank's errors in four steps. Before the third, a matrix is unfrozen. As under DDP, its gradient is
    not averaged until the fourth step; the other gradients always are."""
    model, mesh, heard = perceptron(), build_mesh({"dp": 4}), []
    late = model.get_parameter("2.weight").requires_grad_(False)
    options: dict[str, Any] = {"strategy": layout, "mesh": mesh, "include_frozen": True}
    both = MuonWithAdamW.from_model(model, lr=0.1, **options)
    for step in range(4):
        late.requires_grad_(step > 1)
        both.zero_grad()
        model(torch.full((2, 6), rank + 1.0)).square().sum().backward()
        for param in model.parameters():
            if param.grad is not None and (param is not late or step == 3):
                dist.all_reduce(param.grad)
        heard.append(": ".join(error_of(both.step)))
    return heard


def _held(model: nn.Module, both: MuonWithAdamW, what: str) -> Tensor:
    name, _, entry = what.partition("/")
    param = model.get_parameter(name)
    return local_part(both.state[param][entry] if entry else param.detach())


OTHER_BEGINNINGS = [("zero1", "2.weight"), ("owner", "0.weight"), ("zero1", "2.bias")]
OTHER_BEGINNINGS += [("hsdp", "0.weight"), ("hsdp", "0.bias")]
ALIKE = [(layout, "nothing") for layout in ("zero1", "owner", "hsdp")]
SEEDED = ["zero1", "round_robin", "hsdp"]
DRIFTED = {
    ("zero1", "0.weight"): "0.weight",
    ("owner", "2.weight/momentum_buffer"): "the momentum of 2.weight",
    ("replicated", "0.weight/momentum_buffer"): "the momentum of 0.weight",
    ("zero1", "2.bias/exp_avg"): "the optimizer state of 2.bias",
    ("zero1", "2.bias/step"): "the optimizer state of 2.bias",
    ("hsdp", "0.weight"): "0.weight",
}
"""The layout, the tensor whose sign differs on one rank, and this tensor's name in the error."""


def everything(rank: int) -> dict[str, dict[Any, Any]]:
    """All cases in one launch; after each, the ranks can go on together."""
    return {
        "compared": {case: compared(rank, *case) for case in (*OTHER_BEGINNINGS, *ALIKE)},
        "begun": {layout: begun(rank, layout) for layout in SEEDED},
        "drifted": {case: drifted(rank, *case) for case in DRIFTED},
        "unnamed": {"swapped": unnamed_and_swapped(rank), "other length": other_length(rank)},
        "unfrozen": {layout: unfrozen(rank, layout) for layout in ("owner", "round_robin")},
        "loaded": {"other step": other_step_loaded(rank)},
        "another axis": {"data": on_another_axis(rank)},
    }


Results = list[dict[str, dict[Any, Any]]]


@pytest.fixture(scope="module")
def results() -> Results:
    return launch(everything, 4, timeout=60)


@pytest.mark.parametrize(("layout", "other"), OTHER_BEGINNINGS)
def test_another_beginning_on_one_rank_is_named_on_all(results: Results, layout: str, other: str) -> None:
    for of_rank in results:
        said = of_rank["compared"][layout, other]
        assert f"before the first step {other} is not the same on all ranks" in said


def test_ranks_that_begin_alike_hear_nothing(results: Results) -> None:
    assert {of_rank["compared"][case] for of_rank in results for case in ALIKE} == {"nothing"}


@pytest.mark.parametrize("layout", SEEDED)
def test_ranks_begin_with_the_first_ones_values_as_under_ddp(results: Results, layout: str) -> None:
    ranks = [of_rank["begun"][layout] for of_rank in results]
    assert [heard for _, heard in ranks] == ["nothing"] * 4
    first = perceptron()
    if layout == "hsdp":  # dimension 0 is cut between ranks 0 and 1, and again between 2 and 3
        assert all(map(torch.equal, ranks[0][0], ranks[2][0]))
        assert all(map(torch.equal, ranks[1][0], ranks[3][0]))
        halves = zip(ranks[0][0], ranks[1][0], strict=True)
        assert all(map(torch.equal, map(torch.cat, halves), first.parameters()))
    else:  # AdamW's vectors must be equal only along dp, because tensor parallelism may have cut them
        for held, _ in ranks:
            assert all(torch.equal(held[i], list(first.parameters())[i]) for i in (0, 2))
        assert all(map(torch.equal, ranks[0][0], ranks[2][0]))


def test_unnamed_parameters_are_compared_and_never_overwritten(results: Results) -> None:
    for of_rank in results:
        heard = of_rank["unnamed"]["swapped"]
        assert "group 0, parameter 0 is not the same on all ranks" in heard
        assert "rank 1 differs from the others" in heard


def test_a_parameter_of_another_length_is_named_with_its_rank_and_both_shapes(results: Results) -> None:
    for of_rank in results:
        heard = of_rank["unnamed"]["other length"]
        assert heard.startswith("MismatchError: head is another parameter on other ranks, or has another s")
        assert "rank 2 differs from the others" in heard
        assert "head of shape (7, 8) on ranks 0, 1, 3; head of shape (9, 8) on rank 2" in heard


@pytest.mark.parametrize(("layout", "what"), DRIFTED)
def test_a_flipped_sign_is_named_at_the_next_comparison(results: Results, layout: str, what: str) -> None:
    for of_rank in results:
        heard = of_rank["drifted"][layout, what]
        assert heard[:2] == ["nothing"] * 2  # compared before steps 0 and 2
        assert f"after 2 steps {DRIFTED[layout, what]} is not the same on all ranks" in heard[2]
        assert "3 differ" in heard[2]


@pytest.mark.parametrize("layout", ["owner", "round_robin"])
def test_first_gradients_are_compared_because_ddp_may_not_average_them(results: Results, layout: str) -> None:
    for of_rank in results:
        *before, refused, averaged = of_rank["unfrozen"][layout]
        assert {*before, averaged} == {"nothing: "}
        assert refused.startswith("GradientError: the gradient of 2.weight is not the same on all ranks")


def test_vectors_that_differ_along_an_axis_of_another_name_cause_a_warning(results: Results) -> None:
    for of_rank in results:
        (said,) = of_rank["another axis"]["data"]
        assert said.startswith("2.bias is not the same on all ranks")
        assert "no DTensor, so its copies along data may drift apart" in said


def test_another_step_count_that_one_rank_loaded_is_named_in_the_next_step(results: Results) -> None:
    for of_rank in results:
        heard = of_rank["loaded"]["other step"]
        assert "before the first step the optimizer state of 0.bias is not the same on all ranks" in heard
        assert "1 and 3 differ" in heard


def test_a_checksum_knows_every_bit_and_its_place() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        tensor = torch.randn(3, 4).to(dtype)
        known = {int(checksum(tensor)), int(checksum(tensor.T.contiguous()))}
        assert len(known) == 2
        flipped = tensor.clone()
        words = flipped.view(torch.uint8).view(-1)
        for place in range(words.numel()):
            for bit in range(8):
                words[place] ^= 1 << bit
                assert int(checksum(flipped)) != int(checksum(tensor))
                words[place] ^= 1 << bit


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_checksum_of_many_rows_sums_each_column_once(dtype: torch.dtype) -> None:
    tensor = torch.randn(3 * 256 * 1021 + 17).to(dtype)
    words = tensor.view(torch.int16 if dtype is torch.bfloat16 else torch.int32).to(torch.int64)
    columns = torch.nn.functional.pad(words, (0, -len(words) % 1021)).view(-1, 1021).sum(0)
    hashes = (1 << 19) - 1
    assert checksum(tensor) == (columns % hashes * torch.arange(1, 1022)).sum() % hashes
