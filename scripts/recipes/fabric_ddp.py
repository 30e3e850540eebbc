"""Lightning Fabric with DDP.

fabric run --accelerator cpu --strategy ddp --devices 2 scripts/recipes/fabric_ddp.py
"""

from lightning.fabric import Fabric
from tiny import Arguments, TinyGPT, arguments
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from muon_tutorial import MuonWithAdamW  # Muon


def train(fabric: Fabric, model: TinyGPT, optimizer: Optimizer, scheduler: LambdaLR, args: Arguments) -> None:
    loader = fabric.setup_dataloaders(
        DataLoader(args.sequences(), batch_size=args.batch // fabric.world_size)
    )
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    if args.resume:
        fabric.load(args.resume, state)
        if isinstance(state["scheduler"], dict):  # with FSDP2, Fabric puts the saved dict here
            scheduler.load_state_dict(state["scheduler"])
            state["scheduler"] = scheduler

    for epoch in range(args.first, args.epochs):
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
        fabric.save(args.save / f"epoch-{epoch + 1}", state)


def main() -> None:
    args = arguments(__doc__)
    fabric = Fabric(precision="bf16-mixed" if args.bf16 else "32-true")
    fabric.seed_everything(0)
    model = TinyGPT()
    optimizer = MuonWithAdamW.from_model(model, lr=0.02, adamw_lr=3e-3)  # Muon
    scheduler = args.schedule(optimizer)
    model, optimizer = fabric.setup(model, optimizer)
    train(fabric, model, optimizer, scheduler, args)


if __name__ == "__main__":
    main()
