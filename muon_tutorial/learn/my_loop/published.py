"""Lesson 16: where four ideas of this course stand in two published sources, by name, with permanent links.

The sources were read at the commits below. Nothing of them is copied: names, places, and what they are for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..exercises.judge import Diagnosis, Exercise

TITAN = "https://github.com/pytorch/torchtitan/blob/b5bcd76c66d0acb1a08b176d9639425bc55e0b2a/"
MEGATRON = "https://github.com/NVIDIA/Megatron-LM/blob/d98e8a64ddf34856e74b24714e3bedb2f5a39553/"
IDEAS = {
    "owner": "decides which rank orthogonalizes which matrix, the costly ones spread evenly",
    "bucket": "says which matrices travel together",
    "way_back": "brings what was computed to those who keep the parameters",
    "momentum": "decides which rank keeps a matrix's momentum",
}


@dataclass(frozen=True, slots=True)
class PublishedName:
    """A function or class of a published source: for which idea it stands here, and what it does with it."""

    letter: str
    project: str
    symbol: str
    file: str
    line: int
    idea: str
    does: str

    @property
    def link(self) -> str:
        """Its permanent address."""
        return f"{TITAN if self.project == 'torchtitan' else MEGATRON}{self.file}#L{self.line}"


_FLEX = "torchtitan/distributed/flex_shard"
_LAYER_WISE = "megatron/core/optimizer/layer_wise_optimizer.py"
_CLASS = "LayerWiseDistributedOptimizer"
NAMES = (
    PublishedName(
        "A", "torchtitan", "DistMuon._momentum", f"{_FLEX}/dist_muon.py", 569, "momentum",
        "It is made like the gradient, a DTensor: each rank keeps the momentum of its own shard.",
    ),
    PublishedName(
        "B", "torchtitan", "_assign_balanced_owner_ranks", f"{_FLEX}/dist_muon.py", 992, "owner",
        "It balances temporary owners, within a bucket and over all of them in order.",
    ),
    PublishedName(
        "C", "torchtitan", "_RedistributionBucketPlan.compute_to_storage_schedule",
        f"{_FLEX}/_optimizer_reshard_schedule.py", 761, "way_back",
        "It is an all_to_all from owners to shards, planned beside the one that goes out.",
    ),
    PublishedName(
        "D", "torchtitan", "BucketConfig", f"{_FLEX}/optimizer_reshard.py", 252, "bucket",
        "It groups and orders parameters by their names.",
    ),
    PublishedName(
        "E", "Megatron-LM", f"{_CLASS}.allgather_params", _LAYER_WISE, 817, "way_back",
        "Owners send finished parameters to all. It is the older way: newer layouts gather the buffer.",
    ),
    PublishedName(
        "F", "Megatron-LM", f"{_CLASS}.set_bucket_layerwise_params_list", _LAYER_WISE, 764, "bucket",
        "It says, for each bucket of the gradients, which rank's parameters are in it.",
    ),
    PublishedName(
        "G", "Megatron-LM", f"{_CLASS}.shard_params", _LAYER_WISE, 614, "momentum",
        "It leaves a rank's optimizer its own parameters only: the owner keeps all of the momentum.",
    ),
    PublishedName(
        "H", "Megatron-LM", f"{_CLASS}._compute_per_buffer_param_layout", _LAYER_WISE, 196, "owner",
        "It gives each matrix, the costliest first, to the rank with the least work so far. (It cuts the "
        "buckets, too.)",
    ),
)  # fmt: skip


def say_links() -> str:
    """The ideas to find, and the names with their links, without saying which belongs to which."""
    ideas = [f"{idea:9} {question}" for idea, question in IDEAS.items()]
    names = [f"{name.letter}  {name.project}: {name.symbol}\n   {name.link}" for name in NAMES]
    return "\n".join([*ideas, "", *names])


def right_match() -> dict[str, set[str]]:
    """The letters that belong to each idea."""
    return {idea: {name.letter for name in NAMES if name.idea == idea} for idea in IDEAS}


def check_match() -> Exercise:
    """The exercise: to each idea the two names that stand for it, one of each project."""

    def judge(match: Mapping[str, Any]) -> str | Diagnosis | None:
        if not isinstance(match, Mapping):
            return f"Give a dictionary of {', '.join(IDEAS)}, each with two letters."
        for idea, right in right_match().items():
            if match.get(idea, ...) is ...:
                return f"{idea} is still open."
            if not isinstance(match[idea], Iterable):
                return f"{idea}: give two letters, such as 'AE'."
            said = set(map(str, match[idea]))
            if unknown := said - {name.letter for name in NAMES}:
                return f"{idea}: {sorted(unknown)[0]!r} is none of the letters A to H."
            if wrong := sorted(said - right):
                [name] = [name for name in NAMES if name.letter == wrong[0]]
                what = f"{idea}: {name.symbol} is about something else, which the list calls {name.idea!r}."
                return Diagnosis(what, (name.does,))
            if len(said) < len(right):
                return f"{idea}: one letter of each project, please."
        return None

    hints = ("Read what the docstring of each says first, and what it returns or changes.",)
    return Exercise(judge, hints, "Two projects, the same four questions, and different answers to the last.")


def say_match() -> str:
    """What each name does, by idea."""
    lines = []
    for idea, question in IDEAS.items():
        lines.append(f"{idea}: {question}.")
        lines += [f"  {name.letter}  {name.project}. {name.does}" for name in NAMES if name.idea == idea]
    return "\n".join(lines)
