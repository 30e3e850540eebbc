"""Pictures of lesson 01: circles, spectra of updates, the fall of the loss, an embedding's rows."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from matplotlib.axes import Axes
from torch import Tensor

from ..inputs.small_gpt import GPT_SHAPE, TrainedGPT
from ..pictures.colours import ADAMW, INK, MUON, OTHER, QUIET, SGD
from ..pictures.picture import Picture, finish
from ..pictures.spectra import Curve, card, decades, draw_spectra, legend, plot, style
from ..widgets.reveal import FoldedPicture, Reveal, predict
from ..widgets.shell import Shell, choice, show, slider
from .updates import EMBEDDING, EXAMPLE, KINDS, LossDrop, Orthogonalize, half_of_energy, svd_muon, updates_of

LOOKS = {
    "SGD": (ADAMW, "-"),
    "Adam": (SGD, "-"),
    "Muon, exact": (MUON, "-"),
    "Muon, as it runs": (OTHER, "--"),
}


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
    return finish(figure, "why_muon-circle", alt)


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
    for colour, label, column in ((ADAMW, "loud", 0), (SGD, "quiet", 1)):
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
    curve = Curve.relative("the gradient", torch.linalg.svdvals(G), ADAMW)
    half = half_of_energy(G)
    figure = card(660, 340)
    axes = style(figure.add_subplot(), EXAMPLE, "direction, the loudest first", _RELATIVE)
    decades(axes)
    plot(axes, [curve])
    axes.axvspan(0.5, half + 0.5, color="#f4b95f", zorder=0)
    axes.text(half + 1.5, 2e-4, f"the shaded {half} of {len(curve.values)} carry half of the energy", size=9)
    figure.tight_layout()
    return finish(figure, "why_muon-gradient", f"{curve.say()}. The first {half} carry half of the energy.")


def predict_ratio(G: Tensor, live: bool = True) -> Reveal | FoldedPicture:
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


def spectra_of(run: TrainedGPT, name: str, orthogonalize: Orthogonalize) -> list[Curve]:
    """The spectra of all updates of one parameter, each as parts of its loudest direction."""
    updates = updates_of(run, name, orthogonalize).items()
    return [Curve.relative(who, torch.linalg.svdvals(update), *LOOKS[who]) for who, update in updates]


def explore(run: TrainedGPT, orthogonalize: Orthogonalize, live: bool = True) -> Shell | Picture:
    """A button for each kind of matrix and a slider over the layers, over the spectra of its updates."""

    def draw(matrix: str, layer: int) -> Picture:
        name = f"blocks.{layer}.{KINDS[matrix]}.weight"
        return draw_spectra([(name, spectra_of(run, name, orthogonalize))], "why_muon-updates", _RELATIVE)

    matrix = choice("matrix", {kind: kind for kind in ("up", "down", *"qkvo")})
    layer = slider("layer", last=GPT_SHAPE.layers - 1, start=GPT_SHAPE.layers - 1)
    return show(draw, picture_of_all_updates(run, orthogonalize), live, matrix=matrix, layer=layer)


_RELATIVE = "loudness, of the loudest"


def picture_of_all_updates(run: TrainedGPT, orthogonalize: Orthogonalize) -> Picture:
    """The spectra of the updates of three matrices of the last layer, side by side."""
    last = GPT_SHAPE.layers - 1
    names = {
        f"{KINDS[kind]}, layer {last}": f"blocks.{last}.{KINDS[kind]}.weight" for kind in ("up", "q", "o")
    }
    panels = [(title, spectra_of(run, name, orthogonalize)) for title, name in names.items()]
    return draw_spectra(panels, "why_muon-all-updates", _RELATIVE)


def picture_of_drops(drops: Mapping[str, LossDrop]) -> Picture:
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
    told = ("promised by the gradient", promised, 0.19, "#b9d7ea"), ("measured", measured, -0.19, ADAMW)
    for label, lengths, up, colour in told:
        axes.barh([p + up for p in places], lengths, 0.34, color=colour, edgecolor=INK, label=label)
    axes.set_yticks(list(places), list(drops), color=INK)
    axes.set_xlabel("times what SGD promises", fontsize=9, color=QUIET)
    axes.set_xlim(0, max(*promised, *measured) * 1.45)
    legend(axes, "upper right")
    said = [
        f"{who}: promised {p:.2f}, measured {m:.2f}"
        for who, p, m in zip(drops, promised, measured, strict=True)
    ]
    return finish(
        figure,
        "why_muon-drops",
        f"How far the loss falls, in units of SGD's promise. {'; '.join(said)}.",
    )


def picture_of_rows(run: TrainedGPT) -> Picture:
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
    return finish(figure, "why_muon-rows", start + "; ".join(said) + ".")
