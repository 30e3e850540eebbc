"""Makes the tables of predictions. Predictions need no processes, so they cover thousands of ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import product

import torch

from muon_tutorial import Coordinate, Grid, Matrix, Shard
from muon_tutorial.engine.collective import Collective, Kind, Label
from muon_tutorial.evidence import formulas
from muon_tutorial.evidence.ledger import entry_of
from muon_tutorial.evidence.predict import predict
from muon_tutorial.evidence.tables import Table, TableRow
from muon_tutorial.plan.strategies import Builder, Plan, layerwise, owner, round_robin, zero1
from muon_tutorial.timing.model_shape import stage_matrices
from muon_tutorial.timing.models import find_model

ROOTED: tuple[Kind, ...] = ("gather", "scatter", "broadcast", "reduce")
KINDS: tuple[Kind, ...] = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", *ROOTED)
DTYPES = {2: torch.bfloat16, 4: torch.float32}
DTYPE_PAIRS = ((4, 4), (4, 2), (2, 2))
"""Bytes of a gradient element and of a parameter element, g and p."""


def gloo_table(command: str) -> Table:
    rows, each = list[TableRow](), 840 * 1024
    for kind, parts in product(KINDS, (2, 3, 4, 8)):
        grid, whole = Grid.of(dp=parts), each * parts * 4
        entries = [entry_of(sample_request(kind, at, each), at) for at in map(grid.at, grid.ranks)]
        row: TableRow = {
            "collective": kind,
            "ranks": parts,
            "ring, most": max(entry.ring for entry in entries) / whole,
            "Gloo, least": min(entry.gloo for entry in entries) / whole,
            "Gloo, most": max(entry.gloo for entry in entries) / whole,
        }
        rows.append(row)
    notes = (
        "Bytes as fractions of S, the bytes of the whole tensor. Gloo's figures, with its 48-byte preambles "
        "added, equal the kernel's TCP counters to the byte (`tests/evidence/test_gloo_bytes.py`).",
    )
    return Table("One collective: ring and Gloo", tuple(rows), command, notes)


def sample_request(
    kind: Kind, at: Coordinate, each: int, dtype: torch.dtype = torch.float32, device: str = "meta"
) -> Collective:
    """A request of a kind over all ranks of dp, with ``each`` elements per rank; position 0 is the root."""
    parts, whole, rooted = at.size("dp"), each * at.size("dp"), at["dp"] == 0
    sent, received = {
        "all_reduce": (whole, whole),
        "reduce_scatter": (whole, each),
        "all_gather": (each, whole),
        "all_to_all": (whole, whole),
        "gather": (each, whole if rooted else 0),
        "scatter": (whole if rooted else None, each),
        "reduce": (whole, whole if rooted else 0),
        "broadcast": (whole if rooted else None, whole),
    }[kind]
    send = None if sent is None else torch.zeros(sent, dtype=dtype, device=device)
    root = 0 if kind in ROOTED else None
    splits = (each,) * parts if kind == "all_to_all" else None
    return Collective(kind, ("dp",), dtype, send, received or 0, Label(kind), root, splits, splits)


def strategies_table(command: str) -> Table:
    rows = tuple(_strategy_rows(4))
    notes = (
        f"Bytes that a rank sends in a step on a ring of 4 ranks, with {_count(_even()):,} elements in "
        "Muon's matrices, without tensor parallelism and without the agreement on which gradients exist (8 "
        "bytes a parameter). The whole step includes what is sent before it: DDP's all_reduce of the "
        "gradients for `round_robin`, FSDP2's three moves for `owner` (a mean over ranks). The ratios are of "
        "whole steps. With g = p = 4, the paper says that Muon sends more than 1 and at most 1.25 times what "
        "ZeRO-1's AdamW sends; with other dtypes it may be more or less. With g = 4 and p = 2, `zero1, "
        "boundary` and ZeRO-1 AdamW both send less than DDP.",
    )
    return Table("The strategies: formula and ledger", rows, command, notes)


def _strategy_rows(D: int) -> Iterator[TableRow]:
    for g, p in DTYPE_PAIRS:
        N = _count(_even())
        adamw = {
            "DDP AdamW": formulas.ddp_adamw(D, N, g),
            "ZeRO-1 AdamW": formulas.zero1_adamw(D, N, g, p),
            "FSDP2 AdamW": formulas.fsdp2_adamw(D, N, g, p),
        }
        for name, formula, due, before, counted in _strategies_of(D, N, g, p, *adamw.values()):
            whole = float(due + before)
            yield {
                "strategy": name,
                "formula": formula,
                "g": g,
                "p": p,
                "by formula": float(due),
                "by ledger": counted,
                "whole step": whole,
                **{f"over {other}": whole / float(cost) for other, cost in adamw.items()},
            }


def _strategies_of(
    D: int, N: int, g: int, p: int, ddp: Fraction, zero: Fraction, fsdp2: Fraction
) -> Iterator[tuple[str, str, Fraction, Fraction, float | None]]:
    """Yield name, formula, the step's bytes by the formula, bytes sent before a step, bytes by the ledger."""
    nothing, boundary = Fraction(0), partial(zero1, gather="boundary")
    yield "AdamW, DDP", "2ρNg", ddp, nothing, None
    yield "AdamW, ZeRO-1", "ρN(g+p)", zero, nothing, None
    yield "AdamW, FSDP2", "ρN(g+2p)", fsdp2, nothing, None
    every = formulas.zero1_gather_all(D, N, g, p)
    yield "zero1, gather all", "ρN(g+p+2)", every, nothing, _mean(zero1, D, g, p)
    plan = zero1(_even(g, p), Grid.of(dp=D), gather="boundary")
    straddled = [formulas.straddled(plan, plan.grid.at(rank)) for rank in range(D)]
    straddling = zero + Fraction(sum(map(formulas.boundary_received, straddled)), D)
    yield "zero1, boundary", "ρN(g+p) + straddling", straddling, nothing, _mean(boundary, D, g, p)
    yield "layerwise", "ρN(g+p)", zero, nothing, _mean(layerwise, D, g, p)
    # round_robin sums buffers that are zero outside the owner's matrices. An all_gather would halve the bytes
    # if all owners had equally many elements, but it pads each owner's part to the longest part.
    shared = 2 * formulas.rho(D) * N * formulas.WIRE_BYTES
    yield "round_robin, all_reduce back", "2ρN·2", shared, ddp, _mean(round_robin, D, g, p)
    owned, sharded = shared / D, (("dp", Shard(0)),)  # to owners and back; a mean over ranks
    yield "owner over shards", "2ρ(N/D)·2", owned, fsdp2, _mean(owner, D, g, p, sharded)


def _even(g: int = 4, p: int = 4, cuts: tuple = ()) -> list[Matrix]:
    shapes = ((96, 48), (48, 96), (48, 48), (96, 96), (144, 48))
    return [
        Matrix(i, f"m{i}", shape, cuts, dtype=DTYPES[p], grad_dtype=DTYPES[g])
        for i, shape in enumerate(shapes)
    ]


def _count(matrices: Sequence[Matrix]) -> int:
    return sum(matrix.numel for matrix in matrices)


def _mean(builder: Builder, D: int, g: int, p: int, cuts: tuple = ()) -> float:
    plan = builder(_even(g, p, cuts), Grid.of(dp=D))
    entries = [entry for rank in range(D) for entry in predict(plan, plan.grid.at(rank)).entries]
    return sum(entry.ring for entry in entries if entry.phase != "gradient flags") / D


def llama_70b(cut_over_dp: bool = False) -> list[Matrix]:
    """The hidden matrices of a 70-billion-parameter Llama, cut over tp and, if asked for, over dp."""
    inner = (("dp", Shard(0)),) if cut_over_dp else ()
    dense, _ = stage_matrices(find_model("llama-3.1-70b"), tp=8)
    return [replace(matrix, cuts=(*matrix.cuts, *inner)) for matrix in dense]


def thousands_table(command: str) -> Table:
    grid = Grid.of(dp=2048, tp=8)
    N = _count(llama_70b()) // grid.size("tp")
    adamw = formulas.zero1_adamw(grid.size("dp"), N, 4, 2)
    builders: dict[str, Builder] = {
        "zero1": zero1,
        "zero1 boundary": partial(zero1, gather="boundary"),
        "layerwise": layerwise,
        "owner over FSDP2's shards": owner,
    }
    rows: list[TableRow] = []
    for name, builder in builders.items():
        start = time.process_time()
        plan = builder(llama_70b(builder is owner), grid)
        ranks = (0, grid.world_size // 2)
        first, middle = (sum(e.ring for e in predict(plan, grid.at(rank)).entries) for rank in ranks)
        row: TableRow = {
            "plan": name,
            "buckets": len(plan.buckets),
            "GB, rank 0": first / 1e9,
            "GB, middle rank": middle / 1e9,
            "over ZeRO-1 AdamW": middle / float(adamw),
            "CPU seconds": time.process_time() - start,
        }
        rows.append(row)
    notes = (
        f"Ring model, {_count(llama_70b()):,} elements in 560 matrices, grid {grid}, fp32 gradients, bf16 "
        f"parameters; ZeRO-1 AdamW sends {float(adamw) / 1e9:.1f} GB a rank. `owner` moves O(N/D), on top of "
        "what FSDP2 moves; the rank that owns a matrix sends and receives all of it.",
    )
    return Table("16,384 ranks, 70 billion parameters", tuple(rows), command, notes)


def regimes_table(command: str) -> Table:
    grids = ((64, 1), (32, 2), (16, 4), (8, 8), (4, 16))
    rows: list[TableRow] = []
    for (dp, tp), (g, p) in product(grids, DTYPE_PAIRS):
        grid = Grid.of(dp=dp, tp=tp)
        matrices = [replace(m, dtype=DTYPES[p], grad_dtype=DTYPES[g]) for m in llama_70b()[:56]]
        adamw = float(formulas.zero1_adamw(dp, _count(matrices) // tp, g, p))
        whole = _by_phase(zero1(matrices, grid), grid)
        edges = _by_phase(zero1(matrices, grid, gather="boundary"), grid)
        total = sum(whole.values())
        row: TableRow = {
            "dp": dp,
            "tp": tp,
            "g": g,
            "p": p,
            "all, over ZeRO-1": total / adamw,
            "boundary, over ZeRO-1": sum(edges.values()) / adamw,
            "of it, tp gathers": whole.get("tp gather", 0.0) / total,
        }
        rows.append(row)
    notes = (
        "Eight layers of the 70 billion parameter model on 64 ranks; ring model, the mean over ranks. With "
        '`gather="all"`, the bound of 1.25 holds only in the first row: without tensor parallelism, with '
        'g = p = 4. The last column is for `gather="all"`.',
    )
    return Table("Where the gain vanishes: grids and dtypes", tuple(rows), command, notes)


def _by_phase(plan: Plan, grid: Grid) -> dict[str, float]:
    """Mean bytes by phase, over one rank of each dp position, because all tp positions send the same."""
    found: dict[str, float] = {}
    for place in range(grid.size("dp")):
        for entry in predict(plan, grid.at(grid.rank({"dp": place}))).entries:
            found[entry.phase] = found.get(entry.phase, 0.0) + entry.ring / grid.size("dp")
    return found
