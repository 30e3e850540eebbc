"""Messages: a piece's contents, notes that belong together, and the pieces held after each round."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muon_tutorial.learn.collectives.messages import (
    MessageNote,
    PieceContent,
    content_of,
    fill,
    first_repeat,
    holdings_after,
    match_messages,
)


@given(ranks=st.integers(1, 8), data=st.data())
def test_a_sum_tells_its_piece_and_its_summands(ranks: int, data: st.DataObject) -> None:
    piece = data.draw(st.integers(0, ranks - 1))
    members = data.draw(st.sets(st.integers(0, ranks - 1), min_size=1))
    total = torch.stack([fill(piece, rank, ranks, 3) for rank in members]).sum(0)
    assert content_of(total, ranks) == PieceContent(piece, frozenset(members))


@pytest.mark.parametrize("numbers", [[0.0] * 3, [1.0, 2.0], [0.5], [float("nan")], []])
def test_what_is_no_piece_is_none(numbers: list[float]) -> None:
    assert content_of(torch.tensor(numbers), 4) is None


def note(verb: str, peer: int, piece: int, start: float, stop: float | None) -> MessageNote:
    return MessageNote(verb, peer, PieceContent(piece, frozenset({piece})), 8, start, stop)  # type: ignore[arg-type]


def test_rounds_count_what_had_to_arrive_before() -> None:
    zero = [
        note("sent", 1, 0, 10.0, 11.0),
        note("received", 1, 1, 10.1, 11.5),
        note("sent", 1, 1, 12.0, 13.0),
    ]
    one = [
        note("sent", 0, 1, 10.2, 11.0),
        note("received", 0, 0, 10.3, 11.0),
        note("received", 0, 1, 11.0, 13.5),
    ]
    found = match_messages([zero, one])
    assert [(m.round, m.sender, m.receiver) for m in found] == [(1, 0, 1), (1, 1, 0), (2, 0, 1)]
    assert [m.stop for m in found] == [1.0, 1.5, 3.5]


def test_a_message_that_nobody_receives_has_no_end() -> None:
    [message] = match_messages([[note("sent", 1, 0, 1.0, None)], []])
    assert message.stop is None
    assert holdings_after([{0: frozenset({0})}, {}], [message], 1)[1] == {}


def test_the_first_repeat_is_found() -> None:
    start = [{0: frozenset({0})}, {1: frozenset({1})}]
    zero = [note("sent", 1, 0, 0.0, 1.0), note("received", 1, 1, 0.0, 1.0), note("sent", 1, 0, 2.0, 3.0)]
    one = [note("sent", 0, 1, 0.0, 1.0), note("received", 0, 0, 0.0, 1.0), note("received", 0, 0, 1.0, 3.0)]
    messages = match_messages([zero, one])
    repeat = first_repeat(start, messages)
    assert repeat is not None
    assert str(repeat) == "rank 0 sends piece 0 to rank 1"
    assert first_repeat(start, messages[:2]) is None
    assert holdings_after(start, messages, 1)[1] == {0: frozenset({0}), 1: frozenset({1})}
