"""Write the README's picture: what notebook 00 drew of its own run.

python scripts/picture.py
"""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "notebooks" / "00_a_distributed_muon_step.ipynb"
CELL = "lesson.play_step(plan, reports"
TARGET = ROOT / "docs" / "step.svg"


def drawn() -> str:
    """The SVG in the committed output of the cell that draws the run."""
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if CELL in "".join(cell["source"]):
            html = "".join(cell["outputs"][0]["data"]["text/html"])
            found = re.search(r"data:image/svg\+xml;base64,([^\"]+)", html)
            if found:
                return base64.b64decode(found[1]).decode()
    raise SystemExit(f"{NOTEBOOK.name} holds no output of {CELL}")


if __name__ == "__main__":
    TARGET.write_text(drawn())
    print(f"wrote {TARGET.relative_to(ROOT)}")
