"""In one process, Muon gives the bits of torch.optim.Muon, except for two fixed bugs; errors are named."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import _muon as stock_module

from muon_tutorial.checkpoint import load_checkpoint, save_checkpoint
from muon_tutorial.errors import NotAMatrixError, StrategyError, UsageError
from muon_tutorial.newton_schulz import YOU_JIACHENG
from muon_tutorial.optimizer.muon import Muon

SHAPES = [
    *[(1, 1), (1, 7), (1, 33), (5, 1), (2, 3), (8, 8), (16, 48), (48, 16)],
    *[(33, 65), (65, 33), (64, 64), (100, 30), (37, 53), (17, 129), (1, 4200), (70, 60)],
]
STEPS = 10
ADJUSTMENTS = [None, "original", "match_rms_adamw"]
DTYPES = [torch.float32, torch.bfloat16]


def normal(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def matrices(shapes=SHAPES, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(normal(shape, seed, dtype)) for seed, shape in enumerate(shapes)]


def give_gradients(params: list[nn.Parameter], step: int) -> None:
    for index, param in enumerate(params):
        param.grad = normal(tuple(param.shape), 1000 * step + index, param.dtype) * (1 + step % 3)


def twins(shapes=SHAPES, dtype: torch.dtype = torch.float32, **options):
    """Return (our params, our Muon, stock params, stock Muon) with the same initial values."""
    ours, stocks = matrices(shapes, dtype), matrices(shapes, dtype)
    return ours, Muon(ours, **options), stocks, torch.optim.Muon(stocks, **options)


def run(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        give_gradients(params, step)
        optimizer.step()


def assert_same_bits(ours: list[nn.Parameter], optimizer, stocks: list[nn.Parameter], stock) -> None:
    for our, its in zip(ours, stocks, strict=True):
        assert torch.equal(our, its), tuple(our.shape)
        pair = [o.state[p].get("momentum_buffer") for o, p in ((optimizer, our), (stock, its))]
        assert (pair[0] is None) == (pair[1] is None)
        assert pair[0] is None or (pair[0].dtype == pair[1].dtype and torch.equal(*pair))


def assert_steps_alike(steps: range, ours: list[nn.Parameter], optimizer, stocks, stock) -> None:
    run(ours, optimizer, steps)
    run(stocks, stock, steps)
    assert_same_bits(ours, optimizer, stocks, stock)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust_lr_fn", ADJUSTMENTS)
def test_same_bits_as_torch(
    adjust_lr_fn: str | None, nesterov: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype == torch.bfloat16 and not nesterov:
        # The one difference: torch.optim.Muon normalizes its momentum in place here, since `bfloat16()`
        # returns the momentum itself (pytorch/pytorch pull 190597). So it gets a copy.
        original = stock_module._zeropower_via_newtonschulz
        monkeypatch.setattr(
            stock_module, "_zeropower_via_newtonschulz", lambda grad, *rest: original(grad.clone(), *rest)
        )
    options = {"lr": 0.02, "adjust_lr_fn": adjust_lr_fn, "nesterov": nesterov}
    both = twins(dtype=dtype, **options)
    for step in range(STEPS):
        assert_steps_alike(range(step, step + 1), *both)


@pytest.mark.parametrize(
    "options",
    [
        {"lr": 0.0},
        {"momentum": 0.0},
        {"momentum": 1.0},
        {"weight_decay": 0.0},
        {"ns_steps": 1},
        {"ns_steps": 8},
        {"eps": 1.0},
        {"ns_coefficients": (2.0, -1.5, 0.5)},
        {"lr": torch.tensor(0.02)},
        {"lr": torch.tensor([0.02]), "adjust_lr_fn": "match_rms_adamw"},
        {"lr": torch.tensor(0.02, dtype=torch.float64)},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16, torch.float64], ids=str)
def test_same_bits_as_torch_for_other_options(options: dict, dtype: torch.dtype) -> None:
    assert_steps_alike(range(5), *twins([(8, 24), (24, 8), (1, 40)], dtype, **options))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_bits_as_torch_for_column_major_parameters(dtype: torch.dtype) -> None:
    shapes = [(40, 12), (12, 40)]
    ours, stocks = ([nn.Parameter(normal(shape, 3, dtype).T) for shape in shapes] for _ in range(2))
    assert_steps_alike(range(5), ours, Muon(ours, lr=0.02), stocks, torch.optim.Muon(stocks, lr=0.02))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_groups_keep_their_own_options(dtype: torch.dtype) -> None:
    def build(kind: Callable[..., torch.optim.Optimizer]):
        params = matrices(SHAPES[4:9], dtype)
        groups = [
            {"params": params[:2], "lr": 0.1, "adjust_lr_fn": "match_rms_adamw"},
            {"params": params[2:3], "momentum": 0.5, "weight_decay": 0.0},
        ]
        optimizer = kind(groups, lr=0.03)
        run(params[:3], optimizer, range(2))
        optimizer.add_param_group({"params": params[3:], "ns_steps": 3, "eps": 1e-3})
        run(params, optimizer, range(2, 6))
        return params, optimizer

    assert_same_bits(*build(Muon), *build(torch.optim.Muon))


def test_a_closure_is_evaluated_with_gradients_and_its_loss_returned() -> None:
    param = nn.Parameter(torch.eye(3))
    muon = Muon([param], lr=0.1)

    def closure() -> float:
        muon.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss.item()

    first, second = muon.step(closure), muon.step(closure)
    assert first == 3
    assert second < first


def test_parameters_without_a_gradient_are_left_alone() -> None:
    # With both optimizers, one parameter is unfrozen late, and in each step another one has no gradient.
    def build(kind: Callable[..., torch.optim.Optimizer]):
        params = matrices(SHAPES[4:9])
        params[0].requires_grad_(False)
        optimizer = kind(params, lr=0.05)
        for step in range(6):
            give_gradients(params, step)
            params[0].grad = None if step < 3 else params[0].grad
            params[step % 3 + 1].grad = None
            optimizer.step()
            if step == 2:
                params[0].requires_grad_(True)
        return params, optimizer

    assert_same_bits(*build(Muon), *build(torch.optim.Muon))


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_never_written_to(dtype: torch.dtype, nesterov: bool) -> None:
    params = matrices(SHAPES, dtype)
    give_gradients(params, 0)
    gradients = [param.grad for param in params if param.grad is not None]
    before = [grad.clone() for grad in gradients]
    Muon(params, nesterov=nesterov, momentum=0.5).step()
    assert all(map(torch.equal, gradients, before))


@pytest.mark.parametrize(
    ("source", "target"), [(Muon, torch.optim.Muon), (torch.optim.Muon, Muon), (Muon, Muon)]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lr", [0.05, torch.tensor(0.05)], ids=["float", "tensor"])
def test_state_passes_between_ours_and_stocks(source, target, dtype: torch.dtype, lr, tmp_path) -> None:
    own = {"ns_coefficients": YOU_JIACHENG} if source is target else {}
    params = matrices(SHAPES[4:9], dtype)
    optimizer = source(params, lr=lr, momentum=0.8, **own)
    run(params, optimizer, range(4))
    others = [nn.Parameter(param.detach().clone()) for param in params]
    loaded = target(others, lr=9.0)
    torch.save(optimizer.state_dict(), tmp_path / "muon.pt")
    loaded.load_state_dict(torch.load(tmp_path / "muon.pt", weights_only=True))
    assert_steps_alike(range(4, 8), params, optimizer, others, loaded)
    assert loaded.param_groups[0]["lr"] == lr


def displaced(param: nn.Parameter, **options: Any) -> Tensor:
    """The change of a parameter of zeros in one step, without decay."""
    moved = nn.Parameter(torch.zeros_like(param))
    moved.grad = param.detach().clone()
    Muon([moved], lr=2.0**-6, weight_decay=0.0, **options).step()
    return moved.detach()


@pytest.mark.parametrize(
    ("adjust_lr_fn", "more", "less"),
    [("original", 2.0, 2.0), (None, 2.0, 2.0), ("match_rms_adamw", 1.0, 1.0)],
)
def test_the_factor_goes_by_outputs_over_inputs(adjust_lr_fn, more: float, less: float) -> None:
    """Four times as many outputs as inputs give a factor of sqrt(4), to the bit; fewer outputs give 1."""
    for parts, lead in ((None, ()), ("stack", (2,))):
        options: dict[str, Any] = {"adjust_lr_fn": adjust_lr_fn, "parts": parts}
        wide, tall = (nn.Parameter(normal((*lead, *sides), 2)) for sides in ((3, 12), (12, 3)))
        assert torch.equal(displaced(wide, **options, transposed=True), more * displaced(wide, **options))
        assert torch.equal(less * displaced(tall, **options, transposed=True), displaced(tall, **options))


def test_a_state_without_word_of_parts_keeps_the_groups_own() -> None:
    """The stock optimizer saves such a state."""
    params, others = matrices([(4, 12)]), matrices([(4, 12)])
    stock = torch.optim.Muon(params)
    run(params, stock, range(2))
    ours = Muon([{"params": others, "parts": (4, 8), "transposed": True}])
    ours.load_state_dict(stock.state_dict())
    assert (ours.param_groups[0]["parts"], ours.param_groups[0]["transposed"]) == ((4, 8), True)
    run(others, ours, range(2, 3))


@pytest.mark.parametrize("saved", [{"parts": (2, 2)}, {"transposed": True}])
def test_a_load_changes_neither_parts_nor_transposed(saved: dict[str, Any], tmp_path) -> None:
    """After a load, a program may still set them, which is how it corrects wrong ones."""
    model, again = (nn.Linear(12, 4, bias=False) for _ in range(2))
    old, new = Muon(model.parameters(), **saved), Muon(again.parameters())
    run(list(model.parameters()), old, range(1))
    save_checkpoint(tmp_path / "saved", model, old)
    said = r"group 0 was saved with (parts=\(2, 2\)|transposed=True) and has (None|False) here"
    with pytest.raises(UsageError, match=said):
        new.load_state_dict(old.state_dict())
    with pytest.raises(UsageError, match=said):
        load_checkpoint(tmp_path / "saved", again, new)
    assert not new.state
    right = Muon(again.parameters(), **saved)
    load_checkpoint(tmp_path / "saved", again, right)
    right.param_groups[0].update(parts=None, transposed=False)
    run(list(again.parameters()), right, range(1, 2))


@pytest.mark.parametrize(
    ("saved", "param", "loaded"),
    [
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float16, torch.float32),
        (torch.float64, torch.float32, torch.float64),
    ],
    ids=str,
)
def test_loading_copies_momentum_and_never_makes_it_less_precise(saved, param, loaded) -> None:
    sources = matrices([(4, 6)], saved)
    source = Muon(sources)
    run(sources, source, range(3))
    targets = matrices([(4, 6)], param)
    target = Muon(targets)
    target.load_state_dict(source.state_dict())
    buffer = target.state[targets[0]]["momentum_buffer"]
    assert buffer.dtype == loaded
    before = source.state[sources[0]]["momentum_buffer"].clone()
    assert torch.equal(buffer, before.to(loaded))
    run(targets, target, range(3, 5))
    assert target.state[targets[0]]["momentum_buffer"].dtype == loaded
    assert torch.equal(source.state[sources[0]]["momentum_buffer"], before)


def test_load_hooks_see_tensors_and_their_changes_count() -> None:
    params = matrices([(4, 6)])
    muon = Muon(params)
    run(params, muon, range(1))
    state, seen = muon.state_dict(), []

    def double(_, loading):
        loading["state"] = {0: {"momentum_buffer": 2 * loading["state"][0]["momentum_buffer"]}}

    muon.register_load_state_dict_pre_hook(double)
    muon.register_load_state_dict_post_hook(lambda m: seen.append(m.state[params[0]]["momentum_buffer"]))
    muon.load_state_dict(state)
    assert torch.equal(seen[0], 2 * state["state"][0]["momentum_buffer"])


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    params, others = matrices([(4, 6)]), matrices([(4, 6), (2, 2)])
    muon, other = Muon(params), Muon(others)
    run(params, muon, range(1))
    with pytest.raises(ValueError, match="doesn't match"):
        muon.load_state_dict(other.state_dict())
    assert isinstance(muon.state[params[0]]["momentum_buffer"], Tensor)
    muon.load_state_dict(muon.state_dict())


def test_the_signature_starts_with_torchs() -> None:
    ours, stock = (list(inspect.signature(it).parameters.values()) for it in (Muon, torch.optim.Muon))
    for our, its in zip(ours, stock, strict=False):
        assert (our.name, our.default, our.kind) == (its.name, its.default, its.kind)
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in ours[len(stock) :])


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ([*nn.LayerNorm(3).named_parameters()], r"not: weight \(shape \(3,\)\), bias .*split_parameters"),
        ([torch.zeros(2, 2), torch.zeros(3)], r"group 0, parameter 1 \(shape \(3,\)\)"),
        ([torch.zeros(2, 2, 2)], r"shape \(2, 2, 2\)"),
        ([torch.zeros(2, 2, dtype=torch.complex64)], "complex"),
        ([torch.eye(2).to_sparse()], "sparse"),
    ],
    ids=["named", "vector", "3-D", "complex", "sparse"],
)
def test_parameters_that_are_not_matrices_are_named_or_told_by_place(params: Any, says: str) -> None:
    with pytest.raises(NotAMatrixError, match=says):
        Muon(params)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lr": -1.0}, "lr must not be negative"),
        ({"lr": torch.ones(2)}, "one element"),
        ({"lr": "0.1"}, "lr must be a number, got '0.1'"),
        ({"momentum": -0.1}, "momentum"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"adjust_lr_fn": "adam"}, "got 'adam'"),
        ({"ns_steps": 100}, "0 to 99 steps"),
        ({"ns_coefficients": (1.0, 2.0)}, "three numbers"),
        ({"ns_coefficients": YOU_JIACHENG, "ns_steps": 3}, "got 5 for 3 steps"),
        ({"strategy": "zero7"}, "unknown strategy 'zero7'"),
        ({"mesh": "a mesh"}, "a mesh needs a strategy"),
        ({"guard": "never"}, "guard must be 'on' or 'off', got 'never'"),
        ({"window": 0}, "window counts rounds in flight, and must be at least 1; got 0"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused(options: dict, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Muon(matrices([(2, 2)]), **options)
    assert issubclass(UsageError, ValueError)
    assert issubclass(StrategyError, UsageError)


@pytest.mark.parametrize(
    "group", [{"params": [nn.Parameter(torch.zeros(3))]}, {"params": matrices([(2, 2)]), "lr": -1.0}]
)
def test_a_group_that_does_not_fit_leaves_the_optimizer_as_it_was(group: dict) -> None:
    muon = Muon(matrices([(2, 3)]))
    with pytest.raises(UsageError):
        muon.add_param_group(group)
    assert len(muon.param_groups) == 1


def test_sparse_gradients_are_refused_before_anything_changes() -> None:
    first, second = matrices([(2, 3), (4, 3)])
    first.grad, second.grad = torch.ones(2, 3), torch.ones(4, 3).to_sparse()
    before = first.detach().clone()
    with pytest.raises(UsageError, match=r"sparse one of shape \(4, 3\)"):
        Muon([first, second]).step()
    assert torch.equal(first, before)


@pytest.mark.parametrize("max_norm", [0.0, -1.0, float("nan")])
def test_a_norm_to_clip_to_must_be_positive(max_norm: float) -> None:
    with pytest.raises(UsageError, match="positive"):
        Muon(matrices([(2, 3)])).ready_gradients(max_norm)
