"""TRL's SFTTrainer: torchrun --standalone --nproc-per-node 2 scripts/recipes/sft.py

``peft_config=`` works, too, because the trainer makes the adapters before it asks for the optimizer.
The settings are the same as in ``trainer.py``.
"""

from datasets import Dataset
from tiny import VOCABULARY, WIDTH, arguments
from tokenizers import Tokenizer, models
from trainer import settings
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

from muon_tutorial import MuonWithAdamW  # Muon

args = arguments(__doc__)
set_seed(0)
sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2}
config = LlamaConfig(vocab_size=VOCABULARY, num_attention_heads=4, **sizes)
words = models.WordLevel({f"{number}": number for number in range(VOCABULARY)}, unk_token="0")
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="1", pad_token="2")
trainer = SFTTrainer(
    LlamaForCausalLM(config),
    SFTConfig(**settings(args), gradient_checkpointing=False),
    train_dataset=Dataset.from_list([{"input_ids": it["input_ids"].tolist()} for it in args.sequences()]),
    processing_class=tokenizer,
    optimizer_cls_and_kwargs=(lambda: MuonWithAdamW.from_model, {"lr": 0.02, "adamw_lr": 3e-3}),  # Muon
)
trainer.train(resume_from_checkpoint=args.resume)
