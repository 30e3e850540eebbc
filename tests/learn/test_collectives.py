"""Lesson 03: its ring moves the stated bytes, and its checkers find a ring's errors, on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from muon_tutorial.learn import collectives
from muon_tutorial.learn.collectives.exercises import ring_seconds
from muon_tutorial.learn.collectives.messages import PieceContent, content_of, fill

from .answers import judged, message_of_wrong


def made(
    sent: Callable = lambda rank, step: rank - step,
    came: Callable = lambda rank, step: rank - step - 1,
    more_rounds: int = 0,
    wait: bool = True,
) -> Callable:
    """A ring, which arguments can make wrong: in the piece sent or received, the rounds, or the wait."""

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


WRONG_RINGS = [
    (always_its_own, "Round 2: rank 0 sends piece 0 to rank 1, which holds it already"),
    (made(more_rounds=1), "sends piece 1 to rank 1, which holds it already"),
    (made(more_rounds=-1), "Rank 0 returned no piece at place 1: that buffer was never filled"),
    (made(sent=lambda r, step: r - step - 1), "Round 1: rank 0 sends a buffer that holds no piece yet"),
    (lambda *given: solution(*given)[::-1], "at place 0. Pieces are in the order of ranks"),
    (lambda *given: torch.cat(solution(*given)), "pieces; rank 0 returned Tensor"),
    (one_buffer, "what came last has overwritten the rest"),
    (torchs_own, "no message was seen. Send them yourself"),
    (lambda mine, rank, ranks: dist.recv(mine, rank - 1), "there is no rank -1: ranks go from 0 to"),
    (to_everybody, "In a ring it sends to rank 1 only"),
]


def test_a_message_to_nobody_is_an_error_of_its_own_line_and_no_crash() -> None:
    message = says(to_nobody, 3)
    assert "there is no rank 3: ranks go from 0 to 2. Take it % 3." in message
    assert not any(word in message for word in ("SIGSEGV", "messages.py", "Hint"))


def test_ranks_that_wait_for_each_other_or_for_no_handle_are_told() -> None:
    assert "all are in send(), and none receives" in says(sends_first, 3, timeout=1.5)
    assert "rank 0 waits to receive from rank 2" in says(receives_first, 3, timeout=1.5)
    message = says(made(wait=False), 4, timeout=3.0)
    assert "has not waited for" in message or "returns without wait()" in message


def test_the_sum_of_the_reader_passes_and_says_its_bytes_beside_par() -> None:
    exercise = collectives.check_reduce_scatter(4)
    verdict = exercise.check(collectives.ring_reduce_scatter)
    assert verdict
    assert "Yours takes 24576 bytes in its all_reduce; par is 24576." in verdict.message
    assert "Yours takes 61440 bytes in its all_reduce; par is 24576." in exercise.check(fetches_all).message


def fetches_all(pieces: list[Tensor], rank: int, ranks: int) -> Tensor:
    every = solution(torch.cat(pieces), rank, ranks)
    return torch.stack([theirs.chunk(ranks)[rank] for theirs in every]).sum(0)


def summed(start: int = -1, last: int = 0, mine: Callable = lambda rank, step: rank - step - 2) -> Callable:
    """A reduce_scatter, which an argument can make wrong."""

    def scatter(pieces: list[Tensor], rank: int, ranks: int) -> Tensor:
        total = pieces[(rank + start) % ranks]
        for step in range(ranks - 1 + last):
            sending: Any = dist.isend(total, (rank + 1) % ranks)
            arrived = torch.empty_like(total)
            dist.recv(arrived, (rank - 1) % ranks)
            sending.wait()
            total = arrived + pieces[mine(rank, step) % ranks]
        return total

    return scatter


def in_place(pieces: list[Tensor], rank: int, ranks: int) -> Tensor:
    for step in range(ranks - 1):
        sending: Any = dist.isend(pieces[(rank - step - 1) % ranks], (rank + 1) % ranks)
        arrived = torch.empty_like(pieces[0])
        dist.recv(arrived, (rank - 1) % ranks)
        sending.wait()
        pieces[(rank - step - 2) % ranks].add_(arrived)
    return pieces[rank]


def torchs_sum(pieces: list[Tensor], rank: int, ranks: int) -> Tensor:
    whole = torch.cat(pieces)
    dist.all_reduce(whole)
    return whole.chunk(ranks)[rank]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda pieces, rank, ranks: pieces, "a tensor of 1024 entries; rank 0 returned list"),
        (lambda pieces, rank, ranks: torch.cat(pieces), "returned a tensor of shape"),
        (lambda pieces, rank, ranks: pieces[rank], "but the entries of rank 1, 2"),
        (summed(last=-1, start=0, mine=lambda r, step: r - step - 1), "Its own is piece 0"),
        (summed(mine=lambda r, step: r), "returned is not a sum of one piece"),
        (summed(start=0, mine=lambda r, step: r - step - 1), "Its own is piece 0"),
        (torchs_sum, "no message was seen"),
        (in_place, "Rank 0 has changed the pieces that it was given"),
    ],
)
def test_a_wrong_sum_is_told_what_is_wrong_with_it_and_drawn(wrong: Callable, message: str) -> None:
    verdict = collectives.check_reduce_scatter(3, timeout=5.0).check(wrong)
    assert verdict.passed is False
    assert message in verdict.message
    assert verdict.picture is not None


test_a_wrong_ring_is_told_what_is_wrong_with_it = judged(
    (partial(collectives.check_ring, 3, timeout=5.0), WRONG_RINGS)
)


def test_a_broadcast_sends_the_whole_tensor() -> None:
    assert collectives.ring_formula("broadcast", 4096, 2, 4) == 4096 * 2


def test_a_rings_seconds_are_messages_and_bytes() -> None:
    """Six messages of 0.1 ms, and 1.5 MB at 1 GB/s."""
    assert ring_seconds(1e6, 4, 1e-4, 1e9) == pytest.approx(0.0021)


def test_a_rank_that_gets_another_piece_has_not_got_through() -> None:
    run = collectives.run_setting(lambda mine, rank, ranks, first: mine, ("send",) * 4, "gloo")
    assert not collectives.has_arrived(run)


def test_a_wire_is_fitted_through_exact_times_and_never_negative() -> None:
    sizes = [4**power for power in range(1, 12)]
    times = [5e-5 + size / 2e9 for size in sizes]
    wire = collectives.fit_wire(sizes, times)
    assert (wire.latency, wire.bandwidth) == pytest.approx((5e-5, 2e9))
    assert "latency 50 µs" in collectives.picture_of_wire(wire, sizes, times).alt
    backwards = collectives.fit_wire([4, 1024, 4096], [3e-3, 2e-3, 1e-3])
    assert min(backwards.latency, backwards.bandwidth) > 0


@given(ranks=st.integers(1, 8), data=st.data())
def test_a_sum_tells_its_piece_and_its_summands(ranks: int, data: st.DataObject) -> None:
    piece = data.draw(st.integers(0, ranks - 1))
    members = data.draw(st.sets(st.integers(0, ranks - 1), min_size=1))
    total = torch.stack([fill(piece, rank, ranks, 3) for rank in members]).sum(0)
    assert content_of(total, ranks) == PieceContent(piece, frozenset(members))


@pytest.mark.parametrize("numbers", [[0.0] * 3, [1.0, 2.0], [0.5], [float("nan")], []])
def test_what_is_no_piece_is_none(numbers: list[float]) -> None:
    assert content_of(torch.tensor(numbers), 4) is None
