"""``CheckpointManager``: saves checkpoints by step into a folder, and keeps only the newest.

``step-00000040`` is a checkpoint as ``save_checkpoint`` writes it. The first line of the file ``latest`` is
the name of the newest checkpoint; the next lines name those that the same run saved before it, and the last
line identifies the process that wrote the file. The file is written after the checkpoint. This module decides
where to save and which checkpoints to keep; ``saving`` and ``loading`` do the rest.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, UsageError
from . import folders
from .loading import load_found
from .meeting_over_store import call_meeting, one_line
from .piece_files import Place
from .rank_contents import Rename, Saveable
from .saving import ContentsToSave, contents_to_save, save_together
from .verify_files import damage_of, open_checkpoint

T = TypeVar("T")

LATEST = "latest"
_LONGEST, _MOST_NAMED = 2**16, 1000  # most bytes of ``latest``, and most checkpoints that it names
_STEP = re.compile(r"step-(\d{8,})")
_process = cache(lambda: uuid.uuid4().hex)  # the last line of each ``latest`` that this process writes

_last_savers: MutableMapping[Path, CheckpointManager] = weakref.WeakValueDictionary()
"""The manager of this process that has saved last to a folder, as long as that manager lives."""


class CheckpointManager:
    """Saves a model and its optimizer by step into one folder, keeps the newest checkpoints, and loads them.

    Every rank makes its own manager of the same folder, on a file system that all ranks share. Only one
    process (or group of ranks) at a time may save to a folder; others may load from it meanwhile. If another
    process has saved there since this manager's last save, the next save is refused. So it is if another
    manager of this process has saved another optimizer there: two models need two folders.

    Args:
        folder: made when the first checkpoint is saved.
        keep: how many complete checkpoints to keep: the one saved last, and those of the steps closest before
            it. If this manager loaded an earlier step, the checkpoints abandoned after that step count as
            older than the run's own. Older ones are removed. Anything else in the folder stays, such as a
            checkpoint that is being copied there.

    Raises:
        UsageError: ``keep`` is less than one.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 2) -> None:
        if not isinstance(keep, int) or keep < 1:
            raise UsageError(f"keep is the number of checkpoints to keep, at least 1, not {keep!r}")
        self.folder = folders.target_of(folder)
        self.keep = keep
        self._buffers: dict[Place, Tensor] = {}  # reused, because allocating takes longer than copying
        self._pending: PendingSave | None = None
        self._newest_own: int | None = None  # the step that was loaded or saved last
        self._has_saved = False  # stays False on all ranks but rank 0
        self._optimizer: Callable[[], Saveable | None] = lambda: None  # the one saved last, while it lives

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: Saveable,
        *,
        extra: Mapping[str, Any] | None = None,
        rename: Rename | None = None,
        wait: bool = True,
    ) -> PendingSave:
        """Save as the newest checkpoint, and remove checkpoints that are no longer kept.

        Must be called by all ranks of the default process group in their main threads, or in a single process
        without a group. A checkpoint of the same step is replaced. Checkpoints of later steps stay; they
        exist if a run was resumed from an earlier step.

        Args:
            step: the number of steps taken so far. ``extra`` and ``rename`` are as in ``save_checkpoint``.
            wait: True to return only after the save; False to copy everything to CPU memory, so that training
                may go on while a thread saves the copy. At most one thread saves at a time: the next save
                waits until that thread is done, and then reuses the memory of its copy. Call ``wait()``
                before the process group ends, or a function given to ``launch()`` returns.

        Returns:
            An object to call ``wait()`` on; with ``wait=True`` the save is already done.

        Raises:
            CheckpointError: as in ``save_checkpoint``. If an earlier save in a thread failed, and no call has
                raised its error yet, this call raises that error and saves nothing. Raised on all ranks.
            UsageError: ``step`` is not a number of steps.
        """
        if not isinstance(step, int) or step < 0:
            raise UsageError(f"a step is a whole number from 0 on, not {step!r}")
        self.wait()
        meeting = call_meeting(f"save of step {step}")
        target = self._path(step)

        def contents() -> ContentsToSave:
            self._refuse_others(optimizer)
            found = contents_to_save(model, optimizer, extra, rename)
            return found if wait else self._copied(found)

        save = partial(
            save_together,
            meeting,
            target,
            "put aside",
            contents if wait else made_before(contents),
            guard=self.folder / LATEST,
            finish=lambda: self._point_to(target, meeting.id),
        )
        if wait:
            save()
            return PendingSave(None)
        thread = ThreadPoolExecutor(1)
        self._pending = PendingSave(thread.submit(save))
        thread.shutdown(wait=False)  # the thread ends once it has saved
        return self._pending

    def _refuse_others(self, optimizer: Saveable) -> None:
        """Refuse a save if another run has saved to the folder since this manager's last save."""
        if self._has_saved and self._latest()[-1:] not in ([], [_process()]):
            raise CheckpointError(
                f"another process has saved to {self.folder} since this run's last save: each run needs "
                "a folder of its own, and an earlier job of the same run must have ended"
            )
        other = _last_savers.get(self.folder.resolve(), self)
        if self._has_saved and other is not self and other._optimizer() not in (None, optimizer):
            raise CheckpointError(
                f"another CheckpointManager has saved another optimizer to {self.folder} since this "
                "one's last save, and each would remove the other's checkpoints: give each its own folder"
            )
        self._optimizer = weakref.ref(optimizer)

    def _copied(self, contents: ContentsToSave) -> ContentsToSave:
        """Copy the tensors to CPU memory, into the buffers of the previous copy where they fit."""
        before, self._buffers = self._buffers, {}
        tensors = {}
        for key, tensor in contents.tensors.items():
            copies = {}
            for offset, piece in tensor.pieces.items():
                buffer = before.get((key, offset))
                if buffer is None or (buffer.shape, buffer.dtype) != (piece.shape, piece.dtype):
                    buffer = torch.empty_like(piece, device="cpu")
                copies[offset] = self._buffers[key, offset] = buffer.copy_(piece)
            tensors[key] = replace(tensor, pieces=copies)
        return replace(contents, tensors=tensors)

    def wait(self) -> None:
        """Wait until the save that is in progress, if any, is done.

        Raises:
            CheckpointError: the save failed, and no earlier call has raised its error.
        """
        if (pending := self._pending) is not None:
            try:
                pending.wait()
            finally:
                if pending.done:  # if Ctrl-C ended the wait, the save still reads its copies
                    self._pending = None

    def latest_step(self) -> int | None:
        """The step of the newest complete checkpoint; None if there is none. Does not communicate.

        Missing and truncated files are noticed. Only ``load`` and ``whole_step`` notice flipped bits.
        """
        return next(filter(self._is_complete, self._newest_first()), None)

    def whole_step(self, say: Callable[[str], None]) -> int | None:
        """The step of the newest checkpoint that has no damaged byte. Does not communicate.

        Damaged checkpoints that are newer are renamed to ``damaged-…``, because a resumed run will save under
        their old names; ``say`` gets the reason. Only the process that will save here may call this.
        """
        for step in self._newest_first():
            damage = damage_of(self._path(step))
            if damage is None:
                return step
            aside = folders.put_aside(self._path(step), uuid.uuid4().hex)
            say(f"{damage}; renamed to {aside.name}")
        return None

    def _newest_first(self) -> list[int]:
        """The steps, newest first: those that ``latest`` names, then other steps before the newest of these.

        Later steps come last: they may have been saved before the run was resumed from an earlier step.
        """
        run = _steps_of(self._latest())
        last = max(run, default=math.inf)
        return sorted(set(self._steps()), key=lambda step: (step not in run, step > last, -step))

    def _latest(self) -> list[str]:
        """The lines of ``latest``; none if it cannot be read."""
        with contextlib.suppress(OSError, ValueError):
            return folders.read_file(self.folder / LATEST, _LONGEST).decode("ascii").splitlines()
        return []

    def load(
        self,
        model: nn.Module,
        optimizer: Saveable,
        *,
        step: int | None = None,
        rename: Rename | None = None,
    ) -> dict[str, Any]:
        """Load the newest checkpoint, or the checkpoint of ``step``; returns its ``extra``.

        Must be called by all ranks of the default process group; rank 0 looks for the newest checkpoint. If
        it is damaged or incomplete, an older checkpoint is loaded, with a warning. If all are damaged,
        warnings name the newer ones, and the error names the oldest. Waits for a save that is in progress.

        Raises:
            CheckpointError: there is no checkpoint, or ``load_checkpoint`` refuses it. Nothing has changed.
        """
        self.wait()

        def find() -> list[Path]:
            found = self._newest_first() if step is None else [step]
            if not found:
                raise CheckpointError(f"{self.folder} holds no complete checkpoint")
            return [*map(self._path, found)]

        path, extra = load_found(find, model, optimizer, rename)
        self._newest_own, self._has_saved = _step_of(path.name), False  # it goes on from what is there
        return extra

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _is_complete(self, step: int) -> bool:
        try:
            with folders.opened(self._path(step)) as folder:
                open_checkpoint(folder)
        except (CheckpointError, OSError):
            return False
        return True

    def _steps(self) -> list[int]:
        try:
            return _steps_of(folders.names_in(self.folder)) if self.folder.is_dir() else []
        except OSError as error:
            raise CheckpointError(f"{self.folder} cannot be read: {error.strerror}") from None

    def _point_to(self, target: Path, save_id: str) -> None:
        """Write the names of the run's checkpoints to ``latest``, and remove old ones. Called on rank 0."""
        step = _step_of(target.name)
        assert step is not None
        last = step - 1 if self._newest_own is None else min(step - 1, self._newest_own)
        before = [its for its in _steps_of(self._latest()) if its <= last and self._is_complete(its)]
        run, self._newest_own = [step, *before][: min(self.keep, _MOST_NAMED)], step
        lines = "\n".join([*(self._path(its).name for its in run), _process(), ""])
        folders.replace_file(self.folder / LATEST, lines.encode(), save_id)
        self._has_saved, _last_savers[self.folder.resolve()] = True, self
        try:
            folders.remove_all_leftovers(self.folder)
            older = [its for its in self._newest_first() if its < step and self._is_complete(its)]
            for its in older[self.keep - 1 :]:
                folders.remove(self._path(its), save_id)
        except OSError as error:
            warnings.warn(f"an older checkpoint could not be removed: {one_line(error)}", stacklevel=2)


class PendingSave:
    """A save that runs in a thread, or is done.

    If the save fails, the first call that waits for it raises the error: this object's ``wait()``, or the
    manager's next ``save()``, ``load()`` or ``wait()``. Without such a call, the error is printed when the
    process ends.
    """

    def __init__(self, saved: Future[None] | None) -> None:
        self._saved = [saved] if saved is not None else []  # emptied by the first wait
        weakref.finalize(self, _complain, self._saved)

    @property
    def done(self) -> bool:
        """Whether the save has ended, successfully or not."""
        return all(saved.done() for saved in self._saved)

    def wait(self) -> None:
        """Wait until the save has ended.

        Raises:
            CheckpointError: nothing was saved. All ranks raise the error, in the first call that waits.
        """
        if self._saved:
            wait(self._saved)
            self._saved.pop().result()


def made_before(make: Callable[[], T]) -> Callable[[], T]:
    """Call ``make`` now; return a function that returns its value, or raises its exception."""
    future: Future[T] = Future()
    try:
        future.set_result(make())
    except Exception as error:
        future.set_exception(error)
    return future.result


def _step_of(name: str) -> int | None:
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def _steps_of(names: Iterable[str]) -> list[int]:
    return [step for step in map(_step_of, names) if step is not None]


def _complain(pending: list[Future[None]]) -> None:
    for saved in pending:
        saved.add_done_callback(_print_failure)


def _print_failure(saved: Future[None]) -> None:
    if (error := saved.exception()) is not None:
        print(f"a checkpoint was not saved: {one_line(error)}", file=sys.stderr)
