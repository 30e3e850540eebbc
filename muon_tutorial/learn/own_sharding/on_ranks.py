"""Lesson 11 on real ranks: a reader's three functions, call by call and in ``Muon``, and two traps.

After each call, ranks exchange their status in a separate group: if the call failed on one rank, all stop.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from ... import DistributedConfig, Muon, TutorialError, build_mesh, create_dtensor_config
from ...launching.errors_of_lost_ranks import in_one_line, is_about_lost_rank
from ...launching.launch import launch
from ...newton_schulz import zeropower_via_newtonschulz
from ...plan.layout import Shard
from ...worlds.live import gather_objects
from ..cuts.on_ranks import cut
from ..my_muon.reference import assign, gather, redistribute
from .transfers import TransferNotes

PATIENCE = 6.0
STEPS = 3
LR = 0.02
Call = Literal["assign", "gather", "redistribute", "step"]
State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ThreeFunctions:
    """The three functions that a reader writes; the reference's by default."""

    assign: Callable[..., Any] = assign
    gather: Callable[..., Any] = gather
    redistribute: Callable[..., Any] = redistribute


def rows_of(rows: int, ranks: int) -> list[int]:
    """The number of rows that each rank holds of a matrix cut by ``Shard(0)``."""
    return list(Shard(0).lengths(rows, ranks))


def shapes_of(ranks: int) -> list[tuple[int, int]]:
    """Matrices that are hard to cut over ``ranks`` ranks: uneven, one row, even, one row too many, one row.

    If owners take turns over 2 or 4 ranks, the last matrix goes to the rank that holds its only row. Other
    ranks are idle then.
    """
    return [(2 * ranks + 1, 6), (1, 8), (4 * ranks, 4), (ranks + 1, 10), (1, 8)]


def whole_matrix(shape: tuple[int, int], *numbers: int) -> Tensor:
    """A random float32 matrix; the same numbers give the same matrix on every rank."""
    seed = sum(number * 1009**place for place, number in enumerate(numbers))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True, slots=True)
class TrialNote:
    """One call of a reader's function on one rank: its result ``value``, or the ``error`` that it raised.

    ``waited``: whether another rank caused that error. ``talked``: whether the call communicated at all.
    """

    call: Call
    index: int
    value: Any = None
    error: str = ""
    waited: bool = False
    talked: bool = False
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class RankTrial:
    """One rank's results of the three functions; ``differs`` is the first parameter with wrong bits.

    ``owners`` is what ``assign`` returned for the rank's ``group``, ``of_all`` for a group of all ranks.
    """

    group: tuple[int, ...]
    owners: Any
    notes: tuple[TrialNote, ...]
    differs: int | None = None
    of_all: Any = None


@dataclass(frozen=True, slots=True)
class FunctionsRun:
    dp: int
    tp: int
    seed: int
    trials: tuple[RankTrial, ...]
    timeout: float = PATIENCE

    def given(self, what: Literal["momentum", "update"], rank: int, index: int) -> Tensor:
        """The whole tensor of a trial call on a rank: a momentum to gather, or an update to redistribute."""
        return given_to(what, shapes_of(self.dp)[index], self.seed, rank % self.tp, index)


def given_to(what: str, shape: tuple[int, int], seed: int, place: int, index: int) -> Tensor:
    """The whole tensor of a trial call in bfloat16: "momentum" is gathered, "update" is redistributed.

    As Newton–Schulz returns it, the update of a tall matrix is transposed, so it is not contiguous.
    """
    whole = whole_matrix(shape, index, place, seed, {"momentum": 7, "update": 8}[what]).bfloat16()
    return whole.T.contiguous().T if what == "update" and shape[0] > shape[1] else whole


def run_functions(
    dp: int, tp: int, seed: int, functions: ThreeFunctions, until: Call, backend: str, timeout: float
) -> FunctionsRun:
    """Try three functions on real ranks, phase by phase, up to and including ``until``."""
    asked: dict[str, Any] = {"args": (dp, tp, seed, functions, until, timeout), "backend": backend}
    trials = launch(try_functions, dp * tp, **asked, output="quiet", timeout=5 * timeout)
    return FunctionsRun(dp, tp, seed, tuple(trials), timeout)


class _TogetherError(Exception):
    """A call went wrong on some rank, so all ranks stop."""


def try_functions(
    rank: int, dp: int, tp: int, seed: int, functions: ThreeFunctions, until: Call, timeout: float
) -> RankTrial:
    """One rank's part: each function by itself, then three steps of ``Muon``."""
    group = build_mesh({"dp": dp, "tp": tp}, timeout=timeout).get_group("dp")
    control = dist.new_group(timeout=timedelta(seconds=4 * timeout))
    trial = _Trial(rank, dp, tp, seed, functions, group, control)
    try:
        trial.ask_for_owners()
        if until in ("gather", "redistribute", "step"):
            trial.try_each(until != "gather")
        if until == "step":
            trial.take_steps()
    except _TogetherError:
        pass
    return RankTrial(trial.ranks, trial.owners, tuple(trial.notes), trial.differs, trial.of_all)


@dataclass(slots=True)
class _Trial:
    """One rank's trial: its state between the calls."""

    rank: int
    dp: int
    tp: int
    seed: int
    functions: ThreeFunctions
    group: dist.ProcessGroup
    control: dist.ProcessGroup
    owners: Any = None
    notes: list[TrialNote] = field(default_factory=list)
    differs: int | None = None
    of_all: Any = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks that share parameters with this one."""
        return tuple(dist.get_process_group_ranks(self.group))

    @property
    def state(self) -> dict[str, Any]:
        """The state that the reader's config passes to the functions."""
        return {"group": self.group, "shapes": shapes_of(self.dp)}

    def whole(self, index: int, *more: int) -> Tensor:
        """A whole parameter of this rank's group, or its gradient in some step."""
        return whole_matrix(shapes_of(self.dp)[index], index, self.rank % self.tp, self.seed, *more)

    def mine(self, tensor: Tensor) -> Tensor:
        return cut(tensor, "column", self.rank // self.tp, self.dp)

    def ask_for_owners(self) -> None:
        """Call ``assign``, and go on if all ranks have valid and equal answers."""
        params = [self.mine(self.whole(index)) for index in range(len(shapes_of(self.dp)))]
        self.owners = self.call("assign", 0, partial(self.functions.assign, params, self.state))
        everybody = gather_objects(self.owners, self.control)
        sound = are_owners(self.owners, self.ranks, len(params))
        self.go_on_if(sound and all(everybody[rank] == self.owners for rank in self.ranks))
        in_all = {**self.state, "group": self.control}
        self.of_all = self.call("assign", 0, partial(self.functions.assign, params, in_all))
        self.go_on_if(all(each == self.of_all for each in gather_objects(self.of_all, self.control)))

    def try_each(self, and_back: bool) -> None:
        place = self.rank % self.tp
        for index, shape in enumerate(shapes_of(self.dp)):
            mine, owner = self.mine(given_to("momentum", shape, self.seed, place, index)), self.owners[index]
            known = {"param_idx": index, "local_shape": tuple(mine.shape), "full_shape": None}
            state = {**self.state, **known, "dtype": torch.float32}
            self.call("gather", index, partial(self.functions.gather, mine, owner, dict(state)))
            if and_back:
                update = given_to("update", shape, self.seed, place, index) if self.rank == owner else None
                back = partial(self.functions.redistribute, update, owner, dict(state))
                part = self.call("redistribute", index, back)
                same = isinstance(part, Tensor) and (part.shape, part.dtype) == (mine.shape, mine.dtype)
                self.go_on_if(same)

    def take_steps(self) -> None:
        config = config_of(self.functions, {**self.state, "agree_group": self.group})
        wholes = [torch.nn.Parameter(self.whole(index)) for index in range(len(shapes_of(self.dp)))]
        params = [torch.nn.Parameter(self.mine(whole.detach())) for whole in wholes]
        alone, muon = Muon(wholes, lr=LR), Muon(params, lr=LR, distributed_config=config)
        for step in range(STEPS):
            for index, (whole, param) in enumerate(zip(wholes, params, strict=True)):
                whole.grad = self.whole(index, 1 + step)
                param.grad = self.mine(whole.grad)
            alone.step()
            self.call("step", step, muon.step)
        pairs = zip(wholes, params, strict=True)
        same = [torch.equal(self.mine(whole.detach()), param) for whole, param in pairs]
        self.differs = None if all(same) else same.index(False)

    def call(self, call: Call, index: int, act: Callable[[], Any]) -> Any:
        """Make a call, and learn from all ranks how it went."""
        value, error, waited, noting = None, "", False, TransferNotes()
        try:
            with nullcontext() if call == "step" else noting:
                value = act()
                if hasattr(value, "wait") and not isinstance(value, Tensor):
                    value = value.wait()
        except Exception as raised:
            error, waited = f"{type(raised).__name__}: {in_one_line(str(raised))}", is_about_lost_rank(raised)
        if not isinstance(value, Tensor | dict | type(None)) and value is not ...:
            value = f"a {type(value).__name__}"
        nbytes = sum(each.nbytes for each in noting.sent)
        self.notes.append(TrialNote(call, index, value, error, waited, noting.calls > 0, nbytes))
        self.go_on_if(not error and value is not ...)
        return value

    def go_on_if(self, fine: bool) -> None:
        if not all(gather_objects(fine, self.control)):
            raise _TogetherError


def config_of(functions: ThreeFunctions, state: State) -> DistributedConfig:
    return DistributedConfig(functions.assign, functions.gather, functions.redistribute, state)


def are_owners(owners: Any, ranks: tuple[int, ...], count: int) -> bool:
    complete = isinstance(owners, dict) and set(owners) == set(range(count))
    return complete and all(type(owner) is int and owner in ranks for owner in owners.values())


def run_loop(
    step: Callable[..., object], functions: ThreeFunctions, ranks: int, seed: int, backend: str = "gloo"
) -> tuple[list[bool], list[int]]:
    """Run ``step(params, momenta, owners, config, lr)``; return whose bits are right, and the calls."""
    found = launch(_loop_by_hand, ranks, args=(step, functions, seed), backend=backend, output="quiet")
    return [same for same, _ in found], [calls for _, calls in found]


def _loop_by_hand(rank: int, step: Callable, functions: ThreeFunctions, seed: int) -> tuple[bool, int]:
    ranks = dist.get_world_size()
    wholes = [whole_matrix(shape, index, seed).bfloat16() for index, shape in enumerate(shapes_of(ranks))]
    momenta = [cut(whole, "column", rank, ranks) for whole in wholes]
    params = [torch.zeros(momentum.shape) for momentum in momenta]
    everybody = [list(range(ranks))] * len(params)
    state = {"group": dist.group.WORLD, "shapes": shapes_of(ranks), "holders": everybody}
    owners = functions.assign(params, state)
    with TransferNotes() as notes:
        step(params, momenta, owners, config_of(functions, state), LR)
    due = [cut(-LR * zeropower_via_newtonschulz(whole), "column", rank, ranks).float() for whole in wholes]
    return all(map(torch.equal, params, due)), notes.calls


def run_owner_of_nothing(dp: int, tp: int, seed: int, backend: str = "gloo") -> dict[str, list[Any]]:
    """One matrix, which the last rank owns: each rank's rows of it, and what gather returned there."""
    reports = launch(_gather_at_last, dp * tp, args=(seed,), backend=backend, output="quiet")
    return dict(zip(("rows", "got"), map(list, zip(*reports, strict=True)), strict=True))


def bad_rows(ranks: int) -> int:
    """A number of rows with which the last rank holds few rows or none."""
    return 2 * ranks + 1


def _gather_at_last(rank: int, seed: int) -> tuple[int, str | None]:
    ranks = dist.get_world_size()
    shape = (bad_rows(ranks), 6)
    mine = cut(whole_matrix(shape, seed), "column", rank, ranks)
    state = {"group": dist.group.WORLD, "shapes": [shape], "param_idx": 0, "local_shape": tuple(mine.shape)}
    full = gather(mine, ranks - 1, state)
    return len(mine), None if full is None else "tensor"


SIDE = 24


def try_for_steps(gather_fn: Callable[[Tensor, int, State], Any], ranks: int, seed: int, backend: str) -> str:
    """How far updates with this ``gather_fn`` are from the right ones; its ``state`` has the parameters."""
    off = launch(_steps_off, ranks, args=(gather_fn, seed), backend=backend, output="quiet")[0]
    return "\n".join(f"step {step}: {far:.2f} away from the right update" for step, far in enumerate(off, 1))


def try_partial(ranks: int, seed: int, backend: str) -> str:
    """Orthogonalize a rank's own summand, and say what the package reports for a ``Partial`` parameter."""
    return "\n".join(launch(_partial, ranks, args=(seed,), backend=backend, output="quiet")[0])


def in_words(error: str) -> str:
    """An error's text, with its meaning in words if it is Gloo's for uneven pieces or split sizes.

    >>> in_words("RuntimeError: ProcessGroupGloo::gather: invalid tensor size at index 3")
    'RuntimeError: ProcessGroupGloo::gather: invalid tensor size at index 3. dist.gather wants equal pieces.'
    """
    if "inLengthPerRank" in error:
        return "the splits say that a rank sends itself more or fewer elements than it takes from itself."
    return f"{error}. dist.gather wants equal pieces." if "gather: invalid tensor size" in error else error


def distance(update: Tensor, right: Tensor) -> float:
    """The relative error of an update: the norm of the difference over the norm of the right update."""
    return float((update.float() - right.float()).norm() / right.float().norm())


def _partial(rank: int, seed: int) -> list[str]:
    mesh = build_mesh({"dp": dist.get_world_size()})
    mine = whole_matrix((SIDE, SIDE), seed, rank)
    mean = torch.stack(gather_objects(mine)).mean(0)
    off = distance(zeropower_via_newtonschulz(mine), zeropower_via_newtonschulz(mean))
    said = f"one rank's summand, orthogonalized: {off:.2f} away from the right update"
    param = torch.nn.Parameter(DTensor.from_local(mine, mesh, [Partial()], run_check=False))
    try:
        Muon([param], lr=LR, distributed_config=create_dtensor_config())
    except TutorialError as error:
        return [said, f"the package says: {type(error).__name__}: {error}"]
    return [said, "the package says nothing"]


def _steps_off(rank: int, gather_fn: Callable, seed: int) -> list[float]:
    ranks, shape = dist.get_world_size(), (SIDE, SIDE)
    param = torch.nn.Parameter(cut(torch.zeros(shape), "column", rank, ranks))
    whole = torch.nn.Parameter(torch.zeros(shape))
    state = {"group": dist.group.WORLD, "shapes": [shape], "params": [param]}
    config = config_of(ThreeFunctions(gather=gather_fn), state)
    options: dict[str, Any] = {"lr": LR, "weight_decay": 0.0}
    muon, alone, off = Muon([param], **options, distributed_config=config), Muon([whole], **options), []
    for step in range(STEPS):
        before = param.detach().clone(), whole.detach().clone()
        whole.grad = whole_matrix(shape, seed, 1 + step)
        param.grad = cut(whole.grad, "column", rank, ranks)
        muon.step()
        alone.step()
        mine = torch.cat(gather_objects(param.detach() - before[0]))
        off.append(distance(mine, whole.detach() - before[1]))
    return off
