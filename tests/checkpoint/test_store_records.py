"""What ranks tell each other arrives as it was, and nothing that stands in the store can run code."""

from __future__ import annotations

import json
import pickle
import zlib
from pathlib import Path

import pytest
import torch
from torch import Size

from muon_tutorial.checkpoint.manifest import SavedFile
from muon_tutorial.checkpoint.pieces_on_disk import PieceWriter, TensorInPieces
from muon_tutorial.checkpoint.store_records import pack, unpack
from muon_tutorial.errors import CheckpointError


def test_records_arrive_as_they_were() -> None:
    entries = {"a": TensorInPieces((4, 3), {(0, 0): torch.ones(2, 3)}, torch.bfloat16, torch.device("cpu"))}
    plan = PieceWriter(entries, "id").plan(True)
    for record in (
        plan,
        PieceWriter({}, "id").divide([plan])[0],
        SavedFile(3, "ab"),
        {(0, 1): [Path("a"), b"\0\xff", {"x"}, None, True, 0.1, float("inf")], "b": Size((2,))},
        torch.float16,
    ):
        assert unpack(pack(record)) == record


class Planted:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit('executed')",)


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Planted()),
        zlib.compress(pickle.dumps(Planted())),
        zlib.compress(b'{"Popen": {"args": "true"}}'),
        zlib.compress(b'{"torch": "save"}'),
        zlib.compress(json.dumps({"SavedFile": {"size": 1}}).encode()),
        zlib.compress(b"[" * 10**6),
        zlib.compress(b"{}"),
        zlib.compress(bytes(1000))[:-8],
    ],
)
def test_what_no_rank_wrote_is_one_error(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="the ranks' store holds what no rank wrote"):
        unpack(data)


def test_what_is_not_read_is_not_written() -> None:
    with pytest.raises(CheckpointError, match="a Planted is nothing that ranks tell each other"):
        pack([Planted()])
