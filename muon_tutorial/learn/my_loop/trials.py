"""Lesson 16: a plain loop gone wrong, a reader's port step by step, one step on two grids, and traps."""

from __future__ import annotations

import inspect
import math
import textwrap
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from ... import MuonWithAdamW, build_mesh
from ...adjusted_lr_and_decay import adjusted_lr
from ...launching.launch import launch
from ...worlds.live import gather_objects
from . import port, tiny_job
from .port import ADAMW_LR, LR, MAX_NORM, WEIGHT_DECAY, factor_of

TRIED = 3
"""Steps per trial."""


# fmt: off
def train_plain(
    rank: int, model: nn.Module, shard: Callable, loss_of: Callable[..., Tensor], steps: int, file: Path
) -> None:
    """A plain FSDP2 loop with AdamW, as readers may have it, on one rank. All ranks must call."""
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    scheduler = LambdaLR(optimizer, lambda step: 1 - step / steps)
    for step in range(steps):
        loss = loss_of(model, step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    if rank == 0: torch.save(model.state_dict(), file)  # noqa: E701
# fmt: on


def plain_lines() -> list[str]:
    """The lines of the plain loop's body, which the lesson numbers from 1."""
    body = inspect.getsource(train_plain).partition('must call."""\n')[2]
    return [line[4:].partition("  # noqa")[0] for line in body.splitlines() if not line.startswith("#")]


def show_plain() -> None:
    print("\n".join(f"{number:2}  {line}" for number, line in enumerate(plain_lines(), 1)))


@dataclass(frozen=True, slots=True)
class PlainReport:
    """Results of the plain loop, of one whose optimizer was made too early, and of clipping each shard."""

    saved_on_rank_0: float
    """The fraction of the model's entries that rank 0's own shards hold."""
    moved: str
    """How many parameters were moved by an AdamW that was made too early."""
    parameters: int
    warning: str
    clipped_alone: float
    """The total norm after each rank has clipped its own shard, divided by the largest allowed norm."""


def try_plain(dp: int, tp: int, seed: int, backend: str = "gloo") -> PlainReport:
    """Run the plain loop on real ranks, and then the mistakes that a reader may make in it."""
    return launch(_try_plain, dp * tp, args=((dp, tp), seed), backend=backend, output="quiet")[0]


def _try_plain(rank: int, grid: tuple[int, int], seed: int) -> PlainReport:
    mesh = build_mesh({"dp": grid[0], "tp": grid[1]})
    model, loss_of = tiny_job.build(seed), partial(tiny_job.loss_of, seed=seed, mesh=mesh)
    shard = partial(tiny_job.shard, mesh=mesh)
    with TemporaryDirectory() as folder:
        train_plain(rank, model, shard, loss_of, TRIED, Path(folder) / "model.pt")
    mine = sum(local(parameter).numel() for parameter in model.parameters())
    moved, _ = _moved_too_early(lambda model, lr: torch.optim.AdamW(model.parameters(), lr), mesh, seed)
    _, warned = _moved_too_early(MuonWithAdamW.from_model, mesh, seed)
    whole = sum(parameter.numel() for parameter in model.parameters())
    model = tiny_job.build(seed)
    tiny_job.shard(model, mesh)
    tiny_job.loss_of(model, 0, seed, mesh).backward()
    grads = [local(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    factor = MAX_NORM / max(MAX_NORM, math.sqrt(squares(grads)))
    ratio = math.sqrt(sum(gather_objects(squares(grads) * factor**2))) / MAX_NORM
    many = len(list(model.parameters()))
    return PlainReport(mine / whole, f"{moved} of {many}", many, warned, ratio)


def _moved_too_early(make: Callable, mesh: DeviceMesh, seed: int) -> tuple[int, str]:
    """How many parameters an optimizer moves if it was made before the cut, and what it warns of."""
    model: Any = tiny_job.build(seed)
    optimizer = make(model, lr=ADAMW_LR)
    tiny_job.shard(model, mesh)
    before = [local(parameter).clone() for parameter in model.parameters()]
    tiny_job.loss_of(model, 0, seed, mesh).backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    now = [local(parameter) for parameter in model.parameters()]
    said = [str(each.message) for each in caught if "gradient" in str(each.message)]
    return len(now) - sum(map(torch.equal, before, now)), "".join(said[:1])


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def squares(tensors: list[Tensor]) -> float:
    return sum(float(tensor.double().square().sum()) for tensor in tensors)


def say_too_early(report: PlainReport) -> str:
    """The warning that MuonWithAdamW gives if it was made too early."""
    return textwrap.fill(f"MuonWithAdamW warns: {report.warning}.", 96, break_on_hyphens=False)


@dataclass(frozen=True, slots=True)
class MadeOptimizer:
    """The optimizer that ``prepare`` made: its class, its settings, and whether the model was cut."""

    kind: str
    is_cut: bool
    forgotten: tuple[str, ...]
    """Parameters of the sharded model that the optimizer does not step."""
    settings: Mapping[str, tuple[str, float, float]]
    """For each parameter by name: its optimizer ("muon" or "adamw"), learning rate and weight decay."""


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """What one ``update`` did. Norms are those of the whole gradient."""

    norm_before: float
    norms_stepped: tuple[float, ...]
    """The norm at each call of ``optimizer.step``."""
    largest_shard: float
    """The largest norm of one rank's part at the first ``optimizer.step``; 0 if there was none."""
    rate: float
    """The first group's learning rate at the first ``optimizer.step``."""
    rate_after: float
    left: bool
    """Whether a gradient was left after the update."""


@dataclass(frozen=True, slots=True)
class PortReport:
    """What a port did in a few steps. ``is_open`` says that a function was still a stub."""

    is_open: bool
    made: MadeOptimizer | None = None
    updates: tuple[UpdateReport, ...] = ()


def try_port(rank: int, grid: tuple[int, int], seed: int, prepare: Callable, update: Callable) -> PortReport:
    """Make an optimizer and update a few times. All ranks must call."""
    mesh = build_mesh({"dp": grid[0], "tp": grid[1]})
    model = tiny_job.build(seed)
    optimizer: Any = prepare(model, partial(tiny_job.shard, mesh=mesh))
    if optimizer is ...:
        return PortReport(is_open=True)
    named = dict(model.named_parameters())
    groups = getattr(optimizer, "param_groups", [])
    stepped = {id(parameter): group for group in groups for parameter in group["params"]}
    settings = {
        name: ("muon" if "ns_steps" in group else "adamw", float(group["lr"]), float(group["weight_decay"]))
        for name, parameter in named.items()
        if (group := stepped.get(id(parameter))) is not None
    }
    is_cut = all(isinstance(parameter, DTensor) for parameter in named.values())
    forgotten = tuple(name for name in named if name not in settings)
    made = MadeOptimizer(type(optimizer).__name__, is_cut, forgotten, settings)
    if not isinstance(optimizer, MuonWithAdamW) or made.forgotten or not made.is_cut:
        return PortReport(False, made)
    scheduler = LambdaLR(optimizer, partial(factor_of, steps=2 * TRIED))
    updates: list[UpdateReport] = []
    for step in range(TRIED):
        tiny_job.loss_of(model, step, seed, mesh).backward()
        observed = _observe(model, optimizer, lambda: update(model, optimizer, scheduler))
        if observed is None:
            return PortReport(is_open=True)
        updates.append(observed)
        for parameter in model.parameters():
            parameter.grad = None
    return PortReport(False, made, tuple(updates))


def _norms(model: nn.Module) -> tuple[float, float]:
    """The norm of the whole gradient, and the largest norm of one rank's part. All ranks must call."""
    grads = [local(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    parts = gather_objects(squares(grads))
    return math.sqrt(sum(parts)), math.sqrt(max(parts))


def _observe(model: nn.Module, optimizer: MuonWithAdamW, call: Callable[[], object]) -> UpdateReport | None:
    seen: list[tuple[float, float, float]] = []
    before, _ = _norms(model)
    hook = optimizer.register_step_pre_hook(lambda *_: seen.append((*_norms(model), port.rate_of(optimizer))))
    try:
        returned = call()
    finally:
        hook.remove()
    if returned is ...:
        return None
    _, largest, rate = seen[0] if seen else (0.0, 0.0, 0.0)
    norms = tuple(norm for norm, _, _ in seen)
    return UpdateReport(before, norms, largest, rate, port.rate_of(optimizer), _norms(model)[0] > 0)


def expected_settings() -> dict[str, tuple[str, float, float]]:
    """The settings that the lesson asks for, per parameter: its optimizer, learning rate and weight decay."""
    return {
        name: ("muon", LR, WEIGHT_DECAY) if name.startswith("layers") else ("adamw", ADAMW_LR, WEIGHT_DECAY)
        for name, _ in tiny_job.TinyModel().named_parameters()
    }


def steps_alike(dp: int, tp: int, other: tuple[int, int], seed: int, backend: str = "gloo") -> list[str]:
    """The parameters that get the same bits in one process and on both grids, given the same gradient."""
    return launch(_steps_alike, dp * tp, args=([(dp, tp), other], seed), backend=backend, output="quiet")[0]


def _steps_alike(rank: int, grids: list[tuple[int, int]], seed: int) -> list[str]:
    single, *others = (_after_one_step(grid, seed) for grid in (None, *grids))
    return [name for name in single if all(torch.equal(single[name], other[name]) for other in others)]


def _after_one_step(grid: tuple[int, int] | None, seed: int) -> dict[str, Tensor]:
    """The parameters after one step with the whole batch's gradient, in one process if ``grid`` is None."""
    model, carrier = tiny_job.build(seed), _with_gradients(0, seed)
    with torch.no_grad():
        for parameter in carrier.parameters():  # gradients as parameters, to be cut like the model
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
    mesh = build_mesh({"dp": grid[0], "tp": grid[1]}) if grid else None
    shard: Any = partial(tiny_job.shard, mesh=mesh) if mesh else (lambda model: None)
    shard(carrier)
    optimizer = port.prepare(model, shard)
    for parameter, gradient in zip(model.parameters(), carrier.parameters(), strict=True):
        parameter.grad = gradient.detach()
    optimizer.step()
    return {
        name: (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()
        for name, parameter in model.named_parameters()
    }


PARTS = 64
"""The number of partial gradients that are summed to show how much precision a dtype loses."""

DECAYS = {
    kind.__name__: inspect.signature(kind).parameters["weight_decay"].default
    for kind in (torch.optim.Muon, torch.optim.AdamW)
}
"""The default ``weight_decay`` of two of torch's optimizers."""


def found_traps() -> dict[str, str]:
    """The optimizer that decays weights more by default, and the only trap that raises an error."""
    return {"decays_more": max(DECAYS, key=DECAYS.__getitem__), "stops": "checkpoint keys"}


def say_traps(seed: int) -> str:
    model = tiny_job.TinyModel()
    renamed: Any = torch.compile(model)
    refused = model.load_state_dict(renamed.state_dict(), strict=False).unexpected_keys
    named = dict(model.named_parameters())
    by_shape = sum(parameter.ndim == 2 for parameter in named.values())
    hidden = sum(name.startswith("layers") for name in named)
    muon, adamw = (f"lr × {adjusted_lr(1.0, way, (64, 16)):.2f}" for way in (None, "match_rms_adamw"))
    models = (_with_gradients(step, seed) for step in range(PARTS))
    parts: list[Any] = [model.get_parameter("layers.0.up.weight").grad for model in models]
    low = torch.zeros_like(parts[0], dtype=torch.bfloat16)
    for part in parts:
        low += part.bfloat16()
    whole = torch.stack(parts).sum(0)
    lost = float((low.float() - whole).norm() / whole.norm())
    traps = {
        "learning rate": f"Muon moves a 64 × 16 matrix by {muon}, or by {adamw} with match_rms_adamw",
        "weight decay": f"by default {DECAYS['Muon']:g} in torch.optim.Muon, {DECAYS['AdamW']:g} in AdamW",
        "embedding, head": "they have two dimensions, too: by shape alone, Muon would take "
        f"{by_shape} matrices, not {hidden}",
        "reduce dtype": f"the sum of {PARTS} gradients, added in bfloat16, is off by {lost:.1%}",
        "checkpoint keys": f"load_state_dict refuses those of torch.compile, such as {refused[0]}",
    }
    return "\n".join(f"{what:<19}{said}" for what, said in traps.items())


def _with_gradients(step: int, seed: int) -> tiny_job.TinyModel:
    """The model with the gradients of a step's whole batch."""
    model = tiny_job.build(seed)
    symbols, following = tiny_job.batch_of(step, seed)
    nn.functional.cross_entropy(model(symbols), following).backward()
    return model
