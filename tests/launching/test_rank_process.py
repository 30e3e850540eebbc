"""Ranks reuse their memory for buffers, step after step."""

from __future__ import annotations

import platform
import resource
from statistics import median

import pytest
import torch

from muon_tutorial import launch

BUFFERS, ELEMENTS = 8, 1 << 20  # of 4 MiB each
PAGES = BUFFERS * ELEMENTS * 4 // resource.getpagesize()


def new_pages(rank: int) -> list[int]:
    """The number of new pages that the system supplies in each of a few steps with large buffers.

    In the first steps, malloc's heap may still grow, because the buffers do not fit into its gaps.
    """
    found = []
    for _ in range(13):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        buffers = [torch.ones(ELEMENTS) for _ in range(BUFFERS)]
        del buffers
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return found


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_a_rank_keeps_what_it_freed_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    ((*_, last_but_two, last_but_one, last),) = launch(new_pages, 1)
    assert median((last_but_two, last_but_one, last)) < PAGES / 10
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "100000")
    ((_, *later),) = launch(new_pages, 1, method="spawn")
    assert min(later) > PAGES / 10
