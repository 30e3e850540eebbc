"""A model with both optimizers to save and load, and the expected state, computed in one process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from muon_tutorial import LiveWorld, Muon, MuonWithAdamW
from muon_tutorial.step.parameter_state import local_part

from . import job

REST = ((7, 3), (6,))  # shapes of AdamW's parameters
OTHER = 7.0  # the value of all parameters of a model before a load


class Model(nn.Module):
    """Matrices for Muon, and a few parameters for AdamW."""

    def __init__(self, matrices: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(matrices)
        self.rest = nn.ParameterList([nn.Parameter(torch.ones(shape)) for shape in REST])

    def fill(self, value: float) -> None:
        with torch.no_grad():
            for param in self.parameters():
                param.fill_(value)


def build(strategy: str, world: LiveWorld | None) -> tuple[Model, MuonWithAdamW]:
    """A rank's model and optimizers over dp. If ``world`` is None, both are for a single process."""
    model = Model([nn.Parameter(whole.clone()) for whole in job.first_values()])
    how: dict[str, Any] = {} if world is None else job.distribution(strategy, world)
    if strategy == job.FSDP2 and world is not None:
        fully_shard(model, mesh=world.mesh["dp"])
    muon = Muon([(f"w{i}", param) for i, param in enumerate(model.matrices)], lr=0.02, **how)
    return model, MuonWithAdamW(muon, torch.optim.AdamW(model.rest.parameters(), lr=0.01))


def trained(strategy: str, world: LiveWorld | None, steps: int) -> tuple[Model, MuonWithAdamW]:
    model, both = build(strategy, world)
    train(model, both, 0, steps)
    return model, both


def train(model: Model, both: MuonWithAdamW, first: int, last: int) -> None:
    """Take the steps from ``first`` up to ``last``, with the same gradients on every rank."""
    for step in range(first, last):
        for index, param in enumerate(model.parameters()):
            grad = _gradient(step, index, tuple(param.shape))
            param.grad = _cut(grad, param)
        both.step()


def _gradient(step: int, index: int, shape: tuple[int, ...]) -> Tensor:
    made = torch.Generator().manual_seed(5000 + 100 * step + index)
    return torch.randint(-31, 32, shape, generator=made) * 2.0**-6


def _cut(grad: Tensor, param: Tensor) -> Tensor:
    if not isinstance(param, DTensor):
        return grad
    return distribute_tensor(grad, param.device_mesh, param.placements, src_data_rank=None)


@cache
def expected(steps: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Parameters and moments after ``steps`` steps of torch's own optimizers in one process."""
    model = Model([nn.Parameter(whole.clone()) for whole in job.first_values()])
    muon = torch.optim.Muon(model.matrices.parameters(), lr=0.02)
    adamw = torch.optim.AdamW(model.rest.parameters(), lr=0.01)
    for step in range(steps):
        for index, param in enumerate(model.parameters()):
            param.grad = _gradient(step, index, tuple(param.shape))
        muon.step()
        adamw.step()
    state = [muon.state[p]["momentum_buffer"] for p in model.matrices]
    state += [adamw.state[p][key] for p in model.rest for key in ("exp_avg", "exp_avg_sq")]
    return tuple(p.detach() for p in model.parameters()), tuple(state)


def holds(model: Model, both: MuonWithAdamW, steps: int) -> bool:
    """Whether one process's model and optimizers have exactly the state expected after ``steps`` steps."""
    muon, adamw = both.muon.state, both.adamw.state
    state = [muon[p].get("momentum_buffer") for p in model.matrices]
    state += [adamw[p].get(key) for p in model.rest for key in ("exp_avg", "exp_avg_sq")]
    pairs = zip([*(p.detach() for p in model.parameters()), *state], sum(expected(steps), ()), strict=True)
    return all(its is not None and job.raw_bytes(its) == job.raw_bytes(wanted) for its, wanted in pairs)


def parameters_equal(model: Model, steps: int) -> bool:
    """Whether this rank's parameters, or its shards of them, are as expected after ``steps`` steps."""
    return all(
        job.raw_bytes(local_part(param.detach())) == job.raw_bytes(local_part(_cut(whole, param)))
        for param, whole in zip(model.parameters(), expected(steps)[0], strict=True)
    )


def digest(model: Model, both: MuonWithAdamW) -> list[bytes]:
    """The bytes of everything that a load may change: tensors and hyperparameters."""
    found = [job.raw_bytes(local_part(p.detach())) for p in model.parameters()]
    for part in (both.muon, both.adamw):
        for entry in part.state.values():
            found += [job.raw_bytes(local_part(value)) for value in entry.values() if torch.is_tensor(value)]
        found += [repr({k: v for k, v in g.items() if k != "params"}).encode() for g in part.param_groups]
    return found
