"""The equality table is made again and compared with the file here; zero1 averages as all_reduce does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from muon_tutorial import Muon, build_mesh, launch

from .table import CASES, as_markdown, make_table

KEPT = Path(__file__).with_name("equality_table.md")
SHAPE, RANKS = (40, 30), 4


def test_the_table_has_every_cell_and_is_the_one_kept() -> None:
    table = make_table()
    assert set(table) == set(CASES)
    for (_, _, column), said in table.items():
        allowed = ("bitwise", "within bound") if column == "gram" else ("bitwise",)
        assert said in allowed or said.startswith("refused: "), (column, said)
    assert as_markdown(table) == KEPT.read_text(encoding="utf-8"), (
        f"{KEPT} holds another table; if the new one is right, run python -m tests.configs.table"
    )


def run_averages(rank: int) -> tuple[bool, float]:
    """Whether zero1 equals stock Muon after an all_reduce, and the mean's error divided by its bound."""
    mesh = build_mesh({"dp": RANKS})
    local = torch.randn(SHAPE, generator=torch.Generator().manual_seed(rank))
    whole = torch.randn(SHAPE, generator=torch.Generator().manual_seed(9))
    mine, alone = nn.Parameter(whole.clone()), nn.Parameter(whole.clone())
    mine.grad, reduced = local.clone(), local.clone()
    dist.all_reduce(reduced, group=mesh.get_group())
    alone.grad = reduced / RANKS
    options: dict[str, Any] = {"lr": 0.02}
    Muon([mine], **options, strategy="zero1", mesh=mesh).step()
    torch.optim.Muon([alone], **options).step()

    every = [torch.empty_like(local) for _ in range(RANKS)]
    dist.all_gather(every, local, group=mesh.get_group())
    exact = torch.stack(every).double()
    bound = (RANKS - 1) * 2.0**-24 * exact.abs().sum(0) / RANKS
    return torch.equal(mine, alone), ((alone.grad - exact.mean(0)).abs() / bound).max().item()


def test_zero1_averages_as_all_reduce() -> None:
    for same, share_of_bound in launch(run_averages, RANKS):
        assert same
        assert share_of_bound <= 1.01
