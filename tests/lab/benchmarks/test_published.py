"""Published figures next to the planner's: the committed table holds the planner's current figures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from muon_tutorial.errors import UsageError
from scripts.lab.benchmarks.published.claim import Claim, Comparison, read_claims
from scripts.published import COMMAND, as_data, as_markdown, compare_all, summary

RESULTS = Path(__file__).resolve().parents[3] / "results"


@pytest.fixture(scope="module")
def compared() -> tuple[Comparison, ...]:
    return compare_all()


def kept() -> dict[str, Any]:
    return json.loads((RESULTS / "published.json").read_text(encoding="utf-8"))


def test_the_committed_figures_are_the_planners_of_today(compared: tuple[Comparison, ...]) -> None:
    now, then = as_data(compared, COMMAND), kept()
    for row, old in zip(now["rows"], then["rows"], strict=True):
        for number in ("ours", "ratio"):
            mine, its = row.pop(number), old.pop(number)
            assert mine == (its if its is None else pytest.approx(its, rel=1e-6)), row["what"]
    assert now == then


def test_the_committed_page_is_made_from_them(compared: tuple[Comparison, ...]) -> None:
    page = (RESULTS / "published.md").read_text(encoding="utf-8")
    assert page == as_markdown(compared, COMMAND)
    assert summary(compared) in page


def test_whoever_disagrees_says_why(compared: tuple[Comparison, ...]) -> None:
    apart = [one.claim for one in compared if one.within is False or one.same_sign is False]
    assert apart
    assert [claim.what for claim in apart if not claim.why] == []


def test_only_what_the_reports_own_traces_contradict_has_another_sign(
    compared: tuple[Comparison, ...],
) -> None:
    others = [one.claim for one in compared if one.same_sign is False]
    assert {claim.published for claim in others} == {0.57, 2.1}
    assert {claim.source for claim in others} == {"a report that reproduced it"}


def test_every_sign_could_have_been_another() -> None:
    # No figure here is negative, so a direction that held for both 0 and 1e9 could never be wrong.
    signed = [claim for claim in read_claims() if claim.above is not None or claim.below is not None]
    assert signed
    for claim in signed:
        assert {claim.holds_for(number) for number in (0.0, 1e9)} == {True, False}, claim.what
        assert claim.above is None or claim.below is None, claim.what


def test_twelve_predictions_of_seconds_are_within_a_quarter(compared: tuple[Comparison, ...]) -> None:
    predicted = [one for one in compared if one.claim.kind == "seconds"]
    assert len(predicted) >= 20
    assert sum(one.within is True for one in predicted) >= 12


A_CLAIM = Claim(
    "counted", "bytes", 2.0, "×", "a paper", "https://x", "all", "nothing", lambda: 2.0, above=1.0
)


@pytest.mark.parametrize(
    ("ours", "same_sign", "within"),
    [(2.0, True, True), (2.5, True, True), (2.51, True, False), (1.49, True, False), (0.9, False, False)],
)
def test_sign_and_size_are_told_apart(ours: float, same_sign: bool, within: bool) -> None:
    one = Comparison(A_CLAIM, ours)
    assert (one.same_sign, one.within, one.ratio) == (same_sign, within, ours / 2)
    assert Comparison(replace(A_CLAIM, above=None), ours).same_sign is None


def test_a_claim_whose_number_lies_elsewhere_than_it_says_is_refused() -> None:
    with pytest.raises(UsageError, match=r"bytes: 2\.0 does not lie below 1\.0"):
        replace(A_CLAIM, above=None, below=1.0)
