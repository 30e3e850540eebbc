"""The iterations: they leave the input unchanged, batching and threads keep the bits, memory is reused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from muon_tutorial import KELLER_JORDAN
from muon_tutorial.evidence.memory import PeakMemory
from muon_tutorial.orthogonalizers import iterate, stack_sizes
from muon_tutorial.orthogonalizers.checked_recipe import Recipe, flops
from muon_tutorial.orthogonalizers.full_float32 import onednn_is_faster
from muon_tutorial.orthogonalizers.iterate import orthogonalize
from muon_tutorial.orthogonalizers.named import BOUNDS, RECIPES
from muon_tutorial.orthogonalizers.stack_sizes import RUN_BYTES, run_length
from muon_tutorial.orthogonalizers.symmetric_products import symmetric_share
from muon_tutorial.orthogonalizers.workspace import ALIGNMENT, Workspace
from scripts.result_files import bf16_flags

from ..exhaustive import left_out

SHAPES = [(1, 1), (1, 7), (9, 1), (8, 8), (37, 53), (65, 33), (64, 64), (100, 300)]
LARGE = [(400, 400), (400, 900), (800, 390)]
ALGORITHMS = [name for name in RECIPES if name not in ("polar_express", "cans")]
"""``polar_express`` and ``cans`` differ from ``you_jiacheng`` only by their coefficients."""


def cases(shapes: list[Any], large: list[Any]) -> list[Any]:
    """Each algorithm with each shape. A usual run leaves large shapes in bf16 to ``test_named``, because a
    CPU without bf16 units takes seconds for each."""
    slow = [name for name in ALGORITHMS if RECIPES[name].dtype is torch.bfloat16]
    more = (left_out(*case) if case[0] in slow else case for case in product(ALGORITHMS, large))
    return [*product(ALGORITHMS, shapes), *more]


def matrix(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


SQUARED = [name for name in RECIPES if name != "minimax_bf16"]  # its degree, 7, allows no chain of squares


@pytest.mark.parametrize("name", SQUARED)
@pytest.mark.parametrize("shape", [*SHAPES, *LARGE], ids=str)
def test_the_result_is_the_polynomials_of_the_singular_values(name: str, shape: tuple[int, int]) -> None:
    recipe = replace(RECIPES[name], dtype=torch.float32)  # in bf16, the bounds cover rounding
    G = matrix(*shape).bfloat16().float()
    X = exact(recipe, G.double())
    off = (orthogonalize(G, recipe).double() - X).norm() / X.norm()
    assert off < 4e-3  # the result is rounded to bf16, each element by 2^-9 at most


def exact(recipe: Recipe, G: Tensor) -> Tensor:
    """A recipe's result in float64: its polynomials applied to the singular values."""
    if G.size(0) > G.size(1):
        return exact(recipe, G.T).T
    X = G / G.norm()
    A = X @ X.T
    if recipe.scaling == "rows":
        X = X * A.abs().sum(1, keepdim=True).rsqrt()
    U, S, Vh = torch.linalg.svd(X, full_matrices=False)
    S = S / (A.norm() ** 0.5 if recipe.scaling == "schatten" else 1)
    return (U * polynomials(recipe, S)) @ Vh


def polynomials(recipe: Recipe, S: Tensor) -> Tensor:
    for polynomial in recipe.coefficients:
        S = torch.stack([c * S ** (2 * i + 1) for i, c in enumerate(polynomial)]).sum(0)
    return S


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("name", "shape"),
    cases(
        [*((3, *shape) for shape in SHAPES), (40, 4, 4), (40, 16, 32), (40, 64, 64)],
        [(3, 128, 128), (3, 390, 400), (40, 96, 96)],
    ),
    ids=str,
)
def test_a_stack_is_its_members_one_by_one(name: str, shape: tuple[int, int, int]) -> None:
    """In bf16, a batched product of 16 × 32 matrices rounds member 35 differently from a plain product."""
    members = [matrix(*shape[1:], seed=seed) * 10 ** (seed % 3) for seed in range(shape[0])]
    alone = [orthogonalize(member, RECIPES[name]) for member in members]
    assert torch.equal(orthogonalize(torch.stack(members), RECIPES[name]), torch.stack(alone))


def test_a_stack_is_iterated_in_runs_that_fit_the_cache() -> None:
    G, workspace = matrix(40, 96, 96), Workspace()
    orthogonalize(G, RECIPES["minimax"], workspace=workspace)
    assert RUN_BYTES // 2 < workspace.nbytes() <= RUN_BYTES


@pytest.mark.parametrize(
    ("name", "shape"), cases([(40, 60), (3, 16, 32), (400, 416)], [(390, 400), (400, 1600)]), ids=str
)
def test_the_workspaces_old_contents_leave_no_trace(name: str, shape: tuple[int, ...]) -> None:
    workspace, G = Workspace(), matrix(*shape)
    expected = orthogonalize(G, RECIPES[name], workspace=workspace)
    for block in workspace.buffers([(workspace.nbytes() // 4,)], torch.float32, G.device):
        block.fill_(torch.nan)
    assert torch.equal(orthogonalize(G, RECIPES[name], workspace=workspace), expected)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_strides_memory_and_dtype_of_the_input_leave_no_trace(name: str) -> None:
    G = matrix(60, 90)
    expected = orthogonalize(G, RECIPES[name])
    kept = Workspace()
    orthogonalize(matrix(100, 200), RECIPES[name], workspace=kept)
    assert torch.equal(orthogonalize(G.T.contiguous().T, RECIPES[name]), expected)
    assert torch.equal(orthogonalize(G.bfloat16(), RECIPES[name]), expected)
    assert torch.equal(orthogonalize(G, RECIPES[name], workspace=kept), expected)
    assert expected.is_contiguous()


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (2, 6, 9)], ids=str)
def test_input_is_never_written(name: str, shape: tuple[int, ...]) -> None:
    for G in (matrix(*shape), matrix(*shape).bfloat16()):
        before = G.clone()
        orthogonalize(G, RECIPES[name]).zero_()
        assert torch.equal(G, before)


@pytest.mark.parametrize("name", RECIPES)
def test_zeros_stay_zeros_and_empty_stays_empty(name: str) -> None:
    assert not orthogonalize(torch.zeros(5, 8), RECIPES[name]).any()
    for shape in ((0, 3), (3, 0), (0, 4, 3), (2, 0, 3)):
        assert orthogonalize(torch.zeros(shape), RECIPES[name]).shape == shape


@pytest.mark.parametrize("scale", [1e-30, 1e-9, 1e15])
@pytest.mark.parametrize("name", RECIPES)
def test_any_norm_stays_finite_and_small(name: str, scale: float) -> None:
    X = orthogonalize(scale * matrix(12, 20), RECIPES[name]).float()
    assert torch.linalg.matrix_norm(X, 2) < BOUNDS[name].largest


@pytest.mark.parametrize(("name", "shape"), cases([(128, 128), (3, 64, 96)], [(400, 500)]), ids=str)
def test_after_the_first_call_no_matrix_is_allocated(name: str, shape: tuple[int, ...]) -> None:
    G, workspace, out = matrix(*shape), Workspace(), torch.empty(shape, dtype=torch.bfloat16)
    if G.ndim == 3:
        run_length(shape[-2], shape[-1], RECIPES[name])  # tries out the CPU's kernels
    with PeakMemory() as first:
        orthogonalize(G, RECIPES[name], workspace=workspace, out=out)
    held = workspace.nbytes()
    with PeakMemory() as second:
        orthogonalize(G, RECIPES[name], workspace=workspace, out=out)
    few = 12 * prod(shape[:-1])  # at most three numbers per row
    assert held == workspace.nbytes() <= first.peak <= held + few
    assert second.peak <= few


def test_a_workspace_grows_to_the_largest_need_and_aligns() -> None:
    workspace = Workspace()
    small = workspace.buffers([(3, 5), (7,)], torch.float32, torch.device("cpu"))
    assert [tuple(one.shape) for one in small] == [(3, 5), (7,)]
    assert all(one.data_ptr() % ALIGNMENT == 0 for one in small)
    workspace.buffers([(100, 100)], torch.float32, torch.device("cpu"))
    workspace.buffers([(10, 10)], torch.bfloat16, torch.device("cpu"))
    assert workspace.nbytes() == 40_000


SLOW = (768, 768), (3072, 768), (1024, 256)  # a CPU without bf16 units takes minutes for these


@pytest.mark.parametrize(
    "shape", [(320, 320), (512, 128), (130, 130), (97, 1000), *map(left_out, SLOW)], ids=str
)
def test_one_thread_or_two_give_the_same_bits_in_bf16(shape: tuple[int, int]) -> None:
    if shape in ((97, 1000), *SLOW) and "amx_bf16" in bf16_flags():
        pytest.skip("with AMX, torch.optim.Muon's own bits depend on the number of threads here, too")
    G = matrix(*shape)
    for name in (name for name in ALGORITHMS if RECIPES[name].dtype is torch.bfloat16):
        one = orthogonalize(G, RECIPES[name])
        torch.set_num_threads(2)
        two = orthogonalize(G, RECIPES[name])
        torch.set_num_threads(1)
        assert torch.equal(one, two), name


def test_the_gram_form_is_taken_where_it_needs_fewer_operations() -> None:
    recipe = RECIPES["minimax"]
    share = symmetric_share(768)
    assert not recipe.iterates_on_gram(768, 768, share)
    assert recipe.iterates_on_gram(3072, 768, share)
    assert not RECIPES["minimax_bf16"].iterates_on_gram(3072, 768, share)
    # Half of each symmetric product is computed, and the long side is four times the short side s. In units
    # of 2s³, a direct step takes 2 for XXᵀ, ½ for A² and 4 for BX; the Gram form takes 2 for XXᵀ, 17 · ½ for
    # square products, and 4 at the end.
    n = 2 * 768**3
    assert flops(RECIPES["gram"], 768, 3072, "direct", 0.5) == pytest.approx(5 * 6.5 * n)
    assert flops(RECIPES["gram"], 768, 3072, "gram", 0.5) == pytest.approx(14.5 * n)


def test_a_kernel_that_rounds_a_stack_otherwise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    multiplied = iterate.symmetric_multiply

    def otherwise(out: Tensor, A: Tensor, B: Tensor, alpha: float = 1.0, beta: float = 0.0) -> None:
        multiplied(out, A, B, alpha, beta)
        if out.ndim == 3 and len(out) == 3:
            out[-1] *= 1.25

    monkeypatch.setattr(stack_sizes, "_keeps_bits", stack_sizes._keeps_bits.__wrapped__)
    exact = Recipe("fp32", "", (KELLER_JORDAN,) * 5, dtype=torch.float32, scaling="schatten")
    assert run_length(32, 48, exact) > 1
    monkeypatch.setattr(iterate, "symmetric_multiply", otherwise)
    assert run_length(32, 48, exact) == 1


def test_nothing_is_stacked_on_other_devices() -> None:
    assert run_length(64, 64, RECIPES["gram"], torch.device("cuda")) == 1
    assert run_length(64, 64, RECIPES["gram"], torch.device("meta")) == run_length(64, 64, RECIPES["gram"])


def test_trying_out_is_bounded_and_no_part_of_what_is_counted() -> None:
    assert run_length(16, 2**20, RECIPES["gram"]) == 1  # one matrix fills the cache, so nothing is tried
    with PeakMemory() as seen:
        stack_sizes._keeps_bits.__wrapped__(16, 32, RECIPES["gram"], 1, RUN_BYTES)
        onednn_is_faster.__wrapped__()
    assert seen.peak == 0


def test_a_default_device_and_dtype_change_nothing() -> None:
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        found = stack_sizes._keeps_bits.__wrapped__(64, 64, RECIPES["gram"], 1, RUN_BYTES)
        asked = onednn_is_faster.__wrapped__()
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert found == stack_sizes._keeps_bits.__wrapped__(64, 64, RECIPES["gram"], 1, RUN_BYTES)
    assert asked == onednn_is_faster()


@pytest.mark.parametrize(
    "known", [{"cpu_name": "Intel(R) Xeon(R)"}, {"cpu_name": "AMD EPYC", "amx_tile": True}, {}], ids=str
)
def test_onednn_is_for_amd_without_amx(known: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known, raising=False)
    assert not onednn_is_faster.__wrapped__()


@pytest.mark.parametrize(("dtype", "asked"), [(torch.float64, True), (torch.bfloat16, False)], ids=str)
def test_onednn_must_keep_fp32(dtype: torch.dtype, asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"cpu_name": "AMD EPYC"}, raising=False)
    multiplied = torch.mm
    monkeypatch.setattr(torch, "mm", lambda A, B: multiplied(A.to(dtype), B.to(dtype)).float())
    assert onednn_is_faster.__wrapped__() is asked


class Precisions(TorchDispatchMode):
    """Notes the requested precision of fp32 products."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"):
            self.seen.add(torch.backends.mkldnn.matmul.fp32_precision)  # type: ignore[attr-defined]
            self.seen.add(torch.backends.cuda.matmul.fp32_precision)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["float32", "gram", "three_steps"])
def test_products_are_full_fp32_whatever_the_program_asked_for(name: str) -> None:
    torch.set_float32_matmul_precision("medium")
    try:
        with Precisions() as precisions:
            orthogonalize(torch.ones(16, 40), RECIPES[name])
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert precisions.seen == ({"ieee", "bf16"} if onednn_is_faster() else {"ieee"})  # oneDNN offers no other
