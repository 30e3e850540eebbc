"""The judge recognizes planted outcomes: first as records, then as real processes that end badly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from muon_tutorial.errors import CheckpointError
from scripts.lab.faults import tampering
from scripts.lab.faults.campaign import Campaign, launched
from scripts.lab.faults.case import Case, RankRecord, Seen
from scripts.lab.faults.judge import blame, judge, one_line
from scripts.lab.faults.processes import left_behind, since_struck

from . import plants

CASE = Case(0, 0, "nothing", "a step", 1, "replicated", 2, 1, "launch", 7)
NAMED = "rank 1 gave NaN in w0; nothing was changed"


def records(*errors: str, **more: Any) -> tuple[RankRecord, ...]:
    return tuple(RankRecord(rank, error, "GradientError", **more) for rank, error in enumerate(errors))


GOOD = Seen(records=records(NAMED, NAMED, unchanged=True, equal=True))
JUDGED: dict[str, tuple[Seen, str]] = {
    "refused by name": (GOOD, "named"),
    "equal to the oracle": (Seen(records=records("", "", equal=True)), "survived"),
    "another rank": (Seen(records=records(*["rank 0 gave NaN"] * 2)), "wrong rank"),
    "no rank": (Seen(records=records(*["a gradient holds NaN on 1 of 2 ranks"] * 2)), "unnamed"),
    "one rank was told nothing": (Seen(records=records(NAMED, "")), "unnamed"),
    "an error of torch's": (Seen(records=records(NAMED, NAMED, named=False)), "traceback"),
    "a traceback where a line is due": (
        Seen(message="rank 1\nTraceback (most recent call last)", line_due=True),
        "traceback",
    ),
    "other bits": (Seen(records=records("", "", equal=False)), "silent difference"),
    "other bits on one rank": (
        Seen(records=(RankRecord(0, equal=True), RankRecord(1, equal=False))),
        "silent difference",
    ),
    "refused, and yet changed": (Seen(records=records(NAMED, NAMED, unchanged=False)), "silent difference"),
    "refused, and lost after the repair": (
        Seen(records=records(NAMED, NAMED, unchanged=True, equal=False)),
        "silent difference",
    ),
    "late": (replace(GOOD, seconds=9.0), "hang"),
    "aborted": (replace(GOOD, signals=("SIGABRT on rank 0",)), "abort"),
    "left behind": (replace(GOOD, orphans=("python (S)",)), "orphan"),
    "late, and left behind": (replace(GOOD, seconds=9.0, orphans=("python (S)",)), "orphan"),
    "half loaded": (Seen(message=NAMED, half_loaded=True), "half load"),
    "no second try": (Seen(message=NAMED, retry_refused="not empty"), "retry refused"),
    "the launch names it": (Seen(message="something broke", blamed=1), "named"),
    "the launch names another": (Seen(message="rank 1 broke", blamed=0), "wrong rank"),
}


@pytest.mark.parametrize(("seen", "verdict"), JUDGED.values(), ids=JUDGED)
def test_what_was_seen_has_its_verdict(seen: Seen, verdict: str) -> None:
    assert judge(CASE, seen)[0] == verdict


SAID = {
    "rank 2 gave NaN": "named",
    "the gradient of w0 holds NaN on rank 2": "named",
    "ranks made different plans:\n  rank 0, 1, 3: zero1\n  rank 2: owner": "named",
    "lr is 0.1 on rank 2 and 0.02 on ranks 0, 1 and 3": "named",
    "lr is 0.1 on rank 0 and 0.02 on rank 2": "named",
    "w0 is not the same on all ranks that should hold it: ranks 0 and 2 differ": "named",
    "rank 3 gave NaN": "wrong rank",
    "ranks made different plans:\n  rank 0, 1, 2: zero1\n  rank 3: owner": "wrong rank",
    "rank 0, rank 1, rank 2 or rank 3 is wrong": "wrong rank",
    "a gradient holds NaN on 1 of 4 ranks": "unnamed",
    "lr differs between ranks": "unnamed",
    "no rank crashed: rank 2 of 4 got no answer from the others": "unnamed",
}


@pytest.mark.parametrize(("text", "verdict"), SAID.items())
def test_a_message_blames_the_rank_that_stands_alone(text: str, verdict: str) -> None:
    assert blame(text, guilty=2) == verdict


def test_of_two_ranks_that_differ_nobody_can_say_which() -> None:
    assert blame("w0 differs between ranks 0 and 1", guilty=1, ranks=2) == "named"
    assert blame("w0 differs between ranks 0 and 1", guilty=1, ranks=4) == "unnamed"


def test_a_detail_has_no_folders_of_this_machine() -> None:
    assert one_line("cannot read /tmp/x-1/y/z.pt: 3/4 of\n it") == "cannot read …/z.pt: 3/4 of it"


@pytest.fixture(scope="module")
def campaign() -> Iterator[Campaign]:
    made = Campaign()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("plant", "verdict"),
    [
        (plants.a_broken_package, "silent difference"),
        (plants.an_abort, "abort"),
        (plants.a_hang, "hang"),
        (plants.a_bare_error, "traceback"),
        (plants.an_orphan, "orphan"),  # last, since it lives until the campaign is closed
    ],
)
def test_a_planted_end_is_found_on_real_processes(
    campaign: Campaign, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Any, verdict: str
) -> None:
    seen = launched(CASE, tmp_path, plant, CASE, str(tmp_path))
    if plant is plants.a_hang:
        monkeypatch.setattr("scripts.lab.faults.judge.LIMIT", 0.2)
        seen = replace(seen, seconds=since_struck(tmp_path))
    orphans = left_behind(campaign.mark)
    assert judge(CASE, replace(seen, orphans=orphans))[0] == verdict


def _half(path: Path, model: Any, both: Any) -> None:
    model.fill(3.0)
    raise CheckpointError(f"{path} cannot be read")


def _forgetful(path: Path, model: Any, both: Any) -> dict[str, Any]:
    return {"step": tampering.OLD}


def _careful(path: Path, model: Any, both: Any) -> None:
    raise CheckpointError(f"{path} cannot be read")


LOADERS = {_half: "half load", _forgetful: "silent difference", _careful: "named"}


@pytest.mark.parametrize(("load", "verdict"), LOADERS.items())
def test_a_loader_that_does_wrong_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: Any, verdict: str
) -> None:
    monkeypatch.setattr(tampering, "load_checkpoint", load)
    case = replace(CASE, kind="a bit flips in a file", rank=None)
    seen = tampering._loaded(tmp_path / "checkpoint", 0.0)
    assert judge(case, replace(seen, seconds=0.0))[0] == verdict
