"""The training job as a script: by itself it starts its own processes; under torchrun it is one of them.

python scripts/distributed_muon.py --dp 2 --tp 2
torchrun --nproc-per-node 8 scripts/distributed_muon.py --tp 2 --backend nccl
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from muon_tutorial.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
