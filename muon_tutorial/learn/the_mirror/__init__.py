"""What notebook 09 uses: matrices of a small GPT, the package's phases with notes, pictures and exercises."""

from __future__ import annotations

from .. import names_in

__getattr__, __dir__ = names_in(__name__, "on_ranks compare exercises recording replay network hops")
