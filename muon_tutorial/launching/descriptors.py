"""Standard input, output and error, which may be closed (``>&-``): later files would take their place."""

from __future__ import annotations

import os
import sys


def fill_standard_descriptors() -> None:
    """Open the null device wherever one of the three is closed, and give Python its streams."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
            os.set_inheritable(descriptor, True)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
