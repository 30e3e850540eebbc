"""The table of hosts, every cell run: python -m tests.hosts.table > tests/hosts/hosts_table.md

With names of recipes as arguments, it runs only those.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from .checks import (
    MARGIN,
    References,
    check_accumulated,
    check_bf16,
    check_clipped,
    check_equal,
    check_placed,
    check_resumed,
    check_scheduled,
    marked_lines,
    train,
)
from .recipes import ALL, distance
from .test_other_hosts import rows as other_rows

HEADINGS = (
    "recipe",
    "ranks",
    "parameters",
    "lines",
    "equal to one process",
    "clip",
    "accumulate",
    "schedule",
    "resume",
    "bf16",
    "bf16 resume",
)


def make_row(name: str, folder: Path, references: References) -> list[str]:
    """Run a recipe four times, from the start and from its checkpoint, in fp32 and in bf16."""
    trained, in_bf16 = train(name, folder / "fp32"), train(name, folder / "bf16", "--bf16")
    reference = references[(ALL[name].alone,)]
    far = [
        max(distance(n, reference.notes, of_muon=muon) for n in trained.straight) for muon in (True, False)
    ]
    near = f"{far[0]:.1e} ({reference.muon:.1e}), {far[1]:.1e} ({reference.adamw:.1e})"
    return [
        name,
        str(ALL[name].ranks),
        _said(
            lambda: check_placed(trained.straight + in_bf16.straight, ALL[name].sharded),
            "shards" if ALL[name].sharded else "whole",
        ),
        str(len(marked_lines(name))),
        _said(lambda: check_equal(trained.straight, reference), near),
        _said(lambda: check_clipped(trained.straight, reference, inside=name == "zero1")),
        _said(lambda: check_accumulated(trained.straight, reference)),
        _said(lambda: check_scheduled(trained.straight, reference)),
        _said(lambda: check_resumed(trained.straight, trained.resumed), "bitwise"),
        _said(lambda: check_bf16(in_bf16.straight, reference)),
        _said(lambda: check_resumed(in_bf16.straight, in_bf16.resumed), "bitwise"),
    ]


def _said(check: Callable[[], None], good: str = "yes") -> str:
    try:
        check()
    except AssertionError as error:
        print(error, file=sys.stderr, flush=True)
        return f"NO ({good})"
    return good


TEXT = """# Hosts

Made by `python -m tests.hosts.table`: each recipe of `scripts/recipes` under its host's own launcher, on real
Gloo processes. {versions}.

*Parameters*: DTensors, cut, on every rank, or whole tensors. (Accelerate shards on GPUs alone, and on CPUs
takes DDP without a word; here a hook of the tests has it shard.) *Lines* end in `# Muon`. *Equal to one
process*: the largest distance of a parameter from a plain loop in one process on the same global batches,
over how far it has moved; of Muon's, then of AdamW's. In brackets stands what another order of the same sums
makes in one process; the tests allow {margin} times that. *Clip*, *accumulate* and *schedule*: what the
optimizer saw at every step. *Resume*: parameters, momentum and moments after a new start from the host's own
checkpoint, against the run that was not interrupted. *bf16*: the model is computed in bf16, parameters and
state stay in fp32.

"""


OTHERS = """
## Other hosts

`pytest tests/hosts/test_other_hosts.py` checks each row if its packages are installed; here they were peft
0.21.2, trl 1.16.0 and deepspeed 0.19.8.

"""


def as_markdown(rows: list[list[str]]) -> str:
    """The table, and what its cells mean."""
    packages = ("torch", "accelerate", "transformers", "lightning")
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    table = [f"| {' | '.join(HEADINGS)} |", "|" + "---|" * len(HEADINGS)]
    table += [f"| {' | '.join(row)} |" for row in rows]
    return TEXT.format(versions=versions, margin=MARGIN) + "\n".join(table) + "\n" + OTHERS + other_rows()


def main() -> None:
    """Run everything and print the table."""
    with tempfile.TemporaryDirectory() as folder:
        references, rows = References(Path(folder) / "alone"), []
        for name in sys.argv[1:] or ALL:
            rows.append(make_row(name, Path(folder) / name, references))
            print(rows[-1], file=sys.stderr, flush=True)
    print(as_markdown(rows), end="")


if __name__ == "__main__":
    main()
