"""The training text: bytes that every machine has, and the batches cut from them.

The default text is the source code of Python's own standard library, in sorted order, so a run needs no
download. That code differs between Python versions, so every run's report has its size and SHA-256. Batches
depend only on the seed and the step, not on the grid; each rank then takes its slice.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import TextError

TEXT_LIMIT = 4 * 2**20
HELD_OUT_ONE_IN = 16
LONGEST_BLOCK = 4096
# Folders with installed packages, tests and tables of data, which are no text to learn from.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"}
)
BUILD_RECORD = "_sysconfigdata"


@dataclass(frozen=True, slots=True)
class Text:
    """A text as bytes: its source, its hash, and its training and held-out parts (uint8, 1-D)."""

    source: str
    size: int
    sha256: str
    train: Tensor = field(repr=False)
    held_out: Tensor = field(repr=False)


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences of bytes, and for each byte the next one: two int64 tensors [sequences, context]."""

    inputs: Tensor
    targets: Tensor


def load_text(path: str | None, context: int) -> Text:
    """Read the training text: the file at ``path``, or the standard library's sources if ``path`` is None.

    At most ``TEXT_LIMIT`` bytes are read. Every sixteenth block is held out.

    Raises:
        TextError: the text is missing, empty, binary, or too short for sequences of ``context`` bytes.
    """
    source = path if path is not None else "the Python standard library's sources"
    data = read_file(path) if path is not None else read_standard_library()
    needed = HELD_OUT_ONE_IN * (context + 2)
    if len(data) < needed:
        raise TextError(f"{source} has {len(data)} bytes; --context {context} needs at least {needed}")
    train, held_out = _split(torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy()))
    return Text(source, len(data), hashlib.sha256(data).hexdigest(), train, held_out)


def read_file(path: str) -> bytes:
    """The first ``TEXT_LIMIT`` bytes of a UTF-8 text file."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise TextError(f"the text {path} is not a regular file, but every rank must read it")
    try:
        with open(path, "rb") as file:
            data = file.read(TEXT_LIMIT)
    except OSError as error:
        raise TextError(f"cannot read the text {path}: {error.strerror or error}") from None
    if not data:
        raise TextError(f"the text {path} is empty")
    try:
        is_text = "\0" not in codecs.getincrementaldecoder("utf-8")().decode(data)
    except UnicodeDecodeError:
        is_text = False
    if not is_text:
        raise TextError(f"{path} is not UTF-8 text; --text takes a plain text file")
    return data


def read_standard_library() -> bytes:
    """The sources of Python's standard library, sorted by path, joined, and cut at ``TEXT_LIMIT`` bytes."""
    pieces, size = [], 0
    for path in _library_files():
        pieces.append(path.read_bytes())
        size += len(pieces[-1])
        if size >= TEXT_LIMIT:
            break
    if not size:
        raise TextError("this Python has no sources of its standard library; pass a text file with --text")
    return b"".join(pieces)[:TEXT_LIMIT]


def batch_at(text: Text, step: int, batch: int, context: int, seed: int) -> Batch:
    """The global batch of one step: the same on every rank and every grid."""
    generator = torch.Generator().manual_seed((seed << 20) + step)
    starts = torch.randint(len(text.train) - context, (batch,), generator=generator)
    return _cut(text.train, starts, context)


def held_out_batches(text: Text, batch: int, context: int, count: int) -> list[Batch]:
    """``count`` fixed batches, whose sequences are spread evenly over the held-out part."""
    last = len(text.held_out) - context - 1
    starts = torch.linspace(0, last, count * batch, dtype=torch.float64).long()
    return [_cut(text.held_out, part, context) for part in starts.split(batch)]


def share(batch: Batch, dp_rank: int, dp: int) -> Batch:
    """The sequences of ``batch`` for one dp coordinate, consecutive and in order."""
    each = len(batch.inputs) // dp
    mine = slice(dp_rank * each, (dp_rank + 1) * each)
    return Batch(batch.inputs[mine], batch.targets[mine])


def _cut(data: Tensor, starts: Tensor, context: int) -> Batch:
    windows = data[starts[:, None] + torch.arange(context + 1)].long()
    return Batch(windows[:, :-1], windows[:, 1:])


def _split(data: Tensor) -> tuple[Tensor, Tensor]:
    block = min(LONGEST_BLOCK, len(data) // HELD_OUT_ONE_IN)
    number = torch.arange(len(data)) // block
    held_out = number % HELD_OUT_ONE_IN == HELD_OUT_ONE_IN - 1
    return data[~held_out], data[held_out]


def _library_files() -> list[Path]:
    root = sysconfig.get_paths()["stdlib"]
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        sources = (name for name in names if name.endswith(".py") and not name.startswith(BUILD_RECORD))
        found.extend(Path(folder, name) for name in sources)
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())
