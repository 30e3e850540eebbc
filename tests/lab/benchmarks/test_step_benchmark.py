"""The benchmark of whole steps: its contenders, its counts and its files, on small matrices."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.optim import Optimizer

from muon_tutorial.orthogonalizers.checked_recipe import flops
from muon_tutorial.orthogonalizers.iterate import orthogonalize
from muon_tutorial.orthogonalizers.named import RECIPES, STOCK
from muon_tutorial.orthogonalizers.symmetric_products import symmetric_share
from scripts import step_benchmark as script
from scripts.lab.benchmarks import step_benchmark, steps_over_ranks
from scripts.lab.benchmarks.newton_schulz_times import product
from scripts.lab.benchmarks.other_muons import Params, Peer, StepContender, find_peers, import_alone
from scripts.lab.benchmarks.step_benchmark import TORCH, StepRun, StepSet, measure_steps, our_contender
from scripts.lab.benchmarks.step_work import watch
from scripts.lab.benchmarks.steps_over_ranks import APART, OVERLAPPED, OWNER, RankCase

CPU = torch.device("cpu")
SMALL = StepSet(((16, 16), (32, 16), (16, 32)) * 4)
KELLER_JORDAN_OPERATIONS = 5 * (2 * 16**3 + 2 * 16**3 + 2 * 16**3)
"""Five iterations of three products of 16 × 16."""


class WritesToGradients(torch.optim.SGD):
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for param in group["params"]:
                param.grad.zero_()


class Fails(torch.optim.SGD):
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        raise RuntimeError("not on this machine\nreally not")


def stranger(name: str, kind: type[Optimizer]) -> StepContender:
    return StepContender(name, "nobody 1.0", lambda params: kind(params, lr=1.0), "none", 0, "one by one")  # type: ignore[call-arg]


@pytest.fixture(scope="module", autouse=True)
def _small_products() -> Iterator[None]:
    """Measure rates on products of 16 × 16: those of 768 × 768 take a second without bf16 units."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_benchmark, "product", lambda dtype, side, device: product(dtype, 16, device))
        yield


@pytest.fixture(scope="module")
def run() -> StepRun:
    theirs, *_ = step_benchmark.contenders()[0]
    chosen = [
        theirs,
        stranger("writes", WritesToGradients),
        stranger("fails", Fails),
        *map(our_contender, (STOCK, "minimax")),
    ]
    return measure_steps(SMALL, chosen, 3, CPU)


def test_every_way_and_torch_are_contenders_and_packages_are_there_or_named() -> None:
    found, missing = step_benchmark.contenders()
    names = [each.name for each in found]
    assert names[0] == TORCH
    assert {f"{step_benchmark.OURS}, {name}" for name in (STOCK, *RECIPES)} <= set(names)
    assert len(found) - 1 - len(step_benchmark.WAYS) + len(missing) == 4


def test_every_contender_is_timed_once_a_round_and_one_that_fails_is_left_out(run: StepRun) -> None:
    assert {one.contender.name: len(one.seconds) for one in run.steps} == {
        TORCH: 3,
        "writes": 3,
        "this Muon, stock": 3,
        "this Muon, minimax": 3,
    }
    assert run.left_out == ["fails failed here: RuntimeError: not on this machine"]
    assert {name: len(rates) for name, rates in run.rates.items()} == {"bf16": 15, "fp32": 15}


def test_a_failing_way_of_our_own_is_not_left_out() -> None:
    broken = StepContender("ours", "this package", lambda params: Fails(params), "none", 0, "")
    with pytest.raises(RuntimeError, match="not on this machine"):
        measure_steps(SMALL, [broken], 1, CPU)


def test_all_contenders_get_the_same_gradients_whoever_wrote_to_them(run: StepRun) -> None:
    by_name = {one.contender.name: one for one in run.steps}
    assert by_name[TORCH].cosine == pytest.approx(1, abs=1e-9)
    assert by_name["this Muon, stock"].cosine == pytest.approx(1, abs=1e-9)
    assert 0.9 < by_name["this Muon, minimax"].cosine < 0.9999
    assert by_name["writes"].cosine < 0.8


def test_memory_and_products_are_those_of_the_first_step(run: StepRun) -> None:
    by_name = {one.contender.name: one for one in run.steps}
    for name in (TORCH, "this Muon, stock"):
        work = by_name[name].work
        assert work.left >= SMALL.nbytes  # the momentum
        assert work.operations == {
            "bf16": 4 * KELLER_JORDAN_OPERATIONS + 8 * 5 * (4 * 16 * 16 * 32 + 2 * 16**3)
        }
    assert {*by_name["this Muon, minimax"].work.operations} == {"fp32"}
    assert by_name["writes"].work.products == "not seen"


@pytest.mark.parametrize(("name", "kind"), [("you_jiacheng", "bf16"), ("three_steps", "fp32")])
def test_products_in_place_are_counted_too(name: str, kind: str) -> None:
    G, recipe = torch.ones(400, 400), RECIPES[name]
    orthogonalize(G, recipe)  # the one-time trials in the first call are not counted
    seen = watch(lambda: orthogonalize(G, recipe), torch.device("cpu"))
    assert seen.operations == {kind: pytest.approx(flops(recipe, 400, 400, "direct", symmetric_share(400)))}


def test_the_profiler_counts_what_lives_at_once() -> None:
    kept = []

    def run() -> None:
        first = torch.ones(1000)
        del first
        kept.append(torch.ones(500))
        _ = torch.ones(100)

    seen = watch(run, CPU)
    assert (seen.peak, seen.left) == (4000, 2000)
    assert seen.operations == {}


def test_ratios_are_taken_within_a_turn(run: StepRun) -> None:
    one, *_ = run.steps
    slow = step_benchmark.ContenderSteps(one.contender, [1.0, 8.0, 4.0], one.work, 1.0)
    fast = step_benchmark.ContenderSteps(our_contender(STOCK), [0.5, 2.0, 4.0], one.work, 1.0)
    table = step_benchmark.times_table(
        StepRun(SMALL, [slow, fast], {"bf16": [1.0]}, ["x is not here"]), "c", ["y neither"]
    )
    assert [row["times torch"] for row in table.rows] == [1.0, 2.0]
    assert table.rows[1]["ms"] == 2000.0
    assert "Left out: y neither." in table.notes
    assert "Left out: x is not here." in table.notes


# Packages


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "strange_package" / "optim"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("raise RuntimeError('operator does not exist')\n")
    (folder / "__init__.py").write_text("raise RuntimeError('nor this')\n")
    (folder / "_helpers.py").write_text("TWO = 2\n")
    (folder / "muon.py").write_text("from ._helpers import TWO\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.startswith("_strange_package_alone")]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


@pytest.mark.usefixtures("packages")
def test_a_module_is_imported_without_the_packages_around_it() -> None:
    assert import_alone("strange_package.optim.muon").TWO == 2
    assert "strange_package" not in sys.modules
    with pytest.raises(ModuleNotFoundError):
        import_alone("strange_package_that_is_not_there.optim.muon")


def test_a_package_that_is_missing_or_broken_is_a_line() -> None:
    def explode() -> object:
        raise OSError("libcudart.so.13: cannot open\nmore")

    def make(module: object, params: Params) -> Optimizer:
        raise AssertionError("never made")

    missing = Peer("no-such-muon", explode, make, "", "")
    broken = Peer("torch", explode, make, "", "")
    found, lines = find_peers([missing, broken])
    assert found == []
    assert lines == [
        "no-such-muon is not installed: pip install -e '.[peers]'",
        "torch cannot be imported here: OSError: libcudart.so.13: cannot open",
    ]


@pytest.mark.parametrize("name", ["muon-optimizer", "timm", "pytorch-optimizer"])
def test_a_package_does_the_work_that_its_row_says(name: str) -> None:
    contender = {each.name: each for each in step_benchmark.contenders()[0]}.get(name)
    if contender is None:
        pytest.skip(f"{name} is not installed")
    run = measure_steps(SMALL, [step_benchmark.contenders()[0][0], contender], 1, CPU)
    assert run.left_out == []
    theirs, its = run.steps
    assert its.work.operations == theirs.work.operations
    assert its.cosine > 0.999


# Ranks


def test_ranks_step_in_turns_and_two_halves_make_a_whole() -> None:
    chosen = steps_over_ranks.cases((1, 2))
    two = [RankCase(name, 2) for name in (OWNER, OVERLAPPED, "round_robin", APART)]
    assert chosen == [RankCase(OWNER, 1), *two]
    found = {
        one.case: one
        for one in steps_over_ranks.measure_over_ranks(SMALL, chosen, 2, orthogonalize="minimax")
    }
    assert [*found] == chosen
    assert all(len(one.seconds) == 2 and min(one.seconds) > 0 for one in found.values())
    whole = found[RankCase(OWNER, 1)].momentum
    assert whole == SMALL.nbytes
    assert whole / 2 <= found[RankCase(APART, 2)].momentum < whole
    table = steps_over_ranks.ranks_table([*found.values()], "minimax", "c")
    assert [row["ranks"] for row in table.rows] == [1, 2, 2, 2, 2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--device", "cuda"]) == 2
    assert "no GPU that PyTorch can use" in capsys.readouterr().err
