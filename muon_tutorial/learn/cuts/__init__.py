"""What notebook 07 uses: two weights that tp cuts, the buffer that dp cuts, and three matrices in one."""

from __future__ import annotations

from ..lazy_names import names_in

__getattr__, __dir__ = names_in(__name__, "on_ranks qkv exercises pictures")
