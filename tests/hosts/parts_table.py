"""Writes docs/parts.md's table from the models of ``test_model_parts``: python -m tests.hosts.parts_table."""

from __future__ import annotations

import re
from pathlib import Path

from .operands import hidden
from .test_model_parts import VARIANTS, build

PAGE = Path(__file__).resolve().parents[2] / "docs" / "parts.md"
TABLE = re.compile(
    r"(?<=<!-- made by python -m tests.hosts.parts_table -->\n).*?(?=\n<!-- end -->)", re.DOTALL
)


def table() -> str:
    """A line for each fused weight and layout, with the models that have it."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for name in VARIANTS:
        for it in hidden(build(name), experts="muon"):
            if it.parts not in (None, "stack"):
                words = [word for word in it.name.split(".") if not word.isdigit()]
                weight = words[-2] if words[-1] == "weight" else words[-1]
                row = weight, it.why, f"`{it.parts}`{', transposed' if it.transposed else ''}"
                models = found.setdefault(row, [])
                models += [name] if name not in models else []
    lines = (
        f"| {row[0]} | {row[1]} | {row[2]} | {', '.join(models)} |" for row, models in sorted(found.items())
    )
    return "\n".join(["| weight | holds | `parts` | models |", "|---|---|---|---|", *lines])


def page() -> str:
    return TABLE.sub(lambda _: table(), PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
