"""``python -m muon_tutorial``. It handles Ctrl-C before it imports torch, which takes seconds."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from muon_tutorial.launching.command import (
        begin_command,
        end_on_interrupt,
        ignore_interrupts_at_exit,
        import_without_collecting,
        keep_what_is_imported,
    )

    begin_command()
    import_without_collecting("muon_tutorial.cli")
    from muon_tutorial.cli import main

    ignore_interrupts_at_exit()
    keep_what_is_imported()
    code = main()
    end_on_interrupt()  # nothing remains but to exit
    sys.exit(code)
