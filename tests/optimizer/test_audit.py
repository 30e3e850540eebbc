"""An audit recognizes eight wrong Muons under DDP, FSDP2, ``zero1`` and the Trainer, and in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from muon_tutorial import Muon, MuonWithAdamW, UsageError, build_mesh, launch
from muon_tutorial import zeropower_via_newtonschulz as newton_schulz
from muon_tutorial.optimizer import update_verdict
from muon_tutorial.optimizer.audit import AuditReport, audit
from muon_tutorial.step import orthogonalize, single_process
from muon_tutorial.step.rank_bucket import AROUND

from ..exhaustive import left_out

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
"""Functions that replace Newton–Schulz."""

SAID = {
    "SGD instead": update_verdict.SGD,
    "AdamW instead": update_verdict.ADAMW,
    "on a shard": "each of 2 shards orthogonalized alone",
    "on a fused pair": "its 3 matrices orthogonalized as one",
    "on each micro-batch": update_verdict.MICRO,
    "zero steps": update_verdict.NO_STEPS,
    "a wrong scale": "0.3 times the correct size",
    "momentum lost": update_verdict.LOST,
}


EVERY = ["none", *SAID]
TRAINERS = ("none", "on each micro-batch", "momentum lost")
"""The cases that a usual run tries under the Trainer, whose wrapper and accumulation could hide them."""


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(24, 72, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return q * k.tanh() + v


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 40, bias=False), nn.Linear(40, 24, bias=False))


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Fused(), *two_layers().children())


@contextmanager
def planted(name: str, optimizer: MuonWithAdamW) -> Iterator[None]:
    """Make an optimizer take steps that are not Muon's."""
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
    """Orthogonalizes each backward's contribution to a gradient, as DeepSpeed did (issue 8443)."""

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


def reports(rank: int, host: str) -> dict[str, AuditReport]:
    return {name: audited(host, name, rank) for name in EVERY}


def check(found: dict[str, AuditReport]) -> None:
    """Assert that reports name a wrong Muon on every matrix that it touches, and accept a right Muon."""
    for name, report in found.items():
        fused = ["0.qkv.weight"] if name == "on a fused pair" else NAMES
        expected = {} if name == "none" else dict.fromkeys(fused, SAID[name])
        assert report.wrong == expected, (name, str(report))
        assert report.line.startswith("this is not Muon" if expected else "this is Muon"), name


@pytest.mark.parametrize("host", ["fsdp2", "ddp", "zero1"])
def test_an_audit_names_impostors_over_ranks(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "OFF")  # DETAIL makes a process's second DDP abort
    for found in launch(reports, 2, args=(host,), timeout=60):
        check(found)


def test_an_audit_names_impostors_in_one_process() -> None:
    check(reports(0, "plain"))


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = build()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.body(x) - labels).square().mean()}


@pytest.mark.parametrize("name", [name if name in TRAINERS else left_out(name) for name in EVERY])
def test_an_audit_names_impostors_under_the_trainer(name: str, tmp_path: Any) -> None:
    transformers: Any = pytest.importorskip("transformers")
    settings = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, per_device_train_batch_size=64, max_steps=STEPS,
        gradient_accumulation_steps=MICRO_BATCHES, report_to="none", learning_rate=0.02,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    made = torch.Generator().manual_seed(0)
    data = [{key: torch.randn(24, generator=made) for key in ("x", "labels")} for _ in range(384)]
    model = WithLoss()
    parts = {f"body.{key}": it for key, it in PARTS.items()}
    optimizer = MuonWithAdamW.from_model(model, lr=0.02, parts=parts)
    trainer = transformers.Trainer(model, settings, train_dataset=data, optimizers=(optimizer, None))
    with planted(name, optimizer):
        seen = audit(trainer.optimizer)
        trainer.train()
        report = seen.report()
    check({name: replace(report, findings=tuple(replace(it, name=it.name[5:]) for it in report.findings))})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda params: torch.optim.Muon(params, lr=0.02), None),
        (lambda params: torch.optim.SGD(params, lr=0.02), update_verdict.SGD),
        (lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9), update_verdict.SGD),
        (lambda params: torch.optim.AdamW(params, lr=0.02), update_verdict.ADAMW),
        (lambda params: torch.optim.AdamW(params, lr=0.0001), update_verdict.ADAMW),
        (lambda params: torch.optim.SGD(params, lr=1e-30), update_verdict.STILL),
    ],
)
def test_any_optimizer_is_audited_by_the_models_matrices(make: Any, said: str | None) -> None:
    torch.manual_seed(0)
    model = two_layers()
    optimizer = make(model.parameters())
    seen = audit(optimizer, model)
    trained(0, model, optimizer)
    assert set(seen.report().wrong.values()) == ({said} if said else set())


@pytest.mark.parametrize("kind", [Muon, torch.optim.AdamW, torch.optim.SGD])
def test_nothing_is_said_of_a_step_in_which_no_update_is_due(kind: Any) -> None:
    """A schedule may begin with a learning rate of zero, with which all optimizers look alike."""
    model = two_layers()
    optimizer = kind(model.parameters(), lr=0.0)
    seen = audit(optimizer, model)
    trained(0, model, optimizer)
    report = seen.report()
    assert report.line.startswith("this step shows nothing")
    assert (len(report.findings), report.left_out) == (0, 2)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_matrix_whose_gradients_are_all_zero_is_left_out(weight_decay: float) -> None:
    model = two_layers()
    optimizer = Muon(model.parameters(), lr=0.02, weight_decay=weight_decay)
    seen = audit(optimizer, model)
    model(torch.randn(8, 24)).square().sum().backward()
    first = next(model.parameters())
    first.grad = torch.zeros_like(first)
    optimizer.step()
    assert seen.report().line.startswith("this is Muon: 1 of 2 parameters moved")


def test_an_audit_reports_of_the_last_step_alone_and_leaves_nothing_behind() -> None:
    model = build()
    optimizer = MuonWithAdamW.from_model(model, lr=0.02, parts=PARTS)
    assert not optimizer._optimizer_step_pre_hooks
    seen = optimizer.audit()
    with pytest.raises(UsageError, match="no step was audited"):
        seen.report()
    trained(0, model, optimizer)
    assert not optimizer._optimizer_step_pre_hooks
    assert orthogonalize.AROUND.get() != seen._count
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())
    bits = [param.clone() for param in model.parameters()]
    torch.manual_seed(0)
    other = build()
    trained(0, other, MuonWithAdamW.from_model(other, lr=0.02, parts=PARTS))
    assert all(map(torch.equal, bits, other.parameters()))  # the audit changes nothing


def test_a_last_step_that_failed_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    optimizer = MuonWithAdamW.from_model(model, lr=0.02, parts=PARTS)
    watching = audit(optimizer, model)
    trained(0, model, optimizer)
    with monkeypatch.context() as patched:
        patched.setattr(single_process, "newton_schulz_update", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            optimizer.step()
    report = watching.report()
    assert report.line.startswith("this is Muon")
    assert sum(made for made, _ in (report.calls or {}).values()) == sum(report.by_rank) == 5
    assert AROUND.get() != watching._count  # the report's own Newton–Schulz is not counted


def test_more_calls_than_planned_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    before = single_process.newton_schulz_update

    def twice(*given: Any) -> Tensor:
        before(*given)
        return before(*given)

    monkeypatch.setattr(single_process, "newton_schulz_update", twice)
    model = build()
    optimizer = MuonWithAdamW.from_model(model, lr=0.02, parts=PARTS)
    seen = audit(optimizer)
    trained(0, model, optimizer)
    report = seen.report()
    assert report.miscounted[0] == "6 Newton–Schulz calls at 24 × 24, where 3 are planned"
    assert report.line == f"this is not Muon: {report.miscounted[0]}"


def test_an_optimizer_that_does_not_know_its_matrices_asks_for_the_model() -> None:
    with pytest.raises(UsageError, match="pass the model"):
        audit(torch.optim.SGD(build().parameters(), lr=0.1))
