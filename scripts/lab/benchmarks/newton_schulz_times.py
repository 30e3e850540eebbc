"""Times Newton–Schulz: every recipe against ``torch.optim.Muon``'s function, in one process.

Contenders take turns, so that load slows all alike. The highest rate of a plain product gives a lower bound
for the times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from muon_tutorial.evidence.tables import Cell, Table, TableRow, median_and_spread
from muon_tutorial.newton_schulz import DEFAULT_EPS, DEFAULT_STEPS, KELLER_JORDAN, zeropower_via_newtonschulz
from muon_tutorial.orthogonalizers.calibration import Calibration
from muon_tutorial.orthogonalizers.checked_recipe import Form, Recipe, flops
from muon_tutorial.orthogonalizers.full_float32 import full_float32
from muon_tutorial.orthogonalizers.iterate import orthogonalize
from muon_tutorial.orthogonalizers.named import DROP_INS, RECIPES, STOCK
from muon_tutorial.orthogonalizers.orthogonalize_option import AUTO, Shape, shape_of
from muon_tutorial.orthogonalizers.stack_sizes import run_length, runs_of_equals
from muon_tutorial.orthogonalizers.symmetric_products import symmetric_share
from muon_tutorial.orthogonalizers.workspace import Workspace

from .turns import in_milliseconds, take_turns

WORKS: Mapping[str, Sequence[tuple[int, int]]] = {
    "a layer of GPT-2 small": ((768, 768),) * 4 + ((3072, 768), (768, 3072)),
    "64 matrices of 128 × 128": ((128, 128),) * 64,
}
"""Shapes of the matrices to orthogonalize. GPT-2 small has twelve such layers."""

TORCH = "torch.optim.Muon"
PEAKS = {"bf16": torch.bfloat16, "fp32": torch.float32}
HALF = 0.5
"""The fraction of a symmetric product's operations that remains if equal elements are computed only once."""

Contender = Callable[[list[Tensor]], list[Tensor]]


@dataclass(frozen=True, slots=True)
class WorkTimes:
    """Each contender's seconds (one per round), and GFLOP/s of plain products (five per kind and round).

    ``chosen`` maps each shape, as text, to the recipe that ``"auto"`` chose.
    """

    work: str
    seconds: Mapping[str, Sequence[float]]
    rates: Mapping[str, Sequence[float]]
    chosen: Mapping[str, str] = field(default_factory=dict)


def measure_all(names: Sequence[str], rounds: int) -> list[WorkTimes]:
    torch.set_num_threads(1)
    return [measure(work, names, rounds) for work in WORKS]


def measure(work: str, names: Sequence[str], rounds: int) -> WorkTimes:
    """Time the named contenders on one set of matrices, after a round to warm up."""
    matrices = [draw(shape, seed) for seed, shape in enumerate(WORKS[work])]
    choices = chosen_for(WORKS[work]) if AUTO in names else {}
    workspace = Workspace()  # shared by all, as in a step
    contenders = {name: contender(name, choices, workspace) for name in names}
    side = max(min(matrix.shape) for matrix in matrices)
    products = {name: product(dtype, side) for name, dtype in PEAKS.items()}
    runs: dict[Any, Callable[[], object]] = {name: partial(contenders[name], matrices) for name in names}
    runs |= {(name, turn): run for name, (run, _) in products.items() for turn in range(5)}
    seconds = take_turns(runs, rounds)
    rates = {
        name: [operations / took / 1e9 for turn in range(5) for took in seconds[name, turn]]
        for name, (_, operations) in products.items()
    }
    chosen = {f"{n} × {length}": name for (n, length), name in choices.items()}
    return WorkTimes(work, {name: seconds[name] for name in names}, rates, chosen)


def chosen_for(shapes: Sequence[Shape]) -> dict[Shape, str]:
    """Return the recipe that ``"auto"`` chooses for each shape, measured now."""
    wanted = dict.fromkeys(shape_of(*shape) for shape in shapes)
    found = Calibration("this run").measured(wanted, torch.device("cpu"))
    return {shape_of(one.rows, one.columns): one.fastest for one in found.shapes}


def draw(shape: tuple[int, int], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def contender(
    name: str, choices: Mapping[Shape, str] | None = None, workspace: Workspace | None = None
) -> Contender:
    """Return a function that orthogonalizes a list of matrices: torch's, ours (same bits), or a recipe.

    ``"auto"`` takes the recipe in ``choices`` for each matrix's shape.
    """
    if name == AUTO:
        return _by_shape(choices or {}, workspace or Workspace())
    if name == TORCH:
        return lambda matrices: [
            _zeropower_via_newtonschulz(matrix, KELLER_JORDAN, DEFAULT_STEPS, DEFAULT_EPS)
            for matrix in matrices
        ]
    if name == STOCK:
        return lambda matrices: [zeropower_via_newtonschulz(matrix) for matrix in matrices]
    return partial(_in_stacks, recipe=RECIPES[name], workspace=workspace or Workspace())


def _in_stacks(matrices: list[Tensor], recipe: Recipe, workspace: Workspace) -> list[Tensor]:
    results: dict[int, Tensor] = {}
    shapes = [(matrix.size(0), matrix.size(1)) for matrix in matrices]
    for places in runs_of_equals(shapes, lambda shape: run_length(*shape, recipe)):
        stack = torch.stack([matrices[place] for place in places])
        results.update(zip(places, orthogonalize(stack, recipe, workspace=workspace), strict=True))
    return [results[place] for place in range(len(matrices))]


def _by_shape(choices: Mapping[Shape, str], workspace: Workspace) -> Contender:
    contenders = {name: contender(name, None, workspace) for name in set(choices.values())}

    def run(matrices: list[Tensor]) -> list[Tensor]:
        places: dict[str, list[int]] = {}
        for place, matrix in enumerate(matrices):
            places.setdefault(choices[shape_of(*matrix.shape)], []).append(place)
        results: dict[int, Tensor] = {}
        for name, its in places.items():
            found = contenders[name]([matrices[place] for place in its])
            results.update(zip(its, found, strict=True))
        return [results[place] for place in range(len(matrices))]

    return run


def product(
    dtype: torch.dtype, side: int, device: torch.device | str = "cpu"
) -> tuple[Callable[[], object], float]:
    """Return a function that multiplies two square matrices into the same memory, and its operations."""
    A, B = (draw((side, side), seed).to(device, dtype) for seed in range(2))
    out, times = torch.empty_like(A), min(100, max(1, (768 // side) ** 3))

    @full_float32()
    def run() -> None:
        for _ in range(times):
            torch.mm(A, B, out=out)

    return run, 2.0 * side**3 * times


def operations_once(recipe: Recipe, shapes: Sequence[tuple[int, int]]) -> float:
    """Return a recipe's operations on these shapes if only half of each symmetric product is computed."""
    return sum(flops(recipe, *sides, form_of(recipe, *sides), HALF) for sides in shapes)


def form_of(recipe: Recipe, rows: int, columns: int) -> Form:
    return "gram" if recipe.iterates_on_gram(rows, columns, symmetric_share(min(rows, columns))) else "direct"


def times_table(found: WorkTimes, command: str, where: str) -> Table:
    base, *_ = median_and_spread(found.seconds[TORCH])
    peaks = {name: max(rates) for name, rates in found.rates.items()}
    rows: list[TableRow] = []
    for name, seconds in found.seconds.items():
        middle, *_ = median_and_spread(seconds)
        floor = None
        if name in RECIPES:
            kind = "fp32" if RECIPES[name].dtype is torch.float32 else "bf16"
            needed = operations_once(RECIPES[name], WORKS[found.work]) / (1e9 * peaks[kind])
            floor = round(needed / middle, 2)
        row: TableRow = {
            "orthogonalize": name,
            **in_milliseconds(seconds),
            "times torch": round(base / middle, 2),
            "of its floor": floor,
        }
        rows.append(row)
    note = ", ".join(f"{name} {rate:.0f}" for name, rate in peaks.items())
    chosen = ", ".join(f"{name} for {shape}" for shape, name in found.chosen.items())
    notes = (
        f"Medians of {len(found.seconds[TORCH])} rounds. Highest rate of a plain product in this "
        f"run, GFLOP/s: {note}. The floor is the time of a recipe's operations at that rate if symmetric "
        "products compute each element once." + (f" Here auto took {chosen}." if chosen else ""),
    )
    return Table(f"{found.work}, {where}", tuple(rows), command, notes)


def summary(tables: Sequence[tuple[str, Sequence[Mapping[str, Cell]]]]) -> str:
    """The lines of docs/evidence.md with speedups over torch's function; ``tables`` are titles and rows."""
    lines = [
        '| what, and on which CPU | default | fastest drop-in | `"auto"` | of its own floor |',
        "|---|---|---|---|---|",
    ]
    for title, rows in tables:
        by_name = {str(row["orthogonalize"]): row for row in rows}
        best = max((name for name in by_name if name in DROP_INS), key=lambda name: _ratio(by_name[name]))
        cells = [_ratio(by_name[STOCK]), f"{_ratio(by_name[best])}, `{best}`", _ratio(by_name[AUTO])]
        lines.append(" | ".join(["| " + title, *map(str, cells), f"{by_name[best]['of its floor']} |"]))
    return "\n".join(lines)


def _ratio(row: Mapping[str, Cell]) -> float:
    return float(row["times torch"] or 0.0)
