"""Compares published figures about distributed Muon with this package's own.

    python scripts/published.py

writes results/published.md (Markdown) and results/published.json: a row for each published figure, with its
source, our own figure, what was assumed, whether the two agree, and the reason if they differ. Nothing is
measured or downloaded; the same version always writes the same files.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.files import made, write_whole
from scripts.lab.benchmarks.published.table import as_data, as_markdown, compare_all, summary
from scripts.result_files import answer, result_parser

COMMAND = "python scripts/published.py"


def main(arguments: list[str] | None = None) -> int:
    """Compute and write; returns the exit code."""
    return answer("published", result_parser(__doc__), write, arguments)


def write(asked: argparse.Namespace, _: str) -> None:
    """Compute every row and write both files, with the same command for every folder."""
    folder, comparisons = made(asked.out), compare_all()
    data = json.dumps(as_data(comparisons, COMMAND), indent=1, ensure_ascii=False)
    write_whole(folder / "published.md", as_markdown(comparisons, COMMAND))
    write_whole(folder / "published.json", f"{data}\n")
    print(f"wrote {folder / 'published.md'} and published.json: {summary(comparisons)}")


if __name__ == "__main__":
    raise SystemExit(main())
