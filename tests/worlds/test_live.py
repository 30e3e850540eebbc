"""Real processes: the same answers as the in-process world, to the bit, and meshes whose groups time out."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from muon_tutorial import Grid, LiveWorld, LocalWorld, Muon, build_mesh, launch
from muon_tutorial.engine.collective import Collective, Label, Walk
from muon_tutorial.errors import GridError, RequestError

from .requests import PARTS, PROGRAMS, asks

pytestmark = pytest.mark.live

Answers = dict[str, list[Tensor]]
DP3, DP2_TP2 = Grid.of(dp=3), Grid.of(dp=2, tp=2)
AXES = (("dp",), ("tp",), ("dp", "tp"))
ASKED_OF_LAUNCH, ASKED_OF_MESH = 21.0, 17.0


def message(call: Callable[[], Any], *expected: type[Exception]) -> str:
    """What a call says when it is refused."""
    with pytest.raises(expected) as caught:
        call()
    return str(caught.value)


def timeout_of(group: dist.ProcessGroup | None) -> timedelta:
    """A group's timeout, asked of the backend that carries its collectives."""
    group = group or dist.group.WORLD
    assert group is not None
    return group._get_backend(torch.device("cpu")).options._timeout


def on_one_of_three(rank: int) -> dict[str, Any]:
    warnings.simplefilter("error")
    world = LiveWorld(build_mesh({"dp": 3}, timeout=ASKED_OF_MESH))
    unnamed = init_device_mesh("cpu", (3,))
    pair, turned = (DeviceMesh("cpu", ranks, mesh_dim_names=("dp",)) for ranks in ([0, 1], [2, 0, 1]))
    asked = asks()
    return {
        "answers": {name: world.run(program(rank, asked)) for name, program in PROGRAMS.items()},
        "timeouts": [timeout_of(None), timeout_of(world.mesh.get_group("dp"))],
        "place": str(world.at),
        "too many": message(lambda: build_mesh(Grid.of(dp=2, tp=2)), GridError),
        "too few": message(lambda: build_mesh({"dp": 2}), GridError),
        "unnamed": message(lambda: LiveWorld(unnamed), GridError),
        "off the mesh": message(lambda: LiveWorld(pair), GridError) if rank == 2 else LiveWorld(pair).at.rank,
        "turned": message(lambda: LiveWorld(turned), GridError),
        "no request": message(lambda: world.run(one("all_reduce")), RequestError),
        "stepped": step_once(world),
    }


def one(turn: Any) -> Walk:
    """A walk of one turn."""
    return (yield turn)


def step_once(world: LiveWorld | Any) -> Muon:
    """A whole step under ``zero1``, where every warning is an error."""
    weights = [torch.nn.Parameter(torch.eye(3, 4)) for _ in range(3)]
    muon = Muon(weights, strategy="zero1", mesh=world, window=2)
    for weight in weights:
        weight.grad = torch.full_like(weight, 0.5)
    muon.ready_gradients(max_norm=1.0)
    muon.step()
    return [weight.detach() for weight in weights]  # type: ignore[return-value]


def on_one_of_four(rank: int) -> dict[str, Any]:
    warnings.simplefilter("error")
    world = LiveWorld(build_mesh(DP2_TP2, timeout=ASKED_OF_MESH))
    flat = build_mesh({"pp": 1, "dp": 4}, timeout=ASKED_OF_MESH)
    groups = [*world.mesh.get_all_groups(), *flat.get_all_groups(), world.group(("dp", "tp"))]
    return {
        "answers": {axes: world.run(one(gather_ranks(rank, axes))) for axes in AXES},
        "timeouts": [timeout_of(group) for group in groups],
        "place": str(world.at),
        "out of order": message(lambda: world.run(one(gather_ranks(rank, ("tp", "dp")))), GridError),
    }


def gather_ranks(rank: int, axes: tuple[str, ...]) -> Collective:
    """Everyone's rank, in order of position over the axes."""
    parts = DP2_TP2.at(rank).size(*axes)
    return Collective(
        "all_gather", axes, torch.float32, torch.tensor([float(rank)]), parts, Label("who is there")
    )


@pytest.fixture(scope="module")
def three() -> list[dict[str, Any]]:
    return launch(on_one_of_three, PARTS, timeout=ASKED_OF_LAUNCH)


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    return launch(on_one_of_four, 4, timeout=ASKED_OF_LAUNCH)


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_kind_is_answered_as_in_one_process_to_the_bit(three: list[dict[str, Any]], name: str) -> None:
    asked = asks()
    local = LocalWorld(DP3).run([PROGRAMS[name](rank, asked) for rank in DP3.ranks])
    for rank in DP3.ranks:
        for ask, live, here in zip(asked, three[rank]["answers"][name], local[rank], strict=True):
            assert live.dtype == here.dtype == ask.dtype
            assert torch.equal(live, here), f"rank {rank}, {ask}"


def test_the_default_group_has_the_timeout_that_launch_was_given(three: list[dict[str, Any]]) -> None:
    assert {found["timeouts"][0] for found in three} == {timedelta(seconds=ASKED_OF_LAUNCH)}


def test_every_group_of_a_mesh_has_the_timeout_that_was_asked_for(
    three: list[dict[str, Any]], four: list[dict[str, Any]]
) -> None:
    """Also where a group is the whole world, of one rank, or over two axes."""
    asked = timedelta(seconds=ASKED_OF_MESH)
    assert [found["timeouts"][1] for found in three] == [asked] * 3
    assert [found["timeouts"] for found in four] == [[asked] * 5] * 4


def test_ranks_stand_where_the_grid_says(three: list[dict[str, Any]], four: list[dict[str, Any]]) -> None:
    assert [found["place"] for found in three] == [str(DP3.at(rank)) for rank in DP3.ranks]
    assert [found["place"] for found in four] == [str(DP2_TP2.at(rank)) for rank in DP2_TP2.ranks]


@pytest.mark.parametrize("axes", AXES, ids="-".join)
def test_groups_over_axes_are_in_order_of_position(four: list[dict[str, Any]], axes: tuple[str, ...]) -> None:
    local = LocalWorld(DP2_TP2).run([one(gather_ranks(rank, axes)) for rank in DP2_TP2.ranks])
    for rank in DP2_TP2.ranks:
        assert local[rank].tolist() == list(DP2_TP2.at(rank).group(*axes))
        assert torch.equal(four[rank]["answers"][axes], local[rank])


def test_positions_that_do_not_rise_with_the_ranks_are_refused(
    three: list[dict[str, Any]], four: list[dict[str, Any]]
) -> None:
    """torch sorts the ranks of a group: pieces would silently change places."""
    assert all("the ranks along dp are [2, 0, 1]" in found["turned"] for found in three)
    assert all("the ranks along tp×dp are [0, 2, 1, 3]" in found["out of order"] for found in four)


def test_a_grid_of_another_size_than_the_world_is_refused(three: list[dict[str, Any]]) -> None:
    for found in three:
        assert found["too many"] == "a grid of dp=2 × tp=2 needs 4 processes; there are 3"
        assert found["too few"] == "a grid of dp=2 needs 2 processes; there are 3"


def test_a_mesh_without_names_or_without_this_rank_is_refused(three: list[dict[str, Any]]) -> None:
    assert all("the mesh has no axis names; pass mesh_dim_names" in found["unnamed"] for found in three)
    assert [found["off the mesh"] for found in three[:2]] == [0, 1]
    assert "rank 2 is not on the mesh" in three[2]["off the mesh"]


def test_a_turn_that_is_no_request_is_refused(three: list[dict[str, Any]]) -> None:
    assert all("'all_reduce', which is no request" in found["no request"] for found in three)


def test_a_step_warns_of_nothing_and_leaves_all_ranks_alike(three: list[dict[str, Any]]) -> None:
    first, *others = (found["stepped"] for found in three)
    assert not torch.equal(first[0], torch.eye(3, 4))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def patience(rank: int) -> list[list[str]]:
    """What a world says of groups that wait half an hour, and of those that build_mesh made."""
    said = []
    long = dist.new_group(timeout=timedelta(minutes=30))
    patient = DeviceMesh.from_group(long, "cpu", mesh_dim_names=("dp",))
    for mesh in (patient, build_mesh({"dp": 2})):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            LiveWorld(mesh)
        said.append([str(each.message) for each in caught])
    return said


def test_a_group_handed_in_that_waits_half_an_hour_is_told() -> None:
    for long, short in launch(patience, 2):
        assert len(long) == 1
        assert "axis 'dp' times out after 1800 s" in long[0]
        assert short == []
