"""``orthogonalize="auto"``: one rank chooses for all ranks; groups, files and checkpoints keep the choice."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from muon_tutorial import Grid, LocalWorld, Muon, UsageError, build_mesh, launch
from muon_tutorial.optimizer.auto_recipes import TIMINGS, calibration_path, default_folder, kept_calibration
from muon_tutorial.optimizer.make_steps import DefaultSteps, with_recipes
from muon_tutorial.orthogonalizers.calibration import Calibration, ShapeTimes
from muon_tutorial.worlds.processor import describe_processor

from ..configs.setups import heard
from .test_orthogonalize import SIDES, stepped, weights

CPU = torch.device("cpu")


def calibration(*names: str) -> Calibration:
    shapes = [ShapeTimes(*sides, {name: 1.0}) for sides, name in zip(SIDES, names, strict=True)]
    return Calibration("a test", tuple(shapes))


MIXED = calibration("gram", "stock", "three_steps")
TEXT = "auto 6x10=gram 8x16=stock 12x12=three_steps"


def expected() -> list[Tensor]:
    params = weights()
    names = ["gram", "stock", "three_steps"]
    groups = [{"params": [p], "orthogonalize": name} for p, name in zip(params, names, strict=True)]
    return stepped(Muon(groups), params, 1)


def test_each_shape_takes_its_fastest_and_parts_go_by_their_own_shapes() -> None:
    params = weights()
    muon = Muon(params, orthogonalize="auto", calibration=MIXED)
    assert muon.param_groups[0]["orthogonalize"] == TEXT
    assert all(map(torch.equal, stepped(muon, params, 1), expected()))
    local = LocalWorld(Grid.of(dp=2)).mesh(0)
    muon = Muon(weights(), strategy="owner", mesh=local, orthogonalize="auto", calibration=MIXED)
    assert muon.param_groups[0]["orthogonalize"] == TEXT
    fused = torch.nn.Parameter(torch.ones(36, 12))
    muon = Muon([fused], parts=(12, 12, 12), orthogonalize="auto", calibration=MIXED)
    assert muon.param_groups[0]["orthogonalize"] == "auto 12x12=three_steps"


def chosen_on_ranks(rank: int, folder: str) -> tuple[str, str]:
    """Each rank has a different calibration; only rank 0 has the folder."""
    mine = MIXED if rank == 0 else calibration(*["minimax"] * 3)
    on_mesh: dict[str, Any] = {"mesh": build_mesh({"dp": 2}), "orthogonalize": "auto"}
    for strategy in ("zero1", "owner", "replicated"):
        params = weights()
        muon = Muon(params, **on_mesh, strategy=strategy, calibration=mine)
        assert muon.param_groups[0]["orthogonalize"] == TEXT
        assert all(map(torch.equal, stepped(muon, params, 1), expected()))
    lacking = Calibration("empty") if rank == 0 else mine
    return (
        heard(lambda: Muon(weights(), **on_mesh, strategy="owner", calibration=lacking)),
        heard(lambda: Muon(weights(), orthogonalize="auto", calibration=folder)),
    )


def test_real_ranks_take_what_the_first_one_found_and_fail_with_it(tmp_path: Path) -> None:
    for lacking, alone in launch(chosen_on_ranks, 2, args=(str(tmp_path),)):
        assert lacking == "UsageError: the calibration of 'empty' holds nothing for matrices of (6, 10)"
        assert alone.startswith('UsageError: orthogonalize="auto" without a strategy could choose different')


def test_a_choice_is_saved_and_a_loaded_one_stays_whatever_this_machine_finds() -> None:
    params = weights()
    muon = Muon(params, orthogonalize="auto", calibration=MIXED)
    stepped(muon, params)
    saved = copy.deepcopy(muon.state_dict())
    for kind in ("auto", "stock"):
        loaded = Muon(weights(), orthogonalize=kind, calibration=calibration(*["minimax"] * 3))
        loaded.load_state_dict(saved)
        assert loaded.param_groups[0]["orthogonalize"] == TEXT


def test_a_later_group_chooses_for_what_is_missing() -> None:
    first, *others = weights()
    muon = Muon([first], orthogonalize="auto", calibration=MIXED)
    assert muon.param_groups[0]["orthogonalize"] == "auto 6x10=gram"
    muon.add_param_group({"params": others})
    stepped(muon, [first, *others])
    assert muon.param_groups[1]["orthogonalize"].endswith("8x16=stock 12x12=three_steps")
    assert muon.param_groups[0]["orthogonalize"].startswith("auto 6x10=gram")


def test_other_groups_are_left_alone() -> None:
    first, *others = weights()
    groups: list[dict[str, Any]] = [{"params": [first]}, {"params": others, "orthogonalize": "gram"}]
    muon = Muon(groups, calibration=MIXED)
    assert [group["orthogonalize"] for group in muon.param_groups] == ["stock", "gram"]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Replace the measuring of a shape by fixed seconds; yields the list of shapes that were asked for."""
    asked: list[tuple[int, int]] = []

    def times(rows: int, columns: int, device: torch.device) -> ShapeTimes:
        asked.append((rows, columns))
        return ShapeTimes(rows, columns, {"gram": 1.0})

    monkeypatch.setattr("muon_tutorial.orthogonalizers.calibration.measure_shape", times)
    kept_calibration.cache_clear()
    return asked


def test_a_shape_is_measured_once_on_a_machine(measured: list[tuple[int, int]], tmp_path: Path) -> None:
    Muon(weights(), orthogonalize="auto", calibration=tmp_path)
    assert measured == [(6, 10), (8, 16), (12, 12)]
    kept_calibration.cache_clear()  # as in another process
    params = [*weights(), torch.nn.Parameter(torch.ones(3, 3))]
    muon = Muon(params, orthogonalize="auto", calibration=tmp_path)
    assert measured[3:] == [(3, 3)]
    assert muon.param_groups[0]["orthogonalize"] == "auto 3x3=gram 6x10=gram 8x16=gram 12x12=gram"
    path = calibration_path(tmp_path, f"{describe_processor(CPU)}, timings {TIMINGS}")
    assert list(tmp_path.iterdir()) == [path]
    kept_calibration(tmp_path, CPU, ((3, 3),), again=True)
    assert measured[4:] == [(3, 3)]
    assert default_folder() == Path.home() / ".cache" / "muon_tutorial"


def test_a_damaged_file_is_measured_anew_and_said(measured: list[tuple[int, int]], tmp_path: Path) -> None:
    path = calibration_path(tmp_path, f"{describe_processor(CPU)}, timings {TIMINGS}")
    path.write_text("{", encoding="utf-8")
    with pytest.warns(UserWarning, match="is not a calibration.*measuring again"):
        kept_calibration(tmp_path, CPU, ((3, 3),))
    kept_calibration.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept_calibration(tmp_path, CPU, ((3, 3),))
    assert measured == [(3, 3)]


def test_a_folder_that_cannot_be_written_is_said(measured: list[tuple[int, int]], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.warns(UserWarning, match="is not kept, and will be measured again"):
        kept_calibration(tmp_path / "file", CPU, ((3, 3),))
    assert measured == [(3, 3)]


def test_the_machine_is_another_with_other_threads_or_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)  # set by those who try another processor
    before = describe_processor(CPU)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    assert describe_processor(CPU) == f"{before}, ONEDNN_MAX_CPU_ISA=AVX512_CORE"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert "77 threads" in describe_processor(CPU)


def test_processes_that_have_not_met_are_counted_by_their_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="could choose different recipes on different processes"):
        Muon(weights(), orthogonalize="auto", calibration="nowhere")
    assert Muon(weights(), orthogonalize="auto", calibration=MIXED)


def test_a_choice_made_too_early_is_refused_in_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    params = weights()
    muon = Muon(params, orthogonalize="auto", calibration=MIXED)
    muon.guard.steps.make = with_recipes(DefaultSteps(), None)  # as if nothing had been given
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="could choose different recipes on different processes"):
        stepped(muon, params)
    assert all(map(torch.equal, params, weights()))


def test_without_elements_or_data_stock_is_taken() -> None:
    for whole, text in ((torch.empty(0, 5), "0x5"), (torch.empty(7, 5, device="meta"), "5x7")):
        muon = Muon([torch.nn.Parameter(whole)], orthogonalize="auto", calibration=MIXED)
        assert muon.param_groups[0]["orthogonalize"] == f"auto {text}=stock"


@pytest.mark.parametrize(
    "change", [{"orthogonalize": "future"}, {"orthogonalize": "gram", "ns_steps": 6}], ids=str
)
def test_a_state_with_an_unknown_recipe_is_refused_and_changes_nothing(change: dict[str, Any]) -> None:
    muon = Muon(weights())
    state = muon.state_dict()
    state["param_groups"][0] |= change
    with pytest.raises(UsageError):
        muon.load_state_dict(state)
    assert muon.param_groups[0]["orthogonalize"] == "stock"
