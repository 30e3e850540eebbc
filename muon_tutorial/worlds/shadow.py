"""One rank on its own, without data: what it would ask for.

Answers are zeros of the right size. Where what a rank sends lies on the meta device, and so has a size and no
values, the answers do too: then a walk costs no memory, whatever the sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
        answer = _reply(turn, device)
        del turn, request


@dataclass(frozen=True, slots=True, eq=False)
class _Ticket:
    """A request and its answer, both kept as long as the ticket is, as a live world keeps them."""

    request: object
    answer: torch.Tensor | None


def _reply(turn: object, device: torch.device) -> object:
    if isinstance(turn, Start):
        return _Ticket(turn.request, _zeros(turn.request, device))
    return turn.ticket.answer if isinstance(turn, Wait) else _zeros(turn, device)


def _zeros(request: object, device: torch.device) -> torch.Tensor | None:
    """The answer, where the rank's own tensors lie: a rank that only receives does not say where."""
    if not isinstance(request, Collective):
        return None
    return torch.zeros(request.receive, dtype=request.dtype, device=device)
