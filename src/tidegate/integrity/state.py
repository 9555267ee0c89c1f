"""What a receiver knows of one partition: its producers, and where the partition stands in its push.

Owns the state's shape, its growth and the expiry of old producers; verdicts are `validator`'s and bytes are
`checkpoint`'s. `ProducerTable` keeps producers as rows, with a hash index over their GUIDs, so that kernels
work on it in place; `Producer` values go in and come out for everybody else.

Invariants:
S1  `next_offset` and the producers describe the same records: they are copied, saved and restored together;
S2  `index` finds every row below `count` and nothing else.

Thread rule: one thread per state; `copy` shares nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tidegate.integrity.header import ChecksumType
from tidegate.kernels.producer_index import PRODUCER_ROW, find_producer, index_producers

NO_TIME: Final = -1
UNCOUNTED: Final = -1
NEVER: Final = -1
"""A maximum age that is none."""
DEFAULT_MAX_AGE_MS: Final = 7 * 86_400_000
"""How long a producer may be silent before a pipeline or a table forgets it, unless it is told otherwise."""
MOST_REMEMBERED: Final = 100_000
"""Above this many producers, those that ended for good are forgotten before they are too old."""
FUTURE_GUARD_MS: Final = 3_600_000
"""How far ahead of the round's time a producer's clock may be and still count as the newest."""
_FEWEST_ROWS: Final = 16


class Phase(IntEnum):
    """Where a partition stands in its push; LIVE topics never had one."""

    LIVE = 0
    PUSHING = 1
    PUSHED = 2

    @property
    def is_settled(self) -> bool:
        return self is not Phase.PUSHING


@dataclass(frozen=True, slots=True)
class Producer:
    """What is known of one producer in one partition.

    `checksum`, `stamp_sum` and `records` are of the present chain; `data_records` counts over all
    chains, UNCOUNTED once there was a gap.
    """

    guid: bytes
    chain: int
    sequence: int
    registered: bool
    checksum_type: int = ChecksumType.NONE
    checksum: int = 0
    stamp_sum: int = 0
    records: int = 0
    data_records: int = 0
    ended: bool = False
    final: bool = False
    tainted: bool = False
    producer_time: int = NO_TIME
    log_time: int = NO_TIME
    offset: int = -1


class ProducerTable:
    """The producers of one partition, by GUID."""

    count: int
    rows: NDArray[Any]
    """Of `PRODUCER_ROW`; those from `count` on are free."""
    index: NDArray[np.int32]

    def __init__(self, rows: NDArray[Any] | None = None) -> None:
        self._take(np.zeros(0, PRODUCER_ROW) if rows is None else rows)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Producer]:
        return (self._producer(row) for row in range(self.count))

    def __contains__(self, guid: bytes) -> bool:
        return self._find(guid) >= 0

    def __eq__(self, other: object) -> bool:
        """The same producers in the same states, in whatever order they came."""
        if not isinstance(other, ProducerTable):
            return NotImplemented
        return self.count == other.count and bool((self.ordered() == other.ordered()).all())

    __hash__ = None  # type: ignore[assignment]

    @property
    def known(self) -> NDArray[Any]:
        """The rows in use: a view."""
        return self.rows[: self.count]

    def ordered(self) -> NDArray[Any]:
        """The rows in order of GUID: a copy."""
        rows = self.known
        ordered: NDArray[Any] = rows[np.lexsort((rows["guid_low"], rows["guid_high"]))]
        return ordered

    def get(self, guid: bytes) -> Producer | None:
        row = self._find(guid)
        return None if row < 0 else self._producer(row)

    def put(self, producer: Producer) -> None:
        """Take the place of what was known of this producer."""
        self.put_all([producer])

    def put_all(self, producers: Sequence[Producer]) -> None:
        """Several different ones at once; those that are new in the order given."""
        rows = [self._find(producer.guid) for producer in producers]
        self.reserve(rows.count(-1))
        before = self.count
        for row, producer in zip(rows, producers, strict=True):
            if row < 0:
                row = self.count
                self.count += 1
            high, low = _halves(producer.guid)
            for name in PRODUCER_ROW.names or ():
                if not name.startswith("guid"):
                    self.rows[row][name] = getattr(producer, name)
            self.rows[row]["guid_high"], self.rows[row]["guid_low"] = high, low
        if self.count > before:
            self._reindex()

    def reserve(self, more: int) -> None:
        """Room for `more` producers besides those known."""
        needed = self.count + more
        if needed > len(self.rows):
            rows = np.zeros(max(needed, 2 * len(self.rows)), PRODUCER_ROW)
            rows[: self.count] = self.known
            self.rows = rows
            self._reindex()

    def keep(self, chosen: NDArray[np.bool_]) -> int:
        """Forget all others; how many went."""
        kept = self.known[chosen]
        gone = self.count - len(kept)
        if gone:
            self._take(kept)
        return gone

    def copy(self) -> ProducerTable:
        twin = ProducerTable()
        twin.count, twin.rows, twin.index = self.count, self.rows.copy(), self.index.copy()
        return twin

    def _take(self, given: NDArray[Any]) -> None:
        self.count = len(given)
        self.rows = np.zeros(max(_FEWEST_ROWS, len(given)), PRODUCER_ROW)
        self.rows[: self.count] = given
        self._reindex()

    def _find(self, guid: bytes) -> int:
        high, low = _halves(guid)
        return int(find_producer(self.rows, self.index, np.uint64(high), np.uint64(low)))

    def _reindex(self) -> None:
        self.index = np.empty(_index_size(len(self.rows)), np.int32)
        index_producers(self.rows, self.count, self.index)

    def _producer(self, row: int) -> Producer:
        found = self.rows[row]
        flags = {name: bool(found[name]) for name in ("registered", "ended", "final", "tainted")}
        numbers = {
            name: int(found[name])
            for name in PRODUCER_ROW.names or ()
            if name not in flags and not name.startswith("guid")
        }
        guid = int(found["guid_high"]).to_bytes(8, "big") + int(found["guid_low"]).to_bytes(8, "big")
        return Producer(guid=guid, **numbers, **flags)  # type: ignore[arg-type]


@dataclass(slots=True)
class PartitionState:
    """All a receiver carries from one batch to the next (S1)."""

    producers: ProducerTable = field(default_factory=ProducerTable)
    phase: Phase = Phase.LIVE
    next_offset: int = 0
    """The offset after the last record judged."""
    end_of_push: int = -1
    """The offset of the record that ended the push, -1 before."""
    forgot: bool = False
    """Producers were forgotten: one that is met in the middle of its numbering may be one of them, and no fault."""

    def copy(self) -> PartitionState:
        """A deep copy."""
        return PartitionState(
            self.producers.copy(), self.phase, self.next_offset, self.end_of_push, self.forgot
        )

    @property
    def newest_time(self) -> int:
        """The newest time any producer gave, -1 without any."""
        times = self.producers.known["producer_time"]
        return int(times.max()) if len(times) else NO_TIME

    def expire(self, max_age_ms: int, *, now_ms: int) -> int:
        """Forget producers silent for longer than `max_age_ms` when the newest one spoke, and, above MOST_REMEMBERED
        producers, the oldest of those that ended for good; how many went.

        The wall clock expires nobody: `now_ms` only keeps a clock that runs ahead from expiring the others. During a
        push nobody goes: its manifest lists all who took part.
        """
        times = self.producers.known["producer_time"]
        if max_age_ms == NEVER or self.phase is Phase.PUSHING:
            return 0
        gone = 0
        sane = times[times <= now_ms + FUTURE_GUARD_MS]
        if len(sane) and int(sane.max()) != NO_TIME:
            gone = self._keep(times >= int(sane.max()) - max_age_ms)
        rows = self.producers.known
        over, ended = len(rows) - MOST_REMEMBERED, np.flatnonzero(rows["final"])
        if over > 0 and len(ended):
            if len(ended) > over:
                ended = ended[np.argpartition(rows["producer_time"][ended], over - 1)[:over]]
            kept = np.ones(len(rows), np.bool_)
            kept[ended] = False
            gone += self._keep(kept)
        return gone

    def _keep(self, chosen: NDArray[np.bool_]) -> int:
        gone = self.producers.keep(chosen)
        self.forgot = self.forgot or gone > 0
        return gone


def _halves(guid: bytes) -> tuple[int, int]:
    return int.from_bytes(guid[:8], "big"), int.from_bytes(guid[8:], "big")


def _index_size(rows: int) -> int:
    return 1 << (2 * rows).bit_length()
