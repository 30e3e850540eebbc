"""Exercises of lesson 01: Muon by an SVD, its promise, the whole update, its parameters, a quiz."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from ... import split_parameters
from ..exercises.judge import Diagnosis, Exercise, MistakeError, numbers, value_of, written
from ..inputs.small_gpt import TrainedGPT
from ..pictures.colours import MUON, WRONG
from ..pictures.picture import Picture
from ..pictures.spectra import Curve, draw_spectra
from . import updates
from .race import Race
from .updates import MOMENTUM, SVDUpdate, say_size, svd_muon, svd_update

SHAPES = ((4, 6), (6, 4), (5, 5))
LR, DECAY = 0.02, 0.1
WholeStep = Callable[..., object]
_CHANGED = "The function has changed G itself. lerp makes a new matrix; lerp_ is for the buffer."


def outcome(race: Race) -> dict[str, Any]:
    """The answers to the bet: the winner, and the step at which it reaches the runner-up's last loss."""
    return {"winner": race.ranking()[0], "caught": round(race.caught_at(), -1)}


def all_exercises(run: TrainedGPT, G: Tensor) -> tuple[Exercise, ...]:
    svd, promised, whole = write_update(), write_promise(), write_step()
    return write_loudest(), svd, promised, whole, write_split(run.model), quiz(run, G)


def loudest(S: Tensor, share: float) -> int:
    """The exercise's reference: how many of the loudest directions carry this share of all energy."""
    energy = (S**2).cumsum(0) / (S**2).sum()
    return int((energy < share).sum()) + 1


def write_loudest() -> Exercise:
    spectra = ([5.0, 3.0, 2.0, 1.0, 1.0, 1.0], [2.0] * 8, [4.0, 3.0, 3.0, 2.0, 2.0, 1.0, 1.0])
    cases = [(torch.tensor(each), share) for each in spectra for share in (0.45, 0.5, 0.95)]

    def one_too_many(S: Tensor, share: float) -> int:
        return int(((S**2).cumsum(0) / (S**2).sum() <= share).sum()) + 1

    slips = (
        ("Energy is the *square* of a singular value.", lambda S, share: loudest(S.sqrt(), share)),
        ("Count the direction with which the share is reached, too.", lambda S, share: loudest(S, share) - 1),
        ("If the share is reached exactly, count no further.", one_too_many),
        ("Begin with the loudest.", lambda S, share: loudest(S.flip(0), share)),
        ("Half is only one share: use the second argument.", lambda S, share: loudest(S, 0.5)),
    )
    hints = ("(S**2).cumsum(0) adds up from the loudest on.",)
    praise = "A few loud directions have most of it."
    return written(loudest, cases, *slips, say="S = {0} and share {1}", hints=hints, praise=praise)


def promise(G: Tensor, update: Tensor) -> Tensor:
    """The exercise's reference: how far an update, scaled to spectral norm 1, promises to lower the loss."""
    return (G * update).sum() / torch.linalg.svdvals(update)[0]


def write_promise() -> Exercise:
    generator = torch.Generator().manual_seed(3)
    shapes = ((3, 5), (5, 3), (4, 4))
    cases = [tuple(torch.randn(2, *shape, generator=generator, dtype=torch.float64)) for shape in shapes]

    def over(size: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda G, update: (G * update).sum() / size(update)

    slips = (
        ("First divide the update by its largest singular value.", lambda G, update: (G * update).sum()),
        ("The norm comes from all singular values. Only the largest counts.", over(torch.norm)),
        ("Divide by the update's singular value, not by that of G.", lambda G, u: promise(u, G)),
        ("The largest entry is no singular value.", over(lambda update: update.abs().max())),
    )
    hints = ("torch.linalg.svdvals(update)[0] is the largest singular value.",)
    praise = "Now updates of any size can be compared."
    say = "a gradient of {0.shape[0]} × {0.shape[1]}"
    return written(promise, cases, *slips, say=say, hints=hints, praise=praise)


def split(model: Module) -> tuple[list[str], list[str]]:
    """The exercise's reference: the names of Muon's parameters, and the names of AdamW's."""
    found = split_parameters(model)
    return list(found.hidden_names), list(found.rest_names)


def write_split(model: Module) -> Exercise:
    hidden, rest = map(set, split(model))

    def judge(function: Callable[[Module], Any]) -> str | None:
        value = value_of(function, model)
        if not isinstance(value, tuple) or len(value) != 2 or not all(isinstance(v, list) for v in value):
            return "Return two lists of names: Muon's, then AdamW's."
        mine, others = map(set, value)
        if strangers := sorted(str(each) for each in (mine | others) - hidden - rest):
            return f"There is no parameter {strangers[0]}. Return names."
        if lost := sorted((hidden | rest) - mine - others):
            return f"Neither list has {lost[0]}. Each parameter needs an optimizer."
        if twice := sorted(mine & others):
            return f"Both lists have {twice[0]}. It would be stepped twice."
        if (mine, others) == (rest, hidden):
            return "These lists have changed places: Muon's comes first."
        wrong = [name for name in value[0] if name in rest]
        if vectors := [name for name in wrong if "norm" in name]:
            return f"Muon got {vectors[0]}: a vector has no directions. Ask parameter.dim()."
        if wrong:
            return f"Muon got {', '.join(wrong)}, but only hidden matrices are Muon's."
        return None if mine == hidden else f"AdamW got {min(hidden - mine)}, which is a hidden matrix."

    hints = ("parameter.dim() is 2 for a matrix, and names of hidden ones begin with blocks.",)
    return Exercise(judge, hints, "split_parameters sorts them the same way.")


def gradients(shape: tuple[int, int]) -> Iterator[Tensor]:
    """Three random gradients of one shape, the same on each call."""
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) for _ in range(3))


def write_update() -> Exercise:
    """The exercise: Nesterov momentum, then U Vᵀ, for wide, tall and square matrices, call after call."""

    def judge(function: SVDUpdate) -> str | Diagnosis | None:
        for shape in SHAPES:
            mine, right, past = torch.zeros(shape), torch.zeros(shape), []
            for call, G in enumerate(gradients(shape), 1):
                past.append(G)
                value = _update_of(function, G, mine)
                if wrong := _judge_update(past, value, svd_update(G, right), mine, right, call):
                    return wrong
        return None

    hints = (
        "Three lines are enough: bring the buffer up to date, look ahead, then take the SVD of that.",
        "buffer.lerp_(G, 1 - momentum), then ahead = G.lerp(buffer, momentum), then U @ Vt of ahead.",
    )
    praise = "The average's directions, with every singular value 1: this is what Muon aims at."
    return Exercise(judge, hints, praise)


def _update_of(function: SVDUpdate, G: Tensor, buffer: Tensor) -> Tensor:
    told = f"{{}} Here G is {say_size(G)}."
    value = value_of(function, given := G.clone(), buffer, told=told)
    if value is None:
        raise MistakeError("The function returns nothing. Is there a return?")
    if not torch.equal(given, G):
        raise MistakeError(_CHANGED)
    if not isinstance(value, Tensor):
        raise MistakeError(f"The function must return a matrix; it returned {type(value).__name__}.")
    if value.shape != G.shape:
        raise MistakeError(f"G is {say_size(G)}, and so must its update be. Yours is {say_size(value)}.")
    return value


def _judge_update(
    past: list[Tensor], value: Tensor, wanted: Tensor, mine: Tensor, right: Tensor, call: int
) -> str | Diagnosis | None:
    same_buffer = torch.allclose(mine, right, atol=1e-5)
    if torch.allclose(value, wanted, atol=1e-4) and same_buffer:
        return None
    for what, hints, update, buffer in _usual_updates(past):
        if torch.allclose(value, update, atol=1e-4) and torch.allclose(mine, buffer, atol=1e-4):
            return Diagnosis(what, hints, None if _is_flat(value) else _spectrum_of(value))
    if not _is_flat(value):
        values = torch.linalg.svdvals(value)
        said = f"Its singular values go from {values[-1]:.2f} to {values[0]:.2f}; all of them should be 1."
        return Diagnosis(said, picture=_spectrum_of(value))
    if not same_buffer:
        return f"After call {call} the buffer is not 0.95 × the old buffer + 0.05 × G."
    return f"In call {call} all singular values are 1, but the directions are not those of the average."


def _is_flat(value: Tensor) -> bool:
    return bool((torch.linalg.svdvals(value) - 1).abs().max() < 1e-3)


def _spectrum_of(value: Tensor) -> Picture:
    mine = torch.linalg.svdvals(value.detach().float())
    curves = [Curve.of("yours", mine, WRONG), Curve.of("wanted", torch.ones(len(mine)), MUON, "--")]
    return draw_spectra([("The singular values of your update", curves)], "why_muon-mine")


def _usual_updates(past: list[Tensor]) -> Iterator[tuple[str, tuple[str, ...], Tensor, Tensor]]:
    """Usual mistakes: for each, what to say, hints, and the update and buffer that result from it."""
    G, zero = past[-1], torch.zeros_like(past[-1])
    average, total, directions = zero.clone(), zero.clone(), zero.clone()
    for each in past:
        average.lerp_(each, 1 - MOMENTUM)
        total = MOMENTUM * total + each
        directions.lerp_(svd_muon(each), 1 - MOMENTUM)
    ahead = G.lerp(average, MOMENTUM)
    no_lookahead = "Nesterov looks ahead: average G with the new buffer once more, and orthogonalize that."
    what = "This is U Vᵀ of G alone, because the buffer has not changed."
    hint = "Average G into the buffer first, in place: lerp makes a new matrix, lerp_ changes the buffer."
    yield what, (hint,), svd_muon(G), zero
    yield "The momentum is right, but Nesterov is missing.", (no_lookahead,), svd_muon(average), average
    what = "The sign is wrong: this update increases the loss."
    yield what, ("W - lr * update brings the minus sign.",), -svd_muon(ahead), average
    yield "This is the average itself, with unchanged singular values.", ("Leave S out.",), ahead, average
    what = "The buffer is a sum of gradients, not their average: 20 times too large."
    hint = "The old buffer counts 0.95, the new gradient 1 - 0.95."
    yield what, (hint,), svd_muon(G + MOMENTUM * total), total
    what = "You averaged after orthogonalizing. The average of flat updates is not flat."
    yield what, ("First the average, then the SVD.",), svd_muon(G).lerp(directions, MOMENTUM), directions


def slipped(*changes: tuple[str, str]) -> WholeStep:
    """The reference of Muon's whole update, with each change's first text replaced by its second."""
    text, names = inspect.getsource(updates.muon_step), dict(vars(updates))
    for right, wrong in changes:
        assert right in text, right
        text = text.replace(right, wrong)
    exec(text, names)
    return names["muon_step"]


_BUFFER, _AHEAD = "buffer.lerp_(G, 1 - momentum)", "G.lerp(buffer, momentum)"
_SHRINK, _ADD = "W.mul_(1 - lr * weight_decay)", "W.add_(update, alpha=-lr * factor)"
_FACTOR = "max(1, W.shape[0] / W.shape[1]) ** 0.5"
SLIPS: dict[str, tuple[Any, ...]] = {
    "Nesterov is missing.": ("Orthogonalize G.lerp(buffer, momentum).", (_AHEAD, "buffer")),
    "The look-ahead is mostly G: it should be mostly the buffer.": (
        _AHEAD,
        (_AHEAD, "G.lerp(buffer, 1 - momentum)"),
    ),
    "Weight decay lacks lr.": ("W shrinks by lr * weight_decay.", (_SHRINK, "W.mul_(1 - weight_decay)")),
    "Weight decay is missing.": ("W shrinks by lr * weight_decay.", (_SHRINK, "pass")),
    "Weight decay is scaled by the size factor. It takes the plain lr.": (
        _SHRINK,
        (_SHRINK, "W.mul_(1 - lr * factor * weight_decay)"),
    ),
    "Weight decay went through the gradient. It is decoupled: it shrinks W and touches nothing else.": (
        "Leave G as it is, and multiply W by 1 - lr * weight_decay.",
        (_SHRINK, "pass"),
        (_BUFFER, f"G = G + weight_decay * W; {_BUFFER}"),
    ),
    "W shrinks after the update. It should shrink before.": (
        "Swap two lines.",
        (_SHRINK, "pass"),
        (_ADD, f"{_ADD}; {_SHRINK}"),
    ),
    "The size factor is missing.": ("The root of max(1, rows / columns).", (_FACTOR, "1")),
    "The size factor lacks its root.": ("The root of max(1, rows / columns).", (" ** 0.5", "")),
    "For this wide matrix your size factor is √(columns / rows), not 1. Rows are always the numerator.": (
        "W.shape[0] / W.shape[1], and at least 1, then the root.",
        (_FACTOR, "max(1, W.shape[1] / W.shape[0]) ** 0.5"),
    ),
    "The size factor shrinks the update of a wide matrix. It is at least 1.": (
        "max(1, rows / columns), then the root.",
        (_FACTOR, "(W.shape[0] / W.shape[1]) ** 0.5"),
    ),
    "The sign is wrong: this update increases the loss.": ("alpha=-lr * factor", ("-lr", "lr")),
}
"""What to say of usual mistakes in the whole update, a hint, and the changes of code that make each."""


def write_step() -> Exercise:
    """The exercise: Muon's whole update, compared with torch.optim.Muon, step after step, to the bit."""

    def judge(function: WholeStep) -> str | Diagnosis | None:
        for shape, *more in (*((shape, MOMENTUM, DECAY) for shape in SHAPES), (SHAPES[0], 0.5, 0.3)):
            W, buffer = torch.randn(shape, generator=torch.Generator().manual_seed(9)), torch.zeros(shape)
            theirs = torch.nn.Parameter(W.clone())
            stock = torch.optim.Muon([theirs], lr=LR, momentum=more[0], weight_decay=more[1])
            for number, G in enumerate(gradients(shape), 1):
                before, given = (W.clone(), buffer.clone()), G.clone()
                told = f"{{}} Here W and G are {say_size(G)}."
                value_of(function, W, given, buffer, LR, *more, told=told)
                theirs.grad = G.clone()
                stock.step()
                right = theirs.detach(), stock.state[theirs]["momentum_buffer"]
                if wrong := _judge_step((W, buffer), right, before, G, number):
                    usual = more == [MOMENTUM, DECAY]
                    return wrong if usual else "Right for 0.95 and 0.1 only: use momentum and weight_decay."
                if not torch.equal(given, G):
                    return _CHANGED
        return None

    hints = (
        "Six lines: buffer, look-ahead, orthogonalize, factor, decay, add. You have written the first two.",
        "The last two lines: W.mul_(1 - lr * weight_decay), then W.add_(update, alpha=-lr * factor).",
    )
    praise = "Step after step it gives the bits of torch.optim.Muon, for tall, wide and square matrices."
    return Exercise(judge, hints, f"You have written Muon. {praise}")


_Pair = tuple[Tensor, Tensor]
"""A weight and its momentum."""


def _judge_step(mine: _Pair, right: _Pair, before: _Pair, G: Tensor, number: int) -> str | Diagnosis | None:
    (my_W, my_buffer), (wanted, its), (W, buffer) = mine, right, before
    if torch.equal(my_W, wanted) and torch.equal(my_buffer, its):
        return None
    if torch.equal(my_W, W):
        return "W has not changed. W = … gives a new matrix the name W; W.mul_ and W.add_ change it in place."
    if torch.equal(my_buffer, buffer):
        return "The buffer has not changed. buffer.lerp_ changes it in place; buffer.lerp makes a new one."
    for what, (hint, *changes) in SLIPS.items():
        other, its_buffer = W.clone(), buffer.clone()
        slipped(*changes)(other, G, its_buffer, LR)
        is_this = torch.allclose(my_W, other, atol=1e-6) and torch.allclose(my_buffer, its_buffer)
        if is_this and not torch.allclose(other, wanted, atol=1e-6):
            return Diagnosis(what, (hint,))
    if torch.allclose(my_buffer, buffer * MOMENTUM + G, atol=1e-5):
        why = "Newton–Schulz first divides its input by the norm, so W comes out nearly the same"
        what = f"The buffer is a sum of gradients. {why}, but torch keeps the average."
        return Diagnosis(what, ("buffer.lerp_(G, 1 - momentum)",))
    off = (my_W - wanted).abs().max().item()
    if off < 0.03 * LR:
        which, most = ("W", off) if off else ("the buffer", (my_buffer - its).abs().max().item())
        bits = f"{which} is off by at most {most:.0e}. Other operations round in other places."
        hint = "lerp_ and lerp for the averages, alpha= for the last line."
        return Diagnosis(f"Right except for the last bits: {bits}", (hint,))
    return f"In step {number} of a {say_size(W)} matrix, W is off by up to {off:.2g}."


def quiz(run: TrainedGPT, G: Tensor) -> Exercise:
    S = torch.linalg.svdvals(G)
    _, rest = split_parameters(run.model)
    each = "Each direction adds 1. Try torch.linalg.svdvals(orthogonalize(G)).sum(), or count the directions."
    return numbers(
        ("sum", float(len(S)), each),
        ("times", (S[0] / S.median()).item(), "Divide S[0] by S.median(), in torch the lower median."),
        ("factor", 2.0, "The root of rows / columns, 400 / 100."),
        ("left_out", float(sum(p.numel() for _, p in rest)), "Add up p.numel() over rest, not over hidden."),
        within=0.01,
    )
