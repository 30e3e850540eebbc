"""Lesson 12: the same loops are timed and checked, checkers tell right from wrong, the recording is whole."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from muon_tutorial import Grid, LocalWorld
from muon_tutorial.engine.collective import Start, Wait, Walk
from muon_tutorial.errors import UsageError
from muon_tutorial.learn import early_return as lesson
from muon_tutorial.learn.early_return import exercises, loops, missing_wait, on_ranks, pictures

from ..exhaustive import left_out
from .answers import PASSES, altered, assert_wrong, judged

RANKS = [2, 3]


def test_a_makespan_is_the_timed_worlds() -> None:
    for gathers, works, window in (((9, 1, 1, 1, 9, 1), (4,) * 6, 3), ((1, 1, 1, 1, 8), (5, 1, 1, 1, 1), 2)):
        timed = lesson.time_loop(lesson.prefetch, lesson.LoopTimes(gathers, works), window, 2)
        assert lesson.makespan(gathers, works, window) == pytest.approx(timed.milliseconds)
    assert all(f": {ms} ms;" in lesson.draw_schedules(2).alt for ms in (20, 14, 23))


mixes_tickets_up = altered(lesson.prefetch, ("(asked)", "(asked ^ 1 if asked ^ 1 < count else asked)"))
"""Swaps the two matrices of each pair of turns. Only the times are right."""
WRONG_LOOPS = [
    (
        altered(lesson.prefetch, ("tickets.pop(0)", "tickets[i]")),
        "2 tickets are kept after their waits, and they keep their matrices: use pop.",
    ),
    (altered(lesson.prefetch, ("min(count, i + window)", "count")), "yours holds 5 at once"),
    (lambda *given: lesson.prefetch(*given[:-1], given[-1] + 1), "yours holds 2 at once"),
    (lesson.one_by_one, "window 2: yours takes 25 ms; 17 ms are enough"),
    (altered(lesson.one_by_one, ("yield Wait(ticket)", "ticket")), "work was given a ticket"),
    (lambda count, *rest: lesson.prefetch(count - 1, *rest), "your loop works on [0, 1, 2, 3]"),
    (mixes_tickets_up, "on rank 0 work(0, …) got another matrix"),
    (altered(lesson.one_by_one, ("(count)", "(count + 1)")), "Ask for no more than count matrices"),
    (altered(lesson.one_by_one, ("Start(gather(i))", "3")), "It yields 3."),
    (lambda *given: None, "it has no yield"),
]


test_a_wrong_loop_is_told_what_it_does = judged(
    *((partial(exercises.prefetch_exercise, ranks, 0), WRONG_LOOPS) for ranks in RANKS)
)


@pytest.mark.parametrize("ranks", RANKS)
def test_the_reference_and_another_way_to_write_it_pass(ranks: int) -> None:
    def with_a_dictionary(count: int, gather: Any, work: Any, window: int) -> Walk:
        tickets: dict[int, Any] = {}
        for i in range(count):
            for early in range(i, min(count, i + window)):
                if early not in tickets:
                    tickets[early] = yield Start(gather(early))
            work(i, (yield Wait(tickets.pop(i))))

    for loop in (lesson.prefetch, with_a_dictionary):
        exercise = exercises.prefetch_exercise(ranks, 1)
        assert exercise.check(loop)
        assert exercise.accepted is loop


@pytest.mark.parametrize("window", [1, 2, 9])
def test_a_loop_gives_the_bits_of_one_process_in_any_window(window: int) -> None:
    held = [loops.RealMatrices(rank, 3, 7) for rank in range(3)]
    LocalWorld(Grid.of(dp=3)).run([lesson.prefetch(5, it.gather, it.work, window) for it in held])
    assert [loops.first_wrong(each, 5) for each in held] == [None] * 3
    held[1].updates[3] = held[1].updates[3] + 2**-6
    assert loops.first_wrong(held[1], 5) == 3


def test_real_ranks_walk_a_loop_and_a_wrong_one_is_seen() -> None:
    run = lesson.run_loop(lesson.prefetch, 3, 0, window=2, count=4)
    assert str(run) == "the bits of one process on all 3 ranks"
    assert [len(run.timeline.of(rank, "product")) for rank in run.timeline.ranks] == [4] * 3
    assert len(run.timeline.flights) == 4 * 3
    mixed = lesson.run_loop(mixes_tickets_up, 2, 0, window=2, count=4)
    assert str(mixed).startswith("other bits: rank 0 from turn 0 on, rank 1")


def test_on_slow_links_the_loop_is_the_same_and_its_picture_names_the_readers_prediction() -> None:
    runs = lesson.run_on_slow_links(lesson.prefetch, 2, 0, (1, 3), steps=1, count=3)
    for run in runs:
        assert [len(run.of(rank, "product")) for rank in run.ranks] == [3] * 2
        assert len(run.flights) == 3 * 2
    alt = lesson.draw_slow_links(runs, lambda works, waits, count: 123.4, 3).alt
    assert "window 1: " in alt
    assert "yours says 123" in alt


def test_a_slow_link_carries_one_exchange_at_a_time_and_sleeps_for_the_rest_of_its_time() -> None:
    seen: list[Any] = []

    class Work:
        def wait(self) -> None:
            seen.append("exchanged")

    def call(request: Any, received: Any, group: Any, async_op: bool) -> Work:
        seen.append(async_op)
        return Work()

    link = on_ranks.SlowLink(call, seconds=9.0)
    with patch.object(on_ranks.time, "sleep", seen.append):
        both = [link("request", "received", "group", True) for _ in range(2)]  # type: ignore[arg-type]
        for each in both:
            each.wait()
        assert all(each.get_future().done() for each in both)
        assert link("request", "received", "group", False) is None  # type: ignore[arg-type]
    asked = [each for each in seen if each is True]
    carried = [each for each in seen if each is not True]
    assert len(asked) == 3  # the real call never waits
    assert carried[::2] == ["exchanged"] * 3
    assert all(8.0 < slept <= 9.0 for slept in carried[1::2])


WRONG_WAITS = [
    (10, "leaving[i - 2]", "matrix 0 still comes out wrong"),
    (9, "leaving[i]", "matrix 0 still comes out wrong"),
    (9, "leaving[i - 3]", "written for matrix 2"),
    (11, "leaving[i]", "still comes out wrong"),
    (12, "leaving[i - 2]", "still comes out wrong"),
    (7, "coming[i]", "still comes out wrong"),
    (4, "leaving[i - 1]", "The bits are right, but it takes 58 ms; 50 ms are enough"),
    (9, "leaving[i - 1]", "the share from the *other* buffer"),
    (10, " leaving[ i-1 ]", "the share from the *other* buffer"),
    (1, "leaving[i - 2]", "one of the lines 2 to 13"),
    ("9", "leaving[i - 2]", "yours is '9'"),
    (9, "buffer", "Name a ticket"),
    (9, 2, "Name a ticket"),
    (13, "leaving[i]", "Before line 13 there is no i"),
    (3, "leaving[i - 2]", "Before line 3 there is no i"),
]


@pytest.mark.parametrize("ranks", [2, left_out(4)])  # the messages are the same
@pytest.mark.parametrize(("line", "ticket", "says"), WRONG_WAITS)
def test_a_wrong_wait_is_told_by_its_own_run(line: Any, ticket: Any, says: str, ranks: int) -> None:
    exercise = exercises.wait_exercise(ranks)
    assert_wrong(exercise, line, ticket, says)
    picture = exercise.check(line, ticket).picture
    if "wrong" in says or "matrix 2" in says:
        assert picture is not None
        assert "red: buffer 0 is written again" in picture.alt


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("answer", [(9, "leaving[i - 2]"), (8, "leaving[ i-2 ]")])
def test_a_wait_that_is_early_enough_and_late_enough_passes(answer: tuple[int, str], ranks: int) -> None:
    assert exercises.wait_exercise(ranks).check(*answer)


def test_gloo_swaps_matrices_without_a_word_where_ranks_ask_in_another_order() -> None:
    """Rank 0 asks for the first two matrices in order, other ranks in reverse. Pieces have equal sizes."""
    order = "[1, 0, *range(2, count)] if torch.distributed.get_rank() else range(count)"
    in_another_order = altered(lesson.one_by_one, ("range(count)", order))
    assert str(lesson.run_loop(in_another_order, 2, 0, window=1, count=3)) == (
        "other bits: rank 0 from turn 0 on, rank 1 from turn 0 on"
    )


def test_a_late_backend_reads_when_a_rank_waits() -> None:
    def program(rank: int) -> Walk:
        mine = torch.full((2,), float(rank))
        ticket = yield Start(loops.exchange("share", 0, mine, 2))
        mine += 10
        answer = yield Wait(ticket)
        mine += 100
        return (answer, (yield Wait(ticket)))

    for first, again in missing_wait.run_late([program(0), program(1)]):
        assert first.tolist() == again.tolist() == [10.0, 11.0]


WRONG_ORDERS: list[Any] = [
    (lambda stage, stages, micro: "F" * micro + "B" * micro, "keeps up to 6 micro-batches; 4 are enough"),
    (
        altered(lesson.one_f_one_b, ("- stage", "- max(0, stage - 1)")),
        "Stage 1 of 4, 6 micro-batches: 'FFFFBFBFBBBB'. It keeps up to 4",
    ),
    (
        altered(lesson.one_f_one_b, ("- stage", "- min(stages - 1, stage + 1)")),
        "An F comes too late: the stages after this one wait for it.",
    ),
    (lambda stage, stages, micro: "BF" * micro, "A B stands before the F of its micro-batch."),
    (lambda stage, stages, micro: "FB", "It needs 6 F and 6 B."),
    (lambda stage, stages, micro: None, "It needs 6 F and 6 B."),
]


keeps_no_state = altered(lesson.forward, ("(x, before)", "x"))
draws_anew = altered(
    lesson.backward,
    ("x, before = kept", "x = kept[0] if isinstance(kept, tuple) else kept"),
    ("torch.set_rng_state(before)", "pass"),
)
leaves_the_state = altered(lesson.backward, ("torch.set_rng_state(after)", "pass"))


def by_torch(stage: Any, x: Any) -> Any:
    y = checkpoint(stage, x.requires_grad_(), use_reentrant=False)
    return y, (x, y)


def through_torch(stage: Any, kept: Any, gradient: Any) -> Any:
    kept[1].backward(gradient)
    return kept[0].grad


def with_a_fork(stage: Any, kept: Any, gradient: Any) -> Any:
    x, before = kept
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(before)
        leaf = x.detach().requires_grad_()
        stage(leaf).backward(gradient)
    return leaf.grad


RECOMPUTING: list[Any] = [
    (lesson.keep_all, lesson.back_through_all, "you keep 590 kB besides the input, which has 33."),
    (keeps_no_state, leaves_the_state, "In backward: The function raised ValueError"),
    (keeps_no_state, draws_anew, "With it, your second forward drops other entries."),
    (lesson.forward, draws_anew, "With it, your second forward drops other entries."),
    (lesson.forward, leaves_the_state, "Outputs are right up to the first B. Then micro-batch 3 loses other"),
    (
        lesson.forward,
        altered(lesson.backward, ("y.backward(gradient)", "x.grad, = torch.autograd.grad(y, x, gradient)")),
        "but the stage's parameters got none.",
    ),
    (
        lesson.forward,
        altered(lesson.backward, ("y = stage", "stage.zero_grad()\n    y = stage")),
        "are not the sum over all micro-batches.",
    ),
    (
        lesson.forward,
        altered(lesson.backward, ("(gradient)", "(torch.ones_like(gradient))")),
        "The gradient of the stage's input is wrong.",
    ),
    (lesson.forward, lambda *given: None, "yours returns NoneType"),
    (lambda stage, x: stage(x), lesson.backward, "forward returns two things"),
    (lambda stage, x: ("y", x), lesson.backward, "First, forward returns the stage's output; yours is str"),
    (lambda stage, x: (x + 1, x), draws_anew, "The output of micro-batch 0 is not stage(x)."),
    (
        altered(lesson.forward, ("    with", "    stage(x)\n    torch.set_rng_state(before)\n    with")),
        lesson.backward,
        "the stage computes forward 18 times, not 12.",
    ),
    (by_torch, through_torch, PASSES),
    (lesson.forward, with_a_fork, PASSES),
    (lesson.forward, lesson.backward, PASSES),
]
test_a_stage_that_recomputes_is_judged_by_bits_bytes_and_forwards = judged(
    (exercises.recomputing_exercise, RECOMPUTING)
)


@pytest.mark.parametrize(
    ("forward", "backward"),
    [(lambda stage, x: (..., ...), lambda *_: ...), (lesson.forward, lambda *_: ...)],
)
def test_an_open_half_of_recomputing_is_no_answer(forward: Any, backward: Any) -> None:
    assert exercises.recomputing_exercise().check(forward, backward).passed is None


test_a_wrong_order_is_told_what_is_wrong_with_it = judged(
    (exercises.pipeline_exercise, [*WRONG_ORDERS, (lesson.one_f_one_b, PASSES)])
)


@pytest.mark.parametrize(("stages", "micro"), [(1, 3), (2, 5), (4, 2), (4, 6)])
def test_1f1b_is_idle_as_long_as_gpipe_and_keeps_less(stages: int, micro: int) -> None:
    runs = {"1F1B": lesson.one_f_one_b, "GPipe": WRONG_ORDERS[0][0]}
    drawn = lesson.draw_pipelines(runs, stages, micro).alt
    assert drawn.count(f"idle {(stages - 1) / (micro + stages - 1):.0%} of the time") == 2
    assert f"up to {', '.join([str(micro)] * stages)} micro-batches" in drawn
    kept = [lesson.most_kept(lesson.one_f_one_b(stage, stages, micro)) for stage in range(stages)]
    assert kept == [min(micro, stages - stage) for stage in range(stages)]


def test_a_pipeline_that_would_never_end_is_refused() -> None:
    with pytest.raises(UsageError, match="wait for each other for ever"):
        lesson.draw_pipelines({"yours": lambda stage, stages, micro: "BF" * micro})


def test_in_the_recording_cores_and_bus_were_as_busy_as_the_lesson_says() -> None:
    recording = lesson.recorded()
    loopback = recording.step("zero1", 1, "loopback").timeline
    works = sum(loopback.total(doing, rank) for doing in ("product", "copy") for rank in loopback.ranks)
    assert round(works / loopback.seconds, 1) == 2.9
    bus = recording.step("owner", 1, "200mbit").timeline
    sent = sum(flight.ring for flight in bus.flights)
    assert (round(sent / 1e6), round(1000 * sent / 25e6), round(1000 * bus.seconds)) == (21, 849, 907)


def test_milliseconds_of_transfers_are_said_to_overlap_if_they_are_more_than_the_step_took() -> None:
    recording = lesson.recorded()
    timeline = recording.step("zero1", 3, "200mbit").timeline
    alt = pictures.draw_recorded(recording, timeline, "zero1", 3, "200mbit").alt
    assert "has messages on their way for 28054 (in all; several at a time)" in alt
    assert "several" not in lesson.hero().alt
