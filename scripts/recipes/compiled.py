"""Compiled and checkpointed: torchrun --standalone --nproc-per-node 2 scripts/recipes/compiled.py

Trains as ``ddp.py`` does.
"""

import torch
import torch.distributed as dist
from ddp import train
from tiny import Block, TinyGPT, arguments
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.nn.parallel import DistributedDataParallel

from muon_tutorial import MuonWithAdamW  # Muon

args = arguments(__doc__)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = TinyGPT()
apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
model = DistributedDataParallel(torch.compile(model))
optimizer = MuonWithAdamW.from_model(model, lr=0.02, adamw_lr=3e-3)  # Muon
train(model, model.module, optimizer, args)
