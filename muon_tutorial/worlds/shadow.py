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
    device = torch.device("cpu")
    answer: object = None
    while True:
        try:
            turn = walk.send(answer)
        except StopIteration:
            return
        answer = None  # the walk decides how long it is kept
        request, zeros = turn.request if isinstance(turn, Start) else turn, None
        if isinstance(request, Collective):
            see(request)
            # The answer lies where the rank's own tensors do: a rank that only receives does not say where.
            device = device if request.send is None else request.send.device
            zeros = torch.zeros(request.receive, dtype=request.dtype, device=device)
        if isinstance(turn, Start):
            answer = _Ticket(request, zeros)
        else:
            answer = turn.ticket.answer if isinstance(turn, Wait) else zeros
        del turn, request, zeros


@dataclass(frozen=True, slots=True, eq=False)
class _Ticket:
    """A request and its answer, both kept as long as the ticket is, as a live world keeps them."""

    request: object
    answer: torch.Tensor | None
