"""Recordings: small, drawn without a process, the same picture for the same data, at every position."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest

from muon_tutorial.learn import the_mirror
from muon_tutorial.learn.the_mirror import replay
from muon_tutorial.learn.the_mirror.recording import Tile

GRIDS = [(3, 2), (1, 4), (4, 1)]


@pytest.fixture(params=GRIDS, ids=str)
def recording(request: pytest.FixtureRequest) -> replay.Recording:
    dp, tp = request.param
    return the_mirror.record_here(dp, tp, 0)


def test_what_is_written_is_read_again(recording: replay.Recording) -> None:
    text = replay.dumps(recording)
    assert replay.dumps(replay.loads(text)) == text
    assert len(text) < 200_000


def cells(tiles: Iterable[Tile]) -> list[tuple[int, int]]:
    """All entries that some tiles cover."""
    return [
        cell
        for _, row, column, rows, columns in tiles
        for cell in itertools.product(range(row, row + rows), range(column, column + columns))
    ]


def test_the_way_back_passes_the_boxes_of_the_way_out_and_ranges_cover_once(
    recording: replay.Recording,
) -> None:
    for name, (rows, columns) in recording.shapes.items():
        for diary in recording.diaries:
            held = [set(cells(moment)) for moment in diary.tiles[name]]
            assert all(held[moment] == held[replay.LAST - moment] for moment in (0, 1, 3))
            assert held[5] <= held[2]  # entries that were gathered needlessly do not come back
            assert all(tile[0] == diary.rank for tile in diary.tiles[name][6])
        ranges = [tile for diary in recording.diaries for tile in diary.tiles[name][1]]
        assert sorted(cells(ranges)) == list(itertools.product(range(rows), range(columns)))
