"""Exercises: they check an answer, say what is wrong with it, and give a hint after a failed try.

An answer of ``...`` counts as no answer: it is not judged, and the cells that follow use the reference.
"""

from __future__ import annotations

import html
import math
import textwrap
import traceback
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from types import CodeType, MappingProxyType
from typing import TYPE_CHECKING, Any

from .. import my_muon
from ..pictures.colours import EMPTY, INK, QUIET, RIGHT, RIGHT_FILL, WRONG, WRONG_FILL

if TYPE_CHECKING:
    from ..pictures.picture import Picture


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is wrong with an answer, a hint for each try with this mistake, and a picture of its effect.

    If ``what`` is empty, nothing is wrong: the picture, if any, shows what a right answer has done.
    """

    what: str
    hints: tuple[str, ...] = ()
    picture: Picture | None = None


@dataclass(frozen=True, slots=True)
class Par:
    """A number that a good answer reaches; less is better, as in golf. ``count`` finds it for an answer."""

    unit: str
    number: float
    count: Callable[..., float]

    def say(self, mine: float) -> str:
        better = " You are below it!" if mine < self.number else ""
        return f"Yours takes {mine:g} {self.unit}; par is {self.number:g}.{better}"


Judge = Callable[..., str | Diagnosis | None]


class OpenAnswerError(Exception):
    """One of the reader's functions still returns ``...``."""


class MistakeError(Exception):
    """A sentence that says what is wrong with an answer. A judge may raise it instead of returning it."""


@dataclass(frozen=True, slots=True)
class VerdictLook:
    """How a verdict looks: its words, its CSS class on web pages, its mark and its colours."""

    said: str
    name: str
    mark: str
    edge: str
    fill: str

    @property
    def style(self) -> str:
        colours = f"border-left:4px solid {self.edge};background:{self.fill};color:{INK}"
        return f"{colours};padding:6px 12px;max-width:820px"


LOOKS = {
    True: VerdictLook("Right.", "right", "✓", RIGHT, RIGHT_FILL),
    False: VerdictLook("Not yet.", "wrong", "✗", WRONG, WRONG_FILL),
    None: VerdictLook("No answer yet.", "open", "…", QUIET, EMPTY),
}
"""The look of each verdict: the answer passed (True), failed (False), or is missing (None)."""


@dataclass(frozen=True, slots=True)
class AnswerVerdict:
    """The result of a check. ``passed`` is None if there was no answer."""

    passed: bool | None
    message: str
    picture: Picture | None = None

    def __bool__(self) -> bool:
        return self.passed is True

    def __repr__(self) -> str:
        drawn = f" {self.picture.alt}" if self.picture else ""
        said = f"{LOOKS[self.passed].said} {self.message}{drawn}"
        return textwrap.fill(said.strip(), 100, break_on_hyphens=False)

    def _repr_html_(self) -> str:
        look = LOOKS[self.passed]
        said = f"<b>{look.mark} {look.said}</b> {html.escape(self.message)}"
        drawn = self.picture.html if self.picture else ""
        return f'<div style="{look.style}">{said}</div>{drawn}'


@dataclass(slots=True)
class Exercise:
    """One exercise: ``judge`` gets the answers, and returns what is wrong with them, or None.

    A failed try gets the next hint of the ``Diagnosis`` or, if that has none, of ``hints``.
    ``praise`` says why the right answer is right; ``par`` measures how good it is. Right answers are written
    to the reader's my_muon.py under the names in ``keeps``, one per answer, and the best score with a par is
    noted there. An ``optional`` exercise may stay open.

    >>> judge = lambda x: None if x == 4 else f"2 + 2 is not {x}."
    >>> double = Exercise(judge, hints=("Count.",), praise="It is 4.")
    >>> double.check(...)
    No answer yet. Replace ... with yours, or go on without.
    >>> double.check(5)
    Not yet. 2 + 2 is not 5. Hint: Count.
    >>> double.check(4)
    Right. It is 4.
    """

    judge: Judge
    hints: Sequence[str] = ()
    praise: str = ""
    par: Par | None = None
    keeps: Sequence[str] = ()
    optional: bool = False
    wrong: int = field(default=0, init=False)
    opened: int = field(default=0, init=False)
    made: dict[tuple[str, ...], int] = field(default_factory=dict, init=False)
    accepted: Any = field(default=..., init=False)

    def check(self, *answers: Any) -> AnswerVerdict:
        """Judge the answers, given in the order of the exercise's stub."""
        try:
            if any(_is_open(answer) or (isinstance(answer, dict) and not answer) for answer in answers):
                raise OpenAnswerError
            wrong = self.judge(*answers)
        except OpenAnswerError:
            self.opened += 1
            start = f" To begin: {self.hints[0]}" if self.opened > 1 and self.hints else ""
            return AnswerVerdict(None, f"Replace ... with yours, or go on without.{start}")
        except MistakeError as mistake:
            wrong = str(mistake)
        found = wrong if isinstance(wrong, Diagnosis) else Diagnosis(wrong or "")
        if not found.what:
            self.accepted = answers[0] if len(answers) == 1 else answers
            patience = f"It took {self.wrong + 1} tries, and you stayed with it." if self.wrong > 1 else ""
            self.wrong = 0
            mine = self.par.count(*answers) if self.par else math.nan
            score = self.par.say(mine) if self.par else ""
            said = self.praise, score, patience, *self._keep(answers, mine)
            return AnswerVerdict(True, " ".join(filter(None, said)), found.picture)
        self.wrong += 1
        hint = self._hint(found)
        return AnswerVerdict(False, f"{found.what} Hint: {hint}" if hint else found.what, found.picture)

    def _keep(self, answers: Sequence[Any], mine: float) -> list[str]:
        """Write right answers and their score into my_muon.py, and return what to say about it."""
        said = [my_muon.keep.keep(dict(zip(self.keeps, answers, strict=True)))] if self.keeps else []
        return [*said, my_muon.scores.keep_score(answers[0], mine, self.par.number)] if self.par else said

    def _hint(self, found: Diagnosis) -> str:
        """The mistake's next hint; without one, the exercise's next hint. The last hint repeats."""
        hints = found.hints or tuple(self.hints)
        # each mistake with its own hints has a count; all others share the count of ()
        self.made[found.hints] = tries = self.made.get(found.hints, 0) + 1
        return hints[min(tries, len(hints)) - 1] if hints else ""

    def accepted_or(self, reference: Any) -> Any:
        """The answer that passed; if none has, print a note and return the reference."""
        if self.accepted is ...:
            optional = "No answer to the optional exercise: from here on, its reference is used."
            print(optional if self.optional else "No right answer yet: from here on, the reference is used.")
            return reference
        return self.accepted


def value_of(function: Callable[..., Any], *arguments: Any, told: str = "{}") -> Any:
    """What the reader's function returns.

    Raises:
        OpenAnswerError: the function returned ``...``, or a tuple or dictionary of nothing else.
        MistakeError: it is no function, or it raised an error. The reason replaces ``{}`` in ``told``.
    """
    if not callable(function):
        raise MistakeError(told.format("Give a function."))
    try:
        value = function(*arguments)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[1:]
        where = f" In: {frames[0].line}" if frames and frames[0].line else ""
        said = f"The function raised {type(error).__name__}: {error}.{where}"
        raise MistakeError(told.format(said)) from error
    if _is_open(value):
        raise OpenAnswerError
    return value


def _is_open(answer: Any) -> bool:
    parts = list(answer.values() if isinstance(answer, dict) else answer if isinstance(answer, tuple) else ())
    return answer is ... or (bool(parts) and all(part is ... for part in parts))


def names_or_none(answer: object, known: Container[object], kind: type = str) -> list[Any] | None:
    """The answer's names, or whole numbers, as a list; None if any of them is not ``known``."""
    if isinstance(answer, str) or not isinstance(answer, Iterable):
        return None
    names = list(answer)
    return names if all(type(name) is kind and name in known for name in names) else None


def numbers(
    *asked: tuple[str, float, str],
    within: float = 0.0,
    praise: str = "Every one of them: this lesson is yours.",
) -> Exercise:
    """A quiz of numbers. Each has a name, a value (up to a relative error ``within``), and a reply."""

    def judge(answers: Mapping[str, Any]) -> str | None:
        if not isinstance(answers, Mapping):
            return f"Give a dictionary of {', '.join(name for name, *_ in asked)}."
        left = [name for name, *_ in asked if answers.get(name, ...) is ...]
        said = [
            f"{name}: {_ASKED if is_text(answers[name], right) else f'{answers[name]} is not it. {told}'}"
            for name, right, told in asked
            if name not in left and not is_near(answers[name], right, within)
        ]
        said += [f"Still open: {', '.join(left)}."] if left and len(left) < len(asked) else []
        return " ".join(said) or None

    return Exercise(judge, praise=praise)


def guesses(*asked: Any, within: float = 0.0, hints: Sequence[str] = (), **more: Any) -> Exercise:
    """A prediction of several things, in order. Each has a name, a value, and what to say if it is wrong.

    Usual mistakes may follow, as pairs: a wrong value, and the reply. ``hints``: one for each thing.
    ``more``: the exercise's other fields.

    >>> legs = guesses(("legs", 6, "Count them.", (8, "A spider has as many.")), praise="A bee has six.")
    >>> legs.check(8)
    Not yet. legs: not 8. A spider has as many.
    """

    def judge(*said: Any) -> Diagnosis | None:
        for place, (mine, (name, right, told, *mistakes)) in enumerate(zip(said, asked, strict=True)):
            if not _alike(mine, right, within):
                why = (reply for wrong, reply in mistakes if _alike(mine, wrong, within))
                what = f"{name}: {_ASKED if is_text(mine, right) else f'not {mine}. {next(why, told)}'}"
                return Diagnosis(what, tuple(hints[place : place + 1]))
        return None

    return Exercise(judge, **more)


Slip = tuple[str, Callable[..., Any]]
"""A usual mistake: what to say about it, and a function that makes it."""


def written(
    right: Callable[..., Any],
    cases: Sequence[tuple[Any, ...]],
    *slips: Slip,
    say: str,
    hint_of: Mapping[str, str] = MappingProxyType({}),
    draw: Callable[..., Picture] | None = None,
    **more: Any,
) -> Exercise:
    """A function of numbers, lists and strings, compared with ``right`` in each case.

    ``say`` is a format that names a case by its arguments. If the answer gives the same values as one of the
    ``slips``, the message says which slip that is. If ``right`` returns a dictionary, the first wrong key is
    named, with its hint from ``hint_of``. ``draw`` makes a picture of a right answer. ``more`` are other
    fields of the exercise.

    >>> square = ("That is its square.", lambda n: n * n)
    >>> twice = written(lambda n: 2 * n, [(2,), (3,)], square, say="n = {}", praise="So it is.")
    >>> twice.check(lambda n: n * n)
    Not yet. For n = 3: 9, where 6 is right. That is its square.
    >>> twice.check(lambda n: n + n)
    Right. So it is.
    """

    def judge(function: Callable[..., Any]) -> Diagnosis | None:
        found, wanted = list[Any](), [right(*deepcopy(case)) for case in cases]
        for case in cases:
            try:
                found.append(value_of(function, *deepcopy(case), told=f"For {say.format(*case)}: {{}}"))
            except MistakeError:
                if _alike(found, wanted[: len(found)]):
                    raise
                break  # an earlier wrong value says more than this error
        tried, hints = cases[: len(found)], tuple[str, ...]()
        pairs = zip(tried, found, wanted, strict=False)
        if (wrong := next((each for each in pairs if not _alike(*each[1:])), None)) is None:
            return Diagnosis("", picture=draw(function)) if draw else None
        case, mine, due = wrong
        made = (said for said, slip in slips if _alike(found, [slip(*deepcopy(each)) for each in tried]))
        where = f"For {say.format(*case)}"
        if isinstance(due, Mapping):
            if not isinstance(mine, Mapping) or mine.keys() != due.keys():
                return Diagnosis(f"{where}: give a dictionary with the keys {', '.join(map(str, due))}.")
            key = next(key for key in due if not _alike(mine[key], due[key]))
            where, mine, due = f"{where}, {key}", mine[key], due[key]
            hints = (hint_of[key],) if key in hint_of else ()
        if mine is ...:
            return Diagnosis(f"{where} is still open.", hints)
        what = _ASKED if is_text(mine, due) else f"{_short(mine)}, where {_short(due)} is right."
        return Diagnosis(" ".join([f"{where}: {what}", *made][:2]), hints)

    return Exercise(judge, **more)


def _alike(mine: Any, right: Any, within: float = 1e-6) -> bool:
    """Whether an answer is right; numbers, also inside lists or dictionaries, may be off by a fraction."""
    if isinstance(right, Mapping):
        same_keys = isinstance(mine, Mapping) and mine.keys() == right.keys()
        return same_keys and all(_alike(mine[key], each, within) for key, each in right.items())
    if isinstance(right, set | list | tuple) and hasattr(mine, "tolist"):
        mine = mine.tolist()
    if isinstance(right, set):
        is_several = isinstance(mine, set | frozenset | list | tuple | range) and len(mine) == len(right)
        return is_several and all(any(_alike(one, each, within) for one in mine) for each in right)
    if isinstance(right, list | tuple):
        is_list = isinstance(mine, list | tuple) and len(mine) == len(right)
        return is_list and all(_alike(*pair, within) for pair in zip(mine, right, strict=True))
    return mine is right or is_near(mine, right, within)


def _short(value: Any) -> str:
    """A value in a message.

    >>> _short([1 / 3, 2]), _short(({3, 0}, 1))
    ('[0.3333, 2]', '[[0, 3], 1]')
    """
    if isinstance(value, set | frozenset):  # the order does not count, so most readers write a list
        value = sorted(value, key=lambda each: (len(str(each)), str(each)))
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_short, value))}]"
    value = value.item() if getattr(value, "ndim", None) == 0 else value
    said = "..." if value is ... else str(value)
    return f"{value:.4g}" if isinstance(value, float) else textwrap.shorten(said, 200)


def first(found: Iterable[str | Diagnosis | None]) -> Any:
    """The first mistake found; None if there is none."""
    return next((each for each in found if each), None)


def why(*cases: tuple[object, str], otherwise: str = "") -> str:
    """What to say about a wrong answer: the text of the first case that holds."""
    return next((said for holds, said in cases if holds), otherwise)


def lines_of(function: Callable[..., Any]) -> int:
    """The number of lines in a function's body that hold code.

    >>> def double(x):
    ...     # a comment is no code
    ...     y = 2 * x
    ...     return y
    >>> lines_of(double)
    2
    """
    code = function.__code__
    return max(1, len({line for line in _lines(code) if line > code.co_firstlineno}))


def _lines(code: CodeType) -> Iterator[int]:
    yield from (line for *_, line in code.co_lines() if line)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _lines(inner)


_ASKED = "give a number, not a text."


def is_text(answer: Any, right: Any) -> bool:
    """Whether an answer is a text, and a number is asked for."""
    return isinstance(answer, str) and isinstance(right, int | float) and not isinstance(right, bool)


def is_near(answer: Any, right: Any, within: float = 0.0) -> bool:
    """Whether an answer is right: numbers up to an error ``within``, texts in any case, bools exactly."""
    if isinstance(right, bool | str):
        return answer is right or (isinstance(right, str) and str(answer).casefold() == right.casefold())
    try:
        return math.isclose(answer, right, rel_tol=within, abs_tol=0.0)
    except (TypeError, ValueError):
        return False
