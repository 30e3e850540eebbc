"""A machine's file is read as it was written; a one-line error names a bad number in it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from muon_tutorial.errors import UsageError
from muon_tutorial.timing.machine import LARGEST, SHAPED_BURST, Link, Machine, read_machine
from muon_tutorial.timing.models import find_model

ROOT = Path(__file__).resolve().parents[2]
MACHINE = Machine(
    name="some",
    gemm={"float32": ((64.0, 1e9), (256.0, 4e9)), "bfloat16": ((64.0, 2e9),)},
    copy=((1000.0, 1e9), (100_000.0, 1e10)),
    operation=1e-6,
    turn=2e-6,
    inside=Link(1e11, 1e-6),
    between=Link(1e10, 1e-5, shared=True),
    ranks_per_node=4,
    cores=2,
    algorithm="gloo",
    byte=1e-10,
    message=1e-6,
    sources={"inside": "measured"},
)


def refused_in_one_line(kind: type[Exception], act: Callable[[], object]) -> str:
    """Assert that an error of this kind is raised, with one line; returns the line."""
    with pytest.raises(kind) as raised:
        act()
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_machine_survives_its_file(tmp_path: Path) -> None:
    MACHINE.write(tmp_path / "machine.json")
    assert read_machine(tmp_path / "machine.json") == MACHINE


def test_rates_lie_on_a_line_between_sizes_and_stay_beyond() -> None:
    def seconds(side: int) -> float:
        return MACHINE.gemm_seconds(torch.float32, (side, side, side))

    rates = [2 * side**3 / seconds(side) / 1e9 for side in (1, 64, 128, 256, 999)]
    assert rates == pytest.approx([1, 1, 2, 4, 4])
    assert MACHINE.gemm_seconds(torch.float16, (64, 64, 64), 3) == pytest.approx(3 * seconds(64))
    assert MACHINE.gemm_seconds(torch.float32, (0, 64, 64)) == MACHINE.copy_seconds(0) == 0


def test_a_processor_without_bf16_units_is_noted() -> None:
    slow = replace(MACHINE, gemm={**MACHINE.gemm, "bfloat16": ((64.0, 1.0e9),)})
    assert "at 1 GFLOP/s (fp32: 4)" in slow.bf16_note
    assert replace(slow, gemm=dict.fromkeys(slow.gemm, ((64.0, 1e9),))).bf16_note == ""


def test_a_group_on_one_node_stays_inside_and_a_ring_leaves_a_node_over_all_its_cards() -> None:
    ring = replace(MACHINE, algorithm="ring", between=Link(1e10, 1e-5))
    assert MACHINE.link((0, 3), "all_reduce") is MACHINE.inside
    assert MACHINE.link((3, 4), "all_reduce") is MACHINE.between
    assert ring.link(range(8), "all_reduce").bandwidth == 4e10
    assert ring.link((0, 4, 8), "all_reduce").bandwidth == 1e10
    assert ring.link(range(8), "all_to_all").bandwidth == 1e10
    assert replace(ring, inside=Link(3e10, 1e-6)).link(range(8), "all_gather").bandwidth == 3e10


WRONG: dict[str, tuple[dict[str, Any] | str, str]] = {
    "no JSON": ("{", "is not JSON"),
    "a list": ("[1]", "a JSON object of numbers"),
    "missing": ({"inside": None}, "inside is missing"),
    "negative": ({"byte": -1.0}, "byte is a number and not below zero; got -1.0"),
    "no bandwidth": ({"inside": {"bandwidth": 0, "latency": 0}}, "inside.bandwidth is a number above zero"),
    "half a link": ({"inside": {"bandwidth": 1}}, "inside.latency is missing"),
    "a word": ({"turn": "fast"}, "turn is a number and not below zero; got 'fast'"),
    "infinite": ({"message": float("inf")}, "message is a number and not below zero; got inf"),
    "no rates": ({"copy": []}, "copy holds no rate"),
    "no pairs": ({"copy": [5]}, "copy is a list of pairs [size, rate]"),
    "a letter for a size": ({"copy": [["s", 1]]}, "copy[0][0] is a number above zero; got 's'"),
    "a list for a link": ({"inside": [1]}, "inside must be a JSON object of numbers by name"),
    "unsorted": ({"copy": [[5, 1], [4, 1]]}, "copy is sorted by size"),
    "no fp32": ({"gemm": {"bfloat16": [[64, 1e9]]}}, "gemm.float32 is missing"),
    "no bf16": ({"gemm": {"float32": [[64, 1e9]]}}, "gemm.bfloat16 is missing"),
    "half a rank": ({"ranks_per_node": 2.5}, "ranks_per_node is a whole number; got 2.5"),
    "another algorithm": ({"algorithm": "Gloo"}, "algorithm is 'ring' or 'gloo'; got 'Gloo'"),
    "a word for a flag": (
        {"inside": {"bandwidth": 1, "latency": 0, "shared": "false"}},
        "inside.shared is true or false; got 'false'",
    ),
    "next to nothing": (
        {"inside": {"bandwidth": 1e-310, "latency": 0}},
        "inside.bandwidth lies between 1e-06 and 1e+24 on any machine; got 1e-310",
    ),
    "too large to be a float": ({"memory": 10**400}, "memory lies between 1e-06 and 1e+24 on any machine"),
    "unknown": ({"colour": "red"}, "colour is unknown; known are name, gemm"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_bad_number_is_named_on_one_line(wrong: str, tmp_path: Path) -> None:
    change, says = WRONG[wrong]
    MACHINE.write(path := tmp_path / "machine.json")
    path.write_text(change if isinstance(change, str) else json.dumps(json.loads(path.read_text()) | change))
    assert says in refused_in_one_line(UsageError, lambda: read_machine(path))


def test_the_limited_loopbacks_burst_is_that_of_its_script() -> None:
    script = (ROOT / "scripts" / "shaped.sh").read_text(encoding="utf-8")
    found = re.search(r"burst (\d+)kb ", script)
    assert found is not None
    assert 1024 * int(found[1]) == SHAPED_BURST


@pytest.mark.parametrize("read", [read_machine, lambda path: find_model(str(path))], ids=["machine", "model"])
def test_only_plain_files_of_a_sane_size_are_read(read: Any, tmp_path: Path) -> None:
    """Earlier, the reader waited forever for a pipe, and a device was read until memory ran out."""
    os.mkfifo(tmp_path / "pipe.json")
    with open(tmp_path / "large.json", "wb") as file:
        file.truncate(LARGEST + 1)
    refused = {tmp_path / "pipe.json": "not a plain file", tmp_path / "large.json": "larger than 64,000,000"}
    refused |= {Path("/dev/full"): "not a plain file", Path("/dev/zero"): "not a plain"}
    refused |= {tmp_path / "none.json": "cannot be read: No such file"}
    for path, said in refused.items():
        assert said in refused_in_one_line(UsageError, partial(read, path))
