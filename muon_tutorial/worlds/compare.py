"""Ranks compare their plans, as lines of text, once before they use them; a difference raises an error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

from ..errors import PlanMismatchError


def check_lines(found: Mapping[int, Sequence[str]]) -> None:
    """Compare descriptions, line by line.

    Raises:
        PlanMismatchError: it shows the first line that differs, and which ranks have which version of it.
    """
    for row in zip_longest(*found.values(), fillvalue="<end of plan>"):
        if len(set(row)) > 1:
            ranks = list(found)
            said = {
                line: [ranks[i] for i, other in enumerate(row) if other == line]
                for line in dict.fromkeys(row)
            }
            detail = "\n".join(f"  rank {', '.join(map(str, who))}: {line}" for line, who in said.items())
            raise PlanMismatchError(
                f"ranks made different plans; the first difference:\n{detail}\n"
                "give every rank the same parameters, in the same order, with the same settings"
            )
