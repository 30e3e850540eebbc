"""Imports a lesson's files when a name in them is first asked for, so that ranks import no pictures."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def names_in(package: str, *files: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's ``__getattr__`` and ``__dir__``. If several files define a name, the first counts."""
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
