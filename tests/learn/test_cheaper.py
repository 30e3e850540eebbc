"""Lesson 13: bytes equal the ledger, seconds equal the planner's, and checkers tell right from wrong."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from muon_tutorial import launch
from muon_tutorial.engine.collective import Label
from muon_tutorial.engine.travel import all_reduce, travel
from muon_tutorial.errors import UsageError
from muon_tutorial.evidence.traces.profiler_trace import TraceEvent
from muon_tutorial.evidence.traces.time_split import Flight, RankTimes, Timeline, split
from muon_tutorial.learn import cheaper as lesson
from muon_tutorial.learn.cheaper import costs, exercises, late_rank, on_ranks, trace_events
from muon_tutorial.learn.cheaper.costs import Setting

from .answers import PASSES, assert_quiz, judged

GRIDS = [(3, 2), (4, 1)]


def rank_counted(sent: int) -> dict[str, dict[str, on_ranks.SentBytes]]:
    names = (on_ranks.ADAMW, *on_ranks.STRATEGIES, on_ranks.AVERAGED)
    return {dtype: {name: on_ranks.SentBytes(sent, sent) for name in names} for dtype in on_ranks.DTYPES}


def fp32_momentum(entries: int, dp: int, item: int) -> dict[str, int]:
    return {**lesson.bytes_sent(entries, dp, item), "zero1": (dp - 1) * entries // dp * 3 * item}


BYTES: list[tuple[Any, str]] = [
    (fp32_momentum, "which is bfloat16 whatever the gradients are"),
    (lambda *given: {**lesson.bytes_sent(*given), "zero1": ...}, "zero1 is still open"),
]


@pytest.mark.parametrize(("dp", "tp"), GRIDS)
def test_right_bytes_pass_on_every_grid(dp: int, tp: int) -> None:
    assert exercises.bytes_exercise(dp, tp).check(lesson.bytes_sent)


def summed(gradients: Any, weights: Any, bucket: Any, at: Any) -> Any:
    whole = yield from travel(gradients, bucket.gradient, at, Label("gradients"))
    return (yield from travel(lesson.adamw(weights, whole), bucket.parameter, at, Label("weights")))


def unshared(gradients: Any, weights: Any, bucket: Any, at: Any) -> Any:
    start = at["dp"] * len(weights)
    fresh = lesson.adamw(weights, gradients[start : start + len(weights)])
    return (yield from travel(fresh, bucket.parameter, at, Label("weights")))


def returns_slice(gradients: Any, weights: Any, bucket: Any, at: Any) -> Any:
    whole = yield from travel(gradients, bucket.gradient, at, Label("gradients"))
    return lesson.adamw(weights, whole / bucket.summands)


def keeps_local(gradients: Any, weights: Any, bucket: Any, at: Any) -> Any:
    if at["dp"] == 0:
        return gradients
    return (yield from on_ranks.adamw_step(gradients, weights, bucket, at))


def misspelt(gradients: Any, weights: Any, bucket: Any, at: Any) -> Any:
    whole = yield from travel(gradients, bucket.gradients, at, Label("gradients"))
    return whole


def by_all_reduce(gradients: Any, weights: Any, bucket: Any, at: Any) -> Any:
    """Right numbers but too many bytes: every rank gets all gradients, and uses a slice of them."""
    whole = yield from all_reduce(gradients, "dp", at, Label("gradients"))
    mine = whole.view(at.size("dp"), -1)[at["dp"]]
    fresh = lesson.adamw(weights, mine / bucket.summands)
    return (yield from travel(fresh, bucket.parameter, at, Label("weights")))


STEPS: list[tuple[Any, str]] = [
    (summed, "the sum of all gradients, not their mean"),
    (by_all_reduce, "bytes; "),
    (unshared, "their weights are not AdamW's"),
    (returns_slice, "Return all weights of the bucket"),
    (keeps_local, "the step broke off"),
    (misspelt, "raised AttributeError"),
    (lambda *given: None, "Return all weights"),
]


@pytest.mark.parametrize(("dp", "tp"), GRIDS)
def test_a_right_step_passes_and_is_torchs_adamw(dp: int, tp: int) -> None:
    assert exercises.adamw_exercise(dp, tp, 0).check(on_ranks.adamw_step)
    weights, mean = torch.randn(2, 40, generator=torch.Generator().manual_seed(dp))
    parameter = torch.nn.Parameter(weights.clone())
    parameter.grad = mean
    torch.optim.AdamW([parameter], lr=on_ranks.LR).step()
    torch.testing.assert_close(on_ranks.adamw(weights, mean), parameter.detach())


def by_name(events: list[TraceEvent]) -> int:
    return sum(event.duration for event in events if event.communicates)


def reader_communicating(events: list[TraceEvent]) -> int:
    """The lesson's own solution."""
    kernels = [event for event in events if event.sort == "kernel" and event.communicates]
    total = reached = 0
    for event in sorted(kernels, key=lambda event: event.begin):
        end = event.begin + event.duration
        total += max(0, end - max(event.begin, reached))
        reached = max(reached, end)
    return total


def moved_back(events: list[TraceEvent]) -> int:
    total = reached = 0
    for event in sorted(trace_events.at_work(events), key=lambda event: event.begin):
        total += max(0, event.begin + event.duration - max(event.begin, reached))
        reached = event.begin + event.duration
    return total


SUMS: list[tuple[Any, str]] = [
    (lesson.communicating, PASSES),
    (reader_communicating, PASSES),
    (moved_back, "A kernel that ends early"),
    (by_name, "you have added up four events of one collective"),
    (lambda events: sum(it.duration for it in events if it.sort == "kernel"), "event.communicates says"),
    (lambda events: sum(event.duration for event in trace_events.at_work(events)), "Count each moment once"),
    (lambda events: sum(it.duration for it in events if it.sort == "launch"), "only the kernel is the GPU"),
    (lambda events: 4_300_000, "With a product under way"),
    (lambda events: max(event.name for event in events), "With one collective"),
]


REAL = ["c10d::_reduce_scatter_base_", "gloo:all_reduce", "c10d::_allgather_base_", "gloo:all_gather"]


def profiled(rank: int) -> list[TraceEvent]:
    take = on_ranks.step_to_profile(2, 1, 0, on_ranks.adamw_step)
    take()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        take()
    return trace_events.collectives_in(seen.events())


def test_a_real_step_leaves_two_calls_and_what_they_handed_over() -> None:
    for events in launch(profiled, 2, output="quiet"):
        names = [event.name for event in events]
        assert sorted(names) == sorted(REAL)
        assert names.index("gloo:all_reduce") < names.index("gloo:all_gather")
        assert all(name in lesson.say_events(events) for name in REAL)
        works = [event for event in events if event.name.startswith("gloo:")]
        assert [event.sort for event in works] == ["kernel"] * 2
        assert max(event.duration for event in works) <= lesson.communicating(events) < by_name(events)


def test_step_for_step_adamw_is_never_behind_and_large_batches_pay_for_muon() -> None:
    needed = [at.muon_seconds / at.adamw_seconds for at in map(at_tokens, costs.TOKENS)]
    assert needed == sorted(needed, reverse=True)
    assert needed[0] > 1.5
    assert 1 < needed[-1] < 1.02


@pytest.mark.parametrize("strategy", costs.STRATEGIES)
@pytest.mark.parametrize("link", costs.LINKS.values())
def test_where_it_turns_is_where_the_pictures_winner_changes(strategy: str, link: float) -> None:
    said = lesson.say_turns(lesson.break_even).splitlines()
    [row] = (line.split()[1:] for line in said if line.startswith(strategy))
    turn = float(row[list(costs.LINKS.values()).index(link)].replace(",", ""))
    for tokens in costs.TOKENS:
        at = Setting("all fp32", tokens, link, strategy, 1.1)
        assert (at.muon_seconds < at.adamw_seconds) is (tokens > turn)


def at_tokens(tokens: int) -> Setting:
    return Setting(tokens=tokens)


EARLY: list[tuple[Any, str]] = [
    (23_625_396, PASSES),
    (23_625, "Give nanoseconds"),
    (-23_625_396, "up to the dp gather's end"),
    (19_791_370, "not when it ends"),
    (23_626_324, "a microsecond later"),
    (928, "no entry has arrived"),
]


def test_headlines_know_right_from_wrong() -> None:
    assert_quiz(exercises.headlines_exercise(), lesson.right_headlines())


WRONG_WAITS: list[tuple[Any, str]] = [
    (lambda flights: {each.rank: each.done - each.issued for each in flights}, "No byte moves before"),
    (
        lambda flights: {each.rank: max(f.issued for f in flights) - each.issued for each in flights},
        "Rank 0 was done before rank 1 asked",
    ),
    (lambda flights: [0] * len(flights), "Give a dictionary"),
]


test_an_answer_passes_or_is_told_what_is_wrong_with_it = judged(
    (partial(exercises.bytes_exercise, 2, 2), BYTES),
    (partial(exercises.adamw_exercise, 2, 2, 0), STEPS),
    (exercises.events_exercise, SUMS),
    (exercises.waits_exercise, WRONG_WAITS),
    (exercises.early_exercise, EARLY),
)


def late_timeline(ranks: int) -> Timeline:
    """Rank 0 computes until 60 and only then asks; the other ranks compute until 10, ask, and wait for it."""
    group = tuple(range(ranks))
    times = []
    for rank in group:
        flight = Flight(rank, "all_reduce", "updates", "", group, 0, 10 if rank else 60, 90 + rank)
        times.append(RankTimes(rank, 0, 100, ((0, 60 if not rank else 10),), (flight,)))
    return Timeline(tuple(times))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_what_the_exercise_calls_waiting_is_what_the_package_does(ranks: int) -> None:
    assert exercises.waits_exercise().check(lesson.waited)
    timeline = late_timeline(ranks)
    waits = trace_events.waits_of(timeline, lesson.waited)
    assert [waiting for _, waiting in waits] == [row.waiting for row in split(timeline)]
    assert f"rank {ranks - 1:2}" in lesson.say_waits(timeline, lesson.waited)


def test_a_step_is_recorded_on_all_ranks_and_rank_0_is_the_late_one() -> None:
    timeline = late_rank.record_late(3, 1, 0)
    assert [times.rank for times in timeline.ranks] == [0, 1, 2]
    last = [times.flights[-1] for times in timeline.ranks]
    assert [flight.phase for flight in last] == ["updates all_reduce"] * 3
    assert [row.unsplit for row in split(timeline)] == [0, 0, 0]


def test_a_waterfall_ends_at_muons_number() -> None:
    for at in (Setting(), Setting("all bf16", bandwidth=1 / 8, strategy="layerwise", fewer=1.1)):
        sent, seconds, memory = costs.waterfalls(at)
        flags = at.muon.phases["gradient flags"]
        assert sent.last == pytest.approx((at.muon.sent - flags) / at.fewer)
        assert seconds.last == pytest.approx(at.muon_seconds)
        assert memory.last == pytest.approx(at.muon.memory)
        assert [fall.first for fall in (sent, memory)] == [at.adamw.sent, at.adamw.memory]
        assert seconds.first == at.adamw_seconds


def test_the_quiz_knows_right_from_wrong() -> None:
    counted = [rank_counted(4), rank_counted(4)]
    step = lesson.muon_step("all fp32", "layerwise")
    right = {"bf16": 1.0, "gloo": 1.0, "Newton–Schulz": step.product / step.seconds}
    assert_quiz(exercises.quiz(counted, 2, 1), right)


@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (5, 1)])
def test_a_grid_that_does_not_cut_evenly_is_refused_in_a_line(dp: int, tp: int) -> None:
    with pytest.raises(UsageError, match="take 2, 3, 4, 6 or 8"):
        lesson.all_exercises(dp, tp, 0)
