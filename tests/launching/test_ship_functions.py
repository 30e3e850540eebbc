"""launch() goes on, and names the rank, if a rank's value runs any code while it is unpickled."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from muon_tutorial.errors import LaunchError
from muon_tutorial.launching.errors_of_lost_ranks import is_about_lost_rank
from muon_tutorial.launching.ship_functions import dumps, unpack_error
from muon_tutorial.launching.watch_ranks import _rebuilt


class RebuildingError(Exception):
    """An exception that calls a function when it is unpickled."""

    def __init__(self, call: Callable[..., Any], *args: object) -> None:
        super().__init__("planted")
        self.call, self.args = call, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call, self.args


class OtherArgumentsError(Exception):
    """An exception that cannot be unpickled, because pickle passes one argument too few."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(one)


class SpeechlessError(RuntimeError):
    def __str__(self) -> str:
        raise ValueError("no words")


UNFIT = (OtherArgumentsError(1, 2), RebuildingError(sys.exit, 3))


@pytest.mark.parametrize("value", [*UNFIT, RebuildingError(int, "x")])
def test_a_value_that_cannot_be_rebuilt_is_an_error_that_names_its_rank(value: Exception) -> None:
    with pytest.raises(LaunchError, match="the value that rank 7 returned cannot be rebuilt") as caught:
        _rebuilt(7, dumps(value))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("error", UNFIT)
def test_an_exception_that_cannot_be_rebuilt_stays_behind(error: Exception) -> None:
    assert unpack_error(dumps(error)) is None


def test_an_interrupt_while_rebuilding_interrupts() -> None:
    data = dumps(RebuildingError(interrupt))
    for rebuild in (unpack_error, lambda data: _rebuilt(0, data)):
        with pytest.raises(KeyboardInterrupt):
            rebuild(data)


def interrupt() -> None:
    raise KeyboardInterrupt


def test_an_error_that_cannot_say_what_it_is_about_is_about_its_own_rank() -> None:
    assert not is_about_lost_rank(SpeechlessError())
