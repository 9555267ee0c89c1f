"""Records of one partition that are cut, encoded and checked, and can be stored at any moment.

For callers that number records themselves (`integrity.sender`): all that could be refused is refused by
`Writer.prepare`, before a number is given out, and an append that failed is repeated with the same bytes.

Thread rule: one caller at a time; appends take the writer's turn.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tidegate.log.format.batch import RecordFacts
from tidegate.log.partitions.appending import Appending, prepare
from tidegate.log.producers.producer_state import Origin
from tidegate.log.topics.topic_config import TopicConfig

if TYPE_CHECKING:
    from tidegate.log.access.writer import Written


class PreparedWrite:
    """Made by `Writer.prepare`."""

    def __init__(
        self,
        batches: Sequence[tuple[bytearray, RecordFacts]],
        store: Callable[[bytearray, RecordFacts], Written],
        turn: threading.Lock,
    ) -> None:
        self._left = deque(batches)
        self._store = store
        self._turn = turn
        self._written: list[Written] = []

    def append(self) -> list[Written]:
        """Store what is not stored yet, and answer all that is; after an error, call it again to go on."""
        with self._turn:
            while self._left:
                self._written.append(self._store(*self._left[0]))
                self._left.popleft()
        return self._written


def check_appendable(
    batch: bytearray, facts: RecordFacts, config: TopicConfig, where: str, now_ms: int
) -> None:
    """Raise what appending the batch would raise; leaves the batch as it was."""
    to = Appending(where, config, next_offset=0, leader_epoch=0, now_ms=now_ms)
    prepared = prepare(batch, Origin.CLIENT, to, facts)
    if prepared is not None and prepared.data is batch:
        prepared.undo()
