"""The training job as a script, which starts its own processes, or which torchrun runs in each process.

python scripts/distributed_muon.py --dp 2 --tp 2
torchrun --standalone --nproc-per-node 8 scripts/distributed_muon.py --tp 2 --backend nccl
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.argv[:1] = ["-m", "train"]  # so that signals are handled before torch is imported
    runpy.run_module("muon_tutorial", run_name="__main__", alter_sys=True)
