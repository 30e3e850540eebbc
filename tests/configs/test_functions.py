"""A user's own functions give exactly the single process's parameters, or a named error on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from muon_tutorial import DistributedConfig, LiveWorld, Muon, build_mesh, launch
from muon_tutorial.callbacks.create_configs import create_devicemesh_config, create_processgroup_config
from muon_tutorial.errors import RankFailedError

from . import functions
from .functions import config
from .setups import error_of

SHAPES = ((8, 5), (6, 9), (12, 12))
OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}


def whole(index: int, step: int) -> Tensor:
    """The whole of a parameter (``step`` 0) or of its gradient, the same on all ranks."""
    made = torch.Generator().manual_seed(10 * step + index)
    return torch.randn(SHAPES[index], generator=made)


def held(tensor: Tensor, cut: bool) -> Tensor:
    """The whole tensor, or this rank's run of rows."""
    return tensor.chunk(dist.get_world_size())[dist.get_rank()].clone() if cut else tensor.clone()


def own_params(cut: bool) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(held(whole(index, 0), cut)) for index in range(len(SHAPES))]


def give(params: list[torch.nn.Parameter], step: int, cut: bool) -> None:
    for index, param in enumerate(params):
        param.grad = held(whole(index, step), cut)


@cache
def by_stock() -> list[Tensor]:
    """The whole parameters after three steps of ``torch.optim.Muon``. Callers must not write to them."""
    params = own_params(cut=False)
    stock = torch.optim.Muon(params, **OPTIONS)
    for step in range(1, 4):
        give(params, step, cut=False)
        stock.step()
    return [param.detach() for param in params]


def differences(made: DistributedConfig, cut: bool) -> list[int]:
    """The parameters whose part on this rank differs from the single process's after the steps."""
    params = own_params(cut)
    muon = Muon(params, **OPTIONS, distributed_config=made)
    for step in range(1, 4):
        give(params, step, cut)
        muon.step()
    ends = enumerate(zip(params, by_stock(), strict=True))
    return [index for index, (param, end) in ends if not torch.equal(param, held(end, cut))]


REPLACED: dict[str, dict[str, Callable]] = {
    "assign": {"assign_fn": functions.in_turn},
    "gather": {"gather_fn": functions.gather},
    "redistribute": {"redistribute_fn": functions.redistribute},
    "assign and gather": {"assign_fn": functions.in_turn, "gather_fn": functions.gather},
    "both later": {"gather_fn": functions.gather_later, "redistribute_fn": functions.redistribute_later},
}


def right_configs() -> Iterator[tuple[str, DistributedConfig, bool]]:
    """Yield a name, a config, and whether parameters are cut. A config has functions of its own (with or
    without handles), or a helper's: run as a packed plan, called one by one, or partly replaced.
    """
    mesh = build_mesh({"fsdp": dist.get_world_size()})
    for later, shards in (("", True), ("", False), ("_later", True)):
        for count, side_by_side in product((0, 1, 2, 5), (True, False)):
            made = replace(config(shards, later), prefetch_count=count, async_gpu_parallelism=side_by_side)
            yield f"own{later}, {shards=}, {count=}, {side_by_side=}", made, shards
    for count, side_by_side in product((0, 1, 3), (True, False)):
        own: dict[str, Any] = {"prefetch_count": count, "async_gpu_parallelism": side_by_side}
        made = create_processgroup_config(fsdp_pg=mesh.get_group("fsdp"), **own)
        yield f"packed, {count=}, {side_by_side=}", made, True
        yield f"one by one, {count=}, {side_by_side=}", replace(made, helper=None), True
    for name, mine in REPLACED.items():
        made = create_devicemesh_config(mesh, ["fsdp"])
        yield name, replace(made, state={**made.state, "shards": True}, **mine), True  # type: ignore[arg-type]


def run_right(rank: int) -> dict[str, list[int]]:
    return {name: differences(made, cut) for name, made, cut in right_configs()}


def which(base: str) -> str:
    return f"{base.removesuffix('_later')}_fn"


def run_broken(rank: int) -> dict[str, tuple[str, str]]:
    """The error of a step with each broken function."""
    found, mesh = {}, build_mesh({"fsdp": dist.get_world_size()})
    for name, (base, alter, _) in functions.BROKEN.items():
        made = config(True)
        made.state["mesh"] = mesh
        broken: dict[str, Any] = {which(base): functions.altered(base, alter)}
        params = own_params(True)
        muon = Muon(params, **OPTIONS, distributed_config=replace(made, **broken))
        give(params, 1, True)
        found[name] = error_of(muon.step)
        dist.barrier()
    return found


def run_wrong_assignments(rank: int) -> dict[str, list[tuple[str, str]]]:
    """For each wrong assignment, the errors of two optimizers: with own functions, and with a helper."""
    mesh, found = build_mesh({"fsdp": dist.get_world_size()}), {}
    configs = config(True), create_processgroup_config(fsdp_pg=mesh.get_group("fsdp"))
    for name, (mine, _, _) in functions.WRONG_ASSIGNMENTS.items():
        wrong = [replace(made, assign_fn=mine) for made in configs]
        found[name] = [error_of(partial(Muon, own_params(True), distributed_config=made)) for made in wrong]
    return found


def run_rank_outside(rank: int) -> tuple[str, str]:
    """The error if ``assign_fn`` makes rank 0 the owner of parameters that only rank 1 has."""
    groups = [dist.new_group([one]) for one in range(2)]
    made = replace(config(False), assign_fn=lambda params, _: functions.all_to(0, params))
    made.state["agree_group"] = groups[rank]
    return error_of(partial(Muon, own_params(False), distributed_config=made))


def named(params: list[torch.nn.Parameter]) -> list[tuple[str, torch.nn.Parameter]]:
    return [(f"layers.{index}.weight", param) for index, param in enumerate(params)]


def run_failing(rank: int) -> None:
    """Take a step in which rank 1's gather of the second parameter fails."""

    def failing(momentum: Tensor, dst_rank: int, state: functions.State) -> Tensor | None:
        if state["param_idx"] == 1 and rank == 1:
            raise RuntimeError("the cable was pulled")
        return functions.gather(momentum, dst_rank, state)

    made = replace(config(True), async_gpu_parallelism=False, prefetch_count=0, gather_fn=failing)
    params = own_params(True)
    muon = Muon(named(params), distributed_config=made)
    give(params, 1, True)
    muon.step()


def test_an_error_says_the_function_the_parameter_and_the_rank() -> None:
    with pytest.raises(RankFailedError) as caught:
        launch(run_failing, 2, output="quiet")
    said = str(caught.value)
    assert "gather_fn, for layers.1.weight on rank 1, raised RuntimeError: the cable was pulled" in said
    assert "gather_fn of layers.1.weight" in said


def run_diary(rank: int, prefetch_count: int) -> list[str]:
    """The calls of the user's functions on this rank, in order."""
    lines: list[str] = []

    def told(name: str) -> Callable:
        def call(tensor: Tensor | None, rank: int, state: functions.State) -> Any:
            lines.append(f"{name} {state['param_idx']}")
            return getattr(functions, name)(tensor, rank, state)

        return call

    made = replace(config(True), gather_fn=told("gather"), redistribute_fn=told("redistribute"))
    made = replace(made, prefetch_count=prefetch_count, async_gpu_parallelism=False)
    params = own_params(True)
    muon = Muon(params, distributed_config=made)
    give(params, 1, True)
    muon.step()
    return lines


def run_debug_labels(rank: int) -> list[str]:
    """The labels of a helper's requests in debug mode."""
    mesh = build_mesh({"fsdp": dist.get_world_size()})
    one_by_one: dict[str, Any] = {"async_gpu_parallelism": False, "prefetch_count": 0}
    made = create_processgroup_config(fsdp_pg=mesh.get_group("fsdp"), **one_by_one)
    params = own_params(True)
    muon = Muon(named(params), distributed_config=made)
    (leg,) = muon.steps
    assert isinstance(leg.world, LiveWorld)
    labels: list[str] = []
    leg.world.observers.append(lambda request, at: labels.append(str(request.label)))
    give(params, 1, True)
    muon.step()
    return [label for label in labels if "flags" not in label]


def everything(rank: int) -> dict[str, Any]:
    """All cases of two ranks in one launch."""
    cases = run_right, run_broken, run_wrong_assignments, run_rank_outside, run_debug_labels
    found = {case.__name__: case(rank) for case in cases}
    return found | {"debug": run_diary(rank, 0), "ahead": run_diary(rank, 1)}


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return launch(everything, 2, timeout=60)


def test_own_and_helpers_functions_give_the_single_process_bits(results: list[dict[str, Any]]) -> None:
    for found in (of_rank["run_right"] for of_rank in results):
        assert len(found) == 24 + 12 + 5
        assert {case: wrong for case, wrong in found.items() if wrong} == {}


def test_a_broken_function_ends_in_a_named_error_on_every_rank(results: list[dict[str, Any]]) -> None:
    by_rank = [of_rank["run_broken"] for of_rank in results]
    for name, (base, _, text) in functions.BROKEN.items():
        for found in by_rank:
            kind, said = found[name]
            assert kind == "ConfigError", (name, said)
            assert said.startswith(f"{which(base)}, for group 0, parameter 0 on rank "), said
            assert text in said, said


def test_a_wrong_assignment_is_refused_on_every_rank_when_made(results: list[dict[str, Any]]) -> None:
    for found in (of_rank["run_wrong_assignments"] for of_rank in results):
        for name, (_, kinds, text) in functions.WRONG_ASSIGNMENTS.items():
            for kind, said in found[name]:
                assert kind in kinds.split(", "), (name, kind, said)
                assert text in said or "worked on by fsdp positions 1 to 1" in said, (name, said)


def test_an_owner_outside_the_ranks_that_share_a_parameter_is_refused(results: list[dict[str, Any]]) -> None:
    said = "assign_fn gives parameter 0 to rank 0; its ranks are [1]"
    assert [of_rank["run_rank_outside"] for of_rank in results] == [("nothing", ""), ("ConfigError", said)]


def test_debug_mode_is_sequential_and_prefetching_gathers_ahead(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        in_turn = [f"{name} {index}" for index in range(3) for name in ("gather", "redistribute")]
        assert of_rank["debug"] == in_turn
        ahead = of_rank["ahead"]
        assert ahead.index("gather 1") < ahead.index("redistribute 0")
        assert ahead.index("gather 2") > ahead.index("redistribute 0")
    assert results[0]["ahead"] == results[1]["ahead"]


def test_a_helpers_plan_says_in_debug_mode_which_parameter_it_is_at(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        labels = of_rank["run_debug_labels"]
        steps = range(3)
        assert labels[::2] == [f"gather layers.{i}.weight to its owner of bucket {i}" for i in steps]
        assert labels[1::2] == [f"scatter layers.{i}.weight from its owner of bucket {i}" for i in steps]
