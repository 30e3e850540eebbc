"""What notebook 00 uses: a matrix on real ranks, the pictures of its holders, and the guess about them."""

from __future__ import annotations

from ..lazy_names import names_in

__getattr__, __dir__ = names_in(__name__, "on_ranks", "pictures", "exercises")
