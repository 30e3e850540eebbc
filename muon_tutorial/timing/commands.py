"""The commands ``plan`` and ``calibrate``: their options, and what they print."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console

from ..errors import UsageError
from ..plan.strategies import ROUND_BYTES
from .calibrate import calibrate
from .machine import find_machine, machine_names
from .models import find_model, public_names
from .recommend import (
    PREDICTED,
    Dtypes,
    as_data,
    plan_model,
    read_sizes,
    say,
    say_if_long,
    say_layout,
    search,
    tables_of,
)

MEGABYTE = 10**6
MOST_TOKENS = 10**15

EPILOG = """\
examples:
  python -m muon_tutorial plan llama-3.1-70b --grid dp=256,tp=8
  python -m muon_tutorial plan kimi-k2 --grid dp=256,tp=8,ep=64 --bucket-mb 400
  python -m muon_tutorial plan llama-3.1-8b --grid dp=8,dp_shard=64 --batch 4194304
  python -m muon_tutorial plan llama-3.1-8b --grid dp=64,tp=8 --map regimes.svg
  python -m muon_tutorial plan config.json --grid dp=32 --machine a100-infiniband --json
  python -m muon_tutorial plan mymodels:small --grid dp=4 --machine machine.json
"""
LEGEND = (
    "All numbers are for the rank that computes most. own: the step without averaging gradients. gradients: "
    "what averaging adds if backward hides none of it; AdamW needs averages, too. products: Newton–Schulz. "
    "others: waiting for ranks that have more to do; bytes: waiting for communication. inside, between: "
    "bytes sent within a node and between nodes. shares: Newton–Schulz work, relative to an even division "
    "among all ranks. held: the matrices' parameters and gradients. state: momentum and master weights. "
    "peak: bytes that Muon's step adds at its peak. averaging: bytes that FSDP2 or DDP adds. "
    f"{PREDICTED}"
)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def add_plan(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "plan",
        help="estimate what a step of each strategy costs, without running it",
        description="What a distributed Muon step costs for a model on a grid: bytes, work, memory, seconds.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    names = ", ".join(public_names())
    parser.add_argument("model", metavar="MODEL", help=f"a config.json, module:function, or one of {names}")
    parser.add_argument(
        "--grid", required=True, metavar="SIZES", help="such as dp=64,tp=8; also dp_shard, ep and pp"
    )
    parser.add_argument(
        "--machine",
        default="h100-infiniband",
        metavar="NAME",
        help=f"a file that calibrate wrote, or one of {', '.join(machine_names())} (h100-infiniband)",
    )
    parser.add_argument(
        "--bucket-mb",
        type=float,
        default=ROUND_BYTES / MEGABYTE,
        metavar="X",
        help="at most X megabytes of gradients in a bucket (25)",
    )
    parser.add_argument("--window", type=int, default=1, metavar="N", help="buckets in flight (1)")
    parser.add_argument(
        "--batch",
        type=int,
        metavar="TOKENS",
        help="tokens in a batch; also prints the optimizer's part of a training step",
    )
    parser.add_argument(
        "--map",
        type=Path,
        metavar="FILE.svg",
        help="draw which strategy is the fastest, by ranks and bandwidth",
    )
    for name, default, what in (
        ("param", "bf16", "parameters"),
        ("grad", "fp32", "gradients"),
        ("momentum", None, "momentum (as gradients)"),
    ):
        says = f"{what} ({default})" if default else what
        parser.add_argument(f"--{name}-dtype", choices=DTYPES, default=default, help=f"dtype of {says}")
    parser.add_argument("--master", choices=("none", *DTYPES), default="none", help="master weights (none)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.set_defaults(run=plan)


def add_calibrate(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "calibrate",
        help="measure this machine for plan",
        description="Measure this machine, in under half a minute, into a file for plan --machine.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--out", type=Path, default=Path("machine.json"), metavar="FILE", help="(machine.json)"
    )
    parser.set_defaults(run=measure, json=False)


@contextlib.contextmanager
def _without_collecting() -> Iterator[None]:
    """Keep the garbage collector off, because it takes up to a third of a plan's time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@_without_collecting()
def plan(options: argparse.Namespace) -> int:
    if options.window < 1:
        raise UsageError(f"--window is a number of buckets, at least 1; got {options.window}")
    if options.batch is not None and not 1 <= options.batch <= MOST_TOKENS:
        raise UsageError(
            f"--batch is a number of tokens, from 1 to {MOST_TOKENS:,}; got {options.batch!r:.40}"
        )
    if options.map is not None:
        if options.map.suffix != ".svg":
            raise UsageError(f"--map names a file that ends in .svg; got {options.map}")
        _check_file(options.map)
    if not 1 <= options.bucket_mb * MEGABYTE < math.inf:
        raise UsageError(f"--bucket-mb is a number of megabytes above zero; got {options.bucket_mb:g}")
    sizes, machine = read_sizes(options.grid), find_machine(options.machine)
    shape = find_model(options.model)
    if line := say_if_long(shape, sizes, machine):
        print(line, file=sys.stderr, flush=True)
    found = plan_model(
        shape,
        sizes,
        machine,
        round_bytes=int(options.bucket_mb * MEGABYTE),
        window=options.window,
        tokens=options.batch,
        dtypes=Dtypes(
            DTYPES[options.param_dtype],
            DTYPES[options.grad_dtype],
            DTYPES.get(options.momentum_dtype),
            DTYPES.get(options.master),
        ),
    )
    choices = search(found)
    if options.map is not None:
        from .regime_map import draw_map, survey  # imported here: other commands need no matplotlib

        _write(options.map, draw_map(survey(found)))
    if options.json:
        print(json.dumps(as_data(found, choices)), flush=True)
        return 0
    console = Console(highlight=False)
    for table in tables_of(found):
        console.print(table)
    console.print(say_layout(found), style="dim")
    console.print(LEGEND, style="dim")
    for line in say(found, choices):
        console.print(f"• {line}", markup=False)
    if options.map is not None:
        console.print(f"wrote {options.map}", markup=False)
    return 0


def _check_file(path: Path) -> None:
    """Refuse a file that cannot be written, before anything is computed."""
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent}")
    if path.is_dir():
        raise UsageError(f"{path} cannot be written: it is a folder")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{path} cannot be written: no permission")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None


def measure(options: argparse.Namespace) -> int:
    _check_file(options.out)
    machine = calibrate()
    _write(options.out, machine.text())
    print(f"wrote {options.out}: {machine.name}")
    for line in (machine.sources.get("busy"), machine.bf16_note):
        if line:
            print(line)
    return 0
