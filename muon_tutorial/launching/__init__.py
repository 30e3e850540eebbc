"""``launch()``: starting real ranks, watching them, and ending them whatever happens; or joining torchrun."""

from __future__ import annotations
