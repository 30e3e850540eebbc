"""What holds for every test."""

from __future__ import annotations

import os

# torch names a rank whose request differs in shape, dtype or order, instead of summing whatever came.
os.environ.setdefault("TORCH_DISTRIBUTED_DEBUG", "DETAIL")

collect_ignore = ["launching/torchrun_rank.py"]  # a program, not a module
