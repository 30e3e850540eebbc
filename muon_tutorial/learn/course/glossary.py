"""The words and symbols that all lessons share: one sentence each, and the lesson that introduces them."""

from __future__ import annotations

from dataclasses import dataclass

from . import series


@dataclass(frozen=True, slots=True)
class Term:
    """A word, its meaning, and the lesson that sets it in bold; ``bold`` is its form there, if different."""

    word: str
    lesson: str
    meaning: str
    bold: str = ""


@dataclass(frozen=True, slots=True)
class Symbol:
    """A symbol or short name in formulas, code and pictures, its meaning, and the lessons that use it."""

    sign: str
    lessons: tuple[str, ...]
    meaning: str


TERMS = tuple(Term(*row) for row in series.rows(series.FOLDER / "words.txt"))
BY_WORD = sorted(TERMS, key=lambda term: term.word.casefold())
_SIGNS = series.rows(series.FOLDER / "symbols.txt")
SYMBOLS = tuple(Symbol(sign, tuple(used.split()), meaning) for sign, used, meaning in _SIGNS)

_PAGE = """\
# Glossary and notation

The words and symbols that all lessons share. Beside each word is the lesson that introduces it in bold. In
a notebook: `from muon_tutorial.learn import glossary`, then `glossary.look_up("rank")`.

## Words

| word | meaning | lesson |
|---|---|---|
{words}

## Symbols

| symbol | meaning | lessons |
|---|---|---|
{symbols}
"""


def look_up(word: str = "") -> None:
    """Print the entries of all words and symbols that contain ``word``; without one, all entries.

    >>> look_up("Owner")
    owner (lesson 04): Of a matrix: the one rank that orthogonalizes it for all.
    """
    entries = [(f"{term.word} (lesson {term.lesson})", term.meaning) for term in BY_WORD]
    entries += [(symbol.sign, symbol.meaning) for symbol in SYMBOLS]
    found = [f"{name}: {meaning}" for name, meaning in entries if word.strip().casefold() in name.casefold()]
    print("\n".join(found) or f"The glossary has no {word!r}.")


def page() -> str:
    """The whole text of ``GLOSSARY.md``, which lies next to the notebooks."""
    words = (f"| {term.word} | {term.meaning} | {_linked(term.lesson)} |" for term in BY_WORD)
    symbols = (f"| `{s.sign}` | {s.meaning} | {', '.join(map(_linked, s.lessons))} |" for s in SYMBOLS)
    return _PAGE.format(words="\n".join(words), symbols="\n".join(symbols))


def _linked(number: str) -> str:
    return series.link(series.lesson(number), number)
