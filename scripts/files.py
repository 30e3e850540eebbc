"""Shared by the scripts: writes each file whole or not at all, and prints an error as one line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from muon_tutorial.errors import UsageError

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "notebooks"
BAD_INPUT, INTERRUPTED = 2, 130
STILL = "a still picture for each widget; nothing is run"
"""The help text of the option ``--still``."""
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""The content security policy of every page: only its own styles, and pictures embedded as data."""


def parser_of(described: str | None) -> argparse.ArgumentParser:
    """A parser whose ``--help`` prints the first paragraph of a script's docstring, ``described``."""
    return argparse.ArgumentParser(description=(described or "").split("\n\n")[0])


def count(text: str) -> int:
    """An option's type: a whole number of at least 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def made(folder: Path) -> Path:
    """Make a missing folder to write to; UsageError if it is a file, or cannot be made or written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        reason = None if os.access(folder, os.W_OK | os.X_OK) else "no permission"
    except OSError as error:
        reason = f"{error.strerror} (it is a file)" if folder.is_file() else error.strerror
    if reason:
        raise UsageError(f"cannot write to {folder}: {reason}")
    return folder


def write_all(folder: Path, texts: Mapping[str, str]) -> None:
    """Write text files into a folder, each whole or not at all, and print their sizes."""
    for name, text in texts.items():
        write_whole(folder / name, text)
        print(f"wrote {folder / name} ({(folder / name).stat().st_size / 1e6:.2f} MB)")


def write_changed(texts: Mapping[Path, str]) -> None:
    """Write those texts that differ from their files, each whole or not at all; print the files' names."""
    for path, text in texts.items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            write_whole(path, text)
            print(f"wrote {path.relative_to(ROOT)}")


def write_whole(path: Path, text: str) -> None:
    """Write a text file, or raise UsageError. An existing file is replaced only by a complete new one."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    finally:
        draft.unlink(missing_ok=True)


def run_writer(
    program: str,
    described: str | None,
    write: Callable[..., object],
    arguments: Sequence[str] | None,
    target: Path,
    names: str = "",
    **flags: str,
) -> int:
    """The command line of a script that writes into a folder; returns the exit code.

    ``write`` gets the folder of ``--out``, which is ``target`` by default. If ``names`` (a help text) is
    given, the command also takes lessons' names, and passes them to ``write``. ``flags`` are options without
    a value, and their help texts.
    """
    parser = argparse.ArgumentParser(prog=f"{program}.py", description=(described or "").partition("\n")[0])
    default = target.relative_to(ROOT)
    parser.add_argument("--out", type=Path, default=target, help=f"the folder to write to ({default})")
    if names:
        parser.add_argument("names", nargs="*", help=f"{names}; default: all")
    for flag, said in flags.items():
        parser.add_argument(f"--{flag.replace('_', '-')}", action="store_true", help=said)
    given = vars(parser.parse_intermixed_args(arguments))
    return answered(program, lambda: write(given.pop("out"), **given))


def answered(program: str, work: Callable[[], object]) -> int:
    """Do some work, print an error in one line, and return the exit code."""
    try:
        work()
        sys.stdout.flush()  # a pipe whose reader has gone fails here, not at exit
    except (UsageError, OSError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        if isinstance(error, BrokenPipeError):  # at exit, Python would write the rest once more
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BAD_INPUT
    except KeyboardInterrupt:
        print(f"{program}: interrupted; every file that was written is whole", file=sys.stderr)
        return INTERRUPTED
    return 0
