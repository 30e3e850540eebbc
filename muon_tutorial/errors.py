"""The named errors of the package, in one tree.

    TutorialError
    ├── UsageError              bad input; one clear line, exit code 2 from the command line
    │   ├── NotAMatrixError     a parameter that Muon cannot step
    │   ├── GridError           a grid, mesh or axis that does not fit
    │   ├── StrategyError       an unknown strategy, or one that does not fit the parameters
    │   ├── ConfigError         a DistributedConfig, or one of its functions, broke its contract
    │   ├── TextError           a training text that cannot be read
    │   ├── TraceError          a profiler's trace that cannot be read, or lacks what was asked for
    │   ├── CheckpointError     a checkpoint that cannot be written or read, or does not fit
    │   └── RunFolderError      a run folder that cannot be used
    ├── GradientError           a step met gradients that it cannot use
    │   └── NotFiniteError      gradients, or their sum, are NaN or infinite
    ├── TrainingError           a training run whose loss is no longer finite
    ├── RequestError            ranks asked for collectives that cannot be answered
    │   ├── MismatchError       members of one group asked, or would step, differently
    │   │   └── PlanMismatchError   ranks made different plans
    │   ├── DeadlockError       no group can proceed
    │   └── OneWayError         an inverse was requested of a move that has none
    └── LaunchError             a launch of ranks that did not succeed
        ├── RankFailedError     a rank raised, exited or was killed; the earliest first
        └── LaunchTimeoutError  the wall-clock limit of a launch passed

``UsageError`` is also a ``ValueError``, and the others are ``RuntimeError``s, so that callers who know only
the built-in classes still catch them.
"""

from __future__ import annotations


class TutorialError(Exception):
    """Base of every error this package raises on purpose."""


class UsageError(TutorialError, ValueError):
    """Bad input; the message says what was expected, what was given, and the remedy."""


class NotAMatrixError(UsageError):
    """A parameter that is not a matrix was given to Muon."""


class GridError(UsageError):
    """A grid, mesh or axis does not fit the ranks, or another grid, mesh or axis."""


class StrategyError(UsageError):
    """A strategy is unknown, or does not fit the parameters or the grid."""


class ConfigError(UsageError):
    """A ``DistributedConfig``, or one of its functions, broke its contract."""


class TextError(UsageError):
    """A training text is missing, empty or not text."""


class TraceError(UsageError):
    """A profiler's trace cannot be read, or lacks what was asked for."""


class CheckpointError(UsageError):
    """A checkpoint cannot be written or read, or does not fit the model, the optimizer or the other ranks.

    If the error only reports that another rank failed, ``rank`` is that rank.
    """

    def __init__(self, report: str, rank: int | None = None) -> None:
        super().__init__(report)
        self.rank = rank


class RunFolderError(UsageError):
    """A run folder cannot be written, or already holds a run."""


class GradientError(TutorialError, RuntimeError):
    """A step met gradients that it cannot use."""


class NotFiniteError(GradientError):
    """A gradient, or the sum of gradients over ranks, is NaN or infinite."""


class TrainingError(TutorialError, RuntimeError):
    """A training run cannot go on: its loss is no longer finite."""


class RequestError(TutorialError, RuntimeError):
    """Ranks asked for collectives that cannot be answered."""


class MismatchError(RequestError):
    """Members of one group asked for different collectives, or would step with different hyperparameters."""


class PlanMismatchError(MismatchError):
    """Ranks made different plans."""


class DeadlockError(RequestError):
    """No group can proceed: every rank waits for a member that asks for something else, or has ended."""


class OneWayError(RequestError):
    """The inverse of a move was requested, but the move has none."""


class LaunchError(TutorialError, RuntimeError):
    """A launch of ranks did not succeed."""


class RankFailedError(LaunchError):
    """A rank raised, exited or was killed. The earliest failure is named first.

    ``rank`` is the rank that failed first, and ``original`` its exception. ``original`` is None if there was
    no exception, or if it cannot be sent between processes.
    """

    def __init__(self, report: str, rank: int | None = None, original: BaseException | None = None) -> None:
        super().__init__(report)
        self.rank = rank
        self.original = original


class LaunchTimeoutError(LaunchError):
    """The wall-clock limit of a launch passed."""
