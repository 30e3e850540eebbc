"""``launch()`` starts real ranks, watches them, and ends them whatever happens; or ranks join torchrun."""

from __future__ import annotations
