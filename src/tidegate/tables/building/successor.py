"""Waits in the background for a table to lose its builder, and takes it over then.

S1  what another process does meanwhile (renew, commit, win the race for the lease) is no error: it is asked again.
S2  an error that will not go away by itself (another shape, damage) ends the watch, and is raised to whoever waits.

Thread rule: a thread of its own calls `attempt`; `start`, `stop` and `check` from any other.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from tidegate.clock import Clock
from tidegate.errors import ConflictError, FencedError, OverloadError, UnavailableError

TRANSIENT = (ConflictError, FencedError, OverloadError, UnavailableError)

logger = logging.getLogger(__name__)


class Successor:
    """Asks again and again until `attempt` gives something."""

    def __init__(self, attempt: Callable[[], object | None], every_ms: int, clock: Clock) -> None:
        self._attempt = attempt
        self._every_ms = every_ms
        self._clock = clock
        self._stopping = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def start(self) -> None:
        """Begin to watch; once is enough."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="tidegate-successor", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the watch and wait for its thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def check(self) -> None:
        """Raise what ended the watch, if anything did (S2)."""
        if self.error is not None:
            raise self.error

    def _watch(self) -> None:
        while True:
            with self._changed:
                if not self._stopping:
                    self._clock.wait_ms(self._changed, self._every_ms)
                if self._stopping:
                    return
            try:
                if self._attempt() is not None:
                    return
            except TRANSIENT as error:
                logger.info("taking a table over: %s; trying again", error)
            except BaseException as error:  # noqa: BLE001 - kept, and raised to whoever waits
                self.error = error
                logger.error("taking a table over failed: %s", error)
                return
