"""Two nodes on one machine: network namespaces joined by a virtual link, and torchrun's agents across it."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import pytest

from scripts.lab.faults.nodes import NoNamespacesError, disturbed


@pytest.mark.timeout(900)
@pytest.mark.exhaustive  # ``test_two_agents`` kills a rank on one node, and gets the same bits
@pytest.mark.skipif(sys.platform != "linux", reason="network namespaces")
@pytest.mark.parametrize(("kind", "least"), [("node", 2), ("link", 2), ("node", 1)])
def test_a_job_that_loses_a_node_or_the_link_ends_as_an_undisturbed_one(
    kind: str, least: int, tmp_path: Path
) -> None:
    """On the remaining nodes, the losses differ only by the order of sums."""
    try:
        is_alike, _ = disturbed(Random(0), [kind], least, tmp_path, 20)
    except NoNamespacesError as error:
        pytest.skip(f"this kernel lets nobody make a namespace: {error}")
    assert is_alike
