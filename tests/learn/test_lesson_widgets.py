"""The widgets of lessons on grids and runs that notebooks do not show: every position has its words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest

from muon_tutorial import Grid
from muon_tutorial.learn import (
    collectives,
    first_look,
    first_muon,
    five_products,
    shards_alone,
    the_grid,
    why_muon,
    zero1_buffer,
)
from muon_tutorial.learn.inputs import small_gpt
from muon_tutorial.learn.widgets.shell import Shell

from .test_collectives import all_reduce
from .test_every_widget import alt_of_sound_picture, drive_shell, move, positions
from .test_first_muon import pretended

Says = Callable[[Mapping[str, Any]], str]


def where(dp: int, tp: int) -> Says:
    """What lesson 06 says of a rank's place on its grid."""

    def says(position: Mapping[str, Any]) -> str:
        at = Grid.of(dp=dp, tp=tp).at(position["rank"])
        return f"Rank {at.rank} stands at dp {at['dp']}, tp {at['tp']}"

    return says


def updates(steps: int) -> Any:
    return why_muon.explore(small_gpt.train(steps, seed=steps), why_muon.svd_muon)


def rounds(ranks: int) -> Any:
    return collectives.explore_sum(collectives.run_sum(all_reduce, ranks))


def holders(dp: int, tp: int) -> Any:
    return first_look.explore(first_look.plan_of(dp, tp))


def buffers(ranks: int) -> Any:
    return first_muon.explore(pretended(ranks))


SHELLS: dict[str, tuple[Callable[[], Any], Says, str]] = {
    "01 trained": (
        partial(updates, 3),
        lambda at: f"blocks.{at['layer']}.{why_muon.KINDS[at['matrix']]}",
        "",
    ),
    "01 untrained": (partial(updates, 0), lambda at: f"blocks.{at['layer']}.", ""),
    "02": (
        five_products.microscope,
        lambda at: five_products.SPECTRA[at["spectrum"]],
        "After 5 steps",
    ),
    "02 duel": (
        five_products.duel,
        lambda at: f"With a = {at['a']:g}, b = {at['b']:g}, c = {at['c']:g}",
        "Keller Jordan: 64 values",
    ),
    "04 loads": (
        first_muon.explore_loads,
        lambda at: (
            f"{at['ranks']} ranks. by index: the busiest has {first_muon.fair_shares(at['ranks']):.2f}"
        ),
        "6 ranks.",
    ),
    "05": (
        lambda: zero1_buffer.explore(zero1_buffer.plan_of(4, 1, 400), 400),
        lambda at: f"dp {at['dp']} ",
        "Its slices by dp position",
    ),
    "08": (
        lambda: shards_alone.explore(4),
        lambda at: f"{at['matrix']}: Cut by {at['cut']} into {at['pieces']}",
        "power law: Cut by rows into 4",
    ),
}
for dp, tp in ((2, 2), (3, 2), (1, 4), (4, 1), (2, 3)):
    SHELLS[f"00 {dp} {tp}"] = (
        partial(holders, dp, tp),
        lambda at: f"rank {at['rank']} holds",
        "6 · its weight",
    )
for dp, tp in ((2, 3), (2, 6)):
    SHELLS[f"06 {dp} {tp}"] = (partial(the_grid.explore, dp, tp), where(dp, tp), "A grid of")
for ranks in (1, 2, 3, 4):
    still = f"Round {2 * (ranks - 1)}: rank 0 sends"
    SHELLS[f"04 {ranks}"] = (
        partial(buffers, ranks),
        lambda at: f"rank {at['rank']}: ",
        "every place is right",
    )
    if ranks > 1:
        SHELLS[f"03 {ranks}"] = (partial(rounds, ranks), lambda at: "all_reduce", still)


@pytest.mark.live
@pytest.mark.parametrize("name", SHELLS)
def test_every_position_can_be_drawn_and_says_what_it_shows(name: str) -> None:
    make, says, still = SHELLS[name]
    shell = make()
    assert isinstance(shell, Shell)
    drive_shell(shell, says)
    assert shell.still is not None
    assert still in shell.still.alt


def test_where_tp_cuts_nothing_both_cuts_are_drawn_and_said_in_the_same_words() -> None:
    shell, says = the_grid.explore(3, 1), where(3, 1)
    shown = [(position, move(shell, position)) for position in positions(shell)]
    assert all(says(position) in alt_of_sound_picture(page) for position, page in shown)
    assert len({page for _, page in shown}) == 6
