"""Ranks that torchrun started: told by the environment, joined with an explicit timeout, ended with torchrun.

Beside torch's own ``env://`` rendezvous, three things that it leaves open. Ranks outlive a killed agent, for
minutes: here they end with it. Ranks that the agent restarts find in its store the addresses that their dead
predecessors left: here each attempt has keys of its own. And a rank that misses another says so on one line.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist

from ..errors import LaunchError, TutorialError, UsageError
from .agent import OWN_STORE
from .echo import in_one_line, is_echo, says_gone
from .environment import TORCHRUN_NEEDS, loopback_variables
from .location import own_line
from .parent_watch import end_with_parent
from .peers import Peers
from .phase import keep_slot, own_phase
from .timeouts import check_timeout, let_new_groups_time_out

# Seconds for torchrun to find the rank that broke before those that only noticed: one whose connection is
# gone may be ending still; one that never came leaves nothing to find, and others are about to say so, too.
_UNTIL_ENDED, _UNTIL_SAID = 1.0, 0.3
_UNTIL_REFUSED = 5.0  # seconds for the agent's machine to answer whether anybody listens there
RESTARTS_FAIL = (
    f"ranks on several machines cannot restart: set {OWN_STORE}=1 before each torchrun starts, "
    "or start python -m muon_tutorial torchrun in its place"
)

# Whether this process has missed another rank: it can then not leave its groups in good order.
_has_missed_rank = False


@dataclass(frozen=True, slots=True)
class TorchrunEnvironment:
    """What torchrun told this process about itself; ``device`` is its own, such as ``"cuda:1"``.

    ``peers`` are the other ranks, where all are on this machine.
    """

    rank: int
    local_rank: int
    world_size: int
    device: str
    peers: Peers

    def report_lost_rank(self, error: BaseException) -> bool:
        """Say on one line of standard error that another rank is missed, if that is all `error` says.

        Then waits a moment, so that torchrun finds the rank that broke first, and ends this one with it.
        Returns whether there was something to say.
        """
        global _has_missed_rank
        if not is_echo(error):
            return False
        _has_missed_rank = True
        print(f"error: {self._describe(error)}", file=sys.stderr, flush=True)
        time.sleep(_UNTIL_ENDED if says_gone(str(error)) else _UNTIL_SAID)
        self.peers.wake()  # torchrun's SIGTERM does not end a stopped rank, and it waits 30 s for that
        return True

    def _describe(self, error: BaseException) -> str:
        """Return who noticed, who is missed, what torch says, and where this rank was."""
        missing = self.peers.missing()
        others = f"rank {1 - self.rank}" if self.world_size == 2 else "the others"
        who = " and ".join(f"rank {rank}, which {state}" for rank, state in missing.items()) or others
        line = f"rank {self.rank} of {self.world_size} waited in vain for {who}: {in_one_line(str(error))}"
        phase, place = own_phase(), own_line(reversed(list(traceback.walk_tb(error.__traceback__))))
        return line + (f" [in phase: {phase}]" if phase else "") + (f" at {place}" if place else "")


def joined_by_torchrun() -> bool:
    """Return whether torchrun started this process."""
    return all(name in os.environ for name in TORCHRUN_NEEDS)


def torchrun_run_id() -> str | None:
    """Return what names torchrun's run: the same after a restart, another for another run; None if unknown.

    On one machine this is the folder that the agent made for its logs: torchrun calls every run "none" that
    has neither ``--standalone`` nor ``--rdzv-id``, and an ``--rdzv-id`` may be given to two runs in turn.
    """
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    own_id = None if run_id == "none" else run_id
    if run_id is None or (own_id and not _on_one_machine()):
        return own_id
    folders = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parts[:-3]  # …/attempt_0/0/error.json
    return folders[-1] if folders else own_id


def is_this_run(name: object) -> bool:
    """Return whether what named a run before a restart, perhaps when it had more nodes, names this one."""
    return name is not None and name in (torchrun_run_id(), os.environ.get("TORCHELASTIC_RUN_ID"))


def restarted_by_torchrun() -> bool:
    """Return whether ranks before these have failed, and torchrun started this process in their place."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def join_torchrun(backend: str = "gloo", timeout: float = 30.0) -> TorchrunEnvironment:
    """Initialise the default group from torchrun's environment; must be called by all its ranks.

    `timeout` is in seconds; groups made later have it too. With ``"nccl"`` every local rank takes the GPU of
    its own number. Where all ranks are on one machine, they listen on loopback only, and meet again after
    ``--max-restarts`` whatever the ranks before them left in the agent's store. On several machines torchrun
    needs ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`` in its environment for that: without it rank 0 says so.

    From here on the process ends when the one that started it does. An error that is only about another rank,
    and that nobody caught, is one line instead of a traceback.

    Raises:
        UsageError: torchrun did not start this process, its environment is damaged, it has no GPU for this
            local rank, or the timeout is no positive number of seconds.
        LaunchError: torchrun's agent has ended, or another rank did not come.
    """
    check_timeout(timeout)
    if not joined_by_torchrun():
        raise UsageError("torchrun did not start this process; start it with torchrun, or use launch()")
    rank, local_rank, world_size = _seat()
    end_with_parent(f"rank {rank} of {world_size}: torchrun's agent ended, and this rank with it")
    if rank == 0 and not _on_one_machine() and _restarts_fail():
        print(RESTARTS_FAIL, file=sys.stderr, flush=True)
    device = _take_gpu(local_rank) if backend == "nccl" else "cpu"
    if _on_one_machine():
        for name, value in loopback_variables().items():
            os.environ.setdefault(name, value)
    let_new_groups_time_out(timeout)
    patience = timedelta(seconds=timeout)
    with _meeting(rank, world_size):
        store = _store_of_attempt(patience)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=patience)
        peers = _meet(store, rank, world_size)
    joined = TorchrunEnvironment(rank, local_rank, world_size, device, peers)
    keep_slot()
    _shorten_lost_ranks(joined)
    atexit.register(leave_torchrun)
    return joined


def leave_torchrun() -> None:
    """Leave the group that torchrun's processes joined, if it still stands. Runs by itself as a process ends.

    Groups that reference cycles keep alive would be torn down as the interpreter ends, where Gloo aborts: 3
    of 12 runs of two ranks ended with SIGABRT before they were collected here. Where a rank is missed, Gloo
    would wait for it once more, for the whole timeout: the process ends here, with exit code 1.
    """
    if _has_missed_rank:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(1)
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


def _seat() -> tuple[int, int, int]:
    """Return the rank, the local rank and how many ranks there are, by the environment."""
    texts = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")}
    fit = all(text.isdecimal() and len(text) < 10 for text in texts.values())
    rank, local_rank, size, port = map(int, texts.values()) if fit else (0, 0, 0, 0)
    if not (rank < size and local_rank < size and port < 1 << 16):
        raise UsageError(
            f"torchrun sets these to numbers that fit each other; the environment has {texts!s:.200}"
        )
    return rank, local_rank, size


@contextlib.contextmanager
def _meeting(rank: int, world_size: int) -> Iterator[None]:
    """Tell in one line why the ranks did not meet."""
    try:
        yield
    except TutorialError:
        raise
    except RuntimeError as error:
        reason = in_one_line(str(error).partition("\n")[0])
        raise LaunchError(f"rank {rank} of {world_size} did not meet the others: {reason}") from None


def _restarts_fail() -> bool:
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    return restarts != "0" and os.environ.get(OWN_STORE) != "1"


def _take_gpu(local_rank: int) -> str:
    if local_rank >= torch.cuda.device_count():
        raise UsageError(
            f"NCCL needs a GPU for each local rank: local rank {local_rank} wants cuda:{local_rank}, "
            f"there are {torch.cuda.device_count()}; start fewer ranks, or use --backend gloo"
        )
    torch.cuda.set_device(local_rank)
    return f"cuda:{local_rank}"


def _on_one_machine() -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")


def _store_of_attempt(patience: timedelta) -> dist.Store:
    """Return the store where the ranks meet, with keys that no attempt before this one has used.

    An agent counts its own restarts, so that on several machines the counts differ: the keys are torch's.
    """
    _check_agent_listens()
    store, _, _ = next(dist.rendezvous("env://", timeout=patience))
    store.set_timeout(patience)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    return dist.PrefixStore(f"attempt {attempt}", store) if attempt and _on_one_machine() else store


def _check_agent_listens() -> None:
    """Refuse at once what a store's client would try for its whole timeout."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        return  # rank 0 will listen, and need not do so yet
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        socket.create_connection(address, _UNTIL_REFUSED).close()
    except ConnectionRefusedError:
        raise LaunchError(f"torchrun's agent ended before rank {os.environ['RANK']} joined it") from None
    except OSError:
        return  # not an answer; torch tries for longer, and knows more


def _meet(store: dist.Store, rank: int, world_size: int) -> Peers:
    """Return the other ranks' processes, where all ranks are on this machine."""
    if not _on_one_machine():
        return Peers({})
    store.set(f"process {rank}", str(os.getpid()))
    others = (other for other in range(world_size) if other != rank)
    return Peers({other: int(store.get(f"process {other}")) for other in others})


def _shorten_lost_ranks(joined: TorchrunEnvironment) -> None:
    """Show an uncaught error that is only about another rank as one line."""
    before = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        if not joined.report_lost_rank(error):
            before(kind, error, frames)

    sys.excepthook = show
