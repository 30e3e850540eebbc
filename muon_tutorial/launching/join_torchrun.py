"""Recognizes torchrun's ranks by their environment, and lets them join the default group.

This module adds three things to torch's own ``env://`` rendezvous:

- Ranks end when their agent ends. With torch alone, ranks outlive a killed agent by minutes.
- Each restart uses its own keys in the agent's store. With torch alone, restarts find dead ranks' addresses.
- If a rank loses another rank, its error is one line.
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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist

from ..errors import LaunchError, TutorialError, UsageError
from .end_with_parent import end_with_parent
from .environment import TORCHRUN_NEEDS, loopback_variables
from .errors_of_lost_ranks import in_one_line, is_about_lost_rank, says_gone
from .group_timeouts import check_timeout, let_new_groups_time_out
from .phase_and_line import keep_slot, own_line, own_phase
from .standard_streams import flush_output
from .start_torchrun import OWN_STORE
from .stopped_peers import Peers

# Seconds that a rank waits after it has lost another rank and before it ends, so that torchrun sees the other
# rank fail first. The first number is for a lost connection, because the lost rank may still be ending; the
# second is for a late rank.
_UNTIL_ENDED, _UNTIL_SAID = 1.0, 0.3
_UNTIL_REFUSED = 5.0  # seconds to wait for the agent's machine to accept or refuse a connection
RESTARTS_FAIL = (
    f"ranks on several machines cannot restart: set {OWN_STORE}=1 before each torchrun starts, "
    "or use python -m muon_tutorial torchrun instead of torchrun"
)

# Whether this process has lost another rank. If so, this process must not destroy its groups, because Gloo
# would wait.
_has_missed_rank = False


@dataclass(frozen=True, slots=True)
class TorchrunEnvironment:
    """This rank under torchrun. ``peers``: the other ranks; empty if some of them are on other machines."""

    rank: int
    world_size: int
    peers: Peers

    def report_lost_rank(self, error: BaseException) -> bool:
        """If `error` only says that another rank was lost, print it as one line on standard error.

        Then wait a moment, so that torchrun sees the lost rank fail first, and ends this rank. Return whether
        the error was of this kind.
        """
        global _has_missed_rank
        if not is_about_lost_rank(error):
            return False
        _has_missed_rank = True
        print(f"error: {self._describe(error)}", file=sys.stderr, flush=True)
        time.sleep(_UNTIL_ENDED if says_gone(str(error)) else _UNTIL_SAID)
        self.peers.wake()  # torchrun's SIGTERM does not end a stopped rank, and torchrun would wait 30 s
        return True

    def _describe(self, error: BaseException) -> str:
        """Return a line with both ranks, torch's message, and this rank's phase and line of code."""
        missing = self.peers.missing()
        others = f"rank {1 - self.rank}" if self.world_size == 2 else "the others"
        who = " and ".join(f"rank {rank}, which {state}" for rank, state in missing.items()) or others
        line = f"rank {self.rank} of {self.world_size} got no answer from {who}: {in_one_line(str(error))}"
        phase, place = own_phase(), own_line(reversed(list(traceback.walk_tb(error.__traceback__))))
        return line + (f" [in phase: {phase}]" if phase else "") + (f" at {place}" if place else "")


def joined_by_torchrun() -> bool:
    return all(name in os.environ for name in TORCHRUN_NEEDS)


def agent_name() -> str | None:
    """Return the name of this agent's log folder, which no other agent uses; None if the agent keeps no
    logs."""
    folders = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parts[:-3]  # …/attempt_0/0/error.json
    return folders[-1] if folders else None


def names_of_job(agents: Iterable[object]) -> list[str]:
    """Return names by which later ranks recognize this job: agents' names, and perhaps the job's id.

    Two jobs may get the same id (``--rdzv-id``), so on one machine the id is used only if agents have no
    names.
    """
    agents = [*agents]
    return _names(agents, with_id=not (_on_one_machine() and any(agents)))


def is_of_this_job(names: object, agents: Iterable[str | None]) -> bool:
    """Return whether ``names``, which earlier ranks noted, belong to this job: they contain the name of one
    of its agents.

    If all agents were replaced, restarted ranks recognize their job by ``--rdzv-id``.
    """
    own = _names(agents, with_id=restarted_by_torchrun())
    return isinstance(names, list) and any(name in names for name in own)


def _names(agents: Iterable[object], with_id: bool) -> list[str]:
    names = (*agents, os.environ.get("TORCHELASTIC_RUN_ID") if with_id else None)
    return sorted({name for name in names if isinstance(name, str) and name != "none"})


def restarted_by_torchrun() -> bool:
    """Return whether this agent's ranks have failed before. Ranks of other agents do not count."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def join_torchrun(backend: str = "gloo", timeout: float = 30.0) -> TorchrunEnvironment:
    """Initialise the default group from torchrun's environment. All ranks of torchrun must call this.

    `timeout` is in seconds; groups made later have it, too. With ``"nccl"`` every local rank takes the GPU
    with its number. If all ranks are on one machine, they listen only on loopback, and restarts work
    (``--max-restarts``), because each attempt has its own keys in the agent's store. On several machines,
    restarts need ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`` in torchrun's environment; if it is missing, rank 0
    says so.

    From this call on, the process ends when its parent ends. An uncaught error that is only about another
    rank is shown as one line instead of a traceback.

    Raises:
        UsageError: torchrun did not start this process, its environment is damaged, it has no GPU for this
            local rank, or the timeout is not a positive number of seconds.
        LaunchError: torchrun's agent has ended, or another rank did not join in time.
    """
    check_timeout(timeout)
    if not joined_by_torchrun():
        raise UsageError("torchrun did not start this process; start it with torchrun, or use launch()")
    rank, local_rank, world_size = _seat()
    end_with_parent(f"rank {rank} of {world_size}: torchrun's agent ended, and this rank with it")
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if rank == 0 and not _on_one_machine() and restarts and os.environ.get(OWN_STORE) != "1":
        print(RESTARTS_FAIL, file=sys.stderr, flush=True)
    if backend == "nccl":
        if local_rank >= torch.cuda.device_count():
            raise UsageError(
                f"NCCL needs a GPU for each local rank: local rank {local_rank} wants cuda:{local_rank}, "
                f"there are {torch.cuda.device_count()}; start fewer ranks, or use --backend gloo"
            )
        torch.cuda.set_device(local_rank)
    if _on_one_machine():
        for name, value in loopback_variables().items():
            os.environ.setdefault(name, value)
    let_new_groups_time_out(timeout)
    patience = timedelta(seconds=timeout)
    with _meeting(rank, world_size):
        store = _store_of_attempt(patience)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=patience)
        pids: dict[int, int] = {}
        if _on_one_machine():
            store.set(f"process {rank}", str(os.getpid()))
            others = (other for other in range(world_size) if other != rank)
            pids = {other: int(store.get(f"process {other}")) for other in others}
    joined = TorchrunEnvironment(rank, world_size, Peers(pids))
    keep_slot()
    _shorten_lost_ranks(joined)
    atexit.register(leave_torchrun)
    return joined


def leave_torchrun() -> None:
    """Leave the default group, if it still exists; ``join_torchrun`` registers this with ``atexit``.

    Reference cycles may keep groups alive until the interpreter ends, and Gloo aborts if groups are destroyed
    then. Before cycles were collected here, 3 of 12 runs of two ranks ended with SIGABRT. If a rank was lost,
    the process ends here, with exit code 1, because Gloo would wait for that rank until another timeout.
    """
    if _has_missed_rank:
        flush_output()
        os._exit(1)
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


def _seat() -> tuple[int, int, int]:
    texts = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")}
    fit = all(text.isdecimal() and len(text) < 10 for text in texts.values())
    rank, local_rank, size, port = map(int, texts.values()) if fit else (0, 0, 0, 0)
    if not (rank < size and local_rank < size and port < 1 << 16):
        raise UsageError(
            f"torchrun's environment variables are damaged or contradict each other: {texts!s:.200}"
        )
    return rank, local_rank, size


@contextlib.contextmanager
def _meeting(rank: int, world_size: int) -> Iterator[None]:
    """If the ranks do not meet, raise an error that says why in one line."""
    try:
        yield
    except TutorialError:
        raise
    except RuntimeError as error:
        reason = in_one_line(str(error).partition("\n")[0])
        raise LaunchError(f"rank {rank} of {world_size} did not meet the others: {reason}") from None


def _on_one_machine() -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")


def _store_of_attempt(patience: timedelta) -> dist.Store:
    """Return the store where the ranks meet, with keys that no earlier attempt has used.

    With several machines, the keys stay as torch makes them: each agent counts only its own restarts, so
    the machines' counts differ.
    """
    _check_agent_listens()
    store, _, _ = next(dist.rendezvous("env://", timeout=patience))
    store.set_timeout(patience)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    return dist.PrefixStore(f"attempt {attempt}", store) if attempt and _on_one_machine() else store


def _check_agent_listens() -> None:
    """Raise an error if the agent does not listen: the store's client would keep trying to connect."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        return  # rank 0 will listen, but perhaps not yet
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        socket.create_connection(address, _UNTIL_REFUSED).close()
    except ConnectionRefusedError:
        raise LaunchError(f"torchrun's agent ended before rank {os.environ['RANK']} joined it") from None
    except OSError:
        return  # the agent may still start; torch waits for it longer


def _shorten_lost_ranks(joined: TorchrunEnvironment) -> None:
    """Show an uncaught error as one line if it is only about another rank."""
    before = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        if not joined.report_lost_rank(error):
            before(kind, error, frames)

    sys.excepthook = show
