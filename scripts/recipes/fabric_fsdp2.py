"""Lightning Fabric with FSDP2: python scripts/recipes/fabric_fsdp2.py"""

from __future__ import annotations

from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from tiny import TinyGPT, arguments
from torch import bfloat16, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader

from muon_tutorial import MuonWithAdamW  # Muon

RANKS = 2


def main() -> None:
    args = arguments(__doc__)

    def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        policy = MixedPrecisionPolicy(param_dtype=bfloat16 if args.bf16 else None)
        for module in [*model.layers, model]:
            fully_shard(module, mesh=mesh["data_parallel"], mp_policy=policy)
        return model

    strategy = ModelParallelStrategy(parallelize, data_parallel_size=RANKS, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy=strategy)
    fabric.launch()
    fabric.seed_everything(0)
    model = fabric.setup(TinyGPT())
    optimizer = MuonWithAdamW.from_model(model, lr=0.02, adamw_lr=3e-3)  # Muon
    scheduler = args.schedule(optimizer)
    optimizer = fabric.setup_optimizers(optimizer)
    loader = fabric.setup_dataloaders(DataLoader(args.sequences(), batch_size=args.batch // RANKS))
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 0}
    if args.resume:
        fabric.load(args.resume, state)
        scheduler.load_state_dict(state["scheduler"])  # with FSDP2, Fabric leaves the saved dict here
        state["scheduler"] = scheduler

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
        state["epoch"] = epoch + 1
        fabric.save(args.save / f"epoch-{epoch + 1}", state)


if __name__ == "__main__":
    main()
