"""A machine: how fast it multiplies, copies and sends, as a small file that you can read and edit.

Rates are tables by size, because small matrices and short copies are slower. Between two sizes, rates are
interpolated linearly in logarithms; outside, the rate of the nearest size is used.
"""

from __future__ import annotations

import json
import math
import os
import stat
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch

from ..engine.collective import Kind
from ..errors import UsageError

Rates = tuple[tuple[float, float], ...]
"""Pairs (size, rate), in ascending order of size."""
Algorithm = Literal["ring", "gloo"]
MACHINES = Path(__file__).with_name("machines")


SHAPED_BURST = 131_072.0
"""The size of the token bucket of ``scripts/shaped.sh``, in bytes."""


@dataclass(frozen=True, slots=True)
class Link:
    """The connection over which ranks send. ``bandwidth`` is in bytes per second, ``latency`` in seconds per
    message.

    ``shared``: all ranks share one bus, such as a network namespace's loopback; otherwise every rank has its
    own link. While no rank sends, a bus collects credit, at most ``burst`` bytes (a token bucket's size);
    bytes sent on credit take no time. A ``duplex`` link has its bandwidth in each direction. On other links
    both directions share the bandwidth, as on a loopback, where one thread of a rank sends and receives.
    """

    bandwidth: float
    latency: float
    shared: bool = False
    burst: float = 0.0
    duplex: bool = True


@dataclass(frozen=True, slots=True)
class Machine:
    """The costs of a rank's work on nodes of one kind.

    ``ranks_per_node`` consecutive ranks are on a node and share its ``cores``; ``cores`` is None if each rank
    computes on its own GPU. ``gemm``: floating-point operations per second. There is a table for each dtype,
    by the smallest of a product's three sizes. ``copy``: bytes read and written per second, by the number of
    bytes. ``operation``: seconds to start an operation. On a GPU, operations start while earlier ones still
    run, so a start costs only the time by which it exceeds the operation's execution. ``turn``: seconds that
    a request costs. ``algorithm``: how collectives run, as rings or as in Gloo. ``byte``, ``message``: the
    processor's seconds for each byte and message that it sends; 0 if a network card does the work. A rank
    with several collectives in flight pays ``message`` once for all of them. ``memory``: a rank's memory in
    bytes. ``sources``: where the numbers come from.
    """

    name: str
    gemm: Mapping[str, Rates]
    copy: Rates
    operation: float
    turn: float
    inside: Link
    between: Link | None = None
    ranks_per_node: int = 8
    cores: int | None = None
    algorithm: Algorithm = "ring"
    byte: float = 0.0
    message: float = 0.0
    memory: float | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(self)

    def gemm_seconds(self, dtype: torch.dtype, sizes: Sequence[int], batch: int = 1) -> float:
        """Seconds of products of [m, k] and [k, n] matrices; ``sizes`` are (m, k, n)."""
        name = str(dtype).removeprefix("torch.")
        rates = self.gemm.get(name) or self.gemm["float32"]  # fp16 and fp64 have fp32's rate
        return 2 * batch * math.prod(sizes) / _at(rates, min(sizes)) if all(sizes) else 0.0

    def copy_seconds(self, moved: int) -> float:
        """Seconds of an element-wise operation that reads and writes ``moved`` bytes."""
        return moved / _at(self.copy, moved) if moved else 0.0

    @property
    def bf16_note(self) -> str:
        """A sentence to print if the processor has no units for bf16 products; else empty."""
        bf16, fp32 = (self.gemm[name][-1][1] / 1e9 for name in ("bfloat16", "float32"))
        if bf16 >= fp32:
            return ""
        return (
            f"This machine multiplies bf16 without units for it, at {bf16:.3g} GFLOP/s (fp32: {fp32:.3g}). "
            "Such rates change from launch to launch, so products may take up to twice the predicted seconds."
        )

    def on_bus(self, bytes_a_second: float) -> Machine:
        """Return this machine with one loopback, shared by all ranks and limited by ``scripts/shaped.sh``."""
        return replace(self, inside=Link(bytes_a_second, self.inside.latency, True, SHAPED_BURST))

    def node(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def link(self, ranks: Sequence[int], kind: Kind) -> Link:
        """The link that one member of a group uses in a collective of this kind.

        A ring or a chain leaves each node once, and the cards of all its members there share these bytes. In
        an exchange between all ranks, every rank sends through its own card.
        """
        if self.between is None or self.node(ranks[0]) == self.node(ranks[-1]):
            return self.inside
        if kind in ("all_to_all", "gather", "scatter") or self.algorithm == "gloo" or self.between.shared:
            return self.between
        cards = max(Counter(map(self.node, ranks)).values())
        return replace(self.between, bandwidth=min(self.inside.bandwidth, cards * self.between.bandwidth))

    def text(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    def write(self, path: str | Path) -> None:
        Path(path).write_text(self.text(), encoding="utf-8")


LARGEST = 64 * 10**6
"""Files with more bytes are refused; the file of a config or a machine has a few thousand bytes."""


def read_json(path: str | Path, what: str) -> Any:
    """The content of a JSON file; error messages refer to the file as ``what``.

    Raises:
        UsageError: the file is too large, not JSON, or not a plain file (such as a pipe or a device).
    """
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UsageError(f"{what} cannot be read: it is not a plain file")
            data = file.read(LARGEST + 1)
    except OSError as error:
        raise UsageError(f"{what} cannot be read: {error.strerror}") from None
    if len(data) > LARGEST:
        raise UsageError(f"{what} cannot be read: it is larger than {LARGEST:,} bytes")
    try:
        return json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # no text, no JSON, a long number, deep nesting
        raise UsageError(f"{what} is not JSON: {error}") from None


LEAST, MOST = 1e-6, 1e24
"""The bounds of a machine's rates, sizes and counts: beyond them, seconds could be infinite or NaN."""


def read_machine(path: str | Path) -> Machine:
    """Read a machine's file.

    Raises:
        UsageError: the file cannot be read, lacks a number, or has an impossible number.
    """
    held = read_json(path, f"the machine {path}")
    try:
        return machine_from(held)
    except UsageError as error:
        raise UsageError(f"the machine {path}: {error}") from None


def machine_from(held: Any) -> Machine:
    """The machine that a file's content describes.

    Raises:
        UsageError: a number is missing, or impossible.
    """
    values = _named(Machine, held, "")
    for name in ("inside", "between"):
        if values.get(name) is not None:
            values[name] = Link(**_named(Link, values[name], f"{name}."))
    if not isinstance(values["gemm"], dict):
        raise UsageError("gemm holds a table of rates by dtype")
    gemm = {name: _pairs(f"gemm.{name}", rates) for name, rates in values["gemm"].items()}
    return Machine(**{**values, "gemm": gemm, "copy": _pairs("copy", values["copy"])})


def _named(kind: type, held: Any, where: str) -> dict[str, Any]:
    """Check that a record's required fields are there, and that all fields are known. Return them by name."""
    if not isinstance(held, dict):
        raise UsageError(f"{where.rstrip('.') or 'it'} must be a JSON object of numbers by name")
    known = {one.name: one for one in fields(kind)}
    for name in held:
        if name not in known:
            raise UsageError(f"{where}{name} is unknown; known are {', '.join(known)}")
    for name, one in known.items():
        if one.default is MISSING and one.default_factory is MISSING and held.get(name) is None:
            raise UsageError(f"{where}{name} is missing")
    return dict(held)


def _pairs(name: str, rates: Any) -> Rates:
    if not isinstance(rates, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in rates):
        raise UsageError(f"{name} is a list of pairs [size, rate]")
    return tuple((size, rate) for size, rate in rates)


def _check(machine: Machine) -> None:
    links = {name: its for name in ("inside", "between") if (its := getattr(machine, name)) is not None}
    whole = {name: its for name in ("ranks_per_node", "cores") if (its := getattr(machine, name)) is not None}
    numbers = {name: getattr(machine, name) for name in ("operation", "turn", "byte", "message")}
    numbers |= {f"{name}.latency": link.latency for name, link in links.items()}
    numbers |= {f"{name}.burst": link.burst for name, link in links.items()}
    positive: dict[str, Any] = {
        **whole,
        **({} if machine.memory is None else {"memory": machine.memory}),
        **{f"{name}.bandwidth": link.bandwidth for name, link in links.items()},
    }
    tables = {"copy": machine.copy, **{f"gemm.{name}": rates for name, rates in machine.gemm.items()}}
    for name, rates in tables.items():
        if not rates:
            raise UsageError(f"{name} holds no rate")
        positive |= {f"{name}[{i}][{j}]": rates[i][j] for i in range(len(rates)) for j in (0, 1)}
    for name in ("float32", "bfloat16"):
        if name not in machine.gemm:
            raise UsageError(f"gemm.{name} is missing")
    if machine.algorithm not in ("ring", "gloo"):
        raise UsageError(f"algorithm is 'ring' or 'gloo'; got {machine.algorithm!r}")
    for name, link in links.items():
        for flag, said in {"shared": link.shared, "duplex": link.duplex}.items():
            if not isinstance(said, bool):
                raise UsageError(f"{name}.{flag} is true or false; got {said!r}")
    for name, count in whole.items():
        if not isinstance(count, int):
            raise UsageError(f"{name} is a whole number; got {count!r}")
    for name, number in (numbers | positive).items():
        right = isinstance(number, int | float) and not isinstance(number, bool) and number < math.inf
        if not right or not number >= 0 or (name in positive and number == 0):
            least = "above zero" if name in positive else "and not below zero"
            raise UsageError(f"{name} is a number {least}; got {number!r}")
        if number > MOST or (name in positive and number < LEAST):
            raise UsageError(f"{name} lies between {LEAST:g} and {MOST:g} on any machine; got {number!r:.40}")
    for name, rates in tables.items():
        if any(one[0] >= two[0] for one, two in pairwise(rates)):
            raise UsageError(f"{name} is sorted by size; got {[size for size, _ in rates]}")


@lru_cache(maxsize=65536)  # a plan asks for the same few sizes again and again
def _at(rates: Rates, size: float) -> float:
    sizes = [one for one, _ in rates]
    place = bisect_left(sizes, size)
    if place == 0:
        return rates[0][1]
    if place == len(rates):
        return rates[-1][1]
    (low, slow), (high, fast) = rates[place - 1], rates[place]
    along = (math.log(size) - math.log(low)) / (math.log(high) - math.log(low))
    return math.exp(math.log(slow) + along * (math.log(fast) - math.log(slow)))


def machine_names() -> list[str]:
    """The names of the machines whose files come with the package."""
    return sorted(path.stem for path in MACHINES.glob("*.json"))


def find_machine(name: str) -> Machine:
    """The machine in the package's file of this name, or in the file at this path.

    Raises:
        UsageError: there is no such machine, or its file is wrong.
    """
    if name in machine_names():
        return read_machine(MACHINES / f"{name}.json")
    if not Path(name).exists():
        known = ", ".join(machine_names())
        raise UsageError(f"no machine is called {name!r}; take {known}, or a file that calibrate wrote")
    return read_machine(name)
