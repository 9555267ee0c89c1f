"""Which buckets of a store are read from packs again and again: candidates to bring back into memory.

A load counts once for each bucket that it read a stored run of; scans do not count, a sweep over everything says
nothing about any bucket. Maintenance takes the candidates, and forgets buckets that nobody read since it last asked.

A bucket that was brought back is *kept*: periodic dumps leave its hot copies alone, until relief drops them.

Safe from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable

OFTEN = 8  # loads that read a bucket cold before it is brought back
MOST_BUCKETS = 4096


class ColdReads:
    """The counts of one store."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[int, int] = {}
        self._fresh: set[int] = set()
        self._kept: set[int] = set()

    def note(self, buckets: Iterable[int]) -> None:
        """A load read stored runs of these buckets."""
        with self._lock:
            for bucket in buckets:
                if bucket in self._counts or len(self._counts) < MOST_BUCKETS:
                    self._counts[bucket] = self._counts.get(bucket, 0) + 1
                    self._fresh.add(bucket)

    def take(self) -> list[int]:
        """Buckets read cold often enough, those read most first; they begin anew. Others that rested are forgotten."""
        with self._lock:
            often = [bucket for bucket, count in self._counts.items() if count >= OFTEN]
            often.sort(key=lambda bucket: (-self._counts[bucket], bucket))
            self._counts = {
                bucket: count
                for bucket, count in self._counts.items()
                if bucket in self._fresh and count < OFTEN
            }
            self._fresh.clear()
            return often

    def keep(self, bucket: int) -> None:
        """The bucket is in memory again, for its readers."""
        with self._lock:
            self._kept.add(bucket)

    def kept(self, hot: Collection[int]) -> frozenset[int]:
        """Which of the buckets with a hot copy were brought back; those without one are kept no longer."""
        with self._lock:
            self._kept.intersection_update(hot)
            return frozenset(self._kept)

    def clear(self) -> None:
        """The store was restored: begin anew."""
        with self._lock:
            self._counts.clear()
            self._fresh.clear()
            self._kept.clear()
