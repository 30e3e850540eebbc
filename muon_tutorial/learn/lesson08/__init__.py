"""What notebook 08 imports: matrices of a small GPT, the package's phases with notes, and the exercises.

The reader writes the moving, phase by phase; the arithmetic between the phases is the package's own. The
gradients are real: each dp position reads other parts of the GPT's own source code.
"""

from __future__ import annotations

import inspect
import linecache
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ... import (
    Coordinate,
    Grid,
    Hop,
    LocalWorld,
    Matrix,
    Muon,
    Plan,
    Replicate,
    Route,
    Shard,
    build_mesh,
    zero1,
)
from ...engine.collective import Collective, Label, Walk
from ...engine.hops import view
from ...engine.travel import travel
from ...errors import UsageError
from ...plan.bucket import Bucket, BucketEntry, DistMeta, matrix_boxes
from ...step.momentum import momentum_update, update_momentum
from ...step.orthogonalize import newton_schulz_update
from ...step.rank_bucket import RankBucket
from ...step.reduce_gradients import pack_gradients
from ...step.step import PlanStep
from ...step.write_parameters import update_parameters, write_parameters
from ...training import gpt
from ...training.check import Sums, gradient_error
from ...training.text import batch_at, load_text
from ...worlds.live import LiveWorld
from ...worlds.local import LocalMesh
from ..exercises.judge import Exercise, MistakeError, OpenAnswerError, numbers, value_of
from ..inputs import measure
from . import replay
from .replay import PHASES, Diarist, Diary, Recording

GPT_SHAPE = gpt.GPTShape(layers=1, width=32, heads=2, context=32)
BATCH = 8
LR = 0.02
MATRICES = {"up": ("blocks.0.mlp.up", 0), "o": ("blocks.0.attention.o", 1), "down": ("blocks.0.mlp.down", 1)}
GRIDS = ((2, 2), (3, 2), (1, 4), (4, 1), (2, 3))

BLUEPRINT_LOOP = """def update_loop(param_groups, update):
    for group in param_groups:
        for param in params:
            update(param, group)
"""

UpdateLoop = Callable[[list[dict], Callable[[Tensor, dict], None]], None]
Unpack = Callable[[Tensor, DistMeta], Tensor]
StepOfBucket = Callable[..., Walk]


@cache
def weights(seed: int) -> dict[str, Tensor]:
    """The three matrices, whole, in the order in which the optimizer is handed them."""
    model = gpt.build_gpt(GPT_SHAPE, seed)
    parameters = dict(model.named_parameters())
    return {name: parameters[f"{path}.weight"].detach() for name, (path, _) in MATRICES.items()}


@cache
def local_gradients(seed: int, place: int) -> dict[str, Tensor]:
    """The whole gradients of the text that one dp position reads."""
    with measure.one_thread():
        model = gpt.build_gpt(GPT_SHAPE, seed)
        batch = batch_at(load_text(gpt.__file__, GPT_SHAPE.context), place, BATCH, GPT_SHAPE.context, seed)
        gpt.next_byte_loss(model, batch.inputs, batch.targets).backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {
        name: grad for name, (path, _) in MATRICES.items() if (grad := found[f"{path}.weight"]) is not None
    }


def plan_of(dp: int, tp: int) -> Plan:
    """The plan of the lesson."""
    sides = weights(0)
    matrices = [
        Matrix(index, name, tuple(sides[name].shape), (("tp", Shard(dim)),))
        for index, (name, (_, dim)) in enumerate(MATRICES.items())
    ]
    return zero1(matrices, Grid.of(dp=dp, tp=tp))


def muon_on(mesh: Any, at: Coordinate, seed: int) -> Muon:
    """One rank's optimizer over its tp pieces, with the gradients of its own text.

    Raises:
        UsageError: where tp does not divide the sides that it cuts.
    """
    if any(weights(seed)[name].shape[dim] % at.size("tp") for name, (_, dim) in MATRICES.items()):
        raise UsageError(f"tp = {at.size('tp')} does not divide the sides that it cuts; take 1, 2 or 4")
    named = []
    for index, (name, whole) in enumerate(weights(seed).items()):
        box = plan_of(at.size("dp"), at.size("tp")).buckets[0].entries[index].matrix.box(at)
        parameter = torch.nn.Parameter(whole[box.slices].clone())
        parameter.grad = local_gradients(seed, at["dp"])[name][box.slices].clone()
        named.append((name, parameter))
    dims = {index: dim for index, (_, dim) in enumerate(MATRICES.values())}
    return Muon(named, lr=LR, strategy="zero1", mesh=mesh, tp_dim=dims)


def program(mesh: LocalMesh, seed: int) -> Walk:
    """One whole step of the package's own optimizer on one rank of a stepping world, as a generator."""
    return muon_on(mesh, mesh.at, seed).program()


def requests(world: LocalWorld) -> Iterator[str]:
    """Answer one message after the other to the end; say each, with the number of its phase."""
    while event := world.advance():
        phase = event.request.label.phase
        number = f"phase {PHASES.index(phase) + 1}" if phase in PHASES else "before "
        sent = 0 if event.request.send is None else event.request.send.numel()
        ranks = ", ".join(map(str, event.ranks))
        subject = event.request.label.subject
        yield (
            f"{number}  {phase:24} {subject:9} ranks {ranks:8} {event.request.kind} over "
            f"{event.request.axes[0]}, {sent} numbers from each"
        )


@dataclass(frozen=True, slots=True, eq=False)
class NotedPhases:
    """The package's own phases of one rank's step, all but the moving: ``my_step`` travels between them.

    ``diarist`` notes what is held after each, and ``means`` keeps the averaged gradients, flat, by bucket.
    """

    muon: Muon
    step: PlanStep
    diarist: Diarist
    means: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, muon: Muon) -> NotedPhases:
        """The phases of a rank's optimizer, all of whose parameters have a gradient."""
        step = muon.plan_step
        step.present = frozenset(range(len(step.parameters)))
        return cls(muon, step, Diarist(step.plan, step.at))

    def label(self, phase: int, entry: BucketEntry | None = None) -> Label:
        """The name of a phase, and of a matrix, as messages bear it."""
        return Label(PHASES[phase - 1], "" if entry is None else entry.matrix.name)

    def gradients(self, bucket: Bucket) -> Tensor:
        """Before phase 1: this rank's own gradients, packed flat, each at its place in the bucket."""
        flat = pack_gradients(self._mine(bucket))
        self._note_held(0, bucket, flat)
        return flat

    def momentum(self, bucket: Bucket, summed: Tensor) -> Tensor:
        """Before phase 2: the mean of its range, into its momentum; returns the input of Newton–Schulz."""
        mean = summed / bucket.summands
        self._note_stored(1, bucket, mean)
        self.means[bucket.index] = mean
        return update_momentum(self._mine(bucket), mean, self.step.present or ())

    def matrices(self, bucket: Bucket) -> list[tuple[BucketEntry, DistMeta]]:
        """Before phase 3: the matrices this rank works on, each with its line of the master plan."""
        metas = bucket.dist_meta(self.step.at)
        rows = zip(self._mine(bucket).matrices, metas, strict=True)
        return [(matrix.entry, meta) for matrix, meta in rows if matrix.work is not None]

    def newton_schulz(self, entry: BucketEntry, whole: Tensor) -> Tensor:
        """Phase 4, on the matrix as it comes: one that is not whole is refused."""
        self.diarist.note(3, entry.matrix.name, whole)
        update = newton_schulz_update(whole, whole.shape, self.step.parameters[entry.matrix.param].group)
        self.diarist.note(4, entry.matrix.name, update)
        return update

    def apply(self, bucket: Bucket, updates: Tensor, update_loop: UpdateLoop) -> Tensor:
        """Before phase 7: decay and step the ranges of the parameters that the loop goes through."""
        self._note_stored(6, bucket, updates)
        index = {id(each.param): number for number, each in enumerate(self.step.parameters)}
        chosen: list[int] = []
        update_loop([self.step.parameters[0].group], lambda param, group: chosen.append(index[id(param)]))
        return update_parameters(self._mine(bucket), updates, chosen)

    def write(self, bucket: Bucket, whole: Tensor) -> None:
        """After phase 7: the new entries into the parameters."""
        self._note_held(7, bucket, whole)
        write_parameters(self._mine(bucket), whole)

    def walk(self, step: StepOfBucket) -> Walk:
        """All buckets of a step, as a generator for a world to answer."""
        for bucket in self.step.plan.buckets:
            yield from step(self, bucket, self.step.at)

    def run(self, step: StepOfBucket) -> Report:
        """Trace the routes with rank numbers, then take the step on real processes; returns what came of it.

        Must be called by all ranks.
        """
        world = self.muon.world
        assert isinstance(world, LiveWorld)
        world.run(self.diarist.trace())
        world.observers.append(self.diarist.observe)
        with torch.no_grad():
            world.run(self.walk(step))
        return self.report()

    def report(self) -> Report:
        """What a rank sends back."""
        means = {
            shard.entry.matrix.name: self.means[bucket.index][slice(*shard.in_buffer)].clone()
            for bucket in self.step.plan.buckets
            for shard in bucket.stored_shards(self.step.at)
        }
        named = zip(MATRICES, self.step.parameters, strict=True)
        return Report(means, {name: each.data.clone() for name, each in named}, self.diarist.diary())

    def _mine(self, bucket: Bucket) -> RankBucket:
        return self.step.buckets[bucket.index]

    def _note_held(self, moment: int, bucket: Bucket, flat: Tensor) -> None:
        for held in bucket.buffer_slices(bucket.model_layout, self.step.at):
            self.diarist.note(moment, held.entry.matrix.name, view(flat, held))

    def _note_stored(self, moment: int, bucket: Bucket, flat: Tensor) -> None:
        for shard in bucket.stored_shards(self.step.at):
            self.diarist.note(moment, shard.entry.matrix.name, flat[slice(*shard.in_buffer)])


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank sends back: the mean gradients of its ranges, its new weights, its diary."""

    kept: Mapping[str, Tensor]
    after: Mapping[str, Tensor]
    diary: Diary


def job(rank: int, dp: int, tp: int, seed: int) -> NotedPhases:
    """The phases of one real rank. Must be called by all ranks."""
    torch.set_num_threads(1)
    mesh = build_mesh({"dp": dp, "tp": tp})
    return NotedPhases.of(muon_on(mesh, Grid.of(dp=dp, tp=tp).at(rank), seed))


def unpack(flat: Tensor, meta: DistMeta) -> Tensor:
    """The reference of the second exercise."""
    return flat[slice(*meta.global_range)].view(meta.shape)


def update_loop(param_groups: list[dict], update: Callable[[Tensor, dict], None]) -> None:
    """The reference of the third exercise."""
    for group in param_groups:
        for param in group["params"]:
            update(param, group)


def step_of(way_back: Callable[..., Walk], unpack: Unpack, update_loop: UpdateLoop) -> StepOfBucket:
    """A bucket's step with some of its parts replaced: what the notebook's cell says, for the checks."""

    def step(job: NotedPhases, bucket: Bucket, at: Coordinate) -> Walk:
        summed = yield from travel(job.gradients(bucket), bucket.gradient, at, job.label(1))
        flat = yield from travel(job.momentum(bucket, summed), bucket.compute, at, job.label(2))
        done = torch.zeros_like(flat)
        for entry, meta in job.matrices(bucket):
            whole = yield from travel(unpack(flat, meta), entry.route, at, job.label(3, entry))
            update = job.newton_schulz(entry, whole)
            piece = yield from way_back(update, entry.route, at, job.label(5, entry))
            done[slice(*meta.global_range)] = piece.flatten()
        kept = yield from way_back(done, bucket.compute, at, job.label(6))
        fresh = job.apply(bucket, kept, update_loop)
        job.write(bucket, (yield from travel(fresh, bucket.parameter, at, job.label(7))))

    return step


def way_back(x: Any, route: Route, at: Coordinate, label: Label) -> Walk:
    """The reference of the first exercise: the way back is the inverse of the route."""
    return travel(x, route.inverse, at, label)


reference_step = step_of(way_back, unpack, update_loop)


@dataclass(frozen=True, slots=True)
class Asked:
    """A message of one rank and what it sent."""

    rank: int
    request: Collective


def messages(step: StepOfBucket, dp: int, tp: int, seed: int) -> tuple[list[Asked], str, list[Report]]:
    """A step in the stepping world: its messages in order, how it broke off if it did, what ranks report."""
    world, asked = LocalWorld(Grid.of(dp=dp, tp=tp)), []
    world.observers.append(lambda request, at: asked.append(Asked(at.rank, request)))
    jobs = [NotedPhases.of(muon_on(world.mesh(rank), world.grid.at(rank), seed)) for rank in world.grid.ranks]
    try:
        with torch.no_grad(), measure.one_thread():
            world.run([each.walk(step) for each in jobs])
    except Exception as error:
        return asked, f"{type(error).__name__}: {error}", []
    return asked, "", [each.report() for each in jobs]


def first_difference(step: StepOfBucket, dp: int, tp: int, seed: int) -> str:
    """Phase by phase: are the reader's messages the reference's, to the bit? Ends at the first wrong one."""
    right, _, _ = messages(reference_step, dp, tp, seed)
    mine, broke, _ = messages(step, dp, tp, seed)
    lines: list[str] = []
    for phase in PHASES:
        due, came = ([a for a in side if a.request.label.phase == phase] for side in (right, mine))
        for one, other in zip(due, came, strict=False):
            if wrong := _wrong(one, other):
                return "\n".join([*lines, f"{phase:24} {wrong}"])
        if len(came) != len(due):
            how = broke.splitlines()[0] if broke else f"{len(came)} requests, not {len(due)}"
            return "\n".join([*lines, f"{phase:24} stopped: {how}"])
        said = (
            f"{len(due)} requests, the same bits" if due else "nothing is sent; seen when its result travels"
        )
        lines.append(f"{phase:24} {said}")
    return "\n".join([*lines, f"stopped at the end: {broke}"] if broke else lines)


def _wrong(due: Asked, came: Asked) -> str:
    """How a message differs from the one that was due: rank, matrix and interval."""
    if due.rank != came.rank or str(due.request) != str(came.request):
        return f"rank {came.rank} asks for {came.request}; due was {due.request}, from rank {due.rank}"
    one, other = due.request.send, came.request.send
    if one is None or other is None or torch.equal(one, other):
        return ""
    places = (one != other).nonzero().flatten()
    subject = due.request.label.subject
    return (
        f"rank {came.rank} sends other numbers{f' of {subject}' if subject else ''}: the first at "
        f"{int(places[0])}, the last at {int(places[-1])} of {one.numel()}"
    )


def record_rank(rank: int, dp: int, tp: int, seed: int) -> Diary:
    """One rank of the step that comes with the package. Must be called by all ranks."""
    return job(rank, dp, tp, seed).run(reference_step).diary


def record_here(dp: int, tp: int, seed: int) -> Recording:
    """The same step in one process, recorded: what real ranks have to agree with."""
    world = LocalWorld(Grid.of(dp=dp, tp=tp))
    jobs = [NotedPhases.of(muon_on(world.mesh(rank), world.grid.at(rank), seed)) for rank in world.grid.ranks]
    diarists = [each.diarist for each in jobs]
    world.run([diarist.trace() for diarist in diarists])
    world.observers.extend(diarist.observe for diarist in diarists)
    with torch.no_grad(), measure.one_thread():
        world.run([each.walk(reference_step) for each in jobs])
    return replay.assemble(
        f"In one process, dp={dp}, tp={tp}", plan_of(dp, tp), [d.diary() for d in diarists]
    )


def recording_of(reports: Sequence[Report], dp: int, tp: int) -> Recording:
    """The recording of a step that the reader's real ranks took."""
    source = f"Your step on {dp * tp} processes, dp={dp}, tp={tp}"
    return replay.assemble(source, plan_of(dp, tp), [report.diary for report in reports])


def trace(dp: int, tp: int) -> Callable[[int], Walk]:
    """For a rank: a walk out and back with its own number in place of data, and no Newton–Schulz."""
    plan = plan_of(dp, tp)

    def walk(rank: int) -> Walk:
        at, bucket = plan.grid.at(rank), plan.buckets[0]
        mine = torch.full((bucket.length(bucket.storage_layout, at),), rank, dtype=bucket.compute.dtype)
        return (yield from Diarist(plan, at).there_and_back(bucket, mine))

    return walk


def whole_gradients(plan: Plan, reports: Sequence[Report]) -> dict[str, Tensor]:
    """The gradients that phase 1 left, put together from the ranges of all ranks."""
    wholes = {}
    for bucket in plan.buckets:
        for number, entry in enumerate(bucket.entries):
            whole = torch.zeros(entry.matrix.shape)
            for rank, report in enumerate(reports):
                held = bucket.stored_shards(plan.grid.at(rank))[number]
                boxes = matrix_boxes(held, plan.grid.at(rank))
                parts = report.kept[entry.matrix.name].split([box.numel for box in boxes])
                for box, part in zip(boxes, parts, strict=True):
                    whole[box.slices] = part.view(box.shape)
            wholes[entry.matrix.name] = whole
    return wholes


def whole_weights(plan: Plan, reports: Sequence[Report]) -> dict[str, Tensor]:
    """The new weights, put together from the pieces of the first dp position."""
    wholes = {}
    for entry in (entry for bucket in plan.buckets for entry in bucket.entries):
        whole = torch.zeros(entry.matrix.shape)
        for rank in range(plan.grid.size("tp")):
            whole[entry.matrix.box(plan.grid.at(rank)).slices] = reports[rank].after[entry.matrix.name]
        wholes[entry.matrix.name] = whole
    return wholes


def step_alone(gradients: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """The weights after one step of ``torch.optim.Muon``, in this process, with these gradients."""
    parameters = {name: torch.nn.Parameter(whole.clone()) for name, whole in weights(seed).items()}
    for name, parameter in parameters.items():
        parameter.grad = gradients[name].clone()
    with measure.one_thread():
        torch.optim.Muon(list(parameters.values()), lr=LR).step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def different_bits(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> int:
    """How many numbers of some matrices are not the same bits."""
    return sum(int((one[name].view(torch.int32) != other[name].view(torch.int32)).sum()) for name in MATRICES)


@dataclass(frozen=True, slots=True)
class SumError:
    """Mean gradients beside the exact ones: how many are rounded, and how far."""

    rounded: int
    count: int
    largest: float
    of_bound: float


def sum_error(gradients: Mapping[str, Tensor], seed: int, dp: int) -> SumError:
    """How far the gradients that were summed over dp are from the exact mean, taken in float64."""
    rounded, largest, of_bound = 0, 0.0, 0.0
    for name, mean in gradients.items():
        parts = torch.stack([local_gradients(seed, place)[name] for place in range(dp)]).double()
        exact = Sums(parts.sum(0), parts.abs().sum(0))
        error = (mean.double() - exact.total / dp).abs()
        rounded += int((error > 0).sum())
        largest = max(largest, float(error.max()))
        of_bound = max(of_bound, gradient_error(mean, exact, dp))
    return SumError(rounded, sum(mean.numel() for mean in gradients.values()), largest, of_bound)


def exact_gradients(seed: int, dp: int) -> dict[str, Tensor]:
    """The mean gradients taken in float64 and rounded once."""
    parts = [local_gradients(seed, place) for place in range(dp)]
    return {name: (sum(part[name].double() for part in parts) / dp).float() for name in MATRICES}  # type: ignore[union-attr]


def say_sum(gradients: Mapping[str, Tensor], after: Mapping[str, Tensor], seed: int, dp: int) -> str:
    """The error of the real sum, its bound, and what it does to the weights, in words."""
    error, ideal = sum_error(gradients, seed, dp), step_alone(exact_gradients(seed, dp), seed)
    change = max(float((after[name] - ideal[name]).abs().max()) for name in MATRICES)
    return (
        f"gradients       {error.count}, of which not the exact mean: {error.rounded}\n"
        f"largest error   {error.largest:.1e}; in parts of its bound: {error.of_bound:.3f}\n"
        f"weights         {different_bits(after, ideal)} differ after the step, by at most {change:.1e}"
    )


def say_orders(seed: int, texts: int, orders: int = 20) -> str:
    """Gradients of several texts, added in several orders in fp32: how often do the results differ?"""
    parts = [local_gradients(seed, place) for place in range(texts)]
    draw = torch.Generator().manual_seed(seed)
    ways = [torch.randperm(texts, generator=draw).tolist() for _ in range(orders)]
    means = [{name: _added(name, [parts[i] for i in way]) / texts for name in MATRICES} for way in ways]
    first = step_alone(means[0], seed)
    moved = sum(different_bits(mean, means[0]) > 0 for mean in means[1:])
    weights_moved = sum(different_bits(step_alone(mean, seed), first) > 0 for mean in means[1:])
    return (
        f"orders tried beside the first       {orders - 1}\n"
        f"of them with other gradients        {moved}\n"
        f"of them with other weights as well  {weights_moved}"
    )


def nudged(gradients: Mapping[str, Tensor], name: str = "o") -> dict[str, Tensor]:
    """The same gradients, but for the number of one matrix that is nearest to a rounding edge of bfloat16.

    That one is moved by as few fp32 steps as take it over the edge.
    """
    grad = gradients[name].clone()
    low = momentum_update(torch.zeros_like(grad), grad, 0.95, True).view(torch.int32) & 0xFFFF
    gap = torch.where(low <= 0x8000, 0x8000 - low, 0x10000).flatten()
    place = int(gap.argmin())
    before = _rounded(grad)[place].clone()
    while _rounded(grad)[place] == before:
        value = grad.flatten()[place]
        grad.view(-1)[place] = torch.nextafter(value, value * 2)
    return {**gradients, name: grad}


def _rounded(grad: Tensor) -> Tensor:
    """What Newton–Schulz is given of a first gradient, flat."""
    return momentum_update(torch.zeros_like(grad), grad, 0.95, True).bfloat16().flatten()


def say_nudge(gradients: Mapping[str, Tensor], seed: int) -> str:
    """One gradient number moved over a rounding edge, and the weights that follow, in words."""
    other = nudged(gradients)
    one, two = step_alone(gradients, seed), step_alone(other, seed)
    moved = max(float((other[name] - gradients[name]).abs().max()) for name in MATRICES)
    weight = max(float((one[name] - two[name]).abs().max()) for name in MATRICES)
    return (
        f"gradient numbers that differ  {different_bits(gradients, other)}, by {moved:.1e}\n"
        f"weights that differ           {different_bits(one, two)}, by at most {weight:.1e}"
    )


def _added(name: str, parts: Sequence[Mapping[str, Tensor]]) -> Tensor:
    total = parts[0][name].clone()
    for part in parts[1:]:
        total += part[name]
    return total


def error_of(work: Callable[..., Any], *arguments: Any) -> str:
    """What a call raises, and in which line of it."""
    try:
        work(*arguments)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[1]
        return f"{type(error).__name__}: {error}\n  in the line: {frame.line}"
    return "nothing was raised"


def blueprint_error() -> str:
    """What the blueprint's loop raises."""
    linecache.cache["blueprint"] = len(BLUEPRINT_LOOP), None, BLUEPRINT_LOOP.splitlines(True), "blueprint"
    names: dict[str, Any] = {}
    exec(compile(BLUEPRINT_LOOP, "blueprint", "exec"), names)
    return error_of(names["update_loop"], [{"params": []}], print)


def say_home(plan: Plan, home: Sequence[Tensor]) -> str:
    """Whose numbers each rank has in its ranges after a walk out and back."""
    lines = []
    for rank, flat in enumerate(home):
        held = [h for bucket in plan.buckets for h in bucket.stored_shards(plan.grid.at(rank))]
        names = {int(name) for h in held for name in flat[slice(*h.in_buffer)].tolist()}
        count = sum(h.numel for h in held)
        lines.append(f"rank {rank}: {count} numbers, all of them {' and '.join(map(str, sorted(names)))}")
    return "\n".join(lines)


def exercises(plan: Plan) -> tuple[Exercise, Exercise, Exercise, Exercise, Exercise]:
    """The notebook's exercises in order: mirror, way back, shape, loop, quiz."""
    return mirror_exercise(plan), way_back_exercise(), unpack_exercise(), loop_exercise(), quiz(plan)


def mirror_exercise(plan: Plan) -> Exercise:
    """The prediction: which phase undoes which, and which phases send nothing."""

    def judge(undoes: Mapping[int, int], silent: Iterable[int]) -> str | None:
        recording = record_here(plan.grid.size("dp"), plan.grid.size("tp"), 0)
        if isinstance(silent, int):
            return "Give silent as a list of phases, such as [1, 2]."
        return _judge_mirror(undoes) or _judge_silent(recording, set(silent))

    hints = (
        "Fold the picture at its dashed line: which phases come to lie on each other?",
        "To cut a piece off what one holds needs nobody else.",
    )
    return Exercise(judge, hints, "Outward the ranks have to ask each other. On the way back they only cut.")


def _judge_mirror(undoes: Mapping[int, int]) -> str | None:
    if not isinstance(undoes, Mapping):
        return "Give undoes as a dictionary: {1: the phase that undoes 1, 2: …, 3: …}."
    for phase in (1, 2, 3):
        if phase not in undoes:
            return f"undoes says nothing of phase {phase}. Its keys are the phases of the way out: 1, 2, 3."
        if undoes.get(phase) != len(PHASES) + 1 - phase:
            return f"Phase {phase} ({PHASES[phase - 1]}) is not undone by phase {undoes.get(phase)}."
    return None


def _judge_silent(recording: Recording, silent: set[int]) -> str | None:
    loud = {sent.phase for diary in recording.diaries for sent in diary.sent}
    right = set(range(1, len(PHASES) + 1)) - loud
    if extra := sorted(silent - right):
        return f"Phase {extra[0]} does send: {replay.say_phase(recording, extra[0])}."
    if missing := sorted(right - silent):
        return f"Phase {missing[0]} ({PHASES[missing[0] - 1]}) sends nothing either."
    return None


def way_back_exercise() -> Exercise:
    """The way back, from the way out: judged on several grids, on routes of one hop and of two."""

    def judge(way_back: Callable[..., Walk]) -> str | None:
        _refuse_blanks(way_back)
        return next((wrong for dp, tp in GRIDS if (wrong := _judge_way_back(way_back, dp, tp))), None)

    hints = (
        "Two things turn around: the order of the hops, and each hop itself.",
        "reversed(route.hops) is the order; hop.inverse is the hop the other way.",
    )
    return Exercise(judge, hints, "The hop that came last goes back first, each the other way.")


def _refuse_blanks(function: Any) -> None:
    """Raise where a stub still has its ``...``, or is no function."""
    if not callable(function):
        raise MistakeError("Give a function.")
    if ... in getattr(getattr(function, "__code__", None), "co_consts", ()):
        raise OpenAnswerError


def _judge_way_back(way_back: Callable[..., Walk], dp: int, tp: int) -> str | None:
    grid = Grid.of(dp=dp, tp=tp)
    rows, columns = 2 * dp, 3 * tp
    hops = (
        Hop("dp", Shard(0), Replicate(), (rows, 3)),
        Hop("tp", Shard(1), Replicate(), (rows, columns)),
    )
    found: dict[int, tuple[Tensor, Any]] = {}
    asked: list[Collective] = []
    raised = ""

    def there_and_back(rank: int) -> Walk:
        at, route = grid.at(rank), Route(hops, torch.float32)
        mine = torch.arange(6.0).view(2, 3) + 10 * rank
        whole = yield from travel(mine, route, at, Label("the way out"))
        back = value_of(way_back, whole, route, at, Label("the way back"))
        if not inspect.isgenerator(back):
            raise MistakeError("It asks nobody: each hop has to be taken with yield from take(…).")
        found[rank] = mine, (yield from back)

    world = LocalWorld(grid)
    world.observers.append(lambda request, at: asked.append(request))
    try:
        world.run([there_and_back(rank) for rank in grid.ranks])
    except MistakeError:
        raise
    except Exception as error:
        raised = f"On dp={dp}, tp={tp} it raised {type(error).__name__}: {str(error).splitlines()[0]}"
    if late := [request for request in asked if request.label.phase == "the way back"]:
        return f"It asked for {late[0].kind}; each rank has all it needs already. Take the hop the other way."
    if raised:
        return raised
    return next((wrong for rank in grid.ranks if (wrong := _judge_return(grid.at(rank), *found[rank]))), None)


def _judge_return(at: Coordinate, mine: Tensor, came: Any) -> str | None:
    if not isinstance(came, Tensor):
        return f"{at} ended with {came!r}: return x at the end."
    if came.shape != mine.shape:
        return (
            f"On {at.grid}, {at} went out with {tuple(mine.shape)} and came back with {tuple(came.shape)}. "
            "Which hop has to go first?"
        )
    if not torch.equal(came, mine):
        owner = int(came.flatten()[0]) // 10
        return f"On {at.grid}, {at} came back with numbers that rank {owner} brought. Which hop goes first?"
    return None


def unpack_exercise() -> Exercise:
    """The blueprint's second bug: what lies flat in the bucket, as the matrix it is."""

    def judge(unpack: Unpack) -> str | None:
        _refuse_blanks(unpack)
        for dp, tp in GRIDS:
            plan = plan_of(dp, tp)
            for at in map(plan.grid.at, plan.grid.ranks):
                flat = torch.arange(float(plan.buckets[0].length(plan.buckets[0].model_layout, at)))
                for meta in plan.dist_meta(at):
                    if wrong := _judge_unpacked(value_of(unpack, flat, meta), flat, meta, at):
                        return wrong
        return None

    hints = (
        "meta.global_range says where it lies in flat, meta.shape which shape this rank's piece has.",
        "flat[start:stop].view(meta.shape)",
    )
    return Exercise(judge, hints, "Rows and columns are back.")


def _judge_unpacked(came: Any, flat: Tensor, meta: DistMeta, at: Coordinate) -> str | None:
    right = unpack(flat, meta)
    if not isinstance(came, Tensor):
        return f"{meta.name}: give a tensor, not {came!r}."
    where = f"On {at.grid}, {at}, {meta.name}:"
    if came.ndim != 2:
        return f"{where} {came.ndim} dimension, {came.numel()} numbers. Newton–Schulz needs rows and columns."
    if came.shape != right.shape:
        return f"{where} the shape is {tuple(came.shape)}; this rank's piece is {meta.shape}."
    if not torch.equal(came, right):
        first = int(came.flatten()[0])
        return f"{where} it begins with number {first} of the bucket, not as {meta.global_range} lie there."
    return None


def loop_exercise() -> Exercise:
    """The blueprint's first bug: every parameter once, with its own group."""

    def judge(update_loop: UpdateLoop) -> str | None:
        _refuse_blanks(update_loop)
        groups: list[dict] = [{"params": ["up", "o"], "lr": 0.1}, {"params": [], "lr": 0.2}]
        groups.append({"params": ["down"], "lr": 0.3})
        due = [(param, group["lr"]) for group in groups for param in group["params"]]
        done: list[tuple[Any, float]] = []
        value_of(update_loop, groups, lambda param, group: done.append((param, group["lr"])))
        return _judge_updates(due, done)

    hints = ('A group is a dictionary; its parameters are group["params"].', "Set it inside the loop.")
    return Exercise(judge, hints, "Every parameter is updated once, with its own group's learning rate.")


def _judge_updates(due: list[tuple[Any, float]], done: list[tuple[Any, float]]) -> str | None:
    if done == due:
        return None
    told = "Groups (up, o: lr 0.1), (none: lr 0.2), (down: lr 0.3):"
    if missing := [param for param, _ in due if param not in [name for name, _ in done]]:
        return f"{told} {missing[0]} was never updated."
    if wrong := next((pair for pair in done if pair not in due), None):
        return f"{told} {wrong[0]} was updated with lr {wrong[1]}, another group's."
    return f"{told} updated were {', '.join(str(param) for param, _ in done)}."


def quiz(plan: Plan) -> Exercise:
    """Numbers that the notebook has measured."""
    recording = record_here(plan.grid.size("dp"), plan.grid.size("tp"), 0)
    first = recording.diaries[0]
    expected = {
        "requests": len(first.sent),
        "whole": len(recording.workers("o")),
        "different": 0,
    }
    why = {
        "requests": "Ask len(reports[0].diary.sent).",
        "whole": "Put the slider on phase 4 and press the button of o: on how many ranks is it whole?",
        "different": "Look at the line that begins with: numbers that differ.",
    }
    return numbers(expected, why)
