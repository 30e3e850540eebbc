"""What notebook 01 imports: a small GPT, trained for a few steps, and three updates from one gradient.

All three updates are without momentum, so that they see the same gradient: SGD's is the gradient itself,
Adam's divides each number by its running size, Muon's is orthogonalized.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from matplotlib.axes import Axes
from torch import Tensor

from ... import split_parameters
from ...newton_schulz import zeropower_via_newtonschulz
from ...training.gpt import GPT
from ..checks.exercise import Exercise, MistakeError, numbers, value_of
from ..inputs import measure
from ..inputs.small_gpt import GPT_SHAPE, Run
from ..pictures.picture import INK, QUIET, Picture, finish
from ..pictures.spectra import BLUE, GREEN, ORANGE, PLUM, Curve, card, decades, draw_spectra, plot, style
from ..widgets.reveal import FoldedAnswer, Reveal, predict
from ..widgets.shell import Shell, choice, show, slider

EXAMPLE = "blocks.1.mlp.up.weight"
EMBEDDING = "embedding.weight"
KINDS = {name: f"attention.{name}" for name in "qkvo"} | {"up": "mlp.up", "down": "mlp.down"}
LOUDNESS = 1e-3

Orthogonalize = Callable[[Tensor], Tensor]


def updates_of(run: Run, name: str, orthogonalize: Orthogonalize) -> dict[str, Tensor]:
    """What each optimizer would make of the gradient of one parameter."""
    gradient = run.gradients[name]
    return {
        "SGD": gradient,
        "Adam": gradient / (run.squares[name].sqrt() + 1e-8),
        "Muon, exact": orthogonalize(gradient),
        "Muon, as it runs": zeropower_via_newtonschulz(gradient).float(),
    }


LOOKS = {
    "SGD": (BLUE, "-"),
    "Adam": (ORANGE, "-"),
    "Muon, exact": (GREEN, "-"),
    "Muon, as it runs": (PLUM, "--"),
}


def say_run(run: Run, steps: int, seconds: float) -> str:
    """What was trained, in words."""
    count = sum(parameter.numel() for parameter in run.model.parameters())
    rows, columns = run.gradients[EXAMPLE].shape
    return (
        f"a GPT of {GPT_SHAPE.layers} layers and {count:,} numbers, {steps} steps "
        f"on Python's own library, {seconds:.1f} s\n"
        f"one gradient of it: {EXAMPLE}, {rows} × {columns}"
    )


def svd_muon(G: Tensor) -> Tensor:
    """The orthogonal factor of a matrix: its directions, each with singular value 1.

    >>> svd_muon(torch.diag(torch.tensor([3.0, 2.0])))
    tensor([[1., 0.],
            [0., 1.]])
    """
    U, _, Vt = torch.linalg.svd(G, full_matrices=False)
    return U @ Vt


# --- the exercise


def write_muon() -> Exercise:
    """The exercise: U Vᵀ, for wide, tall and square matrices."""

    def judge(function: Orthogonalize) -> str | None:
        generator = torch.Generator().manual_seed(0)
        for shape in ((6, 4), (4, 6), (5, 5)):
            G = torch.randn(shape, generator=generator)
            try:
                value = value_of(function, G.clone())
            except MistakeError as mistake:
                raise MistakeError(f"{mistake} {_sizes_of_factors(G)}") from None
            if wrong := _judge_muon(G, value):
                return wrong
        return None

    hints = (
        "torch.linalg.svd has taken G apart into U, S and Vt. Leave S out when you multiply them again.",
        "Vt is Vᵀ already. Two matrices and one @ are enough.",
    )
    return Exercise(judge, hints, "Same directions, every singular value 1. This is what Muon aims at.")


def _sizes_of_factors(G: Tensor) -> str:
    U, _, Vt = torch.linalg.svd(G, full_matrices=False)
    return f"Here G is {_size(G)}, U is {_size(U)}, and Vt is {_size(Vt)}."


def _judge_muon(G: Tensor, value: object) -> str | None:
    if value is None:
        return "The function returns nothing. Is there a return?"
    if not isinstance(value, Tensor):
        return f"The function must return a matrix; it returned {type(value).__name__}."
    if value.shape != G.shape:
        return f"G is {_size(G)}, and so must its update be. Yours is {_size(value)}."
    wanted = svd_muon(G)
    if torch.allclose(value, wanted, atol=1e-4):
        return None
    values = torch.linalg.svdvals(value)
    if torch.allclose(value, -wanted, atol=1e-4):
        return "The sign is turned round: it would climb. W - lr * update does the minus already."
    if torch.allclose(value, G, atol=1e-4):
        return "This is G itself, its singular values as they were."
    if (values - 1).abs().max() > 1e-3:
        return f"Its singular values go from {values[-1]:.2f} to {values[0]:.2f}; all of them should be 1."
    U, _, Vt = torch.linalg.svd(G, full_matrices=False)
    if any(torch.allclose(value, wrong, atol=1e-4) for wrong in _twice_transposed(U, Vt)):
        return "Vt is transposed already. U @ Vt.T turns it round once more."
    return "All its singular values are 1, but its directions are not those of G."


def _twice_transposed(U: Tensor, Vt: Tensor) -> list[Tensor]:
    return [U @ Vt.T] if Vt.shape[0] == Vt.shape[1] else []


def _size(matrix: Tensor) -> str:
    return " × ".join(map(str, matrix.shape))


def half_of_energy(G: Tensor) -> int:
    """How many of the loudest directions carry half of a matrix's energy, the sum of its squares."""
    return int((_energy(G) < 0.5).sum()) + 1


def _energy(G: Tensor) -> Tensor:
    squares = torch.linalg.svdvals(G.double()) ** 2
    return squares.cumsum(0) / squares.sum()


def guess_half(G: Tensor) -> Exercise:
    """The prediction: how many directions carry half of the energy?"""
    energy, right = _energy(G), half_of_energy(G)

    def judge(half: object) -> str | None:
        if not isinstance(half, int) or not 1 <= half <= len(energy):
            return f"Give a whole number from 1 to {len(energy)}."
        if half == right:
            return None
        word = "Fewer will do" if half > right else "It takes more"
        return f"{word}: the loudest {half} carry {energy[half - 1]:.1%} of the energy."

    loud = f"The loudest {right} of {len(energy)} carry {energy[right - 1]:.0%} of the energy."
    return Exercise(judge, ("Most gradients are more one-sided than one thinks.",), loud)


def quiz(run: Run, G: Tensor) -> Exercise:
    """Three numbers that the notebook has measured."""
    S = torch.linalg.svdvals(G)
    _, rest = split_parameters(run.model)
    expected = {
        "sum": float(len(S)),
        "times": (S[0] / S.median()).item(),
        "left_out": sum(parameter.numel() for _, parameter in rest),
    }
    why = {
        "sum": "Each direction adds 1. Try torch.linalg.svdvals(orthogonalize(G)).sum(), or count them.",
        "times": "Divide S[0] by S.median().",
        "left_out": "Add up parameter.numel() over rest, not over hidden.",
    }
    return numbers(expected, why, within=0.01)


# --- the pictures


def picture_of_circle(loud: float = 1.6, quiet: float = 0.25) -> Picture:
    """The circle of all inputs of length 1, and what two updates make of it: an ellipse, and a circle."""
    turn_in, turn_out = _rotation(0.5), _rotation(1.2)
    update = turn_out @ torch.diag(torch.tensor([loud, quiet], dtype=torch.float64)) @ turn_in.T
    figure = card(810, 300)
    panels = {
        "All inputs of length 1": torch.eye(2, dtype=torch.float64),
        "What a gradient makes of them": update,
        "Orthogonalized": svd_muon(update),
    }
    for number, (title, matrix) in enumerate(panels.items()):
        _draw_circle(figure.add_axes((0.01 + 0.33 * number, 0.02, 0.32, 0.84)), title, matrix, turn_in)
    alt = (
        "All inputs of length 1 form a circle, with a loud and a quiet direction marked. A gradient makes an "
        f"ellipse of it: {loud} long in the loud direction, {quiet} in the quiet one. Orthogonalized, the "
        "same two directions come out where they did, and both have length 1: a circle again."
    )
    return finish(figure, "lesson01-circle", alt)


def _rotation(angle: float) -> Tensor:
    c, s = math.cos(angle), math.sin(angle)
    return torch.tensor([[c, -s], [s, c]], dtype=torch.float64)


def _draw_circle(axes: Axes, title: str, matrix: Tensor, directions: Tensor) -> None:
    angles = torch.linspace(0, 2 * math.pi, 181, dtype=torch.float64)
    x, y = (matrix @ torch.stack((angles.cos(), angles.sin()))).tolist()
    axes.set(xlim=(-2.1, 2.1), ylim=(-2.1, 2.1), aspect="equal")
    axes.axis("off")
    axes.set_title(title, fontsize=10.5, fontweight="bold", color=INK)
    axes.fill(x, y, facecolor="#eaf2f8", edgecolor=INK, linewidth=1.4)
    for colour, label, column in ((BLUE, "loud", 0), (ORANGE, "quiet", 1)):
        right, up = (matrix @ directions[:, column]).tolist()
        axes.annotate(
            "", (right, up), (0, 0), arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 2.4}
        )
        length = math.hypot(right, up)
        beyond = 1 + 0.34 / length
        axes.text(
            right * beyond, up * beyond, f"{label}\n{length:.2g}", size=9, ha="center", va="center", color=INK
        )


def picture_of_gradient(G: Tensor) -> Picture:
    """The spectrum of one gradient, with the directions that carry half of its energy shaded."""
    curve = Curve.relative("the gradient", torch.linalg.svdvals(G), BLUE)
    half = half_of_energy(G)
    figure = card(660, 340)
    axes = style(figure.add_subplot(), EXAMPLE, "direction, the loudest first", _RELATIVE)
    decades(axes)
    plot(axes, [curve])
    axes.axvspan(0.5, half + 0.5, color="#f4b95f", zorder=0)
    axes.text(half + 1.5, 2e-4, f"the shaded {half} of {len(curve.values)} carry half of the energy", size=9)
    figure.tight_layout()
    return finish(figure, "lesson01-gradient", f"{curve.say()}. The first {half} carry half of the energy.")


def predict_ratio(G: Tensor, live: bool = True) -> Reveal | FoldedAnswer:
    """How much louder is the loudest direction than the middle one? Guess, then see the spectrum."""
    values = torch.linalg.svdvals(G)
    times = (values[0] / values.median()).item()
    guesses = {f"{factor:,} ×": float(factor) for factor in (3, 10, 30, 100, 300, 1000)}
    nearest = min(guesses.values(), key=lambda factor: abs(math.log(factor / times)))

    def judge(guess: float) -> str:
        if guess == nearest:
            return f"You said {guess:,.0f}, and that is nearest."
        return (
            f"You said {guess:,.0f}. It is {'more' if guess < nearest else 'less'}: nearer to {nearest:,.0f}."
        )

    question = "How many times as loud as the direction in the middle is the loudest?"
    return predict(question, choice("times", guesses), judge, picture_of_gradient(G), live)


def spectra_of(run: Run, name: str, orthogonalize: Orthogonalize) -> list[Curve]:
    """The spectra of all updates of one parameter, each as parts of its loudest direction."""
    updates = updates_of(run, name, orthogonalize).items()
    return [Curve.relative(who, torch.linalg.svdvals(update), *LOOKS[who]) for who, update in updates]


def explore(run: Run, orthogonalize: Orthogonalize, live: bool = True) -> Shell | Picture:
    """A button for each kind of matrix and a slider over the layers, over the spectra of its updates."""

    def draw(matrix: str, layer: int) -> Picture:
        name = f"blocks.{layer}.{KINDS[matrix]}.weight"
        return draw_spectra([(name, spectra_of(run, name, orthogonalize))], "lesson01-updates", _RELATIVE)

    matrix = choice("matrix", {kind: kind for kind in ("up", "down", *"qkvo")})
    layer = slider("layer", last=GPT_SHAPE.layers - 1, start=GPT_SHAPE.layers - 1)
    return show(draw, picture_of_all_updates(run, orthogonalize), live, matrix=matrix, layer=layer)


_RELATIVE = "loudness, of the loudest"


def picture_of_all_updates(run: Run, orthogonalize: Orthogonalize) -> Picture:
    """The spectra of the updates of three matrices of the last layer, side by side."""
    last = GPT_SHAPE.layers - 1
    names = {
        f"{KINDS[kind]}, layer {last}": f"blocks.{last}.{KINDS[kind]}.weight" for kind in ("up", "q", "o")
    }
    panels = [(title, spectra_of(run, name, orthogonalize)) for title, name in names.items()]
    return draw_spectra(panels, "lesson01-all-updates", _RELATIVE)


@dataclass(frozen=True, slots=True)
class Drop:
    """How far the loss falls after one update: as the gradient promises, and as measured."""

    promised: float
    measured: float


def loss_drops(run: Run, orthogonalize: Orthogonalize) -> dict[str, Drop]:
    """One update of all hidden matrices by each optimizer, its loudest direction scaled to ``LOUDNESS``."""
    hidden, _ = split_parameters(run.model)
    names = [name for name, _ in hidden]
    by_name = {name: updates_of(run, name, orthogonalize) for name in names}
    with measure.one_thread():
        return {who: _drop(run, {name: by_name[name][who] for name in names}) for who in LOOKS}


@torch.no_grad()
def _drop(run: Run, updates: Mapping[str, Tensor]) -> Drop:
    scaled = {
        name: update * (LOUDNESS / torch.linalg.matrix_norm(update, 2)) for name, update in updates.items()
    }
    promised = sum((run.gradients[name] * update).sum().item() for name, update in scaled.items())
    weights = {
        name: weight - scaled[name] if name in scaled else weight for name, weight in _weights(run.model)
    }
    logits = torch.func.functional_call(run.model, weights, (run.batch.inputs,))
    after = torch.nn.functional.cross_entropy(logits.flatten(0, 1), run.batch.targets.flatten())
    return Drop(promised, run.loss - after.item())


def _weights(model: GPT) -> list[tuple[str, Tensor]]:
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def picture_of_drops(drops: Mapping[str, Drop]) -> Picture:
    """How far the loss falls for each optimizer at the same loudness, as a multiple of SGD's promise."""
    unit = drops["SGD"].promised
    figure = card(660, 270)
    axes = style(
        figure.add_axes((0.2, 0.2, 0.76, 0.66)), "How far the loss falls, at the same loudness", "", ""
    )
    places = range(len(drops), 0, -1)
    promised, measured = (
        [getattr(drop, kind) / unit for drop in drops.values()] for kind in ("promised", "measured")
    )
    axes.barh(
        [p + 0.19 for p in places],
        promised,
        0.34,
        color="#b9d7ea",
        edgecolor=INK,
        label="promised by the gradient",
    )
    axes.barh([p - 0.19 for p in places], measured, 0.34, color=BLUE, edgecolor=INK, label="measured")
    axes.set_yticks(list(places), list(drops), color=INK)
    axes.set_xlabel("times what SGD promises", fontsize=9, color=QUIET)
    axes.set_xlim(0, max(*promised, *measured) * 1.45)
    axes.legend(fontsize=8.5, frameon=False, labelcolor=INK, loc="upper right")
    said = [
        f"{who}: promised {p:.2f}, measured {m:.2f}"
        for who, p, m in zip(drops, promised, measured, strict=True)
    ]
    return finish(
        figure, "lesson01-drops", f"How far the loss falls, in units of SGD's promise. {'; '.join(said)}."
    )


def picture_of_rows(run: Run) -> Picture:
    """The length of each row of the embedding's update, by how often its byte stood in the batch."""
    counts = torch.bincount(run.batch.inputs.flatten(), minlength=256)
    seen = counts > 0
    updates = updates_of(run, EMBEDDING, svd_muon)
    figure = card(820, 285)
    said = []
    for number, who in enumerate(("SGD", "Adam", "Muon, as it runs")):
        lengths = updates[who].norm(dim=1)[seen] / updates[who].norm(dim=1).max()
        axes = style(figure.add_subplot(1, 3, number + 1), who, "times the byte was read", "")
        axes.plot(counts[seen].tolist(), lengths.tolist(), "o", color=LOOKS[who][0], markersize=5, alpha=0.75)
        axes.set(xscale="log", ylim=(0, 1.08))
        axes.set_xticks([1, 10, 100], ["1", "10", "100"])
        once = lengths[counts[seen] == counts[seen].min()].median()
        said.append(f"{who}: rarest {once:.2f}, most frequent {lengths[counts[seen].argmax()]:.2f}")
    figure.axes[0].set_ylabel("length of its row, of the longest", fontsize=9, color=QUIET)
    figure.tight_layout()
    start = f"Lengths of the embedding update's rows, for the {int(seen.sum())} bytes that were read. "
    return finish(figure, "lesson01-rows", start + "; ".join(said) + ".")


def say_cost(G: Tensor, times: int = 5) -> str:
    """Seconds of the SVD and of Newton–Schulz, for ``G`` and for a matrix four times as large each way."""
    lines = [f"{'matrix':>12}  {'U Vᵀ by SVD':>12}  {'Newton–Schulz':>14}"]
    with measure.one_thread():
        for matrix in (G, G.repeat(4, 4) + torch.randn(4 * G.shape[0], 4 * G.shape[1]) * G.std()):
            svd = measure.median_seconds(partial(svd_muon, matrix), times)
            fast = measure.median_seconds(partial(zeropower_via_newtonschulz, matrix), times)
            lines.append(f"{_size(matrix):>12}  {svd * 1e3:>9.1f} ms  {fast * 1e3:>11.1f} ms")
    return "\n".join(lines)
