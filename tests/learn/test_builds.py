"""Builds without a stub: their tests accept a solution, and say what is wrong with others."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from muon_tutorial import LaunchError
from muon_tutorial.learn import builds
from muon_tutorial.learn.builds.reference import ring
from muon_tutorial.learn.my_muon import blocks
from scripts.files import ROOT
from scripts.grade import TESTS, main, try_build, try_my_muon
from scripts.points import POINTS, points_of

REFERENCE = Path(builds.__file__).parent / "reference"
FILES = {
    **{name: REFERENCE / f"{name}.py" for name in builds.NAMES},
    "one_page": ROOT / "scripts/one_page.py",
}
SOLUTIONS = {name: path.read_text(encoding="utf-8") for name, path in FILES.items()}
WRONG = {
    "ring: an all_gather that leaves pieces in order of arrival": (
        "for place in range(ranks)]\n\n\ndef reduce",
        "for place in pieces]\n\n\ndef reduce",
        r"all_gather: output 0, entry \[0, 0\]: 100, and 0 is right. At entry",
    ),
    "ring: an all_gather that returns nothing": (
        "    return [pieces[place] for place in range(ranks)]\n\n\ndef reduce",
        "    pieces\n\n\ndef reduce",
        "None came, and not all_gather: output 0, all_gather: output 1",
    ),
    "ring: torch's reduce_scatter in place of the ring": (
        "    total = pieces[(rank - 1) % ranks]\n",
        "    dist.reduce_scatter(total := pieces[0].clone(), pieces)\n    return total\n",
        "reduce_scatter is called",
    ),
    "ring: a broadcast that always begins at rank 1": (
        "    place = (rank - root) % ranks\n",
        "    place = (rank - 1) % ranks\n",
        "broadcast from 0: ",
    ),
    "ring: only the first entry travels": (
        "came = torch.empty_like(x)\n    sending = dist.isend(x,",
        "came, x = torch.empty_like(x), torch.ones_like(x) * x.flatten()[0]\n    sending = dist.isend(x,",
        "all_gather: ",
    ),
    "ring: a sum in the place of a piece": (
        "        total = pass_on(total, rank, ranks) + pieces[(rank - turn) % ranks]\n    return total",
        "        total = pieces[(rank - turn) % ranks].add_(pass_on(total, rank, ranks))\n    return total",
        "changes what it is given",
    ),
    "ring: torch's all_gather by its bare name": (
        "import torch.distributed as dist\n",
        "import torch.distributed as dist\nfrom torch.distributed import all_gather as torchs\n",
        "write dist.all_gather",
    ),
    "ring: a broadcast from its root to all": (
        "    place = (rank - root) % ranks\n",
        "    if rank == root:\n        return [dist.send(x, to) for to in range(ranks) if to != root] and x\n"
        "    dist.recv(x := torch.empty_like(x), root)\n    return x\n",
        "broadcast from . sends past the next rank",
    ),
    "ring: an all_reduce that gathers everything": (
        "all_gather(reduce_scatter(pieces, rank, ranks), rank, ranks)",
        "list(sum(all_gather(torch.stack(pieces), rank, ranks)))",
        "all_reduce sends",
    ),
    "zero3: whole weights on every rank": (
        "return Sharded(model, dtype)",
        "return model",
        "keeps too much",
    ),
    "zero3: gradients added up, and not averaged": (" / len(flat)", "", "0.weight, entry"),
    "zero3: weights that stay flat": (
        "    return [w.detach() for",
        "    return [w.detach().flatten() for",
        r"0.weight: \(96,\), and the shape \(12, 8\) is right",
    ),
    "zero3: weights kept on the module": (
        "        return {name: Fetch.apply(p, shape, its) for (name, p), shape, its in mine}\n",
        "        self.kept = {name: Fetch.apply(p, shape, its) for (name, p), shape, its in mine}\n"
        "        return self.kept\n",
        "still holds a whole weight",
    ),
    "zero3: all gathers of forward begun at once": (
        "        for number in range(len(self.model)):  #",
        "        [self.begin(number, self.dtype) for number in range(len(self.model))]\n"
        "        for number in range(len(self.model)):  #",
        "gather 2 begins while layer 0 computes",
    ),
    "zero3: weights kept from forward to backward": (
        "checkpoint(self.run, number, iter((1, -1)), x, use_reentrant=False)",
        "self.run(number, iter((1, -1)), x)",
        "a whole weight waits for backward",
    ),
    "zero3: torch's reduce_scatter in place of the reader's": (
        "return begin(ring.reduce_scatter, list(flat)).result()",
        "dist.reduce_scatter(part := flat[0].clone(), list(flat))\n        return part",
        "reduce_scatter is called",
    ),
    "zero3: no gather ahead in backward": ("iter((1, -1))", "iter((1, 9))", "backward: not under way"),
    "zero3: a gather that is over before the layer computes": (
        "        self.begin(then, dtype)\n",
        "        self.begin(then, dtype)\n        [each.result() for each in self.coming.get(then, ())]\n",
        "layer 0, forward: not under way",
    ),
    "zero3: weights that travel in float32": (
        "self.dtype, then",
        "torch.float32, then",
        "weights travel in",
    ),
    "zero3: parts kept in bfloat16": (
        "()].clone()",
        "()].to(dtype).float()",
        "weight, entry",
    ),
    "pipeline: the last micro-batch alone": ("in pairs:", "in pairs[-1:]:", "the gradient of stage"),
    "pipeline: a mean over micro-batches": (
        "y.square().sum()",
        "(y.square().sum() / len(pairs))",
        r"stage .'s weight, entry \[0, 0\]: .*, and .* is right. Each of 4 micro-batches adds to it",
    ),
    "pipeline: a micro-batch goes back before the next one comes": (
        "def step(stage, batches, rank, ranks):",
        "def step(stage, batches, *at):\n    for each in batches:\n        one(stage, [each], *at)\n\n\n"
        "def one(stage, batches, rank, ranks):",
        "ranks wait for each other",
    ),
    "pipeline: a whole batch as one micro-batch": (
        "    pairs = []\n",
        "    pairs, batches = [], [torch.cat(batches) if rank == 0 else None]\n",
        r"a stage computes \(20, 6\)",
    ),
    "pipeline: a message to all": (
        "    pairs = []\n",
        "    dist.all_reduce(torch.zeros(1))\n    pairs = []\n",
        "all_reduce is called",
    ),
    "pipeline: a message too many": (
        "    dist.recv(x, source)\n",
        "    dist.recv(x, source)\n    dist.isend(x, source, tag=1)\n",
        "messages, and not",
    ),
    "context: the softmax of each block, averaged": (
        "out[:, rows] = out[:, rows] * (before - now).exp() + came",
        "out[:, rows] += scores.softmax(-1) @ block[1][:, columns] / ranks",
        "weight of token",
    ),
    "context: no running maximum": (
        "torch.logaddexp(before, scores.logsumexp(-1, keepdim=True))",
        "(before.exp() + scores.exp().sum(-1, keepdim=True)).log()",
        "weight of token",
    ),
    "context: positions of a block, and not of the sequence": (
        "at[rank][:, None] >= at[source]",
        "torch.arange(q.shape[1])[:, None] >= torch.arange(k.shape[1])",
        "weight of token 4 is .*, and 0 is right",
    ),
    "context: scores of keys that no token may see": (
        "rows, columns = sees.any(1), sees.any(0)",
        "rows, columns = sees.any(1) | True, sees.any(0) | True",
        "rank 0 multiplies for 2.0 pairs of blocks, not 1",
    ),
    "context: keys of all ranks, gathered": (
        "        block, out = torch.stack((k, v)), torch.zeros_like(q)\n",
        "        block, out = torch.stack((k, v)), torch.zeros_like(q)\n"
        "        torch.distributed.all_gather([torch.zeros_like(k) for _ in range(ranks)], k.contiguous())\n",
        "all_gather is called",
    ),
    "context: keys of all ranks, kept": (
        "            block = pass_on(block, rank, ranks) if turn else block\n",
        "            block = pass_on(block, rank, ranks) if turn else block\n"
        "            ctx.kept = [*getattr(ctx, 'kept', ()), block]\n",
        r"rank . holds keys of ranks \[.*\] at once",
    ),
    "context: blocks that go home in forward": (
        "        ctx.where = rank",
        "        pass_on(block, rank, ranks)\n        ctx.where = rank",
        "sends 2.0 blocks of k and v, and 1 would do",
    ),
    "context: gradients of keys that stay with the last rank": (
        "*pass_on(d_block, rank, ranks)",
        "*d_block",
        "k's gradient in column",
    ),
    "context: gradients of keys from this rank's tokens alone": (
        "block, d_block = pass_on(block, rank, ranks), pass_on(d_block, rank, ranks)",
        "block = pass_on(block, rank, ranks)",
        "k's gradient in column",
    ),
    "context: positions in order": (
        "torch.cat((pieces[rank], pieces[-1 - rank]))",
        "torch.cat((pieces[2 * rank], pieces[2 * rank + 1]))",
        "rank 1 multiplies for 2.0 pairs of blocks, not 1.5",
    ),
    "one_page: gradients of one dp rank alone": (
        "dist.reduce_scatter(grad, list(self.grads.chunk(self.dp)), group=self.dp_group)",
        "grad.copy_(self.grads[self.slice])",
        "step 0, piece 0, entry",
    ),
    "one_page: momentum kept on every rank": (
        "self.weights.new_zeros(size)",
        "self.weights.new_zeros(self.dp, size)[self.dp_group.rank()]",
        "a rank keeps too much",
    ),
    "one_page: each part orthogonalized alone": (
        "X = self.gather_over_tp(matrix, x)",
        "X = self.own_piece(matrix, x).repeat(self.tp, 1)",
        "on_a_grid",
    ),
    "one_page: columns put together as rows": (
        "enumerate(received)], matrix.tp_dim)",
        "enumerate(received)])",
        "on_a_grid",
    ),
    "one_page: a momentum that nobody uses": (
        "self.momentum.lerp_(grad, 1 - self.mu)\n        x = grad.lerp(self.momentum, self.mu)",
        "self.used = getattr(self, 'used', torch.zeros_like(grad)).lerp_(grad, 1 - self.mu)\n"
        "        x = grad.lerp(self.used, self.mu)",
        "momentum 0, entry .* is right. Compare g, m, X and Y",
    ),
    "one_page: torch's own learning rate": ("lr=0.02", "lr=0.001", "step 0, piece 0, entry"),
    "one_page: gradients that nobody clears": ("self.grads.zero_()", "pass", "step 1, piece 0, entry"),
}


RIGHT: dict[str, tuple[Any, ...]] = {
    "tensors by name, and one message between two ranks": (
        "ring",
        ("isend(x, (rank + 1) % ranks)", "isend(dst=(rank + 1) % ranks, tensor=x)"),
        (
            "    return all_gather(reduce_scatter(pieces, rank, ranks), rank, ranks)",
            "    if ranks > 2:\n        return all_gather(reduce_scatter(pieces, rank, ranks), rank, ranks)\n"
            "    return list(torch.stack(pieces) + pass_on(torch.stack(pieces), rank, ranks))",
        ),
    ),
    "keys and values in messages of their own": (
        "context",
        (
            "block = pass_on(block, rank, ranks) if",
            "block = torch.stack([pass_on(x, rank, ranks) for x in block]) if",
        ),
    ),
    "ranks by name, and an input that needs a gradient": (
        "zero3",
        (
            "*given, dist.get_rank(), dist.get_world_size()",
            "*given, rank=dist.get_rank(), ranks=dist.get_world_size()",
        ),
        ("x, use_reentrant=False)", "x if number else x.requires_grad_(), use_reentrant=True)"),
    ),
}
"""Other solutions: the build, and what each puts in the place of the reference's text."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reader's folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize("build", SOLUTIONS)
def test_the_lessons_test_accepts_a_solution(
    build: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / f"{build}.py").write_text(SOLUTIONS[build], encoding="utf-8")
    exec(TESTS[build], {"__name__": "__main__"})
    lines = capsys.readouterr().out.splitlines()
    assert POINTS["Hard"] * sum(line.startswith("green ") for line in lines) == points_of(TESTS[build])


@pytest.mark.parametrize("other", RIGHT)
def test_the_lessons_test_accepts_other_solutions(other: str, folder: Path) -> None:
    build, *changes = RIGHT[other]
    text = SOLUTIONS[build]
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / f"{build}.py").write_text(text, encoding="utf-8")
    exec(TESTS[build], {"__name__": "__main__"})


@pytest.mark.parametrize("slip", WRONG)
def test_the_lessons_test_says_what_is_wrong(slip: str, folder: Path) -> None:
    build, (old, new, says) = slip.partition(":")[0], WRONG[slip]
    assert old in SOLUTIONS[build]
    (folder / f"{build}.py").write_text(SOLUTIONS[build].replace(old, new), encoding="utf-8")
    with pytest.raises(LaunchError, match=says):
        exec(TESTS[build].replace("wait(10)", "wait(3)"), {"__name__": "__main__"})


def test_a_build_is_completed_by_the_reference_and_a_line_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "def all_gather(): return 'mine'\nbroadcast = all_gather\n"
    (folder / "ring.py").write_text(text, encoding="utf-8")
    monkeypatch.setitem(sys.modules, "ring", ring)
    found = builds.completed.__wrapped__("ring")
    assert (found.all_gather(), found.all_reduce) == ("mine", ring.all_reduce)
    line = "ring.py, yours: all_gather, broadcast; from the reference: reduce_scatter, all_reduce, all_to_all"
    assert builds.say_whose("ring") == line


def test_a_students_own_lines_give_no_points_and_a_broken_ring_costs_none_of_zero3(tmp_path: Path) -> None:
    (tmp_path / "ring.py").write_text('print("green 1/1 " * 9)\nraise SystemExit\n', encoding="utf-8")
    points, wrong = try_build("ring", tmp_path)
    assert (points, wrong.endswith("raised SystemExit")) == (0, True)
    assert try_build("zero3", tmp_path) == (0, "zero3: not handed in")
    (tmp_path / "zero3.py").write_text(SOLUTIONS["zero3"], encoding="utf-8")
    assert try_build("zero3", tmp_path) == (points_of(TESTS["zero3"]), "")


def test_what_cannot_be_graded_is_said(tmp_path: Path) -> None:
    (tmp_path / "my_muon.py").write_text("def newton_schulz(X): return X\n", encoding="utf-8")
    assert "no checker of the course has written a function" in try_my_muon(tmp_path)[1]
    for folders in ([], [str(tmp_path / "nosuch")]):
        with pytest.raises(SystemExit, match="no such folder"):
            main(folders)


def test_an_import_hides_no_error_of_the_readers_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ring", ring)
    record = "from dataclasses import dataclass\n\n@dataclass\nclass A:\n    a: int\n"
    (folder / "ring.py").write_text(f"from __future__ import annotations\n{record}", encoding="utf-8")
    assert builds.completed.__wrapped__("ring").A(1).a == 1
    (folder / "ring.py").write_text("import torch\ntorch.no_such_name\n", encoding="utf-8")
    monkeypatch.setattr(builds, "completed", builds.completed.__wrapped__)
    with pytest.raises(ImportError, match=r"ring.py raised AttributeError.*no_such_name"):
        exec("from muon_tutorial.learn.builds import ring")


def test_grades_are_points_of_right_answers_and_green_stages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = blocks.reference()[1]
    right = blocks.HEAD + "".join(f"\n\n{kept[name]}" for name in ("newton_schulz", "save", "load"))
    hand_ins = {
        "right": (right, SOLUTIONS["ring"]),
        "empty": ("", ""),
        "wrong": (right.replace("X.norm()", "X.sum()"), SOLUTIONS["ring"].replace("isend(x", "isend(x + 1")),
    }
    for name, texts in hand_ins.items():
        (tmp_path / name).mkdir()
        for file, text in zip(("my_muon", "ring"), texts, strict=True):
            (tmp_path / name / f"{file}.py").write_text(text, encoding="utf-8")
    main([str(tmp_path / name) for name in hand_ins])
    said = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in said.splitlines() if not line.startswith(" ")}
    assert rows["right"] == ["4", "12", "0", "0", "0", "0", "16"]
    assert rows["empty"] == ["0"] * 7
    assert rows["wrong"] == ["2", "0", "0", "0", "0", "0", "2"]
    assert re.search(r"^    newton_schulz: .*\n    ring: .*all_gather", said, re.MULTILINE)
