"""Lightning's Trainer, which starts its own processes: python scripts/recipes/lightning_trainer.py"""

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny import Arguments, TinyGPT, arguments
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from muon_tutorial import MuonWithAdamW  # Muon

RANKS = 2


class Module(L.LightningModule):
    """The tiny GPT and how to train it."""

    def __init__(self, args: Arguments) -> None:
        super().__init__()
        self.args, self.model = args, TinyGPT()

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        return self.model(**batch)["loss"]

    def train_dataloader(self) -> DataLoader:
        data = self.args.sequences()  # without our own sampler, Lightning would shuffle
        return DataLoader(data, self.args.batch // RANKS, sampler=DistributedSampler(data, shuffle=False))

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = MuonWithAdamW.from_model(self, lr=0.02, adamw_lr=3e-3)  # Muon
        schedule = {"scheduler": self.args.schedule(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


args = arguments(__doc__)
L.seed_everything(0)
trainer = L.Trainer(
    accelerator="cpu",
    strategy="ddp",
    devices=RANKS,
    precision="bf16-mixed" if args.bf16 else "32-true",
    max_epochs=args.epochs,
    accumulate_grad_batches=args.accumulate,
    gradient_clip_val=args.max_norm,
    callbacks=[ModelCheckpoint(args.save, "checkpoint-{step}", save_top_k=-1, auto_insert_metric_name=False)],
    logger=False,
    enable_progress_bar=False,
)
trainer.fit(Module(args), ckpt_path=args.resume)
