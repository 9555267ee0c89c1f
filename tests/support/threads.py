"""Threads in tests: run something beside the test, wait for a condition, never for a while.

`Beside` runs a function on a thread and hands back what it returned or raised. `until` waits for a condition
that another thread makes true; it polls, and gives up loudly.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")

PATIENCE_S = 300.0


class Beside(Generic[Result]):
    """A function on a thread of its own."""

    def __init__(self, function: Callable[[], Result]) -> None:
        self._function = function
        self._result: list[Result] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> Result:
        """What it returned, once it ended; what it raised is raised here."""
        self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            raise TimeoutError(f"{self._function} did not end in {PATIENCE_S} s")
        if self._error is not None:
            raise self._error
        return self._result[0]

    def _run(self) -> None:
        try:
            self._result.append(self._function())
        except BaseException as error:  # noqa: BLE001 - handed to whoever asks for the result
            self._error = error


def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds."""
    pause = threading.Event()
    for _ in range(int(PATIENCE_S * 1000)):
        if condition():
            return
        pause.wait(0.001)
    raise TimeoutError(f"{condition} did not come true in {PATIENCE_S} s")
