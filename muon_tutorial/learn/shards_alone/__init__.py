"""What notebook 08 uses: a gradient cut in shards, alone and gathered, its heat maps and exercises."""

from __future__ import annotations

from ..lazy_names import names_in

__getattr__, __dir__ = names_in(__name__, "cuts on_ranks exercises directions pictures")
