"""Draws the package's rooms as floors, from its imports, into docs/floors.svg: python scripts/floors.py."""

from __future__ import annotations

import ast
import sys
from graphlib import TopologicalSorter
from html import escape
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.files import ROOT, parser_of

PACKAGE = ROOT / "muon_tutorial"
PICTURE = ROOT / "docs" / "floors.svg"
WIDTH, ROW, BOX, GAP = 980, 84, 40, 14
FACE = ("__init__", "__main__")


def imports() -> dict[str, set[str]]:
    """For each room, the other rooms that its modules import, always by relative imports."""
    paths = {path: path.relative_to(PACKAGE).parts for path in PACKAGE.rglob("*.py")}
    homes = {path: parts[0].removesuffix(".py") for path, parts in paths.items()}
    found: dict[str, set[str]] = {room: set() for room in homes.values() if room not in FACE}
    for path, room in homes.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if room in found and isinstance(node, ast.ImportFrom) and node.level == len(paths[path]):
                names = [node.module.split(".")[0]] if node.module else [alias.name for alias in node.names]
                found[room] |= {name for name in names if name in found} - {room}
    return found


def floors(below: dict[str, set[str]]) -> dict[str, int]:
    """Put each room one floor above the highest room it imports; CycleError if imports form a cycle."""
    level: dict[str, int] = {}
    for room in TopologicalSorter(below).static_order():
        level[room] = 1 + max((level[other] for other in below[room]), default=-1)
    return level


def direct(below: dict[str, set[str]]) -> list[tuple[str, str]]:
    """The pairs (room, imported room), except those that follow from other imports of the room."""

    def reach(room: str) -> set[str]:
        return set().union(*({other} | reach(other) for other in below[room])) if below[room] else set()

    return [
        (room, other)
        for room in sorted(below)
        for other in sorted(below[room])
        if not any(other in reach(third) for third in below[room] if third != other)
    ]


def draw() -> str:
    """The picture as SVG: a box per room, an arrow per import; rooms import only downwards."""
    below = imports()
    level = floors(below)
    top = max(level.values())
    corner: dict[str, tuple[float, float, float]] = {}
    for floor in range(top + 1):
        rooms = sorted(room for room in level if level[room] == floor)
        width = min(190, (WIDTH - GAP) / len(rooms) - GAP)
        left = (WIDTH - len(rooms) * (width + GAP) + GAP) / 2
        for place, room in enumerate(rooms):
            corner[room] = left + place * (width + GAP), 20 + (top - floor) * ROW, width
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {40 + top * ROW + BOX}" role="img" '
        'font-family="sans-serif" font-size="15"><title>Rooms of muon_tutorial and their imports</title>'
        '<rect width="100%" height="100%" fill="#ffffff"/>'
    ]
    for room, other in direct(below):
        (x, y, w), (u, v, z) = corner[room], corner[other]
        parts.append(
            f'<path d="M{x + w / 2:.0f} {y + BOX}C{x + w / 2:.0f} {y + BOX + 26} {u + z / 2:.0f} {v - 26} '
            f'{u + z / 2:.0f} {v}" fill="none" stroke="#9aa5b1" stroke-width="1.5"/>'
        )
    for room, (x, y, w) in corner.items():
        parts.append(
            f'<rect x="{x:.0f}" y="{y}" width="{w:.0f}" height="{BOX}" rx="6" fill="#eef3f8" stroke="#345"/>'
            f'<text x="{x + w / 2:.0f}" y="{y + 25}" text-anchor="middle">{escape(room)}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    parser_of(__doc__).parse_args()
    PICTURE.write_text(draw(), encoding="utf-8")
    print(f"wrote {PICTURE.relative_to(ROOT)}")
