"""Gradients other than the matrices' are averaged in runs of one dtype and a bounded size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from muon_tutorial.step import reduce_gradients


def test_runs_are_filled_to_the_limit_and_each_parameter_is_looked_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[Tensor] = []

    def look(param: Tensor) -> Tensor:
        looked.append(param)
        return param

    monkeypatch.setattr(reduce_gradients, "ROUND_BYTES", 100)
    monkeypatch.setattr(reduce_gradients, "local_part", look)
    sizes = [10, 15, 1, 30, 5, 5, 15]
    params = [nn.Parameter(torch.zeros(size)) for size in sizes]
    params.append(nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)))
    runs = [[param.numel() for param in run] for run in reduce_gradients._runs(params)]
    assert runs == [[3], [10, 15], [1], [30], [5, 5, 15]]
    assert len(looked) == len(params)
