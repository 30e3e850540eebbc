"""State that a checkpoint cannot hold, or that a load cannot place, gives an error. Other files stay."""

from __future__ import annotations

import math
import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from muon_tutorial import Muon, MuonWithAdamW, launch
from muon_tutorial.checkpoint import CheckpointManager, load_checkpoint, loading, save_checkpoint
from muon_tutorial.checkpoint.compare_ranks import SaveSummary, check_alike
from muon_tutorial.checkpoint.plain_data import checksum
from muon_tutorial.errors import CheckpointError, UsageError

from .models import Pair, assert_same_bits, bits, fresh, same, trained


class Counting(nn.Linear):
    """A module with a number that is in no parameter."""

    def get_extra_state(self) -> Any:
        return 7


class WithAverages(torch.optim.AdamW):
    """An AdamW that keeps an average of each parameter."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].setdefault("ema", param.detach().clone())
        return loss


def test_two_tensors_of_one_name_are_refused_by_save_and_load(tmp_path: Path) -> None:
    model, both = trained(1)
    with pytest.raises(CheckpointError, match="two tensors of the model would both be saved as w"):
        save_checkpoint(tmp_path / "saved", model, both, rename=lambda name: "w")
    save_checkpoint(tmp_path / "saved", model, both)
    with pytest.raises(CheckpointError, match="rename= must give them different names"):
        load_checkpoint(tmp_path / "saved", model, both, rename=lambda name: "one")


def test_wrong_moments_of_adamw_are_refused(tmp_path: Path) -> None:
    """``test_muon_with_adamw`` tests other wrong values of AdamW's moments."""
    model, both = trained(1)
    both.state[model.get_parameter("bias")]["exp_avg"].fill_(math.nan)
    save_checkpoint(tmp_path / "saved", model, both)
    model, both = trained(2)
    before = bits(model, both)
    with pytest.raises(UsageError, match="AdamW's exp_avg of bias must be finite"):
        load_checkpoint(tmp_path / "saved", model, both)
    with pytest.raises(UsageError, match="AdamW's exp_avg of bias must be finite"):
        both.state = {model.get_parameter("bias"): {"exp_avg": torch.tensor([0.0, math.nan])}}
    assert same(before, bits(model, both))


def test_a_modules_own_state_is_warned_of(tmp_path: Path) -> None:
    model = nn.Sequential(Counting(3, 4), nn.Linear(4, 3))
    with pytest.warns(UserWarning, match=r"the result of get_extra_state\(\) of 0 is not saved: pass it as"):
        save_checkpoint(tmp_path / "saved", model, MuonWithAdamW.from_model(model, lr=0.1))


def test_parameters_that_another_optimizer_may_step_are_warned_of(tmp_path: Path) -> None:
    model, both = trained(1)
    with pytest.warns(UserWarning, match="does not step bias; if another optimizer does, its state is not"):
        save_checkpoint(tmp_path / "muon", model, both.muon)
    model.get_parameter("bias").requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_checkpoint(tmp_path / "frozen", model, both.muon)


@pytest.mark.parametrize("place", ["between two matrices", "in AdamW"])
def test_what_was_half_stepped_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """A script may save at ``KeyboardInterrupt``, which may come in the middle of a step."""
    model, both = trained(1)
    with monkeypatch.context() as patch:
        if place == "in AdamW":
            patch.setattr(both.adamw, "step", Mock(side_effect=KeyboardInterrupt))
        else:
            patch.setattr(torch.Tensor, "lerp_", Mock(side_effect=[torch.zeros(4, 3), KeyboardInterrupt]))
        with pytest.raises(KeyboardInterrupt):
            both.step()
    both.zero_grad()
    save_checkpoint(tmp_path / "whole", *trained(1))
    with monkeypatch.context() as patch:
        patch.setattr(both, "load_state_dict", Mock(side_effect=RuntimeError))
        with pytest.raises((RuntimeError, CheckpointError)):  # refused, so nothing has changed
            load_checkpoint(tmp_path / "whole", model, both)
    with pytest.raises(CheckpointError, match=r"step\(\) was interrupted halfway"):
        save_checkpoint(tmp_path / "saved", model, both)
    both.step()
    save_checkpoint(tmp_path / "saved", model, both)


def test_an_extra_of_another_rank_that_is_not_saved_is_warned_of() -> None:
    whole = torch.arange(4.0)
    values: tuple[Any, ...] = (
        {"at": 0, "by": whole[:2].clone()},
        {},
        {"at": 9},
        {"by": nn.Parameter(whole[:2]), "at": 0},
    )
    ranks = [SaveSummary("", {}, {}, set(), checksum(extra)) for extra in values]
    with pytest.warns(UserWarning, match="extra is not the same on ranks 0, 2; only rank 0's is saved"):
        check_alike(ranks)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_alike([ranks[0], ranks[1], ranks[3]])


def test_a_buffer_that_a_hook_renames_or_a_module_shares_is_saved(tmp_path: Path) -> None:
    def network(value: float) -> Pair:
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        model.register_buffer("passing", torch.tensor(value), persistent=False)
        both_have = torch.tensor(value)
        model[1].register_buffer("kept", torch.tensor(value))
        for at, name, persistent in ((model, "shared", False), (model[0], "own", True)):
            at.register_buffer(name, both_have, persistent)
        model.register_state_dict_post_hook(lambda _, state, *__: state.update(other=state.pop("1.kept")))
        return model, MuonWithAdamW.from_model(model, lr=0.1)

    (one, saver), (other, loader) = network(5.0), network(0.0)
    save_checkpoint(tmp_path / "saved", one, saver)
    load_checkpoint(tmp_path / "saved", other, loader)
    found = dict(other.named_buffers())
    assert [found[name].item() for name in ("1.kept", "shared", "passing")] == [5.0, 5.0, 0.0]


def test_state_that_is_not_adamws_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(3, 4)
    averaging = WithAverages(model.parameters())
    model(torch.ones(3)).sum().backward()
    averaging.step()
    with pytest.raises(CheckpointError, match="the optimizer's state of weight has 'ema'"):
        save_checkpoint(tmp_path / "saved", model, averaging)


def test_saved_state_that_no_optimizer_steps_here_is_warned_of(tmp_path: Path) -> None:
    model, both = trained(1)
    save_checkpoint(tmp_path / "saved", model, both)
    params = dict(model.named_parameters())
    with pytest.warns(UserWarning, match="holds optimizer state of two, which this optimizer does not step"):
        load_checkpoint(tmp_path / "saved", model, Muon([("one", params["one"])]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_checkpoint(tmp_path / "saved", model, both.muon)  # a separate load may bring AdamW's state


def test_a_tensor_that_cannot_be_filled_is_refused_before_anything_changes(tmp_path: Path) -> None:
    model, both = trained(1)
    model.register_buffer("ones", torch.ones(5))
    save_checkpoint(tmp_path / "saved", model, both)
    other, loader = fresh()
    other.register_buffer("ones", torch.zeros(1).expand(5))
    before = bits(other, loader)
    with pytest.raises(CheckpointError, match=r"several elements of .* share memory"):
        load_checkpoint(tmp_path / "saved", other, loader)
    assert same(bits(other, loader), before)


def test_no_whole_checkpoint_goes_in_favour_of_an_incomplete_one(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep=2)
    pair = trained(1)
    manager.save(10, *pair)
    for step in (11, 12):
        (tmp_path / f"step-{step:08d}").mkdir()  # as if a user copied a checkpoint here
    manager.save(20, *pair)
    manager.save(30, *pair)
    names = [f"step-{step:08d}" for step in (11, 12, 20, 30)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", *names]


def test_files_that_only_look_like_drafts_stay(tmp_path: Path) -> None:
    (tmp_path / ".thesis.draft-2").mkdir()
    (tmp_path / ".notes.old-1").touch()
    CheckpointManager(tmp_path).save(1, *trained(1))
    assert {".thesis.draft-2", ".notes.old-1"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("there", ["older", "empty", "nothing"])
def test_a_save_through_a_link_goes_where_the_link_leads(tmp_path: Path, there: str) -> None:
    place, link = tmp_path / "disk" / "saved", tmp_path / "link"
    place.parent.mkdir()
    if there == "older":
        save_checkpoint(place, *trained(1))
    elif there == "empty":
        place.mkdir()
    link.symlink_to(place)
    newer = trained(2)
    save_checkpoint(link, *newer, existing="replace")
    assert link.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["disk", "link"]
    for path in (link, place):
        model, both = fresh()
        load_checkpoint(path, model, both)
        assert_same_bits(model, newer[0])


def test_bad_arguments_are_one_clear_line(tmp_path: Path) -> None:
    pair = trained(1)
    with pytest.raises(CheckpointError, match="/ cannot be a checkpoint"):
        save_checkpoint("/", *pair)
    with pytest.raises(CheckpointError, match=r"extra must be a dict .* not \[1, 2\]"):
        save_checkpoint(tmp_path / "saved", *pair, extra=[1, 2])  # type: ignore[arg-type]
    manager = CheckpointManager(tmp_path / "file" / "run")
    (tmp_path / "file").touch()
    assert manager.latest_step() is None


def test_an_unreadable_folder_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(_: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", denied)
    with pytest.raises(CheckpointError, match="cannot be read: Permission denied"):
        CheckpointManager(tmp_path).latest_step()


def stage(rank: int, folder: Path) -> str:
    """The error of a rank that saves its own stage; the stages have buffers of the same name."""
    model = nn.Sequential()
    model.add_module(f"layer{rank}", nn.Linear(3, 3))
    model.register_buffer("mean", torch.full((2,), float(rank)))
    try:
        save_checkpoint(folder / "saved", model, MuonWithAdamW.from_model(model, lr=0.1))
    except CheckpointError as error:
        return str(error)
    return ""


def test_buffers_of_one_name_on_stages_are_refused(tmp_path: Path) -> None:
    for heard in launch(stage, 2, args=(tmp_path,)):
        assert "ranks 0 and 1 both have a buffer model.mean, but no common parameter" in heard


def test_the_momentum_saved_before_the_first_step_has_the_gradients_dtype(tmp_path: Path) -> None:
    def network() -> tuple[nn.Module, Muon]:
        model = nn.Linear(4, 3, bias=False, dtype=torch.bfloat16)
        model.weight.grad_dtype = torch.float32
        return model, Muon([("weight", model.weight)])

    (one, saver), (other, loader) = network(), network()
    save_checkpoint(tmp_path / "saved", one, saver)
    load_checkpoint(tmp_path / "saved", other, loader)
    for model, muon in ((one, saver), (other, loader)):
        weight = next(model.parameters())
        weight.grad = torch.arange(12.0).view(3, 4) / 7
        muon.step()
    assert torch.equal(next(one.parameters()), next(other.parameters()))
    assert all(entry["momentum_buffer"].dtype == torch.float32 for entry in loader.state.values())


class Cut(dict):
    """A dict whose iteration fails after the first entry."""

    def items(self) -> Any:
        yield next(iter(super().items()))
        raise self["error"]


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("the model", OSError(5, "planted")),
        ("the model", KeyboardInterrupt("planted")),
        ("the optimizer", KeyboardInterrupt("planted")),  # for its own errors, see ``test_integrity``
    ],
)
def test_what_was_half_loaded_is_not_stepped_until_a_load_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, error: BaseException
) -> None:
    save_checkpoint(tmp_path / "a", *trained(2))
    (model, both), take = fresh(), loading._take_over

    def fail(meeting: Any, optimizer: Any, to: Any) -> None:
        hook = both.adamw.register_load_state_dict_pre_hook(Mock(side_effect=error))
        if where == "the model":
            hook.remove()
            to = replace(to, model=Cut({**to.model, "error": error}))
        try:
            take(meeting, optimizer, to)
        finally:
            hook.remove()

    with monkeypatch.context() as patched:
        patched.setattr(loading, "_take_over", fail)
        with pytest.raises(type(error), match="planted"):
            load_checkpoint(tmp_path / "a", model, both)
    for optimizer in (both, both.muon, both.adamw):
        with pytest.raises(CheckpointError, match="load again before stepping"):
            optimizer.step()
    load_checkpoint(tmp_path / "a", model, both)
    for optimizer in (both, both.muon, both.adamw):
        optimizer.step()
