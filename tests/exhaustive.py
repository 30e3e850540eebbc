"""Cases that a usual run leaves out, since others like them are in it: ``-m exhaustive`` runs them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def left_out(*values: Any, **options: Any) -> Any:
    """A case for ``parametrize`` that a usual run leaves out."""
    return pytest.param(*values, marks=pytest.mark.exhaustive, **options)


def every_other(values: Iterable[Any]) -> list[Any]:
    """Cases for ``parametrize``, of which a usual run takes every other one, the first among them."""
    return [
        left_out(*(value if isinstance(value, tuple) else (value,))) if place % 2 else value
        for place, value in enumerate(values)
    ]
