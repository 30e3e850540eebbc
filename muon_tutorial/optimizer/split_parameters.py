"""Which parameters of a model go to Muon: the hidden matrices, and nothing else.

Knows modules and names, and imports no library of models: what those have of their own is known by attributes
and type names. What the field does, and where it says so:

- Embeddings, classifier heads, gains and biases stay with AdamW: Keller Jordan's post
  (https://kellerjordan.github.io/posts/muon/#empirical-considerations) and his README
  (https://github.com/KellerJordan/Muon/blob/50c4225d6d5d2514834c6d6dec1a0553dfb04568/README.md). Rows of a
  table stand for tokens or positions, and no input mixes them. Neither rank nor module type tells a head, as
  dion's README warns (microsoft/dion, README.md, "Building Parameter Groups"): here names do, and the model's
  own ``get_output_embeddings``.
- Megatron-LM gives Muon what has two dimensions, embedding and output layer aside
  (megatron/core/optimizer/emerging_optimizers.py, ``_is_nonlinear_or_embedding``). So the convolution kernel
  of a state-space model goes to Adam, and so does its mixer's fused ``in_proj``
  (megatron/core/ssm/mamba_mixer.py); here that one is a hidden matrix like any other. ``A_log``, ``D`` and
  ``dt_bias`` are rates and gains, whatever their shape: no input is multiplied by them as by a matrix.
- Routers: opinions differ. They are heads over experts. AdamW has them in MuLoCo's torchtitan
  (facebookresearch/MuLoCo, torchtitan/config/diloco, ``routing_optimizer``) and behind an option of
  Megatron-LM (https://github.com/NVIDIA/Megatron-LM/pull/6504); Megatron-LM by default and GLM-4.5
  (arXiv 2508.06471, section 2.4) give them to Muon. Here AdamW has them.
- Experts are trained with Muon, each matrix on its own, in Moonlight (arXiv 2502.16982) and GLM-4.5. As
  stacks of three dimensions they need ``parts="stack"``, and ``torch.optim.Muon`` takes none:
  ``experts="muon"`` asks for it.
- Query, key and value in one weight do better apart (Keller Jordan's post, same section; Megatron-LM's
  default, ``muon_split_qkv`` in megatron/core/optimizer/optimizer_config.py). They are cut where it is
  certain how they lie: in ``c_attn``, as GPT-2, nanoGPT and their kin call it, and in
  ``torch.nn.MultiheadAttention``.
  Elsewhere they lie head by head in some models and block by block in others: those stay whole, and the table
  says so.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from torch import Tensor, nn

from ..errors import UsageError
from ..plan.matrix import Parts
from .parameter_split import EXPERTS, ParameterSplit, Verdict, experts_message

HEAD_NAMES = (
    *("output", "output_layer", "unembed", "unembedding", "embed_out", "logits", "to_logits", "readout"),
    *("classifier", "score", "qa_outputs", "seq_relationship"),
)
"""Names by which a module outside any numbered layer is taken for an output head, besides ``*head``."""

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""What ``torch.compile``, checkpointing and FSDP put into names; DDP's ``module`` is an only child."""

TABLE_WORDS = {"pos", "position", "positional", "positions", "token", "tokens"}
"""Words in the name of a bare parameter whose rows stand for tokens or positions, besides ``*emb*``."""

STATE_SPACE_NAMES = ("A_log", "D", "dt_bias")
FUSED_NAMES = (
    "c_attn",
    "qkv",
    "qkv_proj",
    "Wqkv",
    "query_key_value",
    "gate_up_proj",
    "in_proj",
    "in_proj_weight",
)

# Experts stored (E, in, out) that do not say so: older transformers have no attribute ``is_transposed``, and
# Llama 4's experts have none in 5.23 either.
TRANSPOSED_EXPERTS = ("GptOssExperts", "Llama4TextExperts")

Experts = Literal["adamw", "muon"]
Fused = Literal["split", "whole"]


def split_parameters(
    model: nn.Module,
    *,
    exclude: Sequence[str] = (),
    experts: Experts | None = None,
    fused: Fused = "split",
    include_frozen: bool = False,
) -> ParameterSplit:
    """Split a model's parameters between Muon and AdamW: ``hidden, rest = split_parameters(model)``.

    ``hidden`` are groups for ``Muon``, ``rest`` is a list for ``torch.optim.AdamW``; both with names.

    Every parameter is in exactly one of them, in the model's order; a tied one under its first name; a frozen
    one in neither. Names lose what wrappers (``torch.compile``, checkpointing, FSDP, DDP) put into them. A
    parameter goes to the rest if any of its names or modules says so; ``print(split_parameters(model))``
    shows each with the reason. A head without a telling name, as in ``nn.Sequential``, needs ``exclude``.

    Weights stored (in, out), as in Hugging Face's ``Conv1D`` and some experts, come in a group that says
    ``transposed``.

    Args:
        exclude: patterns (shell style, on the name with or without wrappers) of what AdamW is to have.
        experts: who steps three-dimensional experts; None is ``"adamw"``, with a warning where that is more
            than half of the model. Experts that are modules of their own are hidden matrices anyway.
        fused: whether q, k and v in one weight are orthogonalized apart, where it is certain how they lie.
            Functions of your own in a ``DistributedConfig`` take whole weights only.
        include_frozen: sort parameters that need no gradient like all others.

    Raises:
        UsageError: a pattern of ``exclude`` matches no parameter, an option has another value, or FSDP1 has
            flattened the model.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 9))
    >>> split = split_parameters(model, exclude=["3.*"])
    >>> split.hidden_names, split.rest_names
    (['1.weight'], ['0.weight', '1.bias', '2.weight', '2.bias', '3.weight', '3.bias'])
    """
    _check_options(model, experts, fused)
    sorter = _Sorter.of(model, tuple(exclude), experts or "adamw", fused, include_frozen)
    split = ParameterSplit(tuple(sorter.verdicts()))
    if experts is None and split.left_experts > split.numel / 2:
        warnings.warn(experts_message(split), UserWarning, stacklevel=2)
    return split


@dataclass(frozen=True, slots=True, eq=False)
class _Holding:
    """A parameter where a module holds it: under its full name, and its name without wrappers."""

    module: nn.Module
    full_name: str
    name: str
    param: nn.Parameter

    @property
    def path(self) -> list[str]:
        """The modules on the way, then the parameter's own name."""
        return self.name.split(".")

    @property
    def own_name(self) -> str:
        return self.path[-1]

    @property
    def in_experts(self) -> bool:
        return "expert" in f"{self.name} {type(self.module).__name__}".lower()

    @property
    def is_stack(self) -> bool:
        """Whether it is three-dimensional experts, (E, out, in) or (E, in, out)."""
        return self.param.ndim == 3 and self.in_experts and not _is_convolution(self.module)


@dataclass(frozen=True, slots=True, eq=False)
class _Sorter:
    """Sorts a model's parameters.

    ``asked`` are those that the model itself calls embeddings, by id; ``moe`` are the names of modules that
    hold experts directly.
    """

    holdings: Sequence[_Holding]
    asked: dict[int, str]
    moe: frozenset[str]
    exclude: Sequence[str]
    experts: Experts
    fused: Fused
    include_frozen: bool

    @classmethod
    def of(
        cls, model: nn.Module, exclude: Sequence[str], experts: Experts, fused: Fused, include_frozen: bool
    ) -> _Sorter:
        holdings = list(_holdings(model))
        _check_patterns(holdings, exclude)
        moe = frozenset(_homes_of_experts(holdings))
        return cls(holdings, _asked_embeddings(model), moe, exclude, experts, fused, include_frozen)

    def verdicts(self) -> Iterator[Verdict]:
        """Each parameter once, in the model's order."""
        found: dict[int, list[_Holding]] = {}
        for holding in self.holdings:
            found.setdefault(id(holding.param), []).append(holding)
        yield from map(self._verdict, found.values())

    def _verdict(self, held: list[_Holding]) -> Verdict:
        first = held[0]
        if not first.param.requires_grad and not self.include_frozen:
            return Verdict(first.name, first.param, "left out", "frozen")
        reasons = [reason for holding in held if (reason := self._why_not_hidden(holding))]
        if reasons:
            return Verdict(first.name, first.param, "AdamW", reasons[0])
        why, parts = self._matrices(first)
        return Verdict(first.name, first.param, "Muon", why, parts, _is_transposed(first))

    def _why_not_hidden(self, it: _Holding) -> str:
        """Why AdamW has a parameter; empty where Muon does."""
        if _matches(it, self.exclude):
            return "excluded"
        return self.asked.get(id(it.param)) or _why_by_name(it) or self._why_by_shape(it)

    def _why_by_shape(self, it: _Holding) -> str:
        if it.is_stack:
            return "" if self.experts == "muon" else EXPERTS
        if not it.param.is_floating_point():
            return "not real"
        if it.param.ndim != 2:
            return "convolution" if _is_convolution(it.module) else "not a matrix"
        if self._is_router(it):
            return "router"
        return "folded experts or their biases" if it.in_experts and _is_bare(it) else ""

    def _is_router(self, it: _Holding) -> bool:
        """By name or type; a ``gate`` only beside experts, since gated projections are also called so."""
        if "Router" in type(it.module).__name__ or any(word.endswith("router") for word in it.path):
            return True
        gates = [i for i, word in enumerate(it.path[:-1]) if re.fullmatch(r"(.*_)?gate", word)]
        return any(".".join(it.path[:i]) in self.moe for i in gates)

    def _matrices(self, it: _Holding) -> tuple[str, Parts]:
        """What Muon is to see in a parameter, in words and as ``parts``."""
        if it.is_stack:
            return EXPERTS, "stack"
        cut = _equal_parts(it)
        if cut and self.fused == "split":
            return "fused q, k, v" if len(cut) == 3 else "fused k, v", cut
        is_fused = any(word in FUSED_NAMES for word in it.path[-2:])
        return "hidden matrix, fused, taken whole" if is_fused else "hidden matrix", None


def _holdings(model: nn.Module) -> Iterator[_Holding]:
    """Yield every parameter under each of its names, in the model's order."""
    shells = {path for path, module in model.named_modules(remove_duplicate=False) if _is_shell(module)}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            full_name = f"{path}.{name}" if path else name
            yield _Holding(module, full_name, _without_wrappers(full_name, shells), param)


def _homes_of_experts(holdings: Sequence[_Holding]) -> Iterator[str]:
    """Yield the name of every module that holds experts directly."""
    for it in holdings:
        yield from (".".join(it.path[:i]) for i, word in enumerate(it.path) if _names_experts(word))


def _names_experts(word: str) -> bool:
    return "expert" in word and "gate" not in word


def _is_shell(module: nn.Module) -> bool:
    """Whether a module only holds another, as DDP does."""
    return [name for name, _ in module.named_children()] == ["module"]


def parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """A model's parameters as they are now, by the names that ``split_parameters`` gives them."""
    return {it.name: it.param for it in _holdings(model)}


def _without_wrappers(name: str, shells: set[str]) -> str:
    words = name.split(".")
    return ".".join(
        word
        for i, word in enumerate(words)
        if word not in WRAPPERS and not (word == "module" and ".".join(words[:i]) in shells)
    )


def _asked_embeddings(model: nn.Module) -> dict[int, str]:
    """What a model, or a part of one, calls its embeddings where it has transformers' methods for that."""
    return {
        id(param): f"{side} embedding"
        for side in ("output", "input")  # a tied one is called by its first use
        for module in model.modules()
        for param in _tensors_of(_ask(module, f"get_{side}_embeddings"))
    }


def _ask(module: nn.Module, method: str) -> object:
    ask = getattr(module, method, None)
    try:
        return ask() if callable(ask) else None
    except (NotImplementedError, AttributeError):  # what transformers raises where there is none
        return None


def _tensors_of(answer: object) -> list[Tensor]:
    if isinstance(answer, nn.Module):
        return list(answer.parameters())
    return [answer] if isinstance(answer, nn.Parameter) else []


def _matches(it: _Holding, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in (it.name, it.full_name) for pattern in patterns)


def _why_by_name(it: _Holding) -> str:
    words = it.own_name.lower().split("_")
    if isinstance(it.module, (nn.Embedding, nn.EmbeddingBag)) or "Embedding" in type(it.module).__name__:
        return "embedding"
    if "emb" in it.own_name or TABLE_WORDS & set(words):
        return "embedding"
    if "bias" in words:
        return "bias"
    if it.own_name in STATE_SPACE_NAMES:
        return "state-space parameter"
    return "head" if _is_in_head(it.path) else ""


def _is_in_head(path: list[str]) -> bool:
    """Whether a module on the way is an output head: by its name, and outside numbered layers."""
    for word in path[:-1]:
        if word.isdigit():
            return False
        if word in HEAD_NAMES or re.fullmatch(r"(.*_)?heads?", word):
            return True
    return False


def _is_convolution(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.conv._ConvNd)


def _is_bare(it: _Holding) -> bool:
    """Whether a parameter is not a layer's weight, but one of several of its module."""
    return it.own_name != "weight"


def _is_conv1d(it: _Holding) -> bool:
    """Hugging Face's ``Conv1D`` of GPT-2, which is a linear layer that stores (in, out)."""
    return type(it.module).__name__ == "Conv1D" and it.param.shape[-1] == getattr(it.module, "nf", None)


def _is_transposed(it: _Holding) -> bool:
    if it.is_stack:
        named = type(it.module).__name__ in TRANSPOSED_EXPERTS
        return bool(getattr(it.module, "is_transposed", named))
    return _is_conv1d(it)


def _equal_parts(it: _Holding) -> tuple[int, ...] | None:
    """The rows (of a transposed weight, columns) of each of several square matrices that surely lie so."""
    rows, columns = it.param.shape
    if _is_conv1d(it) and it.path[-2:-1] == ["c_attn"] and columns in (2 * rows, 3 * rows):
        return (rows,) * (columns // rows)
    if isinstance(it.module, nn.MultiheadAttention) and it.own_name == "in_proj_weight":
        return (columns,) * 3
    if isinstance(it.module, nn.Linear) and it.path[-2:-1] == ["c_attn"] and rows == 3 * columns:
        return (columns,) * 3
    return None


def _check_options(model: nn.Module, experts: str | None, fused: str) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(f"split_parameters takes a torch.nn.Module, got {type(model).__name__}")
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise UsageError(
            "FSDP1 flattens matrices away, and Muon needs them: shard the model by FSDP2, "
            "torch.distributed.fsdp.fully_shard"
        )
    if experts not in (None, "adamw", "muon"):
        raise UsageError(f"experts must be 'adamw' or 'muon', got {experts!r}")
    if fused not in ("split", "whole"):
        raise UsageError(f"fused must be 'split' or 'whole', got {fused!r}")


def _check_patterns(holdings: Sequence[_Holding], exclude: Sequence[str]) -> None:
    idle = [pattern for pattern in exclude if not any(_matches(it, [pattern]) for it in holdings)]
    if idle:
        raise UsageError(f"exclude matches no parameter of the model: {', '.join(map(repr, idle))}")
