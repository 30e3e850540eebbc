"""Tests that a usual run leaves out, because others cover their subjects; ``-m exhaustive`` runs them.

``LEFT_OUT`` lists whole tests and single cases that take long, each with the test that covers it in a usual
run. If a table of cases has quick and slow ones, ``left_out`` marks the slow ones in the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

_ENDS = "test_a_run_saves_and_goes_on_and_once_it_cannot_save_ends_when_asked_again_or_its_grace_is_over"
_PLACE = "test_a_place_that_cannot_run_is_one_line"
_RUNS = "test_training_lowers_the_loss_as_one_process_does_passes_its_check_and_fills_its_folder"
_SIGNALS = "test_a_stopped_run_saves_says_so_in_one_line_and_leaves_no_process"

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
    "evidence/test_memory.py": {
        "test_the_predicted_peak_is_the_measured_one[dp=4]": "dp=2 × tp=2, which has both axes",
    },
    "evidence/test_predict.py": {
        "test_predicted_is_counted_on_real_ranks[(2, 1)]": "(3, 2); any grid is counted in one process",
        "test_predicted_is_counted_on_real_ranks[(2, 2)]": "(3, 2), where little divides evenly",
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
        f"{_SIGNALS}[SIGINT to the run]": (
            "SIGTERM; SIGINT to a run that cannot save, and before the imports are done"
        ),
        f"{_SIGNALS}[SIGHUP to the run]": "SIGTERM and SIGUSR1",
        f"{_SIGNALS}[SIGXCPU to the run]": "SIGTERM and SIGUSR1",
        f"{_SIGNALS}[SIGTERM to its group]": "SIGTERM to the command, and to one rank",
        f"{_SIGNALS}[SIGTERM to every process]": "SIGTERM to the command, and to one rank",
        f"{_ENDS}[15-options1-143-terminated; the steps so far are in {{}}]": "SIGINT; SIGTERM's grace",
        f"{_PLACE}[ulimit -n 16; exec {{}} train --dp 2 --tp 1-1-error: 2 ranks need more files]": (
            "launch() says it in launching/test_launch.py; an error of launch() is one line here"
        ),
        "test_a_run_needs_no_standard_output": (
            "a closed standard output is refused where it is needed; a run prints nothing until its end"
        ),
    },
    "training/test_preempted.py": {
        "test_a_signal_to_torchruns_agent_alone_saves_the_step_in_hand[SIGHUP-129]": "SIGTERM",
        "test_a_signal_to_torchruns_agent_alone_saves_the_step_in_hand[SIGINT-130]": (
            "SIGTERM; SIGINT to an agent whose script is another host's, and to runs in test_cli.py"
        ),
    },
    "training/test_two_agents.py": {
        "test_a_job_that_began_on_one_node_goes_on_when_another_joins": (
            "a job that loses a rank, which both agents restart; training/test_preempted.py: ranks save when "
            "their agent ends them; training/test_resume.py: restarted ranks use all ranks that there are"
        ),
    },
}
"""For each file, the tests that a usual run leaves out (by pytest's names), and what covers their subject."""


def is_left_out(node: str) -> bool:
    """Whether a usual run leaves out the test with this node id, or all of its cases."""
    path, _, name = node.removeprefix("tests/").partition("::")
    names = LEFT_OUT.get(path, {})
    return name in names or name.partition("[")[0] in names


def left_out(*values: Any, **options: Any) -> Any:
    """A case for ``parametrize`` that a usual run leaves out."""
    return pytest.param(*values, marks=pytest.mark.exhaustive, **options)
