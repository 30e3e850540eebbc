"""Measures which recipe is the fastest for a shape on this machine, and keeps the seconds as plain data.

Only stock and ``DROP_INS`` are candidates, so a choice changes how long a step takes, not how good the update
is. The dtype of a matrix makes no difference, because every recipe rounds its elements to bf16 first.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ..errors import UsageError
from ..newton_schulz import zeropower_via_newtonschulz
from .checked_recipe import Form, Recipe, flops
from .full_float32 import full_float32
from .iterate import orthogonalize
from .named import KELLER_JORDAN_FIVE, RECIPES, STOCK
from .orthogonalize_option import CANDIDATES, Shape, shape_of
from .stack_sizes import LEAST_STACKED
from .symmetric_products import LEAST_SYMMETRIC, symmetric_share
from .workspace import Workspace

LARGEST_SIDE = 768
"""If a matrix's smaller side is above this, a smaller matrix of the same ratio is timed. Above this size,
nearly all time goes into products, so the same recipe is the fastest."""

STACKED = 8
"""Small matrices are timed as a stack of this many."""

HOPELESS = 1.6
"""A candidate is not timed if its estimated time is more than this many times the best estimate."""

LEAST_OWN = 0.02
"""A run of at least this many seconds is timed by its processor time. Under a cgroup's quota, Linux counts
processor time in ticks of milliseconds, too coarsely for shorter runs."""

ROUNDS = 5


@dataclass(frozen=True, slots=True)
class ShapeTimes:
    """Seconds that each timed candidate took for a matrix of ``rows`` by ``columns``."""

    rows: int
    columns: int
    seconds: Mapping[str, float]

    def __post_init__(self) -> None:
        unknown = [name for name in self.seconds if name not in CANDIDATES]
        if unknown or not self.seconds or not all(value > 0 for value in self.seconds.values()):
            raise UsageError(
                f"a calibration holds positive seconds for some of {', '.join(CANDIDATES)}; "
                f"got {dict(self.seconds)}"
            )

    @property
    def fastest(self) -> str:
        return min(self.seconds, key=self.seconds.__getitem__)


@dataclass(frozen=True, slots=True)
class Calibration:
    """The times measured on one ``machine``, by shape. A matrix and its transpose count as one shape."""

    machine: str
    shapes: tuple[ShapeTimes, ...] = ()

    def find(self, rows: int, columns: int) -> ShapeTimes | None:
        """Return the times for this shape, or None if it was not measured."""
        sides = shape_of(rows, columns)
        return next((one for one in self.shapes if shape_of(one.rows, one.columns) == sides), None)

    def measured(self, shapes: Iterable[Shape], device: torch.device) -> Calibration:
        """Return a calibration that also has these shapes. A missing shape is measured in about a second."""
        found = self
        for rows, columns in shapes:
            if found.find(rows, columns) is None:
                found = replace(found, shapes=(*found.shapes, measure_shape(rows, columns, device)))
        return found

    def text(self) -> str:
        return json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n"


def read_calibration(path: str | Path) -> Calibration:
    """Read a calibration's file; raises ``UsageError`` if it cannot be read, or holds no calibration."""
    try:
        held = json.loads(Path(path).read_text(encoding="utf-8"))
        shapes = [
            ShapeTimes(
                int(each["rows"]),
                int(each["columns"]),
                {str(name): float(value) for name, value in each["seconds"].items()},
            )
            for each in held["shapes"]
        ]
        return Calibration(str(held["machine"]), tuple(shapes))
    except OSError as error:
        raise UsageError(f"the calibration {path} cannot be read: {error.strerror}") from None
    except UsageError as error:
        raise UsageError(f"the calibration {path} does not fit this version: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"{path} is not a calibration: {error!r}") from None


def measure_shape(rows: int, columns: int, device: torch.device, rounds: int = ROUNDS) -> ShapeTimes:
    """Time the candidates on a shape. Each candidate runs once per round; its shortest time counts.

    If both sides are over ``LARGEST_SIDE``, a smaller shape of the same ratio is timed, and its times are
    multiplied by the ratio of operations.
    """
    timed = _timed_shape(rows, columns)
    matrices, more = _matrices(*timed, device), math.prod((rows, columns)) ** 1.5 / math.prod(timed) ** 1.5
    workspace = Workspace()  # shared, as in a step, because its address affects times by a few per cent
    hopeful = _hopeful(matrices.size(-2), matrices.size(-1), device)
    runs = {name: _run(name, matrices, workspace) for name in hopeful}
    best = dict.fromkeys(runs, float("inf"))
    for turn in range(rounds + 1):
        for name, run in runs.items():
            seconds = _seconds(run, device)
            if turn:  # the first round only warms up
                best[name] = min(best[name], seconds / matrices.shape[:-2].numel())
    return ShapeTimes(rows, columns, {name: more * seconds for name, seconds in best.items()})


def _timed_shape(rows: int, columns: int) -> Shape:
    """The shape itself, or a smaller shape with the same ratio of sides."""
    shrink = min(1, LARGEST_SIDE / min(rows, columns))
    return round(rows * shrink), round(columns * shrink)


def _matrices(rows: int, columns: int, device: torch.device) -> Tensor:
    """A Gaussian matrix in fp32; a stack of matrices if they are small."""
    generator = torch.Generator().manual_seed(0)
    is_small = LEAST_STACKED <= min(rows, columns) < LEAST_SYMMETRIC
    shape = (STACKED, rows, columns) if is_small else (rows, columns)
    return torch.randn(shape, generator=generator).to(device)


def _hopeful(rows: int, columns: int, device: torch.device) -> list[str]:
    """The candidates that may be the fastest, judged by their operations and the rate of a plain product."""
    n = min(rows, columns)
    rates = {dtype: _rate(n, dtype, device) for dtype in (torch.bfloat16, torch.float32)}
    guesses = {name: _guess(name, rows, columns, rates) for name in CANDIDATES}
    return [name for name, guess in guesses.items() if guess <= HOPELESS * min(guesses.values())]


def _guess(name: str, rows: int, columns: int, rates: Mapping[torch.dtype, float]) -> float:
    if name == STOCK:
        recipe, share = Recipe(STOCK, "", KELLER_JORDAN_FIVE), 1.0
    else:
        recipe, share = RECIPES[name], symmetric_share(min(rows, columns))
    form: Form = "gram" if recipe.iterates_on_gram(rows, columns, share) else "direct"
    return flops(recipe, rows, columns, form, share) / rates[recipe.dtype]


@full_float32()
def _rate(n: int, dtype: torch.dtype, device: torch.device) -> float:
    """Operations per second of a plain n × n product, the best of three."""
    A = torch.ones(n, n, dtype=dtype, device=device)
    out = torch.empty_like(A)
    times = max(1, min(100, (256 // n) ** 3))

    def run() -> None:
        for _ in range(times):
            torch.mm(A, A, out=out)

    return 2.0 * n**3 * times / min(_seconds(run, device) for _ in range(3))


def _run(name: str, matrices: Tensor, workspace: Workspace) -> Callable[[], object]:
    if name == STOCK:
        one_by_one = list(matrices.view(-1, *matrices.shape[-2:]))
        return lambda: [zeropower_via_newtonschulz(matrix) for matrix in one_by_one]
    out = torch.empty_like(matrices, dtype=torch.bfloat16)
    return lambda: orthogonalize(matrices, RECIPES[name], workspace=workspace, out=out)


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call. With one thread, this is processor time, which depends less on other load."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    _wait_for(device)
    begun, own = time.perf_counter(), time.process_time()
    run()
    _wait_for(device)
    passed, own = time.perf_counter() - begun, time.process_time() - own
    return own if alone and own >= LEAST_OWN else max(passed, 1e-9)


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
