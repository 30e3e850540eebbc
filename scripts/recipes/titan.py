"""torchtitan's way: torchrun --standalone --nproc-per-node 2 scripts/recipes/titan.py"""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tiny import TinyGPT, arguments
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from muon_tutorial import MuonWithAdamW  # Muon

FLAT = dcp_state.StateDictOptions(flatten_optimizer_state_dict=True)


class OptimizerContainer(Stateful):
    """An optimizer whose state is one flat dict, keyed by parameters' names."""

    def __init__(self, model: TinyGPT) -> None:
        self.model = model
        self.optimizer = MuonWithAdamW.from_model(model, lr=0.02, adamw_lr=3e-3)  # Muon

    def state_dict(self) -> dict[str, object]:
        return dcp_state.get_optimizer_state_dict(self.model, self.optimizer, options=FLAT)

    def load_state_dict(self, state: dict[str, object]) -> None:
        dcp_state.set_optimizer_state_dict(self.model, self.optimizer, state, options=FLAT)


args = arguments(__doc__)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = TinyGPT()
for module in [*model.layers, model]:
    fully_shard(module, mp_policy=MixedPrecisionPolicy(torch.bfloat16 if args.bf16 else None, torch.float32))
container = OptimizerContainer(model)
optimizer = container.optimizer
scheduler, loader = args.schedule(optimizer), args.loader(dist.get_world_size(), dist.get_rank())
states = {"model": model, "optimizer": container, "scheduler": scheduler}
if args.resume:
    dcp.load(states, checkpoint_id=args.resume)
for epoch in range(args.first, args.epochs):
    for number, batch in enumerate(loader, start=1):
        stepping = number % args.accumulate == 0
        model.set_requires_gradient_sync(stepping)
        (model(**batch)["loss"] / args.accumulate).backward()
        if stepping:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    dcp.save(states, checkpoint_id=args.save / f"epoch-{epoch + 1}")
dist.destroy_process_group()
