"""Right and wrong ways to assign, gather and redistribute, for lesson 11's checkers. Imports little."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muon_tutorial import build_mesh, create_devicemesh_config
from muon_tutorial.learn.own_sharding import on_ranks as right
from muon_tutorial.learn.own_sharding.pictures import CUTS, GRIDS, OWNER
from muon_tutorial.learn.own_sharding.transfers import TransferNotes
from muon_tutorial.plan.matrix import held_box

from .answers import altered

State = dict[str, Any]


def ranks_of(state: State) -> list[int]:
    return dist.get_process_group_ranks(state["group"])


def backwards(params: list[Tensor], state: State) -> Any:
    """Right: ranks take turns, beginning with the last."""
    ranks = ranks_of(state)[::-1]
    return {index: ranks[index % len(ranks)] for index in range(len(params))}


def in_turn(model: Any) -> dict[int, int]:
    """Right: matrix ``i`` goes to its holder number ``i``, modulo the number of holders."""
    return {i: each.holders[i % len(each.holders)] for i, each in enumerate(model.matrices)}


class Later:
    """Right: a handle whose ``wait`` returns a call's result."""

    def __init__(self, function: Any, *given: Any) -> None:
        self.wait = lambda: function(*given)


def gather_later(*given: Any) -> Later:
    return Later(right.gather, *given)


def redistribute_later(*given: Any) -> Later:
    return Later(right.redistribute, *given)


def shape_of(state: State) -> tuple[int, int]:
    return state["shapes"][state["param_idx"]]


def point_to_point(mine: Tensor, owner: int, state: State) -> Any:
    """Right: a message from each rank that holds a row."""
    ranks = ranks_of(state)
    rows, columns = shape_of(state)
    if dist.get_rank() != owner:
        if len(mine):
            dist.send(mine.contiguous(), owner, group=state["group"])
        return None
    pieces = [mine.new_empty(length, columns) for length in right.rows_of(rows, len(ranks))]
    for rank, piece in zip(ranks, pieces, strict=True):
        if rank == owner:
            piece.copy_(mine)
        elif len(piece):
            dist.recv(piece, rank, group=state["group"])
    return torch.cat(pieces)


def padded(mine: Tensor, owner: int, state: State, strip: bool = True) -> Any:
    """Pads every piece to the length of the longest; right if ``strip`` cuts the padding off."""
    ranks = ranks_of(state)
    rows, columns = shape_of(state)
    longest = max(right.rows_of(rows, len(ranks)))
    own = mine.new_zeros(longest, columns)
    own[: len(mine)] = mine
    pieces = [torch.empty_like(own) for _ in ranks] if dist.get_rank() == owner else None
    dist.gather(own, pieces, dst=owner, group=state["group"])
    if pieces is None:
        return None
    full = torch.cat(pieces)
    return full[:rows] if strip else full


def uneven(mine: Tensor, owner: int, state: State) -> Any:
    """Wrong: ``dist.gather`` takes pieces of one shape only."""
    lengths = right.rows_of(shape_of(state)[0], len(ranks_of(state)))
    pieces = [mine.new_empty(length, mine.shape[1]) for length in lengths]
    dist.gather(mine, pieces if dist.get_rank() == owner else None, dst=owner, group=state["group"])
    return torch.cat(pieces) if dist.get_rank() == owner else None


def gathered(change: Callable[[Any, Tensor], Any]) -> Callable:
    """A gather that returns what ``change`` makes of the whole matrix, which is None except on the owner."""
    return lambda mine, owner, state: change(right.gather(mine, owner, state), mine)


def of_owner(change: Callable[[Tensor], Any]) -> Callable:
    return gathered(lambda full, mine: None if full is None else change(full))


def broadcast(update: Tensor | None, owner: int, state: State, as_it_lies: bool = False) -> Any:
    """Sends more than is needed; wrong if it sends an update ``as_it_lies`` in memory."""
    ranks = ranks_of(state)
    whole = torch.empty(shape_of(state), dtype=torch.bfloat16) if update is None else update
    whole = whole if as_it_lies else whole.contiguous()
    dist.broadcast(whole, src=owner, group=state["group"])
    return whole.split(right.rows_of(len(whole), len(ranks)))[ranks.index(dist.get_rank())]


def first_rows(update: Tensor | None, owner: int, state: State) -> Any:
    whole = torch.empty(shape_of(state), dtype=torch.bfloat16) if update is None else update
    dist.broadcast(whole, src=owner, group=state["group"])
    return whole[: state["local_shape"][0]]


ASSIGNED: list[tuple[Any, str]] = [
    (
        lambda params, state: {index: index % len(ranks_of(state)) for index in range(len(params))},
        "is a place in that group; an owner is named by its global rank",
    ),
    (lambda params, state: dict.fromkeys(range(len(params)), dist.get_rank()), "and name different owners"),
    (
        lambda params, state: {
            i: ranks[(i + dist.get_rank()) % len(ranks)]
            for ranks in [ranks_of(state)]
            for i in range(len(params))
        },
        "and name different owners",
    ),
    (lambda params, state: dict.fromkeys(range(len(params)), ranks_of(state)[0]), "of them get any"),
    (lambda params, state: {0: ranks_of(state)[0]}, "an owner for each of the parameters 0 to 4"),
    (5, "Give a function."),
    (lambda params, state: state["ranks"], "assign raised on rank 0: KeyError: 'ranks'"),
]
PLACED_BY_RANK = "[sum(send) * (i == dst_rank % len(send)) for i in range(len(send))]"
"""A global rank as the index into a list with one entry for each rank of the group."""
GATHERED: list[tuple[Callable, str]] = [
    (lambda mine, owner, state: padded(mine, owner, state, strip=False), "That is with padding"),
    (
        lambda mine, owner, state: right.gather(mine, owner, state) if dist.get_rank() == owner else None,
        "which had returned without making the call. Only the owner gets the matrix",
    ),
    (gathered(lambda full, mine: mine if full is None else full), "not the owner, so it must return None"),
    (gathered(lambda full, mine: None if full is None else mine), "That is one rank's rows"),
    (of_owner(lambda full: full.flip(0)), "the place of row 0 of the matrix holds row 4"),
    (of_owner(lambda full: torch.cat([full[:1], torch.zeros_like(full[1:])])), "as if it was never filled"),
    (
        of_owner(lambda full: full.float()),
        "torch.float32 came back; the momentum's own dtype is torch.bfloat16. Hint: mine.new_empty(",
    ),
    (of_owner(lambda full: full.flatten()), "it returned (30,). All its entries are there"),
    (lambda *given: None, "the owner must return the whole matrix"),
    (
        altered(
            right.gather, ("    whole =", "    if not any(send + take):\n        return None\n    whole =")
        ),
        "had returned without making the call. Only the owner gets the matrix, but every rank calls",
    ),
    (uneven, "dist.gather wants equal pieces"),
    (
        altered(right.gather, ("    whole =", f"    send = {PLACED_BY_RANK}\n    whole =")),
        "a rank sends itself more or fewer elements than it takes from itself. Hint: Only",
    ),
    (altered(right.gather, (', group=state["group"]', "")), "Hint: Does the call name group=state['group']?"),
    (
        altered(right.gather, ("(), take, send", "(), send, take")),
        "Hint: Only the owner takes. All ranks send only to its place in the group",
    ),
    (lambda mine, owner, state: padded(mine, ranks_of(state).index(owner), state), "gather raised on rank"),
]
GIVEN_BACK: list[tuple[Callable, str]] = [
    (
        altered(right.redistribute, ("return ", "return update if update is not None else ")),
        "its part has shape (3, 6); it returned (5, 6)",
    ),
    (
        lambda update, *given: None if update is None else right.redistribute(update, *given),
        "Timeout in redistribute, matrix 0: rank 0 waited",
    ),
    (
        altered(right.redistribute, ("flat, take, send", "flat, send, take")),
        "Each rank takes what it sent on the way out: exchange the two lists.",
    ),
    (
        altered(right.redistribute, ("mine.new_empty(0)", "torch.empty(0)")),
        "Hint: All tensors of the call are bfloat16, as the update is.",
    ),
    (altered(right.redistribute, ("return ", "")), "every rank must return its part, but it returned None"),
    (
        lambda *given: right.redistribute(*given).float(),
        "its part is torch.float32; it must be torch.bfloat16",
    ),
    (first_rows, "it must return rows 3 to 4 of the update, but it has [0, 1]"),
    (
        lambda update, owner, state: broadcast(update, owner, state, True),
        "in memory: send update.contiguous().",
    ),
    (lambda update, *_: update.flatten(), "no attribute 'flatten' Hint: On other ranks the update is None"),
]


NAMES = {"shard": "fsdp", "replicate": "dp", "tp": "tp", "ep": "ep"}


def travelled(rank: int, layout: str) -> dict[str, Any]:
    """Run one parameter through a helper's functions; returns the bytes sent each way and the shapes."""
    grid = GRIDS[layout]
    mesh = build_mesh(grid)
    side = 2 * grid.world_size
    box = held_box((side, side), CUTS[layout], grid.at(rank))
    param = torch.nn.Parameter(torch.full(box.shape, float(rank)))
    names = [NAMES[axis] for axis in grid.axes]
    config = create_devicemesh_config(mesh, names, tp_dim=1 if layout == "TP" else None)
    config.assign_fn([param], config.state)
    owner = rank if layout == "EP" else OWNER
    state = {**config.state, "param_idx": 0}
    with TransferNotes() as out:
        full = config.gather_fn(param.detach().bfloat16(), owner, state)
    update = None if full is None else torch.ones(side, side, dtype=torch.bfloat16)
    with TransferNotes() as back:
        part = config.redistribute_fn(update, owner, state)
    came_from = None if full is None else full.float().tolist()
    return {"out": out.sent, "back": back.sent, "full": came_from, "part": tuple(part.shape)}
