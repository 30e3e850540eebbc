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

from .answers import altered, judged, message_of_wrong

solution = collectives.ring_all_gather
ring = partial(altered, solution, ("empty_like", "zeros_like"))
scatter = partial(altered, collectives.ring_reduce_scatter)


def torchs_own(mine: Tensor, rank: int, ranks: int) -> Any:
    pieces = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(pieces, mine)
    return pieces


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
    (ring(("(rank - step) %", "rank %")), "Round 2: rank 0 sends piece 0 to rank 1, which holds it already"),
    (ring(("range(ranks - 1)", "range(ranks)")), "sends piece 1 to rank 1, which holds it already"),
    (
        ring(("range(ranks - 1)", "range(ranks - 2)")),
        "Rank 0 returned no piece at place 1: that buffer was never filled",
    ),
    (ring(("step) %", "step - 1) %")), "Round 1: rank 0 sends a buffer that holds no piece yet"),
    (lambda *given: solution(*given)[::-1], "at place 0. Pieces are in the order of ranks"),
    (lambda *given: torch.cat(solution(*given)), "pieces; rank 0 returned Tensor"),
    (
        ring(
            ("(mine) for _ in range(ranks)]", "(mine)] * ranks"),
            ("ranks], group=group, group_dst", "ranks].clone(), group_dst"),
        ),
        "what came last has overwritten the rest",
    ),
    (torchs_own, "no message was seen. Send them yourself"),
    (lambda mine, rank, ranks: dist.recv(mine, rank - 1), "there is no rank -1: ranks go from 0 to"),
    (to_everybody, "In a ring it sends to rank 1 only"),
]


def test_a_message_to_nobody_is_an_error_of_its_own_line_and_no_crash() -> None:
    message = says(ring(("(rank + 1) % ranks", "rank + 1")), 3)
    assert "there is no rank 3: ranks go from 0 to 2. Take it % 3." in message
    assert not any(word in message for word in ("SIGSEGV", "messages.py", "Hint"))


def test_ranks_that_wait_for_each_other_or_for_no_handle_are_told() -> None:
    sends_first = ring(("    for", "    dist.send(mine, (rank + 1) % ranks)\n    for"))
    receives_first = ring(("    for", "    dist.recv(mine.clone(), (rank - 1) % ranks)\n    for"))
    assert "all are in send(), and none receives" in says(sends_first, 3, timeout=1.5)
    assert "rank 0 waits to receive from rank 2" in says(receives_first, 3, timeout=1.5)
    message = says(ring(("sending.wait()", "pass")), 4, timeout=3.0)
    assert "has not waited for" in message or "returns without wait()" in message


def test_the_sum_of_the_reader_passes_and_says_its_bytes_beside_par() -> None:
    exercise = collectives.check_reduce_scatter(4)
    verdict = exercise.check(collectives.ring_reduce_scatter)
    assert verdict
    assert "Yours takes 24576 bytes in its all_reduce; par is 24576." in verdict.message
    assert verdict.picture is not None
    assert "Round 3: rank 0 sends piece 1 to rank 1, 3 summed" in verdict.picture.alt
    assert "Yours takes 61440 bytes in its all_reduce; par is 24576." in exercise.check(fetches_all).message


def fetches_all(pieces: list[Tensor], rank: int, ranks: int) -> Tensor:
    every = solution(torch.cat(pieces), rank, ranks)
    return torch.stack([theirs.chunk(ranks)[rank] for theirs in every]).sum(0)


def test_a_right_ring_is_drawn_with_the_messages_that_it_sent() -> None:
    verdict = collectives.check_ring(3).check(solution)
    assert verdict.picture is not None
    assert "Round 2: rank 0 sends piece 2 to rank 1" in verdict.picture.alt


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
        (
            scatter(("[(rank - 1)", "[(rank)"), ("ranks - 1)", "ranks - 2)"), ("step - 2", "step - 1")),
            "Its own is piece 0",
        ),
        (scatter(("(rank - step - 2) %", "rank %")), "returned is not a sum of one piece"),
        (scatter(("[(rank - 1)", "[(rank)"), ("step - 2", "step - 1")), "Its own is piece 0"),
        (torchs_sum, "no message was seen"),
        (
            scatter(
                (
                    "total = arrived + pieces[(rank - step - 2) % ranks]",
                    "total = pieces[rank - step - 2].add_(arrived)",
                )
            ),
            "Rank 0 has changed the pieces that it was given",
        ),
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
