"""Ports of lesson 16, each wrong in one way, for real ranks to run, and functions that try them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from muon_tutorial import MuonWithAdamW
from muon_tutorial.learn.my_loop import port, trials
from muon_tutorial.learn.my_loop.port import ADAMW_LR, LR, MAX_NORM, WEIGHT_DECAY, Port, RunJob

RIGHT: dict[str, Any] = {"lr": LR, "adamw_lr": ADAMW_LR, "weight_decay": WEIGHT_DECAY}


def made_too_early(model: nn.Module, shard: Any) -> Any:
    optimizer = MuonWithAdamW.from_model(model, **RIGHT)
    shard(model)
    return optimizer


def cut_then(make: Callable[[nn.Module], Any]) -> Any:
    """A ``prepare`` that shards the model and returns what ``make`` makes from it."""

    def prepare(model: nn.Module, shard: Any) -> Any:
        shard(model)
        return make(model)

    return prepare


PREPARED: list[tuple[Any, str]] = [
    (made_too_early, "made over the old parameters: embedding.weight"),
    (lambda model, shard: MuonWithAdamW.from_model(model, **RIGHT), "The model was not cut"),
    (cut_then(lambda model: torch.optim.AdamW(model.parameters(), lr=LR)), "prepare returned AdamW. Use"),
    (cut_then(lambda model: None), "must return the optimizer, but it returned a NoneType"),
    (
        cut_then(lambda model: MuonWithAdamW.from_model(model, lr=LR, weight_decay=WEIGHT_DECAY)),
        "embedding.weight has the learning rate 0.02, not 0.003",
    ),
    (
        cut_then(lambda model: MuonWithAdamW.from_model(model, lr=LR, adamw_lr=ADAMW_LR)),
        "embedding.weight has the weight decay 0.01, not 0.1",
    ),
    (cut_then(lambda it: MuonWithAdamW.from_model(it, **RIGHT, exclude=["layers.0.up*"])), "by adamw"),
]


def own_shard_clipped(model: nn.Module, optimizer: Any, scheduler: Any) -> None:
    locals_of = [nn.Parameter(trials.local(it)) for it in model.parameters()]
    for mine, parameter in zip(locals_of, model.parameters(), strict=True):
        assert parameter.grad is not None
        mine.grad = trials.local(parameter.grad)
    torch.nn.utils.clip_grad_norm_(locals_of, MAX_NORM)
    not_clipped(model, optimizer, scheduler)


def updated(*acts: str, most: float = MAX_NORM) -> Any:
    """An ``update`` that does these acts, in this order."""

    def update(model: nn.Module, optimizer: Any, scheduler: Any) -> None:
        known = {
            "clip": lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), most),
            "step": optimizer.step,
            "schedule": scheduler.step,
            "clear": optimizer.zero_grad,
        }
        for act in acts:
            known[act]()

    return update


not_clipped = updated("step", "schedule", "clear")
UPDATED: list[tuple[Any, str]] = [
    (own_shard_clipped, "each rank has clipped its own shard"),
    (not_clipped, "it was not clipped before"),
    (updated("step", "schedule", "clip", "clear"), "it was not clipped before"),
    (updated("clip", "step", "schedule", "clear", most=MAX_NORM / 2), "it must be clipped to 0.25"),
    (updated("clip", "step", "step", "schedule", "clear"), "stepped 2 times, not once"),
    (updated("clip", "schedule", "step", "clear"), "the scheduler had moved before the optimizer stepped"),
    (updated("clip", "step", "clear"), "Does the scheduler step, once?"),
    (updated("clip", "step", "schedule"), "the gradients are still there"),
]


def stub(*_: object) -> Any:
    return ...


def try_all(rank: int, grid: tuple[int, int], pairs: Sequence[tuple[Any, Any]]) -> list[trials.PortReport]:
    """Try all these ports on the same ranks, one after the other."""
    return [trials.try_port(rank, grid, 0, prepare, update) for prepare, update in pairs]


def on_rank_0_only(manager: Any, step: int, model: nn.Module, optimizer: Any, scheduler: Any) -> None:
    if dist.get_rank() == 0:
        port.save(manager, step, model, optimizer, scheduler)


def saves_the_scheduler_itself(
    manager: Any, step: int, model: nn.Module, optimizer: Any, scheduler: Any
) -> None:
    manager.save(step, model, optimizer, extra={"step": step, "scheduler": scheduler})


def torch_save(manager: Any, step: int, model: nn.Module, optimizer: Any, scheduler: Any) -> None:
    if dist.get_rank() == 0:
        manager.folder.mkdir(exist_ok=True)
        torch.save(
            {name: trials.local(it) for name, it in model.named_parameters()}, manager.folder / "model.pt"
        )


def nothing_loaded(manager: Any, model: nn.Module, optimizer: Any, scheduler: Any) -> int:
    return manager.latest_step() or 0


def nothing_asked(manager: Any, model: nn.Module, optimizer: Any, scheduler: Any) -> int:
    """Does not ask whether there is a checkpoint, and does not restore the scheduler."""
    return manager.load(model, optimizer)["step"]


def momentum_not_loaded(manager: Any, model: nn.Module, optimizer: Any, scheduler: Any) -> int:
    before = optimizer.state_dict()
    extra = manager.load(model, optimizer)
    optimizer.load_state_dict(before)
    scheduler.load_state_dict(extra["scheduler"])
    return extra["step"]


LOADED: list[tuple[Any, str]] = [
    (nothing_asked, "The scheduler was not restored"),
    (lambda *given: port.load(*given) and 0, "the data's position was not restored"),
    (lambda *given: port.load(*given) + 1, "the loop went on with step 3"),
    (nothing_loaded, "What the new ranks held when they began is not what was saved"),
    (momentum_not_loaded, "What the new ranks held when they began is not what was saved"),
]


def no_step_returned(manager: Any, model: nn.Module, optimizer: Any, scheduler: Any) -> Any:
    if manager.latest_step() is not None:
        port.load(manager, model, optimizer, scheduler)
    return None


def resume_all(rank: int, grid: tuple[int, int], folders: list[Path], job: RunJob, loads: list[Any]) -> None:
    """Resume in each folder with each of these functions, on the same ranks."""
    for folder, load in zip(folders, loads, strict=True):
        port.train(rank, grid, folder, job, Port(load=load), echo=True)
