"""torchtitan's way, a container whose state is flat: torchrun --standalone --nproc-per-node 2 scripts/recipes/titan.py"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tiny import TinyGPT, arguments
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler

from muon_tutorial import MuonWithAdamW  # Muon

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class OptimizerContainer(Stateful):
    """Steps and saves the model's optimizer; keys of its state are names of parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = MuonWithAdamW.from_model(model, lr=0.02, adamw_lr=3e-3)  # Muon

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizer, options=FLAT)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state, options=FLAT)


def main() -> None:
    args = arguments(__doc__)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = TinyGPT()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if args.bf16 else None, reduce_dtype=torch.float32)
    for module in [*model.layers, model]:
        fully_shard(module, mp_policy=policy)
    container = OptimizerContainer(model)
    scheduler = LambdaLR(container.optimizer, lambda step: (args.total_steps - step) / args.total_steps)
    data = args.sequences()
    loader = DataLoader(
        data, args.batch // dist.get_world_size(), sampler=DistributedSampler(data, shuffle=False)
    )
    states = {"model": model, "optimizer": container, "scheduler": scheduler, "epoch": 0}
    if args.resume:
        dcp.load(states, checkpoint_id=args.resume)
    for epoch in range(states["epoch"], args.epochs):
        for number, batch in enumerate(loader, start=1):
            stepping = number % args.accumulate == 0
            model.set_requires_gradient_sync(stepping)
            (model(**batch)["loss"] / args.accumulate).backward()
            if stepping:
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
                container.optimizer.step()
                scheduler.step()
                container.optimizer.zero_grad()
        dcp.save(states | {"epoch": epoch + 1}, checkpoint_id=args.save / f"epoch-{epoch + 1}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
