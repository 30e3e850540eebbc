"""Shared by scripts that write results: the machine's facts, and files for people and for programs."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from muon_tutorial.evidence.tables import Table
from scripts.files import ROOT, answered, count, parser_of, write_whole

RESULTS = ROOT / "results"


def write_results(
    folder: Path,
    script: str,
    title: str,
    opening: str,
    facts: Mapping[str, Any],
    tables: Sequence[Table],
    pictures: Mapping[str, str] | None = None,
    names: tuple[str, str] | None = None,
    **more: Any,
) -> None:
    """Write a script's measurements as Markdown for people and JSON for programs, in two files.

    The files have the script's name (without ``.py``), or the two ``names``. ``facts`` describe the machine;
    ``pictures`` maps names of picture files in ``out`` to captions; ``more`` goes only into the JSON.

    Raises:
        UsageError: a file cannot be written.
    """
    text, data = names or (f"{script}.md", f"{script}.json")
    written = f"Written by `scripts/{script}.py`; do not edit. {opening}".strip()
    said = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    shown = "".join(f"![{what}]({name})\n\n" for name, what in (pictures or {}).items())
    write_whole(folder / text, f"# {title}\n\n{written}\n\n{said}\n\n{shown}{markdown(tables)}")
    held = {"facts": facts, **more, "tables": [table.data() for table in tables]}
    write_whole(folder / data, json.dumps(held, indent=1, ensure_ascii=False) + "\n")


def markdown(tables: Sequence[Table]) -> str:
    return "\n".join(table.markdown() for table in tables)


def read_tables(path: Path) -> dict[str, Table]:
    """The tables of a JSON file that ``write_results`` wrote, by title and in their order."""
    kept = json.loads(path.read_text(encoding="utf-8"))["tables"]
    return {
        one["title"]: Table(one["title"], tuple(one["rows"]), one["command"], tuple(one["notes"]))
        for one in kept
    }


def quoted(data: str) -> re.Pattern[str]:
    """The pattern of the lines in docs/evidence.md that quote a file of results; group 2 holds the lines."""
    return re.compile(rf"(<!-- from results/{re.escape(data)} -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def quote(data: str, lines: str) -> None:
    """Write the lines of docs/evidence.md that quote a file of results, between their markers."""
    page = ROOT / "docs" / "evidence.md"
    text = page.read_text(encoding="utf-8")
    write_whole(page, quoted(data).sub(lambda marks: marks[1] + lines + marks[3], text))


def result_parser(described: str | None, **counts: tuple[int, str]) -> argparse.ArgumentParser:
    """Options of all scripts that write results; ``described`` is a script's docstring.

    ``counts``: further options with a value of at least 1, each with its default and help.
    """
    parser = parser_of(described)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder to write to")
    for name, (default, what) in counts.items():
        parser.add_argument(f"--{name}", type=count, default=default, help=what)
    return parser


def answer(
    stem: str,
    parser: argparse.ArgumentParser,
    work: Callable[[argparse.Namespace, str], None],
    arguments: Sequence[str] | None = None,
) -> int:
    """Call a script's work with its options and its command line; returns the exit code."""
    asked = parser.parse_args(arguments)
    return answered(f"{stem}.py", lambda: work(asked, command_line(stem, arguments)))


def command_line(stem: str, arguments: Sequence[str] | None) -> str:
    """The command that calls a script with these arguments, by default with those of this process."""
    return shlex.join(["python", f"scripts/{stem}.py", *(sys.argv[1:] if arguments is None else arguments)])


def machine_facts(command: str) -> dict[str, Any]:
    """Facts about this machine and its present load, without paths or user names."""
    return {
        "command": command,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": cpu_fact("model name") or platform.processor(),
        "cores": os.cpu_count(),
        "memory GB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "load average": round(os.getloadavg()[0], 1),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def cpu_fact(name: str) -> str:
    """The value under this name in the system's list of the first CPU's properties; "" if there is none."""
    listing = Path("/proc/cpuinfo")
    found = re.search(rf"^{name}\s*:(.*)", listing.read_text() if listing.is_file() else "", re.MULTILINE)
    return found[1].strip() if found else ""


def bf16_flags() -> list[str]:
    return [flag for flag in ("avx512_bf16", "amx_bf16") if flag in cpu_fact("flags").split()]


@contextmanager
def plotted(path: Path, *grid: int, **look: Any) -> Iterator[Any]:
    """Yield axes as from ``plt.subplots``; on exit, save them. The same numbers give the same file."""
    from matplotlib import pyplot as plt

    plt.rcParams["svg.hashsalt"] = "muon"
    figure, axes = plt.subplots(*grid, layout="constrained", **look)
    yield axes
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def bars(path: Path, names: Sequence[str], series: Mapping[str, Sequence[float]], label: str) -> None:
    """Draw horizontal bars, one group per contender."""
    thick = 0.8 / len(series)
    with plotted(path, figsize=(9, 0.45 * len(names) + 1)) as axes:
        for i, (name, values) in enumerate(series.items()):
            axes.barh([place + i * thick for place in range(len(names))], values, thick, label=name)
        axes.set_yticks([place + 0.4 - thick / 2 for place in range(len(names))], names)
        axes.invert_yaxis()
        axes.set_xlabel(label)
        if len(series) > 1:
            axes.legend()


def say(what: str) -> None:
    print(what, "…", sep="", flush=True, file=sys.stderr)
