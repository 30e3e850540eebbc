"""HSDP, replicas of sharded models: torchrun --standalone --nproc-per-node 4 scripts/recipes/hsdp.py

Only the mesh differs from ``fsdp2.py``.
"""

import torch
import torch.distributed as dist
from fsdp2 import shard, train
from tiny import TinyGPT, arguments
from torch.distributed.device_mesh import init_device_mesh

from muon_tutorial import MuonWithAdamW  # Muon

args = arguments(__doc__)
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
torch.manual_seed(0)
model = TinyGPT()
shard(model, mesh, args)
optimizer = MuonWithAdamW.from_model(model, lr=0.02, adamw_lr=3e-3)  # Muon
train(model, optimizer, args, mesh.size(), dist.get_rank())
