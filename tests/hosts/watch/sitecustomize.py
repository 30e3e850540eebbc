"""Watches the optimizer of a recipe from inside its processes, without a line in the recipe.

Python imports a module of this name in every process that finds it on ``PYTHONPATH``, whichever launcher
starts it. If ``WATCH_FOLDER`` names a folder, every rank writes its optimizer's inputs at each step, and its
state after the last, to ``rank-N.pt`` there.
"""

from __future__ import annotations

import os
import sys

if os.environ.get("WATCH_FOLDER") and any("recipes" in argument for argument in sys.orig_argv):
    import watching

    watching.start(os.environ["WATCH_FOLDER"])
