"""Builds: exercises without a stub. This module runs their tests in stages, and completes readers' files.

``from muon_tutorial.learn.builds import ring`` is the ``ring.py`` of the current folder. Functions that this
file lacks come from ``reference/ring.py``, and ``tests/ring.py`` is its test.
"""

from __future__ import annotations

import importlib
import inspect
import re
import symtable
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ...launching.launch import launch
from ..exercises.on_real_ranks import watching

NAMES = {
    "ring": ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all"),
    "zero3": ("shard", "whole"),
    "pipeline": ("step",),
    "context": ("attention", "positions"),
}
"""What each build must define."""
_COLLECTIVE = re.compile(r"(all_)?(gather|reduce|to_all)|scatter|broadcast|batch_")


def __getattr__(build: str) -> ModuleType:
    if build in NAMES:
        try:
            return completed(build)
        except AttributeError as error:  # an import would take it for a missing name
            raise ImportError(f"{build}.py raised {error!r}") from error
    raise AttributeError(f"module {__name__!r} has no attribute {build!r}")


@cache
def completed(build: str) -> ModuleType:
    """The reader's build in the current folder, with the reference's functions in place of missing ones."""
    mine, path = ModuleType(build), Path.cwd() / f"{build}.py"
    sys.modules[build] = mine  # so that a plain import, and the file itself, find the same module
    if path.exists():
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), mine.__dict__)
    reference = importlib.import_module(f"{__name__}.reference.{build}")
    for name in NAMES[build]:
        mine.__dict__.setdefault(name, getattr(reference, name))
    return mine


def say_whose(build: str) -> str:
    """One line that says which functions of a build are the reader's, and which are the reference's."""
    path = Path.cwd() / f"{build}.py"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    symbols = symtable.symtable(text, str(path), "exec").get_symbols()
    defined = {each.get_name() for each in symbols if each.is_assigned() or each.is_imported()}
    yours = [name for name in NAMES[build] if name in defined]
    others = [name for name in NAMES[build] if name not in defined]
    said = {"yours": yours, "from the reference": others}
    return f"{build}.py, " + "; ".join(f"{who}: {', '.join(names)}" for who, names in said.items() if names)


def on_green() -> None:
    """Called by ``run`` after each green stage. ``scripts/grade.py`` replaces it, to count the stages."""


def run(*stages: Callable[[int, int], Any], ranks: Sequence[int] = (2, 3), uses: Sequence[str] = ()) -> None:
    """Run each stage of a test as ``stage(rank, ranks)`` on real ranks, and print a line when it is green.

    ``uses``: the earlier builds that the test needs. Raises LaunchError at the first stage that fails.
    """
    for build in uses:
        print(say_whose(build))
    for place, stage in enumerate(stages, 1):
        for count in ranks:
            said = launch(stage, count, args=(count,), timeout=20.0, limit=100.0)[0] or ""
        print(f"green {place}/{len(stages)}: {stage.__name__.replace('_', ' ')} {said}".rstrip())
        on_green()


def same(found: Any, right: Mapping[str, Tensor], look: str, within: float = 0.0) -> None:
    """Assert that ``found`` has the tensors of ``right``. If not, say the first wrong entry, and ``look``."""
    given = list(found) if isinstance(found, Iterable) else [found]
    assert len(given) == len(right), f"{found!r:.40} came, and not {', '.join(right)}. {look}"
    for mine, (name, its) in zip(given, right.items(), strict=True):
        shape = tuple(mine.shape) if isinstance(mine, Tensor) else mine
        assert shape == its.shape, f"{name}: {shape!r:.40}, and the shape {tuple(its.shape)} is right. {look}"
        near = (mine - its).abs() <= within * (1 + its.abs())
        if not near.all():
            at = tuple((~near).nonzero()[0].tolist())
            raise AssertionError(f"{name}, entry {[*at]}: {mine[at]:.9g}, and {its[at]:.9g} is right. {look}")


def messages(work: Callable[[], object], before: Callable[[], object] = bool) -> list[tuple[Any, int]]:
    """Call ``work`` on a rank; return its messages: to which rank, how many entries. Collectives raise.

    ``before`` is called before each message.
    """
    sent: list[tuple[Any, int]] = []

    def see(call: Callable[..., Any], *args: Any, **named: Any) -> Any:
        before()
        given = inspect.signature(call).bind(*args, **named).arguments
        to = given.get("dst")
        sent.append((given.get("group_dst") if to is None else to, given["tensor"].numel()))
        return call(*args, **named)

    def refuse(call: Callable[..., Any], *_: Any, **__: Any) -> None:
        raise AssertionError(f"{call.__name__} is called: send, isend, recv and irecv are enough")

    collectives = [*filter(_COLLECTIVE.match, dir(dist))]
    unseen = {id(getattr(dist, name)) for name in ("send", "isend", *collectives)}
    for build in NAMES.keys() & sys.modules.keys():
        for name, value in vars(sys.modules[build]).items():
            assert id(value) not in unseen, (
                f"{build}.py hides {name} from the test, so write dist.{value.__name__}"
            )
    with watching(see, "send", "isend"), watching(refuse, *collectives):
        work()
    return sent
