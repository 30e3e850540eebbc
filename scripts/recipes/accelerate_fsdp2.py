"""accelerate launch --use_fsdp --fsdp_version 2 --num_processes 2 scripts/recipes/accelerate_fsdp2.py

The optimizer is made before ``prepare``, which puts FSDP2's parameters into it.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DataLoaderConfiguration, set_seed
from tiny import TinyGPT, arguments
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from muon_tutorial import MuonWithAdamW  # Muon


def main() -> None:
    args = arguments(__doc__)
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision="bf16" if args.bf16 else "no",
        gradient_accumulation_steps=args.accumulate,
        dataloader_config=DataLoaderConfiguration(split_batches=True),  # --batch counts all ranks together
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Block"],
            state_dict_type="SHARDED_STATE_DICT",
        ),
    )
    set_seed(0)
    model = TinyGPT()
    optimizer = MuonWithAdamW.from_model(model, lr=0.02, adamw_lr=3e-3)  # Muon
    scheduler = LambdaLR(optimizer, lambda step: (args.total_steps - step) / args.total_steps)
    loader = DataLoader(args.sequences(), batch_size=args.batch)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    accelerator.print("FSDP2" if accelerator.is_fsdp2 else "no GPU: Accelerate uses DDP, not FSDP2")
    first = 0
    if args.resume:
        accelerator.load_state(args.resume)
        first = int(args.resume.name.split("-")[1])

    for epoch in range(first, args.epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch)["loss"]
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), args.max_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch + 1}: loss {loss.item():.3f}")
        accelerator.save_state(args.save / f"epoch-{epoch + 1}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
