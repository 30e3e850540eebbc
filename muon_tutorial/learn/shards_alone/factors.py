"""The size factor of lesson 08: for a whole matrix, and as computed from a shard's shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...learning_rate import adjusted_lr
from ...plan.layout import Shard, shard_box
from ..exercises.judge import Diagnosis, Exercise, value_of
from .cuts import DIMS

Shape = tuple[int, int]
FORMULAS = {"sqrt(max(1, m/n))": "original", "0.2·sqrt(max(m, n))": "match_rms_adamw"}
SHAPES: tuple[Shape, ...] = ((64, 256), (256, 64), (768, 768), (768, 3072))


def size_factors(shape: Shape) -> tuple[float, ...]:
    """The factors that scale an update, by both formulas."""
    return tuple(float(adjusted_lr(1.0, name, shape)) for name in FORMULAS.values())


def shard_shape(shape: Shape, dim: int, tp: int) -> Shape:
    """The shape of a shard: ``shape`` cut along ``dim`` into equal parts."""
    rows, columns = shard_box(shape, Shard(dim), 0, tp).shape
    return rows, columns


def too_small(shape: Shape, dim: int, tp: int) -> tuple[float, ...]:
    """How many times too small each factor is if computed from the shard's shape; below 1: too large.

    >>> too_small((256, 64), 1, 4)
    (0.5, 1.0)
    """
    whole, shard = size_factors(shape), size_factors(shard_shape(shape, dim, tp))
    return tuple(one / other for one, other in zip(whole, shard, strict=True))


def say_factors(shape: Shape, dim: int, tp: int) -> str:
    """One example as a table: both factors for the whole and for a shard."""
    shard = shard_shape(shape, dim, tp)
    lines = [f"{'':<22}{f'whole {_say(shape)}':>16}{f'shard {_say(shard)}':>16}"]
    for name, whole, mine in zip(FORMULAS, size_factors(shape), size_factors(shard), strict=True):
        lines.append(f"{name:<22}{whole:>16.3f}{mine:>16.3f}   {whole / mine:.3f} times too small")
    return "\n".join(lines)


def say_ratios(function: Callable[[Shape, int, int], Any], tp: int) -> str:
    """A function's ratios for shapes of real models, with both cuts over tp."""
    lines = [f"{'whole':>12}  {'cut by':<9}" + "".join(f"{name:>22}" for name in FORMULAS)]
    for shape in SHAPES:
        for cut, dim in DIMS.items():
            ratios = "".join(f"{ratio:>22.2f}" for ratio in function(shape, dim, tp))
            lines.append(f"{_say(shape):>12}  {cut:<9}{ratios}")
    return "\n".join(lines)


def _say(shape: Shape) -> str:
    return f"{shape[0]} × {shape[1]}"


def check_ratio() -> Exercise:
    """The exercise: how many times too small each factor is, for any shape, cut and tp."""

    def judge(function: object) -> str | Diagnosis | None:
        for shape in SHAPES:
            for dim in (1, 0):
                for tp in (2, 4, 8):
                    wrong = _judge_case(function, shape, dim, tp)
                    if wrong is not None:
                        return wrong
        return None

    hints = (
        "The shard's shape first: the side `dim` is tp times shorter, the other stays.",
        "Then the whole's factor divided by the shard's, for each of the two formulas.",
    )
    return Exercise(judge, hints, "Right for every shape and cut. Below 1, the factor is too large.")


def _judge_case(function: Any, shape: Shape, dim: int, tp: int) -> str | Diagnosis | None:
    right = too_small(shape, dim, tp)
    answer = value_of(function, shape, dim, tp)
    case = f"{_say(shape)}, dim {dim}, tp = {tp}"
    try:
        said = tuple(float(ratio) for ratio in answer)
    except (TypeError, ValueError):
        return f"{case}: return two ratios, one for each formula; this was {answer!r}."
    if len(said) != len(right):
        return f"{case}: return two ratios, one for each formula; this was {len(said)}."
    if _near(said, right):
        return None
    shown = f"{case}: you say {_join(said)}."
    if _near(said, tuple(1 / ratio for ratio in right)):
        return Diagnosis(
            f"{shown} That is the shard's over the whole's.", ("Divide the whole's factor by the shard's.",)
        )
    if _near(said, right[::-1]):
        return Diagnosis(f"{shown} The two have changed places.", (f"First {next(iter(FORMULAS))}.",))
    if _near(said, too_small(shape, 1 - dim, tp)):
        return Diagnosis(f"{shown} That is the other cut.", ("dim 1 is the columns, n; dim 0 the rows, m.",))
    wrong = next(
        name for name, mine, due in zip(FORMULAS, said, right, strict=True) if not _near([mine], [due])
    )
    shard = shard_shape(shape, dim, tp)
    return f"{shown} {wrong} is not right: the shard is {_say(shard)}, the whole {_say(shape)}."


def _near(one: Any, other: Any) -> bool:
    return all(abs(a - b) < 1e-6 * max(1, abs(b)) for a, b in zip(one, other, strict=True))


def _join(ratios: tuple[float, ...]) -> str:
    return " and ".join(f"{ratio:.3g}" for ratio in ratios)
