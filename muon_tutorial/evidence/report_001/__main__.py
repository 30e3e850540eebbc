"""``python -m muon_tutorial.evidence.report_001``: the published report, checked from its own traces."""

from __future__ import annotations

import sys

from .report import main

if __name__ == "__main__":
    sys.exit(main())
