"""Lightning Fabric with DDP.

fabric run --accelerator cpu --strategy ddp --devices 2 scripts/recipes/fabric_ddp.py
"""

from __future__ import annotations

from lightning.fabric import Fabric
from tiny import TinyGPT, arguments
from torch.utils.data import DataLoader

from muon_tutorial import MuonWithAdamW  # Muon


def main() -> None:
    args = arguments(__doc__)
    fabric = Fabric(precision="bf16-mixed" if args.bf16 else "32-true")
    fabric.seed_everything(0)
    model = TinyGPT()
    optimizer = MuonWithAdamW.from_model(model, lr=0.02, adamw_lr=3e-3)  # Muon
    scheduler = args.schedule(optimizer)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(
        DataLoader(args.sequences(), batch_size=args.batch // fabric.world_size)
    )
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 0}
    if args.resume:
        fabric.load(args.resume, state)

    for epoch in range(state["epoch"], args.epochs):
        for number, batch in enumerate(loader, start=1):
            stepping = number % args.accumulate == 0
            with fabric.no_backward_sync(model, enabled=not stepping):
                loss = model(**batch)["loss"]
                fabric.backward(loss / args.accumulate)
            if stepping:
                fabric.clip_gradients(model, optimizer, max_norm=args.max_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        fabric.print(f"epoch {epoch + 1}: loss {loss.item():.3f}")
        state["epoch"] = epoch + 1
        fabric.save(args.save / f"epoch-{epoch + 1}", state)


if __name__ == "__main__":
    main()
