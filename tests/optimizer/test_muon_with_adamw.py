"""As one optimizer, the pair does the same as Muon and AdamW side by side."""

from __future__ import annotations

import copy
import math
import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from muon_tutorial import Grid, LocalWorld, Muon, MuonWithAdamW, UsageError, split_parameters


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6), nn.LayerNorm(6))


def loss_of(model: nn.Module, step: int = 0) -> torch.Tensor:
    tokens = torch.randint(11, (16,), generator=torch.Generator().manual_seed(step))
    return model(tokens)[:, :3].square().mean()


def pair_of(model: nn.Module, **adamw) -> MuonWithAdamW:
    hidden, rest = split_parameters(model)
    return MuonWithAdamW(Muon(hidden, lr=0.05), torch.optim.AdamW(rest, **{"lr": 0.01, **adamw}))


@pytest.fixture
def model() -> nn.Sequential:
    return network()


@pytest.fixture
def both(model: nn.Sequential) -> MuonWithAdamW:
    return pair_of(model)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def assert_same_weights(model: nn.Module, other: nn.Module) -> None:
    for (name, param), its in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(param, its), name


@pytest.mark.parametrize("max_norm", [None, 0.01])
def test_the_pair_steps_as_the_two_side_by_side(max_norm: float | None) -> None:
    ours, theirs = network(), network()
    both = pair_of(ours)
    split = split_parameters(theirs)
    hidden, rest = split.hidden_params, [param for _, param in split.rest]
    muon, adamw = torch.optim.Muon(hidden, lr=0.05), torch.optim.AdamW(rest, lr=0.01)
    for step in range(5):
        for model in (ours, theirs):
            model.zero_grad()
            loss_of(model, step).backward()
        if max_norm is not None:
            norm = both.ready_gradients(max_norm)
            assert norm == torch.nn.utils.clip_grad_norm_([*hidden, *rest], max_norm)
        both.step()
        muon.step()
        adamw.step()
    assert_same_weights(ours, theirs)


def test_schedulers_move_both_rates_also_after_loading(model: nn.Sequential, both: MuonWithAdamW) -> None:
    scheduler = torch.optim.lr_scheduler.LambdaLR(both, lambda epoch: 0.5**epoch)
    for step in (1, 2):
        train(model, both, range(1))
        scheduler.step()
        assert both.muon.param_groups[0]["lr"] == 0.05 / 2**step
        assert both.adamw.param_groups[0]["lr"] == 0.01 / 2**step
        both.load_state_dict(both.state_dict())
    assert both.param_groups[0] is both.muon.param_groups[0]
    assert both.param_groups[1] is both.adamw.param_groups[0]


def in_an_earlier_versions_form(both: MuonWithAdamW) -> dict:
    return {"muon": both.muon.state_dict(), "adamw": both.adamw.state_dict()}


@pytest.mark.parametrize("form", [MuonWithAdamW.state_dict, in_an_earlier_versions_form])
def test_a_saved_state_resumes(model: nn.Sequential, both: MuonWithAdamW, form: Callable, tmp_path) -> None:
    train(model, both, range(3))
    torch.save(form(both), tmp_path / "both.pt")
    other = copy.deepcopy(model)
    resumed = pair_of(other, lr=5.0)
    resumed.load_state_dict(torch.load(tmp_path / "both.pt", weights_only=True))
    train(model, both, range(3, 6))
    train(other, resumed, range(3, 6))
    assert_same_weights(model, other)


def test_the_state_has_the_form_of_any_optimizers(model: nn.Sequential, both: MuonWithAdamW) -> None:
    train(model, both, range(1))
    state = both.state_dict()
    assert list(state) == ["state", "param_groups"]
    assert [index for group in state["param_groups"] for index in group["params"]] == list(range(7))
    assert [sorted(state["state"][index]) for index in range(7)] == [
        *[["momentum_buffer"]] * 2,
        *[["exp_avg", "exp_avg_sq", "step"]] * 5,
    ]


def moment_of(key: str, value: float) -> Callable:
    return lambda state: state["state"][2][key].view(-1)[-1:].fill_(value)


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda state: state.pop("state"), "has the keys 'state' and 'param_groups', got"),
        (lambda state: state["param_groups"].pop(0), "of another optimizer.* load only the model's weights"),
        (lambda state: state["param_groups"].pop(), r"the saved adamw has groups of \[\] parameters"),
        (lambda state: state["param_groups"][0]["params"].append(99), "the saved muon has groups of"),
        (lambda state: state["param_groups"][1]["params"].append(99), "the saved adamw has groups of"),
        (lambda state: state["state"].update({2: [1]}), "."),  # AdamW's own load_state_dict fails
        (moment_of("exp_avg", math.nan), "exp_avg of 0.weight must be finite, but"),
        (moment_of("exp_avg", -math.inf), "exp_avg of 0.weight must be finite, but"),
        (moment_of("exp_avg_sq", -1.0), "exp_avg_sq of 0.weight must be .* not negative, but .* from -1 to"),
        (moment_of("exp_avg_sq", math.nan), "exp_avg_sq of 0.weight must be"),
        (moment_of("exp_avg_sq", math.inf), "exp_avg_sq of 0.weight must be"),
        (moment_of("step", -1.0), "step of 0.weight must be"),
    ],
)
def test_a_state_that_does_not_fit_changes_neither(
    model: nn.Sequential, both: MuonWithAdamW, spoil: Callable, complaint: str
) -> None:
    train(model, both, range(1))
    other = copy.deepcopy(model)
    resumed = pair_of(other, lr=7.0)
    train(other, resumed, range(1, 2))
    state, groups, before = copy.deepcopy(both.state_dict()), resumed.param_groups, resumed.state
    spoil(state)
    with pytest.raises((UsageError, AttributeError, TypeError, ValueError), match=complaint):
        resumed.load_state_dict(state)
    assert all(now is was for now, was in zip(resumed.param_groups, groups, strict=True))
    assert all(resumed.state[param] is was for param, was in before.items())


def test_a_closure_runs_once_with_gradients_and_may_clip() -> None:
    model, other = network(), network()
    both, reference = pair_of(model), pair_of(other)
    norms = []

    def closure() -> float:
        both.zero_grad()
        loss = loss_of(model)
        loss.backward()
        norms.append(both.ready_gradients(max_norm=1e-3))
        return loss.item()

    with torch.no_grad():
        loss = both.step(closure)
    assert loss == loss_of(other).item()
    loss_of(other).backward()
    params = [param for group in reference.param_groups for param in group["params"]]
    assert norms == [torch.nn.utils.clip_grad_norm_(params, 1e-3)]
    reference.step()
    assert_same_weights(model, other)


@pytest.mark.parametrize("strategy", [None, "round_robin", "zero1"])
def test_muon_alone_does_not_ready_the_pairs_gradients(model: nn.Sequential, strategy: str | None) -> None:
    """It would clip by the norm of its own matrices, and not clip AdamW's gradients."""
    mesh = LocalWorld(Grid.of(dp=1)).mesh(0) if strategy else None
    both = MuonWithAdamW.from_model(model, lr=0.05, strategy=strategy, mesh=mesh)
    loss_of(model).backward()
    with pytest.raises(UsageError, match=r"5 of AdamW's .* ready_gradients\(\) of the MuonWithAdamW"):
        both.muon.ready_gradients(0.1)
    both.ready_gradients(0.1)


def test_zero_grad_reaches_both(model: nn.Sequential, both: MuonWithAdamW) -> None:
    loss_of(model).backward()
    both.zero_grad(set_to_none=False)
    assert all(param.grad is not None and not param.grad.any() for param in model.parameters())
    both.zero_grad()
    assert all(param.grad is None for param in model.parameters())


def test_hooks_of_the_pair_are_called(model: nn.Sequential, both: MuonWithAdamW) -> None:
    seen: list[str] = []
    both.register_step_pre_hook(lambda *_: seen.append("before step"))
    both.register_step_post_hook(lambda *_: seen.append("after step"))
    both.register_state_dict_pre_hook(lambda *_: seen.append("before save"))
    both.register_state_dict_post_hook(lambda *_: seen.append("after save"))
    both.register_load_state_dict_pre_hook(lambda *_: seen.append("before load"))
    both.register_load_state_dict_post_hook(lambda *_: seen.append("after load"))
    train(model, both, range(1))
    both.load_state_dict(both.state_dict())
    assert seen == [f"{when} {what}" for what in ("step", "save", "load") for when in ("before", "after")]


def test_state_dict_hooks_may_replace_the_state(both: MuonWithAdamW) -> None:
    both.register_state_dict_post_hook(lambda _, state: {"wrapped": state})
    both.register_load_state_dict_pre_hook(lambda _, state: state["wrapped"])
    state = both.state_dict()
    assert set(state) == {"wrapped"}
    both.load_state_dict(state)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_step_alike_and_their_learning_rates_are_looked_at(
    model: nn.Sequential, both: MuonWithAdamW, duplicate: Callable
) -> None:
    train(model, both, range(2))
    other, its = duplicate((model, both))
    train(model, both, range(2, 4))
    train(other, its, range(2, 4))
    assert_same_weights(model, other)
    its.adamw.param_groups[0]["lr"] = math.nan
    with pytest.raises(UsageError, match="lr must not be negative or infinite"):
        its.step()


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_groups_may_be_copied(both: MuonWithAdamW, duplicate: Callable) -> None:
    """Hosts copy groups to look at them later."""
    copied = duplicate(both.param_groups)
    assert type(copied) is list
    copied.append({})
    assert [group["lr"] for group in copied[:2]] == [0.05, 0.01]


@pytest.mark.parametrize("strategy", [None, "zero1"])
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda state: state.copy()])
def test_state_may_be_copied(model: nn.Sequential, strategy: str | None, duplicate: Callable) -> None:
    mesh = LocalWorld(Grid.of(dp=1)).mesh(0) if strategy else None
    both = MuonWithAdamW.from_model(model, lr=0.05, strategy=strategy, mesh=mesh)
    train(model, both, range(1))
    copied = duplicate(both.state)
    assert type(copied) is defaultdict
    assert [sorted(entry) for entry in copied.values()] == [sorted(entry) for entry in both.state.values()]
    copied.clear()
    assert len(both.state) == len(list(model.parameters()))


def test_entries_of_no_parameter_are_saved_and_loaded(model: nn.Sequential, both: MuonWithAdamW) -> None:
    """``torch.optim`` does the same with entries that users put into an optimizer's state."""
    both.state["global"], both.state["count"] = {"k": torch.ones(2)}, 3
    train(model, both, range(1))
    other = pair_of(network())
    other.load_state_dict(copy.deepcopy(both.state_dict()))
    assert torch.equal(other.state["global"]["k"], torch.ones(2))
    assert other.state["count"] == 3


def test_a_compiled_function_may_step_it(model: nn.Sequential, both: MuonWithAdamW) -> None:
    seen = []
    both.register_step_post_hook(lambda *_: seen.append("step"))
    scheduler = torch.optim.lr_scheduler.StepLR(both, 5)
    other = network()
    its = pair_of(other)
    train(other, its, range(1))
    loss_of(model).backward()
    torch.compile(lambda: both.step(), backend="eager")()
    scheduler.step()
    assert seen == ["step"]
    assert_same_weights(model, other)


def test_a_group_is_added_to_one_of_the_pair_or_for_the_models_own_parameters_to_the_pair() -> None:
    model = network()
    model[0].requires_grad_(False)
    both = MuonWithAdamW.from_model(model, lr=0.1, adamw_lr=0.2)
    with pytest.raises(UsageError, match=r"\.muon or to \.adamw"):
        both.add_param_group({"params": [nn.Parameter(torch.zeros(2, 2))]})
    both.muon.add_param_group({"params": [("late", nn.Parameter(torch.zeros(2, 2)))], "lr": 0.3})
    both.add_param_group({"params": [*model[0].parameters()], "lr": 0.4})
    assert [group["lr"] for group in both.param_groups] == [0.1, 0.2, 0.3, 0.4]


def test_layers_that_come_after_the_first_step_are_named_within_100_steps(model: nn.Sequential) -> None:
    both = MuonWithAdamW.from_model(model, lr=0.02)
    train(model, both, range(1))
    model[3] = nn.Linear(12, 6)
    model.append(nn.LayerNorm(6))
    said = r"^3\.weight, 3\.bias, 5\.weight, and 1 others: not in the model yet .* does not step them"
    with pytest.warns(UserWarning, match=said) as caught:
        train(model, both, range(200))
    assert len(caught) == 1


def test_no_optimizer_of_a_pair_maximizes(model: nn.Sequential) -> None:
    """torch's Muon has no ``maximize``, and would descend beside an AdamW that ascends."""
    matrix = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(UsageError, match="maximize must be False"):
        Muon([{"params": [matrix], "maximize": True}])
    Muon([{"params": [matrix], "maximize": False}])
    both = MuonWithAdamW.from_model(model, lr=0.1, adamw={"maximize": True})
    loss_of(model).backward()
    before = copy.deepcopy(model)
    with pytest.raises(UsageError, match="maximize must be False"):
        both.step()
    assert_same_weights(model, before)


def test_a_group_added_later_gives_adamw_no_settings_of_muons() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False))
    both = MuonWithAdamW.from_model(model, lr=0.02, weight_decay=0.1, decay_vectors=False)
    late = list(model[1].requires_grad_(True).parameters())
    settings = {"lr": 0.01, "weight_decay": 0.2, "momentum": 0.5, "ns_steps": 4, "initial_lr": 0.03}
    both.add_param_group({"params": late, **settings})
    muons, adamws = both.muon.param_groups[-1], both.adamw.param_groups[-1]
    assert {key: muons[key] for key in settings} == settings
    assert (adamws["lr"], adamws["weight_decay"], adamws["initial_lr"]) == (0.01, 0.0, 0.03)
    assert not {"momentum", "ns_steps"} & adamws.keys()
    assert copy.deepcopy(both).decay_vectors is False
    model(torch.ones(2, 6)).sum().backward()
    both.step()
    assert adamws["betas"] == (0.9, 0.999)


def test_a_parameter_has_one_owner() -> None:
    split = split_parameters(network())
    shared = split.hidden_names[0], split.hidden_params[0]
    with pytest.raises(UsageError, match=r"both Muon and AdamW: 1\.weight"):
        MuonWithAdamW(Muon(split.hidden), torch.optim.AdamW([*split.rest, shared]))
    both = MuonWithAdamW(Muon(split.hidden), torch.optim.AdamW(split.rest))
    both.adamw.add_param_group({"params": [shared]})
    with pytest.raises(UsageError, match=r"both Muon and AdamW: 1\.weight"):
        both.step()


def test_a_host_that_makes_no_pair_is_refused_and_told_how_to_make_one() -> None:
    """transformers' Trainer calls ``optimizer_cls_and_kwargs`` with groups and keywords, or with nothing."""
    hidden, rest = split_parameters(network())
    groups: Any = [{"params": list(network().parameters()), "weight_decay": 0.0}]
    refused: list[tuple[Callable[[], object], str]] = [
        (
            lambda: MuonWithAdamW(Muon(hidden), torch.optim.SGD(rest)),  # type: ignore[arg-type]
            r"got muon_tutorial\.optimizer\.muon\.Muon and torch\.optim\.sgd\.SGD",
        ),
        (
            lambda: MuonWithAdamW(torch.optim.Muon(hidden), torch.optim.AdamW(rest)),  # type: ignore[arg-type]
            r"got torch\.optim.*Muon",
        ),
        (lambda: MuonWithAdamW(groups, lr=0.1), r"got list and NoneType, lr=; .*from_model"),
        (lambda: MuonWithAdamW.from_model(), "wrap it in a lambda"),
    ]
    for make, said in refused:
        with pytest.raises(UsageError, match=said):
            make()


def test_parts_of_a_fused_weight_can_be_named_and_groups_still_be_added() -> None:
    qkv, late = nn.Linear(4, 12, bias=False), nn.Linear(4, 8, bias=False)
    model = nn.ModuleDict({"qkv": qkv, "late": late.requires_grad_(False)})
    parts = {"qkv.weight": ("interleaved", 1, 1, 1), "late.weight": (2, 2)}
    both = MuonWithAdamW.from_model(model, lr=0.02, parts=parts, transposed=["late.weight"])
    late.requires_grad_(True)
    both.add_param_group({"params": [late.weight]})
    found = [(group["parts"], group["transposed"]) for group in both.muon.param_groups]
    assert found == [(("interleaved", 1, 1, 1), False), ((2, 2), True)]
    before = {name: its.detach().clone() for name, its in model.named_parameters()}
    apart = [nn.Parameter(before["qkv.weight"][i::3].clone()) for i in range(3)]
    made = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    qkv.weight.grad = made
    for i, part in enumerate(apart):
        part.grad = made[i::3].clone()
    both.step()
    torch.optim.Muon(apart, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw").step()
    assert all(torch.equal(qkv.weight[i::3], part) for i, part in enumerate(apart))
    assert torch.equal(late.weight, before["late.weight"])


def sent_on(first: nn.ModuleDict, ids: torch.Tensor) -> torch.Tensor:
    return first["up"](first["tokens"](ids)).tanh()


def loss_at(last: nn.ModuleDict, name: str, received: torch.Tensor, due: torch.Tensor) -> torch.Tensor:
    """The last stage's loss. The stage holds a copy of the tied embedding, under a framework's name."""
    tied = last.get_parameter(f"{name}.weight")
    return nn.functional.cross_entropy(last["down"](received).tanh() @ tied.T, due)


@pytest.mark.parametrize("name", ["lm_head", "head", "output", "output_layer", "word_embeddings"])
@pytest.mark.parametrize("summed", [True, False])
def test_copies_of_an_embedding_on_two_pipeline_stages_need_summed_gradients(name: str, summed: bool) -> None:
    """In Megatron-LM's issue 4641, Muon stepped the last stage's copy, and AdamW the first stage's copy."""
    torch.manual_seed(0)
    copied = nn.Embedding(6, 4) if "embedding" in name else nn.Linear(4, 6, bias=False)
    first = nn.ModuleDict({"tokens": nn.Embedding(6, 4), "up": nn.Linear(4, 4)})
    last = nn.ModuleDict({"down": nn.Linear(4, 4), name: copied})
    copies = first.get_parameter("tokens.weight"), copied.weight
    copied.weight.data.copy_(copies[0])
    whole = copy.deepcopy(nn.ModuleDict({**dict(first.items()), **dict(last.items())}))
    whole.get_submodule(name).weight = whole.get_parameter("tokens.weight")
    optimizers = [MuonWithAdamW.from_model(model, lr=0.1) for model in (first, last, whole)]
    for pair, param in zip(optimizers, copies, strict=False):
        assert pair.verdicts[param].who == "AdamW"
    for step in range(3):
        ids, due = torch.arange(8) % 6, torch.arange(step, step + 8) % 6
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_at(whole, name, sent_on(whole, ids), due).backward()
        sent = sent_on(first, ids)
        received = sent.detach().requires_grad_()
        loss_at(last, name, received, due).backward()
        sent.backward(received.grad)
        if summed:
            total = torch.stack([param.grad for param in copies if param.grad is not None]).sum(0)
            for param in copies:
                param.grad = total.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(*copies) == summed
    if summed:
        ours, theirs = {**first.state_dict(), **last.state_dict()}, whole.state_dict()
        assert {key for key, it in ours.items() if not torch.equal(it, theirs[key])} == set()
