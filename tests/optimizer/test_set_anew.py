"""If a host replaces groups or state without telling the optimizer, the next step uses the new ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from muon_tutorial import Grid, Muon, MuonWithAdamW, Replicate
from muon_tutorial.errors import MismatchError, UsageError

from ..oracle import (
    Case,
    Ranks,
    assert_alike,
    assert_own_parts,
    options,
    perceptron,
    seated,
    whole_gradients,
    whole_matrices,
)

CASE = Case(((12, 6), (8, 6), (4, 10)), (Replicate(),) * 3, steps=4)
STRATEGIES = ["zero1", "layerwise", "owner", "replicated"]


Edit = Callable[[Muon], object]


def first_entry(muon: Muon) -> dict[str, Any]:
    return muon.state[muon.param_groups[0]["params"][0]]


def set_the_groups(muon: Muon) -> None:
    """Replace the groups, as Lightning does when it restarts fine-tuning."""
    muon.param_groups = [{**group, "lr": 0.5} for group in muon.param_groups]


def set_one_group(muon: Muon) -> None:
    muon.param_groups[0] = {**muon.param_groups[0], "momentum": 0.5}


def set_one_momentum(muon: Muon) -> None:
    first_entry(muon)["momentum_buffer"] = torch.zeros_like(first_entry(muon)["momentum_buffer"])


def set_parts(muon: Muon) -> None:
    muon.param_groups[0]["parts"] = 4


EDITS: dict[str, Edit] = {
    "set the groups": set_the_groups,
    "write into a group, as schedulers do": lambda muon: muon.param_groups[0].update(lr=0.01),
    "set one group": set_one_group,
    "clear the state": lambda muon: muon.state.clear(),
    "set the state": lambda muon: setattr(muon, "state", defaultdict(dict)),
    "set one entry": lambda muon: muon.state.update({muon.param_groups[0]["params"][0]: {}}),
    "set one momentum": set_one_momentum,
}


def alone(edit: Edit, when: int) -> list[nn.Parameter]:
    params = [nn.Parameter(whole) for whole in whole_matrices(CASE)]
    muon = Muon(params, **options(CASE))
    for step, grads in enumerate(whole_gradients(CASE)):
        if step == when:
            edit(muon)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        muon.step()
    return params


def on_ranks(strategy: str, edit: Edit, when: int) -> Ranks:
    ranks = seated(Grid.of(dp=2), strategy, CASE)
    for step, grads in enumerate(whole_gradients(CASE)):
        if step == when:
            for muon in ranks.muons:
                edit(muon)
        ranks.give(grads)
        ranks.step()
    return ranks


@pytest.mark.parametrize(
    ("edit", "when"), [*((edit, 2) for edit in EDITS.values()), (set_parts, 0)], ids=[*EDITS, "parts"]
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_steps_by_it_as_a_process_alone(strategy: str, edit: Edit, when: int) -> None:
    expected = alone(edit, when)
    unedited = alone(lambda _: None, when)
    assert not all(map(torch.equal, expected, unedited))
    ranks = on_ranks(strategy, edit, when)
    assert_own_parts(ranks.params, expected, CASE, Grid.of(dp=2))


@pytest.mark.parametrize("strategy", ["owner", "replicated"])
def test_parts_may_change_where_momentum_is_whole(strategy: str) -> None:
    ranks = on_ranks(strategy, set_parts, 2)
    assert_own_parts(ranks.params, alone(set_parts, 2), CASE, Grid.of(dp=2))


def test_slices_of_momentum_cannot_follow_other_parts() -> None:
    said = r"cannot be added, removed or moved|loaded or kept from other parameters"
    with pytest.raises(UsageError, match=said):
        on_ranks("zero1", set_parts, 2)


def test_slices_of_momentum_cannot_follow_lines_that_alternate_otherwise() -> None:
    """The slices have the same lengths in matrices of the same shapes."""
    ranks = seated(Grid.of(dp=2), "zero1", CASE)
    for length, grads in zip((1, 1, 2), whole_gradients(CASE), strict=False):
        for muon in ranks.muons:
            muon.param_groups[0]["parts"] = ("interleaved", length, length)
        ranks.give(grads)
        before = ranks.held()
        if length == 2:
            with pytest.raises(
                UsageError, match=r"changed from \(\('interleaved', 1, 1\), False\) to .* set it back"
            ):
                ranks.step()
            assert_alike(ranks.params, before)
        else:
            ranks.step()


@pytest.mark.parametrize("edit", [EDITS["clear the state"], set_one_momentum])
def test_one_rank_alone_is_refused(edit: Edit) -> None:
    ranks = seated(Grid.of(dp=2), "replicated", CASE)
    grads = list(whole_gradients(CASE))
    ranks.steps(grads[:2])
    edit(ranks.muons[1])
    ranks.give(grads[2])
    with pytest.raises(MismatchError, match="whether the state was replaced"):
        ranks.step()


@pytest.mark.parametrize("edit", [set_the_groups, EDITS["clear the state"]])
def test_between_readying_and_stepping_it_is_refused(edit: Edit) -> None:
    ranks = seated(Grid.of(dp=2), "zero1", CASE)
    ranks.give(next(whole_gradients(CASE)))
    ranks.ready(0.5)
    before = ranks.held()
    for muon in ranks.muons:
        edit(muon)
    with pytest.raises(UsageError, match=r"replaced between ready_gradients\(\) and step\(\)"):
        ranks.step()
    assert_alike(ranks.params, before)


def pair() -> tuple[nn.Sequential, MuonWithAdamW]:
    model = nn.Sequential(*perceptron(), nn.LayerNorm(6))
    return model, MuonWithAdamW.from_model(model, lr=0.1)


def trained(edit: Callable[[MuonWithAdamW], object]) -> list[Tensor]:
    model, both = pair()
    for step in range(4):
        if step == 2:
            edit(both)
        both.zero_grad()
        model(torch.arange(12.0).view(2, 6) - step)[:, :3].square().sum().backward()
        both.step()
    return [param.detach() for param in model.parameters()]


def clear_both(both: MuonWithAdamW) -> None:
    both.muon.state.clear()
    both.adamw.state.clear()


def drop_each(both: MuonWithAdamW) -> None:
    for param in list(both.state):
        del both.state[param]


def move_each(both: MuonWithAdamW) -> None:
    """Move a state to another device entry by entry, as Lightning does."""
    for param, entry in both.state.items():
        both.state[param] = {key: torch.zeros_like(value) for key, value in entry.items()}


@pytest.mark.parametrize(
    "edit",
    [lambda both: both.state.clear(), lambda both: setattr(both, "state", {}), drop_each, move_each],
)
def test_edits_of_the_pairs_state_reach_both_optimizers(edit: Callable[[MuonWithAdamW], object]) -> None:
    expected, unedited = trained(clear_both), trained(lambda _: None)
    assert not all(map(torch.equal, expected, unedited))
    assert all(map(torch.equal, trained(edit), expected))


def test_the_pairs_state_seems_empty_until_something_has_moved() -> None:
    model, both = pair()
    weight = next(model.parameters())
    assert not both.state
    assert weight not in both.state
    model(torch.ones(2, 6))[:, :3].sum().backward()
    both.step()
    assert set(both.state) == set(model.parameters())
    assert both.state[weight] is both.muon.state[weight] is both.state.get(weight)


@pytest.mark.parametrize(
    "write",
    [
        lambda groups: groups.append({}),
        lambda groups: groups.__setitem__(0, {**groups[0], "lr": 0.0}),
        lambda groups: groups.__setitem__(slice(None), groups[1:]),
        lambda groups: groups.pop(),
        lambda groups: groups.sort(key=len),
    ],
)
def test_a_write_to_the_pairs_list_of_groups_is_refused(write: Callable[[list], object]) -> None:
    _, both = pair()
    both.param_groups[:] = both.param_groups  # DeepSpeed writes back what it read
    with pytest.raises(UsageError, match="is a new list at each access"):
        write(both.param_groups)
