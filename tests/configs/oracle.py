"""An oracle with whole matrices, stepped together with the distributed optimizer on the same gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from muon_tutorial.newton_schulz import zeropower_via_newtonschulz
from muon_tutorial.step import orthogonalize

Whole = Callable[[Tensor, Tensor], Tensor]
"""``(parameter, this rank's part of it or of its gradient) -> the whole``. All ranks must call."""


class Oracle:
    """``torch.optim.Muon`` over copies of the whole parameters, on every rank."""

    def __init__(self, params: Sequence[Tensor], whole: Whole, **options: Any) -> None:
        self.params, self.whole = list(params), whole
        self.copies = [torch.nn.Parameter(whole(param, param.detach()).clone()) for param in self.params]
        self.stock = torch.optim.Muon(self.copies, **options)

    @torch.no_grad()
    def step(self) -> None:
        """Step the copies with the gradients that the parameters have now."""
        for param, copy in zip(self.params, self.copies, strict=True):
            copy.grad = None if param.grad is None else self.whole(param, param.grad).clone()
        self.stock.step()

    @torch.no_grad()
    def differences(self) -> list[str]:
        """The parameters that differ from their copies in any bit."""
        return [
            f"parameter {index} of shape {tuple(copy.shape)}"
            for index, (param, copy) in enumerate(zip(self.params, self.copies, strict=True))
            if not torch.equal(self.whole(param, param.detach()), copy)
        ]


counted = partial(patch.object, orthogonalize, "zeropower_via_newtonschulz", wraps=zeropower_via_newtonschulz)
"""``with counted() as calls``: ``calls.call_count`` matrices were orthogonalized in this process."""
