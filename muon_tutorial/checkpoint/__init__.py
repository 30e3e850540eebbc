"""Checkpoints that outlive a strategy and a grid: what one saved, any other loads.

The format, version 2: a folder as ``torch.distributed.checkpoint`` writes it, with two files more. Tensors
are whole ones, cut into the boxes that ranks held; how they were cut means nothing to who loads them, and any
tool of that library can read them. They are:

- ``model.NAME``: each parameter and persistent buffer, once, under the model's name for it (its first one, if
  it is tied), without the prefixes of DDP, ``torch.compile`` and activation checkpointing.
- ``optimizer.NAME.momentum_buffer``: of every parameter that Muon steps, in the shape of the parameter; zeros
  before its first step.
- ``optimizer.NAME.exp_avg``, ``.exp_avg_sq``, ``.max_exp_avg_sq``, ``.step``: what AdamW has of a parameter
  it steps; nothing before its first step.

The files:

- ``__R_0.distcp``: what rank R wrote, box after box, each as ``torch.save`` writes a tensor. A box that
  several ranks hold is written once, by one of them.
- ``extra.pt``: what the user passed on rank 0: a step count, a scheduler's ``state_dict()``, the state of a
  generator of random numbers.
- ``.metadata``: where the boxes are, for other tools of the library. It is a pickle; this package never reads
  it.
- ``manifest.json``: the same as JSON, and all a load needs to know. ``files`` has the size and the SHA-256 of
  each of the others; ``tensors`` the shape, the dtype and the boxes of each tensor; ``groups`` says of each
  NAME ``{"optimizer": "muon" or "adamw", "state": […], "group": {"lr": …, …}}``: which entries it has, and
  the hyperparameters. They are kept by parameter, so that groups may be arranged otherwise where they are
  loaded. Tensors among them are saved as numbers. ``save_id`` is new in each save; ``format`` is
  ``{"name": "muon_tutorial", "version": 2}``. The file begins with the SHA-256 of its own content.

Not saved, because they are no state: strategy, mesh, ``tp_dim``, window, and gradients, readied ones too:
save after ``step()``.

``docs/checkpoints.md`` says what it promises: a folder is whole or not there, whatever is killed; damage is
named; nothing in a file is executed; all ranks hear within the timeout which of them failed, and why.

``rank_contents`` finds out what a rank holds and where it lies; ``pieces_on_disk`` writes and reads it;
``compare_ranks`` compares ranks; ``manifest`` and ``plain_data`` are what is in the files, ``folders`` how
they get to their place; in a ``meeting`` ranks decide together. ``saving`` and ``loading`` put them together,
and ``manager`` keeps the newest.
"""

from __future__ import annotations

from .loading import load_checkpoint
from .manager import CheckpointManager
from .saving import save_checkpoint

__all__ = ["CheckpointManager", "load_checkpoint", "save_checkpoint"]
