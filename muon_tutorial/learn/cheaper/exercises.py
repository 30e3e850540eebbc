"""Exercises of lesson 13: bytes, AdamW's step, traces, headlines, waiting, break-even, the quiz."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from numbers import Real
from typing import Any

import torch

from ... import Coordinate, Grid
from ...engine.collective import Label, Walk
from ...engine.travel import travel
from ...errors import TutorialError, UsageError
from ...evidence.formulas import zero1_adamw
from ...evidence.predict import predict
from ...evidence.traces.profiler_trace import TraceEvent
from ...evidence.traces.time_split import Flight
from ...plan.bucket import Bucket
from ..bill.costs import entries_of_rank
from ..exercises import judge as judging
from ..exercises.judge import Diagnosis, Exercise, MistakeError, first, guesses, numbers, value_of, written
from . import on_ranks, trace_events
from .costs import Setting, muon_step
from .on_ranks import ADAMW, DTYPES, STRATEGIES, Counted, SentBytes, StepOfAdamW, plan_of, step_in_one_process
from .trace_events import GATHER, PRODUCT, US, event, gpu_step, one_collective, right_headlines, waited

Found = Diagnosis | str | None
NAMES = ("AdamW", "zero1", "layerwise")


def bytes_sent(entries: int, dp: int, item: int) -> dict[str, int]:
    """The exercise's reference: bytes that a rank sends in a step, on average over its dp group."""
    share = (dp - 1) * entries // dp
    return {"AdamW": 2 * share * item, "zero1": share * (2 * item + 2), "layerwise": 2 * share * item}


_BYTES_HINTS = {
    "AdamW": "A reduce_scatter of the gradients and an all_gather of the weights. In each, a rank sends "
    "dp − 1 slices of entries / dp, times the bytes of an entry.",
    "zero1": "As AdamW, and a gather of x, which is bfloat16 whatever the gradients are.",
    "layerwise": "Each gradient travels to its owner, and each weight back. Each time, every rank except one "
    "sends the whole tensor: on average, a rank sends (dp − 1) / dp of it.",
}


def bytes_exercise(dp: int, tp: int) -> Exercise:
    """The exercise: the reader's bytes are compared with plans and formulas on several grids and dtypes."""
    grids = dict.fromkeys(((dp, tp), (2, 2), (4, 1), (3, 2), (8, 1), (1, 2)))
    tried = [(*grid, dtype) for grid in grids for dtype in DTYPES.values()]
    due = {(length_of(dp, tp), dp, dtype.itemsize): due_bytes(dp, tp, dtype) for dp, tp, dtype in tried}

    def of_all_ranks(entries: int, dp: int, item: int) -> dict[str, int]:
        return {name: dp * sent for name, sent in bytes_sent(entries, dp, item).items()}

    slip = "That is what all ranks of the dp group send together, dp times as much as one.", of_all_ranks
    right, say = (lambda *case: due[case]), "{0:,} entries of {2} bytes over dp={1}"
    praise = "To the byte. Now see what real ranks count."
    return written(right, list(due), slip, say=say, hint_of=_BYTES_HINTS, praise=praise)


@cache
def due_bytes(dp: int, tp: int, dtype: torch.dtype) -> dict[str, int]:
    """The bytes that a rank of the first dp group sends on average, according to the plans."""
    item, grid, entries = dtype.itemsize, Grid.of(dp=dp, tp=tp), length_of(dp, tp)
    found = {"AdamW": int(zero1_adamw(dp, entries, item, item))}
    for name in NAMES[1:]:
        plan = STRATEGIES[name](on_ranks.matrices_of(dtype), grid)
        ledgers = [predict(plan, grid.at(rank)) for rank in grid.at(0).group("dp")]
        found[name] = sum(on_ranks.sent_along_dp(ledger.entries).ring for ledger in ledgers) // dp
    return found


def length_of(dp: int, tp: int) -> int:
    """Entries of the lesson's bucket at one tp position, padding included."""
    return entries_of_rank(plan_of(dp, tp))


def _undivided(gradients: Any, weights: Any, bucket: Bucket, at: Coordinate) -> Walk:
    summed = yield from travel(gradients, bucket.gradient, at, Label("gradients"))
    return (yield from travel(on_ranks.adamw(weights, summed), bucket.parameter, at, Label("weights")))


def adamw_exercise(dp: int, tp: int, seed: int) -> Exercise:
    """The exercise: AdamW's step with its two transfers, judged in one process by its bits and its ledger."""

    def judge(step: StepOfAdamW) -> Found:
        grids = dict.fromkeys(((dp, tp), (2, 1), (4, 1), (2, 2)))
        return first(_judge_step(step, *grid, seed) for grid in grids)

    hints = (
        "travel(x, route, at, label) carries x along a route. Write: x = yield from travel(…).",
        "Gradients travel along bucket.gradient, which sums and cuts them; weights along bucket.parameter.",
    )
    praise = "Every rank has all weights, to the bit, and sends not a byte more than AdamW has to."
    return Exercise(judge, hints, praise)


def _judge_step(step: StepOfAdamW, dp: int, tp: int, seed: int) -> Diagnosis | str | None:
    try:
        came, ledger = step_in_one_process(_checked(step), dp, tp, seed)
    except TutorialError as error:
        return f"On dp={dp}, tp={tp} the step broke off: {type(error).__name__}: {str(error).splitlines()[0]}"
    if any(each is ... for each in came):
        raise judging.OpenAnswerError
    due, right = step_in_one_process(on_ranks.adamw_step, dp, tp, seed)
    if not all(isinstance(each, torch.Tensor) and each.shape == due[0].shape for each in came):
        shape = tuple(came[0].shape) if isinstance(came[0], torch.Tensor) else came[0]
        return f"Return all weights of the bucket, {len(due[0]):,} entries. Yours is {shape!r}."
    if not all(map(torch.equal, came, due)):
        if all(map(torch.equal, came, step_in_one_process(_undivided, dp, tp, seed)[0])):
            said = "AdamW got the sum of all gradients, not their mean. In a first step, only eps shows it."
            return Diagnosis(said, ("bucket.summands says how many gradients were summed.",))
        if off := max(float((mine - came[0]).abs().max()) for mine in came[::tp]):
            return f"The ranks of a dp group end with different weights, by up to {off:.1e}."
        return "The ranks agree, but their weights are not AdamW's."
    sent, enough = (sum(entry.ring for entry in each.entries) for each in (ledger, right))
    if sent == enough:
        return None
    said = f"The weights are right. All ranks together send {sent:,} bytes; {enough:,} would do."
    return Diagnosis(said, ("Which collective gives each rank its slice of the sum, and no more?",))


def _checked(step: StepOfAdamW) -> StepOfAdamW:
    """The reader's step. An error in it becomes a MistakeError, whose text the reader sees."""

    def walk(*given: Any) -> Walk:
        asked = value_of(step, *given)
        if not hasattr(asked, "send"):
            return asked
        try:
            return (yield from asked)
        except TutorialError:
            raise
        except Exception as error:
            lost = " A travel without `yield from` sends nothing." if "generator" in str(error) else ""
            raise MistakeError(f"The function raised {type(error).__name__}: {error}.{lost}") from error

    return walk


CASES: Sequence[tuple[str, Callable[[], Sequence[TraceEvent]], str]] = (
    (
        "With one collective",
        lambda: one_collective(400, 4300),
        "Of a collective's four events only the kernel is the GPU at work; the others launch or label "
        "it. event.communicates says which kernels belong to a collective.",
    ),
    (
        "With a product under way at the same time",
        lambda: [*one_collective(400, 2000), event(PRODUCT, "kernel", 500, 3000)],
        "A product is a kernel, too. event.communicates says which events belong to a collective.",
    ),
    (
        "With two collectives under way at the same time",
        lambda: [*one_collective(400, 2000), event(GATHER, "kernel", 1400, 2000)],
        "Count each moment once: a later collective adds only the time after the end of the earlier one.",
    ),
    (
        "With a short collective inside a long one, and the last one first in the list",
        lambda: [event(GATHER, "kernel", *at) for at in ((1900, 900), (400, 2000), (600, 300))],
        "Sort kernels by .begin. A kernel that ends early must not lower the latest end so far.",
    ),
    ("With no collective at all", lambda: [event(PRODUCT, "kernel", 0, 900)], "Then the answer is 0."),
    ("In the trace above", gpu_step, "Its tp gather lies within its dp gather."),
)
"""Traces on which the reader's function is judged, and a hint for an answer that fails there."""


def events_exercise() -> Exercise:
    """The exercise: nanoseconds in which any collective ran, each moment counted once."""

    def judge(answer: Callable[[Sequence[TraceEvent]], int]) -> Diagnosis | None:
        for where, made, hint in CASES:
            came, due = value_of(answer, made()), trace_events.communicating(made())
            if came != due:
                shown = f"{came:,}" if isinstance(came, Real) else repr(came)
                by_name = came == sum(each.duration for each in made() if each.communicates)
                double = ": you have added up four events of one collective." if by_name else "."
                return Diagnosis(f"{where}: {due:,} ns, not {shown}{double}", (hint,))
        return None

    return Exercise(judge, (), "Each collective once, and each moment once.")


def early_exercise() -> Exercise:
    """The exercise: for how long the tp gather of ``gpu_step`` ran before its dp gather had ended."""
    along_dp, along_tp = trace_events.at_work(gpu_step())
    right = along_dp.end - along_tp.begin
    slips = (
        (along_tp.begin - along_dp.begin, "When the dp gather begins, no entry has arrived yet."),
        (along_dp.end - along_tp.end, "An entry must be there when the tp gather begins, not when it ends."),
        (along_dp.duration, "Count from the start of the tp gather, which is a microsecond later."),
        (right / US, "Give nanoseconds, as in .begin and .end."),
        (-right, "Count from the tp gather's start up to the dp gather's end."),
    )
    said = "All entries have certainly arrived when the dp gather ends."
    praise = "Nothing in that run waited for this gather."
    return guesses(("early", right, said, *slips), within=2e-5, praise=praise)


_HEADLINE_HINTS = {
    "0.57": "Muon's sum over names divided by AdamW's.",
    "0.57 once": "The same with kernels in place of sum_over_names.",
    "1.1%": "launch.total of Muon's run, divided by its full_step.total.",
    "1.1% on the GPU": "Of Muon's run: what the optimizer's kernels take, over the same clock's span.",
    "2.1": "muon_async's sum over names divided by muon's.",
    "2.1 as a span": "The same with gpu_span in place of sum_over_names.",
}


def headlines_exercise() -> Exercise:
    """The exercise: the published ratios, and what they are without double counts and launch times."""
    asked = ((name, right, _HEADLINE_HINTS[name]) for name, right in right_headlines().items())
    praise = "Three headlines, each taken apart with one division. Traces will not fool you easily now."
    return numbers(*asked, within=0.005, praise=praise)


def _flights(*times: tuple[int, int]) -> list[Flight]:
    named, group = ("all_reduce", "gradients", ""), tuple(range(len(times)))
    return [Flight(rank, *named, group, 0, *issued_done) for rank, issued_done in enumerate(times)]


_DONE_EARLY = "Rank 0 was done before rank 1 asked, so it did not wait for rank 1."
WAIT_CASES: Sequence[tuple[str, list[Flight], str]] = (
    ("Rank 2 comes last", _flights((0, 90), (30, 90), (70, 92)), "No byte moves before rank 2 has asked."),
    ("All come together", _flights((5, 50), (5, 50)), "No rank waits; all of it is transfer."),
    ("Rank 0 only sends, and is done early", _flights((0, 20), (60, 80)), _DONE_EARLY),
)


def waits_exercise() -> Exercise:
    """The exercise: how long each rank waits in one collective, judged on made-up collectives."""

    def judge(answer: Callable[[list[Flight]], Mapping[int, int]]) -> Diagnosis | None:
        for where, flights, hint in WAIT_CASES:
            came, due = value_of(answer, list(flights)), waited(flights)
            if not isinstance(came, Mapping) or set(came) != set(due):
                return Diagnosis(f"Give a dictionary with a number for each of the ranks {list(due)}.")
            for rank, waiting in due.items():
                if came[rank] != waiting:
                    asked = ", ".join(f"rank {f.rank} {f.issued} to {f.done}" for f in flights)
                    said = f"{where} ({asked}): rank {rank} waits {waiting}, not {came[rank]}."
                    return Diagnosis(said, (hint,))
        return None

    return Exercise(judge, (), "One rank's trace can't tell waiting from transfer: use all ranks' times.")


def break_even(forward: float, adamw: float, muon: float, times: float) -> float:
    """The exercise's reference: how many tokens a step needs for Muon to reach a loss before AdamW.

    ``forward`` are the seconds of a token in forward and backward, ``adamw`` and ``muon`` those of a step.
    """
    owed, saved = muon - times * adamw, (times - 1) * forward
    return 0 if owed <= 0 else owed / saved if saved else math.inf


def turning_exercise() -> Exercise:
    """The exercise: how many tokens a step needs for Muon to lead, if AdamW takes more steps."""
    cases = [(3, 20, 70, 1.25), (1, 10, 30, 2), (2, 40, 30, 1.5), (2, 20, 30, 1), (2, 40, 30, 1)]
    leads = "If Muon's step takes no longer than `times` steps of AdamW, it leads with any batch."
    slips = (
        ("AdamW's own step is taken `times` times, too.", _turn(lambda f, a, m, x: (m - a) / (f * (x - 1)))),
        ("Muon has forward and backward in its step, too.", _turn(lambda f, a, m, x: (m - x * a) / (f * x))),
        (leads, _turn(lambda f, a, m, x: (m - x * a) / (f * (x - 1)))),
    )
    praise = "The more tokens a step has, the less Muon's longer step counts."
    say = "forward={}, adamw={}, muon={}, times={}"
    return written(break_even, cases, *slips, say=say, praise=praise)


def _turn(formula: Callable[..., float]) -> Callable[..., float]:
    """``formula``, but infinity if both optimizers take equally many steps, where it would divide by zero."""
    return lambda *case: math.inf if case[-1] == 1 else formula(*case)


def slow_winner() -> str:
    """The strategy with which Muon beats AdamW on slow links."""
    strategies = ("zero1", "boundary", "layerwise")
    slow = {each: Setting(bandwidth=1 / 64, strategy=each, fewer=1.1) for each in strategies}
    [only] = (each for each in strategies if slow[each].muon_seconds < slow[each].adamw_seconds)
    return only


def quiz(counted: Sequence[Counted], dp: int, tp: int) -> Exercise:
    found: Mapping[str, Mapping[str, SentBytes]] = on_ranks.mean_of_group(counted, tp)
    ring, base = found["bf16"]["zero1"].ring, found["bf16"][ADAMW].ring
    gloo = found["fp32"]["layerwise"].gloo / max(1, found["fp32"][ADAMW].gloo)
    step = muon_step("all fp32", "layerwise")
    ask = "In bf16, divide the ring's bytes of zero1 by AdamW's. The table says it, too."
    return numbers(
        ("bf16", ring / base if base else 1.0, ask),
        ("gloo", gloo, "The last column of layerwise, in fp32."),
        ("Newton–Schulz", step.product / step.seconds, "Divide .product by .seconds."),
        within=0.01,
    )


def all_exercises(dp: int, tp: int, seed: int) -> tuple[Exercise, ...]:
    """The notebook's exercises in order: bytes, AdamW's step, events, headlines, waits, break-even.

    Raises UsageError if dp is 1, because then nothing is sent, or if dp does not divide the bucket's entries.
    """
    entries = sum(entry.size for entry in plan_of(dp, tp).buckets[0].entries)
    if dp < 2 or entries % dp:
        raise UsageError(f"dp = {dp} does not cut {entries:,} entries evenly; take 2, 3, 4, 6 or 8")
    traced = events_exercise(), headlines_exercise(), waits_exercise()
    return bytes_exercise(dp, tp), adamw_exercise(dp, tp, seed), *traced, turning_exercise()
