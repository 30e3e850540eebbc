"""FSDP2: torchrun --standalone --nproc-per-node 2 scripts/recipes/fsdp2.py"""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tiny import Arguments, TinyGPT, arguments
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from muon_tutorial import MuonWithAdamW  # Muon


def shard(model: TinyGPT, mesh: DeviceMesh, args: Arguments) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16 if args.bf16 else None, reduce_dtype=torch.float32)
    for module in [*model.layers, model]:
        fully_shard(module, mesh=mesh, mp_policy=policy)


def train(model: TinyGPT, optimizer: torch.optim.Optimizer, args: Arguments, ranks: int, place: int) -> None:
    scheduler, loader = args.schedule(optimizer), args.loader(ranks, place)

    def states() -> dict[str, object]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments, "scheduler": scheduler}

    if args.resume:
        old = states()
        dcp.load(old, checkpoint_id=args.resume)
        set_state_dict(model, optimizer, model_state_dict=old["model"], optim_state_dict=old["optimizer"])
    for epoch in range(args.first, args.epochs):
        for number, batch in enumerate(loader, start=1):
            stepping = number % args.accumulate == 0
            model.set_requires_gradient_sync(stepping)
            (model(**batch)["loss"] / args.accumulate).backward()
            if stepping:
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        dcp.save(states(), checkpoint_id=args.save / f"epoch-{epoch + 1}")
    dist.destroy_process_group()


def main() -> None:
    args = arguments(__doc__)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = TinyGPT()
    shard(model, mesh, args)
    optimizer = MuonWithAdamW.from_model(model, lr=0.02, adamw_lr=3e-3)  # Muon
    train(model, optimizer, args, mesh.size(), mesh.get_local_rank())


if __name__ == "__main__":
    main()
