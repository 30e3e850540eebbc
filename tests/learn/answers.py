"""Helpers that make wrong answers, and assert what an exercise says to them, and that a quiz is right."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from muon_tutorial.learn.exercises.judge import Exercise


def altered(function: Any, *changes: tuple[str, str]) -> Any:
    """A function, usually a reference, with other code in some places of its text."""
    text, names = inspect.getsource(function), dict(vars(sys.modules[function.__module__]))
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    exec(text, names)
    return names[function.__name__]


def message_of_wrong(exercise: Exercise, *answers: Any) -> str:
    """The message for answers that do not pass."""
    verdict = exercise.check(*answers)
    assert verdict.passed is False
    return verdict.message


def assert_wrong(exercise: Exercise, *answers_and_says: Any) -> None:
    """Assert that answers do not pass, and that the message, as one line, contains the last argument."""
    *answers, says = answers_and_says
    said = " ".join(message_of_wrong(exercise, *answers).split())
    assert says in said, said


PASSES = "passes"
"""In a table of answers, an answer that passes has this in place of a message."""


def judged(*tables: tuple[Callable[[], Exercise], Iterable[Any]]) -> Callable[..., None]:
    """A test with a case for each answer. The answer must pass, or the reader must be told what is wrong with
    it.

    A table is a pair: a function that makes an exercise, and rows. A row holds the answers, and as its last
    item a part of the message.
    """
    cases = [pytest.param(make, row, id=str(row[-1])) for make, rows in tables for row in rows]

    @pytest.mark.parametrize(("make", "row"), cases)
    def test(make: Callable[[], Exercise], row: Any) -> None:
        if row[-1] == PASSES:
            assert make().check(*row[:-1])
        else:
            assert_wrong(make(), *row)

    return test


def assert_quiz(quiz: Exercise, right: Mapping[str, Any]) -> None:
    """Assert that the right numbers pass, and that the quiz names each wrong one."""
    assert quiz.check(right)
    for name, number in right.items():
        assert message_of_wrong(quiz, {**right, name: 2 * number + 1}).startswith(f"{name}: ")
