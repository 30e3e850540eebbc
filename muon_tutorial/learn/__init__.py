"""The code of the lessons: it observes the optimizer, and starts no processes except a lesson's ranks.

=================  =========================================================================================
the_grid, …        a folder per notebook: what it runs on ranks, its pictures, its exercises
exercises          judge: checks answers and gives hints; on_real_ranks: the same for answers that ranks run
builds             exercises without a stub; tests: what readers run; reference: solutions
pictures           picture: a self-contained ``<img>`` with alt text; holdings, spectra: shared drawings
widgets            controls that redraw a picture; answers that appear after a prediction
inputs             a small GPT and its recorded gradients; cores, memory and seconds of this machine
course             the lessons in order and their links; the glossary
=================  =========================================================================================
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from .course import glossary as glossary


def names_in(package: str, *files: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's ``__getattr__`` and ``__dir__``, which import a file when one of its names is asked for.

    So ranks import no pictures. If several files define a name, the first counts.
    """
    files = tuple(" ".join(files).split())

    def find(name: str) -> Any:
        for file in (name,) if name in files else () if name.startswith("__") else files:
            module = importlib.import_module(f"{package}.{file}")
            if name == file or hasattr(module, name):
                return module if name == file else getattr(module, name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def listed() -> list[str]:
        modules = [importlib.import_module(f"{package}.{file}") for file in files]
        return sorted({name for module in modules for name in vars(module) if not name.startswith("_")})

    return find, listed
