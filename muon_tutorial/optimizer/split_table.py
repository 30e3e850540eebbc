"""The result of ``split_parameters``: which optimizer steps each parameter, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import nn

from ..plan.matrix import Parts

Who: TypeAlias = Literal["Muon", "AdamW", "left out"]
Row: TypeAlias = tuple[str, str, str, str]

EXPERTS = "experts, a stack of matrices"
"""The reason given for a three-dimensional weight of experts."""

BARE = "a matrix by its shape alone"
"""The reason given for a two-dimensional parameter that is not named like a weight, and may be a table."""


@dataclass(frozen=True, slots=True, eq=False)
class SplitVerdict:
    """One parameter: its name without wrappers, which optimizer steps it, and why.

    ``parts`` and ``transposed`` go into the parameter's group in ``Muon``.
    """

    name: str
    param: nn.Parameter
    who: Who
    why: str
    parts: Parts = None
    transposed: bool = False
    unsure: bool = False
    """Whether the name suggests several matrices whose layout is unknown."""


@dataclass(frozen=True, slots=True, eq=False)
class ParameterSplit:
    """A model's parameters, split between Muon and AdamW; ``hidden, rest = split`` unpacks it.

    ``str(split)`` is a table. Parameters that differ only in the layer's number share a line.

    >>> from muon_tutorial import split_parameters
    >>> print(split_parameters(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False))))
    parameter     shape  who    why
    *.weight, ×2  3 × 3  Muon   hidden matrix
    0.bias        3      AdamW  bias
    Muon has 85.7 % of 21 parameters, AdamW 14.3 %.
    """

    verdicts: tuple[SplitVerdict, ...]

    def __iter__(self) -> Iterator[Any]:
        """Yield ``hidden``, then ``rest``."""
        yield self.hidden
        yield self.rest

    @property
    def hidden(self) -> list[dict[str, Any]]:
        """Groups for ``Muon``, with names: a single group, unless some need ``parts`` or ``transposed``."""
        groups: dict[tuple[Parts, bool], dict[str, Any]] = {}
        for verdict in sorted(self._of("Muon"), key=lambda it: (it.parts is not None, it.transposed)):
            key = verdict.parts, verdict.transposed
            groups.setdefault(key, _group(*key))["params"].append((verdict.name, verdict.param))
        return list(groups.values())

    @property
    def rest(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters for ``torch.optim.AdamW``, with names."""
        return [(verdict.name, verdict.param) for verdict in self._of("AdamW")]

    @property
    def hidden_names(self) -> list[str]:
        """The names of Muon's parameters, in the model's order."""
        return [verdict.name for verdict in self._of("Muon")]

    @property
    def rest_names(self) -> list[str]:
        """The names of AdamW's parameters, in the model's order."""
        return [verdict.name for verdict in self._of("AdamW")]

    @property
    def hidden_params(self) -> list[nn.Parameter]:
        """Muon's parameters, without names and groups, in the model's order."""
        return [verdict.param for verdict in self._of("Muon")]

    @property
    def left_experts(self) -> int:
        """How many elements of three-dimensional experts go to AdamW."""
        return sum(verdict.param.numel() for verdict in self._of("AdamW") if verdict.why == EXPERTS)

    @property
    def numel(self) -> int:
        return sum(verdict.param.numel() for verdict in self.verdicts)

    def _of(self, who: Who) -> list[SplitVerdict]:
        return [verdict for verdict in self.verdicts if verdict.who == who]

    def __str__(self) -> str:
        rows = [("parameter", "shape", "who", "why"), *_rows(self.verdicts)]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = ["  ".join([*map(str.ljust, row, widths), row[3]]) for row in rows]
        return "\n".join([*lines, self._summary(), *([_experts_left(self)] if self.left_experts else [])])

    def _summary(self) -> str:
        shares = {who: sum(it.param.numel() for it in self._of(who)) for who in ("Muon", "AdamW", "left out")}
        muon, adamw, left_out = (_percent(share, self.numel) for share in shares.values())
        frozen = f", and {left_out} is left out" if shares["left out"] else ""
        return f"Muon has {muon} of {self.numel:,} parameters, AdamW {adamw}{frozen}."


def open_questions(split: ParameterSplit, experts: str | None) -> Iterator[str]:
    """Yield a text for each open question, with the argument of ``split_parameters`` that answers it.

    ``experts`` is the option of that name.
    """
    if unsure := {_pattern(it.name): it for it in split.verdicts if it.unsure}:
        yield _ask_for_layouts(unsure)
    if bare := {_pattern(it.name): _shape(it) for it in split.verdicts if it.why == BARE}:
        listed, first = ", ".join(f"{name} ({shape})" for name, shape in bare.items()), next(iter(bare))
        yield (
            f"Muon steps {listed} because of their two dimensions; nothing shows that they multiply an "
            f'input. Tables (of queries, latents or biases) belong to AdamW: exclude=["{first}"]. For a '
            f'matrix, pass parts={{"{first}": None}}.'
        )
    stacks = [it.name for it in split.verdicts if it.why == "not a matrix" and it.param.ndim == 3]
    if stacks and experts == "muon":
        yield (
            f'experts="muon" finds no experts in the names of {", ".join(stacks)}, so AdamW steps them: if '
            'they are stacks of matrices, name them in parts={"…": "stack"}'
        )
    if experts is None and split.left_experts > split.numel / 2:
        yield _experts_left(split)


def _ask_for_layouts(unsure: Mapping[str, SplitVerdict]) -> str:
    """Say what to pass for weights that hold matrices in an unknown layout."""
    shapes = (f"{name} ({_shape(it)})" for name, it in unsure.items())
    name, first = next(iter(unsure.items()))
    lines = first.param.shape[-1 if first.transposed else -2]
    return (
        f"The names of {', '.join(shapes)} suggest several matrices, but the model does not state their "
        f'layout, so they are kept whole. Pass parts={{"{name}": …}}: (a, b, …) are the rows of each matrix, '
        f'one after the other, {lines} in all; ("interleaved", a, b, …) are runs of rows that repeat, as for '
        "q, k and v head by head, or gate and up row by row (1, 1); None is one matrix."
    )


def _experts_left(split: ParameterSplit) -> str:
    """Say how many parameters are stacked experts that AdamW steps, and how to give them to Muon."""
    share = _percent(split.left_experts, split.numel)
    return (
        f"Experts stay with AdamW: {split.left_experts:,} parameters, {share} of the model, are stacks of "
        'matrices; experts="muon" gives them to Muon, matrix by matrix.'
    )


def _group(parts: Parts, transposed: bool) -> dict[str, Any]:
    said = {"parts": parts} if parts is not None else {}
    return {"params": [], **said, **({"transposed": True} if transposed else {})}


def _rows(verdicts: Sequence[SplitVerdict]) -> Iterator[Row]:
    """Yield the lines of the table. Lines that differ only in a layer's number become a single line."""
    alike: dict[Row, list[str]] = {}
    for verdict in verdicts:
        alike.setdefault(_row(verdict), []).append(verdict.name)
    for (pattern, *others), names in alike.items():
        yield (names[0] if len(names) == 1 else f"{pattern}, ×{len(names)}"), *others  # type: ignore[misc]


def _row(verdict: SplitVerdict) -> Row:
    how = [f"parts={verdict.parts!r}"] if verdict.parts is not None else []
    how += ["transposed"] if verdict.transposed else []
    how += ["fused, kept whole: state its layout with parts="] if verdict.unsure else []
    return _pattern(verdict.name), _shape(verdict), verdict.who, ", ".join([verdict.why, *how])


def _pattern(name: str) -> str:
    return ".".join("*" if word.isdigit() else word for word in name.split("."))


def _shape(verdict: SplitVerdict) -> str:
    return " × ".join(map(str, verdict.param.shape)) or "one number"


def _percent(share: int, total: int) -> str:
    return f"{100 * share / max(1, total):.1f} %"
