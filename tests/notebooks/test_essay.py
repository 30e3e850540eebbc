"""The essay shows the package's results on every grid, and works in a browser with and without scripts."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from muon_tutorial import Grid
from muon_tutorial.evidence.memory import plan_memory
from muon_tutorial.learn.bill.costs import bill_of
from muon_tutorial.learn.early_return.steps import plan_of, recorded
from muon_tutorial.learn.first_muon.exercises import early_wrong
from muon_tutorial.learn.first_muon.on_ranks import PLACES, SHAPES, owner_lacks, place_of
from muon_tutorial.learn.many_ranks.scaling import matrices_of
from muon_tutorial.learn.shards_alone import cuts
from muon_tutorial.learn.the_mirror import on_ranks
from muon_tutorial.learn.the_mirror.network import Network
from muon_tutorial.learn.the_mirror.recording import PHASES, assemble
from muon_tutorial.learn.zero1_buffer.on_ranks import locate
from muon_tutorial.plan.matrix import held_box
from muon_tutorial.timing import step_cost
from scripts import essay, essay_recorder, first_screens
from scripts.essay_sabotage import sabotaged

from . import lab
from .reading import FETCHED, parsed

GRIDS = [pytest.param(dp, tp, id=f"{dp}x{tp}") for dp, tp in essay_recorder.GRIDS]
RIGHT = "\ue014"  # the arrow key


@pytest.fixture(scope="module")
def page(site: Path) -> Path:
    return site / essay.NAME


@pytest.fixture(scope="module")
def soup(page: Path) -> Any:
    return parsed(page)


@pytest.fixture(scope="module")
def data(soup: Any) -> dict[str, Any]:
    return json.loads(soup.find(id="data").string)


@pytest.mark.parametrize(("dp", "tp"), GRIDS)
def test_a_step_answered_in_another_order_holds_at_each_moment_what_the_page_shows(
    data: dict[str, Any], dp: int, tp: int
) -> None:
    draw, found = random.Random(dp * tp), data["grids"][f"{dp}x{tp}"]
    jobs = on_ranks.jobs_on(Grid.of(dp=dp, tp=tp), essay_recorder.SEED)
    world = on_ranks.LocalWorld(jobs[0].step.at.grid, pick=draw.randrange)
    world.observers += [job.diarist.observe for job in jobs]
    with torch.no_grad():
        reports = world.run([job.walk(on_ranks.reference_step) for job in jobs])
    run = assemble("", on_ranks.plan_of(dp, tp), [report.diary for report in reports])
    assert found["film"] == json.loads(json.dumps({n: essay_recorder.film_data(run, n) for n in run.shapes}))
    for phase, sent in enumerate(found["sent"], 1):
        asked = [[item for item in diary.sent if item.phase == phase] for diary in run.diaries]
        assert sent["bytes"] == [sum(item.size for item in items) for items in asked]
        assert {(item.kind, item.axis) for items in asked for item in items} <= {(sent["kind"], sent["axis"])}


@pytest.mark.parametrize(("dp", "tp"), GRIDS)
def test_every_entry_is_followed_to_the_one_place_that_keeps_it(
    data: dict[str, Any], dp: int, tp: int
) -> None:
    plan, found = on_ranks.plan_of(dp, tp), data["grids"][f"{dp}x{tp}"]
    assert found["bucket"]["length"] == dp * found["bucket"]["slice"]
    for index, (name, (rows, columns)) in enumerate(data["shapes"].items()):
        kept: dict[tuple[int, int], tuple[int, int, int]] = {}
        for row, column, length, rank, in_bucket, in_slice in found["bucket"]["runs"][name]:
            for along in range(length):
                assert (row, column + along) not in kept
                kept[row, column + along] = rank, in_bucket + along, in_slice + along
        assert len(kept) == rows * columns
        matrix = next(e.matrix for e in plan.buckets[0].entries if e.matrix.index == index)
        piece = held_box((rows, columns), matrix.cuts, plan.grid.at(0))
        for row in range(piece.shape[0]):
            for column in range(piece.shape[1]):
                place = locate(plan, name, row, column)
                assert kept[row, column] == (place.rank, place.in_bucket, place.offset)


@pytest.mark.parametrize(("dp", "tp"), GRIDS)
def test_each_strategy_keeps_the_momentum_and_has_the_workers_that_are_shown(
    data: dict[str, Any], dp: int, tp: int
) -> None:
    for name, shown in data["grids"][f"{dp}x{tp}"]["strategies"].items():
        plan = step_cost.STRATEGIES[name](essay_recorder.small_matrices(), Grid.of(dp=dp, tp=tp))
        assert shown["state"] == plan_memory(plan, plan.grid.at(0)).momentum
        for index, matrix in enumerate(data["shapes"]):
            found = shown["matrices"][matrix]
            places = [
                place
                for bucket in plan.buckets
                for e in bucket.entries
                if e.matrix.index == index
                for place in plan.grid.ranks
                if bucket.works_on(e, plan.grid.at(place))
            ]
            assert found["workers"] == places
            rows, columns = data["shapes"][matrix]
            covered = torch.zeros(rows, columns)
            for boxes in found["momentum"]:
                for top, left, down, across in boxes:
                    covered[top : top + down, left : left + across] += 1
            assert covered.min() >= 1
            if name not in ("replicated", "round_robin", "owner"):
                assert covered.max() == 1  # each entry is kept once


@pytest.mark.parametrize("name", [f"{dp}x{tp}" for dp, tp in essay_recorder.NETWORKS])
def test_random_orders_meet_the_recorded_states_and_end_in_the_recorded_hash(
    data: dict[str, Any], name: str
) -> None:
    shown, draw = data["networks"][name], random.Random(0)
    dp, tp = map(int, name.split("x"))
    network = Network(dp, tp, essay_recorder.SEED)
    for _ in range(10):
        network.restart()
        now = 0
        while ready := network.ready:
            state = shown["states"][now]
            asked = [[list(each.group), each.axis, each.phase, each.subject] for each in ready]
            assert sorted(asked) == sorted(each[:4] for each in state["ready"])
            place = draw.randrange(len(state["ready"]))
            network.answer(tuple(state["ready"][place][0]))
            now = state["ready"][place][4]
        assert shown["states"][now]["ready"] == []
        assert network.result == shown["hash"]
        assert len(network.order) == shown["answers"]
    assert shown["orders"] == walks(shown["states"], 0, {})


def walks(states: list[dict[str, Any]], at: int, known: dict[int, int]) -> int:
    """The number of paths from a state to the end, counted forwards."""
    if at not in known:
        known[at] = sum(walks(states, each[4], known) for each in states[at]["ready"]) or 1
    return known[at]


def test_red_is_where_a_sabotaged_training_differs_and_only_an_owner_does_harm(data: dict[str, Any]) -> None:
    shown = data["saboteur"]
    assert len(shown["runs"]) == shown["ranks"] * len(SHAPES) * len(shown["faults"])
    owners = {place.name: place.owner(shown["ranks"]) for place in PLACES}
    trained_again = random.Random(0).sample(sorted(shown["runs"]), len(shown["runs"]) // 3)
    for key, run in shown["runs"].items():
        rank, matrix, fault = key.split()
        assert all(run["agree"])  # as the text says
        assert any(run["wrong"][-1]) is (owners[matrix] == int(rank))
        if key not in trained_again:
            continue
        truth = sabotaged(shown["ranks"], int(rank), matrix, fault, essay_recorder.SEED)
        wrong = {
            (moment, each, name)
            for moment, row in enumerate(run["wrong"])
            for name, bits in zip(shown["matrices"], row, strict=True)
            for each in range(shown["ranks"])
            if bits >> each & 1
        }
        assert wrong == truth.wrong


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", ["k1", "down2"])
def test_a_lost_gradient_spoils_what_intervals_predict_and_then_everything(ranks: int, name: str) -> None:
    run = sabotaged(ranks, place_of(name).owner(ranks), name, "lost")
    wrong_at = [{each for when, _, each in run.wrong if when == moment} for moment in range(6)]
    assert wrong_at[0] == {name}
    assert wrong_at[2] - {name} == set(early_wrong(ranks, owner_lacks(name, ranks))) - {name}
    assert wrong_at[3] == wrong_at[5] == set(SHAPES)
    assert all(run.agree)


def test_heat_maps_and_their_numbers_are_those_of_the_gradient(data: dict[str, Any]) -> None:
    for key, run in data["alone"]["runs"].items():
        matrix, cut, pieces = key.rsplit(" ", 2)
        whole = cuts.matrices()[matrix]
        update = cuts.pieces_alone(whole, cuts.DIMS[cut], int(pieces))
        right = cuts.orthogonal(whole)
        assert run["cosine"] == pytest.approx(
            float((update * right).sum() / update.norm() / right.norm()), abs=6e-4
        )
        size = (
            (cuts.in_directions(update, whole) ** 2)
            .unflatten(1, (-1, 4))
            .unflatten(0, (-1, 4))
            .sum((1, 3))
            .sqrt()
        )
        shade = ((size / 4).clamp(max=1).sqrt() * data["alone"]["most"]).flatten()
        drawn = torch.tensor([ord(letter) - ord("a") for letter in run["shades"]])
        assert (drawn - shade).abs().max() < 0.51
    for pieces in (1, 2, 4):  # as the text says
        most, least = data["alone"]["runs"][f"real columns {pieces}"]["values"]
        assert most - least < 0.01


@pytest.mark.parametrize("name", essay_recorder.STRATEGIES)
def test_costs_are_the_planners_and_follow_what_the_text_says(data: dict[str, Any], name: str) -> None:
    shown = data["scale"]["strategies"][name]
    machine = essay_recorder.find_machine(essay_recorder.MACHINE)
    matrices = matrices_of(data["scale"]["model"], data["scale"]["tp"])
    for ranks, each in list(zip(data["scale"]["ranks"], shown, strict=True))[:2]:
        grid = Grid.of(dp=ranks // 8, tp=8)
        found = step_cost.estimate(name, step_cost.STRATEGIES[name], matrices, grid, machine)
        assert (each["sent"], each["work"], each["memory"]) == (found.sent, found.newton_schulz, found.memory)
        assert each["seconds"] == pytest.approx(found.seconds)
    works = [each["work"] for each in shown]
    assert works == sorted(works, reverse=True)
    assert (works[0] == works[-1]) is (name == "replicated")


def test_timelines_are_the_recorded_ones(data: dict[str, Any]) -> None:
    for step in recorded().steps:
        shown = data["timelines"]["steps"][f"{step.strategy} {step.window} {step.link}"]
        assert shown["seconds"] == round(step.timeline.seconds, 4)
        spans = {(s.rank, s.doing, round(s.begin * 1e6), round(s.end * 1e6)) for s in step.timeline.spans}
        doings = data["timelines"]["doings"]
        assert {(rank, doings[doing], begin, end) for rank, doing, begin, end in shown["spans"]} <= spans
        assert len(shown["spans"]) > 70
    moved = bill_of("zero1", plan_of(recorded().task["dp"], side=recorded().task["side"]))
    ends = sum(size for phase, size in moved.sent.items() if phase.startswith(("gradient", "parameter")))
    assert ends / moved.total == pytest.approx(4 / 5)  # as the text says


def test_the_page_is_one_small_file_that_asks_for_nothing_and_runs_one_script_alone(
    page: Path, soup: Any
) -> None:
    assert page.stat().st_size < essay.MOST_BYTES
    asked = [tag[name] for tag in soup.find_all() for name in FETCHED & tag.attrs.keys()]
    asked += [tag["href"] for tag in soup.find_all("link")]
    assert [url[:60] for url in asked if not url.startswith("data:")] == []
    [meta] = soup.find_all("meta", attrs={"http-equiv": "Content-Security-Policy"})
    code = soup.find("script", type="module").string
    assert meta["content"] == essay.policy(code)
    assert "default-src 'none'" in meta["content"]
    assert "unsafe-inline" not in meta["content"].partition("script-src")[2]
    assert re.findall(r"fetch\(|XMLHttpRequest|import\(|innerHTML|eval\(", code) == []
    assert [len(PHASES), *range(1, 8)] == [7, *(int(tag.string) for tag in soup.select("h2 span"))]


# In a browser.


def visit(driver: Any, page: Path, address: str = "") -> None:
    driver.get("about:blank")
    driver.get(page.as_uri() + address)


def said(driver: Any, scene: str) -> str:
    """A scene's caption, which it writes when it is scrolled into view."""
    show = "document.querySelector(arguments[0]).scrollIntoView({behavior: 'instant', block: 'center'})"
    driver.execute_script(show, f"#{scene} figure")
    drawn = "requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(arguments[0], 0)))"
    driver.execute_async_script(drawn)
    find = "return document.querySelector(arguments[0]).textContent"
    return lab.wait_for(
        lambda: driver.execute_script(find, f"#{scene} .said") or None, 5, f"{scene} says nothing"
    )


@lab.needs_a_browser
def test_all_scenes_draw_without_a_request_or_an_error_and_fit_a_phone(browser: Any, page: Path) -> None:
    lab.requested(browser)
    with first_screens.screen(browser, 360, 740):
        visit(browser, page)
        for scene in ("who", "phases", "network", "sabotage", "alone", "cost", "time"):
            assert len(said(browser, scene)) > 60
        assert browser.execute_script("return document.scrollingElement.scrollWidth") == 360
    assert [url[:60] for url in lab.requested(browser) if url not in ("about:blank", page.as_uri())] == []
    assert browser.get_log("browser") == []


@lab.needs_a_browser
def test_the_address_says_what_is_shown_and_the_keyboard_moves_it(browser: Any, page: Path) -> None:
    visit(browser, page, "#dp=4&tp=2&strategy=owner&moment=3&row=0&column=0")
    assert "8 ranks under owner" in said(browser, "who")
    assert "Phase 3" in said(browser, "phases")
    assert "Entry (0, 0) of o" in said(browser, "phases")
    browser.find_element("css selector", "#phases input[type=range]").send_keys(RIGHT)
    assert "Phase 4, Newton–Schulz: nothing is sent" in said(browser, "phases")
    told = "return location.hash.includes('moment=4')"
    assert lab.wait_for(lambda: browser.execute_script(told) or None, 5, "the address does not follow")
    browser.find_element("css selector", "#who input[value=owner]").send_keys(RIGHT)
    assert "8 ranks under owner" not in said(browser, "who")


@lab.needs_a_browser
def test_an_address_with_nonsense_shows_the_first_picture(browser: Any, page: Path) -> None:
    visit(browser, page, "#dp=99&tp=two&moment=&answers=7.7.7&row=-1")
    assert "4 ranks under zero1" in said(browser, "who")
    assert "0 of 10 answered" in said(browser, "network")
    assert browser.get_log("browser") == []


@lab.needs_a_browser
def test_the_network_is_played_with_the_keyboard_to_the_recorded_hash(
    browser: Any, page: Path, data: dict[str, Any]
) -> None:
    visit(browser, page)
    said(browser, "network")
    browser.find_element("css selector", "#network .groups button").send_keys("\n")
    for _ in range(data["networks"]["2x2"]["answers"] - 1):
        browser.switch_to.active_element.send_keys("\n")  # the next group has the focus
    assert data["networks"]["2x2"]["hash"] in said(browser, "network")


@lab.needs_a_browser
def test_without_script_it_is_an_article_with_still_pictures(browser: Any, page: Path) -> None:
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        visit(browser, page)
        stills = browser.find_elements("css selector", "figure img")
        assert len(stills) == 7
        assert all(still.is_displayed() and len(still.get_attribute("alt")) > 60 for still in stills)
        assert browser.find_elements("css selector", "figure input") == []
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
