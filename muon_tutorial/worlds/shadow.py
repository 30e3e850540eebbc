"""Runs one rank on its own, without data, to list the requests that it would make.

Answers are zeros of the right size. If a rank's tensors are on the meta device, where tensors have no values,
the answers are on it, too, and running a generator takes no memory, however large the sizes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..engine.collective import Collective, Start, Wait, Walk


def requests_of(walk: Walk) -> list[Collective]:
    """Return the collectives that one rank's generator asks for, in order."""
    issued: list[Collective] = []
    walk_alone(walk, issued.append)
    return issued


def walk_alone(walk: Walk, see: Callable[[Collective], object]) -> None:
    """Run one rank's generator to its end, and call ``see`` with each request. Requests are not stored."""
    device = torch.device("cpu")
    answer: object = None
    while True:
        try:
            turn = walk.send(answer)
        except StopIteration:
            return
        answer = None  # lets the generator free the tensor
        request, zeros = turn.request if isinstance(turn, Start) else turn, None
        if isinstance(request, Collective):
            see(request)
            # If this request sends no tensor, the answer is on the device of the last tensor that was sent.
            device = device if request.send is None else request.send.device
            zeros = torch.zeros(request.receive, dtype=request.dtype, device=device)
        if isinstance(turn, Start):
            answer = request, zeros  # the ticket keeps both tensors, as in a live world
        else:
            answer = turn.ticket[1] if isinstance(turn, Wait) else zeros
        del turn, request, zeros
