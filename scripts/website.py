"""Makes the whole site in one folder: essay, pages, reference, and a self-contained copy of each lesson.

    python scripts/website.py [--out FOLDER]     written to dist/site/
    python scripts/website.py --still            … with a still picture for each widget, and no cell is run

Links between its parts are relative, so the folder can be opened from disk or served from anywhere.
``.github/workflows/site.yml`` runs this command and publishes the folder on GitHub Pages.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from muon_tutorial.learn.course import series
from scripts import essay, pack, pages
from scripts.files import ROOT, answered

TARGET = ROOT / "dist" / "site"
COPIES = "notebooks"
"""The folder of the copies, below the site's folder."""


def write(target: Path, still: bool = False) -> None:
    """Write the site, copies first: if one may have been edited, that is refused and nothing is written."""
    pack.write(series.LESSONS, target / COPIES)
    with pages.beside(1) as pool:
        recorded = pool.submit(essay.write, target)
        pages.write(target, still=still, copies=COPIES, essay=essay.NAME)
        recorded.result()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="website.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=TARGET, help="the folder to write to (dist/site)")
    parser.add_argument(
        "--still", action="store_true", help="a still picture for each widget; nothing is run"
    )
    options = parser.parse_args(arguments)
    return answered("website", lambda: write(options.out, options.still))


if __name__ == "__main__":
    sys.exit(main())
