"""Lightning Fabric with FSDP2: python scripts/recipes/fabric_fsdp2.py

Trains as ``fabric_ddp.py`` does.
"""

from fabric_ddp import train
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from tiny import TinyGPT, arguments
from torch import bfloat16, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from muon_tutorial import MuonWithAdamW  # Muon

RANKS = 2

args = arguments(__doc__)


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=bfloat16 if args.bf16 else None)
    for module in [*model.layers, model]:
        fully_shard(module, mesh=mesh["data_parallel"], mp_policy=policy)
    return model


strategy = ModelParallelStrategy(parallelize, data_parallel_size=RANKS, tensor_parallel_size=1)
fabric = Fabric(accelerator="cpu", devices=RANKS, strategy=strategy)
fabric.launch()
fabric.seed_everything(0)
model = fabric.setup(TinyGPT())
optimizer = MuonWithAdamW.from_model(model, lr=0.02, adamw_lr=3e-3)  # Muon
scheduler = args.schedule(optimizer)
train(fabric, model, fabric.setup_optimizers(optimizer), scheduler, args)
