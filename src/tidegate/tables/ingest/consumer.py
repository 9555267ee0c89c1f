"""The consuming stage of a builder: reads a table's topic into a bounded buffer for the draining stage.

B1  waiting bytes never exceed the limit, except for a single larger piece.
B2  a piece is refused (False) or accepted, and pieces leave in the order they were added, also after closing.
T1  reading starts exactly at the committed position. If offsets from there on have aged out, continuing at the first
    that exists is reported (a warning, a count), or refused with `on_gap="fail"`; it is never silent.
T2  offsets without records (transaction markers, compacted tails) move the position too, as pieces without records.

Thread rules: one thread puts, which is the consuming one, and one takes; `end_offsets` from any.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from tidegate.clock import Clock
from tidegate.errors import InvalidError, OffsetOutOfRangeError, TidegateWarning, UnavailableError
from tidegate.log.catalog import TopicState
from tidegate.log.log import Log
from tidegate.tables.commits import recreated
from tidegate.tables.options import TableShape
from tidegate.tables.snapshot import PartitionState, TableSource

# --- buffer

DEFAULT_LIMIT_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """Records of one partition and the offset after them; without records, only a new position."""

    partition: int
    next_offset: int
    records: pa.RecordBatch | None
    nbytes: int = 0


class BoundedBuffer:
    """A bounded queue of pieces for the drainer."""

    def __init__(self, clock: Clock, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self._clock = clock
        self._pieces: deque[Piece] = deque()
        self._bytes = 0
        self._closed = False
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._pieces)

    @property
    def nbytes(self) -> int:
        return self._bytes

    def put(self, piece: Piece, timeout_ms: int = 0) -> bool:
        """Add the piece, waiting for room at most so long; False if there was none or the buffer closed."""
        with self._changed:
            deadline = self._clock.monotonic_ms() + timeout_ms
            while not self._closed and self._pieces and self._bytes + piece.nbytes > self.limit_bytes:
                left = deadline - self._clock.monotonic_ms()
                if left <= 0:
                    return False
                self._clock.wait_ms(self._changed, left)
            if self._closed:
                return False
            self._pieces.append(piece)
            self._bytes += piece.nbytes
            self._changed.notify_all()
            return True

    def take(self, timeout_ms: int = 0) -> Piece | None:
        """Return the oldest piece, waiting for one at most so long."""
        with self._changed:
            if not self._pieces and not self._closed and timeout_ms:
                self._clock.wait_ms(self._changed, timeout_ms)
            if not self._pieces:
                return None
            piece = self._pieces.popleft()
            self._bytes -= piece.nbytes
            self._changed.notify_all()
            return piece

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


# --- consuming


class TopicWatch:
    """Detects that a table's topic is not the one any more that its positions belong to."""

    def __init__(self, log: Any, shape: TableShape) -> None:
        self._log, self._shape = log, shape
        state = self._now()
        self.topic_id, self._partitions = state.topic_id, state.partitions

    def check(self) -> None:
        """Raise if the topic was created again, has more partitions, or is gone."""
        state, shape = self._now(), self._shape
        if self.topic_id and state.topic_id and state.topic_id != self.topic_id:
            raise recreated(shape, self.topic_id, state.topic_id)
        if state.partitions > self._partitions:
            raise InvalidError(
                f"topic {shape.topic} had {self._partitions} partitions when table {shape.name} was opened, and it has "
                f"{state.partitions} now: what is in the new ones would be missing. Build the table anew in another "
                "state folder"
            )

    def _now(self) -> TopicState:
        found: dict[str, TopicState] = self._log.topic_states([self._shape.topic])
        if self._shape.topic not in found:
            raise UnavailableError(
                f"topic {self._shape.topic} of table {self._shape.name} does not exist (any more); create it again"
            )
        return found[self._shape.topic]


def first_and_end(
    log: Any, topic: str, partition: int, isolation: str = "read_uncommitted"
) -> tuple[int, int]:
    """Return a partition's first offset, and the one after its last."""
    with log.reader(topic, [partition], start="earliest", isolation=isolation) as probe:
        return probe.positions()[partition], probe.end_offsets()[partition]


class TopicTail:
    """Reads the table's topic from the table's position on."""

    def __init__(self, log: Any, source: TableSource, *, read_bytes: int) -> None:
        self._log = log
        self._source = source
        self._read_bytes = read_bytes
        self._told: dict[int, int] = {}
        self._reader = self._open({state.partition: state.next_offset for state in source.partitions})

    def poll(self, timeout_ms: int = 0) -> list[Piece]:
        """Return the next pieces: with records, or with a new position only; empty if there are none."""
        try:
            records = self._reader.poll(timeout_ms)
        except OffsetOutOfRangeError:
            self._reader.close()
            self._reader = self._open(self._told)
            return []
        if records is None:
            return self._moved()
        partition = int(records.column("partition")[0].as_py())
        following = int(records.column("offset")[-1].as_py()) + 1
        self._told[partition] = following
        return [Piece(partition, following, records, records.get_total_buffer_size())]

    def end_offsets(self) -> dict[int, int]:
        """Return the topic's end offsets, for the table's isolation level."""
        rules = self._source.rules
        with self._log.reader(
            rules.shape.topic,
            list(rules.shape.partitions),
            start="latest",
            isolation=rules.consumed.isolation,
        ) as reader:
            ends: dict[int, int] = reader.end_offsets()
            return ends

    def close(self) -> None:
        self._reader.close()

    def _moved(self) -> list[Piece]:
        pieces = []
        for partition, offset in self._reader.positions().items():
            if offset > self._told[partition]:
                pieces.append(Piece(partition, offset, None))
                self._told[partition] = offset
        return pieces

    def _open(self, positions: Mapping[int, int]) -> Any:
        rules = self._source.rules
        topic, starts = rules.shape.topic, {}
        for state in self._source.partitions:
            number = state.partition
            # Looked up first: a cluster's reader notices offsets that are gone only while it reads.
            starts[number] = self._start(state, positions[number], *first_and_end(self._log, topic, number))
        self._told = dict(positions)
        # A cluster's client decides itself how much it fetches.
        size = {"max_bytes": self._read_bytes} if isinstance(self._log, Log) else {}
        return self._log.reader(
            topic,
            list(starts),
            start=starts,
            isolation=rules.consumed.isolation,
            control_records=True,
            **size,
        )

    def _start(self, state: PartitionState, wanted: int, first: int, end: int) -> int:
        """Return the offset to continue from, if the partition holds `first` up to `end` (T1)."""
        shape = self._source.rules.shape
        place = f"{shape.topic}-{state.partition}"
        if wanted > end:
            raise InvalidError(
                f"table {shape.name} has read {place} up to offset {wanted}, and the topic "
                f"ends at {end}: it was made anew. Build the table anew too, in another state folder"
            )
        if wanted >= first:
            return wanted
        if wanted == 0:
            return first  # nothing was read yet: begin at the first record there is
        if self._source.rules.consumed.on_gap == "fail":
            raise OffsetOutOfRangeError(
                f"table {shape.name}: offsets {wanted} to {first - 1} of {place} aged out before "
                "they were read. Go on without them with on_gap='earliest', or build the table anew from a copy",
                offset=wanted,
                first=first,
                end=end,
            )
        state.counts.skipped_offsets += first - wanted
        warnings.warn(
            f"table {shape.name}: {first - wanted} offsets of {place} from {wanted} on aged out "
            f"before they were read; going on at {first}. Deletions among them are not in the table",
            TidegateWarning,
            stacklevel=2,
        )
        return first
