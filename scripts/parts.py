"""Draws how a weight holds matrices, one picture for each kind of ``parts``, into docs/parts.svg.

python scripts/parts.py
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from muon_tutorial.learn.pictures.colours import rank_colour
from muon_tutorial.plan.grid import Grid
from muon_tutorial.plan.matrix import Matrix, Part, Parts, part_boxes
from scripts.files import ROOT, parser_of

PICTURE = ROOT / "docs" / "parts.svg"
CELL, GAP, TOP = 14, 56, 58
KINDS: tuple[tuple[str, str, tuple[int, ...], Parts, bool], ...] = (
    ("split", "q, k, v of Phi-3", (12, 6), (6, 3, 3), False),
    ("interleaved", "q, k, v of GPT-NeoX", (12, 6), ("interleaved", 2, 2, 2), False),
    ("heads", "each head of q", (12, 6), ("heads", 3), False),
    ("stack of split", "experts of Mixtral", (2, 6, 6), ("stack", 3, 3), False),
    ("stack of interleaved", "experts of GPT-OSS", (2, 6, 6), ("stack", "interleaved", 1, 1), True),
)
"""A name, an example, the parameter's shape, its ``parts``, and whether its sides are stored as (in, out)."""


def owners(shape: tuple[int, ...], parts: Parts, transposed: bool) -> torch.Tensor:
    """For each element of the parameter, the number of its matrix; stacks are flattened to two dimensions."""
    numbers, here = torch.full(shape, -1), Grid((), ()).at(0)
    for number, (box, runs) in enumerate(part_boxes(shape, parts, transposed) or ()):
        matrix = Matrix(0, "", box.shape, part=Part(0, shape, box.offset, runs=runs))
        numbers[matrix.slices(here)] = number
    return numbers.reshape(-1, shape[-1])


def draw() -> str:
    """The picture as SVG: every element in the colour of its matrix."""
    drawn, left = list[str](), 24
    for words, whose, shape, parts, transposed in KINDS:
        numbers = owners(shape, parts, transposed)
        drawn.append(f'<text x="{left}" y="24" font-weight="bold">{escape(words)}</text>')
        drawn.append(f'<text x="{left}" y="44" fill="#556">{escape(whose)}</text>')
        for row, line in enumerate(numbers.tolist()):
            step = TOP + row * CELL + (6 if len(shape) > 2 and row >= shape[1] else 0)
            drawn += [
                f'<rect x="{left + column * CELL}" y="{step}" width="{CELL - 1}" height="{CELL - 1}" '
                f'fill="{rank_colour(number)}"/>'
                for column, number in enumerate(line)
            ]
        left += max(numbers.shape[1] * CELL, 110) + GAP
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left} {TOP + 12 * CELL + 24}" role="img" '
        'font-family="sans-serif" font-size="14"><title>Parts of weights: one colour a matrix</title>'
        '<rect width="100%" height="100%" fill="#ffffff"/>'
    )
    return "\n".join([head, *drawn, "</svg>"]) + "\n"


if __name__ == "__main__":
    parser_of(__doc__).parse_args()
    PICTURE.write_text(draw(), encoding="utf-8")
