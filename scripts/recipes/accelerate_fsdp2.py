"""accelerate launch --use_fsdp --fsdp_version 2 --num_processes 2 scripts/recipes/accelerate_fsdp2.py

The optimizer is made before ``prepare``, which puts FSDP2's parameters into it. Trains as
``accelerate_ddp.py`` does.
"""

from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils import set_seed
from accelerate_ddp import accelerated, train
from tiny import TinyGPT, arguments

from muon_tutorial import MuonWithAdamW  # Muon

args = arguments(__doc__)
sharding = FullyShardedDataParallelPlugin(
    fsdp_version=2,
    auto_wrap_policy="transformer_based_wrap",
    transformer_cls_names_to_wrap=["Block"],
    state_dict_type="SHARDED_STATE_DICT",
)
accelerator = accelerated(args, fsdp_plugin=sharding)
accelerator.print("FSDP2" if accelerator.is_fsdp2 else "no GPU: Accelerate uses DDP, not FSDP2")
set_seed(0)
model = TinyGPT()
optimizer = MuonWithAdamW.from_model(model, lr=0.02, adamw_lr=3e-3)  # Muon
train(accelerator, model, optimizer, args)
