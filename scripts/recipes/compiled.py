"""Compiled and checkpointed: torchrun --standalone --nproc-per-node 2 scripts/recipes/compiled.py"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from tiny import Block, TinyGPT, arguments
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler

from muon_tutorial import MuonWithAdamW  # Muon


def main() -> None:
    args = arguments(__doc__)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = TinyGPT()
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    model = DistributedDataParallel(torch.compile(model))
    optimizer = MuonWithAdamW.from_model(model, lr=0.02, adamw_lr=3e-3)  # Muon
    scheduler = LambdaLR(optimizer, lambda step: (args.total_steps - step) / args.total_steps)
    data = args.sequences()
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=args.batch // dist.get_world_size(), sampler=sampler)
    parts = {"model": model.module, "optimizer": optimizer, "scheduler": scheduler}
    first = 0
    if args.resume:
        saved = torch.load(args.resume)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        first = saved["epoch"]

    for epoch in range(first, args.epochs):
        for number, batch in enumerate(loader, start=1):
            stepping = number % args.accumulate == 0
            with nullcontext() if stepping else model.no_sync():
                with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
                    loss = model(**batch)["loss"] / args.accumulate
                loss.backward()
            if stepping:
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        if dist.get_rank() == 0:
            args.save.mkdir(parents=True, exist_ok=True)
            states = {name: part.state_dict() for name, part in parts.items()}
            torch.save(states | {"epoch": epoch + 1}, args.save / f"epoch-{epoch + 1}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
