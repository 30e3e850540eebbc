"""How tests of exercises say that an answer is wrong, what is said of it, and what a quiz knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muon_tutorial.learn.exercises.judge import Exercise


def message_of_wrong(exercise: Exercise, *answers: Any) -> str:
    """What is said of answers that do not pass."""
    verdict = exercise.check(*answers)
    assert verdict.passed is False
    return verdict.message


def assert_wrong(exercise: Exercise, *answers_and_says: Any) -> None:
    """Answers do not pass, and what is said of them contains the last argument."""
    *answers, says = answers_and_says
    assert says in message_of_wrong(exercise, *answers)


def assert_quiz(quiz: Exercise, right: Mapping[str, Any], wrong: Mapping[str, tuple[Any, str]]) -> None:
    """The right numbers pass; with one of them wrong, the quiz names it and says why."""
    assert quiz.check(right)
    for name, (number, says) in wrong.items():
        message = message_of_wrong(quiz, {**right, name: number})
        assert message.startswith(f"{name}:")
        assert says in message
