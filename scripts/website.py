"""Makes the whole site in one folder: essay, pages, reference, and a self-contained copy of each lesson.

    python scripts/website.py [--out FOLDER]     written to dist/site/
    python scripts/website.py --still            … with a still picture for each widget, and no cell is run

Links between its parts are relative, so the folder can be opened from disk or served from anywhere.
``.github/workflows/site.yml`` runs this command and publishes the folder on GitHub Pages.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts import essay, pack, pages
from scripts.files import ROOT, STILL, run_writer

TARGET = ROOT / "dist" / "site"
COPIES = "notebooks"
"""The folder of the copies, below the site's folder."""


def write(target: Path, still: bool = False) -> None:
    """Write the site. Copies come first: an edited copy is refused before anything is written."""
    pack.write(target / COPIES)
    with pages.beside(1) as pool:
        recorded = pool.submit(essay.write, target)
        pages.write(target, still=still, copies=COPIES, essay=essay.NAME)
        recorded.result()


def main(arguments: Sequence[str] | None = None) -> int:
    return run_writer("website", __doc__, write, arguments, TARGET, still=STILL)


if __name__ == "__main__":
    sys.exit(main())
