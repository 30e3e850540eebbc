"""Tensor parallelism below FSDP2: torchrun --standalone --nproc-per-node 4 scripts/recipes/fsdp2_tp.py

Shards and trains as ``fsdp2.py`` does.
"""

import torch
from fsdp2 import shard, train
from tiny import TinyGPT, arguments
from tiny_tp import cut_over_tp
from torch.distributed.device_mesh import init_device_mesh

from muon_tutorial import MuonWithAdamW  # Muon

args = arguments(__doc__)
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)
model = TinyGPT()
cut_over_tp(model, mesh["tp"])
shard(model, mesh["dp"], args)
optimizer = MuonWithAdamW.from_model(model, lr=0.02, adamw_lr=3e-3)  # Muon
train(model, optimizer, args, mesh.size(0), mesh.get_local_rank("dp"))
