"""Checkpoints by step: the newest is found, the newest few are kept, and one may be saved in a thread."""

from __future__ import annotations

import copy
import errno
import os
import random
from concurrent.futures import Future
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from muon_tutorial import MuonWithAdamW, launch
from muon_tutorial.checkpoint import CheckpointManager, folders, load_checkpoint, manager
from muon_tutorial.checkpoint.compare_ranks import SaveSummary, TensorOutline
from muon_tutorial.checkpoint.piece_files import divide
from muon_tutorial.errors import CheckpointError, UsageError

from ..configs.setups import error_of
from .models import Pair, assert_same_bits, fresh, trained
from .test_integrity import with_one_bit_flipped


def flip_a_bit(folder: Path) -> None:
    file = next(folder.glob("*.distcp"))
    file.write_bytes(with_one_bit_flipped(file.read_bytes(), random.Random(0)))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_are_kept_and_the_last_is_found(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "run", keep=2)
    assert manager.latest_step() is None
    pairs: dict[int, Pair] = {}
    for step in (10, 20, 30):
        pairs[step] = trained(steps=step // 10)
        manager.save(step, *pairs[step], extra={"step": step})
        assert manager.latest_step() == step
    assert names(tmp_path / "run") == ["latest", "step-00000020", "step-00000030"]
    asked: list[tuple[int | None, int]] = [(None, 30), (20, 20)]
    for which, wanted in asked:
        model, both = fresh()
        assert CheckpointManager(tmp_path / "run").load(model, both, step=which) == {"step": wanted}
        assert_same_bits(model, pairs[wanted][0])


def test_a_run_that_begins_again_replaces_its_steps_and_spares_later_ones(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep=2)
    for step in (10, 20, 30):
        manager.save(step, *trained(1))
    again = trained(2)
    manager.save(20, *again)
    assert manager.latest_step() == 20
    assert names(tmp_path) == ["latest", "step-00000020", "step-00000030"]
    model, both = fresh()
    manager.load(model, both)
    assert_same_bits(model, again[0])
    manager.save(30, *again)
    assert manager.latest_step() == 30


def test_abandoned_checkpoints_neither_count_nor_serve_before_the_runs_own(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        CheckpointManager(tmp_path, keep=3).save(step, *trained(1))
    for step in (15, 25):  # resumed from step 10
        CheckpointManager(tmp_path, keep=2).save(step, *trained(2), extra={"step": step})
    assert names(tmp_path) == ["latest", "step-00000015", "step-00000025", "step-00000030"]
    flip_a_bit(tmp_path / "step-00000025")
    with pytest.warns(UserWarning, match="step-00000025"):
        assert CheckpointManager(tmp_path).load(*fresh()) == {"step": 15}
    resumed = CheckpointManager(tmp_path, keep=2)
    resumed.load(*fresh(), step=15)
    resumed.save(40, *trained(2))  # beyond all abandoned steps
    assert names(tmp_path) == ["latest", "step-00000015", "step-00000040"]


@pytest.mark.parametrize(
    "pointer", [None, "a pipe", b"step-00000007\n", b"\xff", b"step-00000020", b"../step-00000010\n"]
)
def test_without_a_pointer_the_newest_whole_one_is_found(tmp_path: Path, pointer: bytes | str | None) -> None:
    manager = CheckpointManager(tmp_path)
    for step in (10, 20):
        manager.save(step, *trained(1))
    (tmp_path / "step-00000030").mkdir()
    (tmp_path / "latest").unlink()
    if isinstance(pointer, bytes):
        (tmp_path / "latest").write_bytes(pointer)
    elif pointer:
        os.mkfifo(tmp_path / "latest")
    assert manager.latest_step() == 20


def test_wrong_arguments_and_missing_checkpoints_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="keep is the number of checkpoints to keep, at least 1, not 0"):
        CheckpointManager(tmp_path, keep=0)
    manager = CheckpointManager(tmp_path)
    with pytest.raises(UsageError, match="a step is a whole number from 0 on, not -1"):
        manager.save(-1, *trained(0))
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        manager.load(*fresh())
    with pytest.raises(CheckpointError, match="there is no checkpoint folder"):
        manager.load(*fresh(), step=5)


def test_a_thread_saves_the_state_at_the_time_of_the_call(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    model, both = trained(2)
    before, _ = trained(2)
    pending = manager.save(2, model, both, extra={"noise": torch.ones(3)}, wait=False)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(9.0)
    pending.wait()
    assert pending.done
    other, its = fresh()
    assert torch.equal(manager.load(other, its)["noise"], torch.ones(3))
    assert_same_bits(other, before)
    load_checkpoint(tmp_path / "step-00000002", *fresh())


def test_a_failure_in_the_thread_is_raised_once_by_the_next_call(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, *trained(1))
    with folders.locked(tmp_path / "step-00000002"):
        pending = manager.save(2, *trained(2), wait=False)
        with pytest.raises(CheckpointError, match=r"is saving to .*step-00000002"):
            manager.save(3, *trained(2))
    assert manager.latest_step() == 1
    pending.wait()
    manager.save(3, *trained(2))
    assert manager.latest_step() == 3


def test_an_extra_that_cannot_be_saved_is_told_by_the_thread_too(tmp_path: Path) -> None:
    pending = CheckpointManager(tmp_path).save(1, *trained(1), extra={"act": print}, wait=False)
    with pytest.raises(CheckpointError, match=r"extra\['act'\] is a builtin_function_or_method"):
        pending.wait()
    assert not any(tmp_path.iterdir())


def test_a_save_whose_wait_was_interrupted_is_waited_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, waits = CheckpointManager(tmp_path), Mock(side_effect=[KeyboardInterrupt, None])
    saved = Future[None]()
    kept._pending = manager.PendingSave(saved)
    monkeypatch.setattr(manager, "wait", waits)
    with pytest.raises(KeyboardInterrupt):
        kept.wait()
    saved.set_result(None)
    kept.wait()
    kept.wait()
    assert waits.call_count == 2


def in_a_run_of_fsdp2(rank: int, folder: str) -> tuple[str, str]:
    """Save after a forward pass without a backward one, and then with a DTensor in ``extra``."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 4))
    fully_shard(model)
    both = MuonWithAdamW.from_model(model, lr=0.1)
    model(torch.ones(2, 6)).sum().backward()
    both.step()
    with torch.no_grad():
        model(torch.ones(2, 6))
    kept = CheckpointManager(folder)
    kept.save(1, model, both)
    return error_of(lambda: kept.save(2, model, both, extra={"ema": [*model.parameters()]}))


def test_fsdp2_saves_after_an_evaluation_and_no_piece_in_extra(tmp_path: Path) -> None:
    for kind, said in launch(in_a_run_of_fsdp2, 2, args=(str(tmp_path),)):
        assert kind == "CheckpointError"
        assert "extra['ema'][0] is a DTensor, of which only rank 0's piece would be saved" in said
    assert CheckpointManager(tmp_path).latest_step() == 1


def test_one_rank_writes_all_buffers() -> None:
    outlines = {f"model.{i}": TensorOutline((4,), "torch.float32", {(0,): ((4,), 0)}) for i in range(6)}
    summaries = [SaveSummary("", {}, outlines, {"model.0", "model.3", "model.4"})] * 3
    shares = [{key for key, _ in share} for share in divide(summaries)]
    assert shares[0] >= {"model.0", "model.3", "model.4"}
    assert set.union(*shares) == {*outlines}


@pytest.mark.parametrize("damage", ["a bit", "a file", "the manifest"])
def test_an_older_checkpoint_is_loaded_where_the_newest_is_damaged(tmp_path: Path, damage: str) -> None:
    manager, pairs = CheckpointManager(tmp_path), {step: trained(step) for step in (1, 2)}
    for step, pair in pairs.items():
        manager.save(step, *pair, extra={"step": step})
    newest = tmp_path / "step-00000002"
    if damage == "a bit":
        flip_a_bit(newest)
    else:
        (newest / ("extra.pt" if damage == "a file" else "manifest.json")).unlink()
    model, both = fresh()
    with pytest.warns(UserWarning, match="step-00000002.*; trying an older checkpoint"):
        assert manager.load(model, both) == {"step": 1}
    assert_same_bits(model, pairs[1][0])
    said: list[str] = []
    assert manager.whole_step(said.append) == 1
    assert len(said) == 1
    assert "renamed to damaged-step-00000002-" in said[0]
    manager.save(2, *pairs[2])
    assert manager.latest_step() == manager.whole_step(said.append) == 2
    assert len(list(tmp_path.glob("damaged-step-00000002-*"))) == 1


def test_if_all_checkpoints_are_damaged_the_error_names_the_oldest(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    for step in (1, 2):
        manager.save(step, *trained(step))
        flip_a_bit(tmp_path / f"step-0000000{step}")
    model, both = fresh()
    before = copy.deepcopy(model)
    with (
        pytest.warns(UserWarning, match=r"step-00000002/.* is damaged"),
        pytest.raises(CheckpointError, match=r"step-00000001/.* is damaged"),
    ):
        manager.load(model, both)
    assert_same_bits(model, before)


def test_a_folder_that_is_no_checkpoint_is_put_aside_for_one(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    (tmp_path / "step-00000002").mkdir()
    (tmp_path / "step-00000002" / "mine").touch()
    manager.save(2, *trained(2))
    assert manager.latest_step() == 2
    assert [path.name for path in tmp_path.glob("damaged-*/*")] == ["mine"]


def test_a_run_notices_that_another_process_saves_to_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, pair = CheckpointManager(tmp_path), trained(1)
    one.save(10, *pair)
    CheckpointManager(tmp_path).save(20, *pair)  # another manager in this process
    one.save(30, *pair)
    with monkeypatch.context() as patch:
        patch.setattr(manager, "_process", lambda: "another")
        CheckpointManager(tmp_path).save(30, *pair, extra={"run": "another"})
    with pytest.raises(CheckpointError, match=r"another process has saved to .* since this run's last save"):
        one.save(40, *pair)
    assert one.load(*fresh()) == {"run": "another"}
    one.save(40, *pair)  # it goes on from what the other has saved


def test_two_living_managers_of_one_folder_may_save_one_optimizer_but_not_two(tmp_path: Path) -> None:
    one, other = CheckpointManager(tmp_path), CheckpointManager(tmp_path / ".." / tmp_path.name)
    pair, its = trained(1), trained(2)
    for step, kept in enumerate([one, other, one]):
        kept.save(step, *pair)
    other = CheckpointManager(tmp_path)
    other.save(4, *its)
    with pytest.raises(CheckpointError, match="another CheckpointManager has saved another optimizer to"):
        one.save(5, *pair)
    del its, other  # a run that has ended
    one.save(5, *pair)


def test_a_checkpoint_that_a_dead_saver_renamed_is_found(tmp_path: Path) -> None:
    """Where the file system cannot exchange two folders, a kill may leave the old one under this name."""
    kept, pair = CheckpointManager(tmp_path, keep=1), trained(1)
    kept.save(10, *pair, extra={"step": 10})
    (tmp_path / "step-00000010").rename(tmp_path / f".step-00000010.old-{'a' * 32}")
    (tmp_path / f".step-00000010.draft-{'a' * 32}").mkdir()
    found = CheckpointManager(tmp_path, keep=1)
    assert found.latest_step() == found.whole_step(print) == 10
    assert found.load(*fresh()) == {"step": 10}
    found.save(20, *pair)
    assert names(tmp_path) == ["latest", "step-00000020"]


def test_a_checkpoint_counts_without_its_pointer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager, pair = CheckpointManager(tmp_path), trained(1)
    monkeypatch.setattr(folders, "replace_file", Mock(side_effect=OSError(errno.EIO, "I/O error", "latest")))
    with pytest.warns(UserWarning, match="step-00000001 is saved, but: I/O error: latest"):
        manager.save(1, *pair)
    assert manager.latest_step() == 1
