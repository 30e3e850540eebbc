"""The words and symbols that all lessons share: one sentence each, and the lesson that introduces them."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...errors import UsageError
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

{words}

## Symbols

{symbols}
"""


@dataclass(frozen=True, slots=True)
class GlossaryEntries:
    """Words and symbols, displayed as a table in a notebook and as plain lines elsewhere."""

    terms: Sequence[Term] = ()
    symbols: Sequence[Symbol] = ()

    def __repr__(self) -> str:
        lines = [f"{term.word} (lesson {term.lesson}): {term.meaning}" for term in self.terms]
        lines += [f"{symbol.sign}: {symbol.meaning}" for symbol in self.symbols]
        return "\n".join(textwrap.fill(line, 100, subsequent_indent="    ") for line in lines)

    def _repr_markdown_(self) -> str:
        return "\n\n".join(filter(None, (term_table(self.terms), symbol_table(self.symbols))))


def look_up(word: str = "") -> GlossaryEntries:
    """The entry of a word or symbol; without an argument, all entries.

    Raises UsageError if there is no such entry. The message names words of similar spelling, if any.

    >>> look_up("ring")
    ring (lesson 03): An order for messages: each rank sends to the next, and the last one to rank 0.
    """
    if not word:
        return GlossaryEntries(BY_WORD, SYMBOLS)
    wanted = word.strip().casefold()
    found = GlossaryEntries(
        [term for term in TERMS if wanted in (term.word.casefold(), term.bold.casefold())],
        [symbol for symbol in SYMBOLS if word.strip() in symbol.sign.split(", ")],
    )
    if found.terms or found.symbols:
        return found
    known = [term.word for term in TERMS]
    near = difflib.get_close_matches(wanted, known) or [each for each in known if wanted in each]
    advice = f"did you mean {', '.join(map(repr, near))}?" if near else "look_up() shows all words"
    raise UsageError(f"the glossary has no {word!r}; {advice}")


def page() -> str:
    """The whole text of ``GLOSSARY.md``, which lies next to the notebooks."""
    return _PAGE.format(words=term_table(BY_WORD, _linked), symbols=symbol_table(SYMBOLS, _linked))


def term_table(terms: Sequence[Term], number: Callable[[str], str] = str) -> str:
    """Terms as a Markdown table; ``number`` writes a lesson's number. Empty without terms."""
    rows = [f"| {term.word} | {term.meaning} | {number(term.lesson)} |" for term in terms]
    return "\n".join(["| word | meaning | lesson |", "|---|---|---|", *rows]) if rows else ""


def symbol_table(symbols: Sequence[Symbol], number: Callable[[str], str] = str) -> str:
    """Symbols as a Markdown table; ``number`` writes a lesson's number. Empty without symbols."""
    rows = [
        f"| `{symbol.sign}` | {symbol.meaning} | {', '.join(map(number, symbol.lessons))} |"
        for symbol in symbols
    ]
    return "\n".join(["| symbol | meaning | lessons |", "|---|---|---|", *rows]) if rows else ""


def _linked(number: str) -> str:
    return series.link(series.lesson(number), number)
