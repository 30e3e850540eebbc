"""Checkpoints that outlive a strategy and a grid: what one saved, any other loads.

The format, version 1: a folder as ``torch.distributed.checkpoint`` writes it, with these entries. Tensors are
whole ones, cut into the boxes that ranks held; how they were cut means nothing to who loads them, and any
tool of that library can read them.

- ``model.NAME``: each parameter and persistent buffer, once, under the model's name for it (its first one, if
  it is tied), without the prefixes of DDP, ``torch.compile`` and activation checkpointing.
- ``optimizer.NAME.momentum_buffer``: of every parameter that Muon steps, in the shape of the parameter; zeros
  before its first step.
- ``optimizer.NAME.exp_avg``, ``.exp_avg_sq``, ``.max_exp_avg_sq``, ``.step``: what AdamW has of a parameter
  it steps; nothing before its first step.
- ``groups``: a dict from NAME to ``{"optimizer": "muon" or "adamw", "state": (…), "group": {"lr": …, …}}``:
  which entries there are, and the hyperparameters. They are kept by parameter, so that groups may be arranged
  otherwise where they are loaded. Tensors among them are saved as numbers.
- ``extra``: what the user passed on rank 0: a step count, a scheduler's ``state_dict()``.
- ``format``: ``{"name": "muon_tutorial", "version": 1}``.

Not saved, because they are no state: strategy, mesh, ``tp_dim``, window, and gradients, readied ones too:
save after ``step()``. A box that several ranks hold is written once, by one of them. As with every file that
holds pickled objects, load only what you trust.

``rank_contents`` finds out what a rank holds and where it lies; ``pieces_on_disk`` hands that to the library;
``compare_ranks`` compares ranks; ``saving`` and ``loading`` put them together.
"""

from __future__ import annotations

from .loading import load_checkpoint
from .manager import CheckpointManager
from .saving import save_checkpoint

__all__ = ["CheckpointManager", "load_checkpoint", "save_checkpoint"]
