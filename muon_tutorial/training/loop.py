"""The training job as every rank runs it: forward, backward, the optimizer's step, and their costs.

The global batch of a step is the same on every grid; a rank takes the share of its dp coordinate. Gradients
stay local until the optimizer averages them. This module prints nothing, and writes only checkpoints.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.profiler import record_function

from ..errors import TextError, TrainingError
from ..evidence.ledger import Ledger
from ..evidence.memory import tensor_bytes
from ..guard.check_clipping import the_plan_step
from ..optimizer.muon import Muon
from ..optimizer.muon_with_adamw import MuonWithAdamW
from ..optimizer.split_parameters import split_parameters
from ..step.reduce_gradients import average_others
from ..worlds.build_mesh import build_mesh
from ..worlds.live import LiveWorld, gather_objects
from .check_against_torch import Snapshot, compare, sum_over
from .checkpoints import REASONS, SAVE, Saver, Saving, StoppedRun
from .gpt import GPT, GPTShape, build_gpt, next_byte_loss, parallelize
from .lr_schedule import lr_share
from .records import CheckVerdict, PhaseTraffic, RunResult, StepRecord, TextFacts
from .settings import TrainSettings
from .text import Batch, Text, batch_at, held_out_batches, load_text, share

HELD_OUT_BATCHES = 4
MUON_WEIGHT_DECAY = 0.1
ADAMW_BETAS = (0.9, 0.95)
ADAMW_BYTES_PER_ELEMENT = 8  # two moments in fp32

TEXT = "text_sha256"
"""The key under which a checkpoint holds the hash of its training text."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Trainer:
    """Everything that one rank trains with.

    The loop and the check use ``world``. The optimizer uses ``counted``, which has the same mesh; ``ledger``
    holds the collectives that the optimizer requested in the last step.
    """

    settings: TrainSettings
    device: torch.device
    world: LiveWorld
    counted: LiveWorld
    text: Text
    model: GPT
    parameters: int
    optimizer: MuonWithAdamW
    scheduler: LambdaLR
    ledger: Ledger


def train_rank(
    rank: int,
    settings: TrainSettings,
    tell: Callable[[StepRecord], None],
    saving: Saving | None = None,
    say: Callable[[str], None] = print,
) -> RunResult | StoppedRun:
    """Run the whole job on this rank; must be called by all ranks of an initialised default group.

    On rank 0, ``tell`` gets the record of each step; ``say`` gets lines for the user. With ``saving`` the run
    saves checkpoints, resumes from one, and can be stopped; the records cover only the steps of this launch.

    Raises:
        TextError: the ranks read different texts, or another text than the run began with.
        TrainingError: the loss is no longer finite.
        CheckpointError: a checkpoint could not be saved or loaded.
    """
    trainer = build_trainer(settings)
    saver, begin = None, 0
    if saving is not None:
        saver = Saver(saving, trainer.model, trainer.optimizer, trainer.scheduler, saving.manager())
        begin = saving.begin or 0
    if saver and begin:
        run = saver.resume()
        _check_text(run.get(TEXT), trainer.text)
    else:
        run = {"loss_before": held_out_loss(trainer), TEXT: trainer.text.sha256}
    records, verdict = [], None
    for step in range(begin, settings.steps):
        record, verdict = train_step(trainer, step, settings.check and step == settings.steps - 1)
        records.append(record)
        if rank == 0:
            tell(record)
        if saver is not None:
            asked = _on_any_rank(trainer, saver.asked(rank == 0)) if step + 1 < settings.steps else []
            if rank == 0 and SAVE in asked:
                saver.saving.save_file.unlink(missing_ok=True)
            if asked or saver.due(step + 1, settings.steps):
                saver.save(step + 1, run, wait=bool(asked))
            if asked not in ([], [SAVE]):
                return StoppedRun(step + 1, saver.saving.checkpoints, asked[-1])
            if asked and rank == 0:
                say(f"saved after step {step + 1} in {saver.saving.checkpoints}")
    after = _finite(held_out_loss(trainer), "the held-out loss at the end", trainer)
    if saver is not None:
        saver.manager.wait()
    text = trainer.text
    kept = (value for entry in trainer.optimizer.state.values() for value in entry.values())
    return RunResult(
        settings=settings,
        text=TextFacts(text.source, text.size, text.sha256),
        parameters=trainer.parameters,
        loss_before=run["loss_before"],
        loss_after=after,
        records=tuple(records),
        traffic=_traffic(trainer),
        state_bytes=tuple(gather_objects(tensor_bytes(it for it in kept if isinstance(it, Tensor)))),
        adamw_state_bytes=ADAMW_BYTES_PER_ELEMENT * trainer.parameters,
        check=verdict,
    )


def build_trainer(settings: TrainSettings) -> Trainer:
    """Make this rank's text, model and optimizer. Must be called by all ranks."""
    device = torch.device(f"cuda:{torch.cuda.current_device()}" if settings.backend == "nccl" else "cpu")
    mesh = build_mesh({"dp": settings.dp, "tp": settings.tp}, device.type, settings.timeout)
    ledger = Ledger()
    world, counted = LiveWorld(mesh), LiveWorld(mesh, [ledger])
    text = load_text(settings.text, settings.context)
    _agree_on_text(text)
    model = build_gpt(
        GPTShape(settings.layers, settings.width, settings.heads, settings.context), settings.seed
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    model.to(device)
    parallelize(model, mesh["tp"])
    optimizer = _build_optimizer(model, settings, counted)
    scheduler = LambdaLR(optimizer, lambda step: lr_share(step, settings.steps))
    return Trainer(settings, device, world, counted, text, model, parameters, optimizer, scheduler, ledger)


@torch.no_grad()
def held_out_loss(trainer: Trainer) -> float:
    """Mean loss over fixed held-out batches, in nats per byte; the same on every rank."""
    s = trainer.settings
    batches = held_out_batches(trainer.text, s.batch, s.context, HELD_OUT_BATCHES)
    losses = [_local_loss(trainer, batch) for batch in batches]
    return _mean_over_dp(trainer, torch.stack(losses).mean())


def train_step(trainer: Trainer, step: int, checked: bool) -> tuple[StepRecord, CheckVerdict | None]:
    """Take one step and time it. If ``checked``, compare the step with the single-process optimizers."""
    lr = float(trainer.scheduler.get_last_lr()[0])
    trainer.ledger.clear()
    trainer.optimizer.zero_grad()
    loss, learning = _timed(trainer, lambda: _learn(trainer, step))
    mean, waiting = _timed(trainer, lambda: _mean_over_dp(trainer, loss))  # waits for slower ranks
    global_loss = _finite(mean, f"the loss at step {step + 1}", trainer)
    optimizing, verdict = _optimize(trainer, step, checked)
    trainer.scheduler.step()
    return StepRecord(step, global_loss, lr, learning + waiting + optimizing, optimizing), verdict


def _build_optimizer(model: GPT, settings: TrainSettings, world: LiveWorld) -> MuonWithAdamW:
    """Distributed Muon for the hidden matrices, AdamW for the rest.

    Muon's updates are scaled to AdamW's size (``match_rms_adamw``), so that one learning rate serves both.
    """
    hidden, rest = split_parameters(model)
    muon = Muon(
        hidden,
        lr=settings.lr,
        weight_decay=MUON_WEIGHT_DECAY,
        adjust_lr_fn="match_rms_adamw",
        strategy=settings.strategy,
        mesh=world,
    )
    adamw = torch.optim.AdamW(rest, lr=settings.lr, betas=ADAMW_BETAS, weight_decay=0.0)
    return MuonWithAdamW(muon, adamw)


def _learn(trainer: Trainer, step: int) -> Tensor:
    """Run forward and backward on this rank's share; gradients stay local."""
    s = trainer.settings
    with record_function("forward"):
        loss = _local_loss(trainer, batch_at(trainer.text, step, s.batch, s.context, s.seed))
    with record_function("backward"):
        loss.backward()
    return loss.detach()


def _optimize(trainer: Trainer, step: int, checked: bool) -> tuple[float, CheckVerdict | None]:
    """Average gradients and step; return how long that took and, if ``checked``, the check's verdict."""
    world, optimizer = trainer.world, trainer.optimizer
    sums = Snapshot.sums(world, optimizer) if checked else None
    _, readying = _timed(trainer, lambda: _ready_gradients(trainer))
    snapshot = Snapshot.take(world, optimizer, sums) if sums is not None else None
    _, stepping = _timed(trainer, optimizer.step)
    verdict = compare(optimizer, snapshot, step) if snapshot is not None else None
    return readying + stepping, verdict


def average_gradients(world: LiveWorld, parameters: Sequence[Tensor]) -> None:
    """Average the gradients over dp in place, as DDP would. Must be called by all ranks."""
    given = [parameter for parameter in parameters if parameter.grad is not None]
    world.run(average_others(given, world.at, "gradient all_reduce"))


def _ready_gradients(trainer: Trainer) -> None:
    if the_plan_step(trainer.optimizer.muon.steps).plan.expects == "averaged":
        average_gradients(trainer.counted, list(trainer.model.parameters()))
    trainer.optimizer.ready_gradients()


def _finite(loss: float, what: str, trainer: Trainer) -> float:
    if not math.isfinite(loss):
        raise TrainingError(f"{what} is {loss}; try a smaller --lr than {trainer.settings.lr:g}")
    return loss


def _local_loss(trainer: Trainer, batch: Batch) -> Tensor:
    mine = share(batch, trainer.world.at["dp"], trainer.settings.dp)
    return next_byte_loss(trainer.model, mine.inputs.to(trainer.device), mine.targets.to(trainer.device))


def _mean_over_dp(trainer: Trainer, loss: Tensor) -> float:
    return sum_over(trainer.world, "dp", loss.double(), "loss").item() / trainer.settings.dp


def _on_any_rank(trainer: Trainer, asked: set[str]) -> list[str]:
    """The reasons that one or more ranks see, in the order of ``REASONS``; the same on all ranks."""
    counts = torch.tensor([float(reason in asked) for reason in REASONS], device=trainer.device)
    for axis in trainer.world.grid.axes:
        counts = sum_over(trainer.world, axis, counts, "stop?")
    return [reason for reason, count in zip(REASONS, counts.tolist(), strict=True) if count]


def _timed(trainer: Trainer, do: Callable[[], T]) -> tuple[T, float]:
    start = time.perf_counter()
    value = do()
    if trainer.device.type == "cuda":
        torch.cuda.synchronize(trainer.device)
    return value, time.perf_counter() - start


def _agree_on_text(text: Text) -> None:
    hashes = [digest[:12] for digest in gather_objects(text.sha256)]
    if len(set(hashes)) > 1:
        raise TextError(
            f"the ranks read different texts from {text.source} (SHA-256 {', '.join(hashes)}); "
            "use the same Python on every machine, or pass the same --text"
        )


def _check_text(began_with: str | None, text: Text) -> None:
    """Refuse a text whose hash is not ``began_with``, which is None if the checkpoint holds no hash."""
    if began_with not in (None, text.sha256):
        raise TextError(
            f"{text.source} is not the text that the run began with (SHA-256 {text.sha256[:12]}, not "
            f"{began_with[:12]}); restore that text, or start another run"
        )


def _traffic(trainer: Trainer) -> tuple[PhaseTraffic, ...]:
    """The phases of the last step, on the rank that sent the most bytes in the whole step."""
    rows = trainer.ledger.rows(trainer.world.at.rank)
    mine = tuple(PhaseTraffic(row.phase, row.collectives, row.payload, row.ring) for row in rows)
    return max(gather_objects(mine), key=lambda its: sum(traffic.sent_bytes for traffic in its))
