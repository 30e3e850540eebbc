"""The finale on real ranks: a small GPT whose hidden matrices the reader's optimizer steps.

tp cuts only the optimizer's matrices: forward and backward run on whole weights on every rank. AdamW steps
embedding, head and norms.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ... import split_parameters
from ...launching.join_torchrun import join_torchrun, leave_torchrun, restarted_by_torchrun
from ...launching.start_torchrun import die_at_once
from ...training import gpt
from ...training.text import Batch, batch_at, load_text
from ...worlds.live import gather_objects
from ..my_loop.diary import DIARY, write_line
from .on_ranks import LR, counted_bytes, cut, load_file, start_muon, step_beside, try_steps

SHAPE = gpt.GPTShape(layers=2, width=64, heads=4, context=64)
BATCH, EVERY = 8, 4
"""Sequences per dp place and step; steps from one checkpoint to the next."""
KILLED_AFTER = EVERY + EVERY // 2
ADAMW_LR = 0.012  # AdamW ends within 2.1 % of the best of five rates, 0.003 to 0.048; seeds 0 and 1


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A rank's record of its run from step ``begin`` on: losses, seconds, bytes sent, and bytes of state.

    ``worked``: how many matrices this rank orthogonalizes in a step. ``different``: how many weights differ
    from torch.optim.Muon's, given the same full gradients, on the rank where most do.
    """

    grid: tuple[int, int]
    begin: int
    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    sent: Mapping[int, int]
    expected: Mapping[str, int]
    state: int
    worked: int
    different: int
    weights: list[Tensor]


class BothOptimizers:
    """The reader's optimizer and AdamW, as one optimizer for checkpoints."""

    def __init__(self, muon: Any, adamw: torch.optim.Optimizer) -> None:
        self.muon, self.adamw = muon, adamw

    def state_dict(self) -> dict[str, Any]:
        """Both states. All ranks must call, because the reader's state is gathered."""
        return {"muon": self.muon.state_dict(), "adamw": self.adamw.state_dict()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.muon.load_state_dict(saved["muon"])
        self.adamw.load_state_dict(saved["adamw"])


def start(seed: int) -> tuple[gpt.GPT, list[nn.Parameter], list[str], list[nn.Parameter]]:
    """The model, its hidden matrices, how tp cuts each, and the other parameters."""
    model = gpt.build_gpt(SHAPE, seed)
    split = split_parameters(model)
    hidden = [dict(model.named_parameters())[name] for name in split.hidden_names]
    kinds = ["row" if name.split(".")[-2] in ("o", "down") else "column" for name in split.hidden_names]
    others = [p for name, p in model.named_parameters() if name not in set(split.hidden_names)]
    return model, hidden, kinds, others


def batch_of(step: int, place: int, dp: int, seed: int) -> Batch:
    """The batch that one dp place reads in a step."""
    return batch_at(load_text(gpt.__file__, SHAPE.context), step * dp + place, BATCH, SHAPE.context, seed)


def train(
    rank: int,
    path: str,
    grid: tuple[int, int],
    steps: int,
    seed: int,
    folder: str | None = None,
    victim: int | None = None,
) -> RunRecord:
    """Train on this rank with the optimizer in a file. With a folder, resume from there and save there.

    The folder also gets the run's diary. The rank ``victim`` kills itself between two checkpoints. All ranks
    must call.
    """
    module, (dp, tp) = load_file(path), grid
    model, hidden, kinds, others = start(seed)
    muon = start_muon(module, hidden, kinds, dp, tp)
    pieces = muon.params
    adamw = torch.optim.AdamW(others, lr=ADAMW_LR)
    scheduler = torch.optim.lr_scheduler.LinearLR(adamw, 1.0, 0.1, steps)  # falls to a tenth
    both = BothOptimizers(muon, adamw)
    begin, losses, seconds = 0, [], []
    sent: Mapping[int, int] = {}
    if folder:
        begin = module.load(module.Checkpoints(folder), model, both, scheduler)
        for piece, whole, kind in zip(pieces, hidden, kinds, strict=True):
            piece.data.copy_(cut(whole.detach(), kind, rank % tp, tp))
    note = partial(write_line, Path(folder or ".") / DIARY)
    writes = bool(folder) and rank == 0
    note(writes, "begin", grid=grid, step=begin)
    twins = [nn.Parameter(whole.detach().clone()) for whole in hidden]
    stock = torch.optim.Muon(twins, lr=LR)
    for step in range(begin, steps):
        began = time.perf_counter()
        losses.append(_backward(model, others, batch_of(step, rank // tp, dp, seed)))
        for piece, whole, kind in zip(pieces, hidden, kinds, strict=True):
            piece.grad = cut(_grad(whole), kind, rank % tp, tp)
        stock.param_groups[0]["lr"] = muon.lr = LR * adamw.param_groups[0]["lr"] / ADAMW_LR
        note(writes, "step", step=step, loss=losses[-1], lr=muon.lr)  # the victim's step() waits for it
        with counted_bytes(lambda: muon.phase) as noted:
            muon.step()
        sent = noted
        adamw.step()
        scheduler.step()
        for whole, fresh in zip(hidden, muon.whole(muon.pack([p.detach() for p in pieces])), strict=True):
            whole.data.copy_(fresh)
        seconds.append(time.perf_counter() - began)
        for twin, mean in zip(twins, muon.whole(muon._gather_slices(muon.mean)), strict=True):
            twin.grad = mean
        stock.step()
        if folder and (step + 1) % EVERY == 0:
            module.save(module.Checkpoints(folder), step + 1, model, both, scheduler)
            note(writes, "save", step=step + 1)
        if victim == rank and step + 1 == KILLED_AFTER:
            note(True, "kill", step=step + 1, rank=rank)
            die_at_once()
    weights = [whole.detach().clone() for whole in hidden]
    different = max(gather_objects(sum(int((a != b).sum()) for a, b in zip(weights, twins, strict=True))))
    counted = (sent, muon.expected_bytes(), muon.state.nbytes, len(muon.matrices(muon.bucket)))
    return RunRecord(grid, begin, tuple(losses), tuple(seconds), *counted, different, weights)


def count_bytes(rank: int, path: str, change: Callable[[ModuleType], Any], steps: int, seed: int) -> Any:
    """Bytes that this rank sends in a changed DistributedMuon's step on 2 × 2, by phase, or what is wrong.

    Each rank works out the gradients of both dp places, so it knows their mean without any message.
    """
    module = load_file(path)
    module.DistributedMuon = changed = change(module)  # type: ignore[attr-defined]
    if not isinstance(changed, type):
        return changed if changed is ... else "the function must return a class"
    if wrong := try_steps(module, 2, 2):
        return wrong
    model, hidden, kinds, _ = start(seed)

    def gradients(step: int, place: int) -> Sequence[Tensor]:
        batch = batch_of(step, place, 2, seed)
        return torch.autograd.grad(gpt.next_byte_loss(model, batch.inputs, batch.targets), hidden)

    taken = ([gradients(step, place) for place in range(2)] for step in range(steps))
    wrong, sent = step_beside(start_muon(module, hidden, kinds, 2, 2), hidden, kinds, taken)
    return wrong or sent


def _backward(model: gpt.GPT, others: Sequence[nn.Parameter], batch: Batch) -> float:
    """Run backward, average AdamW's gradients as DDP does, and return the mean loss of all ranks."""
    model.zero_grad()
    loss = gpt.next_byte_loss(model, batch.inputs, batch.targets)
    loss.backward()
    for param in others:
        dist.all_reduce(_grad(param))
        param.grad = _grad(param) / dist.get_world_size()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def _grad(param: nn.Parameter) -> Tensor:
    assert param.grad is not None
    return param.grad


def losses_of_adamw(steps: int, dp: int, seed: int) -> tuple[float, ...]:
    """The losses if AdamW steps the whole model, in this process, with the text of all dp places."""
    model = start(seed)[0]
    adamw = torch.optim.AdamW(model.parameters(), lr=ADAMW_LR)
    scheduler, losses = torch.optim.lr_scheduler.LinearLR(adamw, 1.0, 0.1, steps), []
    for step in range(steps):
        batches = [batch_of(step, place, dp, seed) for place in range(dp)]
        inputs, targets = (torch.cat([getattr(b, n) for b in batches]) for n in ("inputs", "targets"))
        model.zero_grad()
        loss = gpt.next_byte_loss(model, inputs, targets)
        loss.backward()
        adamw.step()
        scheduler.step()
        losses.append(loss.item())
    return tuple(losses)


def main() -> None:
    """The program that torchrun starts: a run that resumes from the newest checkpoint in its folder."""
    parser = argparse.ArgumentParser()
    for name in ("dp", "tp", "steps", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--file", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--victim", type=int)
    asked = parser.parse_args()
    if not Path(asked.file).is_file():
        sys.exit(f"There is no {asked.file} in {Path.cwd()}. Start this in the folder of your my_muon.py.")
    rank = join_torchrun("gloo").rank
    victim = None if restarted_by_torchrun() else asked.victim
    asked.folder.mkdir(exist_ok=True)
    record = train(rank, asked.file, (asked.dp, asked.tp), asked.steps, asked.seed, str(asked.folder), victim)
    if rank == 0:
        torch.save({"begin": record.begin, "weights": record.weights}, asked.folder / "end.result")
        loss = f", loss {record.losses[-1]:.3f}" if record.losses else ": nothing was left to do"
        print(f"from step {record.begin} to step {asked.steps}{loss}; checkpoints are in {asked.folder}")
    leave_torchrun()


if __name__ == "__main__":
    main()
