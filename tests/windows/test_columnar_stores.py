"""Columnar stores equal a dict, whatever is put at whatever stream time, through restarts, maintenance and refusals.

The model is the rule on paper: a row is taken unless its time segment is older than that of stream time less retention,
and goes with its time segment. What is drawn: puts in batches, time that passes without a row, dumps, evictions,
compactions, checkpoints, deaths, and backlogs so small that puts are refused.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from maintenance_steps import compacting, dumping
from tidegate.errors import InvalidError, OverloadError
from tidegate.storage import Count, Merge, SortedRows, StoreSpec, Sum
from tidegate.storage.backends.memory import MemoryBackend
from tidegate.storage.runs.columns import hash_keys
from tidegate.windows.stores.key_value_store import KeyValueStore
from tidegate.windows.stores.segmented_store import StoreState
from tidegate.windows.stores.session_store import SessionStore
from tidegate.windows.stores.window_store import WindowStore
from workers import TASK, Worker

RETENTION, INTERVAL, BUCKET = 40, 16, 8
KEYS = (b"a", b"aa", b"b", b"\x00", b"")
PAYLOAD = pa.schema([pa.field("number", pa.int64())])
AGGREGATES = (Count("count"), Sum("sum", "number", pa.int64()))
KINDS = {"window": WindowStore, "session": SessionStore, "key": KeyValueStore}
Row = tuple[bytes, int, int, int | None]  # key, ts, seq, number; None deletes


class ClockState(StoreState):
    """A state whose clock is set from outside, and kept in the checkpoint."""

    time = -1

    @property
    def stream_time(self) -> int:
        return self.time

    def encode_progress(self) -> bytes:
        return str(self.time).encode()

    def restore_progress(self, data: bytes) -> None:
        self.time = int(data or b"-1")
        self.restored()


class Model:
    """Rows by identity; an `append` store keeps all of them."""

    def __init__(self, merge: Merge, expires: bool) -> None:
        self.merge, self.expires = merge, expires
        self.rows: dict[tuple[bytes, int, int], list[int]] = {}
        self.time = -1

    def is_live(self, ts: int, time: int) -> bool:
        return not self.expires or ts // INTERVAL >= max(0, time - RETENTION) // INTERVAL

    def put(self, rows: list[Row], time: int) -> list[bool]:
        accepted = [self.is_live(row[1], time) for row in rows]
        for (key, ts, seq, number), is_accepted in zip(rows, accepted, strict=True):
            if not is_accepted:
                continue
            if number is None:
                self.rows.pop((key, ts, seq), None)
            elif self.merge is Merge.LAST:
                self.rows[key, ts, seq] = [number]
            else:
                self.rows.setdefault((key, ts, seq), []).append(number)
        self.advance(time)
        return accepted

    def advance(self, time: int) -> None:
        self.time = time
        self.rows = {row: each for row, each in self.rows.items() if self.is_live(row[1], time)}

    def shown(self, first: int, last: int) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = []
        for (key, ts, seq), numbers in sorted(self.rows.items()):
            if first <= ts <= last:
                if self.merge is Merge.FOLD:
                    found.append((key, ts, seq, len(numbers), sum(numbers)))
                elif self.merge is Merge.APPEND:
                    found += [(key, ts, each) for each in numbers]
                else:
                    found.append((key, ts, seq, numbers[0]))
        return found


class Rig:
    """A store of one kind, its storage, and what a death takes it back to."""

    def __init__(self, kind: str, merge: Merge, limit: int) -> None:
        self.kind, self.merge, self.limit, self.deaths = kind, merge, limit, 0
        self.backend, self.refused = MemoryBackend(), 0
        self.model = Model(merge, kind != "key")
        self.open()
        self.saved = (self.worker.runtime.checkpoint(TASK), copy.deepcopy(self.model))

    def open(self) -> None:
        self.worker = Worker(
            backend=self.backend,
            seed=self.deaths * 10,
            backlog_limit_bytes=self.limit,
            backlog_timeout_ms=0,
        )
        shape: dict[str, Any] = {"bucket_ms": BUCKET, "segment_ms": INTERVAL}
        if self.merge is Merge.FOLD:
            spec = StoreSpec("s", self.merge, aggregates=AGGREGATES, **shape)
        else:
            spec = StoreSpec("s", self.merge, PAYLOAD, **shape)
        self.state = ClockState(spec)
        settings: dict[str, Any] = {} if self.kind == "key" else {"retention": RETENTION}
        self.store: Any = KINDS[self.kind](self.worker.runtime.context(TASK), self.state, **settings)

    def batch(self, rows: list[Row]) -> pa.RecordBatch:
        columns = {
            "key": pa.array([row[0] for row in rows], pa.binary()),
            "ts": pa.array([row[1] for row in rows], pa.int64()),
        }
        if self.merge is not Merge.APPEND:
            columns["seq"] = pa.array([row[2] for row in rows], pa.int64())
        if self.merge is Merge.LAST:
            columns["deleted"] = pa.array([row[3] is None for row in rows], pa.bool_())
        columns["number"] = pa.array([row[3] for row in rows], pa.int64())
        return pa.RecordBatch.from_pydict(columns)

    def put(self, rows: list[Row], leap: int) -> None:
        time = self.model.time + leap
        returning = "merged" if self.merge is Merge.FOLD else None
        before, used = (self.shown(), self.ids), self.worker.runtime.backlog.used
        try:
            result = self.store.put_batch(self.batch(rows), stream_time=time, returning=returning)
        except OverloadError:
            self.refused += 1
            assert (self.shown(), self.ids) == before, "no row and no time segment has changed"
            assert self.worker.runtime.backlog.used <= used, "what can be merged in memory is merged first"
            return
        self.state.time = time
        accepted = self.model.put(rows, time)
        assert result.accepted.tolist() == accepted
        assert result.dropped == accepted.count(False)
        if result.merged is not None:
            self.check_merged(result.merged)

    def check_merged(self, merged: Any) -> None:
        """What is returned is what the store shows of the rows of the batch."""
        keys, ts, seq, states = merged.rows
        columns = [column.to_pylist() for column in states]
        for place, values in zip(
            merged.places.tolist(),
            zip(*(each.to_pylist() for each in merged.merged), strict=True),
            strict=True,
        ):
            for column, value in zip(columns, values, strict=True):
                column[place] = value
        numbers = seq.tolist() if len(seq) else [0] * len(ts)
        shown = {row[:3]: row[3:] for row in self.model.shown(0, 10**6)}
        for identity, state in zip(
            zip(keys.to_pylist(), ts.tolist(), numbers, strict=True), zip(*columns, strict=True), strict=True
        ):
            assert shown[identity] == state

    def put_sorted(self, rows: list[Row], leap: int) -> None:
        """The same rows with their hashes and order, as a caller has them that has grouped them already."""
        last = {(key, ts): number for key, ts, _, number in rows if number is not None}
        names = pa.array(sorted({key for key, _ in last}), pa.binary())
        order = np.argsort(hash_keys(names), kind="stable")
        names = names.take(pa.array(order))
        places = sorted((names.to_pylist().index(key), ts) for key, ts in last)
        if not places or not len(names):
            return
        columns = pa.RecordBatch.from_pydict(
            {
                "ts": pa.array([ts for _, ts in places], pa.int64()),
                "number": pa.array([last[names[line].as_py(), ts] for line, ts in places], pa.int64()),
            }
        )
        lines = np.array([line for line, _ in places], np.int32)
        given = SortedRows(names, hash_keys(names), columns, lines, np.arange(len(places), dtype=np.int32))
        time = self.model.time + leap
        try:
            result = self.store.put_batch(given, stream_time=time)
        except OverloadError:
            self.refused += 1
            return
        self.state.time = time
        plain: list[Row] = [
            (names[line].as_py(), ts, 0, last[names[line].as_py(), ts]) for line, ts in places
        ]
        assert result.accepted.tolist() == self.model.put(plain, time)

    def step(self, what: str, rows: list[Row], leap: int) -> None:
        runtime = self.worker.runtime
        if what == "put":
            self.put(rows, leap) if rows else None
        elif what == "sorted":
            self.put_sorted(rows, leap) if self.merge is Merge.LAST else self.put(
                rows, leap
            ) if rows else None
        elif what == "advance":
            self.model.advance(self.model.time + leap)
            self.state.time = self.model.time
            self.store.advance(self.model.time)
        elif what == "checkpoint":
            self.saved = (runtime.checkpoint(TASK), copy.deepcopy(self.model))
        elif what == "die":
            self.deaths += 1
            self.model = copy.deepcopy(self.saved[1])
            self.open()
            self.worker.runtime.apply_checkpoint(TASK, self.saved[0])
        elif what == "maintain":
            runtime.maintain(TASK, 1000)
        elif what == "compact":
            for bucket in self.state.index.all_buckets():
                self.worker.run(compacting(runtime, TASK, self.state, bucket))
        else:
            buckets = self.state.index.all_buckets()
            self.worker.run(dumping(runtime, TASK, self.state, buckets, evict=what == "evict"))

    @property
    def ids(self) -> list[int]:
        return [] if self.kind == "key" else self.store.segments.ids

    def shown(self) -> list[tuple[Any, ...]]:
        rows = [row for batch in self.store.scan(-1) for row in zip(*batch.to_pydict().values(), strict=True)]
        return sorted(row[:2] + row[3:] if self.merge is Merge.APPEND else row for row in rows)

    def check(self) -> None:
        expected = self.model.shown(-1, 10**6)
        assert self.shown() == sorted(expected)
        if self.kind != "key":
            held = {start // INTERVAL for start in self.state.index.all_buckets()}
            assert held <= set(self.ids), "no row outlives its time segment"
        names = pa.array(KEYS[:3], pa.binary())
        order = np.argsort(hash_keys(names), kind="stable")
        for keys, hashes in ((names, None), (names.take(pa.array(order)), hash_keys(names)[order])):
            if hashes is not None and self.merge is Merge.FOLD:
                continue  # rows of a fold are merged when they are read
            numbers, rows = self.store.fetch_batch(keys, 10, 70, hashes=hashes)
            found = [
                (keys[number].as_py(), *row)
                for number, row in zip(
                    numbers.tolist(), zip(*rows.to_pydict().values(), strict=True), strict=True
                )
            ]
            mine = [row for row in self.model.shown(10, 70) if row[0] in KEYS[:3]]
            if self.merge is Merge.APPEND:
                found = [row[:2] + row[3:] for row in found]
            assert sorted(found) == sorted(mine)
            assert numbers.tolist() == sorted(numbers.tolist()), "by key as asked"


NUMBERS = st.one_of(st.none(), st.integers(0, 9))
ROWS = st.lists(
    st.tuples(st.sampled_from(KEYS), st.integers(0, 120), st.integers(0, 2), NUMBERS), max_size=10
)
DOINGS = (
    "put",
    "put",
    "put",
    "sorted",
    "advance",
    "dump",
    "evict",
    "compact",
    "maintain",
    "checkpoint",
    "die",
)
STEPS = st.lists(st.tuples(st.sampled_from(DOINGS), ROWS, st.integers(0, 40)), max_size=14)
LIMITS = st.sampled_from([1 << 30, 400, 200])  # bytes; a run of one row takes about 80


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(
        [*((kind, merge) for kind in ("window", "session") for merge in Merge), ("key", Merge.LAST)]
    ),
    LIMITS,
    STEPS,
)
def test_a_columnar_store_equals_a_dict(
    shape: tuple[str, Merge], limit: int, steps: list[tuple[str, list[Row], int]]
) -> None:
    kind, merge = shape
    rig = Rig(kind, merge, limit)
    for what, rows, leap in steps:
        if merge is not Merge.LAST:  # nothing is deleted there
            rows = [row for row in rows if row[3] is not None]
        if merge is Merge.APPEND:  # storage numbers rows itself
            rows = [(key, ts, 0, number) for key, ts, _, number in rows]
        rig.step(what, rows, leap)
        rig.check()
    assert not any(rig.worker.runtime.leaks())
    event("some puts were refused" if rig.refused else "no put was refused")


@pytest.mark.parametrize("merge", Merge)
def test_a_refused_put_changes_nothing_and_can_be_made_again(merge: Merge) -> None:
    rig = Rig("window", merge, 800)
    puts = 0
    while not rig.refused:
        rig.put([(b"a", puts, 0, 1), (b"b", puts, 0, 2)], leap=1)
        puts += 1
    shown, time = rig.shown(), rig.model.time
    rows: list[Row] = [(b"c%d" % each, 500, 0, 1) for each in range(4)]
    rig.put(rows, leap=400)
    assert (rig.refused, rig.shown()) == (2, shown), "what only this put would make old is still there"
    rig.step("advance", [], 400)
    assert (rig.shown(), rig.worker.runtime.backlog.used, rig.model.time) == ([], 0, time + 400)
    rig.put(rows, leap=0)
    rig.check()
    assert rig.refused == 2


def test_a_prepared_put_is_seen_when_it_is_committed_and_undone_without_a_trace() -> None:
    rig = Rig("window", Merge.LAST, 1 << 30)
    rig.put([(b"a", 5, 0, 1)], leap=5)
    used = rig.worker.runtime.backlog.used
    prepared = rig.store.prepare(rig.batch([(b"a", 100, 0, 2)]), stream_time=100)
    assert rig.shown() == [(b"a", 5, 0, 1)]
    prepared.undo()
    assert (rig.shown(), rig.ids, rig.worker.runtime.backlog.used) == ([(b"a", 5, 0, 1)], [0], used)
    rig.store.prepare(rig.batch([(b"a", 100, 0, 2)]), stream_time=100).commit()
    assert (rig.shown(), rig.ids) == ([(b"a", 100, 0, 2)], [6])


def test_each_row_can_have_its_own_stream_time() -> None:
    rig = Rig("window", Merge.LAST, 1 << 30)
    rows: list[Row] = [(b"a", 5, 0, 1), (b"a", 100, 0, 2), (b"a", 6, 0, 3), (b"a", 70, 0, 4)]
    result = rig.store.put_batch(rig.batch(rows), stream_time=np.array([5, 100, 100, 100]))
    assert result.accepted.tolist() == [True, True, False, True], "the first came in time"
    assert [row[:2] for row in rig.shown()] == [(b"a", 70), (b"a", 100)], "and was expired by the end"
    assert rig.ids == [4, 6]


def test_a_store_of_columns_has_no_byte_values() -> None:
    store = Rig("window", Merge.LAST, 1 << 30).store
    with pytest.raises(InvalidError, match=r"holds the columns .*number"):
        store.put(b"k", b"v", 0)
