"""Tests that a usual run leaves out, because others cover their subjects; ``-m exhaustive`` runs them.

They have the mark ``exhaustive``, often with a comment on what covers their subject in a usual run. If only
some cases of a table are slow, ``left_out`` marks these.
"""

from __future__ import annotations

from typing import Any

import pytest


def left_out(*values: Any, **options: Any) -> Any:
    """A case for ``parametrize`` that a usual run leaves out."""
    return pytest.param(*values, marks=pytest.mark.exhaustive, **options)
