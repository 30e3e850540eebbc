"""A plain loop in one process: python scripts/recipes/plain.py"""

import torch
from tiny import TinyGPT, arguments
from torch.utils.data import DataLoader

from muon_tutorial import MuonWithAdamW  # Muon

args = arguments(__doc__)
torch.manual_seed(0)
model = TinyGPT()
optimizer = MuonWithAdamW.from_model(model, lr=0.02, adamw_lr=3e-3)  # Muon
scheduler = args.schedule(optimizer)
loader = DataLoader(args.sequences(), batch_size=args.batch)
parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
if args.resume:
    saved = torch.load(args.resume)
    for name, part in parts.items():
        part.load_state_dict(saved[name])

for epoch in range(args.first, args.epochs):
    for number, batch in enumerate(loader, start=1):
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            loss = model(**batch)["loss"] / args.accumulate
        loss.backward()
        if number % args.accumulate == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    print(f"epoch {epoch + 1}: loss {loss.item() * args.accumulate:.3f}")
    args.save.mkdir(parents=True, exist_ok=True)
    states = {name: part.state_dict() for name, part in parts.items()}
    torch.save(states, args.save / f"epoch-{epoch + 1}")
