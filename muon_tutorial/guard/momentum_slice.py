"""A tensor class for a rank's slice of the momentum in a saved state.

``torch.distributed.checkpoint`` assumes that a plain tensor in an optimizer's state is the same on all ranks,
so it would save only one rank's slice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError


class MomentumSlice(Tensor):
    """A flat part of the momentum that no other rank has. ``torch.save`` saves it like any tensor."""

    def __deepcopy__(self, memo: dict[int, Any]) -> MomentumSlice:
        return memo.setdefault(id(self), self.as_subclass(Tensor).clone().as_subclass(MomentumSlice))

    def __create_write_items__(self, name: str, _: object) -> list[Any]:
        """Refuse ``torch.distributed.checkpoint``, which calls this for tensors that are cut into pieces.

        Raises:
            CheckpointError: always, because consecutive elements are not a box of a tensor.
        """
        raise CheckpointError(
            f"{name} is one rank's slice of the momentum, which torch.distributed.checkpoint cannot put "
            "together: save by save_checkpoint(folder, model, optimizer)"
        )


torch.serialization.add_safe_globals([MomentumSlice])


def mark_slices(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A hook of ``state_dict()``: makes an entry's momentum a ``MomentumSlice`` if the entry has ``kept``."""
    state = {index: _marked(entry) for index, entry in state_dict["state"].items()}
    return {**state_dict, "state": state}


def _marked(entry: Any) -> Any:
    if not isinstance(entry, Mapping) or "kept" not in entry:
        return entry
    return {**entry, "momentum_buffer": entry["momentum_buffer"].as_subclass(MomentumSlice)}
