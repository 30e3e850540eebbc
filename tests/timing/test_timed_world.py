"""The timed world: clocks compared with hand-made cases, and walks of the package's own step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch

from muon_tutorial import STRATEGIES, Grid, Matrix, Shard, zero1
from muon_tutorial.engine.collective import IDLE, Call, Collective, Kind, Label, Start, Wait, Walk
from muon_tutorial.errors import DeadlockError, MismatchError, RequestError
from muon_tutorial.evidence.predict import step_over_ones
from muon_tutorial.plan.strategies import Builder
from muon_tutorial.timing.compute_seconds import Work
from muon_tutorial.timing.machine import Link, Machine
from muon_tutorial.timing.timed_world import TimedRun, TimedWorld
from muon_tutorial.timing.timeline import predicted_timeline
from muon_tutorial.timing.timeline_cases import walk_ranks
from muon_tutorial.worlds.shadow import requests_of

META = torch.device("meta")
FREE = ((1.0, 1e18),)
# A product of two 100 × 100 matrices takes 2 s; a link carries 1,000 bytes in 1 s.
TOY = Machine(
    name="toy",
    gemm={"float32": ((1.0, 1e6),), "bfloat16": ((1.0, 1e6),)},
    copy=FREE,
    operation=0.0,
    turn=0.0,
    inside=Link(bandwidth=1000.0, latency=0.0),
)
GLOO = replace(TOY, algorithm="gloo")
Program = Callable[[int], Walk]


def compute(products: int = 1) -> None:
    """Compute for two seconds per product."""
    a = torch.empty(100, 100, device=META)
    for _ in range(products):
        torch.mm(a, a)


def asked(kind: Kind = "all_reduce", elements: int = 250, axis: str = "dp", phase: str = "sum") -> Collective:
    mine = torch.empty(elements, device=META)
    return Collective(kind, (axis,), mine.dtype, mine, elements, Label(phase))


def exchange(sends: Sequence[int], receives: Sequence[int], phase: str = "swap") -> Collective:
    mine = torch.empty(sum(sends), device=META)
    about = "all_to_all", ("dp",), mine.dtype, mine, sum(receives), Label(phase)
    return Collective(*about, sends=tuple(sends), receives=tuple(receives))  # type: ignore[arg-type]


def run(program: Program, machine: Machine = TOY, grid: Grid | None = None) -> TimedRun:
    grid = grid or Grid.of(dp=2)
    return TimedWorld(grid, machine).run([program(rank) for rank in grid.ranks])


def starting(*requests: Collective) -> Walk:
    tickets = []
    for request in requests:
        tickets.append((yield Start(request)))
    for ticket in tickets:
        yield Wait(ticket)


def late(rank: int) -> Walk:
    compute(rank)
    yield asked()


def test_the_first_rank_waits_for_the_last() -> None:
    ran = run(late)
    assert ran.seconds == pytest.approx(2 + 1)  # rank 1 computes, then 1,000 bytes travel
    assert [ran.total("wait", rank) for rank in (0, 1)] == pytest.approx([3, 1])
    assert [ran.total("product", rank) for rank in (0, 1)] == pytest.approx([0, 2])
    (flight,) = ran.flights
    assert (flight.issued, flight.begin, flight.end) == ({0: 0.0, 1: 2.0}, 2.0, 3.0)
    assert run(overlapped).total("wait", 0) == 0


def overlapped(rank: int) -> Walk:
    ticket = yield Start(asked())
    compute()
    yield Wait(ticket)


def in_turn(rank: int) -> Walk:
    yield asked()
    compute()


def to_one_owner(rank: int) -> Walk:
    """Ranks 1 to 3 send 1,000 bytes each to rank 0."""
    sends = (0 if rank == 0 else 250, 0, 0, 0)
    receives = (0, 250, 250, 250) if rank == 0 else (0, 0, 0, 0)
    yield exchange(sends, receives)


def with_a_pause(rank: int) -> Walk:
    yield asked()
    compute()
    yield asked()
    yield asked()


def afterwards(rank: int) -> Walk:
    yield IDLE
    compute(3)


def one(rank: int) -> Walk:
    return starting(asked())


def two(rank: int) -> Walk:
    return starting(asked(), asked())


SHARED = replace(TOY, cores=1)
SENDING = replace(SHARED, byte=1e-3)
WAKING = replace(SHARED, algorithm="gloo", inside=Link(1e12, 0.0), message=0.25)
BUS = replace(TOY, inside=Link(1000.0, 0.0, shared=True))
SAVING = replace(BUS, inside=replace(BUS.inside, burst=500.0))
FAR = replace(TOY, ranks_per_node=1, between=Link(500.0, 0.25))
# In Gloo's all_reduce, each of two ranks sends four messages. The 1,000 bytes that a rank sends take a
# second.
SECONDS: dict[str, tuple[Program, Machine, dict[str, int], float]] = {
    "asked for before computing": (in_turn, TOY, {}, 1 + 2),
    "started before computing": (overlapped, TOY, {}, 2),
    "two compute on one core": (in_turn, SHARED, {}, 1 + 4),
    "one waits without a core": (late, SHARED, {}, 3),
    "sending takes a core": (in_turn, SENDING, {}, 2 + 4),
    "sending takes the only core, so overlap hides nothing": (overlapped, SENDING, {}, 2 + 4),
    "sending takes a core of its own": (overlapped, replace(SENDING, cores=4), {}, 2),
    "a rank wakes up for messages": (in_turn, WAKING, {}, 2 + 4),
    "a rank wakes up once for two flights": (two, WAKING, {}, 2),
    "a rank copies each of two flights": (two, replace(WAKING, message=0.0, byte=1e-3), {}, 4),
    "a rank wakes up, and then copies": (two, replace(WAKING, byte=1e-3), {}, 2 + 4),
    "groups share no links": (one, TOY, {"dp": 2, "tp": 2}, 1),
    "four ranks send on a bus": (one, BUS, {"dp": 2, "tp": 2}, 4),
    "a bus begins without a burst": (in_turn, SAVING, {}, 2 + 2),
    "an idle bus saves up a burst": (with_a_pause, SAVING, {}, 2 + 2 + (2 - 0.5) + 2),
    "a byte travels once on a bus": (to_one_owner, BUS, {"dp": 4}, 3),
    "an owner's link is busy with all that it gets": (to_one_owner, TOY, {"dp": 4}, 3),
    "between nodes, there and back": (one, FAR, {}, 2 + 2 * 0.25),
    "the last computation counts": (afterwards, TOY, {}, 6),
}


@pytest.mark.parametrize("case", SECONDS)
def test_a_step_takes_as_long_as_worked_out_by_hand(case: str) -> None:
    program, machine, sizes, seconds = SECONDS[case]
    assert run(program, machine, Grid.of(**(sizes or {"dp": 2}))).seconds == pytest.approx(seconds)


def test_a_group_answers_in_order() -> None:
    def twice(rank: int) -> Walk:
        first, second = (yield Start(asked(phase="a"))), (yield Start(asked(phase="b")))
        yield Wait(second)
        yield Wait(first)

    ran = run(twice)
    assert [flight.begin for flight in ran.flights] == pytest.approx([0, 1])
    assert [flight.end for flight in ran.flights] == pytest.approx([1, 2])


def exchanged(phase: str) -> Collective:
    return exchange((250, 250), (250, 250), phase)


@pytest.mark.parametrize(
    ("request_of", "begins", "ends"),
    [(lambda phase: asked(phase=phase), [0, 0, 2], [2, 2, 3]), (exchanged, [0, 0, 0], [1, 2, 3])],
)
def test_of_a_group_gloo_carries_two_rings_at_once_and_any_messages_one_after_the_other(
    request_of: Callable[[str], Collective], begins: list[int], ends: list[int]
) -> None:
    ran = run(lambda rank: starting(*map(request_of, "abc")), GLOO)
    one = run(lambda rank: starting(request_of("a")), GLOO).seconds
    assert [flight.begin / one for flight in ran.flights] == pytest.approx(begins)
    assert [(flight.end or 0) / one for flight in ran.flights] == pytest.approx(ends)


def test_a_ring_and_messages_share_what_a_rank_sends_and_a_link_may_carry_one_way_at_a_time() -> None:
    def seconds(*requests: Collective, machine: Machine = GLOO) -> float:
        return run(lambda rank: starting(*requests), machine).seconds

    ring, messages = asked(elements=2500), exchanged("swap")
    assert seconds(ring, messages) == pytest.approx(seconds(ring) + seconds(messages))
    narrow = replace(GLOO, inside=replace(TOY.inside, duplex=False))
    assert seconds(messages, machine=narrow) == pytest.approx(2 * seconds(messages))


def test_an_exchange_is_done_for_a_rank_when_its_own_messages_are() -> None:
    """Ranks 0 and 1 need not wait while rank 2 computes: they have hardly any data for rank 2."""
    sizes = ((0, 1000, 1), (1000, 0, 1), (1, 1, 0))

    def program(rank: int) -> Walk:
        if rank == 2:
            compute(2)
        yield exchange(sizes[rank], [row[rank] for row in sizes])

    ran = run(program, GLOO, Grid.of(dp=3))
    (flight,) = ran.flights
    lived = predicted_timeline(ran).flights
    assert all(each.begin <= each.end <= each.answered for each in lived)
    assert flight.begin == 4.0
    assert flight.done[2] == pytest.approx(4, abs=1)
    assert flight.done[0] == flight.done[1] == flight.end == pytest.approx(ran.seconds)
    ring = run(program, TOY, Grid.of(dp=3))
    assert ran.seconds < ring.seconds - 3.5  # the exchange is nearly over when rank 2 asks


def test_an_exchange_that_one_rank_never_asks_for_is_found() -> None:
    """The missing request is noticed although rank 2, which does not ask, would send and receive nothing."""

    def program(rank: int) -> Walk:
        if rank < 2:
            sends = (0, 1, 0) if rank == 0 else (1, 0, 0)
            yield exchange(sends, sends)
        yield IDLE

    with pytest.raises(DeadlockError, match=r"rank 0 requested all_to_all .*, but others of its group"):
        run(program, GLOO, Grid.of(dp=3))


def test_splits_of_another_length_are_a_mismatch() -> None:
    def program(rank: int) -> Walk:
        yield exchange((1,) * (2 + rank), (1,) * (2 + rank))

    with pytest.raises(MismatchError):
        run(program, GLOO)


def test_a_deadlock_a_mismatch_and_a_users_own_call_are_named() -> None:
    def lost(rank: int) -> Walk:
        if rank == 0:
            yield asked()

    def apart(rank: int) -> Walk:
        yield asked(phase=f"of {rank}")

    def own(rank: int) -> Walk:
        yield Call(lambda: None, Label("gather", "m"))

    with pytest.raises(DeadlockError, match=r"rank 0 \(dp=0\) waits in sum\n.*rank 1 \(dp=1\) has ended"):
        run(lost)
    with pytest.raises(MismatchError, match="asked differently"):
        run(apart)
    with pytest.raises(RequestError, match=r"makes a call .* whose time cannot be predicted"):
        run(own)


MATRICES = [
    Matrix(i, f"m{i}", shape, (("tp", Shard(i % 2)),), grad_dtype=torch.float32)
    for i, shape in enumerate(((64, 96), (96, 64), (64, 64), (128, 64), (64, 96)))
]
BUILDERS: dict[str, Builder] = {**STRATEGIES, "boundary": partial(zero1, gather="boundary")}


@pytest.mark.parametrize(("cores", "launches"), [(1, 4), (None, 1)])
def test_a_gpu_is_given_its_work_ahead_and_a_view_gives_it_none(cores: int | None, launches: int) -> None:
    """A core pays for each operation. A GPU hides a launch behind a product that is running."""
    a = torch.empty(100, 100, device=META)
    with Work(replace(TOY, operation=0.5, cores=cores)) as work:
        torch.mm(a, a.t())  # takes 2 s, and makes a view
        a.add_(a.t())  # takes almost no time, and makes another view
    product, copy = work.take()
    assert product == 2.0
    assert copy == pytest.approx(0.5 * launches)


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("name", BUILDERS)
def test_it_walks_the_packages_own_step(name: str, window: int) -> None:
    """Each rank makes the same requests as in any world, and at every moment computes, copies or waits."""
    grid = Grid.of(dp=2, tp=2)
    plan = BUILDERS[name](MATRICES, grid, round_bytes=20_000)
    machine = replace(TOY, operation=0.001, turn=0.002, cores=2, copy=((1.0, 1e7),))
    ran = walk_ranks(plan, machine, window)
    for rank in grid.ranks:
        own = requests_of(step_over_ones(plan, grid.at(rank), META, window).walk())
        seen = [flight.asked[rank] for flight in ran.flights if rank in flight.group]
        assert sorted(seen) == sorted(map(str, own))
        spent = sum(ran.total(doing, rank) for doing in ("product", "copy", "wait"))
        assert spent == pytest.approx(ran.ends[rank])
        spans = [span for span in ran.spans if span.rank == rank]
        assert all(a.end <= b.begin + 1e-9 for a, b in pairwise(spans))
    assert walk_ranks(plan, machine, window).seconds == ran.seconds
