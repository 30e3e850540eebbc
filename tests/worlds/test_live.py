"""Real processes give exactly the in-process world's answers, and the groups of their meshes time out."""

from __future__ import annotations

import re
import threading
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from muon_tutorial import Grid, LiveWorld, LocalWorld, Muon, build_mesh, launch
from muon_tutorial.engine.collective import Collective, Label, Start
from muon_tutorial.errors import GridError, RequestError, UsageError
from muon_tutorial.launching.group_timeouts import group_timeout

from .requests import PARTS, PROGRAMS, asks, one

DP3, DP2_TP2 = Grid.of(dp=3), Grid.of(dp=2, tp=2)
AXES = (("dp",), ("tp",), ("dp", "tp"))
ASKED_OF_LAUNCH, ASKED_OF_MESH = 21.0, 17.0


def timeout_of(group: dist.ProcessGroup | None) -> timedelta:
    """A group's timeout, from the backend that runs its collectives."""
    group = group or dist.group.WORLD
    assert group is not None
    return group._get_backend(torch.device("cpu")).options._timeout


def on_one_of_three(rank: int) -> tuple[dict[str, list[Tensor]], list[Tensor]]:
    warnings.simplefilter("error")
    world = LiveWorld(build_mesh({"dp": 3}, timeout=ASKED_OF_MESH))
    assert timeout_of(None) == timedelta(seconds=ASKED_OF_LAUNCH)
    assert timeout_of(world.mesh.get_group("dp")) == timedelta(seconds=ASKED_OF_MESH)
    untold = build_mesh({"dp": 3})
    assert untold.device_type == "cpu"
    assert group_timeout(untold.get_group()) == ASKED_OF_LAUNCH
    assert str(world.at) == str(DP3.at(rank))
    with pytest.raises(GridError, match=r"^a grid of dp=2 × tp=2 needs 4 processes; there are 3$"):
        build_mesh(DP2_TP2)
    with pytest.raises(GridError, match=r"^a grid of dp=2 needs 2 processes; there are 3$"):
        build_mesh({"dp": 2})
    with pytest.raises(UsageError, match=r"the timeout is a positive number of seconds, .* not nan"):
        build_mesh({"dp": 3}, timeout=float("nan"))
    with pytest.raises(GridError, match="the mesh has no axis names; pass mesh_dim_names"):
        LiveWorld(init_device_mesh("cpu", (3,)))
    pair, turned = (DeviceMesh("cpu", ranks, mesh_dim_names=("dp",)) for ranks in ([0, 1], [2, 0, 1]))
    if rank == 2:
        with pytest.raises(GridError, match="rank 2 is not on the mesh"):
            LiveWorld(pair)
    else:
        assert LiveWorld(pair).at.rank == rank
    with pytest.raises(GridError, match=re.escape("the ranks along dp are [2, 0, 1]")):
        LiveWorld(turned)  # torch sorts the ranks of a group, so pieces would silently change places
    with pytest.raises(RequestError, match="'all_reduce', which is no request"):
        world.run(one("all_reduce"))
    asked = asks()
    return {name: world.run(program(rank, asked)) for name, program in PROGRAMS.items()}, step_once(world)


def step_once(world: LiveWorld) -> list[Tensor]:
    """A whole step under ``zero1``, with every warning as an error."""
    weights = [torch.nn.Parameter(torch.eye(3, 4)) for _ in range(3)]
    muon = Muon(weights, strategy="zero1", mesh=world, window=2)
    for weight in weights:
        weight.grad = torch.full_like(weight, 0.5)
    muon.ready_gradients(max_norm=1.0)
    muon.step()
    return [weight.detach() for weight in weights]


def on_one_of_four(rank: int) -> list[Tensor]:
    warnings.simplefilter("error")
    world = LiveWorld(build_mesh(DP2_TP2, timeout=ASKED_OF_MESH))
    flat = build_mesh({"pp": 1, "dp": 4}, timeout=ASKED_OF_MESH)
    groups = [*world.mesh.get_all_groups(), *flat.get_all_groups(), world.group(("dp", "tp"))]
    assert [timeout_of(group) for group in groups] == [timedelta(seconds=ASKED_OF_MESH)] * 5
    assert str(world.at) == str(DP2_TP2.at(rank))
    with pytest.raises(GridError, match=re.escape("the ranks along tp×dp are [0, 2, 1, 3]")):
        world.run(one(gather_ranks(rank, ("tp", "dp"))))
    return [world.run(one(gather_ranks(rank, axes))) for axes in AXES]


def gather_ranks(rank: int, axes: tuple[str, ...]) -> Collective:
    """A request for all ranks' numbers, in order of position over the axes."""
    parts = DP2_TP2.at(rank).size(*axes)
    mine = torch.tensor([float(rank)])
    return Collective("all_gather", axes, mine.dtype, mine, parts, Label("who is there"))


@pytest.mark.parametrize("debug", ["OFF", "DETAIL"])
def test_three_ranks_answer_and_step_as_one_process_does(debug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks also check the timeouts of all groups, their own places, and which meshes are refused."""
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", debug)
    asked, found = asks(), launch(on_one_of_three, PARTS, timeout=ASKED_OF_LAUNCH)
    for name, program in PROGRAMS.items():
        local = LocalWorld(DP3).run([program(rank, asked) for rank in DP3.ranks])
        for rank in DP3.ranks:
            for ask, live, here in zip(asked, found[rank][0][name], local[rank], strict=True):
                assert live.dtype == here.dtype == ask.dtype
                assert torch.equal(live, here), f"rank {rank}, {ask}"
    first, *others = (stepped for _, stepped in found)
    assert not torch.equal(first[0], torch.eye(3, 4))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def messages_of_ones_own(rank: int) -> tuple[float, list[float], list[float]]:
    """A user's tagged message, sent during exchanges of two worlds on one mesh; and both worlds' answers."""
    mesh = build_mesh({"dp": 2, "tp": 1})
    worlds, group = (LiveWorld(mesh), LiveWorld(mesh)), mesh.get_group("dp")
    own = torch.full((3,), -1.0)
    sent = dist.isend(own, group_dst=1, group=group, tag=1) if rank == 0 else None
    requests = exchange(rank, ("dp",), 10.0), exchange(rank, ("dp", "tp"), 20.0)
    answers = [world.run(one(request)) for world, request in zip(worlds, requests, strict=True)]
    if rank == 1:
        dist.recv(own := torch.zeros(3), group_src=0, group=group, tag=1)
    elif sent is not None:
        sent.wait()
    return own[0].item(), answers[0].tolist(), answers[1].tolist()


def exchange(rank: int, axes: tuple[str, ...], base: float) -> Collective:
    """A request for the other rank's number, three times."""
    to_other = (0, 3) if rank == 0 else (3, 0)
    mine = torch.full((3,), base + rank)
    return Collective(
        "all_to_all", axes, mine.dtype, mine, 3, Label("swap"), sends=to_other, receives=to_other
    )


def test_exchanges_leave_a_users_messages_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "OFF")  # with DETAIL, an exchange is one all_to_all_single
    first, second = launch(messages_of_ones_own, 2)
    assert first == (-1.0, [11.0] * 3, [21.0] * 3)
    assert second == (-1.0, [10.0] * 3, [20.0] * 3)


def threads_beside_a_followed_exchange(rank: int) -> tuple[list[str], list[str]]:
    """The moments reported to a follower, and the threads that the process would wait for at its end."""
    told: list[str] = []
    world = LiveWorld(build_mesh({"dp": 2}), [lambda request, at: told.append])
    ticket = world.run(one(Start(exchange(rank, ("dp",), 0.0))))
    waited_for = [each.name for each in threading.enumerate() if not each.daemon]
    ticket.wait()
    return told, waited_for


def test_a_followed_exchange_tells_its_end_and_holds_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "OFF")
    for told, waited_for in launch(threads_beside_a_followed_exchange, 2):
        assert sorted(told) == ["answered", "done", "issued", "waiting"]
        assert told[-1] == "answered"
        assert waited_for == ["MainThread"]


def test_groups_over_axes_are_in_order_of_position_whatever_their_timeout() -> None:
    """All groups have the mesh's timeout, also those of the whole world, of one rank, or over two axes."""
    found = launch(on_one_of_four, 4, timeout=ASKED_OF_LAUNCH)
    for number, axes in enumerate(AXES):
        local = LocalWorld(DP2_TP2).run([one(gather_ranks(rank, axes)) for rank in DP2_TP2.ranks])
        for rank in DP2_TP2.ranks:
            assert local[rank].tolist() == list(DP2_TP2.at(rank).group(*axes))
            assert torch.equal(found[rank][number], local[rank])


def patience(rank: int) -> list[list[str]]:
    """An optimizer's warnings for a mesh whose groups wait half an hour, and for one from build_mesh."""
    said = []
    matrix = [torch.nn.Parameter(torch.eye(2))]
    long = dist.new_group(timeout=timedelta(minutes=30))
    patient = DeviceMesh.from_group(long, "cpu", mesh_dim_names=("dp",))
    for mesh in (patient, build_mesh({"dp": 2})):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            Muon(matrix, strategy="owner", mesh=mesh)
        said.append([str(each.message) for each in caught])
    return said


def test_a_group_handed_in_that_waits_half_an_hour_is_told() -> None:
    (long, short), others = launch(patience, 2)
    assert len(long) == 1
    assert "axis 'dp' times out after 1800 s" in long[0]
    assert "make the mesh with build_mesh(grid)" in long[0]
    assert short == []
    assert others == [[], []]  # one rank warns for all


def test_build_mesh_without_processes_says_what_to_do() -> None:
    with pytest.raises(GridError, match="call init_process_group, or launch"):
        build_mesh({"dp": 1})
