"""Writes the README's film and its alt text: one Muon step, as four real processes took it.

    python scripts/picture.py

The run is the recording that comes with the package. For every moment of the step, the recording holds each
rank's boxes of a matrix, the rank that sent each, and a hash of their bytes. The film is one SVG animated
with CSS, so it plays in an ``<img>``. A browser without such animation shows the first picture. Readers who
prefer reduced motion get all moments on one sheet, because some browsers do not pass this preference on to
images.
"""

from __future__ import annotations

import html
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from muon_tutorial.errors import UsageError
from muon_tutorial.learn.pictures.colours import CARD, EMPTY, INK, QUIET, rank_colour
from muon_tutorial.learn.the_mirror import recording
from muon_tutorial.learn.the_mirror.recording import AXIS, PHASES, StepRecording, Tile
from scripts.files import ROOT, answered, parser_of, write_changed

TARGET = ROOT / "docs" / "step.svg"
SHEET = ROOT / "docs" / "step_moments.svg"
README = ROOT / "README.md"
_README_PART = re.compile(r"(?<=<!-- made by scripts/picture.py -->\n).*?(?=\n<!-- end -->)", re.DOTALL)
WIDTH, HEIGHT, SIDE = 640, 576, 176
LEFT, TOP, ACROSS, DOWN = 92, 138, 272, 216
SECONDS, FLIGHT, PAUSE = 2.4, 0.9, 1.6
"""Seconds of each moment, of a flight at the moment's beginning, and of the pause after the last moment."""
TITLES = (
    "Each rank has a gradient of its own data",
    "Average over dp, and share out the rows",
    "Bring the rows together, along dp",
    "Bring the columns together, along tp",
    "Newton–Schulz, on the whole matrix",
    "Keep your columns: nothing is sent",
    "Keep your rows: nothing is sent",
    "New weights: gather the rows, along dp",
)
"""What happens before each moment, indexed by the moment."""


Flight = tuple[int, int, int, bool]
"""A moment, how far a piece flies at that moment (pixels across and down), and whether it stays there."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of the matrix that a rank holds at a moment, and the rank that sent the box (``source``).

    If ``stays`` is False, the rank only adds this box to its own.
    """

    rank: int
    tile: Tile
    source: int
    stays: bool = True

    def flight(self, moment: int) -> Flight | None:
        """The piece's flight at a moment; None if the rank held it before."""
        (x, y), (from_x, from_y) = place(self.rank), place(self.source)
        return (moment, from_x - x, from_y - y, self.stays) if self.source != self.rank else None


def place(rank: int) -> tuple[int, int]:
    """The upper left corner of a rank's panel; tp runs to the right, dp downwards."""
    row, column = divmod(rank, 2)
    return LEFT + column * ACROSS, TOP + row * DOWN


def pieces(run: StepRecording, matrix: str, moment: int) -> Iterator[Piece]:
    """The pieces that each rank holds at a moment, and the pieces that it receives only to add them up."""
    held = [diary.tiles[matrix] for diary in run.diaries]
    for at in (run.grid.at(rank) for rank in run.grid.ranks):
        near = sorted({*at.group("dp"), *at.group("tp")}, key=lambda other: other != at.rank)
        for tile in held[at.rank][moment]:
            before = [rank for rank in near if moment and tile in held[rank][moment - 1]]
            yield Piece(at.rank, tile, before[0] if before else at.rank)
            if moment == 1:  # gradients of the other dp ranks, which are summed and dropped
                others = [rank for rank in at.group("dp") if rank != at.rank]
                yield from (Piece(at.rank, (rank, *tile[1:]), rank, stays=False) for rank in others)


def letters(run: StepRecording, matrix: str) -> list[list[str]]:
    """For each moment and rank, a letter: equal bytes have equal letters. Empty if bytes are not recorded."""
    known: dict[str, str] = {"": ""}
    contents = zip(*(diary.contents[matrix] for diary in run.diaries), strict=True)
    return [[known.setdefault(content, _letter(len(known) - 1)) for content in moment] for moment in contents]


def _letter(number: int) -> str:
    """A for 0, B for 1, and so on; after Z comes A2."""
    lap, place = divmod(number, 26)
    return chr(ord("A") + place) + (str(lap + 1) if lap else "")


def draw(run: StepRecording) -> str:
    """The film as an SVG document."""
    scenes = _scenes(run)
    flights = {piece.flight(moment) for moment, scene in enumerate(scenes) for piece in scene}
    moving = {flight: f"f{number}" for number, flight in enumerate(sorted(flights - {None}, key=repr))}
    shown = [_scene(run, moment, scene, moving) for moment, scene in enumerate(scenes)]
    return _document(run, WIDTH, HEIGHT, f"{_LOOK}\n{_motion(moving)}", [_stage(run), *shown])


def draw_sheet(run: StepRecording) -> str:
    """All moments of the film, two per row, as an SVG document without motion."""
    shown = []
    for moment, scene in enumerate(_scenes(run)):
        row, column = divmod(moment, 2)
        kept = [piece for piece in scene if piece.stays]
        drawn = _stage(run) + _scene(run, moment, kept, {})
        shown.append(f'<g transform="translate({column * WIDTH} {row * HEIGHT})">{drawn}</g>')
    style = f"{_LOOK}.t{{opacity:1}}"
    return _document(run, 2 * WIDTH, -(-len(TITLES) // 2) * HEIGHT, style, shown)


def _document(run: StepRecording, width: int, height: int, style: str, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    said = f"<title>{html.escape(alt(run))}</title>\n<style>{style}</style>"
    ground = f'<rect width="{width}" height="{height}" fill="{CARD}"/>'
    return "\n".join([head, said, _HATCH, ground, *parts, "</svg>\n"])


def _scenes(run: StepRecording) -> list[list[Piece]]:
    return [[*pieces(run, run.busiest(), moment)] for moment in range(len(TITLES))]


def _stage(run: StepRecording) -> str:
    """The parts that every moment shows: empty panels, their axes, and a dot for each moment."""
    parts = [
        _text(LEFT + ACROSS - 40, TOP - 34, "tp →", 16, "q"),
        _text(26, TOP + SIDE + 24, "dp ↓", 16, "q"),
    ]
    for rank in run.grid.ranks:
        x, y = place(rank)
        parts.append(f'<rect x="{x}" y="{y}" width="{SIDE}" height="{SIDE}" fill="{EMPTY}" stroke="{INK}"/>')
        parts.append(_text(x, y - 10, f"rank {rank}", 16, "b"))
    return "".join([*parts, *(_dot(moment, 5, EMPTY) for moment in range(len(TITLES)))])


def _scene(
    run: StepRecording, moment: int, scene: Sequence[Piece], moving: Mapping[Flight | None, str]
) -> str:
    """The parts that only one moment shows."""
    shape, named = run.shapes[run.busiest()], letters(run, run.busiest())[moment]
    phase = f"phase {moment} of {len(PHASES)}: {PHASES[moment - 1]}" if moment else run.source
    said = [_text(LEFT - 4, 40, TITLES[moment], 21, "b"), _text(LEFT - 4, 70, phase, 16, "q")]
    flying_last = sorted(scene, key=lambda piece: piece.source != piece.rank)
    boxes = [_box(piece, shape, moving.get(piece.flight(moment), "")) for piece in flying_last]
    if AXIS <= moment < len(PHASES):  # the boxes are updates
        boxes += [_box(piece, shape, moving.get(piece.flight(moment), ""), _HATCHED) for piece in flying_last]
    places = [place(rank) for rank in run.grid.ranks]
    flashes = [
        f'<rect class="n" x="{x}" y="{y}" width="{SIDE}" height="{SIDE}" fill="{CARD}"/>'
        for x, y in (places if moment == AXIS else ())
    ]
    held = [
        _text(x + SIDE, y - 10, f"bytes {letter}", 16, "q e")
        for (x, y), letter in zip(places, named, strict=True)
        if letter
    ]
    return f'<g class="t m{moment}">{"".join([*said, *boxes, *flashes, *held, _dot(moment, 7, INK)])}</g>'


def _box(piece: Piece, shape: tuple[int, int], moves: str, fill: str = "") -> str:
    brought, top, left, rows, columns = piece.tile
    (x, y), across, down = place(piece.rank), SIDE / shape[1], SIDE / shape[0]
    corner = f'x="{x + left * across:g}" y="{y + top * down:g}"'
    size = f'width="{columns * across:g}" height="{rows * down:g}"'
    look = f' class="{moves}"' if moves else ""
    return f'<rect {corner} {size} fill="{fill or rank_colour(brought)}" stroke="{INK}"{look}/>'


def _dot(moment: int, radius: int, fill: str) -> str:
    return f'<circle cx="{LEFT + 28 * moment + 6}" cy="{HEIGHT - 22}" r="{radius}" fill="{fill}"/>'


def _text(x: float, y: float, text: str, size: int, look: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" class="{look}">{html.escape(text)}</text>'


_LOOK = (
    f"text{{font-family:system-ui,'DejaVu Sans',sans-serif;fill:{INK}}}.b{{font-weight:bold}}"
    f".q{{fill:{QUIET}}}.e{{text-anchor:end}}.t,.n{{opacity:0}}.m0{{opacity:1}}"
)
"""Without motion, only the first moment is visible."""


_HATCHED = "url(#h)"
"""The hatching over an update, which shows that Newton–Schulz has run."""
_HATCH = (
    '<defs><pattern id="h" width="8" height="8" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    f'<line x1="0" y1="0" x2="0" y2="8" stroke="{INK}" stroke-width="2" stroke-opacity=".5"/>'
    "</pattern></defs>"
)


def _motion(moving: Mapping[Flight | None, str]) -> str:
    """The animation: each moment is shown in its turn, and a piece flies in at the moment's beginning."""
    last, whole = len(TITLES) - 1, SECONDS * len(TITLES) + PAUSE
    begins = [SECONDS * moment for moment in range(last + 1)]
    ends = [*begins[1:], whole]

    def at(seconds: float) -> str:
        return f"{100 * seconds / whole:.2f}%"

    frames = [
        f"@keyframes m{moment}{{0%{{opacity:{int(not moment)}}}{at(begin)}{{opacity:1}}"
        f"{at(end)}{{opacity:{int(moment == last)}}}}}"
        for moment, (begin, end) in enumerate(zip(begins, ends, strict=True))
    ]
    for (moment, x, y, stays), name in ((flight, name) for flight, name in moving.items() if flight):
        lands = begins[moment] + FLIGHT
        gone = "" if stays else f"{at(lands + FLIGHT / 2)},100%{{opacity:0}}"
        away = f"0%,{at(begins[moment])}{{transform:translate({x}px,{y}px)}}"
        frames.append(f"@keyframes {name}{{{away}{at(lands)}{{transform:none;opacity:1}}{gone}}}")
    work = [at(begins[AXIS] + part * FLIGHT) for part in (0, 0.5, 1)]
    frames.append(f"@keyframes n{{0%,{work[0]},{work[2]},100%{{opacity:0}}{work[1]}{{opacity:.9}}}}")
    turns = "".join(f".m{n}{{animation:m{n} {whole:g}s step-end infinite}}" for n in range(last + 1))
    flown = [
        f".{name}{{animation:{name} {whole:g}s ease-in-out infinite}}" for name in [*moving.values(), "n"]
    ]
    wanted = f"@media (prefers-reduced-motion:no-preference){{{turns}{''.join(flown)}}}"
    return "\n".join([wanted, *frames])


def alt(run: StepRecording) -> str:
    rows, columns = run.shapes[run.busiest()]
    named = letters(run, run.busiest())
    moments = " ".join(f"{number}: {title}." for number, title in enumerate(TITLES))
    return (
        f"A film. {run.source}: what each rank holds of a {rows} by {columns} matrix, coloured by who "
        f"brought it. {moments} At Newton–Schulz {_alike(named[AXIS])}; at the end {_alike(named[-1])}."
    )


def _alike(named: Sequence[str]) -> str:
    """A sentence that says which ranks hold the same bytes."""
    by_letter = {
        letter: [str(rank) for rank, other in enumerate(named) if other == letter]
        for letter in dict.fromkeys(named)
    }
    same = [ranks for ranks in by_letter.values() if len(ranks) > 1]
    return " and ".join(f"ranks {', '.join(ranks)} hold the same bytes" for ranks in same)


def wanted() -> dict[Path, str]:
    """Each file that this script writes, and its text; UsageError if the README has no place for the film."""
    text, run = README.read_text(encoding="utf-8"), recording.load()
    if not _README_PART.search(text):
        raise UsageError(f"{README.name} has no part between this script's markers")
    image = f'<img src="docs/{TARGET.name}" width="{WIDTH}" alt="{html.escape(alt(run), quote=True)}">'
    still = f'<source media="(prefers-reduced-motion: reduce)" srcset="docs/{SHEET.name}">'
    shown = f"<picture>\n{still}\n{image}\n</picture>"
    readme = _README_PART.sub(lambda _: shown, text, count=1)
    return {TARGET: draw(run), SHEET: draw_sheet(run), README: readme}


if __name__ == "__main__":
    parser_of(__doc__).parse_args()
    sys.exit(answered("picture", lambda: write_changed(wanted())))
