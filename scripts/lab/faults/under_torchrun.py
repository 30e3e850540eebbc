"""The program of ranks that ``torchrun`` starts; its arguments are a case and a folder."""

from __future__ import annotations

import json
import sys

from muon_tutorial.launching.torchrun import join_torchrun, leave_torchrun

from .case import TIMEOUT, Case
from .strikes import Gift, suffer


def main(case: str, folder: str) -> None:
    told = Case(**json.loads(case))
    seat = join_torchrun("gloo", TIMEOUT)
    record = suffer(seat.rank, told, Gift(told, folder), folder)
    leave_torchrun()
    if not record.equal:
        sys.exit(f"rank {seat.rank} ended with other bits than one process")


if __name__ == "__main__":
    main(*sys.argv[1:])
