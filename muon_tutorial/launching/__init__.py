"""``launch()`` starts real ranks, watches and ends them; ``join_torchrun()`` joins ranks of torchrun."""

from __future__ import annotations
