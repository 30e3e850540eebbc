"""One rank on its own, without data: what it would ask for.

Answers are zeros of the right size. Where what a rank sends lies on the meta device, and so has a size and no
values, the answers do too: then a walk costs no memory, whatever the sizes.
"""

from __future__ import annotations

import torch

from ..engine.collective import Collective, Start, Wait, Walk


def requests_of(walk: Walk) -> list[Collective]:
    """The collectives one rank's generator asks for, in the order in which it issues them."""
    issued: list[Collective] = []
    answer = None
    device = torch.device("cpu")
    while True:
        try:
            turn = walk.send(answer)
        except StopIteration:
            return issued
        request = turn.request if isinstance(turn, Start) else turn
        if isinstance(request, Collective):
            issued.append(request)
            device = device if request.send is None else request.send.device
        answer = (
            request
            if isinstance(turn, Start)
            else _zeros(turn.ticket if isinstance(turn, Wait) else turn, device)
        )


def _zeros(request: object, device: torch.device) -> torch.Tensor | None:
    """The answer, where the rank's own tensors lie: a rank that only receives does not say where."""
    if not isinstance(request, Collective):
        return None
    return torch.zeros(request.receive, dtype=request.dtype, device=device)
