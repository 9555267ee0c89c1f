"""Window stores on the storage runtime: the rows of the tables of segmented stores and of window stores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tidegate.errors import InvalidError, OverloadError, TidegateWarning, WindowedKeyFormatError
from tidegate.metrics import Metrics
from tidegate.storage import open_backend
from tidegate.windows.keys import KeyFormat, SessionWindow, TimeWindow, Windowed, encode_keys
from tidegate.windows.stores.segmented_store import Position
from tidegate.windows.stores.session_store import SessionStore
from tidegate.windows.stores.value_store import StoreIterator, TimestampedValue
from tidegate.windows.stores.window_store import WindowStore
from workers import TASK, Worker, readings

I, W = 60_000, 3  # noqa: E741 - the interval, as everywhere
Log = list[tuple[bytes, bytes | None, int]]


def windows(worker: Worker | None = None, **changes: Any) -> WindowStore:
    given: dict[str, Any] = {"retention": 120_000, "window_size": W, "segment_interval": I}
    context = (worker or Worker()).runtime.context(TASK)
    return WindowStore(context, "windows", **given | changes)


def small(worker: Worker | None = None, **changes: Any) -> WindowStore:
    """Retention 1000, interval 60000."""
    return windows(worker, **{"retention": 1000} | changes)


def sessions(worker: Worker | None = None, **changes: Any) -> SessionStore:
    context = (worker or Worker()).runtime.context(TASK)
    return SessionStore(context, "sessions", **{"retention": 1000, "segment_interval": I} | changes)


def session(key: bytes, start: int, end: int) -> Windowed[bytes]:
    return Windowed(key, SessionWindow(start, end))


def put_all(store: WindowStore, *puts: tuple[bytes, int]) -> None:
    for key, start in puts:
        store.put(key, f"{key.decode()}@{start}".encode(), start)


def starts(rows: StoreIterator[tuple[int, Any]]) -> list[int]:
    return [start for start, _ in rows]


def places(rows: StoreIterator[tuple[Windowed[bytes], Any]]) -> list[tuple[bytes, int]]:
    return sorted((each.key, each.window.start) for each, _ in rows)


def folders(store: WindowStore | SessionStore) -> set[int]:
    """The time segments there are, once as the store knows them and once as storage does."""
    ids = set(store.segments.ids)
    assert {start // store.segment_interval_ms for start in store.state.index.all_buckets()} <= ids
    return ids


def logging_to(log: Log) -> Any:
    def changelog(keys: pa.Array, values: pa.Array, timestamps: Any) -> None:
        log.extend(zip(keys.to_pylist(), values.to_pylist(), timestamps.tolist(), strict=True))

    return changelog


def replay(log: Log) -> tuple[pa.Array, pa.Array, list[int]]:
    keys, values, timestamps = zip(*log, strict=True)
    return pa.array(keys, pa.binary()), pa.array(values, pa.binary()), list(timestamps)


def window_key(key: bytes, start: int, sequence: int = 0) -> bytes:
    return encode_keys(
        pa.array([key], pa.binary()),
        np.array([start]),
        KeyFormat.CHANGELOG,
        sequence=np.array([sequence], np.int32),
    )[0].as_py()


# ── segmented stores: retention 1000, interval 60000 ─────────────────────────────────────────────────────────


FOUR = ((b"a", 10), (b"a", 500), (b"b", 1000), (b"c", 60_000))


def expired_for_reads_but_there() -> None:
    store = small()
    put_all(store, *FOUR)
    assert starts(store.fetch(b"a", 0, 1000)) == []
    assert folders(store) == {0, 1}


def only_the_last_is_readable() -> None:
    store = small()
    put_all(store, *FOUR)
    for rows in (
        store.fetch_range(b"b", None, 0, 60_000),
        store.fetch_range(None, None, 0, 60_000),
        store.all(),
        store.fetch_all(0, 60_000),
        store.backward_fetch_range(b"b", None, 0, 60_000),
        store.backward_all(),
        store.backward_fetch_all(0, 60_000),
    ):
        assert places(rows) == [(b"c", 60_000)]


def inside_a_range() -> None:
    store = small()
    put_all(store, (b"a", 10), (b"a", 500), (b"a", 1000))
    assert starts(store.fetch(b"a", 1, 999)) == [10, 500]
    assert starts(store.backward_fetch(b"a", 1, 999)) == [500, 10]


def sessions_inside_a_range() -> None:
    store = sessions()
    for start, end in ((10, 10), (500, 1000), (1000, 1500)):
        store.put(session(b"a", start, end), b"v")
    assert [each.window for each, _ in store.find_sessions(b"a", 1, 999)] == [SessionWindow(500, 1000)]


def dropped_but_logged() -> None:
    log: Log = []
    metrics = Metrics()
    store = small(changelog=logging_to(log), metrics=metrics)
    assert store.put(b"a", b"1", 61_000) is True
    assert store.put(b"a", b"2", 10) is False
    assert store.dropped_records == 1
    assert [each.value for each in metrics.samples()] == [1.0]
    assert folders(store) == {1}
    assert log == [(window_key(b"a", 61_000), b"1", 61_000), (window_key(b"a", 10), b"2", 10)]


def a_new_instance_sees_everything() -> None:
    for compat, expected in (("kafka-streams", [10, 60_000]), ("tidegate", [60_000])):
        worker = Worker()
        put_all(small(worker, compat=compat), (b"a", 10), (b"a", 60_000))
        token = worker.runtime.checkpoint(TASK)
        again = Worker(backend=worker.backend, seed=9)
        again.runtime.apply_checkpoint(TASK, token)
        store = small(again, compat=compat)
        assert starts(store.fetch(b"a", 0, 60_000)) == expected
        assert store.observed_time == (-1 if compat == "kafka-streams" else 60_000)


def restored() -> None:
    log: Log = [(window_key(b"a", 10), b"1", 10), (window_key(b"a", 60_000), b"2", 60_000)]
    store = small()
    store.restore_batch(*replay(log))
    assert folders(store) == {0, 1}
    assert places(store.all()) == [(b"a", 60_000)]
    standby = small()
    for record in log:
        standby.restore_batch(*replay([record]))
    assert (folders(standby), places(standby.all())) == ({0, 1}, [(b"a", 60_000)])
    assert store.dropped_records == standby.dropped_records == 0


def restored_with_a_null() -> None:
    store = small()
    store.restore_batch(*replay([(window_key(b"a", 10), b"50", 10), (window_key(b"a", 1000), None, 1000)]))
    assert places(store.all()) == [(b"a", 10)]
    assert folders(store) == {0}
    other = sessions()
    keys = encode_keys(
        pa.array([b"a", b"a"]), np.array([10, 1000]), KeyFormat.SESSION, end=np.array([10, 1500])
    )
    other.restore_batch(keys, [b"50", None], [10, 1500])
    assert list(other.fetch(b"a")) == []
    assert folders(other) == {0}


def removed() -> None:
    store = small()
    put_all(store, (b"a", 10))
    store.put(b"a", None, 10)
    assert starts(store.fetch(b"a", 0, 1000)) == []
    other = sessions()
    other.put(session(b"a", 0, 10), b"v")
    other.remove(session(b"a", 0, 10))
    assert list(other.fetch(b"a")) == []
    other.remove(session(b"a", 0, 500_000))
    assert folders(other) == {0}, "a removal drops no time segment"


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(expired_for_reads_but_there, id="WIN-7.3-01"),
        pytest.param(only_the_last_is_readable, id="WIN-7.3-02"),
        pytest.param(inside_a_range, id="WIN-7.3-03"),
        pytest.param(sessions_inside_a_range, id="WIN-7.3-04"),
        pytest.param(dropped_but_logged, id="WIN-7.3-05"),
        pytest.param(a_new_instance_sees_everything, id="WIN-7.3-06"),
        pytest.param(restored, id="WIN-7.3-07"),
        pytest.param(restored_with_a_null, id="WIN-7.3-08"),
        pytest.param(removed, id="WIN-7.3-09"),
    ],
)
def test_segmented_stores(row: Callable[[], None]) -> None:
    row()


# ── window stores: retention 120000, interval 60000, size 3 ──────────────────────────────────────────────────


FIRST_FIVE = (120_000, 150_000, 180_000, 240_000, 270_000)


def put_five(store: WindowStore) -> list[set[int]]:
    seen = []
    for start in FIRST_FIVE:
        put_all(store, (b"k", start))
        seen.append(folders(store))
    return seen


def found_around(store: WindowStore, start: int) -> bool:
    return starts(store.fetch(b"k", start - W, start + W)) == [start]


def rolling_folders() -> None:
    assert put_five(windows()) == [{2}, {2}, {2, 3}, {2, 3, 4}, {2, 3, 4}]


def reading_at_the_edge() -> None:
    for compat, edge in (("tidegate", False), ("kafka-streams", False), ("kafka-streams/time-ordered", True)):
        store = windows(compat=compat)
        put_five(store)
        assert [found_around(store, each) for each in (120_000, 150_000, 180_000)] == [False, edge, True]
        assert [store.fetch(b"k", each) is not None for each in (120_000, 150_000, 180_000)] == [
            False,
            edge,
            True,
        ]


def rolling_on() -> None:
    store = windows()
    put_five(store)
    seen = []
    for start in (300_000, 330_000, 360_000):
        put_all(store, (b"k", start))
        seen.append(folders(store))
    assert seen == [{3, 4, 5}, {3, 4, 5}, {4, 5, 6}]


def folders_made_before() -> None:
    worker = Worker()
    old = windows(worker, retention=10**9)
    put_all(old, *((b"k", each * I) for each in range(7)))
    token = worker.runtime.checkpoint(TASK)
    again = Worker(backend=worker.backend, seed=5)
    again.runtime.apply_checkpoint(TASK, token)
    store = windows(again, compat="kafka-streams")
    assert folders(store) == set(range(7))
    put_all(store, (b"k", 360_000))
    assert folders(store) == {4, 5, 6}


def duplicates_roll() -> None:
    store = windows(retain_duplicates=True)
    for start in (0, 59_999, 59_999, 60_000):
        store.put(b"k", b"v", start)
    assert len(list(store.fetch(b"k", 0, 240_000))) == 4
    store.put(b"k", b"v", 180_000)
    assert len(list(store.fetch(b"k", 0, 240_000))) == 1
    assert folders(store) == {1, 3}


def restored_from_its_log() -> None:
    log: Log = []
    store = windows(changelog=logging_to(log))
    put_all(store, *((b"k", start) for start in range(120_000, 360_001, 30_000)))
    assert len(log) == 9
    again = windows()
    again.restore_batch(*replay(log))
    assert not found_around(again, 240_000)
    assert all(found_around(again, start) for start in range(270_000, 360_001, 30_000))
    assert folders(again) == {4, 5, 6}
    assert places(again.all()) == places(store.all())


def one_dropped() -> None:
    store = windows()
    put_all(store, (b"k", 240_000), (b"k", 0), (b"k", 120_001))
    assert store.dropped_records == 1
    assert starts(store.fetch(b"k", 0, 300_000)) == [120_001, 240_000]


def upserts_and_open_iterators() -> None:
    store = windows()
    store.put(b"k", b"v", 0)
    store.put(b"k", b"v2", 0)
    assert store.fetch(b"k", 0) == b"v2"
    store.put(b"k", None, 0)
    assert store.fetch(b"k", 0) is None
    put_all(store, (b"k", 0), (b"k", 60_000), (b"k", 120_000))
    with store.fetch(b"k", 0, 120_000) as rows, store.all() as everything:
        put_all(store, (b"k", 180_000))
        assert starts(rows) == [60_000, 120_000]
        assert places(everything) == [(b"k", 60_000), (b"k", 120_000)]


def no_prefix_bleeds() -> None:
    for names in ((b"\x00", b"\x00\x00", b"\x00\x00\x00"), (b"a", b"aa", b"aaa")):
        store = windows()
        for place, name in enumerate(names):
            for start in (0, 1, 2**40):
                store.put(name, b"%d" % place, start)
        store.state.observed_time = -1  # as on a store that was never put to: all of it is readable
        for place, name in enumerate(names):
            assert list(store.fetch(name, 0, 2**63 - 1)) == [(2**40, b"%d" % place)]
            assert [key for key, _ in places(store.fetch_range(name, name, 0, 2**63 - 1))] == [name]
        assert [key for key, _ in places(store.fetch_range(names[0], names[1], 0, 2**63 - 1))] == list(
            names[:2]
        )


def strange_ranges() -> None:
    store = windows()
    minus_one, one = (-1).to_bytes(4, "big", signed=True), (1).to_bytes(4, "big")
    store.put(one, b"v", 5)
    with pytest.warns(TidegateWarning, match="unsigned bytes"):
        assert list(store.fetch_range(minus_one, one, 0, 10)) == []
    assert [(each.window.start, value) for each, value in store.fetch_range(one, one, 0, 10)] == list(
        store.fetch(one, 0, 10)
    )
    store.put(one, b"v", 4 * 120_000)
    assert list(store.fetch(one, 0, 10)) == []


def keys_that_are_none() -> None:
    store = windows()
    store.put(b"k", b"v", 1)
    for call in (
        lambda: store.put(None, b"v", 1),  # type: ignore[arg-type]
        lambda: store.fetch(None, 1),  # type: ignore[call-overload]
        lambda: store.fetch(None, 0, 1),  # type: ignore[call-overload]
        lambda: store.put_all([None], [1], [b"v"]),  # type: ignore[list-item]
        lambda: store.fetch_keys(pa.array([None], pa.binary()), 0, 1),
    ):
        with pytest.raises(InvalidError, match="key"):
            call()
    assert places(store.fetch_range(None, None, 0, 9)) == [(b"k", 1)]


def duplicates_keep_their_order() -> None:
    log: Log = []
    store = windows(retain_duplicates=True, changelog=logging_to(log))
    for value, start in ((b"one", 0), (b"one-2", 0), (b"two", 30), (b"two-2", 30)):
        store.put(b"k", value, start)
    assert list(store.fetch(b"k", 0, 30)) == [(0, b"one"), (0, b"one-2"), (30, b"two"), (30, b"two-2")]
    expected = [window_key(b"k", start, number) for number, start in ((1, 0), (2, 0), (3, 30), (4, 30))]
    assert [key for key, _, _ in log] == expected


def in_memory() -> None:
    retention = 120_000
    store = windows(compat="kafka-streams/memory")
    put_all(store, (b"k", 0), (b"k", 10))
    with store.fetch(b"k", 0, 50) as rows, store.all() as everything:
        put_all(store, (b"k", 2 * retention))
        assert starts(rows) == [0, 10]
        assert places(everything) == [(b"k", 0), (b"k", 10)]
    assert starts(store.fetch(b"k", 0, 50)) == []
    store = windows(compat="kafka-streams/memory")
    put_all(store, *((b"k", retention * quarter // 4) for quarter in range(5)))
    assert [start for _, start in places(store.fetch_all(0, retention))] == [30_000, 60_000, 90_000, 120_000]
    assert store.put(b"k", b"late", 0) is False, "a put is judged as strictly as a read"
    assert windows_accepts_what_it_does_not_show()


def windows_accepts_what_it_does_not_show() -> bool:
    store = windows()
    put_all(store, (b"k", 120_000))
    return store.put(b"k", b"never seen", 0) and store.fetch(b"k", 0) is None


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(rolling_folders, id="WIN-7.4-01"),
        pytest.param(reading_at_the_edge, id="WIN-7.4-02"),
        pytest.param(rolling_on, id="WIN-7.4-03"),
        pytest.param(folders_made_before, id="WIN-7.4-04"),
        pytest.param(duplicates_roll, id="WIN-7.4-05"),
        pytest.param(restored_from_its_log, id="WIN-7.4-06"),
        pytest.param(one_dropped, id="WIN-7.4-07"),
        pytest.param(upserts_and_open_iterators, id="WIN-7.4-08"),
        pytest.param(no_prefix_bleeds, id="WIN-7.4-09"),
        pytest.param(strange_ranges, id="WIN-7.4-10"),
        pytest.param(keys_that_are_none, id="WIN-7.4-11"),
        pytest.param(duplicates_keep_their_order, id="WIN-7.4-12"),
        pytest.param(in_memory, id="WIN-7.4-13"),
    ],
)
def test_window_stores(row: Callable[[], None]) -> None:
    row()


# ── beyond the tables ────────────────────────────────────────────────────────────────────────────────────────


def test_columns_come_back_key_after_key_with_bounds_and_timestamps() -> None:
    store = windows()
    store.put_all([b"a", b"b", b"a"], [30, 20, 10], [b"1", b"2", b"3"], value_ts=[7, 8, 9])
    batch = store.fetch_keys([b"b", b"x", b"a"], 0, 100)
    assert batch.to_pydict() == {
        "key": [b"b", b"a", b"a"],
        "window_start": [20, 10, 30],
        "window_end": [23, 13, 33],
        "sequence": [0, 0, 0],
        "value": [b"2", b"3", b"1"],
        "value_ts": [8, 9, 7],
    }
    assert pa.Table.from_batches(store.batches()).sort_by("window_start")["value"].to_pylist() == [
        b"3",
        b"2",
        b"1",
    ]
    aligned = store.get_batch([b"a", b"a", b"b", b"b", b"a"], [10, 11, 20, 30, 30])
    assert aligned.to_pydict() == {"value": [b"3", None, b"2", None, b"1"], "value_ts": [9, None, 8, None, 7]}


def test_many_windows_at_once_are_looked_up_in_one_go() -> None:
    store = windows()
    numbers = list(range(0, 3000, 3))
    store.put_all([b"k%d" % (each % 7) for each in numbers], numbers, [b"%d" % each for each in numbers])
    asked = list(range(3000))
    found = store.get_batch([b"k%d" % (each % 7) for each in asked], asked).column("value").to_pylist()
    assert found == [b"%d" % each if each % 3 == 0 else None for each in asked]


def test_timestamped_values_come_back_with_their_timestamp_and_are_logged_without() -> None:
    log: Log = []
    store = windows(timestamped=True, changelog=logging_to(log))
    store.put(b"k", (2).to_bytes(8, "big"), 0, value_ts=1000)
    found = store.fetch(b"k", 0)
    assert isinstance(found, TimestampedValue)
    value, timestamp = found
    stored = timestamp.to_bytes(8, "big") + (value or b"")
    assert stored == bytes.fromhex("00000000000003e80000000000000002"), "WIN-7.1-06"
    assert log == [(window_key(b"k", 0), (2).to_bytes(8, "big"), 1000)]
    again = windows(timestamped=True)
    again.restore_batch(*replay(log))
    assert again.fetch(b"k", 0) == found
    store.put(b"k", None, 0, value_ts=1234)
    assert log[-1] == (window_key(b"k", 0), None, 1234)
    store.put(b"k", b"", 0)
    assert store.fetch(b"k", 0) == (b"", 0), "no bytes are a value"


def test_the_changelog_numbers_nulls_that_the_store_skips() -> None:
    log: Log = []
    store = windows(retain_duplicates=True, changelog=logging_to(log))
    store.put_all([b"k"] * 4, [0, 0, 0, 0], [b"1", None, b"2", None])
    assert [key[-1] for key, _, _ in log] == [1, 2, 3, 4]
    assert (store.state.sequence, store.state.logged_sequence) == (2, 4)
    assert [value for _, value in store.fetch(b"k", 0, 0)] == [b"1", b"2"]


def test_the_counter_of_duplicates_wraps_at_31_bits() -> None:
    store = windows(retain_duplicates=True)
    store.state.sequence = 2**31 - 3
    store.put_all([b"k"] * 4, [0] * 4, [b"a", b"b", b"c", b"d"])
    assert store.state.sequence == 1
    assert store.fetch_keys([b"k"], 0, 0)["sequence"].to_pylist() == [0, 1, 2**31 - 2, 2**31 - 1]


@pytest.mark.parametrize(
    ("compat", "kept"), [("tidegate", [b"1", b"2", b"3"]), ("kafka-streams", [b"3", b"2"])]
)
def test_duplicates_after_a_restart(compat: str, kept: list[bytes]) -> None:
    """Kafka Streams starts to count again, and so replaces a row; ours goes on counting."""
    worker = Worker()
    store = windows(worker, retain_duplicates=True, compat=compat)
    store.put(b"k", b"1", 0)
    store.put(b"k", b"2", 0)
    token = worker.runtime.checkpoint(TASK)
    again = Worker(backend=worker.backend, seed=3)
    store = windows(again, retain_duplicates=True, compat=compat)
    again.runtime.apply_checkpoint(TASK, token)
    store.put(b"k", b"3", 0)
    assert [value for _, value in store.fetch(b"k", 0, 0)] == kept


def test_one_point_of_retained_duplicates_is_refused() -> None:
    with pytest.raises(InvalidError, match="retains duplicates"):
        windows(retain_duplicates=True).fetch(b"k", 0)


def test_the_position_is_of_all_that_was_seen_and_comes_back() -> None:
    worker = Worker()
    store = small(worker)
    store.put_all(
        [b"a", b"b", b"c"],
        [61_000, 10, 61_000],
        [b"1"] * 3,
        offsets=[5, 9, 3],
        partitions=[0, 1, 0],
        topic="t",
    )
    assert store.position == Position({"t": {0: 5, 1: 9}}), "a dropped put was seen"
    store.put(b"a", b"1", 61_000, offset=6, partition=1, topic="t")
    assert store.position.offset("t", 1) == 9
    assert store.position.covers(Position({"t": {0: 5}}))
    assert not store.position.covers(Position({"t": {0: 6}}))
    token = worker.runtime.checkpoint(TASK)
    again = Worker(backend=worker.backend, seed=2)
    again.runtime.apply_checkpoint(TASK, token)
    store = small(again)
    assert store.position == Position({"t": {0: 5, 1: 9}})
    assert (store.observed_time, store.dropped_records) == (61_000, 1)


def test_a_put_without_room_changes_neither_clock_nor_counters() -> None:
    worker = Worker(backlog_limit_bytes=20_000, backlog_timeout_ms=0)
    store = windows(worker, retain_duplicates=True)
    store.put(b"k", b"x" * 15_000, 0)
    before = (store.observed_time, store.state.sequence, store.dropped_records)
    with pytest.raises(OverloadError):
        store.put(b"k", b"x" * 15_000, 50_000)
    assert (store.observed_time, store.state.sequence, store.dropped_records) == before
    assert [at for at, _ in store.fetch(b"k", 0, 300_000)] == [0]


def test_a_put_without_room_drops_no_time_segment() -> None:
    """Rows that only this put would make old are still there after it was refused."""
    worker = Worker(backlog_limit_bytes=20_000, backlog_timeout_ms=0)
    store = windows(worker)
    store.put(b"k", b"small", 20_000)
    store.put(b"k", b"x" * 15_000, 130_000)
    with pytest.raises(OverloadError):
        store.put(b"k", b"x" * 15_000, 190_000)
    assert (folders(store), store.observed_time) == ({0, 2}, 130_000)
    assert store.fetch(b"k", 20_000) == b"small"
    store.advance(300_000)
    assert folders(store) == set(), "a put of no rows lets time pass, and makes room"
    store.put(b"k", b"x" * 15_000, 310_000)
    assert folders(store) == {5}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"retention": -1}, "negative"),
        ({"window_size": 0}, "longer than 0"),
        ({"window_size": 120_001}, "at least as long"),
        ({"segment_interval": 0}, "at least 1 ms"),
        ({"compat": "kafka"}, "one of tidegate"),
    ],
)
def test_impossible_stores_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidError, match=message):
        windows(**changes)


def test_puts_before_the_epoch_and_uneven_columns_are_refused() -> None:
    store = windows()
    for call, message in (
        (lambda: store.put(b"k", b"v", -1), "before the epoch"),
        (lambda: store.put_all([b"k"], [1, 2], [b"v"]), "2 starts for 1 keys"),
        (lambda: store.put_all([b"k"], [1], [b"v", b"w"]), "2 values for 1 keys"),
        (lambda: store.put_all([b"k"], [1.5], [b"v"]), "not whole numbers"),  # type: ignore[list-item]
        (lambda: store.put_all(pa.array([1]), [1], [b"v"]), "encode them to binary"),
        (lambda: store.put("k", b"v", 1), "as bytes"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidError, match=message):
            call()
    assert store.put_all([], [], []).dropped == 0
    assert list(store.all()) == []


def test_a_changelog_of_another_format_is_refused_with_its_offset() -> None:
    store = windows()
    keys = encode_keys(pa.array([b"user-1"]), np.array([1_700_000_040_000]), KeyFormat.TOPIC)
    with pytest.raises(WindowedKeyFormatError, match="offset 17"):
        store.restore_batch(keys, [b"v"], [0], offsets=[17])
    assert list(store.all()) == []


def test_default_intervals_follow_the_retention() -> None:
    assert windows(segment_interval=None, retention="24h").segment_interval_ms == 12 * 3_600_000
    assert windows(segment_interval=None, retention=1000).segment_interval_ms == 60_000
    assert windows(segment_interval=None, retention="24h").state.index.spec.bucket_ms == 5_400_000


def test_a_dropped_time_segment_gives_its_disk_back(tmp_path: Path) -> None:
    worker = Worker(backend=open_backend(tmp_path.as_uri()))
    store = windows(worker)
    put_all(store, (b"k", 0), (b"k", 60_000), (b"k", 120_000))

    def packs() -> set[str]:
        return {path.name.split("-")[0] for path in tmp_path.rglob("*.pack") if "windows" in str(path)}

    def reclaimable() -> set[str]:
        names = [each for each in worker.runtime._parts.retirement.retired(TASK) if each.endswith(".pack")]
        assert readings(worker.metrics)["retired_packs"][(TASK, "held")] >= len(names)
        return {each.rsplit("/", 1)[1].split("-")[0] for each in names}

    token = worker.runtime.checkpoint(TASK)
    assert packs() == {"0", "60000", "120000"}
    assert reclaimable() == set()
    put_all(store, (b"k", 240_000))
    assert folders(store) == {2, 4}
    worker.runtime.maintain(TASK, 1000)
    assert packs() == {"0", "60000", "120000"}, "a checkpoint that could be restored still names them"
    assert reclaimable() == {"0", "60000"}, "and what could be reclaimed is told"
    worker.runtime.checkpoint(TASK)
    worker.runtime.maintain(TASK, 1000)
    assert reclaimable() == {"0", "60000"}, "the older one is still retained"
    worker.runtime.release_checkpoint(TASK, token)
    worker.runtime.maintain(TASK, 1000)
    assert packs() == {"120000", "240000"}
    assert reclaimable() == set()


def test_windows_at_the_end_of_time_end_there() -> None:
    store = windows(retention=2**63 - 1)
    latest = 2**63 - 1
    store.put(b"k", b"v", latest - 1)
    assert store.fetch_keys([b"k"], 0, latest)["window_end"].to_pylist() == [latest]
    with pytest.warns(TidegateWarning, match="beyond the largest time"):
        assert [each.window for each, _ in store.all()] == [TimeWindow(latest - 1, latest)]
