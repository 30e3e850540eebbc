"""``python -m muon_tutorial``."""

from __future__ import annotations

import sys

INTERRUPTED = 130

if __name__ == "__main__":
    try:
        from muon_tutorial.cli import main
    except KeyboardInterrupt:  # importing torch takes a second
        sys.exit(INTERRUPTED)
    sys.exit(main())
