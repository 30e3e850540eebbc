"""torchrun's agent, as ``python -m muon_tutorial torchrun``: it can also restart ranks on several machines.

torchrun itself ends a job that gets a signal with a traceback and exit code 1, dies of SIGUSR1, and cannot
restart ranks on several machines unless an environment variable is set before it starts.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from .command import BAD_INPUT, FAILED, said_of, say
from .echo import in_one_line

OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""If this is 1, restarted ranks meet in a new store, which holds no addresses of dead ranks."""


def run_agent(words: Sequence[str]) -> int:
    """Run torchrun with these arguments; return its exit code: 128 + N if signal N ended it or its ranks."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousConnectionError

    def interrupt(number: int, frame: object) -> None:
        raise SignalException(signal.Signals(number).name, signal.SIGTERM)  # which its ranks get

    options = run.parse_args(list(words))
    if options.nnodes not in ("1", "1:1"):
        os.environ.setdefault(OWN_STORE, "1")
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _: _pass_on(number))
    handled = getattr(options, "signals_to_handle", "")
    if "SIGINT" in handled:  # it makes ranks that are still starting print tracebacks
        options.signals_to_handle = handled.replace("SIGINT", "SIGTERM")
        signal.signal(signal.SIGINT, interrupt)
    try:
        run.run(options)
        return 0
    except SignalException as ended:
        sent = signal.SIGINT if str(ended) == "SIGINT" else ended.sigval
        return say(f"{said_of(sent.name)}; its ranks on this machine have ended", 128 + sent)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        said = f"error: rank {rank} {how}; it was the first to fail"
        return say(said, 128 - code if code < 0 else code or FAILED)
    except RendezvousClosedError:
        return say("error: another agent has ended the job, so this one cannot start its ranks", FAILED)
    except RendezvousConnectionError:
        return say("error: the agent at --rdzv-endpoint does not answer", FAILED)
    except Exception as error:  # whatever torch raises, such as for a wrong option
        said = f"error: torchrun's agent ended: {type(error).__name__}: {in_one_line(str(error))}"
        return say(said, BAD_INPUT if isinstance(error, ValueError) else FAILED)


def _pass_on(number: int) -> None:
    """Send a signal to the ranks: the children that lead process groups of their own."""
    for path in Path("/proc/self/task").glob("*/children"):
        for pid in map(int, path.read_text().split()):
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(pid) == pid:
                    os.kill(pid, number)
