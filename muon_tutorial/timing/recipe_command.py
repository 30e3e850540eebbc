"""``python -m muon_tutorial recipes``: what ``orthogonalize="auto"`` chooses on this machine, and why."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from ..errors import UsageError
from ..optimizer.auto_recipes import calibration_path, default_folder, kept_calibration
from ..orthogonalizers.calibration import LARGEST_SIDE, Calibration, ShapeTimes
from ..orthogonalizers.orthogonalize_option import CANDIDATES, Shape, shape_of

GPT2_SMALL = "768x768,768x3072"
MOST = 2**20
EPILOG = """\
examples:
  python -m muon_tutorial recipes                        GPT-2 small's matrices
  python -m muon_tutorial recipes --shapes 128x128,4096x4096 --again
"""


def add_recipes(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "recipes",
        help='show which Newton–Schulz recipe orthogonalize="auto" chooses on this machine',
        description="Measure the Newton–Schulz recipes on this machine, save the times, show the fastest.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--shapes", default=GPT2_SMALL, metavar="SIZES", help=f"rows x columns of each matrix ({GPT2_SMALL})"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=None,
        metavar="FOLDER",
        help=f"where to save the times ({default_folder()})",
    )
    parser.add_argument(
        "--device", default="cpu", help="the device to measure on, such as cuda (default: cpu)"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="threads of a process (torch's default)")
    parser.add_argument("--again", action="store_true", help="measure again, even if times are saved")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.set_defaults(run=show_recipes)


def show_recipes(options: argparse.Namespace) -> int:
    """Print the seconds of each recipe for each shape, and the fastest recipe."""
    shapes, device = read_shapes(options.shapes), _device(options.device)
    if options.threads is not None:
        if options.threads < 1:
            raise UsageError(f"--threads is at least 1; got {options.threads}")
        torch.set_num_threads(options.threads)
    if options.folder is not None:
        _check_folder(options.folder)
    found = kept_calibration(options.folder, device, shapes, options.again)
    if options.json:
        chosen = {f"{one.rows}x{one.columns}": one.fastest for one in found.shapes}
        print(json.dumps({**asdict(found), "fastest": chosen}), flush=True)
        return 0
    console = Console(highlight=False)
    console.print(_table(found, shapes))
    path = calibration_path(options.folder, found.machine)
    kept = "kept in" if _holds(path, found) else "not kept in"
    console.print(f"{found.machine}; {kept} {path}", markup=False)
    return 0


def _check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be made or written, before anything is measured."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = "there is a file with this name" if folder.is_file() else error.strerror
        raise UsageError(f"--folder {folder} cannot be used: {reason}") from None
    if not os.access(folder, os.W_OK | os.X_OK) and not any(folder.glob("*.json")):
        raise UsageError(f"--folder {folder} cannot be used: no permission to write there")


def _holds(path: Path, calibration: Calibration) -> bool:
    try:
        return path.read_text(encoding="utf-8") == calibration.text()
    except OSError:
        return False


def read_shapes(text: str) -> tuple[Shape, ...]:
    """Read ``768x768,768x3072``.

    Raises:
        UsageError: the text is not a list of such sizes.
    """
    shapes: dict[Shape, None] = {}
    for word in text.split(","):
        sides = word.strip().split("x")
        if len(sides) != 2 or not all(side.isdecimal() and 0 < int(side) <= MOST for side in sides):
            raise UsageError(f"--shapes takes sizes such as {GPT2_SMALL}; got {text!r}")
        shapes[shape_of(int(sides[0]), int(sides[1]))] = None
    return tuple(shapes)


def _device(name: str) -> torch.device:
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {name}: {str(error).splitlines()[0]}") from None


def _table(found: Calibration, shapes: tuple[Shape, ...]) -> Table:
    """Milliseconds by recipe and shape, as a table for a terminal."""
    title = f"milliseconds per matrix, computed if both sides exceed {LARGEST_SIDE}; –: too slow to be timed"
    table = Table("orthogonalize", *(f"{n} × {length}" for n, length in shapes), title=title)
    times = [found.find(*shape) for shape in shapes]
    for name in CANDIDATES:
        table.add_row(name, *(_cell(one, name) for one in times))
    return table


def _cell(times: ShapeTimes | None, name: str) -> str:
    if times is None or name not in times.seconds:
        return "–"
    mark = " ← auto" if times.fastest == name else ""
    return f"{1e3 * times.seconds[name]:.2f}{mark}"
