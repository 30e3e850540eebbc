"""The course in order: its lessons, what each needs, the paths through them, and the links between them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from ...errors import UsageError

REPOSITORY = ""
"""The course's repository on GitHub, as ``owner/name``; links that open a lesson elsewhere are made from it.

Without a name there are no such links. After a change, run ``scripts/series.py`` and build the notebooks.
"""
BRANCH = "main"
FOLDER = Path(__file__).parent
"""The folder of the course's tables: lessons, paths, what to read after them, words and symbols."""
_WIDTH = 108


@dataclass(frozen=True, slots=True)
class Lesson:
    """One notebook: its file's stem, its package below ``learn``, its title, and the lessons it needs.

    ``minutes`` cover reading and the required exercises; the optional exercises take ``optional`` more.
    """

    stem: str
    package: str
    title: str
    minutes: int
    optional: int = 0
    after: tuple[str, ...] = ()

    @property
    def number(self) -> str:
        return self.stem[:2]

    @property
    def file(self) -> str:
        return f"{self.stem}.ipynb"

    @property
    def name(self) -> str:
        return f"{self.number} · {self.title}"


@dataclass(frozen=True, slots=True)
class CoursePath:
    """A way through the course. ``more``: what a reader does besides the required exercises."""

    name: str
    numbers: tuple[str, ...]
    more: str = ""
    note: str = ""

    @property
    def minutes(self) -> int:
        lessons = [lesson(number) for number in self.numbers]
        optional = sum(each.optional for each in lessons) if self.more == "optional" else 0
        builds = sum(minutes for _, minutes in BUILDS.values()) if self.more == "builds" else 0
        return sum(each.minutes for each in lessons) + optional + builds


def rows(table: Path) -> Iterator[list[str]]:
    """The cells of each row of a table in a text file."""
    return (row.split(" | ") for row in table.read_text(encoding="utf-8").splitlines())


LESSONS = tuple(
    Lesson(stem, package, title, int(minutes), int(optional), tuple(after.replace("-", "").split()))
    for stem, package, minutes, optional, after, title in rows(FOLDER / "lessons.txt")
)
READING = {no: f"[{name}](https://{address})" for no, name, address in rows(FOLDER / "reading.txt")}
"""What to read after each lesson, by its number. ``docs/reading.md`` says why, and names more."""

BUILDS = {
    "ring": ("03", 75),
    "context": ("07", 150),
    "zero3": ("11", 150),
    "pipeline": ("12", 60),
    "one_page": ("16", 260),  # the last 20 for the test that joins it to ring and zero3
}
"""The builds without a stub, by the file that they make: the lesson, and about how many minutes."""

PATHS = tuple(
    CoursePath(name, tuple(taken.split()), *more) for name, taken, *more in rows(FOLDER / "paths.txt")
)


def lesson(number: str) -> Lesson:
    """The lesson with that number; raises UsageError if no lesson has it.

    >>> lesson("05").name, lesson("05").file
    ('05 · ZeRO-1 and the virtual buffer', '05_zero1_and_the_virtual_buffer.ipynb')
    """
    for each in LESSONS:
        if each.number == number:
            return each
    known = f"{LESSONS[0].number} to {LESSONS[-1].number}"
    raise UsageError(f"no lesson has the number {number!r}; there are {known}")


def link(to: Lesson, text: str = "", folder: str = "") -> str:
    """A relative Markdown link to a lesson that lies in ``folder``."""
    return f"[{text or to.name}]({folder}{to.file})"


def neighbours(of: Lesson) -> tuple[Lesson | None, Lesson | None]:
    place = LESSONS.index(of)
    before = LESSONS[place - 1] if place else None
    after = LESSONS[place + 1] if place + 1 < len(LESSONS) else None
    return before, after


def hosted_links(of: Lesson) -> dict[str, str]:
    """Links that open a lesson with nothing installed, by the host's name; empty without a repository.

    >>> list(hosted_links(lesson("05"))) == (["Colab", "Binder"] if REPOSITORY else [])
    True
    """
    if not REPOSITORY:
        return {}
    path = f"notebooks/{of.file}"
    return {
        "Colab": f"https://colab.research.google.com/github/{REPOSITORY}/blob/{BRANCH}/{path}",
        "Binder": f"https://mybinder.org/v2/gh/{REPOSITORY}/{BRANCH}?labpath={quote(path, safe='')}",
    }


def site() -> str:
    """The address of the course's pages on GitHub, with a slash at the end; empty without a repository.

    >>> site() == "" if not REPOSITORY else site().endswith("/")
    True
    """
    owner, _, name = REPOSITORY.partition("/")
    return f"https://{owner.lower()}.github.io/{name}/" if REPOSITORY else ""


def archive() -> str:
    """The address from which pip can install the package; empty without a repository."""
    return f"https://github.com/{REPOSITORY}/archive/refs/heads/{BRANCH}.zip" if REPOSITORY else ""


def read_on(of: Lesson) -> str:
    """The last line of a lesson: what to read next."""
    return f"*Read on:* {READING[of.number]}"


def _keep(of: Lesson) -> str:
    """What happens to the reader's file in Colab. The file begins in lesson 02."""
    keep = " Colab deletes your `my_muon.py` when you leave: download it, and upload it where you go on."
    return keep if of.number >= "02" else ""


def navigation(of: Lesson) -> str:
    """The list in a lesson's opening cell: the lessons before and after it, and how to open it elsewhere."""
    links = hosted_links(of)
    here = f"[open this lesson]({links['Colab']}), or " if links else ""
    copy = f"upload this lesson's self-contained copy, which `python scripts/pack.py {of.number}` makes."
    colab = f"{here}{copy}{_keep(of)}"
    others = [f"*In {host}:* [open this lesson]({to})" for host, to in links.items() if host != "Colab"]
    return _navigation(of, "[glossary](GLOSSARY.md)", colab, *others)


def navigation_of_copy(of: Lesson) -> str:
    """The same list as ``navigation``, for a self-contained copy that has no other files next to it."""
    return _navigation(
        of,
        "`from muon_tutorial.learn import glossary`, then `glossary.look_up()`",
        f"nothing to install. The next cell brings the package along.{_keep(of)}",
    )


def _navigation(of: Lesson, words: str, colab: str, *others: str) -> str:
    before, after = neighbours(of)
    items = (
        f"*Previous:* {link(before) if before else 'none, this is the first.'}",
        f"*Next:* {link(after) if after else 'none, this is the last.'}",
        f"*Words and symbols:* {words}",
        f"*In Colab:* {colab}",
        *others,
    )
    return "\n".join(_item(text) for text in items)


def _item(text: str) -> str:
    return textwrap.fill(
        f"- {text}", _WIDTH, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
    )


def hero_lines(of: Lesson) -> str:
    """The last lines of a lesson's first cell, which show its first picture.

    >>> print(hero_lines(lesson("05")))
    from muon_tutorial.learn import zero1_buffer as lesson
    lesson.hero()
    <BLANKLINE>
    """
    return f"from muon_tutorial.learn import {of.package} as lesson\nlesson.hero()\n"


def table() -> str:
    """All lessons as a Markdown table, with links for the README."""
    links = [link(each, each.number, "notebooks/") for each in LESSONS]
    rows = [
        f"| {to} | {each.minutes} | {each.optional or ''} | {', '.join(each.after)} | {each.title} |"
        for to, each in zip(links, LESSONS, strict=True)
    ]
    return "\n".join(["| lesson | minutes | optional | after | question |", "|---|---|---|---|---|", *rows])


def paths(chosen: Sequence[CoursePath] = PATHS) -> str:
    """The ways through the course, as a Markdown list.

    >>> print(paths([CoursePath("Two", ("00", "01"))]))
    - *Two* (75 minutes): 00, 01.
    """
    return "\n".join(
        _item(f"*{path.name}* ({path.minutes} minutes): {', '.join(path.numbers)}. {path.note}".rstrip())
        for path in chosen
    )
