"""Lesson 09: checkers tell right from wrong, its step is the package's, its recording is of a real step."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch

from muon_tutorial import Replicate, UsageError, launch
from muon_tutorial.engine.collective import Walk
from muon_tutorial.engine.hop_collectives import take
from muon_tutorial.engine.travel import travel
from muon_tutorial.evidence.predict import predict
from muon_tutorial.learn import the_mirror as lesson
from muon_tutorial.learn.the_mirror.network import Network, ReadyButtons
from muon_tutorial.learn.the_mirror.recording import LAST, StepRecording, Tile, dumps, load, loads

from .answers import PASSES, altered, assert_wrong, judged

GRIDS = [(3, 2), (1, 4), (4, 1)]


def walking(hops_of: Callable[[Any], Iterable[Any]], turned: bool = True) -> Callable[..., Walk]:
    """A way back over the hops that ``hops_of`` chooses, each reversed if ``turned``."""

    def way_back(x: Any, route: Any, at: Any, label: Any) -> Walk:
        for hop in hops_of(route):
            x = yield from take(x, hop.inverse if turned else hop, route.dtype, at, label)
        return x

    return way_back


def slicing_alone(x: Any, route: Any, at: Any, label: Any) -> Walk:
    """Wrong: slices on every hop, as if every rank held the whole."""
    for hop in reversed(route.hops):
        back = type(hop)(hop.axis, Replicate(), hop.src, hop.shape)
        x = yield from take(x, back, route.dtype, at, label)
    return x


def walking_some(last: bool) -> Callable[..., Walk]:
    """Wrong: makes both hops back, but runs only the second, and only if ``last``."""

    def way_back(x: Any, route: Any, at: Any, label: Any) -> Walk:
        x = take(x, route.hops[1].inverse, route.dtype, at, label)
        back = take(x, route.hops[0].inverse, route.dtype, at, label)
        return (yield from back) if last else back

    return way_back


def flat_of(flat: torch.Tensor, meta: Any) -> torch.Tensor:
    return flat[slice(*meta.global_range)]


WAYS_BACK = [
    (walking(lambda route: route.hops), "Which hop"),
    (walking(lambda route: route.hops[-1:]), "came back with"),
    (walking(lambda route: reversed(route.hops), turned=False), "Take the hop the other way"),
    (altered(lesson.way_back, ("return", "yield from")), "return x"),
    (slicing_alone, "raised IndexError"),
    (lambda x, route, at, label: x, "way_back makes no request"),
    (walking_some(last=True), "object is not subscriptable. A take, travel or way_back without `yield from`"),
    (walking_some(last=False), "ended with a generator: return x at the end. A take"),
    (3, "Give a function"),
]
SHAPES = [
    (lambda flat, meta: flat_of(flat, meta).view(-1), "1 dimension"),
    (lambda flat, meta: flat_of(flat, meta).view(meta.global_shape), "raised RuntimeError"),
    (lambda flat, meta: flat_of(flat, meta).view(meta.shape[::-1]), "this rank's piece is"),
    (lambda flat, meta: flat[: math.prod(meta.shape)].view(meta.shape), "its first entry is 0"),
    (lambda flat, meta: None, "give a tensor"),
]


def not_walked(job: Any, bucket: Any, at: Any) -> Any:
    summed: Any = travel(job.gradients(bucket), bucket.gradient, at, job.label(1))
    return job.momentum(bucket, summed)


PHASE_3 = "yield from travel(unpack(flat, meta), entry.route, at, job.label(3, entry))"
PHASE_6 = "yield from way_back(done, bucket.compute, at, job.label(6))"
PHASE_7 = "fresh = yield from travel(job.apply(bucket, kept), bucket.parameter, at, job.label(7))"


def step_with(old: str, new: str) -> Callable[..., Walk]:
    """The step with other code in one place, as a reader could get it wrong."""
    return altered(lesson.reference_step, (old, new))


UPTO_6 = step_with(PHASE_7, "return")
FLAT = step_with("unpack(flat, meta)", "unpack(flat, meta).flatten()")
WRONG_STEPS = [
    (
        step_with("summed = yield from", "summed ="),
        "phase 1 (gradient reduce_scatter) is the first to differ",
    ),
    (
        step_with("summed = yield from", "summed ="),
        "without `yield from` is only a generator: it has sent nothing.",
    ),
    (step_with("flat = yield from", "flat ="), "phase 2 (dp gather) is the first to differ"),
    (
        step_with("job.momentum(bucket, summed)", "summed.to(job.momentum(bucket, summed).dtype)"),
        "phase 2 (dp gather) is the first to differ: rank 0 sends wrong entries",
    ),
    (
        step_with("(flat, meta)", "(flat, meta).flip([0] * (meta.name == 'o'))"),
        "of o: the first at 0, the last at 511 of 512",
    ),
    (
        step_with("unpack(flat, meta)", "flat[: unpack(flat, meta).numel()].view(meta.shape)"),
        "phase 3 (tp gather) is the first to differ",
    ),
    (FLAT, "On dp=2 × tp=1, phase 4 (Newton–Schulz) is the first to differ"),
    (step_with(PHASE_3, "unpack(flat, meta)"), "phase 3 (tp gather) is the first to differ: rank 0: "),
    (FLAT, "up has the shape (128, 32), and job.newton_schulz got (4096,)."),
    (
        step_with(PHASE_6, "done"),
        "together (all must send equally many elements, 1/2 of what each receives): rank 0 asks all_gather",
    ),
    (step_with("label(3", "label(5"), "The correct request: all_gather"),
    (step_with("label(5, entry)", "label(5)"), "job.label(5) names no matrix; write job.label(5, entry)"),
    (UPTO_6, "never asks for all_gather"),
    (
        step_with("job.apply(bucket, kept)", "kept"),
        "phase 7 (parameter all_gather) is the first to differ: job.apply was not called",
    ),
    (step_with("job.write(bucket, fresh)", "pass"), "its new weights are not those of the step"),
    (step_with("way_back", "travel"), "It stopped with"),
    (lambda job, bucket, at: None, "The step makes no request"),
    (not_walked, "'generator' and 'int'. In: return job.momentum(bucket, summed) A take, travel or way_back"),
    (step_with("torch.zeros_like(flat)", "flat"), PASSES),
    ("my_step", "Give a function"),
]


test_an_answer_passes_or_is_told_what_is_wrong_with_it = judged(
    (lesson.way_back_exercise, WAYS_BACK),
    (lesson.unpack_exercise, SHAPES),
    (partial(lesson.step_exercise, 2, 2, 0), WRONG_STEPS),
)


@pytest.mark.parametrize(("dp", "tp"), GRIDS)
def test_the_whole_step_passes_on_every_grid_and_is_measured_in_lines(dp: int, tp: int) -> None:
    verdict = lesson.step_exercise(dp, tp, 0).check(lesson.reference_step)
    assert verdict
    assert "lines; par is 12" in verdict.message
    assert verdict.picture is not None
    plan = lesson.plan_of(dp, tp)
    rows = [predict(plan, plan.grid.at(rank)).rows() for rank in plan.grid.ranks]
    due = [f"{sum(row.ring for row in found if row.phase == 'tp gather'):,}" for found in rows]
    assert f"X[I, J_tp] → X[I, J]: bytes sent {', '.join(due)}." in verdict.picture.alt
    first = lesson.first_difference(UPTO_6, 2, 1, 0).first
    assert "never asks" in first.what


@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (3, 1)])
def test_the_order_in_which_groups_are_answered_changes_no_bit(dp: int, tp: int) -> None:
    network, results = Network(dp, tp, 0), set()
    for seed in range(4):
        network.restart()
        network.finish(random.Random(seed).choice)
        results.add(network.result)
    reports = lesson.stepped(lesson.reference_step, dp, tp, 0).reports
    for job, report in zip(network.jobs, reports, strict=True):
        assert all(
            torch.equal(each.data, mine)
            for each, mine in zip(job.step.parameters, report.after.values(), strict=True)
        )
    assert len(results) == 1


def test_a_network_is_undone_and_played_again() -> None:
    buttons = ReadyButtons(Network(2, 2, 0))
    while buttons.groups:
        buttons.groups[-1].click()
    first = buttons.network.result
    buttons.value = 3
    assert len(buttons.network.order) == 3
    for tool in buttons.children[1].children:
        tool.click()
    assert (buttons.value, buttons.network.order) == (0, [])
    assert {result for _, result in buttons.network.ended} == {first}


@pytest.mark.parametrize(("dp", "tp"), GRIDS)
def test_the_prediction_knows_right_from_wrong(dp: int, tp: int) -> None:
    exercise = lesson.mirror_exercise(lesson.plan_of(dp, tp))
    silent = [4, 5, 6] + ([1, 2, 7] if dp == 1 else []) + ([3] if tp == 1 else [])
    assert exercise.check(1, silent)
    wrong: list[tuple[Any, Any, str]] = [
        (2, silent, "Phase 2 only joins what ranks still have: phase 6 lets each rank keep"),
        (3, silent, "Phase 3 only joins what ranks still have: phase 5 lets each rank keep"),
        (1, silent[1:], "Phase 4 (Newton–Schulz) sends nothing either"),
        (7, silent, "one phase of the way out, 1, 2 or 3, not 7"),
        ({1: 7}, silent, "one phase of the way out"),
        (1, 4, "as a list of phases"),
    ]
    wrong += [(1, [*silent, 7], "Phase 7 does send: all_gather over dp")] if dp > 1 else []
    for case in wrong:
        assert_wrong(exercise, *case)


def test_a_tp_that_leaves_uneven_pieces_is_refused_with_a_remedy() -> None:
    with pytest.raises(UsageError, match="tp = 3 does not divide the sides that it cuts; take 1, 2 or 4"):
        lesson.all_exercises(lesson.plan_of(2, 3), 0)


@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (3, 1)])
def test_real_ranks_write_the_diary_of_one_process(dp: int, tp: int) -> None:
    diaries = launch(lesson.record_rank, dp * tp, args=(dp, tp, 0))
    here = lesson.record_here(dp, tp, 0)
    for mine, theirs in zip(diaries, here.diaries, strict=True):
        assert mine.tiles == theirs.tiles
        assert mine.sent == theirs.sent
        assert dp > 2 or mine.contents == theirs.contents  # Gloo chooses the order of larger sums


def test_the_shipped_recording_is_of_this_step() -> None:
    shipped, here = load(), lesson.record_here(2, 2, 0)
    assert shipped.shapes == here.shapes
    for mine, theirs in zip(shipped.diaries, here.diaries, strict=True):
        assert mine.tiles == theirs.tiles
        assert list(mine.sent) == list(theirs.sent)


@pytest.fixture(params=GRIDS, ids=str)
def recording(request: pytest.FixtureRequest) -> StepRecording:
    dp, tp = request.param
    return lesson.record_here(dp, tp, 0)


def test_what_is_written_is_read_again(recording: StepRecording) -> None:
    text = dumps(recording)
    assert dumps(loads(text)) == text
    assert len(text) < 200_000


def cells(tiles: Iterable[Tile]) -> list[tuple[int, int]]:
    """All entries that some tiles cover."""
    return [
        cell
        for _, row, column, rows, columns in tiles
        for cell in itertools.product(range(row, row + rows), range(column, column + columns))
    ]


def test_the_way_back_passes_the_boxes_of_the_way_out_and_ranges_cover_once(
    recording: StepRecording,
) -> None:
    for name, (rows, columns) in recording.shapes.items():
        for diary in recording.diaries:
            held = [set(cells(moment)) for moment in diary.tiles[name]]
            assert all(held[moment] == held[LAST - moment] for moment in (0, 1, 3))
            assert held[5] <= held[2]  # entries that a rank gathered needlessly do not come back to it
            assert all(tile[0] == diary.rank for tile in diary.tiles[name][6])
        ranges = [tile for diary in recording.diaries for tile in diary.tiles[name][1]]
        assert sorted(cells(ranges)) == list(itertools.product(range(rows), range(columns)))


@pytest.mark.parametrize(("dp", "tp"), [(2, 2), *GRIDS])
def test_a_trip_ends_with_the_entries_with_which_it_began_and_is_whole_at_newton_schulz(
    dp: int, tp: int
) -> None:
    *_, table = lesson.say_trip(lesson.plan_of(dp, tp), lesson.record_here(dp, tp, 0), "o").split(
        "from ranks\n"
    )
    found = [row[52:].split()[:2] for row in table.splitlines()]
    assert found[0] == found[7] == [f"{32 * 32 // tp:,}", f"{4 * 32 * 32 // tp:,}"]
    assert found[3] == found[4] == ["1,024", "2,048"]
