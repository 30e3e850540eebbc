"""The widgets of lessons on grids and runs that notebooks do not show: every position has its words."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest

from muon_tutorial import Grid
from muon_tutorial.learn import (
    collectives,
    cuts,
    first_look,
    first_muon,
    five_products,
    own_sharding,
    shards_alone,
    the_grid,
    why_muon,
    zero1_buffer,
)
from muon_tutorial.learn.inputs import small_gpt
from muon_tutorial.learn.widgets.shell import Shell

from ..exhaustive import every_other, left_out
from .drive_widget import FEW, MOST, drive_shell
from .test_collectives import all_reduce, pretended_runs
from .test_first_look import pretended as pretended_step
from .test_first_muon import pretended

Says = Callable[[Mapping[str, Any]], str]


def where(dp: int, tp: int) -> Says:
    """What lesson 06 says of a rank on its grid."""

    def says(position: Mapping[str, Any]) -> str:
        at = Grid.of(dp=dp, tp=tp).at(position["rank"])
        return f"Rank {at.rank} stands at dp {at['dp']}, tp {at['tp']}"

    return says


def updates(steps: int) -> Any:
    return why_muon.explore(small_gpt.train(steps, seed=steps), why_muon.svd_muon)


def rounds(ranks: int) -> Any:
    return collectives.explore_sum(collectives.run_sum(all_reduce, ranks))


def film(dp: int, tp: int) -> Any:
    return first_look.play_step(*pretended_step(dp, tp))


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
    "01 race": (
        lambda: why_muon.explore_race(why_muon.recorded_race()),
        lambda at: f"Step {at['moment'] * 8} of",
        "is the first at the end",
    ),
    "02 duel": (
        five_products.duel,
        lambda at: f"With a = {at['a']:g}, b = {at['b']:g}, c = {at['c']:g}",
        "Keller Jordan: 64 values",
    ),
    "03 switches": (
        lambda: collectives.explore_switches(pretended_runs()),
        lambda at: f"rank 3 {at['rank_3']}. After moment {at['moment']}",
        "Beside it: First of all, rank 0 receive",
    ),
    "04 loads": (
        first_muon.explore_loads,
        lambda at: f"{at['ranks']} ranks. by index: {first_muon.fair_shares(at['ranks']):.2f} fair shares",
        "6 ranks.",
    ),
    "05 entry": (
        lambda: zero1_buffer.explore_entry(zero1_buffer.plan_of(3, 1, 200)),
        lambda at: f"is entry {at['entry'] * (math.prod(zero1_buffer.SHAPES[at['matrix']]) - 1) // 12} of",
        "C[7, 5] is entry 82 of C",
    ),
    "05": (
        lambda: zero1_buffer.explore(zero1_buffer.plan_of(4, 1, 400), 400),
        lambda at: f"dp {at['dp']} ",
        "Its slices by dp position",
    ),
    "08": (
        lambda: shards_alone.explore(4),
        lambda at: f"{at['matrix']} matrix, {'' if at['halvings'] else 'before it is '}cut by {at['cut']}",
        "power law, by rows: cosine 0.69",
    ),
}
for dp in (2, 3):
    SHELLS[f"04 saboteur {dp}"] = (
        partial(first_muon.explore_sabotage, dp),
        lambda at: f"In step 1, rank {at['rank']} of",
        "After 9 phases all ranks hold the same weights",
    )
SHELLS["07 fused"] = (cuts.slide_qkv, lambda at: f"tp = {at['tp']}, cut as one", "4 of 4 heads torn")
for dp, tp in ((2, 2), (3, 2), (1, 4), (4, 1), (2, 3)):
    SHELLS[f"00 {dp} {tp}"] = (
        partial(film, dp, tp),
        lambda at: "",
        "8 · The new weight",
    )
for dp, tp in ((2, 2), (3, 2), (4, 1), (1, 1)):
    SHELLS[f"11 {dp} {tp}"] = (
        partial(own_sharding.explore_layouts, dp, tp),
        lambda at: f"{at['layout']}, {own_sharding.LAYOUTS[at['layout']]}. Moment {at['moment']}, ",
        "FSDP2, rows cut over all ranks. Moment 2, gather: ",
    )
for dp, tp in ((2, 3), (2, 6), (3, 1)):
    SHELLS[f"06 {dp} {tp}"] = (partial(the_grid.explore, dp, tp), where(dp, tp), "A grid of")
    SHELLS[f"07 {dp} {tp}"] = (
        partial(cuts.explore, dp, tp),
        lambda at: f"{at['cut'].capitalize()} parallel cuts",
        "Row parallel cuts the columns",
    )
for dp, tp in ((2, 2), (1, 4), (3, 1)):
    SHELLS[f"06 calls {dp} {tp}"] = (
        partial(the_grid.play_calls, dp, tp),
        lambda at: f"Moment {at['moment']}, {at['order']} first",
        "Everybody has heard of everybody",
    )
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
@pytest.mark.parametrize("most", [FEW, left_out(MOST)])
@pytest.mark.parametrize("name", every_other(SHELLS))
def test_every_position_can_be_drawn_and_says_what_it_shows(name: str, most: int) -> None:
    make, says, still = SHELLS[name]
    shell = make()
    assert isinstance(shell, Shell)
    drive_shell(shell, says, most)
    assert shell.still is not None
    assert still in shell.still.alt
