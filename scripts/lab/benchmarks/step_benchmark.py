"""Measures whole steps: this Muon with each ``orthogonalize=``, torch's Muon, and other packages' Muons.

All contenders step the same parameters with the same gradients, in turns within one process, so that other
load on the machine slows all of them alike. Each contender has a momentum of its own. The first step of each
contender is not timed. That step shows how much memory a step takes, which products it computes, and how
close its update is to torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from muon_tutorial.evidence.tables import Table, TableRow
from muon_tutorial.optimizer.muon import Muon
from muon_tutorial.orthogonalizers.named import RECIPES, STOCK
from muon_tutorial.orthogonalizers.orthogonalize_option import AUTO

from .newton_schulz_times import PEAKS, product
from .other_muons import KELLER_JORDAN_TEXT, SETTINGS, Params, StepContender, find_peers, first_line
from .step_work import StepWork, watch_first_step
from .turns import in_milliseconds, ratios_by_round, timed

TORCH = "torch.optim.Muon"
OURS = "this Muon"
THIS = "this package"
LAYER = ((768, 768),) * 4 + ((3072, 768), (768, 3072))
"""The hidden matrices of one of GPT-2 small's twelve equal layers; query, key and value are separate."""
GPT2_LAYERS = 12
PRODUCTS_A_ROUND = 5


@dataclass(frozen=True, slots=True)
class StepSet:
    """The parameters to step, fp32 matrices of these shapes, and their gradients.

    Each column of a gradient is smaller than the one before. A purely Gaussian gradient would be nearly
    orthogonal already, so a contender that does nothing would look right.
    """

    shapes: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one copy of all matrices, in fp32."""
        return 4 * sum(rows * columns for rows, columns in self.shapes)

    def draw(self, seed: int, scale: float, device: torch.device) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [scale * torch.randn(shape, generator=generator).to(device) for shape in self.shapes]

    def parameters(self, device: torch.device) -> Params:
        """The parameters, initialized as in GPT-2."""
        return [torch.nn.Parameter(matrix) for matrix in self.draw(0, 0.02, device)]

    def gradients(self, device: torch.device) -> list[Tensor]:
        return [
            matrix / torch.arange(1, matrix.size(1) + 1, device=device)
            for matrix in self.draw(1, 1e-3, device)
        ]


@dataclass(frozen=True, slots=True)
class ContenderSteps:
    """One contender's steps: the seconds of one step per round, and facts about its first step.

    ``cosine`` compares its update of the first layer with torch's; each update is taken as one vector.
    """

    contender: StepContender
    seconds: Sequence[float]
    work: StepWork
    cosine: float


@dataclass(frozen=True, slots=True)
class StepRun:
    """All contenders of one run, torch's first; GFLOP/s of plain products by dtype; contenders left out."""

    work: StepSet
    steps: Sequence[ContenderSteps]
    rates: Mapping[str, Sequence[float]]
    left_out: Sequence[str]


WAYS = (STOCK, *RECIPES, AUTO)
"""The names that ``Muon(orthogonalize=…)`` takes."""


def contenders() -> tuple[list[StepContender], list[str]]:
    """Torch's Muon, this package's Muon for each value of ``orthogonalize``, and other packages' Muons.

    Also returns a line for each package that was left out, with the reason.
    """
    make, source = partial(torch.optim.Muon, **SETTINGS), f"torch {torch.__version__}"
    theirs = StepContender(TORCH, source, make, KELLER_JORDAN_TEXT, 5, "one by one")
    peers, missing = find_peers()
    return [theirs, *map(our_contender, WAYS), *peers], missing


def our_contender(name: str) -> StepContender:
    recipe = RECIPES.get(name)
    coefficients, steps, batching, remark = KELLER_JORDAN_TEXT, 5, "one by one", "torch's bits"
    if name == AUTO:
        coefficients, batching, remark = "of the recipe it picks", "as that recipe", ""
    elif recipe is not None:
        published = recipe.source.split(",")[0].removeprefix("https://github.com/")
        coefficients = KELLER_JORDAN_TEXT if published.startswith("KellerJordan/Muon") else published
        steps, batching = len(recipe.coefficients), "stacked by shape"
        remark = f"{recipe.form}, {recipe.scaling} scaling"
    make = partial(Muon, orthogonalize=name, **SETTINGS)
    return StepContender(f"{OURS}, {name}", THIS, make, coefficients, steps, batching, remark)


def measure_steps(
    work: StepSet,
    chosen: Sequence[StepContender],
    rounds: int,
    device: torch.device,
    say: Callable[[str], object] = lambda what: None,
) -> StepRun:
    """Time the contenders. All updates are compared with the first contender's update.

    If a package's step fails, it is left out, with the reason. ``say`` is called before each step.
    """
    params, gradients = work.parameters(device), work.gradients(device)
    made: list[tuple[StepContender, Optimizer, StepWork, list[Tensor]]] = []
    left_out: list[str] = []
    for contender in chosen:
        say(f"first step of {contender.name}")
        try:
            made.append((contender, *first_step(contender, params, gradients, device)))
        except Exception as error:  # a foreign step may fail in any way
            if contender.source == THIS:
                raise
            left_out.append(f"{contender.name} failed here: {first_line(error)}")
    seconds: list[list[float]] = [[] for _ in made]
    rates: dict[str, list[float]] = {name: [] for name in PEAKS}
    for turn in range(rounds):
        say(f"round {turn + 1} of {rounds}")
        for (_, optimizer, *_), its in zip(made, seconds, strict=True):
            given = give(params, gradients)
            its.append(timed(optimizer.step, device))
            del given
        for name, dtype in PEAKS.items():
            run, operations = product(dtype, 768, device)
            rates[name] += [operations / timed(run, device) / 1e9 for _ in range(PRODUCTS_A_ROUND)]
    steps = [
        ContenderSteps(contender, its, done, cosine(made[0][-1], update))
        for (contender, _, done, update), its in zip(made, seconds, strict=True)
    ]
    return StepRun(work, steps, rates, left_out)


def first_step(
    contender: StepContender, params: Params, gradients: Sequence[Tensor], device: torch.device
) -> tuple[Optimizer, StepWork, list[Tensor]]:
    """Make an optimizer and watch its first step; also return its update of the first layer."""
    if contender.compiles or contender.source == THIS:  # an extra first step compiles, or calibrates "auto"
        given = give(params, gradients)
        contender.make(params).step()
        del given
    given = give(params, gradients)
    before = [param.detach().clone() for param in params[: len(LAYER)]]
    optimizer, seen = watch_first_step(partial(contender.make, params), device)
    update = [
        -(param.detach() - old) / SETTINGS["lr"] - SETTINGS["weight_decay"] * old
        for param, old in zip(params, before, strict=False)
    ]
    del given
    return optimizer, seen, update


def give(params: Params, gradients: Sequence[Tensor]) -> list[Tensor]:
    """Give each parameter a copy of its gradient, since some contenders write to it; returns the copies."""
    copies = [gradient.clone() for gradient in gradients]
    for param, copy in zip(params, copies, strict=True):
        param.grad = copy
    return copies


def cosine(these: Sequence[Tensor], those: Sequence[Tensor]) -> float:
    """The cosine between two lists of matrices; each list is taken as one vector."""
    pairs = [(a.double(), b.double()) for a, b in zip(these, those, strict=True)]
    across = sum(float((a * b).sum()) for a, b in pairs)
    sizes = [sum(float((pair[i] ** 2).sum()) for pair in pairs) for i in (0, 1)]
    return across / (sizes[0] * sizes[1]) ** 0.5


def times_table(run: StepRun, command: str, missing: Sequence[str] = ()) -> Table:
    """Milliseconds of a step, its speedup over torch's, and peak memory. ``missing``: a line for each
    contender that was left out."""
    base = run.steps[0].seconds
    rows: list[TableRow] = []
    for one in run.steps:
        ratio, *_ = ratios_by_round(base, one.seconds)
        row: TableRow = {
            "contender": one.contender.name,
            **in_milliseconds(one.seconds),
            "times torch": round(ratio, 2),
            "peak MB": round((one.work.peak - run.work.nbytes) / 1e6, 1),
        }
        rows.append(row)
    peaks = ", ".join(f"{name} {max(rates):,.0f}" for name, rates in run.rates.items())
    notes = (
        f"Medians and quartiles of {len(base)} steps, contenders in turns; `times torch` is the median of "
        "the ratios within each turn. `peak MB` is the most that PyTorch had allocated while the optimizer "
        "was made and took its first step, beyond parameters, gradients and one momentum; buffers kept for "
        f"the next step are in it. Highest rate of a plain product in this run, GFLOP/s: {peaks}.",
        *(f"Left out: {line}." for line in (*missing, *run.left_out)),
    )
    return Table("Whole steps of one process", tuple(rows), command, notes)


def work_table(run: StepRun, command: str) -> Table:
    rows: tuple[TableRow, ...] = tuple(
        {
            "contender": one.contender.name,
            "from": one.contender.source,
            "coefficients": one.contender.coefficients,
            "iterations": one.contender.steps,
            "equal shapes": one.contender.batching,
            "products seen, GFLOP": one.work.products,
            "cosine with torch's update": round(one.cosine, 4),
            "remark": one.contender.remark or "–",
        }
        for one in run.steps
    )
    notes = (
        "All contenders use Nesterov momentum of 0.95 (an average, not a sum) and decoupled decay. The "
        "profiler counts products and their dtypes in the first step; it may miss products inside compiled "
        "code. The cosine compares two contenders' first updates of a layer, made from the same gradient.",
    )
    return Table("What each of them does", rows, command, notes)
