"""How parameters are sharded is read from placements of real DTensors, and from marks on hand-cut tensors."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as TorchShard

from muon_tutorial import Coordinate, Grid, LocalWorld, Muon, Shard, build_mesh, launch
from muon_tutorial.errors import GradientError, StrategyError, TutorialError, UsageError
from muon_tutorial.parameters.describe_matrices import describe_matrices
from muon_tutorial.parameters.tensor_parallel import TpDim
from muon_tutorial.plan.matrix import Matrix

Groups = list[dict[str, Any]]
DP2_TP2 = Grid.of(dp=2, tp=2)


def weight(*shape: int, **marks: object) -> nn.Parameter:
    """A parameter with the attributes that are set by frameworks with their own tensor parallelism."""
    param = nn.Parameter(torch.ones(shape))
    for name, value in marks.items():
        setattr(param, name, value)
    return param


def described(param: nn.Parameter, at: Coordinate, tp_dim: Any = 0) -> Matrix:
    (matrix,) = describe_matrices([{"params": [param]}], at, tp_dim)
    return matrix


# Plain parameters


@pytest.mark.parametrize(
    ("tp_dim", "marks", "dim", "shape"),
    [
        (0, {}, 0, (6, 4)),
        (1, {}, 1, (3, 8)),
        (None, {}, None, (3, 4)),
        ({0: 1}, {}, 1, (3, 8)),
        ({0: None}, {}, None, (3, 4)),
        (lambda index, param: param.ndim - 1 + index, {}, 1, (3, 8)),
        (lambda index, param: None, {}, None, (3, 4)),
        (0, {"partition_dim": 1}, 1, (3, 8)),
        (1, {"partition_dim": 0}, 0, (6, 4)),
        (0, {"partition_dim": -1}, None, (3, 4)),
        (0, {"partition_dim": None}, 0, (6, 4)),
    ],
)
def test_its_partition_dim_or_else_tp_dim_says_how_a_plain_parameter_was_cut(
    tp_dim: Any, marks: dict[str, Any], dim: int | None, shape: tuple[int, int]
) -> None:
    matrix = described(weight(3, 4, **marks), Grid.of(tp=2).at(1), tp_dim)
    assert (matrix.cuts, matrix.shape) == (() if dim is None else (("tp", Shard(dim)),), shape)


def test_a_mapping_and_a_function_go_by_the_parameters_place_in_all_groups() -> None:
    groups = [{"params": [weight(2, 2), weight(2, 2)]}, {"params": [weight(2, 2)]}]
    for tp_dim in ({0: 0, 1: None, 2: 1}, lambda index, param: (0, None, 1)[index]):
        found = describe_matrices(groups, Grid.of(tp=2).at(0), tp_dim)
        assert [matrix.shape for matrix in found] == [(4, 2), (2, 2), (2, 4)]
        assert [(matrix.index, matrix.group) for matrix in found] == [(0, 0), (1, 0), (2, 1)]


@pytest.mark.parametrize("tp_dim", [{0: 0, 1: 1, 2: 0}, lambda index, param: (0, 1, 0)[index]])
def test_a_parameter_keeps_its_tp_dim_when_others_leave_or_come_back(tp_dim: Any) -> None:
    """A new parameter uses the entry of the one it replaces; if others have moved, it needs its own entry."""
    first, second, third, new = (weight(4, 4) for _ in range(4))
    mesh = LocalWorld(Grid.of(tp=2)).mesh(0)
    muon = Muon([first, second, third], strategy="owner", mesh=mesh, tp_dim=tp_dim)

    def dims(*params: nn.Parameter) -> list[int]:
        muon.param_groups[0]["params"] = [*params]
        matrices = {entry.matrix for bucket in muon.plans[0].buckets for entry in bucket.entries}
        return [matrix.cuts[0][1].dim for matrix in sorted(matrices, key=lambda matrix: matrix.index)]

    assert dims(first, second, third) == [0, 1, 0]
    assert dims(second, third) == [1, 0]
    assert dims(third, second, first) == [0, 1, 0]
    assert dims(first, new, third) == [0, 1, 0]
    with pytest.raises((StrategyError, IndexError)):
        dims(new, third, weight(4, 4))


@pytest.mark.parametrize("kind", [tuple, list])
def test_partition_sizes_say_how_uneven_a_hand_made_cut_is(kind: Callable[[Any], Any]) -> None:
    sizes = kind((2, 0, 3))
    for position in range(3):
        at = Grid.of(tp=3).at(position)
        matrix = described(weight(4, sizes[position], partition_dim=1, partition_sizes=sizes), at)
        assert matrix.shape == (4, 5)
        assert matrix.box(at).shape == (4, sizes[position])
        assert matrix.box(at).offset[1] == (0, 2, 2)[position]


@pytest.mark.parametrize("sizes", [(3, 2), (2, 2, 1), (5,)], ids=str)
def test_partition_sizes_that_do_not_fit_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(
        StrategyError, match=r"group 0, parameter 0: partition_sizes .* 2 indices .* tp=0 of 2"
    ):
        described(weight(2, 4, partition_dim=0, partition_sizes=sizes), Grid.of(tp=2).at(0))
    with pytest.raises(StrategyError, match=r"partition_sizes .* 2 indices .* tp=0 of 1"):  # dp alone
        described(weight(2, 4, partition_dim=0, partition_sizes=sizes), Grid.of(dp=2).at(0))


def test_without_tensor_parallelism_a_plain_parameter_is_whole() -> None:
    at = Grid.of(dp=2).at(1)
    assert described(weight(3, 4, partition_dim=1, partition_sizes=(4,)), at) == Matrix(
        0, "group 0, parameter 0", (3, 4)
    )


def test_dtypes_are_the_parameters_and_names_the_users_or_say_where_the_parameter_is() -> None:
    bf16 = described(nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16)), Grid.of().at(0))
    assert (bf16.dtype, bf16.grad_dtype) == (torch.bfloat16, torch.bfloat16)
    named = {"params": [weight(2, 2)], "param_names": ["blocks.0.up"]}
    groups: Groups = [named, {"params": [weight(3, 2), weight(3, 2)]}]
    found = describe_matrices(groups, Grid.of().at(0), None)
    assert [matrix.name for matrix in found] == [
        "blocks.0.up",
        "group 1, parameter 0",
        "group 1, parameter 1",
    ]


def test_parts_of_a_parameter_are_matrices_of_their_own() -> None:
    groups: Groups = [
        {"params": [weight(6, 4), weight(3, 2)], "parts": (2, 4)},
        {"params": [weight(2, 3, 4)], "parts": "stack"},
        {"params": [weight(2, 3, 4)], "parts": "flatten"},
        {"params": [weight(6, 4)], "parts": 3},
    ]
    with pytest.raises(UsageError, match=r"parts=\(2, 4\) does not split the 3 rows"):
        describe_matrices(groups, Grid.of().at(0), None)
    stored: Groups = [{"params": [weight(4, 6)], "parts": (2, 2), "transposed": True}]
    with pytest.raises(UsageError, match=r"parts=\(2, 2\) does not split the 6 columns"):
        describe_matrices(stored, Grid.of().at(0), None)
    groups[0]["params"].pop()
    found = describe_matrices(groups, Grid.of().at(0), None)
    assert [matrix.index for matrix in found] == list(range(7))
    assert [matrix.param for matrix in found] == [0, 0, 1, 1, 2, 3, 3]
    assert [matrix.sides for matrix in found] == [(2, 4), (4, 4), (3, 4), (3, 4), (2, 12), (3, 4), (3, 4)]
    assert found[1].name == "group 0, parameter 0[part 1]"


@pytest.mark.parametrize("dim", [2, 3])
def test_a_cut_within_the_columns_of_a_flattened_parameter_is_refused(dim: int) -> None:
    """The pieces would not be rectangles of rows and columns."""
    groups: Groups = [{"params": [weight(4, 3, 2, 2)], "parts": "flatten"}]
    with pytest.raises(StrategyError, match=f"parameter 0 is cut along dimension {dim} by 'tp'"):
        describe_matrices(groups, Grid.of(tp=2).at(0), dim)
    stacked: Groups = [{"params": [weight(4, 3, 2, 2)], "parts": "stack"}]
    assert describe_matrices(stacked, Grid.of(tp=2).at(0), dim)[0].sides in ((4, 2), (2, 4))


# DTensors on real ranks


def numbered(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


def on_one_of_four(rank: int) -> None:
    mesh, flat = build_mesh(DP2_TP2), build_mesh({"dp": 1, "tp": 4})
    unnamed, module = init_device_mesh("cpu", (2, 2)), nn.Linear(4, 6, bias=False)
    fully_shard(module, mesh=mesh["dp"])
    made = {
        "rows": nn.Parameter(distribute_tensor(numbered(4, 3), mesh["tp"], [TorchShard(0)])),
        "fsdp2": module.weight,
        "unnamed": nn.Parameter(distribute_tensor(numbered(4, 4), unnamed, [TorchShard(0)] * 2)),
        "partial": nn.Parameter(DTensor.from_local(numbered(4, 4), mesh["tp"], [Partial()])),
        "part": weight(2, 4, partition_dim=0),
    }
    refused = [
        (mesh, "rows, fsdp2", "is sharded along 'dp': strategy 'zero1'"),
        (flat, "rows", "is cut over 2 ranks along 'tp', which has 4 on the optimizer's mesh"),
        (mesh, "unnamed", "lies on a mesh without axis names"),
        (mesh, "partial", "is P(sum) along 'tp': reduce it before the step"),
        (mesh["dp"], "part", "has partition_dim=0, but the optimizer's mesh (dp=2) leaves out the tp of the"),
    ]
    for on, listed, said in refused:
        names = listed.split(", ")
        with pytest.raises(StrategyError, match=re.escape(f"{names[-1]} {said}")):
            Muon([(name, made[name]) for name in names], strategy="zero1", mesh=on)
    check_partial_gradient(mesh)
    turned = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    cut = nn.Parameter(distribute_tensor(numbered(4, 4), turned, [TorchShard(1), TorchShard(0)]))
    with pytest.raises(
        TutorialError,
        match=r"cut over 2 ranks along '.p', .* position is . on the parameter's mesh and . on the",
    ):
        Muon([cut], strategy="owner", mesh=mesh)


def check_partial_gradient(mesh: DeviceMesh) -> None:
    """A replicated weight meets a sharded input: each tp rank's gradient is its own share of the sum."""
    tp = mesh["tp"]
    param = nn.Parameter(distribute_tensor(numbered(4, 3), tp, [Replicate()]))
    muon = Muon([param], strategy="zero1", mesh=mesh)
    x = distribute_tensor(numbered(6, 3), tp, [TorchShard(0)])
    (x @ param.T).sum().backward()
    assert isinstance(param.grad, DTensor)
    assert param.grad.placements[0].is_partial()
    said = "shape (4, 3) has placements (Partial(sum),), but the parameter has (Replicate(),)"
    with pytest.raises(GradientError, match=re.escape(said)):
        muon.step()
    param.grad = param.grad.redistribute(placements=[Replicate()])
    muon.step()


def test_dtensors_that_a_strategy_cannot_step_are_refused_by_name() -> None:
    """``configs/table.py`` has those that a strategy steps: even, uneven, empty and strided shards."""
    launch(on_one_of_four, 4)


@pytest.mark.parametrize(
    ("tp_dim", "says"),
    [
        ({0: 1}, "tp_dim has no entry for parameter 1"),
        (-1, "parameter 0 has dimensions 0 to 1, not -1"),
        (2, "parameter 0 has dimensions 0 to 1, not 2"),
    ],
)
def test_a_tp_dim_that_fits_no_dimension_or_lacks_a_parameter_is_refused(tp_dim: TpDim, says: str) -> None:
    with pytest.raises(StrategyError, match=says):
        describe_matrices([{"params": [weight(4, 4), weight(4, 4)]}], Grid.of(tp=2).at(0), tp_dim)
