"""Session stores and key-value stores on the storage runtime: the rows of the table of session stores, and more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from tidegate.errors import InvalidError, TidegateWarning
from tidegate.windows.keys import SessionWindow, TimeWindow, Windowed
from tidegate.windows.stores.key_value_store import KeyValueStore
from tidegate.windows.stores.segmented_store import Position
from tidegate.windows.stores.session_store import SessionStore
from tidegate.windows.stores.value_store import StoreIterator, TimestampedValue
from workers import TASK, Worker

Bounds = tuple[int, int]


def sessions(worker: Worker | None = None, **changes: Any) -> SessionStore:
    context = (worker or Worker()).runtime.context(TASK)
    return SessionStore(context, "sessions", **{"retention": 10_000} | changes)


def session(key: bytes, start: int, end: int) -> Windowed[bytes]:
    return Windowed(key, SessionWindow(start, end))


def put_all(store: SessionStore, key: bytes, *bounds: Bounds) -> None:
    for start, end in bounds:
        store.put(session(key, start, end), b"%d-%d" % (start, end))


def bounds(rows: StoreIterator[tuple[Windowed[bytes], Any]]) -> list[Bounds]:
    return [(each.window.start, each.window.end) for each, _ in rows]


def found_by_end_and_start() -> None:
    store = sessions()
    put_all(store, b"a", (10, 10), (500, 1000), (1500, 2000), (2500, 3000))
    assert bounds(store.find_sessions(b"a", 0, 1000)) == [(10, 10), (500, 1000)]
    assert bounds(store.find_sessions(b"a", 400, 600)) == [(500, 1000)]
    assert store.fetch_keys([b"a"], 400, 600)["value"].to_pylist() == [b"500-1000"]


def forward_and_backward() -> None:
    store = sessions()
    put_all(store, b"a", (0, 100), (101, 200), (201, 300), (301, 400), (401, 500))
    assert bounds(store.find_sessions(b"a", 150, 300)) == [(101, 200), (201, 300)]
    assert bounds(store.backward_find_sessions(b"a", 150, 300)) == [(201, 300), (101, 200)]
    assert bounds(store.find_sessions_range(b"a", b"a", 150, 300)) == [(101, 200), (201, 300)]
    assert bounds(store.backward_find_sessions_range(b"a", b"a", 150, 300)) == [(201, 300), (101, 200)]


def exactly_one() -> None:
    store = sessions()
    store.put(session(b"a", 0, 4), b"1")
    for bounds_, value in (((0, 3), b"2"), ((0, 4), b"3"), ((1, 4), b"4")):
        store.put(session(b"aa", *bounds_), value)
    store.put(session(b"aaa", 0, 4), b"5")
    assert store.fetch_session(b"aa", 0, 4) == b"3"
    assert store.fetch_session(b"aa", 4, 0) is None, "start first, then end"
    found = store.get_batch([b"aa", b"aaa", b"a", b"aa"], [0, 0, 1, 1], [4, 4, 4, 4])
    assert found["value"].to_pylist() == [b"3", b"5", None, b"4"]


def key_ranges() -> None:
    store = sessions()
    put_all(store, b"a", (0, 0), (10, 20))
    put_all(store, b"aa", (0, 10))
    found = list(store.find_sessions_range(b"a", b"aa", 10, 0))
    assert found == [(session(b"aa", 0, 10), b"0-10")]
    store = sessions()
    put_all(store, b"a", (0, 0), (1000, 1000))
    assert bounds(store.find_sessions(b"a", -1, 1000)) == [(0, 0), (1000, 1000)]


def two_ways_to_delete() -> None:
    store = sessions()
    put_all(store, b"a", (0, 1000))
    put_all(store, b"b", (0, 1000))
    store.put(session(b"a", 0, 1000), None)
    store.remove(session(b"b", 0, 1000))
    store.remove(session(b"x", 0, 1000))
    store.remove(session(b"x", 0, 999_999_000))
    assert bounds(store.fetch_range(None, None)) == []


def only_the_last() -> None:
    store = sessions()
    put_all(store, b"a", (0, 0))
    put_all(store, b"b", (0, 60_000))
    put_all(store, b"c", (10, 60_000))
    put_all(store, b"d", (0, 120_000))
    assert bounds(store.fetch_range(None, None)) == [(0, 120_000)]


def in_memory() -> None:
    store = sessions(compat="kafka-streams/memory")
    put_all(store, b"a", (0, 0), (0, 10), (10, 20), (10, 10_000))
    assert bounds(store.fetch(b"a")) == [(0, 10), (10, 20), (10, 10_000)]


def dropped_and_unsupported() -> None:
    store = sessions(compat="kafka-streams")
    put_all(store, b"a", (0, 120_000))
    assert store.put(session(b"a", 0, 0), b"late") is False
    assert store.dropped_records == 1
    with pytest.raises(InvalidError, match="by their end"):
        store.find_sessions_by_end(0, 10)
    ours = sessions()
    put_all(ours, b"a", (0, 5), (6, 20))
    put_all(ours, b"b", (3, 7))
    assert sorted(bounds(ours.find_sessions_by_end(5, 7))) == [(0, 5), (3, 7)]


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(found_by_end_and_start, id="WIN-7.5-01"),
        pytest.param(forward_and_backward, id="WIN-7.5-02"),
        pytest.param(exactly_one, id="WIN-7.5-03"),
        pytest.param(key_ranges, id="WIN-7.5-04"),
        pytest.param(two_ways_to_delete, id="WIN-7.5-05"),
        pytest.param(only_the_last, id="WIN-7.5-06"),
        pytest.param(in_memory, id="WIN-7.5-07"),
        pytest.param(dropped_and_unsupported, id="WIN-7.5-08"),
    ],
)
def test_session_stores(row: Callable[[], None]) -> None:
    row()


def test_the_changelog_has_ends_before_starts_and_removals_as_nulls() -> None:
    log: list[tuple[bytes, bytes | None, int]] = []

    def changelog(keys: pa.Array, values: pa.Array, timestamps: Any) -> None:
        log.extend(zip(keys.to_pylist(), values.to_pylist(), timestamps.tolist(), strict=True))

    store = sessions(changelog=changelog)
    store.put(session(b"key", 50, 100), b"v", value_ts=77)
    store.remove(session(b"key", 50, 100), value_ts=78)
    key = bytes.fromhex("6b657900000000000000640000000000000032")
    assert log == [(key, b"v", 77), (key, None, 78)]
    again = sessions()
    again.restore_batch(pa.array([key]), [b"v"], [77], offsets=[3], topic="t")
    assert list(again.fetch(b"key")) == [(session(b"key", 50, 100), b"v")]
    assert again.position == Position({"t": {0: 3}})


def test_columns_of_sessions_and_their_removal() -> None:
    store = sessions(timestamped=True)
    store.put_all([b"a", b"b", b"a"], [0, 5, 50], [10, 9, 60], [b"1", b"2", b"3"], value_ts=[10, 9, 60])
    assert store.fetch_keys([b"b", b"a"]).to_pydict() == {
        "key": [b"b", b"a", b"a"],
        "window_start": [5, 0, 50],
        "window_end": [9, 10, 60],
        "value": [b"2", b"1", b"3"],
        "value_ts": [9, 10, 60],
    }
    store.remove_batch([b"a", b"x"], [0, 0], [10, 10])
    assert pa.Table.from_batches(store.batches()).num_rows == 2
    assert store.fetch_session(b"b", 5, 9) == TimestampedValue(b"2", 9)
    assert bounds(store.backward_fetch(b"a")) == [(50, 60)]
    assert bounds(store.backward_fetch_range(b"a", b"b")) == [(50, 60), (5, 9)]


def test_sessions_that_cannot_be_are_refused() -> None:
    store = sessions()
    with pytest.raises(InvalidError, match="before its start"):
        store.put_all([b"a"], [5], [4], [b"v"])
    with pytest.raises(TypeError, match="session window"):
        store.put(Windowed(b"a", TimeWindow(0, 5)), b"v")
    with pytest.raises(InvalidError, match="key"):
        store.fetch(None)  # type: ignore[arg-type]


# ── key-value stores ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_key_value_store_keeps_the_last_value_of_every_key() -> None:
    log: list[tuple[bytes, bytes | None, int]] = []

    def changelog(keys: pa.Array, values: pa.Array, timestamps: Any) -> None:
        log.extend(zip(keys.to_pylist(), values.to_pylist(), timestamps.tolist(), strict=True))

    worker = Worker()
    store = KeyValueStore(worker.runtime.context(TASK), "table", changelog=changelog)
    store.put_all([b"a", b"b", b"a"], [b"1", b"2", b"3"], value_ts=[5, 6, 7], offsets=[0, 1, 2], topic="t")
    store.put(b"c", b"4", offset=3, topic="t")
    store.delete(b"b")
    assert [store.get(each) for each in (b"a", b"b", b"c", b"x")] == [b"3", None, b"4", None]
    assert store.get_batch([b"x", b"c", b"a", b"b", b"a"])["value"].to_pylist() == [
        None,
        b"4",
        b"3",
        None,
        b"3",
    ]
    assert sorted(store.all()) == [(b"a", b"3"), (b"c", b"4")]
    assert list(store.range(b"b", None)) == [(b"c", b"4")]
    assert len(log) == 5 and log[-1] == (b"b", None, 0)
    with pytest.warns(TidegateWarning):
        assert list(store.range(b"b", b"a")) == []
    token = worker.runtime.checkpoint(TASK)
    again = Worker(backend=worker.backend, seed=4)
    again.runtime.apply_checkpoint(TASK, token)
    restored = KeyValueStore(again.runtime.context(TASK), "table", timestamped=True)
    assert restored.get(b"a") == TimestampedValue(b"3", 7)
    assert restored.position == Position({"t": {0: 3}})
