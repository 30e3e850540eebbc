"""Faults in data, not in processes: wrong gradients, settings, values and orders, on one rank or on all.

Each fault changes what a rank builds, or its tensors just before one step. No fault knows how it is detected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from muon_tutorial.plan.layout import Replicate, Shard
from muon_tutorial.step.parameter_state import local_part

from . import job
from .job import Blueprint, Rig

HUGE = 2e38  # finite in float32 and bfloat16, but the sum of two such values is not
OVERFLOW = "finite gradients whose sum overflows"
NO_GRADIENT = ("gradient None", "a parameter frozen in mid run")
"""Faults that leave a rank without a gradient. If the step averages, the missing gradient counts as zero."""


@dataclass(frozen=True, slots=True)
class DataFault:
    """A change in what a faulty rank builds (``build``), or an action before one step (``strike``).

    ``everywhere``: all ranks are faulty. ``ready``: all ranks call ``ready_gradients()`` before the strike.
    ``repairable``: a step that was refused succeeds once ``repair`` has run and gradients are new. ``turns``:
    how often the faulty rank steps. ``out_of_step``: ranks may make different calls, so the launch reports
    the error. ``needs_guard``: only a comparison of ranks during the run can detect the fault. ``fits``:
    whether the fault applies to a strategy, dp and tp.
    """

    build: Callable[[Blueprint, Random], Blueprint] | None = None
    strike: Callable[[Rig, Random], None] | None = None
    repair: Callable[[Rig], None] | None = None
    everywhere: bool = False
    ready: bool = False
    repairable: bool = False
    turns: int = 1
    out_of_step: bool = False
    needs_guard: bool = False
    fits: Callable[[str, int, int], bool] = lambda strategy, dp, tp: dp * tp > 1


def pick(dice: Random, rig: Rig) -> nn.Parameter:
    """Pick a matrix of which this rank holds at least one entry."""
    return dice.choice([param for param in rig.params.values() if local_part(param.detach()).numel()])


def _grad(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad


def _one_entry(value: float) -> Callable[[Rig, Random], None]:
    """A strike that overwrites an entry of a gradient."""

    def strike(rig: Rig, dice: Random) -> None:
        local = local_part(_grad(pick(dice, rig)))
        spoilt = local.clone()
        spoilt.view(-1)[local.numel() // 2] = value
        local.copy_(spoilt)

    return strike


def _behind_data(change: Callable[[Tensor], Tensor]) -> Callable[[Rig, Random], None]:
    """A strike that sets ``grad.data`` to another tensor. Torch checks neither the shape nor the dtype."""

    def strike(rig: Rig, dice: Random) -> None:
        grad = _grad(pick(dice, rig))
        grad.data = change(grad.data)

    return strike


def _every_gradient(change: Callable[[Tensor], object]) -> Callable[[Rig, Random], None]:
    """A strike that changes all gradients in place."""

    def strike(rig: Rig, dice: Random) -> None:
        for param in rig.params.values():
            change(local_part(_grad(param)))

    return strike


SETTINGS: Mapping[str, tuple[Any, ...]] = {
    "lr": (0.03, 0.0200001),
    "momentum": (0.9, 0.0),
    "weight_decay": (0.0, 0.2),
    "nesterov": (False,),
    "ns_steps": (4, 6),
    "eps": (1e-6,),
    "ns_coefficients": ((3.0, -4.0, 2.0),),
    "adjust_lr_fn": ("match_rms_adamw",),
    "orthogonalize": ("minimax",),
}


def _other_setting(plan: Blueprint, dice: Random) -> Blueprint:
    key = dice.choice(list(SETTINGS))
    return replace(plan, settings={**plan.settings, key: dice.choice(SETTINGS[key])})


def _set_otherwise(rig: Rig, dice: Random) -> None:
    key = dice.choice(list(SETTINGS))
    rig.muon.param_groups[0][key] = dice.choice(SETTINGS[key])


def _set(key: str, value: float) -> Callable[[Rig, Random], None]:
    def strike(rig: Rig, dice: Random) -> None:
        rig.muon.param_groups[0][key] = value

    return strike


def _set_back(rig: Rig) -> None:
    for key in SETTINGS:
        rig.muon.param_groups[0][key] = rig.blueprint.settings.get(key, rig.muon.defaults[key])


def _other_values(plan: Blueprint, dice: Random) -> Blueprint:
    """Draw new values of the matrix that every rank holds whole; the other ranks keep theirs."""
    made = torch.Generator().manual_seed(dice.randrange(1 << 30))
    return _with(plan, job.WHOLE, torch.randn(plan.wholes[job.WHOLE].shape, generator=made))


def _one_ulp(plan: Blueprint, dice: Random) -> Blueprint:
    """Change the last bit of one entry."""
    whole = plan.wholes[job.WHOLE].clone()
    whole.view(torch.int32).view(-1)[dice.randrange(whole.numel())] ^= 1
    return _with(plan, job.WHOLE, whole)


def _half_precision(plan: Blueprint, dice: Random) -> Blueprint:
    index = dice.randrange(len(plan.wholes))
    return _with(plan, index, plan.wholes[index].bfloat16())


def _with(plan: Blueprint, index: int, other: Tensor) -> Blueprint:
    return replace(plan, wholes=(*plan.wholes[:index], other, *plan.wholes[index + 1 :]))


def _with_more(plan: Blueprint, matrix: Tensor) -> Blueprint:
    cuts, order = (*plan.cuts, Replicate()), (*plan.order, len(plan.order))
    return replace(plan, wholes=(*plan.wholes, matrix), cuts=cuts, order=order)


def _twins_swapped(plan: Blueprint, dice: Random) -> Blueprint:
    first, second = job.TWINS
    order = list(plan.order)
    order[first], order[second] = order[second], order[first]
    return replace(plan, order=tuple(order))


def _other_cut(plan: Blueprint, dice: Random) -> Blueprint:
    """Cut the rows of a square matrix, which all other ranks hold whole."""
    return replace(plan, cuts=(*plan.cuts[: job.WHOLE], Shard(0), *plan.cuts[job.WHOLE + 1 :]))


def _flip_a_bit(rig: Rig, dice: Random, of_momentum: bool = False) -> None:
    """Flip one bit of a mantissa in a matrix that several ranks hold, as a cosmic ray would."""
    param = rig.params[job.WHOLE if job.WHOLE in rig.params else next(iter(rig.params))]
    tensor = rig.muon.state[param]["momentum_buffer"] if of_momentum else param.detach()
    bits = local_part(tensor).view(torch.int32).view(-1)
    bits[dice.randrange(len(bits))] ^= 1 << dice.randrange(10, 23)


def _without_gradient(rig: Rig, dice: Random, frozen: bool = False) -> None:
    param = pick(dice, rig)
    param.requires_grad_(not frozen)
    param.grad = None


def _planned(strategy: str, dp: int, tp: int) -> bool:
    return strategy in job.PLANNED and dp * tp > 1


def _hand_cut(strategy: str, dp: int, tp: int) -> bool:
    """Whether ranks hold copies that the package can compare; false for FSDP2 or a user's functions."""
    return dp * tp > 1 and strategy not in (job.FSDP2, job.OWN_FUNCTIONS)


def _kept_alike(strategy: str, dp: int, tp: int) -> bool:
    """Whether copies can stay different. With zero1 over dp they cannot: one rank updates, others copy."""
    return _hand_cut(strategy, dp, tp) and (dp == 1 or not strategy.startswith("zero1"))


def _copied_over_dp(strategy: str, dp: int, tp: int) -> bool:
    """Whether every piece has a copy on another rank. Without dp, pieces that tp cuts have none."""
    return _hand_cut(strategy, dp, tp) and dp > 1


def _plain(strategy: str, dp: int, tp: int) -> bool:
    return dp * tp > 1 and strategy in (*job.PLANNED, job.OWN_FUNCTIONS)


_repairable = partial(DataFault, repairable=True)
_behind = partial(_repairable, fits=_plain)
_mid_run = partial(_repairable, repair=_set_back)

FAULTS: Mapping[str, DataFault] = {
    "nothing": DataFault(fits=lambda strategy, dp, tp: True),
    "NaN in a gradient": _repairable(strike=_one_entry(float("nan"))),
    "infinity in a gradient": _repairable(strike=_one_entry(float("-inf"))),
    OVERFLOW: _repairable(strike=_every_gradient(lambda grad: grad.fill_(HUGE)), everywhere=True),
    "gradient None": _repairable(strike=_without_gradient),
    "float64 gradient behind .data": _behind(strike=_behind_data(Tensor.double)),
    "larger gradient behind .data": _behind(strike=_behind_data(lambda grad: torch.cat([grad.neg(), grad]))),
    "smaller gradient behind .data": _behind(strike=_behind_data(lambda grad: grad[:-1])),
    "transposed gradient behind .data": _behind(
        strike=_behind_data(lambda grad: grad.reshape(grad.shape[::-1]))
    ),
    "strided gradient": _behind(strike=_behind_data(lambda grad: grad.t().contiguous().t())),
    "sparse gradient": _behind(
        strike=lambda rig, dice: setattr(p := pick(dice, rig), "grad", _grad(p).to_sparse())
    ),
    "a hyperparameter at construction": DataFault(build=_other_setting),
    "a hyperparameter in mid run": _mid_run(strike=_set_otherwise),
    "lr NaN in mid run": _mid_run(strike=_set("lr", float("nan"))),
    "lr negative in mid run": _mid_run(strike=_set("lr", -0.02)),
    "momentum above 1 in mid run": _mid_run(strike=_set("momentum", 1.5)),
    "lr NaN everywhere": _mid_run(strike=_set("lr", float("nan")), everywhere=True),
    "weight decay negative everywhere": _mid_run(strike=_set("weight_decay", -0.5), everywhere=True),
    "other first values": DataFault(build=_other_values, fits=_hand_cut),
    "first values off by one bit": DataFault(build=_one_ulp, fits=_hand_cut),
    "parameters in another order": DataFault(build=lambda plan, dice: replace(plan, order=plan.order[::-1])),
    "equal shapes swapped": DataFault(build=_twins_swapped),
    "equal shapes swapped, without names": DataFault(build=_twins_swapped, fits=_copied_over_dp),
    "a parameter missing": DataFault(
        build=lambda plan, dice: replace(plan, order=plan.order[:-1]), fits=_plain
    ),
    "a parameter more": DataFault(build=lambda plan, dice: _with_more(plan, torch.ones(8, 8)), fits=_plain),
    "a parameter in bfloat16": DataFault(build=_half_precision, fits=_plain),
    "another strategy": DataFault(
        build=lambda plan, dice: replace(
            plan, strategy=dice.choice([name for name in job.PLANNED if name != plan.strategy])
        ),
        fits=_planned,
    ),
    "another cut": DataFault(
        build=_other_cut, fits=lambda strategy, dp, tp: strategy in job.PLANNED and tp > 1
    ),
    "another window": DataFault(
        build=lambda plan, dice: replace(plan, settings={**plan.settings, "window": 2}),
        fits=_planned,
        out_of_step=True,
    ),
    "an empty matrix": DataFault(
        build=lambda plan, dice: _with_more(plan, torch.zeros(*dice.choice(((5, 0), (0, 5))))),
        everywhere=True,
        fits=_plain,
    ),
    "a bit of a parameter flips": DataFault(strike=_flip_a_bit, needs_guard=True, fits=_kept_alike),
    "a bit of momentum flips": DataFault(
        strike=partial(_flip_a_bit, of_momentum=True), needs_guard=True, fits=_kept_alike
    ),
    "a parameter group more in mid run": DataFault(
        strike=lambda rig, dice: rig.muon.add_param_group(
            {"params": [("extra", nn.Parameter(torch.ones(4, 4)))]}
        ),
        fits=_planned,
        out_of_step=True,
    ),
    "state loaded in mid run": DataFault(
        strike=lambda rig, dice: rig.muon.load_state_dict(rig.muon.state_dict())
    ),
    "a parameter frozen in mid run": DataFault(strike=partial(_without_gradient, frozen=True)),
    "a step skipped": DataFault(turns=0, out_of_step=True),
    "a step doubled": DataFault(turns=2, out_of_step=True),
    "zero_grad after readying": DataFault(
        strike=lambda rig, dice: rig.muon.zero_grad(), ready=True, out_of_step=True, fits=_planned
    ),
    "clipping after readying": DataFault(
        strike=_every_gradient(lambda grad: grad.mul_(0.5)), ready=True, out_of_step=True, fits=_planned
    ),
}
"""Faults by name. ``nothing`` is the control: it must always survive."""

COMPARED = {"other first values", "first values off by one bit"}
"""Only ``initial_values="compare"`` finds these: by default, ranks get the first rank's values."""

NAMELESS = {"equal shapes swapped, without names"}
"""Faults for which no rank passes names of parameters."""


def blueprint_for(kind: str, strategy: str) -> Blueprint:
    """The blueprint of the ranks that are not faulty."""
    plan = Blueprint(strategy)
    if kind in COMPARED:
        return replace(plan, settings={**plan.settings, "initial_values": "compare"})
    if FAULTS[kind].needs_guard:
        return replace(plan, settings={**plan.settings, "compare_every": 1})
    return replace(plan, has_names=kind not in NAMELESS)
