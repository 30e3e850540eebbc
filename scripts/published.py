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

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.files import answered, made, write_whole  # noqa: E402
from scripts.lab.benchmarks.published.table import as_data, as_markdown, compare_all, summary  # noqa: E402

COMMAND = "python scripts/published.py"


def main(arguments: list[str] | None = None) -> int:
    """Read the arguments, compute, and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "results", help="folder to write to (results/)")
    asked = parser.parse_args(arguments)
    return answered("published.py", lambda: write(asked.out))


def write(folder: Path) -> None:
    """Compute every row and write both files."""
    made(folder)
    comparisons = compare_all()
    data = json.dumps(as_data(comparisons, COMMAND), indent=1, ensure_ascii=False)
    write_whole(folder / "published.md", as_markdown(comparisons, COMMAND))
    write_whole(folder / "published.json", f"{data}\n")
    print(f"wrote {folder / 'published.md'} and published.json: {summary(comparisons)}")


if __name__ == "__main__":
    raise SystemExit(main())
