"""The norm for clipping counts every element once, for any of torch's cuts."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from muon_tutorial import Muon, MuonWithAdamW, build_mesh, create_processgroup_config, launch

from ..configs import functions
from ..configs.setups import error_of

CASES = (
    *("FSDP2, a mesh without names", "FSDP2", "TP", "FSDP2 and TP", "HSDP", "plain among DTensors"),
    *("HSDP, the head under FSDP2", "FSDP2, the head under HSDP"),
)


def laid_out(case: str, dtype: torch.dtype) -> nn.Sequential:
    """Two hidden matrices for Muon; biases and a head, which another optimizer steps."""
    torch.manual_seed(0)
    parts = {"a": nn.Linear(16, 32), "b": nn.Linear(32, 16), "head": nn.Linear(16, 24, bias=False)}
    model = nn.Sequential(OrderedDict[str, nn.Module](parts)).to(dtype)
    tensor_parallel = {"a": ColwiseParallel(), "b": RowwiseParallel(), "head": ColwiseParallel()}
    if case == "FSDP2, a mesh without names":
        fully_shard(model)
    elif case == "TP":
        parallelize_module(model, build_mesh({"tp": 4})["tp"], tensor_parallel)
    elif case == "FSDP2 and TP":
        mesh = build_mesh({"fsdp": 2, "tp": 2})
        parallelize_module(model, mesh["tp"], tensor_parallel)
        fully_shard(model, mesh=mesh["fsdp"])
    elif case == "HSDP":
        fully_shard(model, mesh=build_mesh({"dp": 2, "fsdp": 2}))
    elif "head" in case:
        meshes = build_mesh({"dp": 2, "fsdp": 2}), build_mesh({"all": 4})
        hidden, beside = meshes if case.startswith("HSDP") else meshes[::-1]
        fully_shard(model[2], mesh=beside)
        fully_shard(model, mesh=hidden)
    else:
        fully_shard(model if case == "FSDP2" else model[0], mesh=build_mesh({"fsdp": 4}))
    return model


def norms(rank: int) -> list[tuple[str, float, float]]:
    """For each case, the norm that was used, and the norm of the whole gradients."""
    found = []
    for case in CASES:
        for dtype in (torch.float32, torch.bfloat16):
            named = list(laid_out(case, dtype).named_parameters())
            with torch.no_grad():
                for number, (_, param) in enumerate(named, start=1):
                    param.grad = torch.zeros_like(param).copy_(param * number)
            grads = [param.grad for _, param in named if param.grad is not None]
            wholes = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]
            due = sum(float(whole.double().square().sum()) for whole in wholes) ** 0.5
            hidden = [param for name, param in named if name in ("a.weight", "b.weight")]
            rest = [param for name, param in named if name not in ("a.weight", "b.weight")]
            norm = Muon(hidden).ready_gradients(1.0, rest=rest)
            assert norm is not None
            found.append((case, float(norm), due))
    return found


def beside_cut_by_hand(rank: int) -> dict[str, tuple[str, str, int]]:
    """Each case's error, and how often two steps warn, beside plain matrices whose rows ranks have cut."""
    mesh = build_mesh({"dp": 1, "tp": 2})
    fsdp = {"distributed_config": create_processgroup_config(fsdp_pg=mesh.get_group("tp"))}
    own, tp = {"distributed_config": functions.config(True)}, {"strategy": "zero1", "mesh": mesh}
    cases: list[tuple[str, dict[str, Any], int | None]] = [
        *(("fsdp", fsdp, None), ("functions", own, None), ("tp", tp, None)),
        *(("tp, cut", tp, 0), ("tp, whole", tp, -1)),
    ]
    found = {}
    for case, options, dim in cases:
        weight, beside = nn.Parameter(torch.ones(2, 4)), nn.Parameter(torch.ones(3))
        beside.partition_dim = dim  # type: ignore[attr-defined]
        muon = Muon([("weight", weight)], **options)
        both = MuonWithAdamW(muon, torch.optim.AdamW([("beside", beside)]))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                weight.grad, beside.grad = torch.ones(2, 4), torch.ones(3)
                heard = error_of(partial(both.ready_gradients, 1.0))
                both.step()
        found[case] = *heard, len([it for it in caught if "copies along tp" in str(it.message)])
    return found


def cut_by_hand(rank: int) -> dict[str, tuple[str, Tensor]]:
    """Each strategy's error if a rank clips its rows of a matrix by their own norm, and the rows after a step
    that clips by the whole norm."""
    mesh, found = build_mesh({"dp": 2, "tp": 2}), {}
    for strategy in ("owner", "round_robin", "replicated", "zero1"):
        weight = nn.Parameter(torch.eye(4).chunk(2)[rank % 2].clone())
        muon = Muon([("weight", weight)], strategy=strategy, mesh=mesh)
        (weight * (1.0 + rank % 2)).sum().backward()
        assert weight.grad is not None
        dist.all_reduce(weight.grad, group=mesh.get_group("dp"))
        weight.grad /= 2
        kind, said = error_of(partial(torch.nn.utils.clip_grad_norm_, [weight], 1.0))
        muon.ready_gradients(1.0)
        muon.step()
        found[strategy] = f"{kind}: {said}", weight.detach().clone()
    return found


def stage_cut_by_hand(rank: int) -> str:
    """A pipeline stage's error if it clips by the whole model's norm, which its own Muon cannot know."""
    weight = nn.Parameter(torch.eye(4).chunk(2)[rank % 2].clone())
    mesh = build_mesh({"pp": 2, "tp": 2})
    Muon([("weight", weight)], strategy="owner", mesh=mesh["tp"])
    (weight * (1.0 + rank)).sum().backward()
    assert weight.grad is not None
    square = torch.nn.utils.get_total_norm([weight.grad]) ** 2
    dist.all_reduce(square)
    return error_of(partial(torch.nn.utils.clip_grads_with_norm_, [weight], 1.0, square.sqrt()))[0]


def test_a_stage_may_clip_by_the_norm_of_all_stages() -> None:
    assert launch(stage_cut_by_hand, 4) == ["nothing"] * 4


def test_rows_cut_by_hand_are_not_clipped_by_their_own_norm() -> None:
    whole = nn.Parameter(torch.eye(4))
    whole.grad = torch.tensor([1.0, 1.0, 2.0, 2.0])[:, None].repeat(1, 4)
    torch.nn.utils.clip_grad_norm_([whole], 1.0)
    torch.optim.Muon([whole]).step()
    for rank, found in enumerate(launch(cut_by_hand, 4)):
        for strategy, (said, held) in found.items():
            assert said.startswith("GradientError: this gradient is this rank's own: clipping"), strategy
            torch.testing.assert_close(held, whole.detach().chunk(2)[rank % 2], msg=strategy)


def test_a_norm_with_plain_parameters_beside_matrices_cut_by_hand_is_refused_or_warned_of() -> None:
    for found in launch(beside_cut_by_hand, 2):
        for case in ("fsdp", "functions"):
            kind, said, warned = found.pop(case)
            assert (kind, warned) == ("UsageError", 0)
            assert "for plain shards, on each rank, and add up the squares over the ranks" in said
        assert found == {name: ("nothing", "", int(name == "tp")) for name in ("tp", "tp, cut", "tp, whole")}


def test_the_norm_is_that_of_the_whole_gradients() -> None:
    for by_rank in launch(norms, 4):
        for case, norm, due in by_rank:
            assert norm == pytest.approx(due, rel=1e-6), case
