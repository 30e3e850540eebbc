"""Records from the package, as plain data, everything that the essay shows.

The data come from runs and predictions: a step of a small GPT in a ``LocalWorld``, on each of the ``GRIDS``;
the states that this step can be in; trainings in which one rank is sabotaged; a real gradient, orthogonalized
whole and in pieces; the planner's predictions for a large model; and steps that were recorded on real
processes. The page only looks these numbers up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from muon_tutorial import Coordinate, Grid, Plan
from muon_tutorial.learn.bill.costs import bill_of
from muon_tutorial.learn.early_return.steps import predict_recorded, recorded
from muon_tutorial.learn.first_muon.on_ranks import SHAPES
from muon_tutorial.learn.many_ranks.scaling import MACHINE, matrices_of
from muon_tutorial.learn.pictures import holdings
from muon_tutorial.learn.shards_alone import cuts, directions
from muon_tutorial.learn.the_mirror.network import Group, Network
from muon_tutorial.learn.the_mirror.on_ranks import MATRICES, plan_of, record_here, small_matrices
from muon_tutorial.learn.the_mirror.recording import MOMENTS, PHASES, StepRecording
from muon_tutorial.plan.bucket import matrix_boxes
from muon_tutorial.timing import step_cost
from muon_tutorial.timing.machine import find_machine
from muon_tutorial.timing.rank_walks import RankWalks
from muon_tutorial.timing.timeline import StepTimeline
from scripts import essay_sabotage
from scripts.picture import letters

SEED = 0
DP, TP = (1, 2, 3, 4), (1, 2, 4)
GRIDS = tuple((dp, tp) for dp in DP for tp in TP)
NETWORKS = ((2, 1), (2, 2), (3, 2), (4, 2), (2, 4))
"""The grids on which the reader can play the network."""
SABOTAGED = 4
MODEL, MODEL_TP = "llama-3.1-8b", 8
RANKS = tuple(MODEL_TP * 4**power for power in range(5))
"""The numbers of ranks for the large model: 8, 32, 128, 512 and 2,048."""
STRATEGIES = ("replicated", "round_robin", "zero1", "zero1 boundary", "layerwise", "gram")
DOINGS = ("product", "copy", "wait", "transfer")
_MICRO = 1e6


def record() -> dict[str, Any]:
    return {
        "phases": PHASES,
        "moments": MOMENTS,
        "shapes": {name: list(shape) for name, shape in record_here(1, 1, SEED).shapes.items()},
        "grids": {f"{dp}x{tp}": grid_data(dp, tp) for dp, tp in GRIDS},
        "networks": {f"{dp}x{tp}": network_data(dp, tp) for dp, tp in NETWORKS},
        "saboteur": saboteur_data(),
        "alone": alone_data(),
        "scale": scale_data(),
        "timelines": timeline_data(),
    }


def grid_data(dp: int, tp: int) -> dict[str, Any]:
    """The step on one grid: what each rank holds under each strategy, the phases, and the flat buffer."""
    run, plan = record_here(dp, tp, SEED), plan_of(dp, tp)
    plans = {name: step_cost.STRATEGIES[name](small_matrices(), plan.grid) for name in (*STRATEGIES, "owner")}
    return {
        "weights": {name: boxes(holdings.weight_holdings(plan, i)) for i, name in enumerate(MATRICES)},
        "strategies": {name: strategy_data(name, each) for name, each in plans.items()},
        "film": {name: film_data(run, name) for name in MATRICES},
        "sent": sent_by_phase(run),
        "bucket": bucket_data(plan),
    }


def strategy_data(name: str, plan: Plan) -> dict[str, Any]:
    """One strategy: each matrix's momentum shards and workers, and the bytes that rank 0 sends and keeps."""
    matrices = {
        matrix: {
            "momentum": boxes(holdings.momentum_holdings(plan, index)),
            "workers": list(plan.workers(index)),
        }
        for index, matrix in enumerate(MATRICES)
    }
    bill = bill_of(name, plan)
    return {"matrices": matrices, "sent": bill.total, "state": bill.state}


def boxes(held: Sequence[holdings.Boxes]) -> list[list[list[int]]]:
    """For each rank, its boxes, each as [first row, first column, rows, columns]."""
    return [[[*box.offset, *box.shape] for box in mine if box.numel] for mine in held]


def film_data(run: StepRecording, matrix: str) -> dict[str, Any]:
    """For each moment and rank: the tiles that the rank holds, and a letter that stands for their bytes."""
    tiles = [[diary.tiles[matrix][moment] for diary in run.diaries] for moment in range(len(MOMENTS))]
    return {"tiles": tiles, "letters": letters(run, matrix)}


def sent_by_phase(run: StepRecording) -> list[dict[str, Any]]:
    """For each phase: the collective, its axis, and the bytes that each rank passes to it."""
    found = []
    for phase in range(1, len(PHASES) + 1):
        asked = [[item for item in diary.sent if item.phase == phase] for diary in run.diaries]
        kind, axis = next(((item.kind, item.axis) for items in asked for item in items), ("", ""))
        sizes = [sum(item.size for item in items) for items in asked]
        found.append({"kind": kind, "axis": axis, "bytes": sizes})
    return found


def bucket_data(plan: Plan) -> dict[str, Any]:
    """The flat buffer: its length, a slice's length, and each matrix's range and runs (``runs_of``)."""
    [bucket], grid = plan.buckets, plan.grid
    length = bucket.length(bucket.model_layout, grid.at(0))
    size = bucket.length(bucket.storage_layout, grid.at(0))
    metas = plan.dist_meta(grid.at(0))
    runs: dict[str, list[list[int]]] = {name: [] for name in MATRICES}
    for rank in grid.ranks:
        at = grid.at(rank)
        for name, row, column, count, offset in runs_of(plan, at):
            runs[name].append([row, column, count, rank, at["dp"] * size + offset, offset])
    ranges = {meta.name: list(meta.global_range) for meta in metas}
    return {"length": length, "slice": size, "ranges": ranges, "runs": runs}


def runs_of(plan: Plan, at: Coordinate) -> Iterator[tuple[str, int, int, int, int]]:
    """Pieces of rows in a rank's slice, in order: matrix, row, first column, number of entries, offset."""
    [bucket] = plan.buckets
    for held in bucket.stored_shards(at):
        offset = held.interval[0]
        for box in matrix_boxes(held, at):
            (top, left), (rows, columns) = box.offset, box.shape
            for row in range(rows):
                if columns:
                    yield held.entry.matrix.name, top + row, left, columns, offset
                offset += columns


def network_data(dp: int, tp: int) -> dict[str, Any]:
    """Every state that a step can be in: which groups can be answered, and to which state each answer leads.

    Two orders of answers lead to the same state if each group has been answered equally often in both.
    """
    network = Network(dp, tp, SEED)
    known: dict[tuple[tuple[Group, int], ...], int] = {(): 0}
    states: list[dict[str, Any]] = []
    waiting: list[tuple[Group, ...]] = [()]
    for path in waiting:  # the loop adds to this list
        network.restart()
        for group in path:
            network.answer(group)
        ready = []
        for each in network.ready:
            after = tuple(sorted(Counter((*path, each.group)).items()))
            if after not in known:
                known[after] = len(known)
                waiting.append((*path, each.group))
            ready.append([list(each.group), each.axis, each.phase, each.subject, known[after]])
        pending = network.world.pending
        phases = [
            PHASES.index(pending[rank].label.phase) + 1 if rank in pending else 0
            for rank in network.world.grid.ranks
        ]
        states.append({"ready": ready, "phase": phases})
    return {"states": states, "orders": orders(states), "hash": network.result, "answers": len(network.order)}


def orders(states: Sequence[dict[str, Any]]) -> int:
    """The number of orders in which a step can be answered: the paths from the first state to the last."""
    ways = [1] * len(states)
    for number in reversed(range(len(states))):  # a state leads only to later states
        if after := [ready[-1] for ready in states[number]["ready"]]:
            ways[number] = sum(ways[other] for other in after)
    return ways[0]


def saboteur_data() -> dict[str, Any]:
    """For each choice of sabotaged rank, matrix and fault: the ranks where a matrix is wrong, as one bit mask
    per moment and matrix.
    """
    runs = {}
    for rank in range(SABOTAGED):
        for matrix in SHAPES:
            for fault in essay_sabotage.FAULTS.values():
                run = essay_sabotage.sabotaged(SABOTAGED, rank, matrix, fault, SEED)
                rows = [[0] * len(SHAPES) for _ in run.agree]
                for moment, wrong, name in run.wrong:
                    rows[moment][list(SHAPES).index(name)] |= 1 << wrong
                runs[f"{rank} {matrix} {fault}"] = {"wrong": rows, "agree": list(map(int, run.agree))}
    names = {"matrices": list(SHAPES), "phases": essay_sabotage.PHASES, "faults": essay_sabotage.FAULTS}
    return {"ranks": SABOTAGED, "steps": essay_sabotage.STEPS, **names, "runs": runs}


def alone_data() -> dict[str, Any]:
    """Updates whose shards were orthogonalized alone: how far off they are, and shades of the entries."""
    found = {}
    for matrix in cuts.matrices():
        for cut in cuts.DIMS:
            for tp in cuts.CUTS:
                result, turned = directions.alone(matrix, cut, tp)
                shades = directions.shades_of(turned)
                diagonal, *_ = cuts.energy_shares(turned)
                found[f"{matrix} {cut} {tp}"] = {
                    "shades": "".join(chr(ord("a") + shade) for shade in shades.flatten().tolist()),
                    "cosine": round(result.cosine, 3),
                    "left": round(result.at_best, 3),
                    "diagonal": round(diagonal, 3),
                    "values": [round(result.values[0], 3), round(result.values[-1], 3)],
                }
    rows, columns = (side // directions.POOL for side in cuts.SHAPE)
    sizes = {"rows": rows, "columns": columns, "most": directions.SHADES}
    return {**sizes, "cuts": cuts.CUTS, "shape": cuts.SHAPE, "runs": found}


def scale_data() -> dict[str, Any]:
    """The planner's prediction for a large model's step, by strategy and number of ranks."""
    matrices, machine = matrices_of(MODEL, MODEL_TP), find_machine(MACHINE)
    walks = RankWalks(machine, machine.ranks_per_node - 1)
    found: dict[str, list[dict[str, Any]]] = {}
    for name in STRATEGIES:
        found[name] = []
        for ranks in RANKS:
            grid = Grid.of(dp=ranks // MODEL_TP, tp=MODEL_TP)
            each = step_cost.estimate(name, step_cost.STRATEGIES[name], matrices, grid, machine, walks=walks)
            kept = {key: getattr(each, key) for key in ("runs", "held", "momentum", "memory", "seconds")}
            times = {"compute": each.product + each.copy, "waiting": each.waiting}
            found[name].append({"sent": each.sent, "work": each.newton_schulz, **kept, **times})
    about = {"model": MODEL, "tp": MODEL_TP, "machine": machine.name, "matrices": len(matrices)}
    return {**about, "ranks": RANKS, "strategies": found}


def timeline_data() -> dict[str, Any]:
    """Steps recorded on real processes over two links: seconds, predicted seconds, and spans in µs."""
    recording, steps = recorded(), {}
    predicted = predict_recorded(recording)
    for step in recording.steps:
        said = predicted[step.strategy, step.window, step.link]
        steps[f"{step.strategy} {step.window} {step.link}"] = {
            "seconds": round(step.timeline.seconds, 4),
            "predicted": round(said.seconds, 4),
            "spans": spans(step.timeline),
        }
    return {"about": recording.about, "ranks": recording.task["dp"], "doings": DOINGS, "steps": steps}


def spans(timeline: StepTimeline) -> list[list[int]]:
    """For each span of at least a thousandth of the step: rank, index in ``DOINGS``, begin and end (µs)."""
    least = timeline.seconds / 1000
    return [
        [span.rank, DOINGS.index(span.doing), round(span.begin * _MICRO), round(span.end * _MICRO)]
        for span in timeline.spans
        if span.end - span.begin >= least
    ]
