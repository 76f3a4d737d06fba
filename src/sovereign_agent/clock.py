"""Time: the only room that reads a clock.

Stored time is whole microseconds since 1970 in UTC, an integer, so that the order of the numbers is the
order of the moments in every engine. Nothing else in the package calls ``datetime.now`` or ``time.time``.
Budgets that live in memory use `monotonic`, which no wall clock can move.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

Clock = Callable[[], datetime]
"""Whatever answers "what time is it" with an aware datetime."""

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
FIRST_MICROS = -62_135_596_800_000_000
LAST_MICROS = 253_402_300_799_999_999
"""The ends of the calendar: the first microsecond of year 1 and the last of year 9999."""


def micros(moment: datetime) -> int:
    """Turn an aware datetime into stored time. Raises ValueError for a naive one: it names no moment."""
    if moment.tzinfo is None:
        raise ValueError(f"{moment!r} has no time zone; a stored time is a moment, not a wall reading")
    return (moment - EPOCH) // MICROSECOND


def moment(stored: int) -> datetime:
    """Turn stored time (microseconds) into an aware UTC datetime.

    A number outside the calendar, which only a hand-made row can hold, reads as the calendar's nearest end:
    one impossible row must not keep its reader from the others.
    """
    return EPOCH + MICROSECOND * min(max(stored, FIRST_MICROS), LAST_MICROS)


def monotonic() -> float:
    """Seconds on a clock that only goes forward; for budgets that are never stored."""
    return time.monotonic()


class SystemClock:
    """The machine's UTC clock."""

    def __call__(self) -> datetime:
        return datetime.now(UTC)


class ManualClock:
    """A clock that moves only when told to: tests wait no real time.

    Args:
        start: the first answer; aware. Any zone: the clock answers in UTC.
    """

    def __init__(self, start: datetime = datetime(2026, 1, 1, tzinfo=UTC)) -> None:
        self._now = start.astimezone(UTC)

    def __call__(self) -> datetime:
        return self._now

    def advance(self, by: timedelta) -> None:
        """Move by ``by``; a negative one moves back, as real clocks sometimes do."""
        self._now += by

    def set(self, to: datetime) -> None:
        """Move to ``to``."""
        self._now = to.astimezone(UTC)
