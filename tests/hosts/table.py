"""Writes the tables of hosts_table.md from runs: python -m tests.hosts.table

With names of recipes as arguments, the command runs only those, and writes nothing.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from . import recipes
from .recipes import ALL, distance, train
from .test_other_hosts import rows as other_rows

PAGE = Path(__file__).with_name("hosts_table.md")
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
PACKAGES = ("torch", "accelerate", "transformers", "lightning")


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


def page(rows: list[dict[str, str]]) -> str:
    """The page with new versions and tables. Its prose stays."""
    head, *body = (f"| {' | '.join(line)} |\n" for line in [rows[0], *(row.values() for row in rows)])
    tables = iter([f"{head}|{'---|' * len(rows[0])}\n{''.join(body)}", other_rows()])
    text = PAGE.read_text(encoding="utf-8")
    for name in PACKAGES:
        text = re.sub(rf"(?<=\b{name} )\d[^\s,]*(?=[,.]\s)", version(name), text, count=1)
    return TABLE.sub(lambda _: next(tables), text)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        for name in sys.argv[1:] or ALL:
            rows.append(make_row(name, Path(folder) / name, Path(folder) / "alone"))
            print(rows[-1], file=sys.stderr, flush=True)
    if not sys.argv[1:]:
        PAGE.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
