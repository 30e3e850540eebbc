"""LoRA by peft, under DDP: torchrun --standalone --nproc-per-node 2 scripts/recipes/lora.py

The optimizer is made after ``get_peft_model``, which freezes the model and adds the adapters. The adapters
train as in ``ddp.py``, and only adapters are saved.
"""

import torch
import torch.distributed as dist
from ddp import train
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from tiny import TinyGPT, arguments
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel

from muon_tutorial import MuonWithAdamW  # Muon


class Adapters(Stateful):
    """The weights to save: only the adapters."""

    def __init__(self, model: PeftModel) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Tensor]:
        return get_peft_model_state_dict(self.model)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        set_peft_model_state_dict(self.model, state)


args = arguments(__doc__)
dist.init_process_group("gloo")
torch.manual_seed(0)
adapters = LoraConfig(r=4, lora_alpha=64, target_modules=["q", "k", "v", "o", "up", "down"])
model = DistributedDataParallel(get_peft_model(TinyGPT(), adapters))
optimizer = MuonWithAdamW.from_model(model, lr=0.02)  # Muon
train(model, Adapters(model.module), optimizer, args)
