"""All ranks in one process: stepping, what each rank holds, and errors that name each rank's request."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from muon_tutorial import Grid, LocalWorld, Muon
from muon_tutorial.engine.collective import IDLE, Call, Collective, Kind, Label, Start, Walk
from muon_tutorial.errors import DeadlockError, GridError, MismatchError, RequestError, UsageError

from .requests import KINDS, PARTS, PROGRAMS, Ask, asks, numbers

DP3 = Grid.of(dp=PARTS)
SUM = Label("sum")


def program(*turns: Any) -> Walk:
    """Yield each turn and return the answers."""
    answers = []
    for turn in turns:
        answers.append((yield turn))
    return answers


def add(position: int = 0, axis: str = "dp", size: int = 2, subject: str = "") -> Collective:
    mine = torch.full((size,), float(position))
    return Collective("all_reduce", (axis,), mine.dtype, mine, size, Label("sum", subject))


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_every_kind_is_answered_with_what_it_says(program: Callable[[int, list[Ask]], Walk]) -> None:
    asked = asks()
    found = LocalWorld(DP3).run([program(rank, asked) for rank in DP3.ranks])
    for number, ask in enumerate(asked):
        for rank in DP3.ranks:
            answer = found[rank][number]
            assert answer.dtype == ask.dtype
            assert torch.equal(answer, ask.answer(rank)), f"rank {rank}, {ask}"


def test_answers_share_no_storage() -> None:
    mine = [torch.ones(2), torch.ones(2)]
    requests = [replace(add(), send=send) for send in mine]
    (first,), (second,) = LocalWorld(Grid.of(dp=2)).run([program(request) for request in requests])
    first.zero_()
    assert second.tolist() == [2.0, 2.0]
    assert [send.tolist() for send in mine] == [[1.0, 1.0], [1.0, 1.0]]


def test_sums_are_taken_in_rank_order() -> None:
    parts = [1.0, 2.0**-24, 2.0**-24]
    requests = [replace(add(size=1), send=torch.tensor([part])) for part in parts]
    found = LocalWorld(DP3).run([program(request) for request in requests])
    assert {answer.item() for (answer,) in found} == {1.0}


def test_it_is_stepped_one_collective_at_a_time() -> None:
    grid = Grid.of(dp=2, tp=2)
    world = LocalWorld(grid)
    world.start([program(add(rank, "tp"), add(rank, "dp")) for rank in grid.ranks])
    assert world.pending == {}
    seen = []
    while event := world.advance():
        seen.append((event.ranks, event.request.axes))
    assert seen == [((0, 1), ("tp",)), ((2, 3), ("tp",)), ((0, 2), ("dp",)), ((1, 3), ("dp",))]
    assert world.pending == {}


def test_any_ready_group_can_be_answered_next_and_no_other() -> None:
    grid = Grid.of(dp=2, tp=2)
    world = LocalWorld(grid)
    world.start([program(add(grid.at(rank)["dp"])) for rank in grid.ranks])
    assert world.ready() == [(0, 2), (1, 3)]
    with pytest.raises(UsageError, match="ready are"):
        world.advance((0, 1))
    event = world.advance((1, 3))
    assert event is not None
    assert event.ranks == (1, 3)
    assert str(event) == "ranks 1, 3: all_reduce over dp (2 → 2 float32), sum"
    assert world.ready() == [(0, 2)]


def test_observers_see_every_ranks_requests_as_they_are_issued() -> None:
    seen: list[tuple[int, str]] = []
    world = LocalWorld(Grid.of(dp=2), observers=[lambda request, at: seen.append((at.rank, str(request)))])
    world.run([program(Start(add(rank, subject="a")), add(rank, subject="b")) for rank in range(2)])
    assert [(rank, text[-1]) for rank, text in seen] == [(0, "a"), (0, "b"), (1, "a"), (1, "b")]


def test_a_group_of_one_answers_itself() -> None:
    assert LocalWorld(Grid.of()).run([program(add(7, "cp"))])[0][0].tolist() == [7.0, 7.0]


def broadcast(root: int, send: torch.Tensor | None) -> Collective:
    return Collective("broadcast", ("dp",), torch.float32, send, 2, SUM, root)


SPLIT = Collective("all_to_all", ("dp",), torch.float32, torch.ones(3), 3, SUM, None, (1, 2), (1, 2))
SHORT_SPLIT = replace(SPLIT, send=torch.ones(1), receive=1, sends=(1,), receives=(1,))
OTHERS: dict[str, tuple[Collective, Collective]] = {
    "kind": (add(), broadcast(0, None)),
    "size": (add(), add(size=3)),
    "dtype": (add(), replace(add(), dtype=torch.int32, send=torch.ones(2, dtype=torch.int32))),
    "label": (add(subject="bucket 0"), add(subject="bucket 1")),
    "root": (broadcast(0, torch.ones(2)), broadcast(1, torch.ones(2))),
    "senders": (broadcast(0, torch.ones(2)), broadcast(0, torch.ones(2))),  # only the root may send
    "splits": (SPLIT, SPLIT),
    "splits of one": (SHORT_SPLIT, SHORT_SPLIT),  # they must name every position
}


@pytest.mark.parametrize(("one", "other"), OTHERS.values(), ids=OTHERS)
def test_a_mismatch_names_each_ranks_request(one: Collective, other: Collective) -> None:
    with pytest.raises(MismatchError, match=re.escape(f"  rank 0 asks {one}\n  rank 1 asks {other}")):
        LocalWorld(Grid.of(dp=2)).run([program(one), program(other)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", ["receive", "send", "nothing to send"])
def test_wrong_sizes_are_refused_though_all_ranks_ask_alike(kind: Kind, change: str) -> None:
    wrong = []
    for request in (Ask(kind, 4).request(rank) for rank in DP3.ranks):
        more = 0 if request.send is None or change == "nothing to send" else request.send.numel() + 1
        if change == "receive":
            wrong.append(replace(request, receive=request.receive + 1))
        else:
            wrong.append(replace(request, send=numbers(0, more, torch.float32) if more else None))
    with pytest.raises(MismatchError, match=rf"(?s)rank 1 asks {kind} over dp.*rank 2 asks {kind} over dp"):
        LocalWorld(DP3).run([program(request) for request in wrong])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"send": torch.ones(2).bfloat16()}, r"shape \(2,\) and torch.bfloat16"),
        ({"send": torch.ones(1, 2)}, r"\(1, 2\)"),
        ({"axes": "dp"}, "got 'dp'"),
    ],
    ids=["dtype", "shape", "axes"],
)
def test_a_request_that_no_backend_could_answer_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        replace(add(), **change)


def test_a_deadlock_names_what_each_rank_waits_for() -> None:
    grid = Grid.of(dp=2, tp=2)
    crossed = {0: ("dp", "tp"), 1: ("tp", "dp"), 2: ("tp", "dp"), 3: ("dp", "tp")}
    programs = [program(*(add(rank, axis) for axis in crossed[rank])) for rank in grid.ranks]
    with pytest.raises(DeadlockError) as caught:
        LocalWorld(grid).run(programs)
    assert str(caught.value).splitlines() == [
        "no group can proceed:",
        "  rank 0 (dp=0, tp=0) waits for all_reduce over dp (2 → 2 float32), sum",
        "  rank 1 (dp=0, tp=1) waits for all_reduce over tp (2 → 2 float32), sum",
        "  rank 2 (dp=1, tp=0) waits for all_reduce over tp (2 → 2 float32), sum",
        "  rank 3 (dp=1, tp=1) waits for all_reduce over dp (2 → 2 float32), sum",
    ]


def test_waiting_for_a_rank_that_has_ended_is_a_deadlock() -> None:
    with pytest.raises(DeadlockError, match=r"rank 0 .* waits for all_reduce.*\n  rank 1 .* has ended$"):
        LocalWorld(Grid.of(dp=2)).run([program(add()), program()])


def test_an_unanswered_request_is_told_even_if_no_rank_waits_for_it() -> None:
    with pytest.raises(DeadlockError, match=r"rank 0 .* has ended without all_reduce over dp.* sum of a"):
        LocalWorld(Grid.of(dp=2)).run([program(Start(add(subject="a")), Start(add(subject="b"))), program()])


@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_wrong_number_of_programs_is_refused(count: int) -> None:
    with pytest.raises(GridError, match=f"dp=2 needs 2 programs, one per rank; got {count}"):
        LocalWorld(Grid.of(dp=2)).run([program() for _ in range(count)])


@pytest.mark.parametrize(
    "turn",
    ["all_reduce", None, Start("all_reduce"), Call(dict, SUM)],  # type: ignore[arg-type]
    ids=["text", "None", "started", "a user's own function"],
)
def test_a_turn_that_is_no_request_is_refused(turn: object) -> None:
    with pytest.raises(RequestError, match=r"rank 1 \(dp=1\) asked for .*, which no local world"):
        LocalWorld(Grid.of(dp=2)).run([program(IDLE), program(turn)])


def test_a_world_can_be_used_again() -> None:
    world = LocalWorld(Grid.of(dp=2))
    for _ in range(2):
        assert world.run([program(add(rank)) for rank in range(2)])[0][0].tolist() == [1.0, 1.0]
    with pytest.raises(DeadlockError):
        world.run([program(add()), program()])
    assert world.run([program(add(rank)) for rank in range(2)])[1][0].tolist() == [1.0, 1.0]


def test_a_seat_and_its_optimizer_cannot_step_alone_where_there_are_others() -> None:
    seat = LocalWorld(Grid.of(dp=2)).mesh(1)
    with pytest.raises(GridError, match=r"rank 1 \(dp=1\) cannot step alone in a local world of 2 ranks"):
        seat.run(program(add()))
    assert LocalWorld(Grid.of(dp=1)).mesh(0).run(program(add(3)))[0].tolist() == [3.0, 3.0]
    weight = torch.nn.Parameter(torch.eye(2))
    muon = Muon([weight], strategy="zero1", mesh=seat)
    weight.grad = torch.eye(2)
    with pytest.raises(GridError, match=r"hand the programs of all ranks to LocalWorld\.run"):
        muon.step()
    assert torch.equal(weight, torch.eye(2))


def test_a_second_plan_is_compared_with_the_others_second_plans() -> None:
    world = LocalWorld(Grid.of(dp=2))
    for side in (3, 4):
        for rank in range(2):
            Muon([torch.nn.Parameter(torch.ones(side, side))], strategy="zero1", mesh=world.mesh(rank))
    Muon([torch.nn.Parameter(torch.ones(5, 5))], strategy="zero1", mesh=world.mesh(0))
    other = torch.nn.Parameter(torch.ones(6, 6))
    with pytest.raises(RequestError, match=r"rank 0: .*\(5, 5\).*\n  rank 1: .*\(6, 6\)"):
        Muon([other], strategy="zero1", mesh=world.mesh(1))


def test_a_request_says_what_it_asks_for() -> None:
    """Kind, axes, root, sizes sent and received, dtype, phase and subject."""
    assert f"{add(subject='bucket 1')}" == "all_reduce over dp (2 → 2 float32), sum of bucket 1"
    assert f"{broadcast(1, None)}" == "broadcast over dp, root 1 (0 → 2 float32), sum"
    assert f"{SPLIT}" == "all_to_all over dp ((1, 2) → (1, 2) float32), sum"
