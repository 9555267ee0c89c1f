"""First and end offsets of a cluster's partitions: asked of it, without a consumer, which would begin to fetch.

Thread rule: as the client's, which may be shared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

from tidegate.errors import UnavailableError
from tidegate.log.kafka.client import PATIENCE_MS, TIMEOUT_SECONDS, calling, load_client


class Offsets:
    """Asks for offsets of one topic, as readers of an isolation see it; all partitions in one request."""

    def __init__(self, servers: str, admin: Any, topic: str, isolation: str) -> None:
        self._servers, self._admin, self._topic = servers, admin, topic
        self._module = load_client()
        levels = self._module.IsolationLevel
        self._level = levels.READ_COMMITTED if isolation == "read_committed" else levels.READ_UNCOMMITTED
        self._kinds: Any = import_module("confluent_kafka.admin").OffsetSpec

    def first(self, partitions: Iterable[int]) -> dict[int, int]:
        """Partition → its first offset."""
        return self._certain(self._asked(dict.fromkeys(partitions, self._kinds.earliest())))

    def end(self, partitions: Iterable[int]) -> dict[int, int]:
        """Partition → the offset readers of this isolation may not reach yet."""
        return self._certain(self._asked(dict.fromkeys(partitions, self._kinds.latest())))

    def at(self, times_ms: Mapping[int, int]) -> dict[int, int]:
        """Partition → the first offset of that time or later; negative where there is none."""
        return self._asked({number: self._kinds.for_timestamp(time) for number, time in times_ms.items()})

    def _certain(self, found: dict[int, int]) -> dict[int, int]:
        """Every partition has a first offset and an end; a broker that dies while it is asked may give none."""
        for number, offset in found.items():
            if offset < 0:
                raise UnavailableError(
                    f"{self._servers} gave no offset of {self._topic}-{number} (it said {offset}): the broker may be "
                    "starting or going; try again"
                )
        return found

    def _asked(self, wanted: Mapping[int, Any]) -> dict[int, int]:
        places = {self._module.TopicPartition(self._topic, number): what for number, what in wanted.items()}

        tries = 0

        def ask() -> dict[int, int]:
            nonlocal tries
            tries += 1
            if tries > 1:  # who leads is remembered for minutes; what it was told is out of date
                self._admin.list_topics(timeout=TIMEOUT_SECONDS)
            futures = self._admin.list_offsets(
                places, isolation_level=self._level, request_timeout=TIMEOUT_SECONDS
            )
            return {place.partition: int(future.result().offset) for place, future in futures.items()}

        what = f"ask for the offsets of {self._topic}"
        return calling(what, self._servers, ask, admin=self._admin, patience_ms=PATIENCE_MS)
