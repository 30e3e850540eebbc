"""Records some steps of a real training run, on every rank, in one file that Perfetto opens.

python scripts/trace_run.py --dp 2 --strategy zero1 --steps 3 --folder runs/trace

Writes into the folder: trace.json.gz (open it at ui.perfetto.dev or chrome://tracing), split.md (where each
rank's time went), timeline.svg, and a file for each rank.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torch.profiler import record_function

from muon_tutorial.errors import TutorialError
from muon_tutorial.evidence.traces.recording import RankRecorder, record
from muon_tutorial.evidence.traces.timeline_picture import describe_timeline
from muon_tutorial.training.loop import build_trainer, train_step
from muon_tutorial.training.settings import TrainSettings
from scripts.files import count, made, parser_of

SETTINGS = {"dp": 2, "tp": 1, "strategy": "zero1", "layers": 2, "width": 128, "batch": 16}
WARMUP = 2
"""Steps before the recording."""


def steps(rank: int, recorder: RankRecorder, settings: TrainSettings) -> None:
    """Train ``WARMUP`` steps, then record the rest. Must be called by all ranks."""
    trainer = build_trainer(settings)
    for step in range(WARMUP):
        train_step(trainer, step, checked=False)
    trainer.world.observers.append(recorder)
    trainer.counted.observers.append(recorder)
    recorder.others = trainer.world.at.group("tp")
    with recorder:
        for step in range(WARMUP, settings.steps):
            with record_function(f"step {step}"):
                train_step(trainer, step, checked=False)


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    for name, default in SETTINGS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--steps", type=count, default=3, help="steps to record")
    parser.add_argument("--folder", type=Path, default=Path("runs/trace"))
    chosen = vars(parser.parse_args(arguments))
    try:
        folder = made(chosen.pop("folder"))
        settings = TrainSettings(**{**chosen, "steps": chosen["steps"] + WARMUP})
        run = record(steps, settings.world_size, folder, args=(settings,))
    except TutorialError as error:
        print(error, file=sys.stderr)
        return 2
    print(run.markdown, describe_timeline(run.timeline), f"Open {run.merged}", sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
