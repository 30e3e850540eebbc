"""``python -m muon_tutorial``. Importing torch takes seconds, so Ctrl-C is handled before that import."""

from __future__ import annotations

import gc
import sys

if __name__ == "__main__":
    from muon_tutorial.launching.interrupts import begin_command, end_on_interrupt, ignore_interrupts_at_exit

    begin_command()
    gc.disable()  # importing torch makes no garbage, so this saves a third of its time
    from muon_tutorial.cli import main

    ignore_interrupts_at_exit()
    gc.enable()
    gc.freeze()  # keeps torch's objects out of the last garbage collection, which saves half a second
    code = main()
    end_on_interrupt()  # the work is done, so Ctrl-C may end the process
    sys.exit(code)
