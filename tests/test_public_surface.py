"""The public surface is what this list says; a change to it is a change to this file."""

from __future__ import annotations

import inspect

import muon_tutorial

PUBLIC = """
    KELLER_JORDAN STRATEGIES Box Bucket CheckpointManager Coordinate DistMeta DistributedConfig Grid Hop
    LaunchError Ledger LiveWorld LocalWorld Matrix Muon MuonWithAdamW Owned Partial Plan Replicate Route
    Shard TutorialError UsageError build_mesh create_devicemesh_config create_dtensor_config
    create_processgroup_config gram launch layerwise load_checkpoint owner owner_per_replica replicated
    round_robin save_checkpoint split_parameters zero1 zeropower_via_newtonschulz
"""


def test_the_public_names_are_pinned() -> None:
    assert sorted(muon_tutorial.__all__) == sorted(PUBLIC.split())


def test_every_public_function_and_class_says_what_it_does() -> None:
    values = {name: getattr(muon_tutorial, name) for name in muon_tutorial.__all__}
    silent = [name for name, value in values.items() if callable(value) and not inspect.getdoc(value)]
    assert silent == []
