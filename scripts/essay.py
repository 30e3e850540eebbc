"""Makes the interactive essay, *Four processes, one matrix*: one HTML file, recorded from the package.

    python scripts/essay.py [--out FOLDER]     written to dist/pages/essay.html

The file loads nothing from elsewhere. Its script and style come from ``scripts/essay_page/``, its data
from ``scripts/essay_recorder.py``. Without JavaScript, each scene shows a still picture from the course.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import sys
from pathlib import Path
from string import Template
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from muon_tutorial.learn.bill.pictures import draw_small_bills
from muon_tutorial.learn.course import series
from muon_tutorial.learn.cuts.pictures import draw_holders
from muon_tutorial.learn.early_return import pictures as early
from muon_tutorial.learn.early_return import steps as early_steps
from muon_tutorial.learn.first_muon.on_ranks import imitate, owner_lacks
from muon_tutorial.learn.first_muon.pictures import draw_run
from muon_tutorial.learn.pictures.colours import RANKS
from muon_tutorial.learn.pictures.picture import Picture
from muon_tutorial.learn.shards_alone import directions
from muon_tutorial.learn.the_mirror import network, recording, replay
from muon_tutorial.learn.the_mirror.on_ranks import plan_of
from scripts import essay_recorder, pages
from scripts.files import POLICY, ROOT, made, run_writer, write_all

TARGET = ROOT / "dist" / "pages"
NAME = "essay.html"
DESCRIPTION = (
    "Muon needs the whole matrix, and no process has it. One optimizer step on real processes, recorded, "
    "to take apart: who holds what, what travels, what it costs."
)
PARTS = Path(__file__).with_name("essay_page")
MOST_BYTES = 3_000_000


def stills() -> dict[str, Picture]:
    """The picture of each scene for browsers without JavaScript."""
    steps = early_steps.recorded()
    said = early_steps.predict_recorded(steps)["zero1", 1, "200mbit"]
    return {
        "who": draw_holders(plan_of(2, 2), "o"),
        "phases": replay.film(recording.load()),
        "network": network.draw_orders(2, 2, essay_recorder.SEED),
        "sabotage": draw_run(imitate(4, lacking=owner_lacks("k1", 4), skips=True)),
        "alone": directions.hero(),
        "cost": draw_small_bills(2, 2),
        "time": early.draw_recorded(steps, said, "zero1", 1, "200mbit"),
    }


def script() -> str:
    """Join the two files of the page's script."""
    return "\n".join((PARTS / name).read_text(encoding="utf-8") for name in ("core.js", "scenes.js"))


def policy(code: str) -> str:
    """Extend the other pages' content security policy to allow this one script."""
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    return f"{POLICY}; script-src 'sha256-{digest}'"


def page(data: dict[str, Any]) -> str:
    code = script()
    held = {**data, "colours": RANKS, "dp": essay_recorder.DP, "tp": essay_recorder.TP}
    kept = json.dumps(held, separators=(",", ":"), ensure_ascii=False).replace("</", "<\\/")
    shown = {
        f"still_{name}": f'<noscript><div class="still">{pages.lean(each)}</div></noscript>'
        for name, each in stills().items()
    }
    site = series.site()
    address = f'<link rel="canonical" href="{site}{NAME}">'
    given = {
        "policy": html.escape(policy(code)),
        "description": html.escape(DESCRIPTION),
        "preview": f'<meta property="og:image" content="{site}{pages.PREVIEW}">{address if site else ""}',
        "style": (PARTS / "style.css").read_text(encoding="utf-8"),
        "about": "Recorded from muon_tutorial as this page was built.",
        "data": kept,
        "script": code,
    }
    return Template((PARTS / "page.html").read_text(encoding="utf-8")).substitute(given | shown)


def write(target: Path) -> None:
    write_all(made(target), {NAME: page(essay_recorder.record())})


if __name__ == "__main__":
    sys.exit(run_writer("essay", __doc__, write, None, TARGET))
