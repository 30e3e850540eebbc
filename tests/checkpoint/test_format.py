"""The contents of a checkpoint, its other readers, and refusals of models that do not fit."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.fsdp import fully_shard

from muon_tutorial import Grid, LocalWorld, Muon, MuonWithAdamW, build_mesh, launch, split_parameters, zero1
from muon_tutorial.checkpoint import load_checkpoint, save_checkpoint
from muon_tutorial.errors import CheckpointError

from ..configs.setups import error_of, full
from . import models
from .models import Pair, Small, assert_same_bits, fresh


class Parts(nn.Module):
    """Parameters of many kinds: a matrix, a fused matrix, experts, a convolution, an embedding, a norm."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(seed)
        shapes = {"matrix": (6, 5), "fused": (9, 4), "experts": (3, 4, 5), "conv": (4, 3, 2, 2), "norm": (5,)}
        shapes["in_out"] = (4, 9)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=made).to(dtype)))
        self.register_buffer("seen", torch.zeros(2))


def pair_of(model: nn.Module, lr: float | Tensor = 0.02, **settings: Any) -> MuonWithAdamW:
    params = dict(model.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [("matrix", params["matrix"])]},
        {"params": [("fused", params["fused"])], "parts": (2, 3, 4)},
        {"params": [("experts", params["experts"])], "parts": "stack"},
        {"params": [("conv", params["conv"])], "parts": "flatten"},
        {"params": [("in_out", params["in_out"])], "parts": (2, 3, 4), "transposed": True},
    ]
    adamw = torch.optim.AdamW([("norm", params["norm"])], lr=0.01)
    return MuonWithAdamW(Muon(groups, lr=lr, **settings), adamw)


def train(model: nn.Module, both: MuonWithAdamW, steps: range) -> None:
    for step in steps:
        made = torch.Generator().manual_seed(step)
        for param in model.parameters():
            param.grad = (torch.randint(-31, 32, param.shape, generator=made) * 2.0**-6).to(param.dtype)
        both.step()


def trained(steps: int = 2, **settings: Any) -> Pair:
    model = Parts(seed=1)
    both = pair_of(model, **settings)
    train(model, both, range(steps))
    return model, both


def loaded(folder: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> Pair:
    model = Parts(seed=9, dtype=dtype)
    both = pair_of(model, **settings)
    load_checkpoint(folder, model, both)
    return model, both


def assert_go_on_alike(pair: Pair, other: Pair, steps: range) -> None:
    """Assert that both pairs end with the same bits after the same steps."""
    for model, both in (pair, other):
        train(model, both, steps)
    assert_same_bits(pair[0], other[0])


def test_a_lone_process_saves_loads_and_goes_on(tmp_path: Path) -> None:
    model, both = trained()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_checkpoint(tmp_path / "a", model, both, extra={"step": 2, "text": ["any", ("thing",)]})
        other = Parts(seed=9)
        its = pair_of(other, lr=0.5)
        assert load_checkpoint(tmp_path / "a", other, its) == {"step": 2, "text": ["any", ("thing",)]}
    assert its.param_groups[0]["lr"] == 0.02
    assert its.param_groups[1]["parts"] == (2, 3, 4)
    assert its.param_groups[4]["transposed"]
    assert_go_on_alike((model, both), (other, its), range(2, 4))


def test_an_optimizer_that_never_stepped_can_be_saved(tmp_path: Path) -> None:
    model, both = trained(steps=0)
    save_checkpoint(tmp_path / "a", model, both)
    other, its = trained()
    assert load_checkpoint(tmp_path / "a", other, its) == {}  # and the previous state of ``its`` is gone
    assert_go_on_alike((model, both), (other, its), range(2))


def test_momentum_keeps_its_precision(tmp_path: Path) -> None:
    model = Parts(seed=1, dtype=torch.bfloat16)
    both = pair_of(model)
    precise = torch.full((6, 5), 1 / 3)
    both.muon.state[model.get_parameter("matrix")]["momentum_buffer"] = precise
    save_checkpoint(tmp_path / "a", model, both)
    other, its = loaded(tmp_path / "a", torch.bfloat16)
    assert torch.equal(its.muon.state[other.get_parameter("matrix")]["momentum_buffer"], precise)


def test_a_tensor_learning_rate_and_a_scheduler_go_on(tmp_path: Path) -> None:
    model, both = trained(lr=torch.tensor(0.02))
    scheduler = torch.optim.lr_scheduler.StepLR(both, step_size=1, gamma=0.5)
    train(model, both, range(1))
    scheduler.step()
    save_checkpoint(tmp_path / "a", model, both, extra={"scheduler": scheduler.state_dict()})
    other = Parts(seed=2)
    its = pair_of(other, lr=torch.tensor(0.7))
    again = torch.optim.lr_scheduler.StepLR(its, step_size=1, gamma=0.5)
    again.load_state_dict(load_checkpoint(tmp_path / "a", other, its)["scheduler"])
    for pair, plan in (((model, both), scheduler), ((other, its), again)):
        train(*pair, range(1))
        plan.step()
    assert_same_bits(model, other)
    assert isinstance(its.param_groups[0]["lr"], Tensor)
    assert [float(group["lr"]) for group in its.param_groups] == [float(g["lr"]) for g in both.param_groups]


def test_muon_alone_and_adamw_alone_are_taken(tmp_path: Path) -> None:
    for kind in (Muon, torch.optim.AdamW):
        ours, theirs = nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)
        one, other = (kind(model.named_parameters(), lr=0.1) for model in (ours, theirs))
        ours.weight.grad = torch.ones(2, 3)
        one.step()
        save_checkpoint(tmp_path / kind.__name__, ours, one)
        load_checkpoint(tmp_path / kind.__name__, theirs, other)
        for model, optimizer in ((ours, one), (theirs, other)):
            model.weight.grad = torch.full((2, 3), 0.5)
            optimizer.step()
        assert_same_bits(ours, theirs)


def test_a_tied_parameter_is_saved_once_and_stays_tied(tmp_path: Path) -> None:
    def tied(seed: int) -> tuple[nn.Module, torch.optim.AdamW]:
        torch.manual_seed(seed)
        model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
        model["head"].weight = model["embed"].weight
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = tied(0)
    save_checkpoint(tmp_path / "a", model, optimizer)
    keys = dcp.FileSystemReader(tmp_path / "a").read_metadata().state_dict_metadata
    assert [key for key in keys if key.startswith("model.")] == ["model.embed.weight"]
    other, its = tied(1)
    load_checkpoint(tmp_path / "a", other, its)
    assert_same_bits(model, other)


def test_wrappers_leave_no_trace_in_the_names(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    compiled = nn.Sequential(torch.compile(model[0]), model[1])  # type: ignore[call-overload]
    hidden, rest = split_parameters(compiled)
    save_checkpoint(tmp_path / "a", compiled, MuonWithAdamW(Muon(hidden), torch.optim.AdamW(rest)))
    keys = dcp.FileSystemReader(tmp_path / "a").read_metadata().state_dict_metadata
    names = {key.removeprefix("model.") for key in keys if key.startswith("model.")}
    assert names == set(model.state_dict())


# --- what does not fit --------------------------------------------------------------------------------------


def small(**options: Any) -> Pair:
    return models.pair_of(Small(1, **options))


def by_adamw(*lrs: float) -> tuple[nn.Module, torch.optim.AdamW]:
    """A model and its AdamW: with a group for each of the learning rates ``lrs``, or with one group."""
    model = Small(1)
    groups = [{"params": [param], "lr": lr} for param, lr in zip(model.parameters(), lrs, strict=False)]
    return model, torch.optim.AdamW(groups or model.parameters())


@pytest.mark.parametrize(
    ("saved", "here", "complaint"),
    [
        (fresh(), small(one=(3, 4)), r"model.one was saved with shape \(4, 3\) and has \(3, 4\) here"),
        (fresh(), small(dtype=torch.bfloat16), "model.one was saved as torch.float32 and is torch.bfloat16"),
        (fresh(), small(more=(2,)), "has no entry model.more"),
        (small(more=(2,)), fresh(), "holds more, which no rank's model has"),
        (fresh(), by_adamw(), "one was stepped by muon when it was saved, by adamw here"),
        (
            by_adamw(0.1, 0.2, 0.3),
            by_adamw(),
            r"one and two are in one parameter group here, but were saved with different lr: 0\.1 and 0\.2",
        ),
    ],
    ids=["shape", "dtype", "one more", "one less", "other optimizer", "one group of two"],
)
def test_another_models_state_changes_nothing(tmp_path: Path, saved: Any, here: Any, complaint: str) -> None:
    save_checkpoint(tmp_path / "a", *saved)
    model, both = here
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CheckpointError, match=complaint):
        load_checkpoint(tmp_path / "a", model, both)
    assert all(torch.equal(before[name], its) for name, its in model.state_dict().items())


def test_a_parameter_from_elsewhere_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the optimizer's one is not a parameter of the model"):
        save_checkpoint(tmp_path / "a", Small(1), fresh()[1])


def test_a_folder_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "manifest.json").write_bytes(b"no JSON")
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "foreign")
    complaints = {
        "missing": "there is no checkpoint folder",
        "unfinished": "holds no checkpoint: its file manifest.json is missing",
        "torn": "its manifest.json is damaged",
        "foreign": "wrote it before format 2, with pickled objects.* .*dcp_to_torch_save converts",
    }
    for name, complaint in complaints.items():
        with pytest.raises(CheckpointError, match=complaint):
            load_checkpoint(tmp_path / name, *fresh())


def test_ranks_that_share_a_process_are_refused(tmp_path: Path) -> None:
    model = Small(1)
    muon = Muon([model.get_parameter("one")], strategy="zero1", mesh=LocalWorld(Grid.of(dp=2)).mesh(0))
    with pytest.raises(CheckpointError, match=r"start real ranks with launch\(\)"):
        save_checkpoint(tmp_path / "a", model, muon)


# --- real ranks ---------------------------------------------------------------------------------------------


def on_two_ranks(rank: int, root: str) -> dict[str, tuple[str, str]]:
    """This rank's errors if ranks disagree. Also writes a folder that a single process will read."""
    model, both = fresh()
    found = {"folders": error_of(lambda: save_checkpoint(Path(root, f"of {rank}"), model, both))}
    both.param_groups[0]["lr"] = 0.1 + rank
    found["lr"] = error_of(lambda: save_checkpoint(Path(root, "lr"), model, both))
    both.param_groups[0]["lr"] = 0.1
    with torch.no_grad():
        model.get_parameter("one")[1, 2] += rank
    found["values"] = error_of(lambda: save_checkpoint(Path(root, "values"), model, both))
    expert = partial(save_checkpoint, rename=lambda name: f"expert {rank}.{name}")
    found["renamed"] = error_of(lambda: expert(Path(root, "renamed"), model, both))
    here = small(one=(4, 3 + rank))
    found["torn"] = error_of(lambda: load_checkpoint(Path(root, "wrapped"), *here))
    return found


def on_a_pair(rank: int, root: str) -> None:
    wrapped = nn.parallel.DistributedDataParallel(Small(rank))
    hidden, rest = split_parameters(wrapped.module)
    save_checkpoint(Path(root, "wrapped"), wrapped, MuonWithAdamW(Muon(hidden), torch.optim.AdamW(rest)))


def test_ranks_that_disagree_are_all_told(tmp_path: Path) -> None:
    launch(on_a_pair, 2, args=(str(tmp_path),))
    load_checkpoint(tmp_path / "wrapped", *fresh())
    first, second = launch(on_two_ranks, 2, args=(str(tmp_path),))
    assert first["renamed"] == second["renamed"] == ("nothing", "")
    for what, said in (
        ("folders", "the folder is"),
        ("lr", "lr of one is 0.1 on rank 0 and 1.1 on rank 1"),
        ("values", "model.one, from (0, 0) on, differs between ranks 0 and 1. "),
    ):
        assert first[what] == second[what]
        assert first[what][0] == "CheckpointError"
        assert first[what][1].startswith(said)
    assert first["lr"][1].endswith("rank 1")
    assert "saved with shape (4, 3) and has (4, 4) here" in second["torn"][1]
    assert first["torn"] == ("CheckpointError", f"rank 1: {second['torn'][1]}")
    assert not (tmp_path / "values").exists()


def save_under_zero1(folder: str) -> None:
    model = Parts(seed=1)
    mesh = build_mesh(Grid.of(dp=dist.get_world_size()))
    both = pair_of(model, strategy=partial(zero1, round_bytes=300), mesh=mesh, tp_dim=None)
    train(model, both, range(2))
    save_checkpoint(folder, model, both)


def layers(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8))


def save_without_a_named_mesh(folder: str) -> dict[str, Tensor]:
    """Save after a step under ``fully_shard(model)``, which makes a mesh with unnamed dimensions."""
    model = layers(0)
    fully_shard(model)
    optimizer = MuonWithAdamW.from_model(model, lr=0.1)
    model(torch.ones(2, 8)).square().sum().backward()
    optimizer.step()
    save_checkpoint(folder, model, optimizer)
    return contents(model, optimizer)


def contents(model: nn.Module, optimizer: MuonWithAdamW) -> dict[str, Tensor]:
    found = {name: full(param, param.detach()) for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        found |= {f"{name} {key}": full(param, value) for key, value in optimizer.state[param].items()}
    return found


def on_three_ranks(rank: int, root: str) -> dict[str, Tensor]:
    save_under_zero1(f"{root}/zero1")
    return save_without_a_named_mesh(f"{root}/unnamed")


def test_stock_tools_read_flat_slices_and_one_process_reads_unnamed_shards(tmp_path: Path) -> None:
    """Slices of every kind of parameter."""
    [saved, *_] = launch(on_three_ranks, 3, args=(str(tmp_path),))
    dcp_to_torch_save(tmp_path / "zero1", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=False)
    model, both = trained()
    for name, param in model.named_parameters():
        assert torch.equal(whole[f"model.{name}"], param), name
        for entry, value in both.state[param].items():
            assert torch.equal(whole[f"optimizer.{name}.{entry}"], value), (name, entry)
    assert_go_on_alike((model, both), loaded(tmp_path / "zero1"), range(2, 4))
    plain = layers(1)
    its = MuonWithAdamW.from_model(plain, lr=0.1)
    load_checkpoint(tmp_path / "unnamed", plain, its)
    found = contents(plain, its)
    assert saved.keys() == found.keys()
    assert saved["0.weight momentum_buffer"].any()
    assert [name for name in saved if not torch.equal(saved[name], found[name])] == []
