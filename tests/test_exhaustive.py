"""The list of tests that a usual run leaves out names existing tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from .exhaustive import LEFT_OUT, is_left_out

ROWS = [(path, name) for path, names in LEFT_OUT.items() for name in names]


@pytest.mark.parametrize(("path", "name"), ROWS)
def test_what_is_left_out_is_there(path: str, name: str) -> None:
    source = (Path(__file__).parent / path).read_text(encoding="utf-8")
    assert f"\ndef {name.partition('[')[0]}(" in source
    assert is_left_out(f"tests/{path}::{name}")
    assert not is_left_out(f"tests/{path}::{name.partition('[')[0]}[of another kind]") or "[" not in name


def test_all_cases_of_a_test_are_left_out_with_it() -> None:
    file = "tests/evidence/test_gloo_bytes.py"
    assert is_left_out(f"{file}::test_interface_counters_agree_within_two_percent[2]")
    assert not is_left_out(f"{file}::test_gloo_sends_what_the_formula_says_to_the_byte[3]")
