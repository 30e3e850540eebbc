"""Exercises of lesson 14: an unseen grid, how many owners are enough, rings across nodes, a quiz, the most
ranks with which backward hides the gradients' all_reduce, a rank's activations, and tokens for experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...plan.assign import longest_first
from ...timing.machine import find_machine
from ..exercises.judge import Exercise, guesses, numbers, why, written
from ..exercises.on_real_ranks import judge_on_ranks
from ..first_muon.exercises import loads_of
from .on_ranks import answers_of, layer_of, run_tokens, tokens_of
from .scaling import FLOPS, MACHINE, MODEL, RANKS, TOKENS, TP, UNSEEN, WIDTH, card, seconds_of, step_at


def unseen() -> dict[str, Any]:
    """The planner's numbers for the model that was not shown: the answers to the first prediction."""
    fewer, more, most = (step_at(UNSEEN, ranks) for ranks in (2048, 4096, RANKS[-1]))
    return {
        "idle": more.idle_owners,
        "shrinks": round(fewer.busiest / more.busiest, 2),
        "slower": most.seconds() > more.seconds(),
    }


def unseen_exercise() -> Exercise:
    """The prediction for a grid that no picture has shown."""
    right = unseen()
    fewer = "Each matrix has its own owner now. Does the busiest owner now have less to do than before?"
    slower = "A rank still computes as much and sends as many bytes. What grows with the ranks?"
    return guesses(
        ("idle", right["idle"], "A matrix has one owner. How many owners are there, and how many matrices?"),
        ("shrinks", right["shrinks"], fewer),
        ("slower", right["slower"], slower),
        praise="From here on, each new owner stands idle.",
        within=0.01,
    )


def busiest(seconds: Iterable[float], owners: int) -> float:
    """Seconds of the busiest owner if the costliest matrices are dealt out first, as lesson 11 does."""
    costs: Sequence[Any] = list(seconds)
    return max(loads_of(costs, longest_first(costs, [0] * owners), owners))


def enough_owners(seconds: Sequence[float]) -> int:
    """The exercise's reference: the fewest owners with which the costliest matrix alone sets the time.

    >>> enough_owners([4, 2, 2, 1, 1])
    3
    """
    owners = 1
    while busiest(seconds, owners) > max(seconds):
        owners += 1
    return owners


def enough_exercise() -> Exercise:
    """The exercise: the fewest owners with which the costliest matrix alone sets the time."""
    cases = [([4, 2, 2, 1, 1],), ([2, 2, 3, 3, 2, 2, 4],), ([5],), ([3, 3, 2, 2, 2, 6],), ([1, 2, 1, 1, 1],)]
    slips = (
        ("That is one owner for each matrix. Do cheap ones need one each?", len),
        ("A matrix cannot be cut: its owner takes all of it.", lambda each: math.ceil(sum(each) / max(each))),
        ("Begin with one owner.", lambda each: max(2, enough_owners(each))),
    )
    hints = ("A number of owners is enough if lesson.busiest(seconds, owners) <= max(seconds).",)
    praise = "From there on, only a faster Newton–Schulz would help."
    return written(enough_owners, cases, *slips, say="seconds {}", hints=hints, praise=praise)


def reduce_seconds(entries: int, tp: int, card: float) -> float:
    """The exercise's reference: seconds to send a rank's fp32 gradients once, out of a node of 8 cards."""
    return (4 * entries / tp) / (card * 8 / tp)


def wires_exercise() -> Exercise:
    """The exercise: seconds in which gradients leave a node, with tp and without."""
    cases = [(7 * 10**9, tp, 42.5e9) for tp in (1, 8)] + [(10**9, 2, 25e9)]
    slips = (
        ("With tp, a rank holds only 1 / tp of the entries.", lambda n, tp, card: 4 * n / (card * 8 / tp)),
        ("How many cards has each ring in a node? 8 / tp of them.", lambda n, tp, card: 4 * n / tp / card),
        ("Only with tp=1 do all 8 cards carry one ring.", lambda n, tp, card: 4 * n / tp / (8 * card)),
        ("In fp32 each entry is 4 bytes.", lambda n, tp, card: n / (8 * card)),
    )
    say, praise = "{} entries, tp={} and {:.3g} bytes a second", "tp cancels: it divides bytes and cards."
    return written(reduce_seconds, cases, *slips, say=say, praise=praise)


def quiz() -> Exercise:
    owners = enough_owners(seconds_of(MODEL))
    return numbers(
        ("idle", RANKS[-1] // TP - len(seconds_of(MODEL)), "With tp=8, how many owners are there?"),
        ("ranks", 4 * owners, f"{owners} owners are enough, whatever tp is. And an owner is how many ranks?"),
        ("cards", 4, "A node's rings share its 8 cards evenly. How many rings are there with tp=2?"),
    )


def most_ranks(tokens: int, flops: float, bandwidth: float) -> int:
    """The exercise's reference: the most ranks along dp with which backward hides the whole all_reduce.

    With n entries on each of P ranks, backward takes 4·n·tokens / (P·flops) seconds, and the all_reduce
    2·2·n·(P − 1) / (P·bandwidth).

    >>> most_ranks(4_000_000, 400e12, 25e9)
    251
    """
    return 1 + int(tokens * bandwidth / flops)


def found_limits() -> dict[str, Any]:
    """ZeRO-3's limit beside DDP's, and tp's limit in an MLP, over network cards and inside a node."""
    halves = ((2, 1), (4, 2))  # forward and backward: (operations per token and entry, shares sent) of each
    zero3 = min(most_ranks(TOKENS, FLOPS, card() * operations / 2 / shares) for operations, shares in halves)
    ddp, links = most_ranks(TOKENS, FLOPS, card()), {"tp_ranks": card()}
    links["tp_ranks over NVLink"] = find_machine(MACHINE).inside.bandwidth
    found = "as many" if zero3 == ddp else "fewer" if zero3 < ddp else "more"
    return {"zero3": found, **{name: most_ranks(WIDTH, FLOPS, link) for name, link in links.items()}}


def most_exercise() -> Exercise:
    """The exercise: the most ranks along dp with which backward hides the all_reduce of bf16 gradients."""
    cases = [(TOKENS, FLOPS, card()), (2**20, 5e14, 1e11), (2**19, 9e14, 5e10), (2**16, 9e14, 1.25e10)]

    def times(factor: float) -> Callable[..., int]:
        return lambda tokens, flops, bandwidth: most_ranks(tokens, flops, factor * bandwidth)

    slips = (
        ("A rank sends P − 1 shares twice, not P.", lambda t, flops, w: int(t * w / flops)),
        ("An all_reduce is a reduce_scatter and an all_gather: each sends P − 1 shares.", times(2)),
        ("An entry has 2 bytes in bf16, and backward takes 4 operations for it.", times(1 / 2)),
        ("Count the 4 operations of backward alone: forward's 2 run before the all_reduce.", times(3 / 2)),
        ("With one rank more, the all_reduce takes longer.", lambda *given: 1 + most_ranks(*given)),
        ("Give a whole number, rounded down.", lambda t, flops, w: 1 + t * w / flops),
    )
    hints = (
        "Backward takes 4 · n · tokens / (P · flops) seconds on a rank that holds n entries.",
        "An all_reduce of 2 · n bytes sends 2 · (P − 1) shares, each of 2 · n / P bytes.",
    )
    say, praise = "{} tokens, {:.3g} operations and {:.3g} bytes a second", "The model's size cancels."
    return written(most_ranks, cases, *slips, say=say, hints=hints, praise=praise)


def activation_bytes(tokens: float, hidden: int, layers: int, tp: int, recompute: bool) -> float:
    """The exercise's reference: a rank's activations as backward begins, in bf16, without attention's scores.

    A layer has 34 bytes for each token and hidden entry, cut over tp with sequence parallelism (Korthikanti
    et al., 2022). With ``recompute``, all layers but one keep only their input, 2 of the 34 bytes.

    >>> activation_bytes(4, 10, 3, 2, False), activation_bytes(4, 10, 3, 2, True)
    (2040.0, 760.0)
    """
    layer = 34 * tokens * hidden / tp
    kept = 2 * tokens * hidden / tp if recompute else layer
    return layer + (layers - 1) * kept


def fits_exercise() -> Exercise:
    """The exercise: bytes of a rank's activations, with and without recomputing."""
    cases = [(10, 8, 3, 1, False), (10, 8, 3, 4, False), (10, 8, 3, 4, True), (64, 8, 1, 2, True)]

    def of(counted: Callable[[int, bool], int]) -> Callable[..., float]:
        return lambda tokens, hidden, layers, tp, again: counted(layers, again) * tokens * hidden / tp

    slips = (
        ("tp cuts tokens and hidden features alike.", lambda t, h, n, tp, r: activation_bytes(t, h, n, 1, r)),
        ("The whole layer's input is among its 34.", of(lambda n, again: 34 + 2 * n if again else 34 * n)),
        ("Backward makes one layer whole again.", of(lambda n, again: (2 if again else 34) * n)),
        ("With recompute, all layers but one keep 2 bytes, not 34.", of(lambda n, again: 34 * n)),
        ("Each of the layers keeps its activations.", of(lambda n, again: 34)),
    )
    say = "{} tokens of {} entries, {} layers, tp={}, recompute={}"
    praise = "It grows with the tokens of one pass, not of the batch."
    return written(activation_bytes, cases, *slips, say=say, praise=praise, optional=True)


def experts_exercise(dp: int, tp: int, backend: str = "gloo") -> Exercise:
    """The optional exercise: on real ranks, send each token to the rank that has its expert."""
    hints = (
        "send = torch.bincount(expert_of, minlength=group.size()), and all_to_all_single turns it into take.",
        "tokens[expert_of.argsort(stable=True)] puts tokens for the same expert next to each other.",
        "all_to_all_single(came, by_expert, take, send, group=group): both lists hold whole numbers.",
    )
    play = partial(run_tokens, dp=dp, tp=tp, backend=backend, back=False)
    praise = "Each rank has its expert's tokens, and no token went anywhere else."
    judge = judge_on_ranks(play, partial(judge_tokens, dp, tp))
    return Exercise(judge, hints, praise, optional=True)


def judge_tokens(dp: int, tp: int, outputs: Sequence[Any]) -> str | None:
    """What is wrong with the tokens that came to the experts of each dp group; None if nothing is."""
    every = (tokens_of(place, dp) for place in range(dp))
    sent = [(tuple(t), e) for pair in every for t, e in zip(*(each.tolist() for each in pair), strict=True)]
    for rank, came in enumerate(outputs):
        if not isinstance(came, Tensor) or came.shape[1:] != (2,):
            return f"Rank {rank} must return tokens, in rows of two, not {getattr(came, 'shape', came)}."
        found, place = list(map(tuple, came.tolist())), rank // tp
        due = [token for token, expert in sent if expert == place]
        others = {token for token, expert in sent if expert != place}
        strays = sum(token in others for token in found)
        runs = "all_to_all_single cuts its input into runs, so tokens for one expert must stand together."
        in_order = sorted(found, key=lambda token: token[0]) == found
        wrong = why(
            (strays > 0, f"has {strays} of {len(found)} tokens for another expert. {runs}"),
            (not {*due} >= {*found}, "has rows that are no tokens. Were they ever filled?"),
            (sorted(found) != due, f"needs {len(due)} tokens, each once, and has {len(found)}."),
            (not in_order, "has its tokens, but not in the order of the ranks that sent them."),
        )
        if wrong:
            return f"Rank {rank}, with expert {place}, {wrong}"
    return None


def layer_exercise(dp: int, tp: int, backend: str = "gloo") -> Exercise:
    """The open exercise: a whole layer of experts, judged by its answers and gradients."""
    play = partial(run_tokens, dp=dp, tp=tp, backend=backend, back=True)
    praise = "Every answer is in its token's row, and every gradient is as in one process."
    return Exercise(judge_on_ranks(play, partial(judge_layer, dp, tp)), (), praise, optional=True)


def judge_layer(dp: int, tp: int, outputs: Sequence[Any]) -> str | None:
    """What is wrong with the answers, or else with the gradients, beside one process; None if nothing is."""
    layers = [layer_of(place, dp) for place in range(dp)]
    matrices = torch.stack([matrix for *_, matrix in layers])
    plain = [answers_of(tokens[:, None], matrices[expert_of])[:, 0] for tokens, expert_of, *_ in layers]
    due = [each * weights[:, None] for each, (_, _, weights, _) in zip(plain, layers, strict=True)]
    for rank, (found, _) in enumerate(outputs):
        tokens, expert_of, weights, matrix = layers[rank // tp]
        right, bare, scale = due[rank // tp], plain[rank // tp], weights[:, None]
        if not isinstance(found, Tensor) or found.shape != right.shape:
            what = found.shape if isinstance(found, Tensor) else type(found).__name__
            return f"Rank {rank} must return one row for each of its {len(tokens)} tokens, not {what}."
        found, sent, own = found.to(right), expert_of.argsort(stable=True), answers_of(tokens, matrix) * scale
        turned = "has its answers in the order in which it sent the tokens. The tokens' order is another."
        known = [
            (right, ""),
            (bare, "has the experts' answers, but not times the tokens' weights."),
            (own, "has asked its own expert about all tokens. Each token must go to its own."),
            *((each, turned) for each in (right[sent], bare[sent], bare[sent] * scale)),
        ]
        other = f"has {found.tolist()}, where {right.tolist()} is right."
        if wrong := next((said for each, said in known if torch.allclose(found, each)), other):
            return f"Rank {rank} {wrong}"
    loss, parts = torch.cat(due).square().sum(), ("expert", "tokens", "weights")
    grads = [torch.autograd.grad(loss, (of, x, by), retain_graph=True) for x, _, by, of in layers]
    for rank, (_, mine) in enumerate(outputs):
        for part, found, right in zip(parts, mine, grads[rank // tp], strict=True):
            if found is None:
                end = "autograd records nothing of dist.all_to_all_single. Where does its chain end?"
                return f"All answers are right, but no gradient reaches the {part} of rank {rank}: {end}"
            if not torch.allclose(found, right):
                where = f"the gradient of the {part} of rank {rank} is wrong"
                return f"All answers are right, but {where}. What travels in backward, and to whom?"
    return None


def all_exercises(dp: int, tp: int, backend: str = "gloo") -> tuple[Exercise, ...]:
    alone = (unseen_exercise, enough_exercise, wires_exercise, quiz, most_exercise, fits_exercise)
    return *(make() for make in alone), experts_exercise(dp, tp, backend), layer_exercise(dp, tp, backend)
