"""An operator's clocks, and the progress that its checkpoint keeps.

*Stream time* of a partition is the largest event time of its records so far. The *floor* is the least stream time of
all partitions that are not idle: windows that ended before it (less grace) are final. It never decreases; a partition
that resumes below it is judged by it. Partitions named at the start hold the floor back until their first record.

A partition without records for `idle_ms` of the rounds' time no longer holds the floor back. When all are silent that
long, the floor follows the wall clock. The end of the input makes every window final; it is no stream time: how long
rows are kept is counted from the floor before it (`open_floor`).

Thread rule: one operator, one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from tidegate.errors import CorruptError
from tidegate.kernels.stream_time import advance_clocks
from tidegate.storage import StoreSpec
from tidegate.windows.events import NO_TIME, EventBatch, Int64s
from tidegate.windows.keys import Bytes
from tidegate.windows.kinds import LATEST
from tidegate.windows.stores.segmented_store import StoreState

# --- progress

VERSION = 1


class Clocks(msgspec.Struct, array_like=True):
    """The stream time of each source partition, and how long it has been silent."""

    partitions: list[int] = []
    times: list[int] = []
    active_at: list[int] = []  # the round time of the last record that was accepted
    idle: list[bool] = []
    floor: int = NO_TIME  # LATEST after the end of the input
    open_floor: int = NO_TIME  # the floor before that


class Progress(msgspec.Struct, array_like=True):
    """The state of one window operator, besides its rows."""

    clocks: Clocks = msgspec.field(default_factory=Clocks)
    closed: int = (
        NO_TIME  # windows that end at or before this are final; of deduplication: older records are late
    )
    counters: dict[str, int] = {}
    late_bytes: dict[int, int] = {}  # of the late table, by the start of its time segment

    def count(self, name: str, number: int) -> None:
        """Add to a counter."""
        if number:
            self.counters[name] = self.counters.get(name, 0) + int(number)


Saved = TypeVar("Saved", bound=msgspec.Struct)


def encode(saved: msgspec.Struct) -> bytes:
    return bytes([VERSION]) + msgspec.msgpack.encode(saved)


def decode(data: bytes, kind: type[Saved], what: str = "an operator's progress") -> Saved:
    """Decode what `encode` returned."""
    if data[0] != VERSION:
        raise CorruptError(
            f"{what} has format {data[0]}; this version knows {VERSION}: restore with the version that wrote the"
            " checkpoint, or start anew"
        )
    try:
        return msgspec.msgpack.decode(data[1:], type=kind)
    except msgspec.MsgspecError as error:
        raise CorruptError(f"{what} cannot be read: {error}") from error


class OperatorState(StoreState):
    """The index of an operator's store, and the operator's progress; `step_ms` is the distance of window starts."""

    def __init__(
        self, spec: StoreSpec, clocks: StreamClocks, *, step_ms: int = 1, forgets: bool = False
    ) -> None:
        super().__init__(spec)
        self._step_ms, self._forgets = step_ms, forgets
        self.clocks = clocks
        self.progress = Progress()

    @property
    def stream_time(self) -> int:
        """The start of the newest window, from which retention is measured."""
        floor = self.clocks.open_floor
        return floor if floor == NO_TIME else floor // self._step_ms * self._step_ms

    def encode_progress(self) -> bytes:
        """Return the progress as it is now, encoded."""
        self.progress.clocks = self.clocks.saved()
        return encode(self.progress)

    def roll_back(self, data: bytes) -> None:
        """Restore what `encode_progress` returned, or the initial state; the rows are not changed."""
        self.progress = decode(data, Progress) if data else Progress()
        self.clocks.restore(self.progress.clocks)

    def restore_progress(self, data: bytes) -> None:
        if not data and self._index.bucket_count:
            raise CorruptError(
                f"the checkpoint has the rows of store {self._index.spec.name} and not its operator's progress; go"
                " back to an older checkpoint",
                kafka_name=None,
            )
        self.roll_back(data)
        if self._forgets or not data:
            self.clocks.forget()
        self.restored()


# --- stream time

_NO_BYTES = np.empty(0, np.uint8)
_NO_NUMBERS = np.empty(0, np.int64)


class Stamped(NamedTuple):
    """The stream times of every record of a batch."""

    stream_time: Int64s  # of its partition, including the record itself
    judged: Int64s  # the same, or the floor where that is higher
    verdicts: Bytes


class StreamClocks:
    """The clocks of one operator."""

    def __init__(self, partitions: Sequence[int] = ()) -> None:
        self._expected = tuple(partitions)
        self.forget()

    @property
    def floor(self) -> int:
        """Windows that ended before this, less grace, are final; LATEST after the end of the input."""
        return int(self._floor[0])

    @property
    def open_floor(self) -> int:
        """The least stream time of the partitions that are waited for; the end of the input does not change it."""
        return self._open_floor if self.floor == LATEST else self.floor

    def forget(self) -> None:
        """Reset to the state before any record."""
        count = len(self._expected)
        self._partitions = np.array(self._expected, np.int32)
        self._times = np.full(count, NO_TIME, np.int64)
        self._idle = np.zeros(count, np.uint8)
        self._active_at = np.full(count, NO_TIME, np.int64)
        self._floor = np.full(1, NO_TIME, np.int64)
        self._open_floor = NO_TIME

    def time_of(self, partition: int) -> int:
        """Return the stream time of one partition, -1 before its first record."""
        found = np.flatnonzero(self._partitions == partition)
        return int(self._times[found[0]]) if len(found) else NO_TIME

    def silent_since(self) -> dict[int, int]:
        """Return the round time of each partition's last record; -1 for none."""
        return dict(zip(self._partitions.tolist(), self._active_at.tolist(), strict=True))

    def stamp(
        self, batch: EventBatch, now_ms: int, *, latest: int = LATEST, trusted: bool = False
    ) -> Stamped:
        """Advance the clocks through a batch, record by record. Records after `latest` advance none.

        `trusted`: the batch's own stream times were computed by clocks like these before a shuffle, and are used.
        """
        rows = len(batch)
        stamped = Stamped(np.empty(rows, np.int64), np.empty(rows, np.int64), np.empty(rows, np.uint8))
        valid, start = _NO_BYTES, 0
        if batch.key.null_count:
            valid, start = np.frombuffer(batch.key.buffers()[0], np.uint8), batch.key.offset
        ts, partition = np.ascontiguousarray(batch.ts), np.ascontiguousarray(batch.partition)
        times = np.ascontiguousarray(batch.stream_time) if trusted else _NO_NUMBERS
        seen = np.zeros(len(self._partitions), np.uint8)
        done = 0
        while True:
            done = advance_clocks(
                done, ts, partition, valid, start, times, int(batch.changes is not None), latest,
                self._partitions, self._times, self._idle, seen, self._floor, *stamped,
            )  # fmt: skip
            if done == rows:
                break
            seen = self._meet(int(partition[done]), now_ms, seen)
        self._active_at[seen == 1] = now_ms
        return stamped

    def advance_idle(self, now_ms: int, idle_ms: int) -> None:
        """Exclude partitions that were silent for so long; if all were, advance with the wall clock."""
        if not len(self._partitions):
            return
        self._active_at[self._active_at == NO_TIME] = (
            now_ms  # an expected partition is waited for from the first round on
        )
        self._idle[now_ms - self._active_at >= idle_ms] = 1
        moving = self._idle == 0
        if moving.any():
            self.raise_floor(int(self._times[moving].min()))
        elif self._times.max() > NO_TIME:
            self.raise_floor(int(self._times.max()) + now_ms - int(self._active_at.max()))

    def raise_floor(self, time: int) -> None:
        """Wait for nothing before this time any more."""
        self._floor[0] = max(int(self._floor[0]), min(time, LATEST))

    def end(self) -> None:
        """End the input: every window is final."""
        self._open_floor = self.open_floor
        self._floor[0] = LATEST

    def saved(self) -> Clocks:
        return Clocks(
            self._partitions.tolist(),
            self._times.tolist(),
            self._active_at.tolist(),
            [bool(each) for each in self._idle],
            self.floor,
            self.open_floor,
        )

    def restore(self, saved: Clocks) -> None:
        self._partitions = np.array(saved.partitions, np.int32)
        self._times = np.array(saved.times, np.int64)
        self._active_at = np.array(saved.active_at, np.int64)
        self._idle = np.array(saved.idle, np.uint8)
        self._floor = np.array([saved.floor], np.int64)
        self._open_floor = saved.open_floor
        for partition in self._expected:
            if partition not in saved.partitions:
                self._meet(partition, NO_TIME, np.zeros(len(self._partitions), np.uint8))

    def _meet(self, partition: int, now_ms: int, seen: Bytes) -> Bytes:
        self._partitions = np.append(self._partitions, np.int32(partition))
        self._times = np.append(self._times, np.int64(NO_TIME))
        self._active_at = np.append(self._active_at, np.int64(now_ms))
        self._idle = np.append(self._idle, np.uint8(0))
        widened: npt.NDArray[np.uint8] = np.append(seen, np.uint8(0))
        return widened
