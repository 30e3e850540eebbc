"""Exercises of lesson 07: shapes of pieces, a pass through both layers, who holds an entry, fused weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...errors import RankFailedError
from ..exercises import judge as judging
from ..exercises.judge import Diagnosis, Exercise, Par, first, guesses, numbers, value_of, why, written
from ..exercises.on_real_ranks import judge_on_ranks, say_failure
from . import on_ranks, qkv
from .on_ranks import DIM, DOWN, KINDS, UP, CutKind, LayersRun, ShapeOf, local_shape
from .pictures import draw_answers, draw_fused

SHAPES = ((10, 8), (6, 10), (7, 3), (12, 12), (1, 5), (64, 256))
PARTS = (1, 2, 3, 4, 5, 8)
GRIDS = ((2, 3), (1, 1), (3, 2), (2, 4), (4, 1), (1, 5))
FUSED = ((4, 3), (4, 2), (8, 3), (5, 3), (6, 4), (2, 1), (2, 3))
"""(heads, tp) of the fused weights that an answer is tried on."""
TP_OF_PAR = 3
OWN = "this is only its own part of every sum. The parts of the other ranks in its tp group are missing."
PIECES = "this adds up gradients of different pieces. Along tp, no other rank has a part of this one."
OVER_DP = "this adds up gradients over dp, from other tokens. For the weights, Muon's step does that later."
Shard = Callable[[Tensor, int, int, int], Any]
Join = Callable[[Sequence[Tensor], int], Any]


def pieces_exercise(tp: int) -> Exercise:
    """The guess: the shapes of the last piece of ``up``, for both cuts."""

    def asked(kind: CutKind, other: CutKind) -> tuple[Any, ...]:
        dim = DIM[kind]
        swapped = f"That is {other} parallel. {kind.capitalize()} parallel cuts dimension {dim}."
        left = f"what is left of {UP[dim]} when each of the others has {-(-UP[dim] // tp)}"
        told = f"Dimension {1 - dim} stays whole, {UP[1 - dim]}. Of dimension {dim} it holds {left}."
        first_piece = "That is the first piece. The last gets what is left."
        right, turned = (local_shape(UP, each, tp - 1, tp) for each in (kind, other))
        return f"{kind}_parallel", right, told, (turned, swapped), (local_shape(UP, kind, 0, tp), first_piece)

    hints = ("Set the buttons to the last rank, and count. Each square has one entry's height and width.",)
    praise = "Cut one dimension, keep the other. The last piece may be a sliver."
    return guesses(asked("column", "row"), asked("row", "column"), hints=2 * hints, praise=praise)


def shapes_exercise() -> Exercise:
    """The exercise: local shapes, column parallel and row parallel, for sizes that tp does not divide."""

    def judge(function: ShapeOf) -> str | None:
        for shape, tp in ((shape, tp) for tp in PARTS for shape in SHAPES):
            for kind in KINDS:
                case = f"A weight of {shape}, {kind} parallel, tp {tp}"
                said = [
                    value_of(function, shape, kind, tp_rank, tp, told=f"{case}, tp_rank {tp_rank}: {{}}")
                    for tp_rank in range(tp)
                ]
                for tp_rank, one in enumerate(said):
                    right = local_shape(shape, kind, tp_rank, tp)
                    if not _is_pair(one):
                        what = "give a pair (rows, columns) of whole numbers"
                        return f"{case}: {what} for tp_rank {tp_rank}, not {one!r}."
                    if tuple(one) != right:
                        pieces = [(int(piece[0]), int(piece[1])) for piece in said if _is_pair(piece)]
                        told = _why_not(pieces, shape, kind, tp)
                        return f"{case}: tp_rank {tp_rank} holds {right}, not {tuple(one)}. {told}"
        return None

    hints = (
        "Column parallel cuts dimension 0, out; row parallel cuts dimension 1, in. The other stays whole.",
        "The length of a run is n / tp, rounded up: -(-n // tp).",
        "What is left for tp_rank is n - step * tp_rank; never less than 0, never more than step.",
    )
    praise = "Your pieces are those of torch.chunk, also where a rank gets less, or nothing."
    return Exercise(judge, hints, praise, keeps=("local_shape",))


def _is_pair(said: object) -> bool:
    """Whether ``said`` is a pair of integers. 4.0 does not count, because the lesson slices with them."""
    pair = isinstance(said, (tuple, list)) and len(said) == 2
    return pair and all(hasattr(value, "__index__") for value in said)  # type: ignore[attr-defined]


def _why_not(said: Sequence[tuple[int, int]], shape: tuple[int, int], kind: CutKind, tp: int) -> str:
    dim, length = DIM[kind], shape[DIM[kind]]
    other, sides = KINDS[1 - dim], ("out", "in")
    held = [piece[dim] for piece in said]
    if any(piece[1 - dim] != shape[1 - dim] for piece in said):
        swapped = all(piece == local_shape(shape, other, tp_rank, tp) for tp_rank, piece in enumerate(said))
        what = f"That is {other} parallel" if swapped else f"Dimension {1 - dim} stays whole"
        return f"{what}: {kind} parallel cuts dimension {dim}, {sides[dim]}."
    if all(piece == length for piece in held):
        return "That is the whole weight. tp cuts it."
    if min(held) < 0:
        return "A length is never below 0: once all is given away, the others hold nothing."
    if sum(held) != length:
        fault = "Round up" if sum(held) < length else "A rank cannot hold more than is left"
        return f"Together, your pieces hold {sum(held)} of {length}. {fault}."
    return f"Your pieces hold everything, but in runs of {held}; torch.chunk fills one piece after another."


def layers_exercise(dp: int, tp: int, backend: str = "gloo") -> Exercise:
    """The exercise: a pass through a column parallel and a row parallel layer, on real ranks."""
    play = partial(on_ranks.run_layers, dp=dp, tp=tp, backend=backend)
    hints = (
        "hidden @ down.T sums over your hidden features only. Who has the other parts of the sum?",
        "dist.all_reduce(y, group=tp_group) adds in place.",
    )
    praise = "Two cuts, one message: every rank of a row has the whole output."
    return Exercise(judge_on_ranks(play, judge_layers, _say_pass), hints, praise)


def _say_pass(error: RankFailedError) -> str:
    """What stopped a pass; if the shapes of a product do not fit, also that a weight is (out, in)."""
    turn = "\nA weight is (out, in), so write x @ up.T, and hidden @ down.T."
    return say_failure(error) + turn * ("cannot be multiplied" in str(error))


def tokens_exercise(dp: int, tp: int, backend: str = "gloo") -> Exercise:
    play = partial(on_ranks.run_layers, dp=dp, tp=tp, backend=backend, parts=tp)
    kept = on_ranks.BATCH * DOWN[0]
    praise = f"Each rank keeps {kept} entries of y. After your all_reduce it would keep {tp * kept}."
    return Exercise(judge_on_ranks(play, judge_layers, _say_pass), praise=praise, optional=True)


def backward_exercise(dp: int, tp: int, backend: str = "gloo") -> Exercise:
    play = partial(on_ranks.run_backward, dp=dp, tp=tp, backend=backend)
    hint = "A gradient has its tensor's shape. Along tp nobody else has your piece, or adds to its gradient."
    praise = "One all_reduce forward, of y, and one backward, of dx. The weights need none along tp."
    return Exercise(judge_on_ranks(play, judge_backward, hint=hint), praise=praise, optional=True)


def judge_backward(run: LayersRun) -> str | None:
    """What is wrong with the gradients of x, up and down that the ranks returned; None if nothing is."""
    tp, ranks = run.tp, range(len(run.outputs))
    parts = [*zip(*(run.given.gradients(*divmod(rank, tp), tp) for rank in ranks), strict=True)]
    for rank, said in enumerate(run.outputs):
        right = run.given.gradients(rank // tp)[0], *(of[rank] for of in parts[1:])
        shapes = [getattr(each, "shape", None) for each in said] if isinstance(said, tuple | list) else []
        if shapes != [each.shape for each in right]:
            return f"Rank {rank}: return dx, d_up and d_down, in the shapes of x, up and down."
        for name, mine, due, of in zip(("dx", "d_up", "d_down"), said, right, parts, strict=True):
            if not torch.equal(mine, due):
                over = of[rank : rank + 1], of[rank - rank % tp :][:tp], of[rank % tp :: tp], of
                slips = zip(over, (OWN, PIECES, OVER_DP, OVER_DP), strict=True)
                told = why(*((_is_sum(mine, some), told) for some, told in slips))
                return f"Rank {rank}, {name}: {told or 'autograd in one process finds something else.'}"
    return None


def _is_sum(mine: Tensor, parts: Sequence[Tensor]) -> bool:
    return all(each.shape == mine.shape for each in parts) and torch.equal(mine, sum(parts, torch.zeros(())))


def judge_layers(run: LayersRun) -> str | None:
    """What is wrong with the outputs of a run on whole numbers; None if nothing is."""
    for rank, (output, right) in enumerate(run.pairs()):
        if not isinstance(output, Tensor) or output.shape != right.shape:
            came = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
            return f"Rank {rank} returned {came}; y has the shape {tuple(right.shape)}."
        if not torch.equal(output, right):
            return f"Rank {rank}: {_why_not_y(run, rank, run.tp, output)}"
    return None


def _why_not_y(run: LayersRun, rank: int, tp: int, output: Tensor) -> str:
    given, x = run.given, run.own(rank, run.given.batches[rank // tp])
    up, down = on_ranks.cut(given.up, "column", rank % tp, tp), on_ranks.cut(given.down, "row", rank % tp, tp)
    plain = x @ given.up.T @ given.down.T
    alone = [given.alone(dp_rank) for dp_rank in range(len(given.batches))]
    everybody, others = run.own(rank, torch.stack(alone).sum(0)), alone[rank // tp].chunk(run.parts)
    late = "the relu comes after the sum. It belongs on the hidden features."
    of_others = "these are the outputs of another rank's tokens."
    all_ranks = "this is the sum over all ranks. Other rows of the grid have other data: give group=tp_group."
    return why(
        (torch.equal(output, torch.relu(x @ up.T) @ down.T), OWN),
        (torch.equal(output, plain), "this is the output without relu."),
        (torch.equal(output, torch.relu(plain)), late),
        (torch.equal(output, everybody), all_ranks),
        (any(torch.equal(output, each) for each in others), of_others),
        otherwise="the output is not that of one process with the whole weights.",
    )


def holders_exercise(dp: int, tp: int) -> Exercise:
    """The exercise: for any entry of ``up``, the ranks with its weight, and the rank with its momentum."""
    grids = [*dict.fromkeys([(dp, tp), *GRIDS])]
    places = [(row, column) for row in range(UP[0]) for column in range(UP[1])]
    cases = [(*place, *grid, on_ranks.slice_length(*grid)) for grid in grids for place in places]

    def changed(change: Callable[[list[int], int], Any]) -> Callable[..., Any]:
        return lambda *case: change(*on_ranks.who_holds(*case))

    def by_tp(row: int, column: int, dp: int, tp: int, length: int) -> Any:
        on, keeper = on_ranks.who_holds(row, column, dp, tp, length)
        return on, keeper % tp * dp + keeper // tp

    slips = (
        ("dp copies the weight.", changed(lambda on, keeper: (on[:1], keeper))),
        ("That rank keeps another slice.", changed(lambda on, keeper: (on, on[0]))),
        ("Ranks count along tp first: rank = place along dp * tp + place along tp.", by_tp),
        ("First who has the weight, then who has the momentum.", changed(lambda *both: both[::-1])),
    )
    hints = (
        "The first pieces have -(-10 // tp) rows. So tp_rank, my_row = divmod(row, …).",
        "The piece lies row by row: the entry is number my_row * 8 + column of the buffer.",
        "Slice n // length is kept by the rank with that dp coordinate, in the same column of the grid.",
    )
    right = changed(lambda on, keeper: (set(on), keeper))
    praise = "Any entry, any grid: you know where it is."
    say = "up[{0}, {1}] on a grid of dp {2}, tp {3}, length {4}"
    draw = partial(draw_answers, dp=dp, tp=tp)
    return written(right, cases, *slips, say=say, hints=hints, praise=praise, draw=draw)


def qkv_exercise() -> Exercise:
    """The hard exercise: cut a fused weight so that every head stays whole, and write the inverse."""

    def judge(shard: Shard, join: Join) -> str | Diagnosis | None:
        wrong = first(judge_fused(shard, join, *sizes) for sizes in FUSED)
        return wrong or Diagnosis("", picture=draw_fused(cut_by(shard), f"Your cut, tp = {TP_OF_PAR}"))

    hints = (
        "Deal out heads, not rows: torch.arange(heads).tensor_split(tp)[tp_rank] says which are yours.",
        "W.reshape(3, heads, -1, W.shape[1]) has q, k and v first, then heads; pick yours with [:, mine].",
        "To join: split each piece in three again, then all q parts, all k parts, all v parts.",
    )
    praise = "Every head is whole on one rank, and the inverse gives every bit back."
    best = 3 * qkv.HEAD_DIM * qkv.WIDTH * -(-qkv.HEADS // TP_OF_PAR)
    return Exercise(judge, hints, praise, Par("entries on the busiest rank", best, busiest), optional=True)


def cut_by(shard: Shard) -> qkv.FusedRows:
    """A right answer's cut of the fused weight, found with a weight whose entries are the row numbers."""
    whole = torch.arange(3.0 * qkv.HEADS * qkv.HEAD_DIM)[:, None].repeat(1, qkv.WIDTH)
    return qkv.cut_fused(lambda r, tp: shard(whole, qkv.HEADS, r, tp)[:, 0].int().tolist(), TP_OF_PAR)


def busiest(shard: Shard, join: Join) -> int:
    """The number of entries of the lesson's fused weight on the rank that gets the most."""
    whole = qkv.fused_weight(0)
    return max(shard(whole, qkv.HEADS, tp_rank, TP_OF_PAR).numel() for tp_rank in range(TP_OF_PAR))


def judge_fused(shard: Shard, join: Join, heads: int, tp: int) -> str | Diagnosis | None:
    """What is wrong with a cut of one fused weight or with its inverse; None if nothing is."""
    case = f"{heads} heads, tp {tp}: {{}}"
    whole = torch.arange(3 * heads * qkv.HEAD_DIM * qkv.WIDTH).float().reshape(-1, qkv.WIDTH)
    pieces = [value_of(shard, whole.clone(), heads, tp_rank, tp, told=case) for tp_rank in range(tp)]
    fused = qkv.FusedRows(heads, qkv.HEAD_DIM, tuple(_rows_of(piece, whole, case) for piece in pieces))
    if wrong := next(_judge_rows(fused), None):
        return Diagnosis(case.format(wrong), picture=draw_fused(fused, f"{heads} heads, tp = {tp}: your cut"))
    most = 3 * qkv.HEAD_DIM * -(-heads // tp)
    loads = [len(piece) for piece in pieces]
    if max(loads) > most:
        busy = loads.index(max(loads))
        return case.format(f"rank {busy} has {max(loads)} rows, and {most} are enough. Share the heads out.")
    back = value_of(join, [piece.clone() for piece in pieces], heads, told=case)
    if not isinstance(back, Tensor) or back.shape != whole.shape:
        came = tuple(back.shape) if isinstance(back, Tensor) else type(back).__name__
        return case.format(f"join_qkv returns {came}, not {tuple(whole.shape)}.")
    if not torch.equal(back, whole):
        row = int((back != whole).any(1).nonzero()[0])
        return case.format(f"joined again, row {row} is not what it was: {fused.name(row)} belongs there.")
    return None


def _rows_of(piece: Any, whole: Tensor, case: str) -> tuple[int, ...]:
    """The numbers of the fused weight's rows that a piece holds; MistakeError if it has other rows."""
    if not isinstance(piece, Tensor) or piece.dim() != 2 or piece.shape[1] != whole.shape[1]:
        came = tuple(piece.shape) if isinstance(piece, Tensor) else type(piece).__name__
        raise judging.MistakeError(case.format(f"a piece is (rows, {whole.shape[1]}); yours is {came}."))
    numbers_of_rows = [int(row[0]) // whole.shape[1] for row in piece]
    if not torch.equal(piece, whole[numbers_of_rows]):
        said = "a piece has rows that are not rows of W. Cut, and calculate nothing."
        raise judging.MistakeError(case.format(said))
    return tuple(numbers_of_rows)


def _judge_rows(fused: qkv.FusedRows) -> Iterator[str]:
    for row in range(fused.rows):
        if (count := sum(rows.count(row) for rows in fused.held)) != 1:
            there = f"{count} ranks" if count else "no rank"
            yield f"{fused.name(row)} is on {there}; it belongs on one."
    for head in fused.torn():
        ranks = " and ".join(map(str, fused.ranks_of(head)))
        yield f"head {head} is torn between ranks {ranks}. Give each rank whole heads of q, k and v alike."
    third = fused.heads * fused.size
    for tp_rank, rows in enumerate(fused.held):
        of_part = [[row % third for row in rows if row // third == part] for part in range(3)]
        in_order = [part * third + row for part in range(3) for row in of_part[part]]
        if list(rows) != in_order or of_part != [of_part[0]] * 3:
            yield f"rank {tp_rank}'s piece is not q above k above v, with the same heads in the same order."


def quiz(dp: int, tp: int) -> Exercise:
    plan = on_ranks.plan_of(dp, tp)
    kept = sum(held.numel for bucket in plan.buckets for held in bucket.stored_shards(plan.grid.at(0)))
    columns = f"Each rank takes {DOWN[1]} / tp columns, rounded up, and the last one gets what is left."
    return numbers(
        ("columns", local_shape(DOWN, "row", tp - 1, tp)[1], columns),
        ("kept", kept, "Its buffer has room for the largest piece of up and of down. How long is a slice?"),
        ("torn", qkv.count_torn(3), "Slide tp to 3. Which heads lie on several ranks in the right half?"),
    )


def torn(heads: int, rows: int, tp: int, stacked: bool) -> int:
    """The exercise's reference: how many heads lie on several ranks, if tp cuts q, k, v together or apart.

    >>> torn(4, 3, 1, True), torn(4, 3, 2, True), torn(4, 3, 2, False), torn(4, 3, 3, False)
    (0, 4, 0, 2)
    """
    parts = 3 if stacked else 1
    step = -(-parts * heads * rows // tp)
    found = 0
    for head in range(heads):
        runs = (range(first, first + rows) for first in ((p * heads + head) * rows for p in range(parts)))
        found += len({row // step for run in runs for row in run}) > 1
    return found


def torn_exercise() -> Exercise:
    """The exercise: how many heads of a fused weight are torn, if q, k and v are cut together or apart."""
    cases = [(4, 3, 1, True), (4, 3, 2, True), (1, 4, 3, True), (4, 3, 2, False), (4, 3, 3, False)]

    def runs(heads: int, rows: int, tp: int, stacked: bool) -> int:
        """A wrong count: it counts runs of rows, not heads."""
        step = -(-(3 if stacked else 1) * heads * rows // tp)
        firsts = range(0, (3 if stacked else 1) * heads * rows, rows)
        return sum(first // step != (first + rows - 1) // step for first in firsts)

    slips = (
        ("All three thirds of a head must be on *one* rank: compare q's rank with k's and v's, too.", runs),
        ("As one, step is 3 · heads · rows / tp, rounded up.", lambda h, r, tp, _: torn(h, r, tp, False)),
        ("One by one, step is heads · rows / tp, rounded up.", lambda h, r, tp, _: torn(h, r, tp, True)),
        ("With tp = 1 nothing is cut.", lambda heads, rows, tp, stacked: heads),
        ("Count the heads that are not whole.", lambda heads, *more: heads - torn(heads, *more)),
    )
    hints = ("The first row of head h in third t (0, 1 or 2) is (t * heads + h) * rows.",)
    praise = "Cut as one, with tp > 1, a head's q and v share no rank. Cut apart, they are on the same ranks."
    say = "{} heads of {} rows each, tp = {} and stacked = {}"
    return written(torn, cases, *slips, say=say, hints=hints, praise=praise)


def all_exercises(dp: int, tp: int, backend: str = "gloo") -> tuple[Exercise, ...]:
    layers = (each(dp, tp, backend) for each in (layers_exercise, backward_exercise, tokens_exercise))
    fused = holders_exercise(dp, tp), torn_exercise(), qkv_exercise()
    return pieces_exercise(tp), shapes_exercise(), *layers, *fused, quiz(dp, tp)
