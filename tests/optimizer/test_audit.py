"""An audit names eight impostors of Muon, under DDP, FSDP2, ``zero1``, in one process and under the Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from muon_tutorial import Grid, LocalWorld, Muon, MuonWithAdamW, UsageError, build_mesh, launch
from muon_tutorial import zeropower_via_newtonschulz as newton_schulz
from muon_tutorial.optimizer import update_verdict
from muon_tutorial.optimizer.audit import AuditReport, audit
from muon_tutorial.step import orthogonalize, single_process

STEPS, MICRO_BATCHES = 3, 2
PARTS = {"0.qkv.weight": (24, 24, 24)}
NAMES = ["0.qkv.weight", "1.weight", "2.weight"]

MAKE: dict[str, Callable[[Tensor], Tensor]] = {
    "SGD instead": lambda it: it,
    "AdamW instead": lambda it: it.sign(),
    "on a shard": lambda it: torch.cat([newton_schulz(half).to(it.dtype) for half in it.chunk(2)]),
    "zero steps": lambda it: it / it.norm(),
    "a wrong scale": lambda it: 0.3 * newton_schulz(it),
}
"""What takes the place of Newton–Schulz."""

SAID = {
    "SGD instead": update_verdict.SGD,
    "AdamW instead": update_verdict.ADAMW,
    "on a shard": "each of 2 shards orthogonalized alone",
    "on a fused pair": "its 3 matrices orthogonalized as one",
    "on each micro-batch": update_verdict.MICRO,
    "zero steps": update_verdict.NO_STEPS,
    "a wrong scale": "0.3 times as large as is due",
    "momentum lost": update_verdict.LOST,
}


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(24, 72, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return q * k.tanh() + v


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Fused(), nn.Linear(24, 40, bias=False), nn.Linear(40, 24, bias=False))


@contextmanager
def planted(name: str, optimizer: MuonWithAdamW) -> Iterator[None]:
    """Let an optimizer take steps that are not Muon's."""
    before = orthogonalize.newton_schulz_update

    def instead(whole: Tensor, sides: Any, group: Any, workspace: Any = None) -> Tensor:
        before(whole, sides, group, workspace)
        make = MAKE.get(name, MAKE["SGD instead"])
        return make(whole.reshape(sides)).to(torch.float32).reshape(whole.shape)

    if name in MAKE or name == "on each micro-batch":
        orthogonalize.newton_schulz_update = single_process.newton_schulz_update = instead
    if name == "on each micro-batch":
        for group in optimizer.muon.param_groups:
            for param in group["params"]:
                param.register_post_accumulate_grad_hook(OrthogonalMicroBatches())
    if name == "on a fused pair":
        for group in optimizer.muon.param_groups:
            group["parts"] = None
    if name == "momentum lost":
        optimizer.register_step_pre_hook(forget)
    try:
        yield
    finally:
        orthogonalize.newton_schulz_update = single_process.newton_schulz_update = before


class OrthogonalMicroBatches:
    """Orthogonalizes what a backward added to a gradient, as DeepSpeed did (issue 8443)."""

    def __init__(self) -> None:
        self.calls, self.before = 0, torch.zeros(())

    @torch.no_grad()
    def __call__(self, param: Tensor) -> None:
        assert param.grad is not None
        grad: Any = param.grad if isinstance(param.grad, DTensor) else param.grad.as_subclass(Tensor)
        added = grad - self.before if self.calls % MICRO_BATCHES else grad
        whole = added.full_tensor() if isinstance(added, DTensor) else added
        made = newton_schulz(whole).float()
        if isinstance(grad, DTensor):
            made = distribute_tensor(made, grad.device_mesh, grad.placements)
        grad.copy_(made + self.before if self.calls % MICRO_BATCHES else made)
        self.calls, self.before = self.calls + 1, grad.clone()


def forget(optimizer: Any, *_: Any) -> None:
    for entry in optimizer.muon.state.values():
        entry["momentum_buffer"].zero_()


def trained(rank: int, model: nn.Module, optimizer: Any, no_sync: Any = nullcontext) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICRO_BATCHES):
            made = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
            x, y = torch.randn(64, 24, generator=made), torch.randn(64, 24, generator=made)
            with no_sync() if micro + 1 < MICRO_BATCHES else nullcontext():
                (model(x) - y).square().mean().backward()
        optimizer.step()


def audited(host: str, name: str, rank: int) -> AuditReport:
    model: Any = build()
    options: dict[str, Any] = {"lr": 0.02, "parts": PARTS}
    if host == "fsdp2":
        fully_shard(model)
    if host == "zero1":
        options |= {"strategy": "zero1", "mesh": build_mesh({"dp": 2})}
    optimizer = MuonWithAdamW.from_model(model, **options)
    wrapped = DistributedDataParallel(model) if host == "ddp" else model
    with planted(name, optimizer):
        seen = audit(optimizer)
        trained(rank, wrapped, optimizer, getattr(wrapped, "no_sync", nullcontext))
        report: AuditReport = seen.report()
    return report


def reports(rank: int, host: str, names: list[str]) -> dict[str, AuditReport]:
    return {name: audited(host, name, rank) for name in names}


def check(found: dict[str, AuditReport]) -> None:
    """Each impostor is named, on every matrix that it touches, and an honest Muon is none."""
    for name, report in found.items():
        fused = ["0.qkv.weight"] if name == "on a fused pair" else NAMES
        expected = {} if name == "none" else dict.fromkeys(fused, SAID[name])
        assert report.wrong == expected, (name, str(report))
        assert report.line.startswith("Muon is not Muon" if expected else "Muon is Muon"), name


EVERY = ["none", *SAID]


@pytest.mark.parametrize("host", ["ddp", "fsdp2", "zero1"])
def test_an_audit_names_impostors_over_ranks(host: str) -> None:
    for found in launch(reports, 2, args=(host, EVERY), timeout=60):
        check(found)


def test_an_audit_names_impostors_in_one_process() -> None:
    check(reports(0, "plain", EVERY))
