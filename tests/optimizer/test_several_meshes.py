"""Parameters on several meshes: FSDP2 over tensor parallelism, or AdamW's on another than Muon's."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from muon_tutorial import MuonWithAdamW, launch

from ..configs import functions
from ..configs.setups import error_of


class Net(nn.Module):
    """Tensor parallelism cuts ``up`` and ``down``, but not ``beside``, which lies on the dp mesh alone."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.emb, self.norm, self.head = nn.Embedding(8, 6), nn.LayerNorm(6), nn.Linear(6, 8, bias=False)
        self.up, self.down = nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)
        self.beside = nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.emb(x)
        h = h + self.down(torch.relu(self.up(h)))
        return self.head(self.norm(h + self.beside(h)))


def dp_tp() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def fsdp2_over_tp(seed: int = 0) -> Net:
    mesh, model = dp_tp(), Net(seed)
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return model


def adamws_gradient(rank: int, model: Net, spoilt: str, **muon: Any) -> tuple[str, str]:
    """A rank's error if one gradient of AdamW's is NaN or missing on rank 0."""
    both = MuonWithAdamW.from_model(model, lr=0.1, muon=muon)
    model(torch.arange(8)).sum().backward()
    if rank == 0 and spoilt == "missing":
        model.emb.weight.grad = None
    elif rank == 0:
        model.norm.bias.grad = model.norm.bias * float("nan")
    return error_of(both.step)


def clipped(model: Net, mesh: DeviceMesh) -> tuple[str, str]:
    """A rank's error if it clips gradients where FSDP2 has cut Muon's matrices over dp, and AdamW's head over
    all ranks."""
    fully_shard(model.head, mesh=mesh["dp", "tp"]._flatten("all"))
    fully_shard(model, mesh=mesh["dp"])
    both = MuonWithAdamW.from_model(model, lr=0.1)
    model(torch.arange(8)).sum().backward()
    grads = [param.grad for param in model.parameters() if isinstance(param.grad, DTensor)]
    before = [grad.full_tensor().clone() for grad in grads]
    found = error_of(lambda: both.ready_gradients(1.0))
    assert len(grads) > 3
    assert all(torch.equal(old, grad.full_tensor()) for old, grad in zip(before, grads, strict=True))
    both.ready_gradients()
    both.step()
    return found


def compared(rank: int, differs: str) -> list[str]:
    """The warnings of a first step if tensor-parallel ranks began with another value of one parameter."""
    model = fsdp2_over_tp()
    if differs:
        with torch.no_grad():
            model.get_parameter(differs).add_(rank % 2)
    both = MuonWithAdamW.from_model(model, lr=0.1)
    model(torch.arange(8)).sum().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        both.step()
    return [str(it.message) for it in caught if "not the same" in str(it.message)]


def unreduced(rank: int) -> tuple[str, str, list[str]]:
    """A rank's error if it clips gradients under zero1 over tensor parallelism; types of gradient copies."""
    model, mesh = Net(), dp_tp()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    both = MuonWithAdamW.from_model(model, lr=0.1, strategy="zero1", mesh=mesh)
    for _ in range(2):  # two micro-batches
        model(torch.arange(8)).sum().backward()
    grad = model.up.weight.grad
    assert isinstance(grad, DTensor)
    copies = [copy.deepcopy(grad), pickle.loads(pickle.dumps(grad)), grad.full_tensor(), grad.to_local()]
    found = error_of(lambda: torch.nn.utils.clip_grad_norm_([model.up.weight], 1.0))
    both.step()
    return *found, [type(it).__name__ for it in copies]


SPOILT = {
    "NaN": ("NotFiniteError", "of the rest holds NaN or infinity on 1 of 4 ranks (rank 0)"),
    "missing": ("GradientError", "parameter 0 of the rest is missing on 1 of 4 ranks (rank 0)"),
}


def everything(rank: int) -> dict[str, Any]:
    """All cases in one launch; after each, the ranks can go on together."""
    found: dict[str, Any] = {}
    for spoilt in SPOILT:
        found[f"meshes {spoilt}"] = adamws_gradient(rank, fsdp2_over_tp(), spoilt)
        own = functions.config(False)
        found[f"functions {spoilt}"] = adamws_gradient(rank, Net(), spoilt, distributed_config=own)
    found |= {f"differs {name}": compared(rank, name) for name in ("", "emb.weight", "beside.weight")}
    found["unreduced"] = unreduced(rank)
    found["clipped"] = clipped(Net(), dp_tp())
    return found


Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def results() -> Results:
    return launch(everything, 4, timeout=60)


@pytest.mark.parametrize(
    ("steps", "spoilt"), [("meshes", "NaN"), ("meshes", "missing"), ("functions", "NaN")]
)
def test_all_refuse_a_gradient_of_adamws_that_one_lacks(results: Results, steps: str, spoilt: str) -> None:
    kind, said = SPOILT[spoilt]
    for of_rank in results:
        assert of_rank[f"{steps} {spoilt}"][0] == kind
        assert said in of_rank[f"{steps} {spoilt}"][1]


def test_clipping_is_refused_where_the_norm_would_miss_pieces(results: Results) -> None:
    for of_rank in results:
        kind, said = of_rank["clipped"]
        assert kind == "UsageError"
        assert "ready_gradients() cannot clip gradients on several meshes" in said


@pytest.mark.parametrize("name", ["", "emb.weight", "beside.weight"])
def test_what_differs_along_an_axis_that_its_mesh_lacks_is_named(results: Results, name: str) -> None:
    """``emb`` is AdamW's, and ``beside`` Muon's; both lie on the dp mesh, and tp ranks should hold copies."""
    for of_rank in results:
        said = "; ".join(of_rank[f"differs {name}"])
        assert said.startswith(name and f"{name} is not the same on all ranks (ranks 0 and 1 differ)")
        assert bool(said) == bool(name) == ("a DTensor whose mesh has no tp" in said)


def test_dtensors_not_averaged_yet_refuse_clipping_and_copies_are_ordinary(results: Results) -> None:
    for of_rank in results:
        kind, said, copies = of_rank["unreduced"]
        assert (kind, "call optimizer.ready_gradients(max_norm)" in said) == ("GradientError", True)
        assert copies == ["DTensor", "DTensor", "Tensor", "Tensor"]
