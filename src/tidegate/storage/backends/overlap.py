"""Several calls of a slow backend at once: a bounded number in flight, and none left behind.

A remote store answers in tens of milliseconds, however many ask; one call after the other would add that up. The
threads live as long as one round: when `overlap` returns or raises, every call has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

Item = TypeVar("Item")


def overlap(call: Callable[[Item], None], items: Sequence[Item], *, at_most: int) -> None:
    """Call `call` with every item, at most so many at the same time; with one at a time, on this thread.

    After an error no further call begins, those in flight end, and the error of the first item that has one is
    raised. What a caller expects to fail for single items, its `call` takes care of.
    """
    if at_most <= 1 or len(items) < 2:
        for item in items:
            call(item)
        return
    failed = (
        threading.Event()
    )  # seen by the next call at once; cancelling alone comes when this thread wakes up

    def begin(item: Item) -> None:
        if failed.is_set():
            return
        try:
            call(item)
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(min(at_most, len(items)), thread_name_prefix="tidegate-backend") as threads:
        calls = [threads.submit(begin, item) for item in items]
        try:
            wait(calls, return_when=FIRST_EXCEPTION)
        finally:
            for each in calls:
                each.cancel()
    for each in calls:
        if not each.cancelled():
            each.result()
