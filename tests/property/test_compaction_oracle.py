"""Compaction of random keyed logs against a dictionary: who is kept, who goes, and what must never change.

The oracle knows the whole history as plain Python values. A cleaning, to it, is one dictionary (key → last
offset in the mapped range) and a loop over records.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from log_partitions import CompactedPartition, compacting
from tidegate.log.compaction import CompactionReport
from tidegate.log.fetch import Isolation
from tidegate.log.format.batch import iter_headers
from tidegate.log.format.decode import decode

RETENTION_MS = 1000
PRODUCERS = (-1, 1, 2, 3)


@dataclass
class Record:
    offset: int
    key: int
    value: bytes | None
    timestamp: int
    batch: int
    transaction: int | None
    """A number of its own for each transaction; None outside any."""


@dataclass
class Oracle:
    """All records ever appended, which of them should still be there, and the batches' delete horizons."""

    history: list[Record] = field(default_factory=list)
    alive: set[int] = field(default_factory=set)
    aborted: set[int] = field(default_factory=set)
    horizons: dict[int, int] = field(default_factory=dict)

    def append(self, record: Record) -> None:
        self.history.append(record)
        self.alive.add(record.offset)

    def is_aborted(self, record: Record) -> bool:
        return record.transaction in self.aborted

    def clean(self, first_dirty: int, report: CompactionReport, end_of_touched: int, now_ms: int) -> None:
        mapped_to = report.next_dirty - 1
        latest = {
            record.key: record.offset
            for record in self.history
            if first_dirty <= record.offset <= mapped_to
            and record.offset in self.alive
            and not self.is_aborted(record)
        }
        kept_tombstones = set()
        for record in self.history:
            if record.offset not in self.alive or record.offset >= end_of_touched:
                continue
            if self.is_aborted(record):
                self.alive.discard(record.offset)
                continue
            if record.offset <= mapped_to:
                if record.offset < latest.get(record.key, -1):
                    self.alive.discard(record.offset)
                    continue
                if record.value is None and self.horizons.get(record.batch, now_ms + 1) <= now_ms:
                    self.alive.discard(record.offset)
                    continue
            if record.value is None:
                kept_tombstones.add(record.batch)
        for batch in kept_tombstones:
            self.horizons.setdefault(batch, now_ms + RETENTION_MS)

    def rows(self, *, committed: bool = False) -> list[tuple[int, bytes, bytes | None, int]]:
        return [
            (record.offset, b"%d" % record.key, record.value, record.timestamp)
            for record in self.history
            if record.offset in self.alive and not (committed and self.is_aborted(record))
        ]


APPEND = st.fixed_dictionaries(
    {
        "keys": st.lists(st.integers(0, 7), min_size=1, max_size=5),
        "dead": st.integers(0, 31),
        "producer": st.sampled_from(PRODUCERS),
        "codec": st.sampled_from(["none", "none", "none", "gzip", "snappy", "lz4", "zstd"]),
    }
)
STEP = st.one_of(
    st.tuples(st.just("append"), APPEND),
    st.tuples(st.just("append"), APPEND),
    st.tuples(st.just("append"), APPEND),
    st.tuples(st.just("begin"), st.sampled_from(PRODUCERS[1:])),
    st.tuples(st.just("end"), st.tuples(st.sampled_from(PRODUCERS[1:]), st.booleans())),
    st.tuples(st.just("roll"), st.none()),
    st.tuples(st.just("clean"), st.sampled_from([1, 2, 3, 1000])),
    st.tuples(st.just("roll_and_clean"), st.sampled_from([1, 2, 3])),
    st.tuples(st.just("wait"), st.integers(1, 2 * RETENTION_MS)),
)


class Play:
    """The steps, played on a real partition and on the oracle."""

    def __init__(self, folder: Path, segment_bytes: int) -> None:
        self.world = CompactedPartition(
            folder,
            compacting(
                segment_bytes=segment_bytes, delete_retention_ms=RETENTION_MS, index_interval_bytes=150
            ),
        )
        self.oracle = Oracle()
        self.open_transactions: dict[int, int] = {}
        self.transactions = 0
        self.batches = 0
        self.first_dirty = 0

    def append(self, drawn: dict[str, Any]) -> None:
        keys, producer = drawn["keys"], drawn["producer"]
        self.batches += 1
        values = [
            None if drawn["dead"] >> place & 1 else b"%d.%d" % (self.batches, place)
            for place in range(len(keys))
        ]
        transaction = self.open_transactions.get(producer)
        first, _ = self.world.append(
            keys,
            values=values,
            producer=producer,
            transactional=transaction is not None,
            codec=drawn["codec"],
        )
        now_ms = self.world.clock.now_ms()
        for place, (key, value) in enumerate(zip(keys, values, strict=True)):
            self.oracle.append(Record(first + place, key, value, now_ms, self.batches, transaction))

    def begin(self, producer: int) -> None:
        if producer not in self.open_transactions:
            self.transactions += 1
            self.open_transactions[producer] = self.transactions
            self.append({"keys": [producer], "dead": 0, "producer": producer, "codec": "none"})

    def end(self, drawn: tuple[int, bool]) -> None:
        producer, commit = drawn
        transaction = self.open_transactions.pop(producer, None)
        if transaction is not None:
            self.world.end("COMMIT" if commit else "ABORT", producer)
            if not commit:
                self.oracle.aborted.add(transaction)

    def roll(self, _: None) -> None:
        if self.world.log.active_segment.size:
            self.world.log.roll()

    def roll_and_clean(self, keys: int) -> None:
        self.roll(None)
        self.clean(keys)

    def wait(self, duration_ms: int) -> None:
        self.world.clock.advance(duration_ms)

    def clean(self, keys: int) -> None:
        part = self.world.part(self.first_dirty)
        if part.cleanable_bytes == 0:
            return
        intact = [row for row in self.rows() if row[0] >= part.first_uncleanable]
        # The cleaning touches whole segments: all those that begin below the mapped end.
        bases = [segment.base_offset for segment in self.world.log.segments]
        now_ms = self.world.clock.now_ms()
        report = self.world.clean(self.first_dirty, map_bytes=24 * (keys + 1), map_load_factor=1.0)
        event(f"map full: {report.map_full}")
        touched = min((base for base in bases if base >= report.next_dirty), default=part.first_uncleanable)
        self.oracle.clean(self.first_dirty, report, touched, now_ms)
        assert report.next_dirty > self.first_dirty, "a cleaning makes progress"
        self.first_dirty = report.next_dirty
        assert [row for row in self.rows() if row[0] >= part.first_uncleanable] == intact

    # -- checks ----------------------------------------------------------------------------------

    def rows(self) -> list[tuple[int, bytes, bytes | None, int]]:
        return as_rows(self.world.records())

    def check(self) -> None:
        assert self.rows() == self.oracle.rows()
        last_offsets = self.world.last_offsets()
        assert last_offsets == sorted(set(last_offsets))

    def check_committed_readers(self) -> None:
        """What a reader of committed records sees, from the first offset to the last stable one."""
        log, seen, offset = self.world.log, [], self.world.log.log_start_offset
        while offset < log.last_stable_offset:
            fetched = log.fetch(offset, max_bytes=400, isolation=Isolation.TXN_COMMITTED)
            if not fetched.data:
                break
            table = decode(
                fetched.data,
                topic="t",
                partition=0,
                from_offset=offset,
                aborted=fetched.aborted,
                partial_end=True,
            )
            seen += as_rows(table)
            offset = next_offset(fetched.data)
        stable = [row for row in self.oracle.rows(committed=True) if row[0] < log.last_stable_offset]
        assert [row for row in seen if row[0] < log.last_stable_offset] == stable

    def check_producers_after_a_crash(self) -> None:
        """Sequences and epochs are in the log itself: without snapshots the same state comes back."""
        before = {
            producer: (entry.epoch, entry.last_sequence, entry.last_offset, entry.txn_first_offset)
            for producer, entry in self.world.log.active_producers.items()
        }
        self.world.log.close(clean=False)
        for name in self.world.names(".snapshot"):
            self.world.files.unlink(self.world.log.folder / name)
        self.world.log = self.world.open(clean=False)
        after = {
            producer: (entry.epoch, entry.last_sequence, entry.last_offset, entry.txn_first_offset)
            for producer, entry in self.world.log.active_producers.items()
        }
        assert after == before
        self.check()


def as_rows(table: Any) -> list[tuple[int, bytes, bytes | None, int]]:
    times = table.column("timestamp").cast("int64").to_pylist()
    return list(
        zip(
            table.column("offset").to_pylist(),
            table.column("key").to_pylist(),
            table.column("value").to_pylist(),
            times,
            strict=True,
        )
    )


def next_offset(data: bytes) -> int:
    return [header.next_offset for _, header in iter_headers(data)][-1]


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(STEP, min_size=12, max_size=50), st.sampled_from([250, 600, 3000]))
def test_compaction_keeps_exactly_what_a_dictionary_keeps(
    steps: list[tuple[str, Any]], segment_bytes: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        play = Play(Path(folder), segment_bytes)
        for name, argument in steps:
            getattr(play, name)(argument)
            if "clean" in name:
                play.check()
        play.roll(None)
        play.clean(1000)
        play.check()
        play.check_committed_readers()
        bytes_before = b"".join(s.read_at(0, s.size) for s in play.world.log.segments)
        play.clean(1000)
        assert b"".join(s.read_at(0, s.size) for s in play.world.log.segments) == bytes_before
        play.check_producers_after_a_crash()
