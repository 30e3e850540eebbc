"""A model as the planner sees it: its families of equal matrices, and the matrices of one pipeline stage.

Knows shapes, and how tensor parallelism cuts them. ``model_configs`` and ``module_shapes`` read models from
configuration files and modules.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..errors import GridError
from ..plan.grid import Grid
from ..plan.layout import Replicate, Shard
from ..plan.matrix import Matrix

Cut = Shard | Replicate | None
"""How tensor parallelism cuts a matrix; None if this is unknown."""

FUSED_APART = (
    "Several matrices share one weight in {}. The plan counts q, k, v, gate, up and experts separately; Muon "
    "orthogonalizes the weight (in a stack, each slice) as one matrix unless parts= in its group splits it."
)
FUSED_WHOLE = (
    "Several matrices may share one weight in {}. The plan counts each weight as one matrix, as Muon does "
    "unless parts= in its group splits it."
)
"""Notes on fused weights; their names go into the braces."""


@dataclass(frozen=True, slots=True)
class MatrixFamily:
    """Matrices of one kind and shape. Each of ``layers`` has one, or one for each of its ``experts``.

    The stars in ``name`` stand for the layer and the expert. ``shape`` is (out, in) of one matrix.
    ``experts`` is 0 for matrices that belong to no expert.
    """

    name: str
    shape: tuple[int, int]
    cut: Cut
    layers: tuple[int, ...]
    experts: int = 0

    @property
    def count(self) -> int:
        """The number of these matrices in the whole model."""
        return len(self.layers) * max(1, self.experts)

    @property
    def numel(self) -> int:
        """The number of elements of all these matrices."""
        return self.count * math.prod(self.shape)

    def name_in(self, layer: int, expert: int = 0) -> str:
        """The name of one matrix.

        >>> MatrixFamily("layers.*.experts.*.up", (6, 4), None, (0, 1), experts=8).name_in(1, 7)
        'layers.1.experts.7.up'
        """
        name, numbers = self.name, (layer, expert) if self.experts else (layer,)
        for number in numbers[len(numbers) - name.count("*") :]:  # a name without a star is outside of layers
            name = name.replace("*", str(number), 1)
        return name


@dataclass(frozen=True, slots=True)
class OtherFamily:
    """Parameters that AdamW steps, with ``size`` elements in each of ``layers``, for all experts together.

    Embeddings count as parts of the first layer, the head and the last norm as parts of the last.
    """

    name: str
    size: int
    cut: Cut
    layers: tuple[int, ...]
    experts: int = 0

    @property
    def numel(self) -> int:
        return len(self.layers) * self.size


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model's sizes, and where they come from.

    ``heads`` and ``kv_heads`` are None if unknown. ``experts``: how many experts a layer has, 0 in a dense
    model. ``experts_met``: how many experts a token uses, None if unknown. ``families`` go to Muon,
    ``others`` to AdamW. ``notes`` are sentences to print with any plan of the model.
    """

    name: str
    source: str
    layers: int
    heads: int | None
    kv_heads: int | None
    experts: int
    families: tuple[MatrixFamily, ...]
    others: tuple[OtherFamily, ...]
    experts_met: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def active(self) -> int | None:
        """Elements of the matrices that a token uses; None if the number of experts per token is unknown.

        >>> from .models import find_model
        >>> find_model("kimi-k2").active, find_model("gpt2").active == find_model("gpt2").hidden
        (30346510336, True)
        """
        if self.experts and self.experts_met is None:
            return None
        met = [(family, self.experts_met if family.experts else 1) for family in self.families]
        return sum(len(family.layers) * (each or 0) * math.prod(family.shape) for family, each in met)

    @property
    def hidden(self) -> int:
        """Elements that Muon steps."""
        return sum(family.numel for family in self.families)

    @property
    def rest(self) -> int:
        """Elements that AdamW steps: embeddings, head, norms, routers, biases."""
        return sum(other.numel for other in self.others)

    @property
    def parameters(self) -> int:
        """Elements of the whole model; tied weights count once."""
        return self.hidden + self.rest


def stage_layers(shape: ModelShape, pp: int, stage: int = 0) -> range:
    """The layers of one pipeline stage. If layers do not divide evenly, the first stages have one layer more.

    Raises:
        GridError: there are fewer layers than stages, or the stage does not exist.
    """
    if pp > shape.layers:
        raise GridError(f"{shape.name} has {shape.layers} layers: pp={pp} would leave stages without any")
    if not 0 <= stage < pp:
        raise GridError(f"pp={pp} has stages 0 to {pp - 1}; got stage {stage}")
    each, more = divmod(shape.layers, pp)
    start = stage * each + min(stage, more)
    return range(start, start + each + (stage < more))


def stage_matrices(
    shape: ModelShape,
    *,
    tp: int = 1,
    ep: int = 1,
    pp: int = 1,
    dp_shard: int = 1,
    stage: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    grad_dtype: torch.dtype = torch.float32,
) -> tuple[list[Matrix], list[Matrix]]:
    """The matrices that Muon steps in one pipeline stage: dense matrices, and matrices of experts.

    Dense matrices are cut over the axis "tp" as in Megatron-LM. Experts' matrices are whole, and only the
    experts on one expert-parallel position are listed; every position has equally many. With ``dp_shard``,
    FSDP2 then cuts the rows of all matrices along that axis. Indices of both lists start at 0, because each
    list gets its own plan.

    Raises:
        GridError: the sizes do not divide the model.

    >>> from .models import find_model
    >>> dense, experts = stage_matrices(find_model("mixtral-8x7b"), tp=2, ep=8, pp=32, stage=31)
    >>> [(matrix.name, matrix.shape, matrix.cuts) for matrix in dense][-1]
    ('layers.31.attention.o', (4096, 4096), (('tp', Shard(dim=1, sizes=None)),))
    >>> [(matrix.name, matrix.shape) for matrix in experts][-1]
    ('layers.31.experts.0.down', (4096, 14336))
    """
    check_grid(shape, tp=tp, ep=ep, pp=pp)
    mine = stage_layers(shape, pp, stage)
    inner = (("dp_shard", Shard(0)),) if dp_shard > 1 else ()

    def records(found: Iterator[tuple[MatrixFamily, str]]) -> list[Matrix]:
        return [
            Matrix(
                index,
                name,
                family.shape,
                ((("tp", family.cut),) if tp > 1 and isinstance(family.cut, Shard) else ()) + inner,
                dtype=dtype,
                grad_dtype=grad_dtype,
            )
            for index, (family, name) in enumerate(found)
        ]

    dense = (
        (family, family.name_in(layer))
        for layer in mine
        for family in shape.families
        if not family.experts and layer in family.layers
    )
    return records(dense), records(_of_experts(shape, mine, ep))


def check_grid(shape: ModelShape, *, tp: int, ep: int, pp: int) -> None:
    """Check that a model can be cut over this grid.

    tp must not cut through heads. If there are fewer key-value heads than tp ranks, Megatron-LM still cuts
    their projections evenly, and gathers the outputs (megatron/core/transformer/attention.py,
    ``SelfAttention.get_query_key_value_tensors``).

    Raises:
        GridError: the model cannot be cut over this grid.
    """
    Grid.of(tp=tp, ep=ep, pp=pp)
    stage_layers(shape, pp)
    _check_tp(shape, tp)
    if ep > 1 and not shape.experts:
        raise GridError(f"{shape.name} has no experts for ep={ep} to divide")
    for family in shape.families:
        if family.experts % ep:
            raise GridError(f"ep={ep} does not divide the {family.experts} experts of {shape.name}")


def _check_tp(shape: ModelShape, tp: int) -> None:
    if tp == 1:
        return
    dense = [family for family in shape.families if not family.experts]
    unknown = [family.name for family in dense if family.cut is None]
    if unknown:
        raise GridError(
            f"it is unknown how tensor parallelism cuts {unknown[0]} of {shape.name}: plan it with tp=1, "
            "or give a config.json of a known model_type"
        )
    if shape.heads and shape.heads % tp:
        raise GridError(f"tp={tp} does not divide the {shape.heads} heads of {shape.name}")
    if shape.kv_heads and shape.kv_heads % tp and tp % shape.kv_heads:
        raise GridError(
            f"tp={tp} must divide the {shape.kv_heads} key-value heads of {shape.name}, "
            "or be a multiple of them"
        )
    for family in dense:
        if isinstance(family.cut, Shard) and family.shape[family.cut.dim] % tp:
            side = ("rows", "columns")[family.cut.dim]
            raise GridError(
                f"tp={tp} does not divide the {family.shape[family.cut.dim]} {side} of {family.name} "
                f"in {shape.name}"
            )


def _of_experts(shape: ModelShape, layers: range, ep: int) -> Iterator[tuple[MatrixFamily, str]]:
    for layer in layers:
        held = [family for family in shape.families if family.experts and layer in family.layers]
        for expert in range(max((family.experts // ep for family in held), default=0)):
            for family in held:
                if expert < family.experts // ep:
                    yield family, family.name_in(layer, expert)
