"""Decides which parameters of a model go to Muon: the hidden matrices, and nothing else.

This module imports no model library. A library's classes are recognized by attributes and type names. These
are the choices and their sources:

- Embeddings, classifier heads, gains and biases go to AdamW, as in Keller Jordan's post
  (https://kellerjordan.github.io/posts/muon/#empirical-considerations) and his README
  (https://github.com/KellerJordan/Muon/blob/50c4225d6d5d2514834c6d6dec1a0553dfb04568/README.md). Rows of an
  embedding stand for tokens or positions, and no input mixes rows. A head's number of dimensions and module
  type do not show that it is a head, as dion's README warns (microsoft/dion, README.md, "Building Parameter
  Groups"). So a head is recognized by its name, or by the model's own ``get_output_embeddings``.
- Megatron-LM gives Muon all two-dimensional parameters except embedding and output layer
  (megatron/core/optimizer/emerging_optimizers.py, ``_is_nonlinear_or_embedding``). Megatron-LM gives Adam the
  convolution kernel of a state-space model, and the mixer's fused ``in_proj``
  (megatron/core/ssm/mamba_mixer.py). Here ``in_proj`` is a hidden matrix like any other. ``A_log``, ``D`` and
  ``dt_bias`` are rates and gains, even as matrices, because they never multiply an input as a matrix.
- Routers are output heads that choose experts, and opinions on them differ. MuLoCo's torchtitan
  (facebookresearch/MuLoCo, torchtitan/config/diloco, ``routing_optimizer``) gives them to AdamW, and so does
  an option of Megatron-LM (https://github.com/NVIDIA/Megatron-LM/pull/6504). By default Megatron-LM gives
  routers to Muon, and so does GLM-4.5 (arXiv 2508.06471, section 2.4). Here AdamW gets routers.
- Moonlight (arXiv 2502.16982) and GLM-4.5 train experts with Muon, each matrix on its own. Experts in
  three-dimensional stacks need ``parts="stack"``, which ``torch.optim.Muon`` does not support, so they go to
  Muon only with ``experts="muon"``.
- LoRA's adapters A (rank × in) and B (out × rank) are hidden matrices like any other. The B of a fused weight
  is split like that weight. For stacked experts, one A has the rows of all experts, and one B has the columns
  of all experts, so both go to AdamW. Adapters that rotate or scale (OFT, BOFT, IA3) go to AdamW, too.
- Fused weights, such as query, key and value in one weight, or gate and up, are split if the model's own
  sizes determine their layout (``fused_weights``). Otherwise the weight stays whole, and a warning says what
  to pass.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal, get_args

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from ..errors import UsageError
from ..parameters.describe_matrices import FLATTENED
from ..plan.matrix import Parts, part_boxes
from .fused_weights import (
    KNOWN_LIBRARIES,
    Fused,
    FusedWeight,
    class_of,
    fused_parts,
    heads_apart,
    parts_word,
    stacked_parts,
)
from .split_table import BARE, EXPERTS, ParameterSplit, SplitVerdict, open_questions

HEAD_NAMES = (
    *("output", "output_layer", "unembed", "unembedding", "embed_out", "logits", "to_logits", "readout"),
    *("classifier", "score", "qa_outputs", "seq_relationship"),
)
"""Names of output heads, besides ``*head``; ignored inside numbered layers."""

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Names that ``torch.compile``, checkpointing and FSDP insert. For DDP's ``module``, see ``_is_shell``."""

INNER = ("linear", "base_layer")
"""Names of a linear layer in a module that wraps it: LeViT's module adds a norm, peft's adds adapters."""

TABLE_WORDS = {"pos", "position", "positional", "positions", "token", "tokens"}
"""A parameter whose name has one of these words, or ``emb``, has a row for each token or position."""

GAINS = re.compile(
    r"weight_g|original0|ia3_l.*|lora_E.*|boft_.*|oft_.*|(.*_)?(scales?|gains?|gammas?|biases)", re.IGNORECASE
)
"""Names of parameters, of any shape, that scale or shift activations elementwise."""

MATRIX_NAMES = re.compile(
    r"(.*_)?(weights?|w[a-z]?\d*|proj|projection|kernel|matrix|lora_[AB])(_.*)?", re.IGNORECASE
)
"""Names of parameters that multiply an input, such as ``weight`` and ``w1``."""

PARAMETRIZED = re.compile(r"(?:\bparametrizations\.(\w+)\.original\d*|(weight\w*)_(?:orig|v))$")
"""The name that weight norm, spectral norm or another parametrization gives to a parameter."""

GATES = re.compile(r"(.*_)?gates?(_w|_weight)?|w_noise")
"""Names of routers beside experts, as modules or as parameters; ``w_noise`` makes a router's noise."""

STATE_SPACE_NAMES = ("A_log", "D", "dt_bias")
# Experts that are stored as (E, in, out) without an attribute ``is_transposed``. Older versions of
# transformers lack the attribute, and so do Llama 4's experts in version 5.23.
TRANSPOSED_EXPERTS = ("GptOssExperts", "Llama4TextExperts")

Experts = Literal["adamw", "muon"]
FusedOption = Literal["split", "whole"]
Heads = Literal["together", "apart"]


def split_parameters(
    model: nn.Module,
    *,
    exclude: Sequence[str] = (),
    experts: Experts | None = None,
    fused: FusedOption = "split",
    heads: Heads = "together",
    parts: Mapping[str, Parts] | None = None,
    transposed: Sequence[str] = (),
    include_frozen: bool = False,
) -> ParameterSplit:
    """Split a model's parameters between Muon and AdamW: ``hidden, rest = split_parameters(model)``.

    ``hidden`` is a list of groups for ``Muon``, and ``rest`` a list of parameters for ``torch.optim.AdamW``.
    Both contain names. Every trainable parameter is in one of the two lists, in the model's order, and a
    frozen parameter in neither. A tied parameter appears once, with its first name.

    Names omit what wrappers insert (``torch.compile``, checkpointing, FSDP, DDP). If a parameter has several
    names or modules, and one of them is a reason for AdamW, AdamW gets it. ``print(split_parameters(model))``
    shows the reason for each. If a head's name does not show that it is a head, as in ``nn.Sequential``, use
    ``exclude``. Weights that are stored as (in, out), as in Hugging Face's ``Conv1D``, come in a group with
    ``transposed``.

    Args:
        exclude: shell patterns of more parameters for AdamW. A pattern may name the wrappers around
            a parameter or omit them.
        experts: which optimizer steps three-dimensional experts. None means ``"adamw"``, with a warning if
            these experts are more than half of the model. Experts that are modules of their own are hidden
            matrices.
        fused: whether the matrices in one weight, such as q, k and v or gate and up, are orthogonalized
            separately. Your own functions in a ``DistributedConfig`` support only whole weights.
        heads: ``"apart"`` orthogonalizes each head of queries, keys and values on its own.
        parts: the layouts of weights that hold several matrices, by patterns as in ``exclude``; the first
            match counts. A tied weight may go by any of its names.
            ``muon_tutorial.plan.matrix.part_boxes`` lists the layouts; None means one matrix. Gains and
            stacks that are named here go to Muon. One warning lists parameters that may be tables. Another
            lists patterns of ``parts`` and ``transposed`` that have no effect, because they match only
            AdamW's weights.
        transposed: patterns of more weights that are stored as (in, out), for ``x @ w``; the parts of such a
            weight are columns.
        include_frozen: whether to treat frozen parameters like all others.

    Raises:
        UsageError: a pattern matches no parameter, ``parts`` does not split a weight, an option's value is
            unknown, or FSDP1 has flattened the model.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 9))
    >>> split = split_parameters(model, exclude=["3.*"])
    >>> split.hidden_names, split.rest_names
    (['1.weight'], ['0.weight', '1.bias', '2.weight', '2.bias', '3.weight', '3.bias'])
    """
    _check_options(model, experts, fused, heads)
    holdings = list(_holdings(model, transposed))
    for option, patterns in (("exclude", exclude), ("parts", parts or ()), ("transposed", transposed)):
        _check_patterns(holdings, option, patterns)
    moe = frozenset(_homes_of_experts(holdings))
    chosen = experts or "adamw", fused, heads, parts or {}, include_frozen
    sorter = _Sorter(holdings, _asked_embeddings(model), moe, tuple(exclude), *chosen)
    split = ParameterSplit(tuple(sorter.verdicts()))
    layouts = {"parts": parts or (), "transposed": transposed}
    for question in (*open_questions(split, experts), *_without_effect(holdings, split, layouts)):
        warnings.warn(question, UserWarning, stacklevel=2)
    return split


@dataclass(frozen=True, slots=True, eq=False)
class _Holding:
    """A parameter, its name without wrappers, its module, and the ``modules`` around it, innermost first.

    ``said_transposed`` is whether the caller says that the parameter is stored as (in, out).
    """

    module: nn.Module
    full_name: str
    name: str
    param: nn.Parameter
    modules: Sequence[nn.Module]
    said_transposed: bool = False

    @property
    def path(self) -> list[str]:
        """The names of the modules around the parameter, then its own name before any parametrization."""
        return PARAMETRIZED.sub(r"\1\2", self.name).split(".")

    @property
    def own_name(self) -> str:
        return self.path[-1]

    @property
    def in_experts(self) -> bool:
        return "expert" in f"{self.name} {type(self.module).__name__}".lower()

    @property
    def is_stack(self) -> bool:
        """Whether the parameter is a stack of experts, (E, out, in) or (E, in, out)."""
        return self.param.ndim == 3 and self.in_experts and not _is_convolution(self.module)


@dataclass(frozen=True, slots=True, eq=False)
class _Sorter:
    """Sorts a model's parameters.

    ``asked`` has the ids of the parameters that the model itself calls embeddings, each with the reason why
    AdamW gets it. ``moe`` are the names of modules that directly contain experts.
    """

    holdings: Sequence[_Holding]
    asked: dict[int, str]
    moe: frozenset[str]
    exclude: Sequence[str]
    experts: Experts
    fused: FusedOption
    heads: Heads
    said: Mapping[str, Parts]
    include_frozen: bool

    def verdicts(self) -> Iterator[SplitVerdict]:
        """Yield one verdict for each parameter, in the model's order."""
        found: dict[int, list[_Holding]] = {}
        for holding in self.holdings:
            found.setdefault(id(holding.param), []).append(holding)
        yield from map(self._verdict, found.values())

    def _verdict(self, held: list[_Holding]) -> SplitVerdict:
        first = replace(held[0], said_transposed=any(it.said_transposed for it in held))
        said = [self.said[pattern] for it in held for pattern in self.said if _matches(it, [pattern])]
        if not first.param.requires_grad and not self.include_frozen:
            return SplitVerdict(first.name, first.param, "left out", "frozen")
        reasons = [reason for holding in held if (reason := self._why_not_hidden(holding, any(said)))]
        if reasons:
            return SplitVerdict(first.name, first.param, "AdamW", reasons[0])
        held_parts, transposed = self._parts(first, said), _is_transposed(first)
        if held_parts is None:
            sure = said or first.said_transposed or any(map(_is_named_like_a_matrix, held))
            why = "hidden matrix" if sure else BARE
            return SplitVerdict(first.name, first.param, "Muon", why, None, transposed)
        parts, word = held_parts.parts, parts_word(held_parts.parts)
        _check_parts(first, parts, transposed)
        why = f"{held_parts.what}: {word}" if word else held_parts.what
        return SplitVerdict(first.name, first.param, "Muon", why, parts, transposed, not held_parts.certain)

    def _why_not_hidden(self, it: _Holding, said: bool) -> str:
        """Return why AdamW gets a parameter; empty if Muon gets it. ``said``: the caller gives it parts."""
        if _matches(it, self.exclude):
            return "excluded"
        why = self.asked.get(id(it.param)) or _why_by_name(it)
        return why or ("" if said else self._why_by_shape(it))

    def _why_by_shape(self, it: _Holding) -> str:
        if it.is_stack:
            return "" if self.experts == "muon" else EXPERTS
        if not it.param.is_floating_point():
            return "not real"
        if it.param.ndim > 1 and _is_gain(it):
            return "gain"
        if it.param.ndim != 2:
            return "convolution" if _is_convolution(it.module) else "not a matrix"
        if self._is_router(it):
            return "router"
        if any(class_of(module).__name__ == "ParamWrapper" for module in it.modules):
            return "adapters of stacked experts"
        if min(it.param.shape) < 2:
            return "a single row or column"
        return "folded experts or their biases" if it.in_experts and _is_bare(it) else ""

    def _is_router(self, it: _Holding) -> bool:
        """Whether a parameter is a router. MLPs have gates, too, so a ``gate`` counts only beside experts."""
        if "Router" in type(it.module).__name__ or re.search(r"router(_w|_weight)?(\.|$)", it.name):
            return True
        gates = [i for i, word in enumerate(it.path) if GATES.fullmatch(word)]
        return any(".".join(it.path[:i]) in self.moe for i in gates)

    def _parts(self, it: _Holding, said: Sequence[Parts]) -> Fused | None:
        """Return the layout of a parameter's matrices: the first in ``said``, if any. None: it is one."""
        if said:
            return None if said[0] is None else Fused("as said", said[0])
        if it.is_stack:
            return Fused(EXPERTS, "stack") if self.fused == "whole" else _stacked(it)
        weight = _fused_weight(it)
        apart = heads_apart(weight) if self.heads == "apart" and _is_named_like_a_matrix(it) else None
        found = apart or fused_parts(weight)
        return Fused("hidden matrix, fused, taken whole", None) if found and self.fused == "whole" else found


def _stacked(it: _Holding) -> Fused:
    """Return how each expert of a stack divides into matrices, judged by all stacks in its module."""
    name = it.own_name if _is_bare(it) else it.path[-2]
    lines = it.param.shape[-1 if _is_transposed(it) else -2]
    around = it.modules[0] if _is_bare(it) else it.modules[1]
    takes = {side for param in around.parameters() if param.ndim == 3 for side in param.shape[1:]}
    return stacked_parts(name, class_of(it.modules[0]).__name__, lines, takes)


def _check_parts(it: _Holding, parts: Parts, transposed: bool) -> None:
    shape = tuple(it.param.shape)
    try:
        part_boxes(shape, parts, transposed)
    except UsageError as error:
        other = ""
        with suppress(UsageError):
            part_boxes(shape, parts, not transposed)
            if not transposed:
                other = "; the numbers fit its columns: if it is stored (in, out), add transposed=[…]"
        raise UsageError(f"{it.name}: {error}{other}") from None


def _holdings(model: nn.Module, transposed: Sequence[str] = ()) -> Iterator[_Holding]:
    """Yield every parameter under each of its names, in the model's order."""
    modules = dict(model.named_modules(remove_duplicate=False))
    shells = {path for path, module in modules.items() if _is_shell(module)}
    for path, module in modules.items():
        words = path.split(".") if path else []
        around = [modules[".".join(words[:end])] for end in range(len(words), -1, -1)]
        around = around[2 * isinstance(module, ParametrizationList) :]  # at the layer whose weight it makes
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            full_name = f"{path}.{name}" if path else name
            it = _Holding(around[0], full_name, _without_wrappers(full_name, shells), param, around)
            yield replace(it, said_transposed=_matches(it, transposed))


def _homes_of_experts(holdings: Sequence[_Holding]) -> Iterator[str]:
    """Yield the name of every module that directly contains experts."""
    for it in holdings:
        experts = (i for i, word in enumerate(it.path) if "expert" in word and "gate" not in word)
        yield from (".".join(it.path[:i]) for i in experts)


def _is_shell(module: nn.Module) -> bool:
    """Whether a module's only child is called ``module``, as in DDP."""
    return [name for name, _ in module.named_children()] == ["module"]


def parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return a model's current parameters by the names that ``split_parameters`` gives them."""
    return {it.name: it.param for it in _holdings(model)}


def _without_wrappers(name: str, shells: set[str]) -> str:
    words = name.split(".")
    return ".".join(
        word
        for i, word in enumerate(words)
        if word not in WRAPPERS and not (word == "module" and ".".join(words[:i]) in shells)
    )


def _asked_embeddings(model: nn.Module) -> dict[int, str]:
    """Ask every module for its embeddings, as in transformers, and return the answers by id."""
    return {
        id(param): f"{side} embedding"
        for side in ("output", "input")  # "input" comes last, so its reason counts for a tied embedding
        for module in model.modules()
        for param in _answer(module, f"get_{side}_embeddings")
    }


def _answer(module: nn.Module, method: str) -> list[nn.Parameter]:
    """Return the parameters that a module's method returns; an empty list without such a method."""
    ask, answer = getattr(module, method, None), None
    with suppress(NotImplementedError, AttributeError):  # transformers raises these without an embedding
        answer = ask() if callable(ask) else None
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
    return "head" if _is_in_head(it) else ""


def _is_gain(it: _Holding) -> bool:
    """Whether a parameter belongs to a norm, or ``GAINS`` matches its name or the name of the peft dict that
    holds it."""
    names = [it.own_name, *(it.path[-2:-1] if _is_bare(it) else ()), *(set(it.path) & {"oft_R", "boft_R"})]
    names.append(it.name.split(".")[-1])  # a weight norm's gain has a name of its own
    is_norm = isinstance(it.module, nn.LayerNorm) or class_of(it.module).__name__.endswith("Norm")
    return is_norm or any(GAINS.fullmatch(name) for name in names)


def _is_in_head(it: _Holding) -> bool:
    """Whether a module on the path is named like an output head and is not in a numbered layer."""
    for word, around in zip(it.full_name.split(".")[:-1], reversed(it.modules), strict=False):
        if word.isdigit() and not _is_chain(around):
            return False
        if word in HEAD_NAMES or re.fullmatch(r"(.*_)?heads?", word):
            return True
    return False


def _is_chain(module: nn.Module) -> bool:
    """Whether a module runs modules of different classes in turn, such as a normalization and a model. The
    numbers in their names are not the numbers of layers."""
    return isinstance(module, nn.Sequential) and len({*map(class_of, module)}) == len(module) > 1


def _is_convolution(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.conv._ConvNd)


def _is_bare(it: _Holding) -> bool:
    """Whether a parameter is not a layer's ``weight``."""
    return it.own_name != "weight"


def _is_named_like_a_matrix(it: _Holding) -> bool:
    """Whether a parameter, or the parameter list or dict that holds it, is named like a layer's weight."""
    is_in_container = isinstance(it.module, (nn.ParameterList, nn.ParameterDict))
    names = (it.own_name, *(it.path[-2:-1] if is_in_container else ()))
    return any(MATRIX_NAMES.fullmatch(name) for name in names)


def _is_transposed(it: _Holding) -> bool:
    if it.said_transposed:
        return True
    if it.is_stack:
        named = class_of(it.module).__name__ in TRANSPOSED_EXPERTS
        return bool(getattr(it.module, "is_transposed", named))
    # GPT-2's Conv1D, a linear layer of Hugging Face
    return class_of(it.module).__name__ == "Conv1D" and it.param.shape[-1] == getattr(it.module, "nf", None)


def _fused_weight(it: _Holding) -> FusedWeight:
    """Describe a weight for ``fused_weights``. A ``weight`` gets its layer's name; others keep their own."""
    *path, own = PARAMETRIZED.sub(r"\1\2", it.full_name).split(".")
    kept = [
        (word, module)
        for before, word, module in zip(["", *path], path, reversed(it.modules), strict=False)
        if not _is_wrapper(module) and "modules_to_save" not in (before, word)  # peft's copies of layers
    ]
    words, modules = [word for word, _ in kept], [module for _, module in reversed(kept)]
    lines, inputs = it.param.shape[::-1] if _is_transposed(it) else it.param.shape
    layer = own if _is_bare(it) or not words else words[-1]
    modules = [*it.modules[: _is_bare(it)], *modules] or [it.modules[-1]]
    if "lora_B" in words:  # lora_B has as many rows as the weight that it adapts
        place = next(i for i, module in enumerate(it.modules) if hasattr(module, "lora_B"))
        layer, inputs = words[words.index("lora_B") - 1], getattr(it.modules[place], "in_features", inputs)
        modules = [module for module in it.modules[place + 1 :] if not _is_wrapper(module)] or modules
        if isinstance(base := getattr(it.modules[place], "base_layer", None), nn.MultiheadAttention):
            layer, modules = "in_proj_weight", [base]
    elif layer in INNER and len(words) > 1 and len(modules) > 1:
        layer, modules = words[-2], modules[1:]
    elif added := [word.removesuffix("_adapter_list") for word in words if word.endswith("_adapter_list")]:
        around = [it for it in modules if getattr(getattr(it, added[0], None), "out_features", 0) == lines]
        layer, modules = (added[0], around) if around else (layer, modules)  # an adapter of Zamba 2's MLP
    library = class_of(modules[0]).__module__.startswith(KNOWN_LIBRARIES)
    return FusedWeight(layer, lines, inputs, [*modules], library)


def _is_wrapper(module: nn.Module) -> bool:
    return any(name in WRAPPERS for name, _ in module.named_children()) or _is_shell(module)


def _check_options(model: nn.Module, experts: str | None, fused: str, heads: str) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(f"split_parameters takes a torch.nn.Module, got {type(model).__name__}")
    flat = [param for param in model.parameters() if hasattr(param, "_fsdp_flattened")]
    if flat and all(param.ndim < 2 for param in flat):  # FSDP1 without shards keeps the shapes
        raise UsageError(f"{type(model).__name__} has no matrices: {FLATTENED}")
    options = ("experts", experts, Experts), ("fused", fused, FusedOption), ("heads", heads, Heads)
    for name, value, kind in options:
        known = get_args(kind)
        if value not in known and not (name == "experts" and value is None):
            raise UsageError(f"{name} must be {' or '.join(map(repr, known))}, got {value!r}")


def _check_patterns(holdings: Sequence[_Holding], option: str, patterns: Iterable[str]) -> None:
    idle = [pattern for pattern in patterns if not any(_matches(it, [pattern]) for it in holdings)]
    if idle:
        raise UsageError(f"{option} matches no parameter of the model: {', '.join(map(repr, idle))}")


def _without_effect(
    holdings: Sequence[_Holding], split: ParameterSplit, layouts: Mapping[str, Iterable[str]]
) -> Iterator[str]:
    """Say which patterns of ``layouts``, by option, match only weights that AdamW steps."""
    whys = {id(it.param): it.why for it in split.verdicts if it.who == "AdamW"}
    for option, patterns in layouts.items():
        for pattern in patterns:
            found = [whys.get(id(it.param)) for it in holdings if _matches(it, [pattern])]
            if all(found):
                yield f"{option} has no effect for {pattern!r}: AdamW steps what it matches ({found[0]})"
