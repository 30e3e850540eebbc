"""Helpers that assert that an exercise rejects an answer, with which message, and that a quiz is right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muon_tutorial.learn.exercises.judge import Exercise


def message_of_wrong(exercise: Exercise, *answers: Any) -> str:
    """The message for answers that do not pass."""
    verdict = exercise.check(*answers)
    assert verdict.passed is False
    return verdict.message


def assert_wrong(exercise: Exercise, *answers_and_says: Any) -> None:
    """Assert that answers do not pass, and that the message contains the last argument."""
    *answers, says = answers_and_says
    assert says in message_of_wrong(exercise, *answers)


def assert_quiz(quiz: Exercise, right: Mapping[str, Any], wrong: Mapping[str, tuple[Any, str]]) -> None:
    """Assert that the right numbers pass, and that for each wrong one the quiz names it and says why."""
    assert quiz.check(right)
    for name, (number, says) in wrong.items():
        message = message_of_wrong(quiz, {**right, name: number})
        assert message.startswith(f"{name}:")
        assert says in message
