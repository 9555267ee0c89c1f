"""A thread that keeps what is asked for new, beside the questions; while nobody asks it sleeps without waking.

Thread rule: `wake` from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

EVERY_SECONDS: Final = 0.05


class KeptNew:
    """Calls `refresh` again and again from the first `wake` on, until it says that nobody asks any more."""

    def __init__(self, refresh: Callable[[], bool]) -> None:
        self._refresh = refresh
        self._asked, self._ended = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def wake(self) -> None:
        if self._asked.is_set():
            return
        self._asked.set()
        with self._starting:
            if self._thread is None and not self._ended.is_set():
                self._thread = threading.Thread(target=self._run, name="keeping-new", daemon=True)
                self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._asked.set()
        if self._thread is not None:
            self._thread.join(timeout=10)

    def _run(self) -> None:
        while not self._ended.is_set():
            self._asked.wait()
            while not self._ended.wait(EVERY_SECONDS):
                if not self._refresh():
                    self._asked.clear()
                    break
