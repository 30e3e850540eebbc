"""Distributed Muon, by hand: one plan that runs on real processes, in one process, and on none.

The public surface, by floor:

- the math: ``zeropower_via_newtonschulz``, ``KELLER_JORDAN``
- the plan: ``Grid``, ``Coordinate``, ``Shard``, ``Replicate``, ``Partial``, ``Owned``, ``Box``, ``Hop``,
  ``Route``, ``Matrix``, ``Bucket``, ``DistMeta``, ``Plan``, ``STRATEGIES``, ``zero1``, ``owner``,
  ``round_robin``, ``replicated``
- the worlds: ``launch``, ``build_mesh``, ``LiveWorld``, ``LocalWorld``, ``Ledger``
- the optimizer: ``Muon``, ``MuonWithAdamW``, ``split_parameters``, ``DistributedConfig`` and its three
  ``create_…_config``
- errors: ``TutorialError`` and, below it, ``UsageError`` and ``LaunchError``; ``errors.py`` draws the tree

Each name is imported on first use: ``from muon_tutorial import Muon`` loads the optimizer, but not the
launcher, checkpoints or the planner.

Terms of the package and the lessons:

- *grid*, *axis*: ranks arranged in named axes
- *coordinate*: a rank's place on the grid; *position*: its number along one axis
- *placement*: how one axis holds a tensor; *cut*: a ``Shard`` along one axis of a parameter
- *piece*: a rank's tensor-parallel part of a matrix; *shard*: the part that the rank stores between steps
- *hop*: one change of placement; *route*: hops in order; *exchange*: many matrices packed into one move
- *bucket*: matrices that travel together; *buffer*: their flat tensor; *layout*: which rank holds which part
- *request*, *collective*: a generator asks for it; *walk*: the generator
- *world*: answers requests; *mesh*: the ranks that it answers for
- *step*: one optimizer step; *phase*: one of its seven parts, in ``step/``
- *owner*: the only rank that orthogonalizes a matrix; *worker*: any rank that does
- *strategy*: a builder; *plan*: the data that it builds
- *ledger*: the requests that were made, in bytes
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .callbacks.config import DistributedConfig
    from .callbacks.create_configs import (
        create_devicemesh_config,
        create_dtensor_config,
        create_processgroup_config,
    )
    from .checkpoint import CheckpointManager, load_checkpoint, save_checkpoint
    from .errors import LaunchError, TutorialError, UsageError
    from .evidence.ledger import Ledger
    from .launching.launch import launch
    from .newton_schulz import KELLER_JORDAN, zeropower_via_newtonschulz
    from .optimizer.muon import Muon
    from .optimizer.muon_with_adamw import MuonWithAdamW
    from .optimizer.split_parameters import split_parameters
    from .plan.bucket import Bucket, DistMeta
    from .plan.grid import Coordinate, Grid
    from .plan.layout import Box, Hop, Owned, Partial, Replicate, Route, Shard
    from .plan.matrix import Matrix
    from .plan.strategies import (
        STRATEGIES,
        Plan,
        gram,
        layerwise,
        owner,
        owner_per_replica,
        replicated,
        round_robin,
        zero1,
    )
    from .worlds.live import LiveWorld, build_mesh
    from .worlds.local import LocalWorld

__version__ = "0.1.0"

__all__ = [
    "KELLER_JORDAN",
    "STRATEGIES",
    "Box",
    "Bucket",
    "CheckpointManager",
    "Coordinate",
    "DistMeta",
    "DistributedConfig",
    "Grid",
    "Hop",
    "LaunchError",
    "Ledger",
    "LiveWorld",
    "LocalWorld",
    "Matrix",
    "Muon",
    "MuonWithAdamW",
    "Owned",
    "Partial",
    "Plan",
    "Replicate",
    "Route",
    "Shard",
    "TutorialError",
    "UsageError",
    "build_mesh",
    "create_devicemesh_config",
    "create_dtensor_config",
    "create_processgroup_config",
    "gram",
    "launch",
    "layerwise",
    "load_checkpoint",
    "owner",
    "owner_per_replica",
    "replicated",
    "round_robin",
    "save_checkpoint",
    "split_parameters",
    "zero1",
    "zeropower_via_newtonschulz",
]

_HOMES = {
    "callbacks.config": "DistributedConfig",
    "callbacks.create_configs": "create_devicemesh_config create_dtensor_config create_processgroup_config",
    "checkpoint": "CheckpointManager load_checkpoint save_checkpoint",
    "errors": "LaunchError TutorialError UsageError",
    "evidence.ledger": "Ledger",
    "launching.launch": "launch",
    "newton_schulz": "KELLER_JORDAN zeropower_via_newtonschulz",
    "optimizer.muon": "Muon",
    "optimizer.muon_with_adamw": "MuonWithAdamW",
    "optimizer.split_parameters": "split_parameters",
    "plan.bucket": "Bucket DistMeta",
    "plan.grid": "Coordinate Grid",
    "plan.layout": "Box Hop Owned Partial Replicate Route Shard",
    "plan.matrix": "Matrix",
    "plan.strategies": "STRATEGIES Plan gram layerwise owner owner_per_replica replicated round_robin zero1",
    "worlds.live": "LiveWorld build_mesh",
    "worlds.local": "LocalWorld",
}
"""The modules that the public names come from."""


def __getattr__(name: str) -> object:
    """Import a public name from its module; Python calls this once, because the name is then kept here."""
    for home, names in _HOMES.items():
        if name in names.split():
            value = globals()[name] = getattr(import_module(f".{home}", __name__), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
