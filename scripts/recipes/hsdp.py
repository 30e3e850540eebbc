"""HSDP, replicas of sharded models: torchrun --standalone --nproc-per-node 4 scripts/recipes/hsdp.py"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tiny import TinyGPT, arguments
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler

from muon_tutorial import MuonWithAdamW  # Muon


def main() -> None:
    args = arguments(__doc__)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = TinyGPT()
    policy = MixedPrecisionPolicy(torch.bfloat16 if args.bf16 else None, reduce_dtype=torch.float32)
    for module in [*model.layers, model]:
        fully_shard(module, mesh=mesh, mp_policy=policy)
    optimizer = MuonWithAdamW.from_model(model, lr=0.02, adamw_lr=3e-3)  # Muon
    scheduler = LambdaLR(optimizer, lambda step: (args.total_steps - step) / args.total_steps)
    data = args.sequences()
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=args.batch // mesh.size(), sampler=sampler)

    def states(epoch: int) -> dict[str, object]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments, "scheduler": scheduler.state_dict(), "epoch": epoch}

    first = 0
    if args.resume:
        old = states(first)
        dcp.load(old, checkpoint_id=args.resume)
        set_state_dict(model, optimizer, model_state_dict=old["model"], optim_state_dict=old["optimizer"])
        scheduler.load_state_dict(old["scheduler"])
        first = old["epoch"]
    for epoch in range(first, args.epochs):
        for number, batch in enumerate(loader, start=1):
            stepping = number % args.accumulate == 0
            model.set_requires_gradient_sync(stepping)
            (model(**batch)["loss"] / args.accumulate).backward()
            if stepping:
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        dcp.save(states(epoch + 1), checkpoint_id=args.save / f"epoch-{epoch + 1}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
