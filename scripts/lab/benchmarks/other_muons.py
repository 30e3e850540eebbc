"""The Muons of other packages, each configured to do ``torch.optim.Muon``'s work as closely as possible.

Each ``Peer``'s fields and the tables list the remaining differences; seconds must be compared with these in
mind. A package is imported when its contender is made. One that is not installed, or fails here, is left out,
and a note says why.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.optim import Optimizer

from muon_tutorial.errors import UsageError

SETTINGS: Mapping[str, Any] = {"lr": 1e-4, "weight_decay": 0.1}
"""Every contender's settings, in addition to a Nesterov momentum of 0.95."""

MOMENTUM = 0.95

Params = list[torch.nn.Parameter]


@dataclass(frozen=True, slots=True)
class StepContender:
    """A Muon, how it is made, and a description of its work.

    ``source`` is the package and its version. ``coefficients`` and ``steps`` describe its Newton–Schulz.
    ``batching`` says how it treats equal shapes, and ``remark`` says what else differs. ``compiles``: its
    first steps compile, so they run before anything is counted.
    """

    name: str
    source: str
    make: Callable[[Params], Optimizer]
    coefficients: str
    steps: int
    batching: str
    remark: str = ""
    compiles: bool = False


@dataclass(frozen=True, slots=True)
class Peer:
    """A package on PyPI, and how to make a contender of it. ``load`` returns the module with its Muon."""

    package: str
    load: Callable[[], Any]
    make: Callable[[Any, Params], Optimizer]
    coefficients: str
    batching: str
    remark: str = ""
    compiles: bool = False

    def contender(self) -> StepContender:
        """Import the package; UsageError has a line to print if it is not installed or fails."""
        try:
            source = f"{self.package} {version(self.package)}"
            module = self.load()
        except PackageNotFoundError:
            raise UsageError(f"{self.package} is not installed: pip install -e '.[peers]'") from None
        except Exception as error:  # a foreign import may fail in any way
            raise UsageError(f"{self.package} cannot be imported here: {first_line(error)}") from error
        work = (self.coefficients, 5, self.batching, self.remark, self.compiles)
        return StepContender(self.package, source, partial(self.make, module), *work)


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


def import_alone(dotted: str) -> ModuleType:
    """Import one module of a package without running the ``__init__`` of the packages that contain it.

    The module may import only siblings from its package, and only by relative imports. An example is the
    optimizer of ``timm``; the whole of ``timm`` would need a torchvision built for this torch. The module
    gets another name in ``sys.modules``, so a later import of the package still loads all of it.

    Raises:
        ModuleNotFoundError: there is no such package or module.
    """
    top, *between, last = dotted.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"No package named {top!r}")
    name = f"_{top}_alone"
    for depth in range(len(between) + 1):
        bare = ModuleType(".".join([name, *between[:depth]]))
        bare.__path__ = [str(Path(spec.submodule_search_locations[0], *between[:depth]))]
        sys.modules.setdefault(bare.__name__, bare)
    return importlib.import_module(".".join([name, *between, last]))


def _make_timm(module: Any, params: Params) -> Optimizer:
    options = {"ns_coefficients": "original", "ns_steps": 5, "adjust_lr_fn": "original"}
    return module.Muon(params, momentum=MOMENTUM, nesterov=True, **options, **SETTINGS)


def _make_pytorch_optimizer(module: Any, params: Params) -> Optimizer:
    groups = [{"params": params, "use_muon": True}]
    return module.Muon(groups, momentum=MOMENTUM, nesterov=True, ns_coeffs="original", ns_steps=5, **SETTINGS)


KELLER_JORDAN_TEXT = "Keller Jordan"

PEERS: tuple[Peer, ...] = (
    Peer(
        "muon-optimizer",
        lambda: importlib.import_module("muon"),
        lambda module, params: module.SingleDeviceMuon(params, momentum=MOMENTUM, **SETTINGS),
        KELLER_JORDAN_TEXT,
        "one by one",
        "Keller Jordan's own code; SingleDeviceMuon; writes to the gradients",
    ),
    Peer(
        "timm",
        lambda: import_alone("timm.optim.muon"),
        _make_timm,
        KELLER_JORDAN_TEXT,
        "one by one",
        "asked for ns_coefficients='original', because its default is the coefficients of You Jiacheng",
    ),
    Peer(
        "pytorch-optimizer",
        lambda: importlib.import_module("pytorch_optimizer"),
        _make_pytorch_optimizer,
        KELLER_JORDAN_TEXT,
        "stacked by shape",
        "writes to the gradients",
    ),
    Peer(
        "heavyball",
        lambda: importlib.import_module("heavyball"),
        lambda module, params: module.Muon(params, betas=(MOMENTUM, 0.99), nesterov=True, **SETTINGS),
        "You Jiacheng",
        "one by one",
        "its coefficients cannot be chosen; rounds to bf16 at random; its package uses torch.compile",
        compiles=True,
    ),
)


def find_peers(peers: Iterable[Peer] = PEERS) -> tuple[list[StepContender], list[str]]:
    """Return the peers that can be imported, and a line about each of the other peers."""
    found, missing = list[StepContender](), list[str]()
    for peer in peers:
        try:
            found.append(peer.contender())
        except UsageError as error:
            missing.append(str(error))
    return found, missing
