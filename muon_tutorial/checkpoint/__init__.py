"""Checkpoints that one strategy saves on one grid, and any strategy can load on any grid.

The format, version 2, is a folder as ``torch.distributed.checkpoint`` writes it, with two more files. Each
tensor is saved at its full size, cut into the boxes that ranks held. A load may cut the tensor differently,
and PyTorch's tools can read the folder, too. The tensors are:

- ``model.NAME``: each parameter and persistent buffer, once. NAME is its name in the model, without the
  prefixes of DDP, ``torch.compile`` and activation checkpointing. A tied parameter gets its first name.
- ``optimizer.NAME.momentum_buffer``: the momentum of each parameter that Muon steps, in the shape of the
  parameter; zeros before its first step.
- ``optimizer.NAME.exp_avg``, ``.exp_avg_sq``, ``.max_exp_avg_sq``, ``.step``: AdamW's state of each parameter
  that AdamW steps; nothing before its first step.

The files:

- ``__R_0.distcp``: the boxes that rank R wrote, one after the other, each as ``torch.save`` writes a tensor.
  A box that several ranks hold is written by only one of them.
- ``extra.pt``: the ``extra`` of the user's call on rank 0, such as a step count or a scheduler's state.
- ``.metadata``: where the boxes are, as a pickle for PyTorch's tools. This package never reads ``.metadata``.
- ``manifest.json``: where the boxes are, and everything else that a load needs to know. ``files``: the size
  and the SHA-256 of each other file. ``tensors``: the shape, the dtype and the boxes of each tensor.
  ``groups``: for each NAME, its state's entries and its hyperparameters, as
  ``{"optimizer": "muon" or "adamw", "state": […], "group": {"lr": …, …}}``. Hyperparameters are saved per
  parameter, so a load may arrange parameters in other groups; hyperparameters that are tensors are saved as
  numbers. ``save_id`` is new in each save; ``format`` is ``{"name": "muon_tutorial", "version": 2}``.
  ``manifest.json`` begins with the SHA-256 of its content.

Strategy, mesh, ``tp_dim`` and window are not saved, because they are not state. Gradients are not saved
either, even after ``ready_gradients()``: save after ``step()``.

``docs/checkpoints.md`` lists the guarantees.
"""

from __future__ import annotations

from .loading import load_checkpoint
from .manager import CheckpointManager
from .saving import save_checkpoint

__all__ = ["CheckpointManager", "load_checkpoint", "save_checkpoint"]
