"""Which parameters of a model go to Muon: the hidden matrices, and nothing else.

Knows modules and names. A matrix is held back from Muon when it is an embedding or the output head: rows of
those stand for tokens, and AdamW serves them better. What has another number of dimensions (norms, biases,
convolutions) is held back too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TypeAlias

from torch import nn

from ..errors import UsageError

Named: TypeAlias = list[tuple[str, nn.Parameter]]

HEAD_NAMES = ("lm_head", "head", "output_head", "output", "unembed", "unembedding", "embed_out", "classifier")
"""Names by which a module outside any numbered layer is taken for the output head."""


def split_parameters(model: nn.Module, *, exclude: Sequence[str] = ()) -> tuple[Named, Named]:
    """Split a model's parameters into (hidden matrices for Muon, the rest for AdamW), both with names.

    Every parameter is in exactly one list, in the model's order; a tied one under its first name. The rest
    gets, in this order of thought: what is not a real matrix; the weights of embeddings, known by their
    module's type, and bare parameters called ``*emb*``; the output head, known by its name (``HEAD_NAMES``)
    when it lies outside numbered layers; whatever a pattern of ``exclude`` matches (shell style, on the full
    name). A tied parameter goes to the rest if any of its names or modules says so. A head without a telling
    name, as in ``nn.Sequential``, needs ``exclude``.

    Raises:
        UsageError: a pattern of ``exclude`` matches no parameter.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 9))
    >>> hidden, rest = split_parameters(model, exclude=["3.*"])
    >>> [name for name, _ in hidden], [name for name, _ in rest]
    (['1.weight'], ['0.weight', '1.bias', '2.weight', '2.bias', '3.weight', '3.bias'])
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"split_parameters takes a torch.nn.Module, got {type(model).__name__}")
    _check_patterns(model, exclude)
    held_back = {
        id(param) for module, name, param in _holdings(model) if _not_hidden(module, name, param, exclude)
    }
    hidden: Named = []
    rest: Named = []
    for name, param in model.named_parameters():
        (rest if id(param) in held_back else hidden).append((name, param))
    return hidden, rest


def _holdings(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield every (module, full name, parameter) there is, tied parameters once under each name."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            yield module, f"{path}.{name}" if path else name, param


def _not_hidden(module: nn.Module, name: str, param: nn.Parameter, exclude: Sequence[str]) -> bool:
    is_matrix = param.ndim == 2 and param.is_floating_point()
    excluded = any(fnmatchcase(name, pattern) for pattern in exclude)
    return not is_matrix or excluded or _is_embedding(module, name) or _is_head(name)


def _is_embedding(module: nn.Module, name: str) -> bool:
    by_type = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or "Embedding" in type(module).__name__
    return by_type or "emb" in name.split(".")[-1]


def _is_head(name: str) -> bool:
    *path, owner, _ = ["", "", *name.split(".")]
    return owner in HEAD_NAMES and not any(part.isdigit() for part in path)


def _check_patterns(model: nn.Module, exclude: Sequence[str]) -> None:
    names = [name for _, name, _ in _holdings(model)]
    idle = [pattern for pattern in exclude if not any(fnmatchcase(name, pattern) for name in names)]
    if idle:
        raise UsageError(f"exclude matches no parameter of the model: {', '.join(map(repr, idle))}")
