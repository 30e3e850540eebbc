"""Accelerate with DDP: accelerate launch --multi_gpu --num_processes 2 scripts/recipes/accelerate_ddp.py

Use ``--multi_gpu`` even without a GPU: with ``--cpu``, Accelerate starts only one process.
"""

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from tiny import Arguments, TinyGPT, arguments
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from muon_tutorial import MuonWithAdamW  # Muon


def accelerated(args: Arguments, **plugins: object) -> Accelerator:
    return Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision="bf16" if args.bf16 else "no",
        gradient_accumulation_steps=args.accumulate,
        dataloader_config=DataLoaderConfiguration(split_batches=True),  # --batch counts all ranks together
        **plugins,
    )


def train(accelerator: Accelerator, model: TinyGPT, optimizer: Optimizer, args: Arguments) -> None:
    loader = DataLoader(args.sequences(), batch_size=args.batch)
    given = (model, optimizer, args.schedule(optimizer), loader)
    model, optimizer, scheduler, loader = accelerator.prepare(*given)
    if args.resume:
        accelerator.load_state(args.resume)

    for epoch in range(args.first, args.epochs):
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


def main() -> None:
    args = arguments(__doc__)
    accelerator = accelerated(args)
    set_seed(0)
    model = TinyGPT()
    optimizer = MuonWithAdamW.from_model(model, lr=0.02, adamw_lr=3e-3)  # Muon
    train(accelerator, model, optimizer, args)


if __name__ == "__main__":
    main()
