"""The reader's own optimizer: answers kept as source in my_muon.py, and the reference that completes it.

reference.py is a whole my_muon.py; blocks deals in its text, keep in the reader's file; on_ranks tries it,
training and finale train with it.
"""

from __future__ import annotations

from ..lazy_names import names_in

__getattr__, __dir__ = names_in(__name__, "keep", "blocks", "on_ranks", "finale")
