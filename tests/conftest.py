"""What holds for every test."""

from __future__ import annotations

import os

import pytest

# torch names a rank whose request differs in shape, dtype or order, instead of summing whatever came.
os.environ.setdefault("TORCH_DISTRIBUTED_DEBUG", "DETAIL")

collect_ignore = ["launching/torchrun_rank.py"]  # a program, not a module

LONGEST = ("notebooks/test_runs.py", "hosts/test_recipes.py", "learn/test_every_widget.py", "test_cli.py")
"""Files of minutes. One process runs a whole file: at the end, the others would wait for it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files."""
    items.sort(key=lambda item: not item.path.as_posix().endswith(LONGEST))
