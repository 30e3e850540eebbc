"""One rank on its own, without data: what it would ask for.

Answers are zeros of the right size. Where what a rank sends lies on the meta device, and so has a size and no
values, the answers do too: then a walk costs no memory, whatever the sizes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..engine.collective import Collective, Start, Wait, Walk


def requests_of(walk: Walk) -> list[Collective]:
    """The collectives one rank's generator asks for, in the order in which it issues them."""
    issued: list[Collective] = []
    walk_alone(walk, issued.append)
    return issued


def walk_alone(walk: Walk, see: Callable[[Collective], object]) -> None:
    """Walk one rank's generator to its end; ``see`` is shown each request, of which nothing is kept here."""
    device, answer = torch.device("cpu"), None
    while True:
        try:
            turn = walk.send(answer)
        except StopIteration:
            return
        request = turn.request if isinstance(turn, Start) else turn
        if isinstance(request, Collective):
            see(request)
            device = device if request.send is None else request.send.device
        answer = _ticket(turn, device)
        del turn, request


def _ticket(turn: object, device: torch.device) -> object:
    """What a turn is answered with: a ticket is the answer itself, so that its memory counts from then on."""
    if isinstance(turn, Start):
        return _zeros(turn.request, device)
    return turn.ticket if isinstance(turn, Wait) else _zeros(turn, device)


def _zeros(request: object, device: torch.device) -> torch.Tensor | None:
    """The answer, where the rank's own tensors lie: a rank that only receives does not say where."""
    if not isinstance(request, Collective):
        return None
    return torch.zeros(request.receive, dtype=request.dtype, device=device)
