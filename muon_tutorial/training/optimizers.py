"""The optimizer of the training job: distributed Muon for the hidden matrices, AdamW for the rest."""

from __future__ import annotations

import torch
from torch import nn

from ..optimizer.muon import Muon
from ..optimizer.muon_with_adamw import MuonWithAdamW
from ..optimizer.split_parameters import split_parameters
from ..worlds.live import LiveWorld
from .settings import TrainSettings

MUON_WEIGHT_DECAY = 0.1
ADAMW_BETAS = (0.9, 0.95)


def build_optimizer(model: nn.Module, settings: TrainSettings, world: LiveWorld) -> MuonWithAdamW:
    """One optimizer over all parameters, on ``world``. Must be called by all ranks.

    Muon's updates are scaled to AdamW's size (``match_rms_adamw``), so that one learning rate serves both.
    """
    hidden, rest = split_parameters(model)
    muon = Muon(
        hidden,
        lr=settings.lr,
        weight_decay=MUON_WEIGHT_DECAY,
        adjust_lr_fn="match_rms_adamw",
        strategy=settings.strategy,
        mesh=world,
    )
    adamw = torch.optim.AdamW(rest, lr=settings.lr, betas=ADAMW_BETAS, weight_decay=0.0)
    return MuonWithAdamW(muon, adamw)
