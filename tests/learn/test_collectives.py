"""Lesson 03: its ring moves what it says, and its checkers say what is wrong with a ring, on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from muon_tutorial import launch
from muon_tutorial.errors import RankFailedError
from muon_tutorial.learn import collectives
from muon_tutorial.learn.pictures.colours import WRONG

from .answers import assert_quiz, assert_wrong, message_of_wrong

pytestmark = pytest.mark.live
SIZES = [2, 3, 4]


def all_reduce(pieces: list[Tensor], rank: int, ranks: int) -> list[Tensor]:
    return collectives.ring_all_gather(collectives.ring_reduce_scatter(pieces, rank, ranks), rank, ranks)


def made(
    sent: Callable = lambda rank, step: rank - step,
    came: Callable = lambda rank, step: rank - step - 1,
    more_rounds: int = 0,
    wait: bool = True,
) -> Callable:
    """A ring; right, unless an argument makes it wrong: which piece goes and comes, how often, the wait."""

    def ring(mine: Tensor, rank: int, ranks: int) -> Any:
        pieces = [torch.zeros_like(mine) for _ in range(ranks)]
        pieces[rank] = mine
        for step in range(ranks - 1 + more_rounds):
            sending: Any = dist.isend(pieces[sent(rank, step) % ranks], (rank + 1) % ranks)
            dist.recv(pieces[came(rank, step) % ranks], (rank - 1) % ranks)
            if wait:
                sending.wait()
        return pieces

    return ring


solution = made()
always_its_own = made(sent=lambda rank, step: rank)


def sends_first(mine: Tensor, rank: int, ranks: int) -> Any:
    dist.send(mine, (rank + 1) % ranks)
    return solution(mine, rank, ranks)


def receives_first(mine: Tensor, rank: int, ranks: int) -> Any:
    dist.recv(torch.empty_like(mine), (rank - 1) % ranks)
    return solution(mine, rank, ranks)


def one_buffer(mine: Tensor, rank: int, ranks: int) -> Any:
    pieces, arrived = [mine] * ranks, torch.empty_like(mine)
    for step in range(ranks - 1):
        sending: Any = dist.isend(mine if step == 0 else arrived.clone(), (rank + 1) % ranks)
        dist.recv(arrived, (rank - 1) % ranks)
        sending.wait()
        pieces[(rank - step - 1) % ranks] = arrived
    return pieces


def torchs_own(mine: Tensor, rank: int, ranks: int) -> Any:
    pieces = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(pieces, mine)
    return pieces


def to_nobody(mine: Tensor, rank: int, ranks: int) -> Any:
    dist.isend(mine, rank + 1)
    dist.recv(mine, (rank - 1) % ranks)


def to_everybody(mine: Tensor, rank: int, ranks: int) -> Any:
    pieces = [torch.empty_like(mine) for _ in range(ranks)]
    pieces[rank] = mine
    others = [other for other in range(ranks) if other != rank]
    sendings: list[Any] = [dist.isend(mine, other) for other in others]
    for other in others:
        dist.recv(pieces[other], other)
    for sending in sendings:
        sending.wait()
    return pieces


def says(function: Callable, ranks: int, timeout: float = 5.0) -> str:
    return message_of_wrong(collectives.check_ring(ranks, timeout=timeout), function)


@pytest.mark.parametrize("ranks", SIZES)
def test_the_solution_and_the_reference_pass(ranks: int) -> None:
    exercise = collectives.check_ring(ranks)
    assert exercise.check(solution)
    assert exercise.accepted is solution
    assert collectives.check_ring(ranks).check(collectives.ring_all_gather)


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (always_its_own, "Round 2: rank 0 sends piece 0 to rank 1, who holds it already"),
        (made(more_rounds=1), "sends piece 1 to rank 1, who holds it already"),
        (made(more_rounds=-1), "Rank 0 returned no piece at place 1: that buffer was never filled"),
        (made(sent=lambda r, step: r - step - 1), "Round 1: rank 0 sends a buffer that holds no piece yet"),
        (lambda *given: solution(*given)[::-1], "at place 0. Pieces stand in the order of ranks"),
        (lambda *given: torch.cat(solution(*given)), "pieces; rank 0 returned Tensor"),
        (one_buffer, "what came last has overwritten the rest"),
        (torchs_own, "no message was seen. Send them yourself"),
        (lambda mine, rank, ranks: dist.recv(mine, rank - 1), "there is no rank -1: ranks go from 0 to"),
        (lambda mine, rank, ranks: [mine][ranks], "IndexError"),
        (to_everybody, "In a ring it sends to rank 1 only"),
    ],
)
def test_a_wrong_ring_is_told_what_is_wrong_with_it(wrong: Callable, message: str, ranks: int) -> None:
    assert message in says(wrong, ranks)


def test_a_message_to_nobody_is_an_error_of_its_own_line_and_no_crash() -> None:
    message = says(to_nobody, 3)
    assert "there is no rank 3: ranks go from 0 to 2. Take it % 3." in message
    assert "SIGSEGV" not in message


def test_ranks_that_wait_for_each_other_are_told() -> None:
    assert "all are in send(), and nobody receives" in says(sends_first, 3, timeout=1.5)
    assert "rank 0 waits to receive from rank 2" in says(receives_first, 3, timeout=1.5)


def test_a_handle_that_is_never_waited_for_is_named() -> None:
    message = says(made(wait=False), 4, timeout=3.0)
    assert "has not waited for" in message or "returns without wait()" in message


def test_a_stub_is_no_answer_and_the_reference_stands_in(capsys: pytest.CaptureFixture[str]) -> None:
    assert collectives.check_ring(2).check(lambda *given: ...).passed is None
    assert collectives.run_gather(lambda *given: ..., 2).messages_sent(0) == 1
    assert "reference" in capsys.readouterr().out


@pytest.mark.parametrize("ranks", SIZES)
def test_counted_bytes_are_the_formulas_and_the_halves_are_equal(ranks: int) -> None:
    gather, total = (
        collectives.run_gather(solution, ranks),
        collectives.run_sum(all_reduce, ranks),
    )
    formula = [
        collectives.ring_formula(kind, ranks) for kind in ("all_gather", "reduce_scatter", "all_reduce")
    ]
    for rank in range(ranks):
        sent, half = gather.bytes_sent(rank), total.bytes_sent(rank, last=ranks - 1)
        assert [sent, half, total.bytes_sent(rank)] == formula == [sent, sent, 2 * sent]
    said = collectives.say_bytes(gather, total).split("\n")
    assert len({line.split()[-1] for line in said[1:]} & {line.split()[-2] for line in said[1:]}) == 2


def test_the_sum_is_torchs_own() -> None:
    assert launch(_same_as_torchs, 3) == [True] * 3


def _same_as_torchs(rank: int) -> bool:
    pieces = collectives.my_pieces(rank, 3)
    whole = torch.cat(pieces)
    dist.all_reduce(whole)
    return torch.equal(torch.cat(all_reduce(pieces, rank, 3)), whole)


def test_pictures_mark_what_is_wrong() -> None:
    runs = [collectives.run_gather(ring, 3) for ring in (solution, always_its_own)]
    right, wrong = (collectives.first_repeat(run.start, run.messages) for run in runs)
    assert right is None
    assert wrong is not None
    assert wrong.round == 2
    assert [WRONG in collectives.picture_of_gather(run).svg for run in runs] == [False, True]
    stuck = collectives.picture_of_gather(collectives.run_gather(sends_first, 3, timeout=1.5))
    assert stuck.alt.count("nobody receives it") == 3
    clock = collectives.picture_of_clock(collectives.run_gather(solution, 3))
    assert clock.alt.count("sends piece") == 6


def test_the_same_run_gives_the_same_ladder() -> None:
    one, two = (collectives.picture_of_gather(collectives.run_gather(solution, 4)) for _ in range(2))
    assert one.svg == two.svg


def test_everybody_sends_first_ends_in_a_named_error() -> None:
    with pytest.raises(RankFailedError) as caught:
        launch(_send_first, 2, timeout=1.5)
    assert collectives.say_failure(caught.value).startswith("RankFailedError\nno rank failed by itself")


def _send_first(rank: int) -> None:
    dist.send(torch.ones(1), 1 - rank)
    dist.recv(torch.ones(1), 1 - rank)


@pytest.mark.parametrize("ranks", [2, 4, 6])
def test_the_prediction_and_the_quiz_know_right_from_wrong(ranks: int) -> None:
    half, guess = ranks - 1, collectives.predict(ranks)
    assert guess.check(half, half * 4096)
    assert_wrong(guess, ranks, ranks * 4096, "home again")
    assert_wrong(guess, ranks + 3, 4096, "more than anybody lacks")
    assert_wrong(guess, half, half * 1024, "each takes 4 bytes")
    assert_wrong(guess, half, 7, "7 is not")
    assert_wrong(guess, "many", 7, "whole numbers")
    assert_quiz(
        collectives.quiz(ranks),
        {"rounds": 2 * half, "share": 0.5, "bytes": 2 * half * 4096},
        {"rounds": (half, "last rung"), "share": (1, "Divide"), "bytes": (half * 4096, "bytes_sent")},
    )


def test_a_wire_is_fitted_through_exact_times() -> None:
    sizes = [4**power for power in range(1, 12)]
    times = [5e-5 + size / 2e9 for size in sizes]
    wire = collectives.fit_wire(sizes, times)
    assert (wire.latency, wire.bandwidth) == pytest.approx((5e-5, 2e9))
    assert "latency 50 µs" in collectives.picture_of_wire(wire, sizes, times).alt


def test_a_wire_is_never_negative() -> None:
    wire = collectives.fit_wire([4, 1024, 4096], [3e-3, 2e-3, 1e-3])
    assert wire.latency > 0
    assert wire.bandwidth > 0
