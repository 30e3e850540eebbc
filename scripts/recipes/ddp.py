"""DistributedDataParallel: torchrun --standalone --nproc-per-node 2 scripts/recipes/ddp.py"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from tiny import Arguments, TinyGPT, arguments
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from muon_tutorial import MuonWithAdamW  # Muon


def train(model: DistributedDataParallel, weights: Stateful, optimizer: Optimizer, args: Arguments) -> None:
    scheduler, loader = args.schedule(optimizer), args.loader(dist.get_world_size(), dist.get_rank())
    parts = {"model": weights, "optimizer": optimizer, "scheduler": scheduler}
    if args.resume:
        saved = torch.load(args.resume)
        for name, part in parts.items():
            part.load_state_dict(saved[name])

    for epoch in range(args.first, args.epochs):
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
            torch.save(states, args.save / f"epoch-{epoch + 1}")
        dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    args = arguments(__doc__)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(TinyGPT())
    optimizer = MuonWithAdamW.from_model(model, lr=0.02, adamw_lr=3e-3)  # Muon
    train(model, model.module, optimizer, args)


if __name__ == "__main__":
    main()
