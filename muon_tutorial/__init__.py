"""Distributed Muon, by hand: one plan that runs on real processes, in one process, and on none.

Each public name is imported on first use: ``from muon_tutorial import Muon`` loads the optimizer, but not the
launcher, checkpoints or the planner.

Terms of the package and the lessons:

- *grid*, *axis*: ranks arranged in named axes
- *coordinate*: a rank's place on the grid; *position*: the rank's number along one axis
- *placement*: how one axis holds a tensor; *cut*: a ``Shard`` along one axis of a parameter
- *piece*: a rank's tensor-parallel part of a matrix; *shard*: the part that the rank stores between steps
- *hop*: one change of placement; *route*: hops in order; *exchange*: many matrices packed into one move
- *bucket*: matrices that travel together; *buffer*: their flat tensor; *layout*: which rank holds which part
- *walk*: a generator that asks for collectives; *request*: what a walk asks for
- *world*: what answers requests; *mesh*: the ranks that a world answers for
- *step*: one optimizer step; *phase*: one of its seven parts, in ``step/``
- *worker*: a rank that orthogonalizes a matrix; *owner*: a matrix's only worker
- *strategy*: a function that builds a *plan*, the data that a step follows
- *ledger*: a record of the requests that were made, in bytes
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # "X as X" tells type checkers that X is a public name (PEP 484)
    from .callbacks.config import DistributedConfig as DistributedConfig
    from .callbacks.create_configs import create_devicemesh_config as create_devicemesh_config
    from .callbacks.create_configs import create_dtensor_config as create_dtensor_config
    from .callbacks.create_configs import create_processgroup_config as create_processgroup_config
    from .checkpoint import CheckpointManager as CheckpointManager
    from .checkpoint import load_checkpoint as load_checkpoint
    from .checkpoint import save_checkpoint as save_checkpoint
    from .errors import LaunchError as LaunchError
    from .errors import TutorialError as TutorialError
    from .errors import UsageError as UsageError
    from .evidence.ledger import Ledger as Ledger
    from .launching.launch import launch as launch
    from .newton_schulz import KELLER_JORDAN as KELLER_JORDAN
    from .newton_schulz import zeropower_via_newtonschulz as zeropower_via_newtonschulz
    from .optimizer.muon import Muon as Muon
    from .optimizer.muon_with_adamw import MuonWithAdamW as MuonWithAdamW
    from .optimizer.split_parameters import split_parameters as split_parameters
    from .plan.bucket import Bucket as Bucket
    from .plan.bucket import DistMeta as DistMeta
    from .plan.grid import Coordinate as Coordinate
    from .plan.grid import Grid as Grid
    from .plan.layout import Box as Box
    from .plan.layout import Hop as Hop
    from .plan.layout import Owned as Owned
    from .plan.layout import Partial as Partial
    from .plan.layout import Replicate as Replicate
    from .plan.layout import Route as Route
    from .plan.layout import Shard as Shard
    from .plan.matrix import Matrix as Matrix
    from .plan.strategies import STRATEGIES as STRATEGIES
    from .plan.strategies import Plan as Plan
    from .plan.strategies import gram as gram
    from .plan.strategies import layerwise as layerwise
    from .plan.strategies import owner as owner
    from .plan.strategies import owner_per_replica as owner_per_replica
    from .plan.strategies import replicated as replicated
    from .plan.strategies import round_robin as round_robin
    from .plan.strategies import zero1 as zero1
    from .worlds.build_mesh import build_mesh as build_mesh
    from .worlds.live import LiveWorld as LiveWorld
    from .worlds.local import LocalWorld as LocalWorld

__version__ = "0.1.0"

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
    "worlds.build_mesh": "build_mesh",
    "worlds.live": "LiveWorld",
    "worlds.local": "LocalWorld",
}
"""The public names of each module."""

__all__ = sorted(" ".join(_HOMES.values()).split())


def __getattr__(name: str) -> object:
    """Import a public name from its module on first use; later uses find it in this module."""
    for home, names in _HOMES.items():
        if name in names.split():
            value = globals()[name] = getattr(import_module(f".{home}", __name__), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
