"""The parts of ``launch()``: a file for each thing that passes, starts, watches, prints or reports."""

from __future__ import annotations
