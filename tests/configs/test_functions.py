"""A user's own functions: the single process' parameters, to the bit, or a named error on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor

from muon_tutorial.callbacks.config import DistributedConfig
from muon_tutorial.callbacks.helpers import create_devicemesh_config, create_processgroup_config
from muon_tutorial.errors import RankFailedError, TutorialError
from muon_tutorial.launching.launch import launch
from muon_tutorial.optimizer.muon import Muon
from muon_tutorial.worlds.live import LiveWorld, build_mesh

from . import functions
from .oracle import Oracle
from .setups import full, joined

SHAPES = ((8, 5), (6, 9), (12, 12))
OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}


def whole(index: int, step: int) -> Tensor:
    """The whole of a parameter (``step`` 0) or of its gradient, the same on all ranks."""
    made = torch.Generator().manual_seed(10 * step + index)
    return torch.randn(SHAPES[index], generator=made)


def plain(shards: bool) -> list[torch.nn.Parameter]:
    """This rank's parameters: its run of rows, or all."""
    return [torch.nn.Parameter(held(whole(index, 0), shards)) for index in range(len(SHAPES))]


def held(tensor: Tensor, shards: bool) -> Tensor:
    return tensor.chunk(dist.get_world_size())[dist.get_rank()].clone() if shards else tensor.clone()


def give(params: list[torch.nn.Parameter], step: int, shards: bool) -> None:
    for index, param in enumerate(params):
        param.grad = held(whole(index, step), shards)


def config(kind: str, shards: bool) -> DistributedConfig:
    """A user's config; ``later`` uses handles."""
    later = "_later" if kind == "handles" else ""
    return DistributedConfig(
        assign_fn=functions.in_turn,
        gather_fn=getattr(functions, f"gather{later}"),
        redistribute_fn=getattr(functions, f"redistribute{later}"),
        state={"shards": shards},
    )


def differences(made: DistributedConfig, shards: bool, steps: int = 3) -> list[str]:
    """Where three steps with a config end elsewhere than the oracle."""
    params = plain(shards)
    everyone = dist.group.WORLD
    assert everyone is not None
    rows = joined(everyone, {id(param): 0 for param in params})
    oracle = Oracle(params, rows if shards else full, **OPTIONS)
    muon = Muon(params, **OPTIONS, distributed_config=made)
    for step in range(1, steps + 1):
        give(params, step, shards)
        oracle.step()
        muon.step()
    return oracle.differences()


def run_windows(rank: int) -> dict[str, list[str]]:
    """Every window, both kinds of functions, sharded and replicated parameters."""
    found = {}
    for kind, shards in (("plain", True), ("plain", False), ("handles", True)):
        for count, side_by_side in product((0, 1, 2, 5), (True, False)):
            made = replace(config(kind, shards), prefetch_count=count, async_gpu_parallelism=side_by_side)
            found[f"{kind}, {shards=}, {count=}, {side_by_side=}"] = differences(made, shards)
    return found


@pytest.mark.live
def test_own_functions_give_the_single_process_bits_in_every_window() -> None:
    for found in launch(run_windows, 2):
        assert len(found) == 24
        assert {case: wrong for case, wrong in found.items() if wrong} == {}


def run_helper_windows(rank: int) -> dict[str, list[str]]:
    """A helper's packed plan in every window, and its functions called one by one."""
    mesh, found = build_mesh({"fsdp": dist.get_world_size()}), {}
    for count, side_by_side in product((0, 1, 3), (True, False)):
        made = create_processgroup_config(
            fsdp_pg=mesh.get_group("fsdp"), prefetch_count=count, async_gpu_parallelism=side_by_side
        )
        found[f"packed, {count=}, {side_by_side=}"] = differences(made, shards=True)
        found[f"one by one, {count=}, {side_by_side=}"] = differences(replace(made, helper=None), shards=True)
    return found


REPLACED: dict[str, dict[str, Callable]] = {
    "assign": {"assign_fn": functions.in_turn},
    "gather": {"gather_fn": functions.gather},
    "redistribute": {"redistribute_fn": functions.redistribute},
    "assign and gather": {"assign_fn": functions.in_turn, "gather_fn": functions.gather},
    "gather and redistribute": {
        "gather_fn": functions.gather_later,
        "redistribute_fn": functions.redistribute_later,
    },
}


def run_replaced(rank: int) -> dict[str, list[str]]:
    """A helper's config with some of its functions replaced by the user's own."""
    mesh, found = build_mesh({"fsdp": dist.get_world_size()}), {}
    for name, mine in REPLACED.items():
        made = create_devicemesh_config(mesh, ["fsdp"])
        made = replace(made, state={**made.state, "shards": True}, **mine)  # type: ignore[arg-type]
        found[name] = differences(made, shards=True)
    return found


@pytest.mark.live
@pytest.mark.parametrize("run", [run_helper_windows, run_replaced])
def test_a_helpers_functions_and_replacements_give_the_same_bits(run: Callable) -> None:
    for found in launch(run, 2):
        assert {case: wrong for case, wrong in found.items() if wrong} == {}


def run_dtensors(rank: int) -> list[str]:
    """A user's functions for DTensors: uneven shards; gathered and returned as DTensors."""
    mesh = build_mesh({"fsdp": dist.get_world_size()})

    def cut(tensor: Tensor) -> Any:
        return distribute_tensor(tensor, mesh, [Shard(0)])

    params = [torch.nn.Parameter(cut(whole(index, 0))) for index in range(len(SHAPES))]
    oracle = Oracle(params, full, **OPTIONS)
    made = DistributedConfig(
        functions.in_turn, functions.gather_dtensor, functions.redistribute_dtensor, {"mesh": mesh}
    )
    muon = Muon(params, **OPTIONS, distributed_config=made)
    for step in range(1, 4):
        for index, param in enumerate(params):
            param.grad = cut(whole(index, step))
        oracle.step()
        muon.step()
    return oracle.differences()


@pytest.mark.live
def test_own_functions_may_gather_and_return_dtensors() -> None:
    assert launch(run_dtensors, 3) == [[], [], []]


def run_by_hand(rank: int) -> list[bool]:
    """A helper's three functions, called by hand as the design document's pseudocode does."""
    mesh = build_mesh({"fsdp": dist.get_world_size()})
    made = create_processgroup_config(fsdp_pg=mesh.get_group("fsdp"))
    params = plain(shards=True)
    owners = made.assign_fn(list(params), made.state)
    same = []
    for index, param in enumerate(params):
        state = {**made.state, "param_idx": index}
        gathered = made.gather_fn(param.detach(), owners[index], state)
        same.append((gathered is None) == (rank != owners[index]))
        back = made.redistribute_fn(gathered, owners[index], state)
        same.append(torch.equal(back, param.detach().bfloat16()))
    return same


@pytest.mark.live
def test_a_helpers_functions_can_be_called_by_hand() -> None:
    assert all(all(same) for same in launch(run_by_hand, 3))


def error_of(act: Callable[[], Any]) -> tuple[str, str]:
    """The named error that an act ends in."""
    try:
        act()
    except TutorialError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def run_broken(rank: int) -> dict[str, tuple[str, str]]:
    """What a step with each broken function ends in."""
    found, mesh = {}, build_mesh({"fsdp": dist.get_world_size()})
    for name, (which, _) in functions.BROKEN.items():
        made = config("plain", shards=True)
        made.state["mesh"] = mesh
        broken: dict[str, Any] = {which: getattr(functions, name)}
        params = plain(shards=True)
        muon = Muon(params, **OPTIONS, distributed_config=replace(made, **broken))
        give(params, 1, shards=True)
        found[name] = error_of(muon.step)
        dist.barrier()
    return found


@pytest.mark.live
def test_a_broken_function_ends_in_a_named_error_on_every_rank() -> None:
    by_rank = launch(run_broken, 2)
    for name, (which, text) in functions.BROKEN.items():
        for found in by_rank:
            kind, said = found[name]
            assert kind == "ConfigError", (name, said)
            assert said.startswith(f"{which}, for group 0, parameter 0 on rank "), said
            assert text in said, said


def made_with(made: DistributedConfig) -> Muon:
    return Muon(plain(shards=True), **OPTIONS, distributed_config=made)


def run_wrong_assignments(rank: int) -> dict[str, list[tuple[str, str]]]:
    """What each wrong answer ends in when the optimizer is made: with own functions, and with a helper's."""
    mesh, found = build_mesh({"fsdp": dist.get_world_size()}), {}
    configs = (
        config("plain", shards=True),
        create_processgroup_config(fsdp_pg=mesh.get_group("fsdp")),
    )
    for name in functions.WRONG_ASSIGNMENTS:
        mine: Any = getattr(functions, name)
        found[name] = [error_of(partial(made_with, replace(made, assign_fn=mine))) for made in configs]
    return found


@pytest.mark.live
def test_a_wrong_assignment_ends_in_a_named_error_on_every_rank_at_construction() -> None:
    for found in launch(run_wrong_assignments, 2):
        for name, (kinds, text) in functions.WRONG_ASSIGNMENTS.items():
            for kind, said in found[name]:
                assert kind in kinds.split(", "), (name, kind, said)
                assert text in said or "worked on at fsdp 1 to 1" in said, (name, said)


class Failing:
    """A gather that fails at the second parameter."""

    def __call__(self, momentum: Tensor, dst_rank: int, state: functions.State) -> Tensor | None:
        if state["param_idx"] == 1 and dist.get_rank() == 1:
            raise RuntimeError("the cable was pulled")
        return functions.gather(momentum, dst_rank, state)


def run_failing(rank: int) -> None:
    made = replace(config("plain", shards=True), async_gpu_parallelism=False, prefetch_count=0)
    params = plain(shards=True)
    names = [(f"layers.{index}.weight", param) for index, param in enumerate(params)]
    muon = Muon(names, distributed_config=replace(made, gather_fn=Failing()))
    give(params, 1, shards=True)
    muon.step()


@pytest.mark.live
def test_an_error_says_the_function_the_parameter_and_the_rank() -> None:
    with pytest.raises(RankFailedError) as caught:
        launch(run_failing, 2, output="quiet")
    said = str(caught.value)
    assert "gather_fn, for layers.1.weight on rank 1, raised RuntimeError: the cable was pulled" in said
    assert "gather_fn of layers.1.weight" in said


class Diary:
    """What happens on this rank, in order: calls of the user's functions, and Newton–Schulz."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def told(self, name: str) -> Callable:
        inner = getattr(functions, name)

        def call(tensor: Tensor | None, rank: int, state: functions.State) -> Any:
            self.lines.append(f"{name} {state['param_idx']}")
            return inner(tensor, rank, state)

        return call


def run_diary(rank: int, prefetch_count: int, side_by_side: bool) -> list[str]:
    diary, params = Diary(), plain(shards=True)
    made = replace(
        config("plain", shards=True),
        gather_fn=diary.told("gather"),
        redistribute_fn=diary.told("redistribute"),
        prefetch_count=prefetch_count,
        async_gpu_parallelism=side_by_side,
    )
    muon = Muon(params, distributed_config=made)
    give(params, 1, shards=True)
    muon.step()
    return diary.lines


@pytest.mark.live
def test_debug_mode_is_strictly_sequential_and_prefetching_gathers_ahead() -> None:
    sequence = [f"{name} {index}" for index in range(3) for name in ("gather", "redistribute")]
    assert launch(run_diary, 2, args=(0, False)) == [sequence, sequence]
    ahead = launch(run_diary, 2, args=(1, False))
    assert ahead[0] == ahead[1]
    assert ahead[0].index("gather 1") < ahead[0].index("redistribute 0")
    assert ahead[0].index("gather 2") > ahead[0].index("redistribute 0")


def run_debug_labels(rank: int) -> list[str]:
    """What a helper's plan asks for in debug mode, by label."""
    mesh = build_mesh({"fsdp": dist.get_world_size()})
    made = create_processgroup_config(
        fsdp_pg=mesh.get_group("fsdp"), async_gpu_parallelism=False, prefetch_count=0
    )
    params = plain(shards=True)
    names = [(f"layers.{index}.weight", param) for index, param in enumerate(params)]
    muon = Muon(names, distributed_config=made)
    (leg,) = muon._steps()
    assert isinstance(leg.world, LiveWorld)
    labels: list[str] = []
    leg.world.observers.append(lambda request, at: labels.append(str(request.label)))
    give(params, 1, shards=True)
    muon.step()
    return [label for label in labels if "flags" not in label]


@pytest.mark.live
def test_a_helpers_plan_says_in_debug_mode_which_parameter_it_is_at() -> None:
    for labels in launch(run_debug_labels, 2):
        assert labels == [
            said
            for index in range(3)
            for said in (
                f"gather layers.{index}.weight to its owner of bucket {index}",
                f"scatter layers.{index}.weight from its owner of bucket {index}",
            )
        ]
