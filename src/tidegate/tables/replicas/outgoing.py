"""What a leader appends to its partition of the version topic: its stamp, switches, copied records, its end.

Owns the leader's sender and, on an embedded log, the partition's lock: it is taken to append, kept while there is
something to append, and given back when there was nothing for a while (`rest`), so that a leader that is paused in a
quiet moment does not keep the next one from writing.

O1  one sender with a GUID of its own for each leadership, never used again.
O2  after an error nothing more is sent: whether the last records arrived is unknown here, and is told by the version
    topic to the next leadership, whose stamp says from where on these records do not count.

Thread rule: one thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import pyarrow as pa

from tidegate.clock import Clock
from tidegate.errors import ConflictError, UnavailableError
from tidegate.integrity.control_records import Leadership, TopicSwitch, send_leadership, with_upstream
from tidegate.integrity.header import ControlType
from tidegate.integrity.sender import SCHEMA
from tidegate.log.log import Log
from tidegate.waiting import waiting

LARGEST_PART: Final = 512 << 10
"""A switch has at most so many bytes of validation state, and at most half of what the topic takes as one batch."""
STATES: Final = 1 << 20
"""More than one leadership writes."""
LOCK_WAIT_MS: Final = 2_000
PAUSE_MS: Final = 5
WRITE_SECONDS: Final = 30.0


class Outgoing:
    """One leadership's way into the version topic."""

    def __init__(
        self, log: Any, topic: str, partition: int, leadership: Leadership, *, clock: Clock, hold_ms: int
    ) -> None:
        self.leadership = leadership
        self._log, self._topic, self._partition = log, topic, partition
        self._clock, self._hold_ms = clock, hold_ms
        self._is_embedded = isinstance(log, Log)
        self._settings = {} if self._is_embedded else {"timeout_seconds": WRITE_SECONDS}
        self._sender: Any = None
        self._holds, self._used_ms = False, 0
        self._most_bytes = max(1, min(LARGEST_PART, log.describe(topic).config.max_message_bytes // 2))
        self._generation = leadership.epoch * STATES

    def stamp(self, nonce: int = 0) -> int:
        """Say that this leadership begins; the offset of the record that says so."""
        with self._turn():
            writer = self._log.writer(self._topic, **self._settings)
            try:
                written = send_leadership(
                    writer, self._partition, self.leadership, nonce=nonce, now_ms=self._clock.now_ms()
                )
            finally:
                writer.close()
        return int(written.last_offset)

    def switch(self, switch: TopicSwitch) -> None:
        """Say from where the live topic is read, or how far it was; a large state in parts, one record each."""
        self._generation += 1
        with self._turn():
            sender = self._open()
            for part in switch.in_parts(self._most_bytes, self._generation % (1 << 64)):
                sender.send_control(ControlType.TOPIC_SWITCH, {self._partition: part.to_bytes()})

    def copy(self, records: pa.RecordBatch) -> None:
        """Append records of the live topic, each with its offset there; returns when they are stored."""
        offsets = records.column("offset").to_numpy()
        rows = pa.RecordBatch.from_arrays(
            [
                records.column("key"),
                records.column("value"),
                records.column("timestamp"),
                with_upstream(records.column("headers"), offsets),
            ],
            schema=SCHEMA,
        )
        with self._turn():
            self._open().write(rows, partition=self._partition)

    def end(self) -> None:
        """End the chain, with everything acknowledged, and let go."""
        try:
            if self._sender is not None:
                with self._turn():
                    self._sender.close()
        finally:
            self._sender = None
            self._give_back()

    def abandon(self) -> None:
        """Let go without another word (O2)."""
        try:
            if self._sender is not None:
                self._sender.close(graceful=False)
        finally:
            self._sender = None
            self._give_back()

    def rest(self) -> None:
        """There is nothing to append: give the lock back when it was not used for a while."""
        if self._holds and self._clock.monotonic_ms() - self._used_ms >= self._hold_ms:
            self._give_back()

    # -- inside ----------------------------------------------------------------------------------

    def _open(self) -> Any:
        if self._sender is None:
            self._sender = self._log.writer(
                self._topic, integrity={"guid": self.leadership.guid}, **self._settings
            )
        return self._sender

    @contextmanager
    def _turn(self) -> Iterator[None]:
        if self._is_embedded and not self._holds:
            self._take()
        try:
            yield
        finally:
            self._used_ms = self._clock.monotonic_ms()
            if self._hold_ms <= 0:
                self._give_back()

    def _take(self) -> None:
        opening = partial(self._log.open_partition, self._topic, self._partition)
        try:
            waiting(self._clock, LOCK_WAIT_MS, opening, pause_ms=PAUSE_MS)
        except ConflictError as error:
            raise UnavailableError(
                f"{self._topic}-{self._partition} cannot be written: {error} If that process is stopped, let it go on "
                "or kill it"
            ) from error
        self._holds = True

    def _give_back(self) -> None:
        if self._holds:
            self._holds = False
            self._log.release(self._topic, self._partition)
