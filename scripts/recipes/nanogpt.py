"""nanoGPT's way, with tied weights: torchrun --standalone --nproc-per-node 2 scripts/recipes/nanogpt.py"""

import os

import torch
from tiny import Sequences, TinyGPT, arguments
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_collate

from muon_tutorial import MuonWithAdamW  # Muon

args = arguments(__doc__)
rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world_size > 1:
    init_process_group("gloo")
torch.manual_seed(0)
raw_model = TinyGPT(tied=True)
learning_rate, weight_decay, beta1, beta2 = 3e-3, 0.1, 0.9, 0.95
options = {"weight_decay": weight_decay, "betas": (beta1, beta2), "decay_vectors": False}
optimizer = MuonWithAdamW.from_model(raw_model, lr=learning_rate, **options)  # Muon
scaler = torch.amp.GradScaler("cpu", enabled=False)  # as in nanoGPT; fp16 would need it
first = 0
if args.resume:
    checkpoint = torch.load(args.resume)
    raw_model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    first = checkpoint["iteration"]
model = DistributedDataParallel(raw_model) if world_size > 1 else raw_model
data, size = Sequences(args.total_steps * args.accumulate * args.batch), args.batch // world_size

for iteration in range(first, args.total_steps):
    for group in optimizer.param_groups:
        group["lr"] = 3e-3 * (args.total_steps - iteration) / args.total_steps
    for micro_step in range(args.accumulate):
        start = (iteration * args.accumulate + micro_step) * args.batch + rank * size
        batch = default_collate([data[index] for index in range(start, start + size)])
        model.require_backward_grad_sync = micro_step == args.accumulate - 1
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            loss = model(**batch)["loss"] / args.accumulate
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    done = iteration + 1
    if done % args.steps == 0 and rank == 0:
        states = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict(), "iteration": done}
        args.save.mkdir(parents=True, exist_ok=True)
        torch.save(states, args.save / f"epoch-{done // args.steps}")
if world_size > 1:
    destroy_process_group()
