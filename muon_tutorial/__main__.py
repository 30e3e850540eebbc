"""``python -m muon_tutorial``."""

from __future__ import annotations

import sys

from muon_tutorial.cli import main

if __name__ == "__main__":
    sys.exit(main())
