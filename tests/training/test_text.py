"""The text and its batches are the same on every machine."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muon_tutorial.errors import TextError
from muon_tutorial.training import text as module
from muon_tutorial.training.text import Text, batch_at, held_out_batches, load_text, share


@pytest.fixture(scope="module")
def library() -> Text:
    return load_text(None, context=128)


def test_the_standard_library_is_a_text_of_a_few_megabytes(library: Text) -> None:
    assert library.size == module.TEXT_LIMIT
    assert len(library.train) + len(library.held_out) == library.size
    assert library.sha256 == load_text(None, context=128).sha256


def test_a_text_is_cut_at_the_limit_then_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TEXT_LIMIT", 1001)
    data = ("é" * 1000).encode()
    (tmp_path / "a.txt").write_bytes(data)
    text = load_text(str(tmp_path / "a.txt"), context=8)
    assert (text.size, text.sha256) == (1001, hashlib.sha256(data[:1001]).hexdigest())


@given(size=st.integers(160, 5000))
def test_held_out_bytes_are_spread_and_never_trained_on(size: int) -> None:
    train, held_out = module._split(torch.arange(size))
    assert sorted([*train.tolist(), *held_out.tolist()]) == list(range(size))
    assert 0 < len(held_out) <= size // 8


def test_a_batch_follows_from_seed_and_step_and_its_targets_are_the_next_bytes(library: Text) -> None:
    taken = ((3, 0), (3, 0), (4, 0), (3, 1))
    one, again, later, other = (batch_at(library, step, 4, 16, seed) for step, seed in taken)
    assert one.inputs.shape == one.targets.shape == (4, 16)
    assert torch.equal(one.inputs[:, 1:], one.targets[:, :-1])
    assert torch.equal(one.inputs, again.inputs)
    assert not torch.equal(one.inputs, later.inputs)
    assert not torch.equal(one.inputs, other.inputs)


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_shares_in_order_are_the_global_batch(library: Text, dp: int) -> None:
    batch = batch_at(library, step=0, batch=8, context=16, seed=0)
    shares = [share(batch, rank, dp) for rank in range(dp)]
    assert torch.equal(torch.cat([each.inputs for each in shares]), batch.inputs)
    assert torch.equal(torch.cat([each.targets for each in shares]), batch.targets)


def test_held_out_batches_are_always_the_same(library: Text) -> None:
    once, again = (held_out_batches(library, batch=4, context=16, count=3) for _ in range(2))
    assert [len(batch.inputs) for batch in once] == [4, 4, 4]
    assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(once, again, strict=True))


@pytest.mark.parametrize("context", [1, 8, 64])
def test_the_shortest_text_allowed_suffices(tmp_path: Path, context: int) -> None:
    needed = module.HELD_OUT_ONE_IN * (context + 2)
    path = tmp_path / "a.txt"
    path.write_bytes(b"a" * needed)
    text = load_text(str(path), context)
    batch_at(text, 0, 4, context, 0)
    held_out_batches(text, 4, context, 4)
    path.write_bytes(b"a" * (needed - 1))
    with pytest.raises(TextError, match=f"needs at least {needed}"):
        load_text(str(path), context)
