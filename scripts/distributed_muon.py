"""The training job as a script: by itself it starts its own processes; under torchrun it is one of them.

python scripts/distributed_muon.py --dp 2 --tp 2
torchrun --standalone --nproc-per-node 8 scripts/distributed_muon.py --tp 2 --backend nccl
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def interrupted(*_: object) -> None:
    """End at once: importing torch takes seconds, and nothing has begun."""
    os.write(2, b"interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # ignored in a background job
    if heeded:
        signal.signal(signal.SIGINT, interrupted)
    from muon_tutorial.cli import main

    if heeded:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main(["train", *sys.argv[1:]]))
