"""A sample of the campaign: the draw of cases, and some kinds' outcomes. ``exhaustive`` has all kinds."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from scripts import faults
from scripts.lab.faults import broken_saves, strikes, tampering
from scripts.lab.faults.campaign import Campaign
from scripts.lab.faults.case import GOOD, Case, Outcome
from scripts.lab.faults.data_faults import FAULTS
from scripts.lab.faults.draw_cases import draw
from scripts.result_files import read_tables

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the campaign reads /proc")


def test_equal_seeds_draw_equal_cases_and_others_others() -> None:
    assert draw(3, 200) == draw(3, 200)
    assert draw(3, 200) != draw(4, 200)
    assert [case.number for case in draw(3, 200)] == list(range(200))


def test_every_kind_is_in_a_whole_campaign() -> None:
    kinds = {case.kind for case in draw(0, 600)}
    assert kinds >= {*FAULTS, *strikes.STRIKES, *tampering.TAMPERINGS, *broken_saves.SAVING}


def test_every_family_is_in_a_small_campaign_of_the_size_that_was_asked_for() -> None:
    cases = draw(0, 40)
    assert len(cases) == 40
    assert {case.starter for case in cases} == {"launch", "spawn", "LocalWorld", "one process"}
    assert {case.phase for case in cases} >= {"loading", "saving"}
    launched = {case.kind for case in cases if case.starter == "launch"}
    assert all(launched & {*family} for family in (FAULTS, strikes.STRIKES, broken_saves.SAVING))


@pytest.fixture(scope="module")
def campaign() -> Iterator[Campaign]:
    made = Campaign()
    yield made
    made.close()


def outcomes_of(campaign: Campaign, cases: list[Case]) -> list[str]:
    """The verdicts of the cases that ended badly."""
    numbered = [replace(case, number=number) for number, case in enumerate(cases)]
    return [f"{o.verdict}: {o.case}: {o.detail}" for o in campaign.run(numbered) if not o.is_good]


def a_case(kind: str, strategy: str = "zero1 all", rank: int | None = 1, **more: object) -> Case:
    case = Case(9, 0, kind, "a step", rank, strategy, 2, 1, "launch", 11)
    return replace(case, **more)  # type: ignore[arg-type]


def test_data_faults_end_as_they_should(campaign: Campaign) -> None:
    cases = [a_case("nothing", "own functions", None), a_case("gradient None")]
    cases += [a_case("strided gradient", "round_robin"), a_case("a parameter missing", "owner")]
    cases += [a_case("a parameter in bfloat16", "replicated")]
    assert outcomes_of(campaign, cases) == []


def test_local_worlds_end_as_they_should(campaign: Campaign) -> None:
    cases = [a_case(kind, starter="LocalWorld") for kind in ("nothing", "a parameter more", "gradient None")]
    assert outcomes_of(campaign, cases) == []


def test_ranks_that_end_are_named(campaign: Campaign) -> None:
    early, mid, late = strikes.IN_A_STEP
    kinds = {"SIGKILL": strikes.STARTING, "SIGSEGV": "arguments arrive", "sys.exit(3)": "before the mesh"}
    kinds |= {"MemoryError": early, "exception": mid, "SIGTERM": late}
    kinds |= {"os._exit(0)": "between steps", "SIGABRT": "returning"}
    cases = [a_case(kind, "owner", phase=phase) for kind, phase in kinds.items()]
    assert outcomes_of(campaign, cases) == []


def test_a_checkpoint_without_a_file_is_refused(campaign: Campaign) -> None:
    cases = [a_case("a file is missing", rank=None, starter="one process", dice=dice) for dice in range(3)]
    assert outcomes_of(campaign, cases) == []


def test_the_report_counts_the_outcomes_and_repeats_the_first_bad_one_of_each_kind(tmp_path: Path) -> None:
    hang = Outcome(a_case("stuck"), "hang", "<a|b> *waited*", 9.0)
    outcomes = [Outcome(a_case("nothing", rank=None), "survived", "", 1.0), hang, hang]
    faults.write(Namespace(seed=[9], count=3, out=tmp_path), outcomes, 12.4)
    ends, holes = read_tables(tmp_path / "faults.json").values()
    assert [*ends.rows] == [
        {"fault": "**all**", "cases": 3, "named": None, "survived": 1, "hang": 2},
        {"fault": "nothing", "cases": 1, "named": None, "survived": 1, "hang": None},
        {"fault": "stuck", "cases": 2, "named": None, "survived": None, "hang": 2},
    ]
    (hole,) = holes.rows
    assert hole["once more"] == "`python scripts/faults.py --seed 9 --count 3 --case 0`"
    assert (hole["verdict"], hole["detail"]) == ("hang", "&lt;a\\|b> \\*waited\\*")
    text = (tmp_path / "faults.md").read_text(encoding="utf-8")
    assert "in 0.0 % of runs that one faulty rank broke" in text
    assert holes.markdown() in text


def test_a_reader_that_leaves_the_script_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(faults, "run", lambda cases, asked: print("a hole", flush=True))
    with open(writer, "w") as pipe, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", pipe)
        assert faults.main(["--only", "SIGKILL"]) == 2
    assert capsys.readouterr().err == "faults.py: [Errno 32] Broken pipe\n"


@pytest.mark.exhaustive
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_whole_campaign_finds_no_hole(campaign: Campaign, seed: int) -> None:
    outcomes = campaign.run(draw(seed, 600))
    assert [f"{o.verdict}: {o.case}: {o.detail}" for o in outcomes if o.verdict not in GOOD] == []
    assert faults.share_named(outcomes) >= 0.99
