"""ZeRO-1 without DDP: torchrun --standalone --nproc-per-node 2 scripts/recipes/zero1.py

The optimizer averages the gradients itself, and every rank keeps its own shard of the momentum.
"""

import torch
import torch.distributed as dist
from tiny import TinyGPT, arguments

from muon_tutorial import MuonWithAdamW, build_mesh  # Muon

args = arguments(__doc__)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = TinyGPT()
mesh = build_mesh({"dp": dist.get_world_size()})  # Muon
optimizer = MuonWithAdamW.from_model(model, lr=0.02, adamw_lr=3e-3, strategy="zero1", mesh=mesh)  # Muon
scheduler, loader = args.schedule(optimizer), args.loader(dist.get_world_size(), dist.get_rank())
parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
if args.resume:
    saved = torch.load(args.resume / f"rank-{dist.get_rank()}.pt")
    for name, part in parts.items():
        part.load_state_dict(saved[name])

for epoch in range(args.first, args.epochs):
    for number, batch in enumerate(loader, start=1):
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            loss = model(**batch)["loss"] / args.accumulate
        loss.backward()
        if number % args.accumulate == 0:
            optimizer.ready_gradients(args.max_norm)  # Muon
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    folder = args.save / f"epoch-{epoch + 1}"
    folder.mkdir(parents=True, exist_ok=True)
    states = {name: part.state_dict() for name, part in parts.items()}
    torch.save(states, folder / f"rank-{dist.get_rank()}.pt")
    dist.barrier()
dist.destroy_process_group()
