"""Measures whether owners work at the same time, with sleep in place of Newton–Schulz.

    python scripts/rounds.py

writes results/rounds.md and rounds.json. For 4, 8 and 16 real ranks they hold a rank's peak of bytes,
measured and predicted, and a step's seconds, divided by the lower bound for whole matrices. They also hold
this ratio for a loop that only repeats the step's calls of torch.distributed and sleeps. A second table has
real work instead of sleep and, for comparison, ranks that share it but exchange nothing. Sleeping needs no
core, messages do.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["TORCH_DISTRIBUTED_DEBUG"] = "OFF"  # torch's checks would send bytes and take time
os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muon_tutorial import STRATEGIES, Muon, Plan, build_mesh, launch
from muon_tutorial.evidence.memory import PeakMemory
from muon_tutorial.evidence.predict import step_over_ones
from muon_tutorial.evidence.tables import Table, TableRow
from muon_tutorial.orthogonalizers.named import STOCK
from muon_tutorial.plan.assign import newton_schulz_cost
from muon_tutorial.plan.rounds import IN_FLIGHT
from muon_tutorial.step import orthogonalize
from muon_tutorial.worlds import live
from muon_tutorial.worlds.shadow import walk_alone
from scripts.files import made
from scripts.result_files import command_line, machine_facts, markdown, result_parser, say, write_results

OPENING = (
    "A strategy shares the work of Newton–Schulz only if owners work at the same time. In the first table, "
    "owners sleep instead of running Newton–Schulz, so that any machine can show whether they do."
)
SHARED = {name: STRATEGIES[name] for name in ("owner", "layerwise", "round_robin", "zero1")}
"""The strategies that share the work of Newton–Schulz."""
PATIENCE = 120.0
MATRICES = {
    "16 equal": ((128, 128),) * 16,
    "16 unequal": tuple((128, 32 * (1 + i % 4)) for i in range(16)),
    "48 experts, 16 dense": (*((128, 64),) * 48, *((128, 256),) * 16),
}
SIDES = {"4 of 2600 × 2600": ((2600, 2600),) * 4, "8 of 768 × 3072": ((768, 3072),) * 8}
ONE, ALL = 1, None  # bytes of a round: ``ONE`` gives each owner one matrix; ``ALL`` is the default limit
REAL = "apart", "owner", "layerwise"
REAL_NOTES = (
    "The fastest of three steps, with default options except ``--orthogonalize`` in the command. *apart*: "
    "each rank steps its part of the matrices in a process of its own, and nothing travels. *messages*: "
    "seconds of the step's calls of ``torch.distributed``, repeated in the step's order, and nothing else.",
)
NOTES = (
    "Sleep, in proportion to a matrix's operations, replaces Newton–Schulz, so ranks need no core of their "
    "own. Messages are real, but matrices are small, so messages cost little. *a round*: "
    "either one matrix per owner, as if every matrix were larger than the limit, or as many as the default "
    "limit allows. *seconds*: from when the last rank begins until the last rank ends. *best*: the total "
    "sleep divided by the number of ranks or, if longer, the sleep of the costliest matrix; for equal "
    "matrices, the sleep of ⌈matrices / ranks⌉ of them. *over the best*: seconds / best. *torch alone*: the"
    " same ratio for ranks that only repeat the step's calls of ``torch.distributed`` and its sleeps, in "
    "the step's order. Both ratios come from the fastest of three steps, so noise may make either of them "
    "the smaller one. *peak*: the most bytes that a rank's step held besides parameters, gradients and "
    "momentum, measured without sleep, and predicted by the same step on tensors without data.",
)


@dataclass(frozen=True, slots=True)
class SleepCase:
    """Matrices of ``shapes`` on ``ranks`` ranks; sleep replaces Newton–Schulz.

    ``limit``: the strategies' ``round_bytes``; None: the default. ``longest``: seconds for the costliest.
    """

    name: str
    shapes: tuple[tuple[int, int], ...]
    ranks: int
    limit: int | None
    longest: float = 0.1

    def sleeps(self) -> list[float]:
        """Seconds of sleep for each matrix, in proportion to its operations."""
        costs = [newton_schulz_cost(shape) for shape in self.shapes]
        return [self.longest * cost / max(costs) for cost in costs]

    @property
    def best(self) -> float:
        """The least time if each matrix is on one rank: an even share or, if longer, the costliest matrix.

        For equal matrices this is exact: some rank must take ⌈matrices / ranks⌉ of them.
        """
        sleeps = self.sleeps()
        if len(set(sleeps)) == 1:
            return math.ceil(len(sleeps) / self.ranks) * sleeps[0]
        return max(max(sleeps), sum(sleeps) / self.ranks)


def run_case(case: SleepCase) -> Iterator[TableRow]:
    """A row for each strategy: the fastest of its steps on real ranks, and the memory of one more step."""
    ranks = launch(_steps, case.ranks, args=(case,), timeout=PATIENCE)
    for name, its in zip(SHARED, zip(*ranks, strict=True), strict=True):
        whole, alone, peaks, predicted = zip(*its, strict=True)
        yield {
            "matrices": case.name,
            "a round": "one each" if case.limit else "default",
            "ranks": case.ranks,
            "strategy": name,
            "seconds": round(fastest(whole), 2),
            "best": round(case.best, 2),
            "over the best": round(fastest(whole) / case.best, 2),
            "torch alone": round(fastest(alone) / case.best, 2),
            "peak MB": round(max(peaks) / 1e6, 1),
            "predicted MB": round(max(predicted) / 1e6, 1),
        }


def fastest(ranks: Sequence[Sequence[tuple[float, float]]]) -> float:
    """Seconds of the fastest step, from when its last rank begins until its last rank ends.

    ``ranks``: for each rank, when its steps began and ended. Ranks of one machine share its clock.
    """
    steps = [tuple(zip(*spans, strict=True)) for spans in zip(*ranks, strict=True)]
    return min(max(ends) - max(begins) for begins, ends in steps)


def _steps(rank: int, case: SleepCase) -> list[tuple[Any, Any, int, int]]:
    mesh, found = build_mesh({"dp": case.ranks}), []
    for builder in SHARED.values():
        builder = builder if case.limit is None else partial(builder, round_bytes=case.limit)
        muon = _muon(case.shapes, strategy=builder, mesh=mesh)
        assert muon.plan is not None
        with _naps(case, times=0):
            _timed(muon, 2)
            _give_gradients(muon)
            with PeakMemory() as seen:
                muon.step()
        with _naps(case):
            whole, alone = _timed(muon, 3), _timed_alone(muon)
        found.append((whole, alone, seen.peak, _predicted(muon.plan, rank)))
    return found


def _naps(case: SleepCase, times: int = 1) -> Any:
    naps = dict(zip(case.shapes, case.sleeps(), strict=True))

    def sleep(whole: Tensor, sides: Sequence[int], *_: Any) -> Tensor:
        time.sleep(times * naps[sides[-2], sides[-1]])
        return whole.clone()

    return mock.patch.object(orthogonalize, "newton_schulz_update", sleep)


def _note_step(muon: Muon) -> list[Callable[[], Any]]:
    """Take a step, and return its calls of torch.distributed, its waits and its sleeps, to repeat them."""
    tape: list[Callable[[], Any]] = []
    call_backend, sleep = live._call_backend, time.sleep

    def noted(again: Callable[[], Any]) -> Any:
        tape.append(again)
        return again()

    def noted_call(*arguments: Any) -> Any:
        works: list[Any] = []
        noted(lambda: works.append(call_backend(*arguments)))
        return works[-1] and SimpleNamespace(wait=lambda: noted(lambda: works[-1].wait()))

    _give_gradients(muon)
    with (
        mock.patch.object(live, "_call_backend", noted_call),
        mock.patch.object(time, "sleep", lambda seconds: noted(partial(sleep, seconds))),
    ):
        muon.step()
    return tape


def _muon(shapes: Sequence[tuple[int, int]], **options: Any) -> Muon:
    params = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    return Muon(params, initial_values="compare", compare_every=None, **options)


def _give_gradients(muon: Muon) -> None:
    for param in muon.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)


def _timed(muon: Muon, times: int) -> list[tuple[float, float]]:
    """When each of some steps began and ended on this rank."""
    return _spans(muon.step, times, partial(_give_gradients, muon))


def _timed_alone(muon: Muon) -> list[tuple[float, float]]:
    """The same, but only for the step's calls of torch.distributed, its waits and its sleeps."""
    tape = _note_step(muon)
    return _spans(lambda: [again() for again in tape], 3, lambda: None)


def _spans(step: Callable[[], Any], times: int, prepare: Callable[[], None]) -> list[tuple[float, float]]:
    spans = []
    for _ in range(times):
        prepare()
        dist.barrier()
        begin = time.monotonic()
        step()
        spans.append((begin, time.monotonic()))
        dist.barrier()  # so that no rank prepares the next step while others still take this one
    return spans


def real_table(command: str, orthogonalize: str) -> Table:
    rows: list[TableRow] = []
    for name, shapes in SIDES.items():
        for ranks in (2,) if len(shapes) < 8 else (2, 8):
            its_ranks = launch(_real, ranks, args=(ranks, shapes, orthogonalize), timeout=600)
            ways = [zip(*its, strict=True) for its in zip(*its_ranks, strict=True)]
            found = [tuple(map(fastest, its)) for its in ways]
            for way, (seconds, messages) in zip(REAL, found, strict=True):
                row: TableRow = {"matrices": name, "ranks": ranks, "strategy": way}
                row |= {"seconds": round(seconds, 3), "messages": round(messages, 3)}
                rows.append({**row, "apart / this": round(found[0][0] / seconds, 3)})
    return Table("Real work", tuple(rows), command, REAL_NOTES)


def _real(rank: int, ranks: int, shapes: Sequence[tuple[int, int]], orthogonalize: str) -> list[Any]:
    torch.set_num_threads(1)
    mesh = build_mesh({"dp": ranks})
    muon = partial(_muon, orthogonalize=orthogonalize)
    ways = [muon(shapes[rank::ranks]), *(muon(shapes, strategy=way, mesh=mesh) for way in REAL[1:])]
    return [(_timed(muon, 3), _timed_alone(muon)) for muon in ways]


def _predicted(plan: Plan, rank: int) -> int:
    step = step_over_ones(plan, plan.grid.at(rank), torch.device("meta"), IN_FLIGHT)
    with (
        torch.no_grad(),
        mock.patch.object(orthogonalize, "newton_schulz_update", lambda whole, *_: whole.clone()),
    ):
        walk_alone(step.agree(), lambda request: None)
        with PeakMemory() as seen:
            walk_alone(step.walk(), lambda request: None)
    return seen.peak


def main(arguments: list[str] | None = None) -> int:
    parser = result_parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16], help="numbers of ranks")
    parser.add_argument("--only", choices=("sleep", "real"), help="one of the two tables")
    parser.add_argument("--sleep", type=float, default=0.1, help="seconds for the costliest matrix")
    parser.add_argument(
        "--orthogonalize",
        default=STOCK,
        help="Newton–Schulz recipe of the real work; take float32 where the processor has no units for bf16",
    )
    asked = parser.parse_args(arguments)
    if min(asked.ranks) < 2:
        parser.error(f"--ranks must be at least 2, got {min(asked.ranks)}")
    command, rows = command_line("rounds", arguments), list[TableRow]()
    out = made(asked.out)
    for ranks, name, limit in product(asked.ranks, MATRICES, (ONE, ALL)) if asked.only != "real" else ():
        say(f"{name} on {ranks} ranks")
        rows += run_case(SleepCase(name, MATRICES[name], ranks, limit, asked.sleep))
    tables = [Table("Owners that work at once", tuple(rows), command, NOTES)] if rows else []
    tables += [] if asked.only == "sleep" else [real_table(command, asked.orthogonalize)]
    write_results(out, "rounds", "Rounds", OPENING, machine_facts(command), tables)
    print(markdown(tables))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
