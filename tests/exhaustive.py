"""Tests that a usual run leaves out, since other tests cover the same; ``-m exhaustive`` runs them.

``LEFT_OUT`` lists whole tests and single cases that take long, each with the test that covers it in a usual
run. If a table of cases has quick and slow ones, ``left_out`` marks the slow ones in the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

_PLACE = "test_a_place_that_cannot_run_is_one_line"
_RUNS = "test_training_lowers_the_loss_as_one_process_does_passes_its_check_and_fills_its_folder"
_SIGNALS = "test_a_stopped_run_says_so_in_one_line_and_leaves_no_process"
_SAVED = r"saved after step \\d+ in {0}/checkpoints; go on with: train --resume {0}"

LEFT_OUT: Mapping[str, Mapping[str, str]] = {
    "configs/test_helpers.py": {
        "test_every_helper_equals_the_single_process[8]": "fewer ranks; eight: the equality table",
    },
    "evidence/test_gloo_bytes.py": {
        "test_interface_counters_agree_within_two_percent": (
            "the kernel's count of each socket's bytes is the formula's, to the byte"
        ),
        "test_gloo_sends_what_the_formula_says_to_the_byte[2]": "three and four ranks",
        "test_gloo_sends_what_the_formula_says_to_the_byte[8]": "three and four ranks",
    },
    "evidence/test_predict.py": {
        "test_predicted_is_counted_on_real_ranks[(2, 2)]": "(3, 2), of which little is even",
    },
    "launching/test_launch_parent.py": {
        "test_a_killed_parent_leaves_nothing[fork-kill-9]": "SIGTERM, which has no handler; a killed kernel",
    },
    "orthogonalizers/test_iterate.py": {
        f"test_one_thread_or_two_give_the_same_bits_in_bf16[{shape}]": (
            "320 × 320 and 512 × 128; a CPU without bf16 units takes minutes for these"
        )
        for shape in ((768, 768), (3072, 768), (1024, 256))
    },
    "test_cli.py": {
        f"{_RUNS}[4 1]": "the grids 1×1 and 2×2",
        f"{_RUNS}[4 2]": "the grids 1×1 and 2×2; eight ranks are in the equality table",
        f"{_SIGNALS}[2-130-interrupted; {_SAVED}]": (
            "SIGTERM; SIGINT to a run that cannot save, and before the imports are done"
        ),
        f"{_SIGNALS}[1-129-ended by SIGHUP; {_SAVED}]": "SIGTERM and SIGUSR1",
        f"{_SIGNALS}[24-152-ended by SIGXCPU; {_SAVED}]": "SIGTERM and SIGUSR1",
        "test_sigterm_saves_whichever_processes_it_reaches[the group]": (
            "SIGTERM to the command, and to one rank"
        ),
        "test_sigterm_saves_whichever_processes_it_reaches[every process]": (
            "SIGTERM to the command, and to one rank"
        ),
        "test_a_run_that_cannot_save_ends_at_once_when_asked_again_or_when_its_grace_is_over"
        "[15-options1-143-terminated; the steps so far are in {}]": "SIGINT; SIGTERM's grace",
        f"{_PLACE}[ulimit -n 16; exec {{}} train --dp 2 --tp 1-1-error: 2 ranks need more files]": (
            "launch() says it in launching/test_launch.py; an error of launch() is one line here"
        ),
        "test_a_run_needs_no_standard_output": (
            "a closed standard output is refused where it is needed; a run prints nothing until its end"
        ),
    },
    "test_strategies.py": {
        "test_real_processes_equal_single_process[2]": "four ranks; two are in the equality table",
        "test_real_processes_equal_single_process[8]": "four ranks; eight are in the equality table",
    },
    "training/test_two_nodes.py": {
        "test_a_job_that_loses_a_node_or_the_link_ends_as_an_undisturbed_one": (
            "a rank killed on one node ends with the same bits, in training/test_restarts.py"
        ),
    },
}
"""By file: the tests that a usual run leaves out, by pytest's names, and what covers them there."""


def is_left_out(node: str) -> bool:
    """Whether a usual run leaves out the test with this node id, or all of its cases."""
    path, _, name = node.removeprefix("tests/").partition("::")
    names = LEFT_OUT.get(path, {})
    return name in names or name.partition("[")[0] in names


def left_out(*values: Any, **options: Any) -> Any:
    """A case for ``parametrize`` that a usual run leaves out."""
    return pytest.param(*values, marks=pytest.mark.exhaustive, **options)
