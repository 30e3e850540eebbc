"""Lesson 09 on ranks: the package's phases of a step, between which the reader writes the moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ... import Coordinate, Grid, LocalWorld, Matrix, Muon, Plan, Route, Shard, build_mesh, zero1
from ...engine.collective import Collective, Label, Walk
from ...engine.travel import all_reduce, travel
from ...errors import UsageError
from ...evidence.ledger import Ledger
from ...evidence.predict import SETTINGS
from ...plan.bucket import Bucket, BucketEntry, DistMeta
from ...plan.strategies import Builder
from ...step.momentum import update_momentum
from ...step.orthogonalize import newton_schulz_update
from ...step.parameter_state import ParameterState
from ...step.rank_bucket import RankBucket
from ...step.reduce_gradients import pack_gradients
from ...step.step import PlanStep
from ...step.write_parameters import step_copies, write_parameters
from ...training import gpt
from ...training.text import batch_at, load_text
from ...worlds.live import LiveWorld
from ..inputs import measure
from ..my_muon.reference import unpack
from .recording import PHASES, Diarist, RankDiary, StepRecording, assemble

GPT_SHAPE = gpt.GPTShape(layers=1, width=32, heads=2, context=32)
BATCH = 8
LR = 0.02
MATRICES = {"up": ("blocks.0.mlp.up", 0), "o": ("blocks.0.attention.o", 1), "down": ("blocks.0.mlp.down", 1)}

Named = tuple[str, torch.nn.Parameter]
Unpack = Callable[[Tensor, DistMeta], Tensor]
StepOfBucket = Callable[..., Walk]


@cache
def weights(seed: int) -> dict[str, Tensor]:
    """The three whole matrices, in the optimizer's order."""
    parameters = dict(gpt.build_gpt(GPT_SHAPE, seed).named_parameters())
    return {name: parameters[f"{path}.weight"].detach() for name, (path, _) in MATRICES.items()}


@cache
def local_gradients(seed: int, place: int) -> dict[str, Tensor]:
    """The gradients on a dp position's part of the text of ``gpt.py``; the lessons' numbers depend on it."""
    with measure.one_thread():
        model = gpt.build_gpt(GPT_SHAPE, seed)
        batch = batch_at(load_text(gpt.__file__, GPT_SHAPE.context), place, BATCH, GPT_SHAPE.context, seed)
        gpt.next_byte_loss(model, batch.inputs, batch.targets).backward()
    found: dict[str, Any] = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: found[f"{path}.weight"] for name, (path, _) in MATRICES.items()}


def small_matrices() -> list[Matrix]:
    return [
        Matrix(index, name, tuple(weights(0)[name].shape), (("tp", Shard(dim)),))
        for index, (name, (_, dim)) in enumerate(MATRICES.items())
    ]


def plan_of(dp: int, tp: int) -> Plan:
    """The plan of the lesson: all three matrices in one bucket."""
    return zero1(small_matrices(), Grid.of(dp=dp, tp=tp))


def parameters_on(at: Coordinate, seed: int) -> list[Named]:
    """One rank's tp pieces of the matrices, each with the gradient on the rank's own text.

    Raises UsageError if tp does not divide the sides that it cuts.
    """
    if any(weights(seed)[name].shape[dim] % at.size("tp") for name, (_, dim) in MATRICES.items()):
        raise UsageError(f"tp = {at.size('tp')} does not divide the sides that it cuts; take 1, 2 or 4")
    named = []
    for entry in plan_of(at.size("dp"), at.size("tp")).buckets[0].entries:
        name, piece = entry.matrix.name, entry.matrix.box(at).slices
        parameter = torch.nn.Parameter(weights(seed)[name][piece].clone())
        parameter.grad = local_gradients(seed, at["dp"])[name][piece].clone()
        named.append((name, parameter))
    return named


def count_step(world: LiveWorld, parameters: list[Named], build: Builder) -> tuple[Muon, Ledger]:
    """Step the package's Muon; returns it and a ledger. Gradients are averaged first if the plan says so."""
    dims = {index: dim for index, (_, dim) in enumerate(MATRICES.values())}
    muon, ledger = Muon(parameters, strategy=build, mesh=world, tp_dim=dims), Ledger()
    if muon.plan is not None and muon.plan.expects == "averaged":
        for group in muon.param_groups:
            for param in group["params"]:
                total = world.run(all_reduce(param.grad.clone(), "dp", world.at, Label("by DDP")))
                param.grad = total / world.grid.size("dp")
    world.observers.append(ledger)
    muon.step()
    world.observers.remove(ledger)
    return muon, ledger


def step_on(at: Coordinate, seed: int) -> PlanStep:
    """One rank's step over the plan, with the settings of ``torch.optim.Muon`` and the lesson's lr."""
    group = {**SETTINGS, "lr": LR}
    states = [ParameterState(parameter, group, {}) for _, parameter in parameters_on(at, seed)]
    step = PlanStep(plan_of(at.size("dp"), at.size("tp")), at, states)
    step.fill_state()
    return step


@dataclass(frozen=True, slots=True)
class Report:
    """One rank's report: the flat mean gradients of its range, its new weights, and its diary."""

    kept: Tensor
    after: Mapping[str, Tensor]
    diary: RankDiary


@dataclass(slots=True, eq=False)
class NotedPhases:
    """The package's phases of one rank's step, without communication; ``kept`` holds mean gradients."""

    step: PlanStep
    world: LiveWorld | None = None
    diarist: Diarist = field(init=False)
    kept: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.step.present = frozenset(range(len(MATRICES)))
        self.diarist = Diarist(self.step.plan, self.step.at)

    def label(self, phase: int, entry: BucketEntry | None = None) -> Label:
        """The label of messages in a phase; in phases 3 and 5 it needs the matrix, or raises UsageError."""
        if phase in (3, 5) and entry is None:
            raise UsageError(f"job.label({phase}) names no matrix; write job.label({phase}, entry)")
        return Label(PHASES[phase - 1], "" if entry is None else entry.matrix.name)

    def gradients(self, bucket: Bucket) -> Tensor:
        """Before phase 1: this rank's own gradients, packed flat, each at its place in the bucket."""
        flat = pack_gradients(self._mine(bucket))
        self.diarist.note_held(0, bucket, flat)
        return flat

    def momentum(self, bucket: Bucket, summed: Tensor) -> Tensor:
        """Before phase 2: update this rank's range of momentum; returns the input of Newton–Schulz."""
        self.kept = summed / bucket.summands
        self.diarist.note_stored(1, bucket, self.kept)
        inputs = update_momentum(self._mine(bucket), self.kept, self.step.present or ())
        assert isinstance(inputs, Tensor)
        return inputs

    def matrices(self, bucket: Bucket) -> list[tuple[BucketEntry, DistMeta]]:
        """Before phase 3: the matrices this rank works on, each with its entry in the master plan."""
        rows = zip(bucket.entries, bucket.dist_meta(self.step.at), strict=True)
        return [(entry, meta) for entry, meta in rows if bucket.works_on(entry, self.step.at)]

    def newton_schulz(self, entry: BucketEntry, whole: Tensor) -> Tensor:
        """Phase 4: Newton–Schulz, which refuses a matrix that is not whole."""
        self.diarist.note(3, entry.matrix.name, whole)
        if whole.shape != entry.matrix.shape:
            due, came = tuple(entry.matrix.shape), tuple(whole.shape)
            raise UsageError(f"{entry.matrix.name} has the shape {due}, and job.newton_schulz got {came}")
        update = newton_schulz_update(whole, whole.shape, self.step.parameters[entry.matrix.param].group)
        self.diarist.note(4, entry.matrix.name, update)
        return update

    def apply(self, bucket: Bucket, updates: Tensor) -> Tensor:
        """Before phase 7: decay and step this rank's ranges of the parameters; returns them, flat."""
        self.diarist.note_stored(6, bucket, updates)
        return step_copies(self._mine(bucket), updates, range(len(MATRICES)))

    def write(self, bucket: Bucket, whole: Tensor) -> None:
        """After phase 7: write the new entries into the parameters."""
        self.diarist.note_held(7, bucket, whole)
        write_parameters(self._mine(bucket), whole)

    def walk(self, step: StepOfBucket) -> Walk:
        """Trace the routes with rank numbers, then run a step; returns the report."""
        yield from self.diarist.trace()
        return (yield from self.take(step))

    def take(self, step: StepOfBucket) -> Walk:
        """Run a step, bucket by bucket; returns the report."""
        for bucket in self.step.plan.buckets:
            yield from step(self, bucket, self.step.at)
        after = {name: each.data.clone() for name, each in zip(MATRICES, self.step.parameters, strict=True)}
        return Report(self.kept, after, self.diarist.diary())

    def run(self, step: StepOfBucket) -> Report:
        """Run the walk on real processes. Must be called by all ranks."""
        assert self.world is not None
        self.world.observers.append(self.diarist.observe)
        with torch.no_grad():
            return self.world.run(self.walk(step))

    def _mine(self, bucket: Bucket) -> RankBucket:
        return self.step.buckets[bucket.index]


def job(rank: int, dp: int, tp: int, seed: int) -> NotedPhases:
    """The phases of one real rank. Must be called by all ranks."""
    torch.set_num_threads(1)
    world = LiveWorld(build_mesh({"dp": dp, "tp": tp}))
    return NotedPhases(step_on(Grid.of(dp=dp, tp=tp).at(rank), seed), world)


def way_back(x: Any, route: Route, at: Coordinate, label: Label) -> Walk:
    """The exercise's reference: the way back is the inverse of the route."""
    return travel(x, route.inverse, at, label)


def reference_step(job: NotedPhases, bucket: Bucket, at: Coordinate) -> Walk:
    """The seven phases of one bucket: the hard exercise's reference, which the lesson also records."""
    summed = yield from travel(job.gradients(bucket), bucket.gradient, at, job.label(1))
    flat = yield from travel(job.momentum(bucket, summed), bucket.compute, at, job.label(2))
    done = torch.zeros_like(flat)
    for entry, meta in job.matrices(bucket):
        whole = yield from travel(unpack(flat, meta), entry.route, at, job.label(3, entry))
        update = job.newton_schulz(entry, whole)
        piece = yield from way_back(update, entry.route, at, job.label(5, entry))
        done[slice(*meta.global_range)] = piece.flatten()
    kept = yield from way_back(done, bucket.compute, at, job.label(6))
    fresh = yield from travel(job.apply(bucket, kept), bucket.parameter, at, job.label(7))
    job.write(bucket, fresh)


def record_rank(rank: int, dp: int, tp: int, seed: int) -> RankDiary:
    """One rank's diary of the recorded step. Must be called by all ranks."""
    return job(rank, dp, tp, seed).run(reference_step).diary


@dataclass(slots=True, eq=False)
class SteppedRun:
    """A step in the stepping world: its messages in order, with ranks; the reports; the error, if any."""

    asked: list[tuple[int, Collective]] = field(default_factory=list)
    jobs: list[NotedPhases] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    broke: str = ""

    def of_rank(self, rank: int) -> list[Collective]:
        """The messages of one rank in the seven phases, in order."""
        return [request for who, request in self.asked if who == rank and request.label.phase in PHASES]


def stepped(step: StepOfBucket, dp: int, tp: int, seed: int) -> SteppedRun:
    """Run a step in the stepping world, after a trace of its routes."""
    world, run = LocalWorld(Grid.of(dp=dp, tp=tp)), SteppedRun()
    run.jobs = jobs_on(world.grid, seed)

    def note(request: Collective, at: Coordinate) -> None:
        sent = None if request.send is None else request.send.clone()  # the step may overwrite it later
        run.asked.append((at.rank, replace(request, send=sent)))

    world.observers += [note, *(each.diarist.observe for each in run.jobs)]
    try:
        with torch.no_grad(), measure.one_thread():
            run.reports = world.run([each.walk(step) for each in run.jobs])
    except Exception as error:
        run.broke = f"{type(error).__name__}: {error}"
    return run


def jobs_on(grid: Grid, seed: int) -> list[NotedPhases]:
    """The phases of every rank of a grid, for a stepping world."""
    return [NotedPhases(step_on(grid.at(rank), seed)) for rank in grid.ranks]


def record_here(dp: int, tp: int, seed: int) -> StepRecording:
    """A recording of the same step in one process, which real ranks must match."""
    diaries = [report.diary for report in stepped(reference_step, dp, tp, seed).reports]
    return assemble(f"In one process, dp={dp}, tp={tp}", plan_of(dp, tp), diaries)


def recording_of(reports: Sequence[Report], dp: int, tp: int) -> StepRecording:
    source = f"Your step on {dp * tp} processes, dp={dp}, tp={tp}"
    return assemble(source, plan_of(dp, tp), [report.diary for report in reports])
