"""Two nodes on one machine: network namespaces joined by a virtual link, and torchrun's agents across it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from scripts.lab.faults.nodes import Node, NoNamespacesError, disturbed, two_nodes

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.live,
    pytest.mark.skipif(sys.platform != "linux", reason="network namespaces"),
]


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    """Two nodes joined by a link; skipped if the kernel allows no namespace without root."""
    try:
        with two_nodes() as both:
            yield both
    except NoNamespacesError as error:
        pytest.skip(f"this kernel lets nobody make a namespace: {error}")


@pytest.mark.usefixtures("nodes")
@pytest.mark.parametrize(("kind", "least"), [("node", 2), ("link", 2), ("node", 1)])
def test_a_job_that_loses_a_node_or_the_link_ends_as_an_undisturbed_one(
    kind: str, least: int, tmp_path: Path
) -> None:
    """On the remaining nodes, the losses are the same except for the order of sums."""
    is_alike, _ = disturbed(Random(0), [kind], least, tmp_path, 20)
    assert is_alike


def test_torchs_own_torchrun_is_told_what_to_set_before_restarts_fail(
    nodes: tuple[Node, Node], tmp_path: Path
) -> None:
    options = ("--steps", "2", "--out", "run")
    agents = [
        node.agent(tmp_path, nodes[0].address, *options, module="torch.distributed.run") for node in nodes
    ]
    assert [agent.wait(180) for agent in agents] == [0, 0]
    said = "".join((tmp_path / f"{node.link}.log").read_text() for node in nodes)
    assert said.count("set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1") == 1
