"""Seeded faults: the rank that broke is named, and nothing is left; ``exhaustive`` runs minutes of them."""

from __future__ import annotations

import random

import pytest

from tests.launching import faults

pytestmark = pytest.mark.live


def test_a_sample_of_faults_names_the_rank_that_broke() -> None:
    """One launch per phase, with kinds that show at once."""
    kinds = ("SIGKILL", "SIGSEGV", "os._exit", "MemoryError", "sys.exit", "SIGTERM", "SIGABRT")
    for number, (phase, kind) in enumerate(zip(faults.PHASES, kinds, strict=True)):
        outcome = faults.outcome_of(faults.Fault(number % faults.RANKS, kind, phase, 0.0))
        assert (outcome.named, outcome.left) == (outcome.fault.rank, 0), outcome


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_the_rank_that_broke_is_named_in_99_of_100() -> None:
    randomly = random.Random(0)
    outcomes = [faults.outcome_of(faults.draw(randomly)) for _ in range(200)]
    print(faults.table(outcomes))
    assert sum(outcome.verdict in ("named", "went well") for outcome in outcomes) >= 198
    assert all(outcome.left == 0 for outcome in outcomes)
