"""What notebook 14 uses: a step on 32 to 16,384 ranks, owners of matrices, links, activations, experts."""

from __future__ import annotations

from .. import names_in

__getattr__, __dir__ = names_in(__name__, "scaling exercises on_ranks pictures")
