"""The reader's own optimizer: answers stored as source in my_muon.py, and the reference for the rest.

reference.py is a complete my_muon.py. blocks handles the text of such files; keep handles the reader's own
file; on_ranks tries a file; training and finale train with it.
"""

from __future__ import annotations

from ..lazy_names import names_in

__getattr__, __dir__ = names_in(__name__, "keep", "blocks", "on_ranks", "finale")
