"""Records between ranks arrive unchanged, and nothing in the store can run code."""

from __future__ import annotations

import pickle
import zlib

import pytest

from muon_tutorial.checkpoint.compare_ranks import TensorOutline
from muon_tutorial.checkpoint.plain_data import pack, unpack
from muon_tutorial.errors import CheckpointError


def test_records_arrive_as_they_were() -> None:
    for record in (
        {(0, 1): ["a", {"x"}, None, True, 0.1, float("inf")], "b": (2,)},
        TensorOutline((4, 3), "torch.float32", {(0, 0): ((2, 3), 7)}),
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
        zlib.compress(b'{"tuple": 1}'),
        zlib.compress(b"[" * 10**6),
        zlib.compress(b"{}"),
        zlib.compress(bytes(1000))[:-8],
    ],
)
def test_a_value_that_no_rank_wrote_is_one_error(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="the ranks' store holds a value that no rank wrote"):
        unpack(data)


def test_objects_that_no_rank_could_read_are_not_written() -> None:
    with pytest.raises(CheckpointError, match="is a Planted, which a checkpoint cannot hold"):
        pack([Planted()])
