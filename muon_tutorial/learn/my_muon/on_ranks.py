"""Try a my_muon.py on real ranks: its steps, owners and checkpoints, compared with one process."""

from __future__ import annotations

import importlib.util
import linecache
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ... import zeropower_via_newtonschulz
from ...errors import UsageError
from ...worlds.live import gather_objects
from ..cuts.on_ranks import cut
from ..exercises.on_real_ranks import watching

TRIED = (((10, 6), "column"), ((6, 10), "row"), ((8, 12), "column"), ((5, 7), "row"))
"""The matrices that a file is tried with: tall, wide, and unevenly cut."""
LR = 0.02
COUNTED = ("isend", "send", "all_gather")
_MOVES = re.compile("all_|batch_|broad|gather|reduce|scatter|send_obj")
_REFUSED = set(filter(_MOVES.match, dir(dist))) - {*COUNTED}
PHASES = {1: "gradient reduce_scatter", 2: "dp gather", 3: "tp gather", 7: "parameter all_gather"}


def load_file(path: str | Path) -> ModuleType:
    """Load a my_muon.py from any path as a module."""
    linecache.checkcache(str(path))
    spec = importlib.util.spec_from_file_location("my_muon_as_run", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with patch.dict(sys.modules, {module.__name__: module}):  # dataclasses look up their module there
        spec.loader.exec_module(module)
    return module


@contextmanager
def counted_bytes(phase: Callable[[], int]) -> Iterator[dict[int, int]]:
    """In the block, count the bytes that this rank sends, by phase. An all_gather counts as on a ring."""
    sent: dict[int, int] = {}

    def count(original: Callable[..., Any], first: Any, *more: Any, **named: Any) -> Any:
        if original.__name__ not in COUNTED:
            raise UsageError(f"{original.__name__} is not counted here; send with {', '.join(COUNTED)}")
        is_gather = original.__name__ == "all_gather"
        size = (len(first) - 1) * more[0].nbytes if is_gather else first.nbytes
        sent[phase()] = sent.get(phase(), 0) + size
        return original(first, *more, **named)

    with watching(count, *COUNTED, *_REFUSED):
        yield sent


def try_file(rank: int, path: str, dp: int, tp: int) -> str | None:
    """What is wrong with a file on this grid; None if nothing is. Must be called by all ranks."""
    module = load_file(path)
    for trial in (try_steps, _try_bill, _try_owners, _try_checkpoint):
        if wrong := trial(module, dp, tp):
            return wrong
    return None


def _integers(shape: tuple[int, int], *seeds: int) -> Tensor:
    """A gradient of integers, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(hash(seeds) % 2**31)
    return torch.randint(-8, 9, shape, generator=generator).float()


def start_muon(module: ModuleType, wholes: Sequence[Tensor], kinds: Sequence[str], dp: int, tp: int) -> Any:
    """The file's optimizer over this rank's pieces of some matrices."""
    params = [
        (nn.Parameter(cut(whole.detach(), kind, dist.get_rank() % tp, tp)), tuple(whole.shape), kind)
        for whole, kind in zip(wholes, kinds, strict=True)
    ]
    return module.DistributedMuon(params, dp, tp, lr=LR)


def _start(module: ModuleType, dp: int, tp: int) -> tuple[Any, list[nn.Parameter], list[str], Any]:
    """The arguments of ``step_beside``: the file's optimizer, and TRIED with gradients of two steps."""
    shapes, kinds = [shape for shape, _ in TRIED], [kind for _, kind in TRIED]
    wholes = [nn.Parameter(_integers(shape, 0, i) / 8) for i, shape in enumerate(shapes)]
    places = ((step, place) for step in (1, 2) for place in range(dp))
    grads = [[_integers(shape, step, i, place) for i, shape in enumerate(shapes)] for step, place in places]
    return start_muon(module, wholes, kinds, dp, tp), wholes, kinds, [grads[:dp], grads[dp:]]


def step_beside(
    muon: Any, wholes: Sequence[Tensor], kinds: Sequence[str], steps: Iterable[Sequence[Sequence[Tensor]]]
) -> tuple[str, dict[int, int]]:
    """Where the weights differ from torch.optim.Muon's on any rank, and the last step's bytes, by phase.

    Each of ``steps`` has the gradients of each dp place; torch.optim.Muon gets their mean.
    """
    stock, (place, tp_rank) = torch.optim.Muon(wholes, lr=LR), divmod(dist.get_rank(), muon.tp)
    for step, of_places in enumerate(steps, 1):
        for param, whole, kind, *grads in zip(muon.params, wholes, kinds, *of_places, strict=True):
            param.grad = cut(grads[place], kind, tp_rank, muon.tp)
            whole.grad = torch.stack(grads).sum(0) / muon.dp
        with counted_bytes(lambda: muon.phase) as sent:
            muon.step()
        stock.step()
        due = (cut(whole.detach(), kind, tp_rank, muon.tp) for whole, kind in zip(wholes, kinds, strict=True))
        same = list(map(torch.equal, muon.params, due))
        for rank, each in enumerate(gather_objects(same)):
            if not all(each):
                where = f"after step {step}, rank {rank} of dp={muon.dp}, tp={muon.tp}"
                shape = " × ".join(map(str, wholes[each.index(False)].shape))
                return f"{where} has other weights than torch.optim.Muon, in a {shape} matrix", sent
    return "", sent


def try_steps(module: ModuleType, dp: int, tp: int) -> str:
    """Where two steps go wrong, and how to get torch's bits if the file's Newton–Schulz gives others."""
    (wrong, _), G = step_beside(*_start(module, dp, tp)), _integers((10, 6), 4).bfloat16()
    if not wrong or torch.equal(module.newton_schulz(G), zeropower_via_newtonschulz(G)):
        return wrong
    how = "Write both sums of its step with torch.addmm, in G's dtype"
    return f"{wrong}: newton_schulz rounds elsewhere. {how}"


def _try_bill(module: ModuleType, dp: int, tp: int) -> str | None:
    muon, *asked = _start(module, dp, tp)
    _, sent = step_beside(muon, *asked)
    found, due = {name: sent.get(phase, 0) for phase, name in PHASES.items()}, muon.expected_bytes()
    if off := [name for name in found if due.get(name) != found[name]]:
        said = f"in the {off[0]}, rank {dist.get_rank()} sends {found[off[0]]} bytes"
        return f"{said}, and the bill says {due.get(off[0], 'nothing of it')}"
    return None


def _try_owners(module: ModuleType, dp: int, tp: int) -> str | None:
    """Try matrices with rows on all ranks (lessons 11, 12), and whole gradients on every rank (lesson 04)."""
    rank, many = dist.get_rank(), dist.get_world_size()
    grads = [_integers(shape, 3, i) for i, (shape, _) in enumerate(TRIED)]
    due = [zeropower_via_newtonschulz(grad) for grad in grads]
    params = [nn.Parameter(torch.zeros_like(cut(grad, "column", rank, many))) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = cut(grad, "column", rank, many)
    rows = module.OwnerMuon(params, [shape for shape, _ in TRIED], momentum=0.0).updates()
    if not all(map(torch.equal, rows, (cut(whole, "column", rank, many) for whole in due))):
        return f"the rows that rank {rank} gets back from an update's owner are not those of one process"
    flat = module.gathered_share([SimpleNamespace(grad=g, numel=g.numel) for g in grads], rank, many)
    if not torch.equal(flat, torch.cat([whole.flatten() for whole in due])):
        return f"the updates in the flat buffer of rank {rank} are not those of one process"
    return None


def _try_checkpoint(module: ModuleType, dp: int, tp: int) -> str | None:
    """Save on one grid and load on the transposed grid: the next step must have the same bits."""
    muon, wholes, kinds, steps = _start(module, dp, tp)
    step_beside(muon, wholes, kinds, steps[:1])
    folder = [TemporaryDirectory() if dist.get_rank() == 0 else None]
    name = next(filter(None, gather_objects(folder[0].name if folder[0] else "", dist.group.WORLD)))
    manager, model = module.Checkpoints(name), nn.Linear(2, 2)
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters()), 1)
    if module.load(manager, model, muon, scheduler) != 0:
        return "load begins a new run with another step than 0"
    module.save(manager, 7, model, muon, scheduler)
    other = _start(module, tp, dp)[0]
    if (step := module.load(manager, model, other, scheduler)) != 7:
        return f"saved after 7 steps, but load continues with step {step}"
    gather = [each.whole(each._gather_slices(each.state)) for each in (muon, other)]
    if not all(map(torch.equal, *gather)):
        return "the momentum that another grid has loaded is not the saved one"
    dist.barrier()
    return None
