"""Watches the optimizer of a recipe from inside its processes, without a line in the recipe.

Python imports a module of this name in every process that finds it on ``PYTHONPATH``, whoever launches the
process. Where ``WATCH_FOLDER`` names a folder, every rank writes what its optimizer saw at each step, and
what it left behind after the last, to ``rank-N.pt`` in there. ``WATCH_FAULT`` plants one fault, to see that
the tests notice.
"""

from __future__ import annotations

import os
import sys


def _runs_a_recipe() -> bool:
    return any("recipes" in argument for argument in sys.orig_argv)


if os.environ.get("WATCH_FOLDER") and _runs_a_recipe():
    import watching

    watching.start(os.environ["WATCH_FOLDER"], os.environ.get("WATCH_FAULT", ""))
