"""``scripts/one_page.py`` is short, needs only torch, and has the bits of ``zero1`` and torch's Muon."""

from __future__ import annotations

import ast
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from muon_tutorial import Grid, LiveWorld, Shard, build_mesh, launch
from scripts.one_page import DistributedMuon

from .exhaustive import left_out
from .oracle import UNEVEN, Case, Stock, assert_own_parts, give_gradients, one_rank, own_params

PAGE = Path(__file__).resolve().parents[1] / "scripts" / "one_page.py"
GRIDS = [Grid.of(dp=dp, tp=tp) for dp, tp in ((4, 1), (2, 2), (1, 4))]
LONG = Case(  # with dp=4, the first lies in all four slices, and the others only in the last slice
    shapes=((64, 33), (5, 9), (9, 64), (3, 1), (1, 3)),
    cuts=(Shard(1), Shard(0), Shard(1), Shard(0), Shard(1)),
)


CASES = {"uneven": UNEVEN, "long": LONG}


def local_gradients(case: Case, step: int, position: int) -> list[Tensor]:
    """One dp position's summands, with so few bits that sums are exact in any order."""
    made = torch.Generator().manual_seed(97 * step + position)
    return [torch.randint(-31, 32, shape, generator=made) * 2.0**-6 for shape in case.shapes]


def averages(case: Case, dp: int) -> list[list[Tensor]]:
    """The full gradients of each step."""
    each = [[local_gradients(case, step, place) for place in range(dp)] for step in range(case.steps)]
    return [[torch.stack(its).sum(0) / dp for its in zip(*places, strict=True)] for places in each]


def on_one_rank(rank: int) -> dict[tuple[str, str], tuple[list[Tensor], ...]]:
    """All cases on all grids, in one launch."""
    return {(name, str(grid)): stepped(CASES[name], grid) for name in CASES for grid in GRIDS}


def stepped(case: Case, grid: Grid) -> tuple[list[Tensor], ...]:
    """Step the page's weights and the package's with the same local gradients.

    Returns both, and the page's last averaged gradients.
    """
    world = LiveWorld(build_mesh(grid))
    theirs, zero1 = one_rank(case, "zero1", world)
    mine = own_params(case, world.at)
    cut_along = [cut.dim for cut in case.cuts if isinstance(cut, Shard)]
    page = DistributedMuon(list(zip(mine, case.shapes, cut_along, strict=True)), world.mesh)
    for step in range(case.steps):
        grads = local_gradients(case, step, world.at["dp"])
        give_gradients(theirs, grads, case, world.at)
        for param, its in zip(mine, theirs, strict=True):
            assert param.grad is not None
            assert its.grad is not None
            param.grad += its.grad
        zero1.step()
        average = page.gather_over_dp(page.step())
    averaged = [page.own_piece(matrix, average) for matrix in page.matrices]  # Newton–Schulz removes scales
    assert page.momentum.numel() * grid.size("dp") == page.weights.numel()
    return [param.detach() for param in mine], [param.detach() for param in theirs], averaged


@pytest.fixture(scope="module")
def ranks() -> list[dict[tuple[str, str], tuple[list[Tensor], ...]]]:
    return launch(on_one_rank, 4)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_every_rank_has_the_bits_of_zero1_and_of_one_process(
    ranks: list[dict[tuple[str, str], tuple[list[Tensor], ...]]], name: str, grid: Grid
) -> None:
    found, case = [of_rank[name, str(grid)] for of_rank in ranks], CASES[name]
    stock = Stock(case)
    full = averages(case, grid.size("dp"))
    stock.steps(full)
    wholes = [param.detach() for param in stock.params]
    assert_own_parts([mine for mine, _, _ in found], wholes, case, grid)
    assert_own_parts([theirs for _, theirs, _ in found], wholes, case, grid)
    assert_own_parts([averaged for _, _, averaged in found], full[-1], case, grid)


def run_page(rank: int, *options: str) -> None:
    """Run the page as torchrun would, except that ranks have met already."""
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="4")
    dist.init_process_group = dist.destroy_process_group = lambda *_, **__: None  # type: ignore
    sys.argv = [str(PAGE), *options]
    runpy.run_path(str(PAGE), run_name="__main__")


@pytest.mark.parametrize(
    ("grid", "starter"), [(GRIDS[1], "launch"), *(left_out(grid, "torchrun") for grid in GRIDS)], ids=str
)
def test_it_trains_and_finds_torchs_own_weights(grid: Grid, starter: str) -> None:
    options = ["--dp", str(grid.size("dp")), "--tp", str(grid.size("tp")), "--steps", "20"]
    lines: list[str] = []
    if starter == "launch":
        launch(run_page, 4, args=tuple(options), output=lambda _, line: lines.append(line))
    else:
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error::FutureWarning"}
        run = subprocess.run([*start, str(PAGE), *options], capture_output=True, text=True, env=environ)
        assert run.returncode == 0, run.stderr
        lines += run.stdout.splitlines()
    assert all(line.endswith("all weights equal those of torch.optim.Muon, bit by bit") for line in lines)
    losses = [float(line.split("loss ")[1].split(";")[0]) for line in lines]
    assert len(losses) == 2
    assert losses[-1] < losses[0] < 5.5  # guessing gives log 256 = 5.55


def test_it_is_one_page_of_torch_alone() -> None:
    text = PAGE.read_text()
    assert len(text.splitlines()) <= 200
    nodes = list(ast.walk(ast.parse(text)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    assert {name.split(".")[0] for name in names} <= {"torch", *sys.stdlib_module_names}


def test_its_phases_stand_in_order_with_a_layout_beside_each() -> None:
    said = [line.strip() for line in PAGE.read_text().splitlines() if line.strip().startswith("# Phase ")]
    assert [line[8] for line in said] == list("1234567")
    assert all(" → " in line for line in said)
