"""The file that lesson 15 breaks: a handwritten training loop with Muon, over dp and tp."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ...newton_schulz import zeropower_via_newtonschulz
from .training_rank import BATCHES, DECAY, MEMORY, SHAPES, LoopNotes, batch, loss_and_gradients, rescale


class Loop(LoopNotes):
    """One rank's part of the training. All ranks must create it and call ``train``."""

    def own_seed(self) -> int:
        """The seed of the weights, which is the same on all ranks."""
        return self.seed

    def train(self, steps: int) -> None:
        """Take ``steps`` steps."""
        for self.step in range(1, steps + 1):
            self.take_step()

    def take_step(self) -> None:
        """One step: every rank makes the same calls in the same order."""
        self.load()
        self.gradient()
        self.average()
        self.momentum()
        self.input()
        self.update()
        self.share()
        self.log()

    def load(self) -> None:
        """Gather whole matrices over tp, for forward and backward."""
        names = list(self.mine)
        flat = torch.cat([self.mine[name].flatten() for name in names])
        pieces = [self.unpack(each, names) for each in self.gather_all("load", flat, names)]
        self.whole = {name: torch.cat([each[name] for each in pieces]) for name in names}

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """The batches that this rank reads in this step."""
        return [batch(self.seed, self.step, self.at["dp"], number) for number in range(BATCHES)]

    def gradient(self) -> None:
        """The gradients on the rank's own data, cut to the rows that it holds."""
        self.loss, found = loss_and_gradients(self.whole, self.batches())
        self.gradients = {name: each.chunk(self.at.size("tp"))[self.at["tp"]] for name, each in found.items()}
        self.keep("gradient", self.gradients)

    def average(self) -> None:
        """The mean of the gradients over dp, summed in the order of ranks."""
        order = list(self.gradients)
        flat = torch.cat([self.gradients[name].flatten() for name in order])
        summed = torch.stack(self.gather_all("average", flat, order)).sum(0)
        self.mean = self.unpack(summed / self.at.size("dp"), order)
        self.keep("average", self.mean)

    def momentum(self) -> None:
        """The running average of the means."""
        for name, mean in self.mean.items():
            self.memory[name].mul_(MEMORY).add_((1 - MEMORY) * mean)
        self.keep("momentum", self.memory)

    def input(self) -> None:
        """The input of Newton–Schulz: the mean and the momentum, mixed as in Nesterov's method."""
        self.inputs = {
            name: (1 - MEMORY) * mean + MEMORY * self.memory[name] for name, mean in self.mean.items()
        }
        self.keep("input", self.inputs)

    def owned(self, place: int) -> list[str]:
        """The matrices that a dp position orthogonalizes."""
        return [name for number, name in enumerate(SHAPES) if number % self.at.size("dp") == place]

    def update(self) -> None:
        """Gather the inputs of the rank's own matrices over tp, orthogonalize them, and keep its rows."""
        names = self.owned(self.at["dp"])
        flat = torch.cat([torch.empty(0), *(self.inputs[name].flatten() for name in names)])
        pieces = [self.unpack(each, names) for each in self.gather_all("gather", flat, names)]
        self.updates = {}
        for name in names:
            whole = torch.cat([each[name] for each in pieces])
            update = zeropower_via_newtonschulz(whole).float().chunk(self.at.size("tp"))[self.at["tp"]]
            self.updates[name] = update * self.scale(name)
        self.keep("update", self.updates)

    def scale(self, name: str) -> float:
        """The factor that scales an update."""
        return rescale(SHAPES[name])

    def share(self) -> None:
        """Update the rows of the rank's own matrices; then each owner sends its rows to its dp group."""
        for name, update in self.updates.items():
            self.mine[name] = self.mine[name] * (1 - self.lr * DECAY) - self.lr * update
        for place in range(self.at.size("dp")):
            names = self.owned(place)
            flat = torch.cat([torch.empty(0), *(self.mine[name].flatten() for name in names)])
            with self.calling("share", names) as group:
                dist.broadcast(flat, group_src=place, group=group)
            self.mine.update(self.unpack(flat, names))
        self.keep("share", self.mine)

    def log(self) -> None:
        """The loss on all data: the sum over all ranks, divided by their number."""
        total = torch.tensor(self.loss)
        with self.calling("log") as group:
            dist.all_reduce(total, group=group)
        self.notes.losses.append(total.item() / self.at.grid.world_size)
