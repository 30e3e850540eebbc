"""Forges checkpoints: adds objects that run code when unpickled, or file names that lead out of the folder.

The forger then corrects the manifest's hashes, so only a loader that avoids pickle is safe. This module knows
two formats: the pickled ``.metadata`` of ``torch.distributed.checkpoint``, and this package's
``manifest.json``.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch

SENTINEL = "executed"
"""The folder that a forged checkpoint's code makes next to the checkpoint."""
_SEALED = re.compile(rb'\{"sha256": "[0-9a-f]{64}",\n"manifest": (.*)\}\n', re.DOTALL)


class Evil:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, checkpoint: Path) -> None:
        self.sentinel = checkpoint.parent / SENTINEL

    def __reduce__(self) -> tuple[Any, ...]:
        return os.makedirs, (str(self.sentinel), 0o777, True)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def pickle_in_place(folder: Path, other: Path, dice: Random) -> None:
    """Replace a file of the checkpoint by a pickle, either bare or as ``torch.save`` would write it."""
    path, evil = dice.choice(files(folder)), Evil(folder)
    path.write_bytes(pickle.dumps(evil) if dice.random() < 0.5 else _saved(evil))
    _seal_again(folder, lambda content: None)


def pickle_in_metadata(folder: Path, other: Path, dice: Random) -> None:
    path, evil = folder / ".metadata", Evil(folder)
    if not path.is_file():
        path.write_bytes(pickle.dumps(evil))
        return
    metadata = pickle.loads(path.read_bytes())
    metadata.planner_data = {**(metadata.planner_data or {}), "x": evil}
    path.write_bytes(pickle.dumps(metadata))


def pickle_in_a_tensor(folder: Path, other: Path, dice: Random) -> None:
    """Replace one tensor's bytes by a pickled object, and correct the manifest."""
    evil = _saved(Evil(folder))

    def put(content: dict[str, Any]) -> None:
        box = dice.choice([box for tensor in content["tensors"].values() for box in tensor["boxes"]])
        with open(folder / box["file"], "ab") as file:
            box["start"], box["bytes"] = file.tell(), len(evil)
            file.write(evil)

    if not _seal_again(folder, put):
        dice.choice([path for path in files(folder) if path.name != ".metadata"]).write_bytes(evil)


def climb_out(folder: Path, other: Path, dice: Random) -> None:
    """Change the metadata to point to existing files outside the folder."""
    away = folder.parent / "elsewhere"
    shutil.copytree(other, away)
    path = folder / ".metadata"
    if path.is_file():
        metadata = pickle.loads(path.read_bytes())
        for place in (metadata.storage_data or {}).values():
            place.relative_path = f"../{away.name}/{place.relative_path}"
        path.write_bytes(pickle.dumps(metadata))

    def climb(content: dict[str, Any]) -> None:
        content["files"] = {f"../{away.name}/{name}": file for name, file in content["files"].items()}
        for tensor in content["tensors"].values():
            for box in tensor["boxes"]:
                box["file"] = f"../{away.name}/{box['file']}"

    _seal_again(folder, climb)


def _saved(thing: object) -> bytes:
    file = io.BytesIO()
    torch.save({"x": thing}, file)
    return file.getvalue()


def _seal_again(folder: Path, change: Callable[[dict[str, Any]], None]) -> bool:
    """Change each manifest, and correct its sizes and hashes; returns False if there is no manifest."""
    found = [(path, _SEALED.fullmatch(path.read_bytes())) for path in folder.glob("*.json")]
    sealed = [(path, match) for path, match in found if match]
    for path, match in sealed:
        content = json.loads(match[1])
        change(content)
        for name, file in content["files"].items():
            if (folder / name).is_file():
                data = (folder / name).read_bytes()
                file["bytes"], file["sha256"] = len(data), hashlib.sha256(data).hexdigest()
        body = json.dumps(content, indent=1).encode()
        seal = hashlib.sha256(body).hexdigest().encode()
        path.write_bytes(b'{"sha256": "' + seal + b'",\n"manifest": ' + body + b"}\n")
    return bool(sealed)
