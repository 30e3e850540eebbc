"""The built-in check: its bound holds for every order of a sum, and it detects a single wrong bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muon_tutorial.launching.launch import launch
from muon_tutorial.optimizer import update_verdict
from muon_tutorial.optimizer.audit import Audit
from muon_tutorial.step import orthogonalize
from muon_tutorial.step.parameter_state import local_part
from muon_tutorial.training import check_against_torch, loop
from muon_tutorial.training.check_against_torch import Sums, gradient_error
from muon_tutorial.training.loop import Trainer, build_trainer, train_step
from muon_tutorial.training.records import CheckVerdict, PhaseTraffic
from muon_tutorial.training.report import describe_verdict
from muon_tutorial.training.settings import TrainSettings

TINY: dict[str, Any] = {"layers": 1, "width": 16, "heads": 2, "context": 16, "batch": 4, "steps": 2}


def exact(gradients: list[torch.Tensor]) -> Sums:
    wide = torch.stack(gradients).double()
    return Sums(wide.sum(0), wide.abs().sum(0))


@given(st.integers(1, 9), st.integers(0, 2**32), st.integers(-38, 38), st.randoms())
@settings(deadline=None)
def test_any_order_of_the_sum_is_within_the_bound(ranks: int, seed: int, exponent: int, order) -> None:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.logspace(-6, 0, 64)
    gradients = [torch.randn(64, generator=generator) * spread * 10.0**exponent for _ in range(ranks)]
    sums = exact(gradients)
    order.shuffle(gradients)
    total = gradients[0].clone()
    for gradient in gradients[1:]:
        total += gradient
    if total.isfinite().all():
        assert gradient_error(total / ranks, sums, ranks) <= 1


def test_a_sum_that_lost_a_rank_is_far_outside_the_bound() -> None:
    gradients = [torch.randn(64, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
    assert gradient_error(sum(gradients[:3], torch.zeros(64)) / 4, exact(gradients), 4) > 1e3


def checked_steps(
    rank: int, options: dict, plant: Callable[[Trainer], None] | None = None
) -> list[CheckVerdict | None]:
    """The verdicts on two checked steps; ``plant`` plants a fault on rank 1 in the second."""
    trainer = build_trainer(TrainSettings(**{**TINY, **options}))
    verdicts = [train_step(trainer, 0, checked=True)[1]]
    if plant is not None and rank == 1:
        plant(trainer)
    return [*verdicts, train_step(trainer, 1, checked=True)[1]]


def flip_one_bit_after_the_step(trainer: Trainer) -> None:
    step = trainer.optimizer.step

    def wrong_step() -> None:
        step()
        hidden = trainer.optimizer.muon.param_groups[0]["params"][0]
        local_part(hidden.data).view(torch.int32)[0, 0] ^= 1

    object.__setattr__(trainer.optimizer, "step", wrong_step)


def orthogonalize_nothing(trainer: Trainer) -> None:
    """Rank 1 returns its matrices as they are, and its Newton–Schulz calls are not counted."""
    orthogonalize.newton_schulz_update = lambda whole, *_: whole


@pytest.mark.parametrize(("strategy", "grid"), [("zero1", (1, 1)), ("zero1", (2, 2)), ("replicated", (2, 2))])
def test_every_strategy_passes_on_every_grid(strategy: str, grid: tuple[int, int]) -> None:
    options = {"strategy": strategy, "dp": grid[0], "tp": grid[1]}
    verdicts = launch(checked_steps, grid[0] * grid[1], args=(options,), output="quiet")
    assert all(each == verdicts[0] for each in verdicts)
    assert all(verdict.passed for verdict in verdicts[0])
    assert verdicts[0][1].largest_difference == 0
    said = verdicts[0][1].audit
    assert said.startswith("this is Muon: 6 of 6 parameters moved by their orthogonalized momentum; ")
    counted = {"zero1": "12", "replicated": "24"}[strategy] if grid == (2, 2) else "6"
    assert said.partition("; ")[2].startswith(f"{counted} Newton–Schulz calls, as planned")
    assert (", rank 3: " in said) == (grid == (2, 2))


def test_a_rank_that_does_not_orthogonalize_is_found_by_the_audit() -> None:
    options = {"dp": 2, "tp": 1, "strategy": "owner"}
    verdicts = launch(checked_steps, 2, args=(options, orthogonalize_nothing), output="quiet")
    for first, second in verdicts:
        assert first.is_muon
        assert not second.is_muon
        assert not second.passed
        assert update_verdict.SGD in second.audit
        assert describe_verdict(second, 2) == f"FAILED at step 2: {second.audit}"


def test_a_learning_rate_that_moves_nothing_fails_no_check() -> None:
    """With so small a learning rate, torch's own Muon does not move parameters either."""
    for verdict in launch(checked_steps, 1, args=({"dp": 1, "tp": 1, "lr": 1e-12},), output="quiet")[0]:
        assert verdict.passed
        assert update_verdict.STILL in verdict.audit


def test_only_a_checked_step_is_audited_and_nothing_stays_behind() -> None:
    assert launch(audits_of_steps, 1, output="quiet") == [[(0, 0), (1, 0)]]


def audits_of_steps(rank: int) -> list[tuple[int, int]]:
    """After a step without a check, and after one with a check: the audits so far, and the hooks left."""
    trainer = build_trainer(TrainSettings(**{**TINY, "dp": 1, "tp": 1}))
    pair, made, found = trainer.optimizer, list[Audit](), []
    check_against_torch.audit = lambda it: made.append(Audit(it, None)) or made[-1]  # type: ignore
    for step, checked in enumerate((False, True)):
        train_step(trainer, step, checked)
        hooked = sum(bool(param._post_accumulate_grad_hooks) for param in trainer.model.parameters())
        hooks = len(pair._optimizer_step_pre_hooks) + len(pair._optimizer_step_post_hooks)
        found.append((len(made), hooks + hooked))
    return found


def test_a_step_counts_the_wait_for_slower_ranks_and_the_traffic_is_one_ranks() -> None:
    times, traffic = zip(*launch(with_a_false_clock, 4, output="quiet"), strict=True)
    assert set(times) == {(10.0, 2.0)}
    sent = [sum(phase.sent_bytes for phase in own) for _, own in traffic]
    assert {sum(phase.sent_bytes for phase in told) for told, _ in traffic} == {max(sent)}


def with_a_false_clock(rank: int) -> tuple[tuple[float, float], tuple[Any, Any]]:
    """A step's times, and its traffic as the report tells it and as this rank counted it."""
    trainer = build_trainer(TrainSettings(**{**TINY, "dp": 4, "tp": 1, "strategy": "layerwise"}))
    train_step(trainer, 0, checked=False)
    now = [0.0]

    def takes(seconds: float, do: Callable[..., Any]) -> Callable[..., Any]:
        def done(*given: Any) -> Any:
            now[0] += seconds
            return do(*given)

        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: now[0]))
        for name, seconds in (("_learn", 1.0), ("_mean_over_dp", 7.0), ("_ready_gradients", 2.0)):
            patch.setattr(loop, name, takes(seconds, getattr(loop, name)))
        record, _ = train_step(trainer, 1, checked=False)
    own = tuple(PhaseTraffic(r.phase, r.collectives, r.payload, r.ring) for r in trainer.ledger.rows(rank))
    return (record.seconds, record.optimizer_seconds), (loop._traffic(trainer), own)


def test_gram_is_held_to_its_bound_where_tensor_parallelism_cuts() -> None:
    options = {"strategy": "gram", "dp": 2, "tp": 2}
    verdicts = launch(checked_steps, 4, args=(options,), output="quiet")
    assert all(each == verdicts[0] for each in verdicts)
    for verdict in verdicts[0]:
        assert verdict.passed
        assert 0 < verdict.cut_error < 1
        assert "except those that stay cut, which differ from the Gram" in describe_verdict(verdict, 2)
        assert not replace(verdict, cut_error=1.1).passed


def test_one_wrong_bit_on_one_rank_fails_the_check_on_all() -> None:
    given = {"dp": 2, "tp": 1}, flip_one_bit_after_the_step
    verdicts = launch(checked_steps, 2, args=given, output="quiet")
    for first, second in verdicts:
        assert first.passed
        assert not second.passed
        assert second.differing == 1
