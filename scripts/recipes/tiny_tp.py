"""How tensor parallelism cuts the tiny GPT: attention by heads, sequences between layers."""

from tiny import TinyGPT
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

FROM_TOKENS = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
WHOLE_INPUT = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
OUTER = {
    "embedding": FROM_TOKENS,
    "positions": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}
LAYER = {
    "norm1": SequenceParallel(),
    "attention": WHOLE_INPUT,
    **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
    "attention.o": RowwiseParallel(output_layouts=Shard(1)),
    "norm2": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
}


def cut_over_tp(model: TinyGPT, mesh: DeviceMesh) -> None:
    """Cut the model in place. Must be called by all ranks of the mesh."""
    parallelize_module(model, mesh, OUTER)
    for layer in model.layers:
        parallelize_module(layer, mesh, LAYER)
