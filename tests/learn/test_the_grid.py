"""Lesson 06: its checkers know right from wrong on several grids, and its pictures say what the plan says."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from muon_tutorial import Grid, Muon, build_mesh, launch
from muon_tutorial.errors import MismatchError, RankFailedError
from muon_tutorial.learn import the_grid as lesson
from muon_tutorial.learn.pictures.colours import EMPTY, rank_colour
from muon_tutorial.learn.the_grid import on_ranks as work
from muon_tutorial.learn.the_grid import pictures as grid_pictures
from muon_tutorial.learn.the_grid.on_ranks import KINDS, CutKind
from muon_tutorial.learn.widgets import rank_buttons

from .answers import assert_quiz, assert_wrong

GRIDS = [(2, 3), (3, 3), (3, 2), (3, 1), (1, 4), (2, 2), (1, 1), (2, 7)]


def made(*lists: Any) -> Any:
    return lambda dp, tp: lists if len(lists) != 1 else lists[0]


def with_dp_groups(dp_groups: Any) -> Any:
    """The right tp groups beside dp groups made from the sizes, and from the right ones."""
    return lambda dp, tp: (dp_groups(dp, tp, lesson.groups(dp, tp)[0]), lesson.groups(dp, tp)[1])


def swapped(dp: int, tp: int) -> Any:
    return lesson.groups(dp, tp)[::-1]


def numbered_by_column(dp: int, tp: int) -> Any:
    return lesson.groups(tp, dp)[::-1]


one_too_short = with_dp_groups(lambda dp, tp, _: [list(range(p, dp * tp - 1, tp)) for p in range(tp)])
by_the_other_step = with_dp_groups(lambda dp, tp, _: [list(range(p, dp * tp, dp)) for p in range(tp)])


@pytest.mark.parametrize("dp_tp", GRIDS)
def test_the_reference_and_other_right_groups_pass(dp_tp: tuple[int, int]) -> None:
    assert lesson.groups_exercise(*dp_tp).check(lesson.groups)
    assert lesson.groups_exercise(*dp_tp).check(from_coordinates)
    assert lesson.groups_exercise(*dp_tp).check(lambda dp, tp: ...).passed is None


def from_coordinates(dp: int, tp: int) -> list[tuple[tuple[int, ...], ...]]:
    grid = Grid.of(dp=dp, tp=tp)
    return [
        tuple({tuple(reversed(grid.at(rank).group(axis))): None for rank in grid.ranks})
        for axis in ("dp", "tp")
    ]


COLUMNS, ROWS = [[0, 3], [1, 4], [2, 5]], [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (swapped, "rows and columns are swapped. [0, 1, 2] is a row"),
        (numbered_by_column, "rank 1 (dp=0, tp=1) and rank 0 (dp=0, tp=0) differ in tp"),
        (one_too_short, "dp group [2]: rank 5 (dp=1, tp=2) is missing"),
        (by_the_other_step, "dp group [0, 2, 4]: rank 2 (dp=0, tp=2) and rank 0"),
        (with_dp_groups(lambda dp, tp, right: right[1:]), "rank 0 (dp=0, tp=0) is in no dp"),
        (with_dp_groups(lambda dp, tp, right: right * 2), "rank 0 is in two dp groups"),
        (made([[0, 3, 6], [1, 4], [2, 5]], ROWS), "there is no rank 6; ranks go from 0 to 5"),
        (made([[0, 3, 3], [1, 4], [2, 5]], ROWS), "dp group [0, 3, 3]: a rank stands in it twice"),
        (made([*COLUMNS, []], ROWS), "a dp group is empty"),
        (made(COLUMNS, [[0, 1, 2], [3, 4]]), "tp group [3, 4]: rank 5 (dp=1, tp=2) is missing"),
        (made(COLUMNS, ROWS), "On a grid of dp 3, tp 2"),
        (made([0, 1], [2, 3]), "dp_groups is no list of lists"),
        (made([[0, 3]]), "return two lists"),
        (lambda dp, tp: dp / 0, "ZeroDivisionError"),
        (3, "Give a function."),
    ],
)
def test_wrong_groups_are_told_the_first_wrong_one(answer: Any, says: str) -> None:
    assert_wrong(lesson.groups_exercise(2, 3), answer, says)


@pytest.mark.parametrize("dp_tp", [(3, 1), (1, 4), (3, 2), (4, 4)])
@pytest.mark.parametrize("answer", [numbered_by_column, one_too_short, swapped])
def test_wrong_groups_are_wrong_on_every_grid_of_their_own(answer: Any, dp_tp: tuple[int, int]) -> None:
    assert_wrong(lesson.groups_exercise(*dp_tp), answer, "")


@pytest.mark.parametrize("dp_tp", GRIDS)
def test_the_prediction_knows_right_from_wrong(dp_tp: tuple[int, int]) -> None:
    dp, tp = dp_tp
    at = Grid.of(dp=dp, tp=tp).at(dp * tp - 1)
    column, row = list(at.group("dp")), list(at.group("tp"))
    assert lesson.predict(dp, tp).check(column, row)
    assert lesson.predict(dp, tp).check(set(column), tuple(row))
    wrong: list[tuple[Any, Any, str]] = [
        (5.0, row, "dp_group: give a list"),
        (column, [dp * tp], "there is no rank"),
    ]
    wrong += [(row, column, "is its row")] if row != column else []
    wrong += [(column[:-1], row, f"rank {at.rank}")] if dp > 1 else []
    wrong += [(column, row[1:], "is missing; it stands in the same row")] if tp > 1 else []
    for case in wrong:
        assert_wrong(lesson.predict(dp, tp), *case)


def piece_of_chunk(shape: tuple[int, int], kind: str, place: int, tp: int) -> Any:
    """By torch.chunk, which gives fewer pieces than places where nothing is left."""
    return torch.empty(shape).chunk(tp, 0 if kind == "column" else 1)[place].shape


def by_chunk(shape: tuple[int, int], kind: str, place: int, tp: int) -> Any:
    try:
        return piece_of_chunk(shape, kind, place, tp)
    except IndexError:
        return (0, shape[1]) if kind == "column" else (shape[0], 0)


def other_cut(shape: tuple[int, int], kind: str, place: int, tp: int) -> Any:
    return lesson.local_shape(shape, "row" if kind == "column" else "column", place, tp)


def with_length(length: Any) -> Any:
    def local_shape(shape: tuple[int, int], kind: str, place: int, tp: int) -> Any:
        mine = length(shape[0 if kind == "column" else 1], place, tp)
        return (mine, shape[1]) if kind == "column" else (shape[0], mine)

    return local_shape


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (other_cut, "That is row parallel: column parallel cuts dimension 0, out."),
        (lambda shape, kind, place, tp: (shape[0] // tp, shape[1] // tp), "Dimension 1 stays whole"),
        (lambda shape, kind, place, tp: shape, "That is the whole weight"),
        (with_length(lambda n, place, tp: float(n)), "of whole numbers for place 0, not (10.0, 8)"),
        (with_length(lambda n, place, tp: n if tp == 1 else None), "for place 0, not (None, 8)"),
        (with_length(lambda n, place, tp: n // tp), "Your places hold 6 of 7 together. Round up."),
        (with_length(lambda n, place, tp: -(-n // tp)), "A place cannot hold more than is left"),
        (with_length(lambda n, place, tp: min(-(-n // tp), n - place * -(-n // tp))), "never below 0"),
        (with_length(lambda n, place, tp: n // tp + (place < n % tp)), "fills one place after another"),
        (lambda shape, *_: shape[0], "give a pair (rows, columns) of whole numbers for place 0, not 10."),
        (lambda shape, *_: shape[2], "tp 1, place 0: The function raised IndexError"),
        (piece_of_chunk, "(1, 5), column parallel, tp 2, place 1: The function raised IndexError"),
    ],
)
def test_wrong_shapes_are_told_what_is_wrong_with_them(answer: Any, says: str) -> None:
    assert_wrong(lesson.shapes_exercise(), answer, says)


def test_shapes_of_torchs_own_chunk_pass_and_the_stub_is_open() -> None:
    assert lesson.shapes_exercise().check(by_chunk)
    assert lesson.shapes_exercise().check(lesson.local_shape)
    assert lesson.shapes_exercise().check(lambda shape, kind, place, tp: ...).passed is None


@pytest.mark.parametrize("dp_tp", GRIDS)
def test_the_quiz_knows_right_from_wrong(dp_tp: tuple[int, int]) -> None:
    dp, tp = dp_tp
    rows = by_chunk((10, 8), "column", tp - 1, tp)[0]
    kept = math.ceil(math.ceil(10 / tp) * (8 + 6) / dp)
    right = {"groups": dp + tp, "rows": rows, "kept": kept}
    wrong = {"groups": (dp + tp + 1, "len(dp_groups)"), "rows": (11, "local_shape")}
    assert_quiz(lesson.quiz(dp, tp), right, {**wrong, "kept": (kept + 1, "rank 0's line")})


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 7])
def test_cut_by_column_then_by_row_the_parts_add_up_to_the_whole(tp: int) -> None:
    given = work.make_numbers("whole", 2, seed=0)
    for batch in given.batches:
        parts = [
            torch.relu(batch @ work.cut(given.up, "column", place, tp).T)
            @ work.cut(given.down, "row", place, tp).T
            for place in range(tp)
        ]
        alone = torch.relu(batch @ given.up.T) @ given.down.T
        assert torch.equal(torch.stack(parts).sum(0), alone)


def test_outputs_of_ranks_are_compared_with_those_of_their_own_data() -> None:
    zero, one = torch.zeros(2), torch.ones(2)
    same, near = "the same output: True   the same bits: True", "the same output: True   the same bits: False"
    assert same in lesson.say_outputs("x", [zero, zero, one], [zero, one], 2)
    assert near in lesson.say_outputs("x", [one + 1e-6], [one], 1)
    assert "the same output: False" in lesson.say_outputs("x", [zero, one], [zero, one], 2)


def test_a_pressed_rank_lights_its_row_and_its_column() -> None:
    buttons = rank_buttons.RankButtons(3, 2)
    buttons.children[3].click()
    colours = [button.style.button_color for button in buttons.children]
    lit = {rank_buttons.ROW: [2], rank_buttons.COLUMN: [1, 5], rank_buttons.PRESSED: [3]}
    assert buttons.value == 3
    for colour, ranks in lit.items():
        assert [rank for rank, other in enumerate(colours) if other == colour] == ranks


@pytest.mark.parametrize(("dp", "tp"), GRIDS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_picture_says_which_piece_a_rank_keeps(dp: int, tp: int, kind: CutKind) -> None:
    grid = Grid.of(dp=dp, tp=tp)
    overview = grid_pictures.draw_overview(grid, lesson.UP).alt
    for rank in grid.ranks:
        length = by_chunk(lesson.UP, kind, rank % tp, tp)[KINDS.index(kind)]
        start = sum(by_chunk(lesson.UP, kind, place, tp)[KINDS.index(kind)] for place in range(rank % tp))
        what = "row" if kind == "column" else "column"
        run = f"{what}s {start} to {start + length - 1}" if length > 1 else f"{what} {start}"
        said = f"keeps {'all' if tp == 1 else run if length else 'nothing'} of W"
        assert said in grid_pictures.draw_place(grid, lesson.UP, rank, kind).alt
        assert said in overview


Cells = list[tuple[tuple[float, float], str, str]]


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> Cells:
    """What is drawn of each rank: where, in which fill, with which label."""
    seen: Cells = []
    draw_cell = grid_pictures._draw_cell

    def noted(axes: Any, where: Any, fill: str, label: str, *args: Any, **options: Any) -> None:
        seen.append((where[:2], fill, label))
        draw_cell(axes, where, fill, label, *args, **options)

    monkeypatch.setattr(grid_pictures, "_draw_cell", noted)
    return seen


@pytest.mark.parametrize(("dp", "tp"), GRIDS)
def test_ranks_are_drawn_where_they_stand_in_the_fill_of_their_column(dp: int, tp: int, cells: Cells) -> None:
    grid_pictures.draw_overview(Grid.of(dp=dp, tp=tp), lesson.UP)
    across = sorted({x for (x, _), _, _ in cells})
    down = sorted({y for (_, y), _, _ in cells})
    assert (len(across), len(down)) == (tp, dp)
    for rank, ((x, y), fill, label) in enumerate(cells):
        assert (down.index(y), across.index(x)) == divmod(rank, tp)
        assert fill == rank_colour(rank % tp)
        assert label.split() == ["rank", str(rank), "dp", str(rank // tp), "tp", str(rank % tp)]


def test_groups_have_a_fill_each_and_ranks_in_none_or_several_have_none(cells: Cells) -> None:
    lesson.picture_of_groups(made([[0, 1], [1, 2]], [[0, 1, 2], [3, 4, 5]]), 2, 3)
    first, second, none = rank_colour(0), rank_colour(1), EMPTY
    assert [fill for _, fill, _ in cells] == [first, none, second, *[none] * 3, *[first] * 3, *[second] * 3]
    said = [label.partition("\n")[2] for _, _, label in cells[:4]]
    assert said == ["group 0", "in several", "group 1", "in none"]


def test_gradients_differ_along_dp_and_from_step_to_step() -> None:
    def gradients(rank: int, step: int) -> torch.Tensor:
        weights = work.my_parameters(rank, 2, 0)
        work.fill_gradients(weights, rank, 2, step)
        return torch.cat([grad.flatten() for weight in weights if (grad := weight.grad) is not None])

    assert torch.equal(gradients(0, 0), gradients(0, 0))
    for rank, step in ((1, 0), (2, 0), (3, 0), (0, 1)):
        assert not torch.equal(gradients(0, 0), gradients(rank, step))


def test_a_tp_of_one_cuts_nothing_and_no_picture_says_so() -> None:
    drawn = grid_pictures.draw_place(Grid.of(dp=2, tp=1), lesson.UP, 1, "row")
    said = "Rank 1 keeps all of W; the same piece is on ranks 0, 1. It takes all of x, and makes all of y."
    assert said in drawn.alt
    assert "Together" not in drawn.alt
    assert "<pattern" not in drawn.svg
    assert "<pattern" in grid_pictures.draw_place(Grid.of(dp=1, tp=2), lesson.UP, 1, "row").svg


def test_a_place_with_nothing_left_is_said_to_hold_nothing() -> None:
    said = lesson.picture_of_buffers(1, 7).alt
    assert "tp 5: a buffer of 28 numbers holds padding elsewhere" not in said
    assert "tp 5: a buffer of 28 numbers holds padding only; rank 5 keeps 0 to 28." in said
    assert "tp 4: a buffer of 28 numbers holds up from 0 to 16, down from 16 to 28; rank 4" in said
    assert "down from 32 to 44, padding elsewhere; rank 2" in lesson.picture_of_buffers(3, 3).alt
    momentum = [(torch.full((2,), rank), torch.full((3,), rank)) for rank in range(7)]
    kept = [work.KeptByRank(tuple(work.my_parameters(rank, 7, 0)), momentum[rank]) for rank in range(7)]
    weight, _ = lesson.picture_of_kept(lesson.plan_of(1, 7), kept).alt.split("up: its momentum")
    assert "rank 4 holds rows 8 to 9, all columns (bytes E)" in weight
    assert "rank 5 holds nothing; rank 6 holds nothing." in weight


def test_groups_are_drawn_as_they_were_made(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = lesson.picture_of_groups(made([[0, 1], [1, 2]], [[9]]), 2, 3)
    assert wrong.alt == "dp_groups: ranks 0, 1; ranks 1, 2. tp_groups: rank 9."
    assert lesson.picture_of_groups(made(None), 2, 3).alt == "dp_groups: none. tp_groups: none."
    stub = lesson.picture_of_groups(lambda dp, tp: ..., 2, 3)
    assert "dp_groups: ranks 0, 3; ranks 1, 4; ranks 2, 5." in stub.alt
    assert "reference" in capsys.readouterr().out


@pytest.mark.parametrize(("dp", "tp"), GRIDS)
def test_buffers_say_who_keeps_which_slice(dp: int, tp: int) -> None:
    said = lesson.picture_of_buffers(dp, tp).alt
    length = math.ceil(math.ceil(10 / tp) * (8 + 6) / dp) * dp
    assert said.count(f"a buffer of {length} numbers") == tp
    for rank in range(dp * tp):
        start = rank // tp * length // dp
        assert f"rank {rank} keeps {start} to {start + length // dp}" in said


@pytest.mark.parametrize(("tp", "first", "last"), [(3, (12, 0, 0), (0, 0, 12)), (2, (12, 6, 0), (0, 6, 12))])
def test_a_fused_weight_gives_places_rows_of_different_matrices(tp: int, first: Any, last: Any) -> None:
    lines = lesson.say_fused(tp).splitlines()[1:]
    counts = [tuple(int(word) for word in line.split(":")[1].split() if word.isdigit()) for line in lines]
    assert (counts[0], counts[-1]) == (first, last)
    assert [sum(column) for column in zip(*counts, strict=True)] == [lesson.HEADS] * 3


def _make_all(rank: int, first_rank_backwards: bool, agree: bool) -> list[list[int]]:
    dp_groups, tp_groups = lesson.groups(2, 2)
    wanted = [*dp_groups, *tp_groups]
    if rank == 0 and first_rank_backwards:
        wanted.reverse()
    if agree:
        work.agree(wanted)
    answers = []
    for ranks in wanted:
        group = dist.new_group(ranks)
        if rank in ranks:
            heard: list[Any] = [None] * len(ranks)
            dist.all_gather_object(heard, rank, group=group)
            answers.append(heard)
    return answers


def _ask_the_mesh(rank: int) -> list[list[int]]:
    mesh = build_mesh({"dp": 2, "tp": 2})
    return [dist.get_process_group_ranks(mesh.get_group(axis)) for axis in ("dp", "tp")]


@pytest.mark.live
def test_groups_answer_as_those_of_the_mesh() -> None:
    answers = launch(_make_all, 4, args=(False, True))
    assert (
        answers
        == launch(_ask_the_mesh, 4)
        == [[[0, 2], [0, 1]], [[1, 3], [0, 1]], [[0, 2], [2, 3]], [[1, 3], [2, 3]]]
    )
    assert "   2   [0, 2] and [2, 3]" in lesson.say_answers(answers)


@pytest.mark.live
def test_another_order_on_one_rank_is_a_named_error_before_groups_are_made() -> None:
    with pytest.raises(RankFailedError) as caught:
        launch(_make_all, 4, args=(True, True))
    assert isinstance(caught.value.original, MismatchError)
    assert "call 1 of new_group" in str(caught.value.original)
    assert "rank 0: [2, 3]; on ranks 1, 2, 3: [0, 2]" in str(caught.value.original)
    with pytest.raises(RankFailedError):  # where nobody compares, too
        launch(_make_all, 4, args=(True, False), timeout=1.5)


def _train(rank: int, dp: int, tp: int, steps: int) -> work.KeptByRank:
    weights = work.my_parameters(rank, tp, 0)
    optimizer = Muon(weights, strategy="zero1", mesh=build_mesh({"dp": dp, "tp": tp}))
    for step in range(steps):
        work.fill_gradients(weights, rank, tp, step)
        optimizer.step()
    return work.kept_by(optimizer)


@pytest.mark.live
def test_weights_repeat_along_dp_after_steps_and_momentum_is_cut_as_the_plan_says() -> None:
    kept = launch(_train, 4, args=(2, 2, 2))
    plan = lesson.plan_of(2, 2)
    start = work.my_parameters(0, 2, 0)
    for rank, mine in enumerate(kept):
        assert all(
            torch.equal(one, other) for one, other in zip(mine.weights, kept[rank % 2].weights, strict=True)
        )
        holdings = plan.buckets[0].stored_shards(plan.grid.at(rank))
        assert [part.numel() for part in mine.momentum] == [holding.numel for holding in holdings]
    assert not torch.equal(kept[0].weights[0], start[0])
    assert kept[0].numbers == 35
    lines = lesson.say_kept(kept, 2).splitlines()[1:]
    assert [line.split()[3:5] for line in lines] == [["A", "C"], ["B", "D"]] * 2
    weight, momentum = lesson.picture_of_kept(plan, kept).alt.split("up: its momentum")
    assert "rank 2 holds rows 0 to 4, all columns (bytes A)" in weight
    assert "rank 0 holds rows 0 to 3, all columns and row 4, columns 0 to 2 (bytes E)" in momentum
