"""pytest fixtures for users of Tidegate; pytest loads this plugin by itself once Tidegate is installed.

| fixture | is |
|---|---|
| `manual_clock` | a `ManualClock` that moves only when told to, starting at 2026-01-01T00:00Z |
| `tidegate_log` | an empty `Log` in a temporary folder, on that clock, closed after the test |

`tidegate_log` runs its background work (retention, file removal) only when the test asks for it, with
`tidegate_log.scheduler.run_due()` after `manual_clock.advance("5m")`; nothing in it sleeps. It writes with
`durability="os"`: a test does not cut the power, and fsync is slow. For what happens when the disk fails or
the process dies, see `tidegate.testing.faults`.

This module is imported at the start of every pytest run, so it imports nothing heavy itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tidegate.clock import ManualClock
    from tidegate.log.log import Log


@pytest.fixture
def manual_clock() -> ManualClock:
    """A clock that moves only when told to: `manual_clock.advance("5m")`."""
    from tidegate.clock import ManualClock

    return ManualClock()


@pytest.fixture
def tidegate_log(tmp_path: Path, manual_clock: ManualClock) -> Iterator[Log]:
    """An empty log in a temporary folder, on the manual clock, closed after the test."""
    from tidegate.log.log import Log
    from tidegate.randomness import SeededRandomness
    from tidegate.scheduling import ManualScheduler

    with Log(
        tmp_path / "log",
        durability="os",
        clock=manual_clock,
        scheduler=ManualScheduler(manual_clock),
        randomness=SeededRandomness(0),
    ) as log:
        yield log
