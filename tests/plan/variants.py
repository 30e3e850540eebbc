"""All variants of plans. This module imports nothing slow, because ranks import it."""

from __future__ import annotations

from functools import partial

from muon_tutorial import gram, layerwise, owner, owner_per_replica, replicated, round_robin, zero1
from muon_tutorial.plan.strategies import Builder

VARIANTS: dict[str, Builder] = {
    "replicated": replicated,
    "round_robin, all_reduce": partial(round_robin, back="all_reduce"),
    "round_robin, all_gather": partial(round_robin, back="all_gather"),
    "zero1, all": partial(zero1, gather="all"),
    "zero1, boundary": partial(zero1, gather="boundary"),
    "cut by the bucket, zero1": partial(zero1, cut="bucket"),
    "layerwise": layerwise,
    "gram": gram,
    "owner, longest first": partial(owner, assign="longest_first"),
    "owner, in turn": partial(owner, assign="in_turn"),
    "owner, per replica": owner_per_replica,
}
EVEN_SLICES = tuple(name for name in VARIANTS if name.startswith("zero1"))
BITWISE = tuple(name for name in VARIANTS if name != "gram")
"""The variants that give the single process's bits; ``tests/step/test_gram.py`` checks gram's bound."""
