"""Lesson 07: its checkers tell right from wrong on several grids, and its pictures agree with the plan."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from muon_tutorial.learn import cuts as lesson
from muon_tutorial.learn.cuts import on_ranks as work
from muon_tutorial.learn.cuts import qkv
from muon_tutorial.learn.cuts.exercises import backward_exercise, tokens_exercise, torn

from .answers import PASSES, altered, judged

GRIDS = [(2, 3), (3, 1), (1, 4), (2, 7)]


def piece_of_chunk(shape: tuple[int, int], kind: str, tp_rank: int, tp: int) -> Any:
    """Wrong: if there are too few rows, torch.chunk gives fewer pieces than there are tp ranks."""
    return torch.empty(shape).chunk(tp, 0 if kind == "column" else 1)[tp_rank].shape


def by_chunk(shape: tuple[int, int], kind: str, tp_rank: int, tp: int) -> Any:
    try:
        return piece_of_chunk(shape, kind, tp_rank, tp)
    except IndexError:
        return (0, shape[1]) if kind == "column" else (shape[0], 0)


def with_length(length: Any) -> Any:
    def local_shape(shape: tuple[int, int], kind: str, tp_rank: int, tp: int) -> Any:
        mine = length(shape[0 if kind == "column" else 1], tp_rank, tp)
        return (mine, shape[1]) if kind == "column" else (shape[0], mine)

    return local_shape


SHAPES = [
    (by_chunk, PASSES),
    (lesson.local_shape, PASSES),
    (
        lambda shape, kind, *at: lesson.local_shape(shape, "row" if kind == "column" else "column", *at),
        "That is row parallel: column parallel cuts dimension 0, out.",
    ),
    (lambda shape, kind, tp_rank, tp: (shape[0] // tp, shape[1] // tp), "Dimension 1 stays whole"),
    (lambda shape, kind, tp_rank, tp: shape, "That is the whole weight"),
    (with_length(lambda n, tp_rank, tp: float(n)), "of whole numbers for tp_rank 0, not (10.0, 8)"),
    (with_length(lambda n, tp_rank, tp: n if tp == 1 else None), "for tp_rank 0, not (None, 8)"),
    (with_length(lambda n, tp_rank, tp: n // tp), "Together, your pieces hold 6 of 7. Round up."),
    (with_length(lambda n, tp_rank, tp: -(-n // tp)), "A rank cannot hold more than is left"),
    (with_length(lambda n, tp_rank, tp: min(-(-n // tp), n - tp_rank * -(-n // tp))), "never below 0"),
    (with_length(lambda n, tp_rank, tp: n // tp + (tp_rank < n % tp)), "fills one piece after another"),
    (lambda shape, *_: shape[0], "give a pair (rows, columns) of whole numbers for tp_rank 0, not 10."),
    (piece_of_chunk, "(1, 5), column parallel, tp 2, tp_rank 1: The function raised IndexError"),
]


# Both layers, on real ranks.


layers = partial(altered, lesson.both_layers)
own_part = layers(("dist.all_reduce(y, group=tp_group)", "pass"))
LAYERS = [
    (lesson.both_layers, PASSES),
    (own_part, "only its own part of every sum"),
    (layers(("torch.relu(x @ up.T)", "x @ up.T")), "without relu"),
    (
        layers(("torch.relu(x @ up.T)", "x @ up.T"), ("return y", "return torch.relu(y)")),
        "relu comes after the sum",
    ),
    (layers((", group=tp_group", "")), "the sum over all ranks"),
    (lambda x, up, down, group: torch.relu(x @ up.T), "returned shape (4, 5); y has the shape (4, 6)"),
    (layers(("return y", "")), "returned NoneType"),
    (layers((".T", "")), "A weight is (out, in), so write x @ up.T"),
]


test_a_wrong_pass_is_told_what_it_has_calculated = judged(
    (partial(lesson.layers_exercise, 2, 2), LAYERS),
    (
        partial(lesson.layers_exercise, 1, 3),
        [(layers(("hidden @ down.T", "hidden")), "rank 1: 16 entries of float32; rank 2: 8")],
    ),
)


def both_layers_sp(x: Tensor, up: Tensor, down: Tensor, tp_group: Any) -> Tensor:
    tokens = [torch.empty_like(x) for _ in range(tp_group.size())]
    dist.all_gather(tokens, x, group=tp_group)
    y = torch.relu(torch.cat(tokens) @ up.T) @ down.T
    mine = torch.empty_like(y[: len(x)])
    dist.reduce_scatter(mine, list(y.split(len(x))), group=tp_group)
    return mine


SUMS = "dist.reduce_scatter(mine, list(y.split(len(x))), group=tp_group)"


def tokens(old: str, new: str) -> Any:
    """The pass with sequence parallelism, with other code in one place."""
    return altered(both_layers_sp, (old, new))


test_a_wrong_pass_with_sequence_parallelism_is_told_what_it_has_calculated = judged(
    (
        partial(tokens_exercise, 2, 2),
        [
            (both_layers_sp, PASSES),
            (own_part, "only its own part of every sum"),
            (lesson.both_layers, "all_reduce sends more than needed: one all_gather and one reduce_scatter"),
            (
                tokens(
                    SUMS, "dist.all_reduce(y, group=tp_group)\n    mine = y.split(len(x))[tp_group.rank()]"
                ),
                "all_reduce sends more than needed",
            ),
            (
                tokens(
                    SUMS,
                    "dist.all_gather(sums := [y.clone() for _ in tokens], y, group=tp_group)\n"
                    "    mine = sum(sums).split(len(x))[tp_group.rank()]",
                ),
                "all_gather sends more than needed",
            ),
            (tokens("y.split", "y.roll(-len(x), 0).split"), "these are the outputs of another rank's tokens"),
            (tokens("torch.relu", ""), "without relu"),
            (tokens("return mine", "return y"), "(8, 6); y has the shape (4"),
        ],
    ),
    (partial(tokens_exercise, 1, 1), [(both_layers_sp, PASSES), (lesson.both_layers, PASSES)]),
)


# Back through both layers.


def both_backward(x: Tensor, up: Tensor, down: Tensor, tp_group: Any, dp_group: Any, dy: Tensor) -> Any:
    hidden = torch.relu(x @ up.T)
    d_down = dy.T @ hidden
    d_hidden = (dy @ down) * (hidden > 0)
    d_up = d_hidden.T @ x
    dx = d_hidden @ up
    dist.all_reduce(dx, group=tp_group)
    return dx, d_up, d_down


back = partial(altered, both_backward)
SUM = "dist.all_reduce(dx, group=tp_group)"


test_wrong_gradients_are_told_over_which_ranks_they_are_summed = judged(
    (
        partial(backward_exercise, 2, 2),
        [
            (both_backward, PASSES),
            (back((SUM, "pass")), "Rank 0, dx: this is only its own part of every sum"),
            (
                back((SUM, f"{SUM}; dist.all_reduce(d_up, group=tp_group)")),
                "d_up: this adds up gradients of different",
            ),
            (
                back((SUM, f"{SUM}; dist.all_reduce(d_down, group=tp_group)")),
                "d_down: this adds up gradients of different",
            ),
            (
                back((SUM, f"{SUM}; dist.all_reduce(d_down, group=dp_group)")),
                "d_down: this adds up gradients over dp",
            ),
            (back(("tp_group)\n    return", "dp_group)\n    return")), "dx: this adds up gradients over dp"),
            (back((", group=tp_group", "")), "dx: this adds up gradients over dp"),
            (back((" * (hidden > 0)", "")), "dx: autograd in one process finds"),
            (back(("return dx, d_up, d_down", "return dx, d_down, d_up")), "return dx, d_up and d_down, in"),
            (back(("return dx, d_up, d_down", "")), "return dx, d_up and d_down, in the shapes"),
        ],
    ),
    (
        partial(backward_exercise, 1, 3),
        [
            (both_backward, PASSES),
            (
                back((SUM, "dist.all_reduce(d_up, group=tp_group)")),
                "Along tp nobody else has your piece",
            ),
        ],
    ),
    (partial(backward_exercise, 3, 1), [(both_backward, PASSES), (back((SUM, "pass")), PASSES)]),
)


@pytest.mark.parametrize("tp", [1, 2, 3, 7])
def test_gradients_of_pieces_are_pieces_of_the_gradients_and_those_of_x_add_up(tp: int) -> None:
    given = work.make_numbers("whole", 2, 0)
    parts = [given.gradients(1, place, tp) for place in range(tp)]
    x, up, down = (each.clone().requires_grad_() for each in (given.batches[1], given.up, given.down))
    y = torch.relu(x @ up.T) @ down.T
    dx, d_up, d_down = torch.autograd.grad(y.square().sum() / 2, (x, up, down))
    assert torch.equal(torch.stack([part[0] for part in parts]).sum(0), dx)
    assert torch.equal(torch.cat([part[1] for part in parts]), d_up)
    assert torch.equal(torch.cat([part[2] for part in parts], 1), d_down)


# The holder of an entry.


@pytest.mark.parametrize("dp_tp", GRIDS)
def test_an_entry_is_held_by_those_of_whom_the_plan_says_so(dp_tp: tuple[int, int]) -> None:
    dp, tp = dp_tp
    plan, length = lesson.plan_of(dp, tp), lesson.slice_length(dp, tp)
    for row, column in ((0, 0), (9, 7), (7, 2), (4, 0)):
        weight, momentum = lesson.who_holds(row, column, dp, tp, length)
        for rank in plan.grid.ranks:
            at = plan.grid.at(rank)
            box = plan.buckets[0].entries[0].matrix.box(at)
            inside = all(a <= n < a + b for n, a, b in zip((row, column), box.offset, box.shape, strict=True))
            assert inside == (rank in weight)
        assert momentum in weight
    verdict = lesson.holders_exercise(dp, tp).check(lesson.who_holds)
    assert verdict
    assert verdict.picture is not None
    last = lesson.who_holds(9, 7, dp, tp, length)[1]
    assert re.search(rf"momentum: .*rank {last} \d+ × \d+ from row \d, column \d\.$", verdict.picture.alt)


def test_ranks_that_were_computed_by_division_are_drawn_too() -> None:
    def in_floats(*given: int) -> Any:
        weight, momentum = lesson.who_holds(*given)
        return [float(rank) for rank in weight], float(momentum)

    exercise = lesson.holders_exercise(2, 2)
    drawn, right = (exercise.check(each).picture for each in (in_floats, lesson.who_holds))
    assert drawn is not None
    assert right is not None
    assert drawn.alt == right.alt


def counts_along_dp(row: int, column: int, dp: int, tp: int, length: int) -> Any:
    on, keeper = lesson.who_holds(row, column, dp, tp, length)
    return on, keeper % tp * dp + keeper // tp


# A fused weight.


@pytest.mark.parametrize("tp", range(1, 9))
@pytest.mark.parametrize("rows_of", [qkv.rows_as_one, qkv.rows_of_each])
def test_every_row_of_a_fused_weight_is_on_one_rank(tp: int, rows_of: qkv.RowsOf) -> None:
    fused = qkv.cut_fused(rows_of, tp)
    assert sorted(row for rows in fused.held for row in rows) == list(range(fused.rows))


def test_cut_as_one_every_head_is_torn_and_cut_each_only_where_tp_does_not_fit() -> None:
    size, tps = (qkv.HEADS, qkv.HEAD_DIM), range(1, 7)
    as_one = [len(qkv.cut_fused(qkv.rows_as_one, tp).torn()) for tp in tps]
    each = [qkv.count_torn(tp) for tp in tps]
    assert [torn(*size, tp, True) for tp in tps] == as_one == [0, 4, 4, 4, 4, 4]
    assert [torn(*size, tp, False) for tp in tps] == each == [0, 0, 2, 0, 0, 4]


def test_a_right_cut_is_scored_and_stubs_are_open() -> None:
    verdict = lesson.qkv_exercise().check(qkv.shard_qkv, qkv.join_qkv)
    assert "Yours takes 144 entries on the busiest rank; par is 144." in verdict.message
    assert verdict.picture is not None
    assert verdict.picture.alt.endswith(
        "head 1 is whole on rank 0; head 2 is whole on rank 1; head 3 is whole on rank 2."
    )
    all_on_one = lesson.qkv_exercise().check(
        lambda W, heads, r, tp: W if r == 0 else W[:0], lambda p, h: p[0]
    )
    assert "rank 0 has 36 rows, and 18 are enough. Share the heads out." in all_on_one.message


WRONG_CUTS = [
    (
        lambda W, heads, r, tp: W.tensor_split(tp)[r],
        qkv.join_qkv,
        "4 heads, tp 3: head 0 is torn between ranks 0 and 1 and 2",
    ),
    (
        lambda W, heads, r, tp: torch.cat([part.tensor_split(tp)[r] for part in W.tensor_split(3)]),
        qkv.join_qkv,
        "4 heads, tp 3: head 1 is torn between ranks 0 and 1",
    ),
    (
        altered(qkv.shard_qkv, ("[:, mine]", "[:, mine].transpose(0, 1)")),
        qkv.join_qkv,
        "rank 0's piece is not q above k above v",
    ),
    (
        altered(
            qkv.shard_qkv, ("(heads).tensor_split(tp)[tp_rank]", "(heads // tp) + tp_rank * (heads // tp)")
        ),
        qkv.join_qkv,
        "row 9 of q is on no rank",
    ),
    (lambda W, *rest: W, qkv.join_qkv, "row 0 of q is on 3 ranks"),
    (lambda W, *rest: W[0], qkv.join_qkv, "a piece is (rows, 8); yours is (8,)"),
    (lambda W, *rest: W / 2, qkv.join_qkv, "rows that are not rows of W"),
    (
        qkv.shard_qkv,
        lambda pieces, heads: torch.cat(list(pieces)),
        "joined again, row 6 is not what it was: row 6 of q belongs there",
    ),
    (qkv.shard_qkv, lambda pieces, heads: pieces[0], "join_qkv returns (18, 8), not (36, 8)"),
    (lambda W, heads, r, tp: W.nothing, qkv.join_qkv, "raised AttributeError"),
]


test_an_answer_passes_or_is_told_what_is_wrong_with_it = judged(
    (lesson.shapes_exercise, SHAPES),
    (lesson.qkv_exercise, WRONG_CUTS),
    (
        partial(lesson.holders_exercise, 2, 2),
        [(counts_along_dp, "Ranks count along tp first: rank = place")],
    ),
)
