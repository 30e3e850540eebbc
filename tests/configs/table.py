"""Every strategy on every grid, parallelism and cut, on real processes: does it give the bits of one process?

``python -m tests.configs.table`` writes the table; ``test_table`` makes it again and compares it with the
file in this folder. A cell is ``bitwise``, or ``refused`` by a named error that the notes quote, or it says
what differs. ``gram`` is ``within bound`` if it differs from one process's Gram form by at most
``DIFFERENCE``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from muon_tutorial import LiveWorld, Muon, build_mesh, create_devicemesh_config, launch
from muon_tutorial.errors import StrategyError
from muon_tutorial.orthogonalizers.gram import DIFFERENCE
from muon_tutorial.plan.strategies import gram, layerwise, owner, owner_per_replica, round_robin, zero1

STEPS = 2
OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}

# Every grid divides some of these rows and columns evenly, no grid divides others, and some are fewer than
# the ranks.
SHAPES: dict[str, tuple[tuple[int, int], ...]] = {
    "divisible": ((24, 48), (48, 24), (24, 24)),
    "uneven": ((13, 11), (11, 13), (23, 17)),
    "empty shards": ((1, 5), (5, 1), (2, 3)),
}

Lay = Callable[[int, Tensor, DeviceMesh], Tensor]
Settings = Callable[[LiveWorld], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Row:
    """A kind of parallelism on a grid, with the function that cuts a rank's part out of a whole matrix."""

    parallelism: str
    axes: Mapping[str, int]
    lay: Lay

    @property
    def grid(self) -> str:
        return "×".join(f"{axis}={size}" for axis, size in self.axes.items())

    @property
    def world_size(self) -> int:
        return math.prod(self.axes.values())


def whole(index: int, tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Replicated: every rank holds the whole tensor."""
    return tensor.clone()


def by_hand(index: int, tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """A plain tensor, cut over tp by hand: rows of one matrix, columns of the next."""
    dim, place, parts = index % 2, mesh.get_local_rank("tp"), mesh["tp"].size()
    step = -(-tensor.shape[dim] // parts)
    lengths = [max(0, min(step, tensor.shape[dim] - step * part)) for part in range(parts)]
    part = tensor.split(lengths, dim)[place].clone()
    part.partition_dim = dim
    part.partition_sizes = tuple(lengths)
    return part


def over_tp(index: int, tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """A DTensor cut over tp, as by ``parallelize_module``."""
    return distribute_tensor(tensor, mesh["tp"], [Shard(index % 2)], src_data_rank=None)


def over_fsdp(index: int, tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """A DTensor as from ``fully_shard``: over fsdp, or dp and fsdp, on top of tp if there is a tp axis."""
    axes = [axis for axis in ("dp", "fsdp") if axis in (mesh.mesh_dim_names or ())]
    module = nn.Module()
    laid = over_tp(index, tensor, mesh) if "tp" in (mesh.mesh_dim_names or ()) else tensor.clone()
    module.weight = nn.Parameter(laid)
    fully_shard(module, mesh=mesh[tuple(axes)])
    return next(module.parameters()).detach()


ROWS = (
    *(Row("DDP", {"dp": size}, whole) for size in (2, 3, 8)),
    *(Row("tp, by hand", {"tp": size}, by_hand) for size in (2, 3)),
    Row("tp, by hand, and DDP", {"dp": 2, "tp": 2}, by_hand),
    Row("tp, by hand, and DDP", {"dp": 4, "tp": 2}, by_hand),
    Row("TP", {"tp": 2}, over_tp),
    *(Row("FSDP2", {"fsdp": size}, over_fsdp) for size in (2, 3, 8)),
    Row("HSDP", {"dp": 2, "fsdp": 2}, over_fsdp),
    Row("FSDP2 and TP", {"fsdp": 2, "tp": 2}, over_fsdp),
    Row("HSDP and TP", {"dp": 2, "fsdp": 2, "tp": 2}, over_fsdp),
)


def by_strategy(builder: Any) -> Settings:
    return lambda world: {"strategy": builder, "mesh": world}


def by_helper(world: LiveWorld) -> dict[str, Any]:
    return {"distributed_config": create_devicemesh_config(world.mesh, world.grid.axes)}


def by_functions(world: LiveWorld) -> dict[str, Any]:
    """Settings that call the helper's three functions one by one."""
    return {"distributed_config": replace(by_helper(world)["distributed_config"], helper=None)}


COLUMNS: dict[str, Settings] = {
    "replicated": by_strategy("replicated"),
    "round_robin": by_strategy(round_robin),
    "round_robin, all_gather back": by_strategy(partial(round_robin, back="all_gather")),
    "zero1": by_strategy(zero1),
    "zero1, boundary": by_strategy(partial(zero1, gather="boundary")),
    "layerwise": by_strategy(layerwise),
    "gram": by_strategy(gram),
    "owner": by_strategy(owner),
    "owner, in turn": by_strategy(partial(owner, assign="in_turn")),
    "owner, per replica": by_strategy(owner_per_replica),
    "helper's config": by_helper,
    "helper's functions": by_functions,
}
Case = tuple[int, str, str]
CASES: list[Case] = [(row, cut, column) for row in range(len(ROWS)) for cut in SHAPES for column in COLUMNS]


def matrices(cut: str, step: int) -> list[Tensor]:
    """The whole matrices (step 0) or their gradients, with so few bits that a sum over ranks is exact."""
    found = []
    for index, shape in enumerate(SHAPES[cut]):
        made = torch.Generator().manual_seed(100 * step + index)
        found.append(torch.randint(-31, 32, shape, generator=made) * 2.0**-6)
    return found


def stepped(cut: str, kind: Callable[..., torch.optim.Optimizer], **more: Any) -> list[Tensor]:
    """The matrices after one process's steps."""
    params = [nn.Parameter(whole) for whole in matrices(cut, 0)]
    optimizer = kind(params, **OPTIONS, **more)
    for step in range(1, STEPS + 1):
        for param, grad in zip(params, matrices(cut, step), strict=True):
            param.grad = grad
        optimizer.step()
    return [param.detach() for param in params]


by_stock = cache(partial(stepped, kind=torch.optim.Muon))
by_gram_form = cache(partial(stepped, kind=Muon, orthogonalize="gram"))
"""Callers share the result, so they must not write to it."""


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def copied(laid: Tensor) -> Tensor:
    """A copy, with ``partition_dim`` and ``partition_sizes`` if there are any."""
    copy = laid.clone()
    vars(copy).update(vars(laid))
    return copy


def parameter(laid: Tensor) -> nn.Parameter:
    copy = copied(laid)
    param = nn.Parameter(copy)
    vars(param).update(vars(copy))
    return param


class LaidRow:
    """A row's matrices on its mesh, laid out once for all columns."""

    def __init__(self, row: Row) -> None:
        self.row, self.world = row, LiveWorld(build_mesh(row.axes))
        steps = product(SHAPES, range(STEPS + 1))
        self.given = {(cut, step): self.laid(matrices(cut, step)) for cut, step in steps}
        self.ends = {cut: [local(end) for end in self.laid(by_stock(cut))] for cut in SHAPES}
        self.gram_ends = {cut: [local(end) for end in self.laid(by_gram_form(cut))] for cut in SHAPES}

    def laid(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [self.row.lay(index, tensor, self.world.mesh) for index, tensor in enumerate(tensors)]


def outcomes_of(laid: LaidRow, column: str) -> list[str]:
    """The outcome for each cut on one rank. One optimizer has a group for the matrices of each cut."""
    groups = [{"params": [parameter(part) for part in laid.given[cut, 0]]} for cut in SHAPES]
    try:
        muon = Muon(groups, **OPTIONS, **COLUMNS[column](laid.world))
    except StrategyError as error:
        return [f"refused: {error}"] * len(SHAPES)
    for step in range(1, STEPS + 1):
        for cut, group in zip(SHAPES, groups, strict=True):
            for param, grad in zip(group["params"], laid.given[cut, step], strict=True):
                param.grad = copied(grad)
        muon.step()
    found = []
    for cut, group in zip(SHAPES, groups, strict=True):
        params = [local(param.detach()) for param in group["params"]]
        ends = enumerate(zip(params, laid.ends[cut], strict=True))
        wrong = [index for index, (param, end) in ends if not param.equal(end)]
        said = f"differs: matrices {wrong}" if wrong else "bitwise"
        if column == "gram" and wrong:
            starts, wholes = matrices(cut, 0), by_gram_form(cut)
            off = [param - end for param, end in zip(params, laid.gram_ends[cut], strict=True)]
            if all(off[i].norm() <= DIFFERENCE * (wholes[i] - starts[i]).norm() for i in wrong):
                said = "within bound"
        found.append(said)
    return found


def outcomes(rank: int, cells: list[tuple[int, str]]) -> list[list[str]]:
    """The outcomes of all rows and columns of one world size; the cells of a row share its layouts."""
    rows: dict[int, LaidRow] = {}
    found = []
    for row, column in cells:
        if row not in rows:
            rows[row] = LaidRow(ROWS[row])
        found.append(outcomes_of(rows[row], column))
    return found


def make_table() -> dict[Case, str]:
    """All cells. If ranks disagree about a cell, the cell says so."""
    table: dict[Case, str] = {}
    for world_size in sorted({row.world_size for row in ROWS}):
        rows = [number for number, row in enumerate(ROWS) if row.world_size == world_size]
        cells = list(product(rows, COLUMNS))
        by_rank = launch(outcomes, world_size, args=(cells,), output="quiet")
        for (row, column), *ranks in zip(cells, *by_rank, strict=True):
            for cut, *said in zip(SHAPES, *ranks, strict=True):
                same = len(set(said)) == 1
                table[row, cut, column] = said[0] if same else f"ranks differ: {sorted(set(said))}"
    return table


def as_markdown(table: Mapping[Case, str]) -> str:
    """The table as Markdown, and a note for each kind of refusal."""
    notes: dict[str, int] = {}
    lines = [
        "| parallelism | grid | cut | " + " | ".join(COLUMNS) + " |",
        "|---|---|---" + "|---" * len(COLUMNS) + "|",
    ]
    for number, row in enumerate(ROWS):
        for cut in SHAPES:
            cells = [_cell(table[number, cut, column], notes) for column in COLUMNS]
            lines.append(f"| {row.parallelism} | {row.grid} | {cut} | " + " | ".join(cells) + " |")
    return "\n".join([*HEAD, *lines, "", *(f"[{note}] {text}" for text, note in notes.items()), *FOOT])


def _cell(said: str, notes: dict[str, int]) -> str:
    if not said.startswith("refused: "):
        return said
    reason = said.removeprefix("refused: ").partition(": ")[2]
    return f"refused [{notes.setdefault(reason, len(notes) + 1)}]"


HEAD = (
    "# Equal to the single process",
    "",
    "Made by `python -m tests.configs.table`: real Gloo processes, two steps, parameters compared bit by bit",
    "with `torch.optim.Muon` on whole matrices in one process, for the same full gradients.",
    f"Shapes: {'; '.join(f'{cut} {shapes}' for cut, shapes in SHAPES.items())}.",
    "",
)
FOOT = (
    "",
    "Gradients here have few bits, so that a sum over ranks is exact in any order. `zero1` averages local",
    "gradients itself. Gloo sums full fp32 gradients in its own order: to first order, each element of the",
    "average over n ranks is within (n - 1) 2^-24 sum |g| / n of the exact one. This average, and all that",
    "follows from it, has the same bits as after an all_reduce (`test_zero1_averages_as_all_reduce`).",
    "`layerwise` and `gram` average as `zero1` does, but sum small slices in the order of ranks. The other",
    "strategies get reduced gradients, and sum nothing.",
    "",
    "If tp cuts a matrix, `gram` sums its Gram matrix over tp. *Within bound*: after both steps, each",
    f"matrix differs from one process's Gram form by at most {DIFFERENCE:.0%} of its change, in Frobenius",
    "norm (`orthogonalizers/gram.py`).",
    "",
)

if __name__ == "__main__":
    from tests.configs import table  # ranks import its functions from here

    Path(__file__).with_name("equality_table.md").write_text(
        table.as_markdown(table.make_table()), encoding="utf-8"
    )
