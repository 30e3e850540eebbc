"""``python -m muon_tutorial``. The package, imported before this, has taken care of Ctrl-C meanwhile."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from muon_tutorial.cli import main
    from muon_tutorial.launching.command import (
        end_on_interrupt,
        ignore_interrupts_at_exit,
        keep_what_is_imported,
    )

    ignore_interrupts_at_exit()
    keep_what_is_imported()
    code = main()
    end_on_interrupt()  # what is left is to leave
    sys.exit(code)
