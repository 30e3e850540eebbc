"""Makes the table of hosts from runs: python -m tests.hosts.table > tests/hosts/hosts_table.md

With names of recipes as arguments, the command runs only those.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from . import recipes
from .recipes import ALL, MARGIN, distance, train
from .test_other_hosts import rows as other_rows


def make_row(name: str, folder: Path, alone: Path) -> dict[str, str]:
    """Run a recipe four times, from the start and from its checkpoint, in fp32 and in bf16."""
    fp32, bf16 = train(name, folder / "fp32"), train(name, folder / "bf16", "--bf16")
    reference, sharded = recipes.run_alone(ALL[name].alone, alone), ALL[name].sharded
    far = [max(distance(n, reference.notes, of_muon=its) for n in fp32[0]) for its in (True, False)]
    near = f"{far[0]:.1e} ({reference.muon:.1e}), {far[1]:.1e} ({reference.adamw:.1e})"
    good = {"equal to one process": near, "resume": "bitwise", "bf16 resume": "bitwise"}
    checks = recipes.checks(name, *fp32, reference) | {
        "bf16": lambda: recipes.check_bf16(bf16[0], reference),
        "bf16 resume": lambda: recipes.check_resumed(*bf16),
    }
    kind = "shards" if sharded else "whole"
    placed = _said(lambda: recipes.check_placed(fp32[0] + bf16[0], sharded), kind)
    row = {"recipe": name, "ranks": str(ALL[name].ranks), "parameters": placed}
    row["lines"] = str(len(recipes.marked_lines(name)))
    return row | {heading: _said(check, good.get(heading, "yes")) for heading, check in checks.items()}


def _said(check: Callable[[], None], good: str) -> str:
    try:
        check()
    except AssertionError as error:
        print(error, file=sys.stderr, flush=True)
        return f"NO ({good})"
    return good


TEXT = """# Hosts

Made by `python -m tests.hosts.table`: each recipe of `scripts/recipes` under its host's own launcher, on real
Gloo processes. {versions}.

*Parameters*: on every rank either `shards` (cut DTensors) or `whole` tensors. (Accelerate shards only on
GPUs, and on CPUs silently uses DDP; here a hook of the tests makes it shard.) *Lines*: how many lines of the
recipe end in `# Muon`. *Equal to one process*: how far the worst parameter is from that of a plain loop in
one process on the same global batches, divided by how far that loop moved it; first for Muon's parameters,
then for AdamW's. The numbers in brackets are the same distances if the one process sums in another order; the
tests allow {margin} times that. *Clip*, *accumulate* and *schedule*: what the optimizer saw at every step.
*Resume*: parameters, momentum and moments after a new start from the host's own checkpoint, against the run
that was not interrupted. *bf16*: the model is computed in bf16, parameters and state stay in fp32.

"""


OTHERS = """
## Other hosts

`pytest tests/hosts/test_other_hosts.py` checks each row if its packages are installed; here they were peft
0.21.2, trl 1.16.0 and deepspeed 0.19.8.

"""


def as_markdown(rows: list[dict[str, str]]) -> str:
    packages = ("torch", "accelerate", "transformers", "lightning")
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    table = [f"| {' | '.join(rows[0])} |", "|" + "---|" * len(rows[0])]
    table += [f"| {' | '.join(row.values())} |" for row in rows]
    return TEXT.format(versions=versions, margin=MARGIN) + "\n".join(table) + "\n" + OTHERS + other_rows()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        for name in sys.argv[1:] or ALL:
            rows.append(make_row(name, Path(folder) / name, Path(folder) / "alone"))
            print(rows[-1], file=sys.stderr, flush=True)
    print(as_markdown(rows), end="")


if __name__ == "__main__":
    main()
