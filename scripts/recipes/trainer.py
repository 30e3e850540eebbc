"""Hugging Face's Trainer: torchrun --standalone --nproc-per-node 2 scripts/recipes/trainer.py"""

import torch
from tiny import Arguments, TinyGPT, arguments
from transformers import Trainer, TrainingArguments, set_seed

from muon_tutorial import MuonWithAdamW  # Muon


def settings(args: Arguments) -> dict[str, object]:
    return {
        "output_dir": str(args.save),
        "use_cpu": not torch.cuda.is_available(),
        "bf16": args.bf16,
        "num_train_epochs": args.epochs,
        "per_device_train_batch_size": args.batch,
        "gradient_accumulation_steps": args.accumulate,
        "max_grad_norm": args.max_norm,
        "lr_scheduler_type": "linear",
        "save_strategy": "epoch",
        "train_sampling_strategy": "sequential",
        "accelerator_config": {"split_batches": True},  # --batch counts all ranks together
        "report_to": "none",
    }


def main() -> None:
    args = arguments(__doc__)
    set_seed(0)
    trainer = Trainer(
        TinyGPT(),
        TrainingArguments(**settings(args)),
        train_dataset=args.sequences(),
        optimizer_cls_and_kwargs=(lambda: MuonWithAdamW.from_model, {"lr": 0.02, "adamw_lr": 3e-3}),  # Muon
    )
    trainer.train(resume_from_checkpoint=args.resume)


if __name__ == "__main__":
    main()
