"""Steps across the link of two nodes: the prediction by hand, and the command on real namespaces."""

from __future__ import annotations

from dataclasses import replace

import pytest

from muon_tutorial.timing.machine import Link, Machine
from scripts.lab.benchmarks.step_times import MBIT, predict_step
from scripts.lab.benchmarks.two_nodes import PAYLOAD, across, cases, measure
from scripts.lab.faults.nodes import NoNamespacesError

FLAT = ((1.0, 1e15),)
FREE = Machine("free", {"float32": FLAT, "bfloat16": FLAT}, FLAT, 0.0, 0.0, Link(1e12, 0.0), cores=2)
FULL = 4 * 12 * 128**2
"""Bytes of one layer's matrices in fp32."""


def test_bytes_take_their_time_on_the_link_and_a_delay_is_paid_for_each_round() -> None:
    case = replace(next(one for one in cases(100, 1) if one.strategy == "zero1"), mbit=None)
    whole, delay = predict_step(case, across(FREE, 100, 0.0)).seconds, 0.005
    assert whole >= FULL / (100 * MBIT * PAYLOAD)  # a half of the gradients, and a half of the parameters
    assert predict_step(case, across(FREE, 50, 0.0)).seconds == pytest.approx(2 * whole, rel=1e-3)
    later = predict_step(case, across(FREE, 100, 1000 * delay)).seconds - whole
    assert round(later / delay) >= 2 * len(case.plan.buckets)


@pytest.mark.live
@pytest.mark.exhaustive
def test_a_slow_link_takes_the_time_that_its_bytes_need() -> None:
    try:
        found = measure(10, 0.0, 1, 1)
    except NoNamespacesError as error:
        pytest.skip(f"this kernel cannot do it: {error}")
    by_strategy = {case.strategy: seconds for case, seconds in found}
    assert min(by_strategy["zero1"], by_strategy["layerwise"]) >= FULL / (10 * MBIT)
