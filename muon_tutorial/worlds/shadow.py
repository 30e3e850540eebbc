"""One rank on its own, without data: what it would ask for. Answers are zeros of the right size."""

from __future__ import annotations

import torch

from ..engine.collective import Collective, Start, Wait, Walk


def requests_of(walk: Walk) -> list[Collective]:
    """The collectives one rank's generator asks for, in the order in which it issues them."""
    issued: list[Collective] = []
    answer = None
    while True:
        try:
            turn = walk.send(answer)
        except StopIteration:
            return issued
        request = turn.request if isinstance(turn, Start) else turn
        if isinstance(request, Collective):
            issued.append(request)
        answer = (
            request if isinstance(turn, Start) else _zeros(turn.ticket if isinstance(turn, Wait) else turn)
        )


def _zeros(request: object) -> torch.Tensor | None:
    if not isinstance(request, Collective):
        return None
    return torch.zeros(request.receive, dtype=request.dtype)
