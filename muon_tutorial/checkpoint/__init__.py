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

What it promises:

- *Whole or not at all.* A folder is written beside its place, synced and renamed: a kill at any moment, a
  full disk, a rank that stops or raises leave what was there before, or the new one. Of two savers to one
  folder at a time one is refused. A load reads to blank tensors and changes the model when every rank has
  read everything, so a refused one changes nothing on any rank.
- *Nothing silently wrong.* Every byte stands under a hash, which is compared before anything is read. Ranks
  share that work; they must share the file system too. A flipped bit, a file cut off, lost, added or taken
  from another save is an error that names the file. (A hash finds damage. Who can write to the folder can
  make a checkpoint of any numbers; they sign nothing.)
- *Nothing is executed.* Tensors and ``extra.pt`` are read by ``torch.load(weights_only=True)``, names that
  lead out of the folder and links are refused. ``extra`` takes what that reads, and refuses the rest when it
  is saved. Version 1 pickled objects and is refused; no release of this package wrote it.
- *Everybody is told.* Within the timeout of the default process group all ranks hear which rank failed, and
  why, in one line, and the process groups are fit for use after that.

``rank_contents`` finds out what a rank holds and where it lies; ``pieces_on_disk`` hands that to the library;
``compare_ranks`` compares ranks; ``manifest`` and ``plain_data`` are what is in the files, ``folders`` how
they get to their place; in a ``meeting`` ranks decide together. ``saving`` and ``loading`` put them together,
and ``manager`` keeps the newest.
"""

from __future__ import annotations

from .loading import load_checkpoint
from .manager import CheckpointManager
from .saving import save_checkpoint

__all__ = ["CheckpointManager", "load_checkpoint", "save_checkpoint"]
