"""Damage is found anywhere, because every byte of every file is hashed."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from muon_tutorial import MuonWithAdamW, launch
from muon_tutorial.checkpoint import load_checkpoint, loading, save_checkpoint
from muon_tutorial.errors import CheckpointError
from muon_tutorial.step.parameter_state import local_part

from ..exhaustive import left_out
from .models import Pair, bits, fresh, same, trained


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "a"
    save_checkpoint(folder, *trained(2), extra={"step": 2})
    return folder


@pytest.fixture(scope="module")
def pair() -> Pair:
    return fresh()


def refusal(folder: Path, pair: Pair) -> str:
    """Assert that a load refuses a folder in one line and changes nothing; returns that line."""
    before = bits(*pair)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder, *pair)
    assert same(before, bits(*pair))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def with_one_bit_flipped(data: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(data) * 8)
    flipped = bytearray(data)
    flipped[place // 8] ^= 1 << place % 8
    return bytes(flipped)


def cut_off(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data))]


@pytest.mark.parametrize(
    ("count", "seed", "damage"),
    [
        (100, 0, with_one_bit_flipped),
        (30, 1, cut_off),
        left_out(5000, 0, with_one_bit_flipped),
        left_out(1000, 1, cut_off),
    ],
)
def test_damage_is_found_anywhere(
    saved: Path, pair: Pair, count: int, seed: int, damage: Callable[[bytes, random.Random], bytes]
) -> None:
    """Files are damaged one after another, at a place drawn from the seed. Each refusal names the file."""
    draw, files = random.Random(seed), sorted(saved.iterdir())
    for number in range(count):
        path = files[number % len(files)]
        whole = path.read_bytes()
        try:
            path.write_bytes(damage(whole, draw))
            assert path.name in refusal(saved, pair), (path.name, number)
        finally:
            path.write_bytes(whole)
    load_checkpoint(saved, *fresh())


def test_a_file_more_or_less_is_found(saved: Path, pair: Pair, tmp_path: Path) -> None:
    for name in sorted(path.name for path in saved.iterdir()):
        shutil.copytree(saved, tmp_path / "less")
        (tmp_path / "less" / name).unlink()
        assert name in refusal(tmp_path / "less", pair)
        shutil.rmtree(tmp_path / "less")
    shutil.copytree(saved, tmp_path / "more")
    (tmp_path / "more" / "__1_0.distcp").write_bytes(b"")
    assert "holds __1_0.distcp, which is not part of the checkpoint" in refusal(tmp_path / "more", pair)


def test_a_load_during_a_replacement_is_no_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path / "a", *trained(2))
    real = loading.verify_hashes

    def replacing(*args: Any) -> None:
        real(*args)
        monkeypatch.undo()
        save_checkpoint(tmp_path / "a", *trained(3), existing="replace")

    monkeypatch.setattr(loading, "verify_hashes", replacing)
    pair = fresh()
    assert "No such file" in refusal(tmp_path / "a", pair)
    load_checkpoint(tmp_path / "a", *pair)
    assert same(bits(*pair), bits(*trained(3)))


def test_an_optimizer_that_does_not_take_its_state_changes_nothing(saved: Path) -> None:
    model, both = trained(1)
    before = bits(model, both)

    def refuse(*_: object) -> None:
        raise RuntimeError("a hook of the user's")

    both.adamw.register_load_state_dict_pre_hook(refuse)
    with pytest.raises(CheckpointError, match="RuntimeError: a hook of the user's"):
        load_checkpoint(saved, model, both)
    assert same(before, bits(model, both))
    model.get_parameter("one").grad = model.get_parameter("one").detach().clone()
    both.step()


def refuse_on_one_rank(rank: int, folder: str) -> bool:
    """Rank 1's optimizer refuses its state; then both ranks go on as if nothing had been loaded."""
    pairs = []
    for _ in range(2):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 6))
        fully_shard(model)
        pairs.append((model, MuonWithAdamW.from_model(model, lr=0.1)))

    def train(step: int) -> None:
        for model, both in pairs:
            both.zero_grad()
            model(torch.full((3, 6), float(step))).sum().backward()
            both.step()

    train(1)
    model, both = pairs[0]
    save_checkpoint(folder, model, both)
    train(2)
    hook = both.adamw.register_load_state_dict_pre_hook(lambda _, state: state.clear() if rank else None)
    with pytest.raises(CheckpointError, match="rank 1: KeyError"):
        load_checkpoint(folder, model, both)
    hook.remove()
    train(3)
    each = [[local_part(param.detach()) for param in model.parameters()] for model, _ in pairs]
    return all(map(torch.equal, *each))


def test_ranks_step_on_after_one_refused_its_state(tmp_path: Path) -> None:
    assert launch(refuse_on_one_rank, 2, args=(str(tmp_path / "saved"),), timeout=10) == [True, True]
