"""LoRA by peft, under DDP: torchrun --standalone --nproc-per-node 2 scripts/recipes/lora.py

The optimizer is made after ``get_peft_model``, which freezes the model and adds the adapters.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from tiny import TinyGPT, arguments
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler

from muon_tutorial import MuonWithAdamW  # Muon


def main() -> None:
    args = arguments(__doc__)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    adapters = LoraConfig(r=4, lora_alpha=64, target_modules=["q", "k", "v", "o", "up", "down"])
    model = DistributedDataParallel(get_peft_model(TinyGPT(), adapters))
    optimizer = MuonWithAdamW.from_model(model, lr=0.02)  # Muon
    scheduler = LambdaLR(optimizer, lambda step: (args.total_steps - step) / args.total_steps)
    data = args.sequences()
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=args.batch // dist.get_world_size(), sampler=sampler)
    saved = torch.load(args.resume) if args.resume else {"epoch": 0}
    if args.resume:
        set_peft_model_state_dict(model.module, saved["adapters"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])

    for epoch in range(saved["epoch"], args.epochs):
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
            states = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
            states |= {"adapters": get_peft_model_state_dict(model.module), "epoch": epoch + 1}
            torch.save(states, args.save / f"epoch-{epoch + 1}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
