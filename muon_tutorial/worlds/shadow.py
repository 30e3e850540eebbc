"""Runs one rank on its own, without data, to list the requests that it would make.

Answers are zeros of the right size. If a rank's tensors lie on the meta device, which has sizes but no
values, the answers do, too: then a walk costs no memory, whatever the sizes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..engine.collective import Collective, Start, Wait, Walk


def requests_of(walk: Walk) -> list[Collective]:
    """The collectives that one rank's generator asks for, in the order in which it issues them."""
    issued: list[Collective] = []
    walk_alone(walk, issued.append)
    return issued


def walk_alone(walk: Walk, see: Callable[[Collective], object]) -> None:
    """Run one rank's generator to its end, and call ``see`` with each request; no request is kept here."""
    device = torch.device("cpu")
    answer: object = None
    while True:
        try:
            turn = walk.send(answer)
        except StopIteration:
            return
        answer = None  # only the walk keeps it alive
        request, zeros = turn.request if isinstance(turn, Start) else turn, None
        if isinstance(request, Collective):
            see(request)
            # The answer lies on the device of the rank's last sent tensor; a pure receiver sends none.
            device = device if request.send is None else request.send.device
            zeros = torch.zeros(request.receive, dtype=request.dtype, device=device)
        if isinstance(turn, Start):
            answer = request, zeros  # the ticket keeps both alive, as in a live world
        else:
            answer = turn.ticket[1] if isinstance(turn, Wait) else zeros
        del turn, request, zeros
