"""Loads: every row in the bounds, in order, once, wherever its run lies; and everything given back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage_oracles import TASK, LaidStore, batch_of, keys_of_one_hash, rows_of
from tidegate.errors import InvalidError, OverloadError, TidegateError, UnavailableError
from tidegate.storage.backends.base import MissingObjectError
from tidegate.storage.backends.memory import MemoryBackend
from tidegate.storage.lookup import span_of
from tidegate.storage.reader import All, Bounds, RangeRequest, Time
from tidegate.storage.runs.aggregates import Count, Max, Sum
from tidegate.storage.runs.columns import hash_keys
from tidegate.storage.scratch import Scratch
from tidegate.storage.spec import Cursor, Merge, StoreSpec

EVENTS = StoreSpec(
    "events", Merge.APPEND, pa.schema([("value", pa.int64()), ("text", pa.string())]), bucket_ms=1000
)
TABLE = StoreSpec("table", Merge.LAST, pa.schema([("value", pa.int64())]), bucket_ms=1000)
SUMS = StoreSpec(
    "sums",
    Merge.FOLD,
    aggregates=(Count("count"), Sum("total", "value", pa.int64()), Max("most", "value", pa.int64())),
    bucket_ms=1000,
)


class CountingBackend(MemoryBackend):
    """Counts reads; runs a hook before each, which may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []
        self.before: Callable[[str], None] = lambda name: None

    def read(self, name: str) -> pa.Buffer:
        self.reads.append(name)
        self.before(name)
        return super().read(name)


def events(*rows: tuple[bytes, int]) -> pa.RecordBatch:
    return batch_of(EVENTS, [{"key": key, "ts": ts, "value": ts, "text": f"{ts}"} for key, ts in rows])


def store_with(*times: int, key: bytes = b"k", spec: StoreSpec = EVENTS, **options: Any) -> LaidStore:
    store = LaidStore(spec, **options)
    store.append(events(*((key, ts) for ts in times)))
    return store


def plan(store: LaidStore, *requests: RangeRequest) -> Any:
    return store.reader.plan(TASK, store.state, list(requests))


def times_of(store: LaidStore, key: bytes = b"k", bounds: Bounds = All()) -> list[int]:  # noqa: B008
    with store.reader.load(plan(store, RangeRequest(key, bounds))) as loaded:
        view = loaded.view()
        assert len(view) == view.to_batch().num_rows
        return view.to_batch().column("ts").to_pylist()


# ── views ────────────────────────────────────────────────────────────────────────────────────────────────────


def at(ts: int, seq: int = 0) -> Cursor:
    return Cursor(ts, seq)


LOW, HIGH = -(2**63), 2**63 - 1


@pytest.mark.parametrize(
    ("bounds", "cursor", "found"),
    [
        pytest.param(All(), at(1200), None, id="WS-T15-absent"),
        pytest.param(All(), at(1100, 77), None, id="WS-T15-absent-seq"),
        pytest.param(All(), at(1100, 1), 1, id="WS-T15-present"),
        pytest.param(All(), at(3500, 2), 2, id="WS-T15-across-an-empty-bucket"),
        pytest.param(All(), at(HIGH, HIGH), None, id="WS-T15-past-the-end"),
        pytest.param(All(), at(LOW, LOW), None, id="WS-T15-before-the-start"),
        pytest.param(Time(1100, 3900), at(1100, 1), 0, id="WS-T15-bounds-cut-the-start"),
        pytest.param(Time(1100, 3900), at(4000, 4), None, id="WS-T15-bounds-cut-the-end"),
        pytest.param(Time(1101, 3499), at(1100, 1), None, id="WS-T15-empty"),
    ],
)
@pytest.mark.parametrize("place", ["hot", "stored", "compacted"])
def test_a_view_finds_a_row_by_its_cursor_inside_its_bounds(
    place: str, bounds: Bounds, cursor: Cursor, found: int | None
) -> None:
    times = [1000, 1100, 3500, 3900, 4000]
    store = store_with(*times)
    store.append(events((b"other", 2500)))
    if place == "stored":
        store.evict()
    elif place == "compacted":
        for start in store.index.all_buckets():
            store.compact(start)
    first, last = bounds if isinstance(bounds, Time) else (LOW, HIGH)
    with store.reader.load(plan(store, RangeRequest(b"k", bounds))) as loaded:
        view = loaded.view()
        assert view.to_batch().column("ts").to_pylist() == [ts for ts in times if first <= ts <= last]
        assert view.seek_eq(cursor) == found
        with pytest.raises(IndexError):
            view.cursor(len(view))
    assert store.is_idle()


def test_an_empty_view_has_its_columns_and_finds_nothing() -> None:
    store = store_with(1000)
    with store.reader.load(plan(store, RangeRequest(b"unknown"))) as loaded:
        view = loaded.view()
        assert len(view) == 0
        assert view.seek_eq(at(1000)) is None
        assert view.to_batch().num_rows == 0
        assert view.to_batch().schema.names == ["ts", "seq", "value", "text"]


@settings(max_examples=80, deadline=None)
@given(
    batches=st.lists(st.lists(st.integers(0, 40), max_size=12), min_size=1, max_size=4),
    cuts=st.lists(st.tuples(st.integers(-5, 45), st.integers(-5, 45)), min_size=3, max_size=3),
)
def test_a_view_is_the_sorted_list_of_its_rows(batches: list[list[int]], cuts: list[tuple[int, int]]) -> None:
    store = LaidStore(replace(EVENTS, bucket_ms=10, segment_ms=10))
    for batch in batches:
        if batch:
            store.append(events(*((b"k", ts) for ts in batch)))
    cursors = sorted((identity.ts, identity.seq) for identity in store.oracle.contents())
    with store.reader.load(plan(store, RangeRequest(b"k"))) as loaded:
        view = loaded.view()
        assert [tuple(view.cursor(position)) for position in range(len(view))] == cursors
        assert [tuple(row.values()) for row in view.to_batch(["ts", "seq"]).to_pylist()] == cursors
        for low, high in cuts:
            cut = view.slice(low, high, ["seq", "value"])
            assert cut.column_names == ["seq", "value"]
            assert cut.column(0).to_pylist() == [seq for _, seq in cursors[max(low, 0) : max(high, 0)]]
        joined = pa.Table.from_batches(view.batches(), schema=view.to_batch().schema)
        assert joined.to_pylist() == view.to_batch().to_pylist()


# ── loads ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("row", [pytest.param("", id="WS-T16")])
def test_sizes_come_from_metadata_and_each_pack_is_read_once(row: str) -> None:
    """Planning asks the backend nothing, a load reads each missing pack once, and a slot is taken only to read."""
    backend = CountingBackend()
    store = store_with(1000, 2000, 3000, backend=backend)
    store.evict(starts=[1000, 2000])
    planned = plan(store, RangeRequest(b"k"), RangeRequest([b"k", b"other"], Time(0, 1999)))
    packs = {entry.stored.pack for entry in store.entries() if entry.stored is not None}
    assert backend.reads == []
    with store.reader.load(planned) as loaded:
        assert store.scratch.in_use(Scratch.READER) == 1
        assert loaded.to_table().num_rows == 3 + 1
    assert sorted(backend.reads) == sorted(packs)


@pytest.mark.parametrize("row", [pytest.param("", id="WS-T17")])
def test_packs_are_pinned_while_views_live(row: str) -> None:
    store = store_with(1000, 5000)
    store.evict(starts=[1000])
    pack = next(entry.stored.pack for entry in store.entries() if entry.stored is not None)
    loaded = store.reader.load(plan(store, RangeRequest(b"k")))
    assert pack in store.pins.pinned(TASK)
    with loaded.view() as view:
        loaded.close()
        loaded.close()
        assert pack in store.pins.pinned(TASK), "an entered view keeps what it reads"
        assert view.to_batch().column("ts").to_pylist() == [1000, 5000]
    assert pack not in store.pins.pinned(TASK)
    assert store.is_idle()
    with pytest.raises(InvalidError, match="closed"):
        view.to_batch()
    with pytest.raises(InvalidError, match="closed"):
        loaded.view()
    with pytest.raises(InvalidError, match="closed"):
        view.__enter__()


@pytest.mark.parametrize("row", [pytest.param("", id="WS-T18")])
def test_a_hot_run_that_is_removed_stays_readable_in_its_view(row: str) -> None:
    store = store_with(1000, 1500)
    with store.reader.load(plan(store, RangeRequest(b"k"))) as loaded:
        store.evict()
        store.index.prune(10**6)
        assert loaded.view().to_batch().column(0).to_pylist() == [1000, 1500]
    assert times_of(store) == []


@pytest.mark.parametrize(
    "between",
    [
        pytest.param(lambda store: store.evict(), id="WS-T19-evict"),
        pytest.param(lambda store: store.evict([b"k"]), id="WS-T19-evict-the-key"),
        pytest.param(lambda store: store.evict([b"other"]), id="WS-T19-evict-another-key"),
        pytest.param(lambda store: store.dump(), id="WS-T19-dump"),
        pytest.param(lambda store: store.compact(1000), id="WS-T19-compact"),
    ],
)
@pytest.mark.parametrize("keys", [b"k", [b"k", b"other"]])
def test_a_plan_holds_whatever_happens_before_it_is_loaded(
    between: Callable[[LaidStore], None], keys: Any
) -> None:
    store = store_with(1000, 1500, 2500)
    store.append(events((b"k", 1200), (b"other", 1300)))
    planned = plan(store, RangeRequest(keys))
    between(store)
    with store.reader.load(planned) as loaded:
        found = rows_of(loaded.to_table(), EVENTS)
    assert found == store.oracle.contents([keys] if isinstance(keys, bytes) else keys)


@pytest.mark.parametrize("row", [pytest.param("", id="WS-INV-11")])
def test_nothing_found_can_be_deleted_before_it_is_pinned(row: str) -> None:
    """A deleter strikes between capturing and loading: the pack is pinned by then, so it waits."""
    backend = CountingBackend()
    store = store_with(1000, 2000, backend=backend)
    store.evict()
    seen: list[bool] = []

    def deleter(name: str) -> None:
        store.index.prune(10**6)
        seen.append(name in store.pins.pinned(TASK))
        if not seen[-1]:
            backend.delete(name)

    backend.before = deleter
    assert times_of(store) == [1000, 2000]
    assert seen == [True, True]
    assert store.is_idle()


FAILURES: list[Any] = [
    pytest.param(lambda backend, name: backend.delete(name), MissingObjectError, id="WS-T20-missing"),
    pytest.param(lambda backend, name: _raise(), UnavailableError, id="WS-T20-failing"),
]


def _raise() -> None:
    raise UnavailableError("the disk is away; try again later")


@pytest.mark.parametrize(("fault", "error"), FAILURES)
@pytest.mark.parametrize("request_of", [b"k", [b"k", b"other"]])
@pytest.mark.parametrize("bounds", [All(), Time(0, 9999)])
def test_a_stored_run_that_cannot_be_read_is_an_error_and_never_a_short_result(
    fault: Any, error: type[TidegateError], request_of: Any, bounds: Bounds
) -> None:
    backend = CountingBackend()
    store = store_with(1000, 2000, 3000, backend=backend)
    store.evict(starts=[2000])
    lost = next(entry.stored.pack for entry in store.entries() if entry.stored is not None)
    backend.before = lambda name: fault(backend, lost)
    with pytest.raises(error):  # noqa: SIM117
        with store.reader.load(plan(store, RangeRequest(request_of, bounds))) as loaded:
            loaded.to_table()
    assert store.is_idle()
    with pytest.raises(error):
        list(store.reader.scan(TASK, store.state, bounds))
    assert store.is_idle()


@pytest.mark.parametrize("row", [pytest.param("", id="WS-T21")])
@pytest.mark.parametrize("place", ["hot", "stored", "mixed"])
def test_overlapping_deltas_read_in_cursor_order(row: str, place: str) -> None:
    store = store_with(1000, 1500)
    store.append(events((b"k", 1200)))
    if place == "stored":
        store.evict()
    elif place == "mixed":
        store.dump()
        store.place(1000, lambda run: replace(run, hot=None) if run.order == 0 else run)
    assert times_of(store) == [1000, 1200, 1500]
    assert times_of(store, bounds=Time(1100, 1400)) == [1200]
    assert store.scan().column("ts").to_pylist() == [1000, 1200, 1500]


@pytest.mark.parametrize("row", [pytest.param("", id="WS-T95")])
@pytest.mark.parametrize("deltas", [2, 9, 40])
def test_no_row_of_many_deltas_in_one_bucket_is_lost(row: str, deltas: int) -> None:
    store = LaidStore(EVENTS)
    for number in range(deltas):
        store.append(events(*((b"k%d" % key, 1000 + (number * 37 + key * 11) % 900) for key in range(5))))
        if number % 3 == 1:
            store.evict()
    keys = [b"k%d" % key for key in range(5)]
    expected = store.oracle.contents()
    assert rows_of(store.table(RangeRequest(keys)), EVENTS) == expected
    assert rows_of(store.scan(), EVENTS) == expected
    for key in keys:
        assert len(times_of(store, key)) == deltas
    with store.reader.load(plan(store, *(RangeRequest(key) for key in keys))) as loaded:
        assert [len(loaded.view(request)) for request in range(5)] == [deltas] * 5


def test_an_empty_plan_and_unknown_keys_answer_nothing() -> None:
    store = store_with(1000)
    with store.reader.load(plan(store)) as loaded:
        assert (len(loaded), loaded.to_table().num_rows) == (0, 0)
    for keys in ([], [b"x", b""], b"", pa.array([], pa.binary())):
        with store.reader.load(plan(store, RangeRequest(keys))) as loaded:
            assert all(not len(loaded.view(0, key)) for key in range(1 if keys == b"" else len(keys)))
            table = loaded.to_table()
            assert (table.num_rows, table.column_names) == (
                0,
                ["request", "key", "ts", "seq", "value", "text"],
            )
    empty = LaidStore(EVENTS)
    assert empty.table(RangeRequest(b"k"), RangeRequest([b"k"], Time(5, 5))).num_rows == 0
    assert empty.scan().num_rows == 0


def test_rows_come_by_request_and_in_the_order_of_its_keys() -> None:
    store = store_with(1000, 1500)
    store.append(events((b"a", 1100), (b"b", 2200)))
    table = store.table(
        RangeRequest([b"b", b"k", b"b", b"none"]), RangeRequest(b"a"), RangeRequest([b"k"], Time(0, 1000))
    )
    assert table.column("request").to_pylist() == [0, 0, 0, 0, 1, 2]
    assert table.column("key").to_pylist() == [b"b", b"k", b"k", b"b", b"a", b"k"]
    assert table.column("text").to_pylist() == ["2200", "1000", "1500", "2200", "1100", "1000"]


@pytest.mark.parametrize(
    "request_of",
    [
        RangeRequest(b"k", Time(-(2**70), 5)),
        RangeRequest([b"k"], All(), np.zeros(2, np.uint64)),
        RangeRequest(b"k", All(), np.zeros(2, np.uint64)),
    ],
)
def test_requests_that_cannot_mean_anything_are_refused(request_of: RangeRequest) -> None:
    with pytest.raises(InvalidError):
        plan(store_with(1000), request_of)


def test_a_null_key_is_refused() -> None:
    store = store_with(1000)
    with pytest.raises(InvalidError, match="null"):
        store.reader.load(plan(store, RangeRequest(pa.array([b"k", None], pa.binary()))))
    assert store.is_idle()


def test_inverted_time_bounds_hold_no_rows() -> None:
    store = store_with(1000, 2000)
    assert times_of(store, bounds=Time(2000, 1000)) == []
    assert store.table(RangeRequest([b"k"], Time(1500, 1000))).num_rows == 0
    assert store.scan(Time(1500, 1000)).num_rows == 0


def test_a_key_that_was_not_asked_for_has_no_view() -> None:
    store = store_with(1000)
    with (
        store.reader.load(plan(store, RangeRequest([b"other"]), RangeRequest(b"k"))) as loaded,
        pytest.raises(InvalidError, match="no number 1"),
    ):
        loaded.view(1, 1)


# ── kinds and copies ─────────────────────────────────────────────────────────────────────────────────────────


def test_the_later_write_wins_and_a_tombstone_hides() -> None:
    store = LaidStore(TABLE)
    row = {"key": b"k", "ts": 1000}
    store.append(batch_of(TABLE, [row | {"value": 1}, {"key": b"k", "ts": 1001, "value": 7}]))
    store.append(batch_of(TABLE, [row | {"value": 2}]))
    assert rows_of(store.table(RangeRequest(b"k")), TABLE) == store.oracle.contents()
    store.evict()
    store.append(batch_of(TABLE, [row | {"deleted": True}]))
    assert rows_of(store.table(RangeRequest(b"k")), TABLE) == store.oracle.contents()
    assert store.table(RangeRequest([b"k"])).column_names == ["request", "key", "ts", "seq", "value"]
    store.append(batch_of(TABLE, [row | {"value": 3}]))
    for found in (store.table(RangeRequest(b"k")), store.scan()):
        assert found.column("value").to_pylist() == [3, 7]


def test_partial_states_of_one_identity_are_merged() -> None:
    store = LaidStore(SUMS)
    for value in (5, 7, None, 9):
        store.append(
            batch_of(
                SUMS, [{"key": b"k", "ts": 1000, "value": value}, {"key": b"one", "ts": 1000, "value": 1}]
            )
        )
    store.evict(starts=[1000])
    store.append(
        batch_of(SUMS, [{"key": b"k", "ts": 1000, "value": 100}, {"key": b"k", "ts": 2000, "value": 3}])
    )
    expected = store.oracle.contents()
    assert rows_of(store.table(RangeRequest([b"k", b"one"])), SUMS) == expected
    assert rows_of(store.scan(), SUMS) == expected
    with store.reader.load(plan(store, RangeRequest(b"k"))) as loaded:
        view = loaded.view()
        assert [tuple(view.cursor(at)) for at in range(len(view))] == [(1000, 0), (2000, 0)]
        assert rows_of(view.to_batch().add_column(0, "key", pa.array([b"k"] * 2, pa.binary())), SUMS) == {
            identity: values for identity, values in expected.items() if identity.key == b"k"
        }


@pytest.mark.parametrize("row", [pytest.param("", id="WS-INV-4-partial")])
def test_keys_of_a_partial_copy_are_read_hot_and_the_others_from_the_pack(row: str) -> None:
    backend = CountingBackend()
    store = store_with(1000, 1100, backend=backend)
    store.append(events((b"cold", 1050), (b"k", 1060)))
    store.evict([b"cold"])
    first, second = store.entries()
    assert first.is_hot and second.hot is not None and not second.hot.complete
    assert times_of(store) == [1000, 1060, 1100]
    assert backend.reads == [], "every row of the key is hot"
    assert times_of(store, b"cold") == [1050]
    assert len(backend.reads) == 1
    assert rows_of(store.table(RangeRequest([b"k", b"cold", b"none"])), EVENTS) == store.oracle.contents()
    assert rows_of(store.scan(), EVENTS) == store.oracle.contents()


def test_a_partial_copy_outside_the_bounds_does_not_speak_for_the_run() -> None:
    store = LaidStore(EVENTS)
    store.append(events((b"early", 1000), (b"late", 1900)))
    store.evict([b"early"])
    assert times_of(store, b"early", Time(1000, 1500)) == [1000]
    assert times_of(store, b"late", Time(1000, 1500)) == []
    assert store.table(RangeRequest([b"early", b"late"], Time(1000, 1500))).column("ts").to_pylist() == [1000]


@pytest.mark.parametrize("row", [pytest.param("", id="WS-INV-25-reading")])
@pytest.mark.parametrize("cold", [None, 0, 1])
def test_keys_of_one_hash_are_never_mixed(row: str, cold: int | None) -> None:
    keys = keys_of_one_hash(3)
    store = LaidStore(EVENTS)
    store.append(events(*((key, 1000 + at) for at, key in enumerate(keys[:2])), (b"other", 1500)))
    store.append(events((keys[1], 1200)))
    if cold is not None:
        store.evict([keys[cold]])
    assert times_of(store, keys[0]) == [1000]
    assert times_of(store, keys[1]) == [1001, 1200]
    assert times_of(store, keys[2]) == []
    assert store.table(RangeRequest(keys)).column("key").to_pylist() == [keys[0], keys[1], keys[1]]


def test_hashes_may_be_given() -> None:
    store = store_with(1000, 1100)
    store.append(events((b"other", 1200)))
    keys = pa.array([b"other", b"k"], pa.binary())
    hashes = hash_keys(keys)
    assert store.table(RangeRequest(keys, All(), hashes)).column("ts").to_pylist() == [1200, 1000, 1100]
    assert store.table(RangeRequest(b"k", All(), hashes[1:])).num_rows == 2
    assert store.table(RangeRequest(b"k", All(), hashes[:1])).num_rows == 0, (
        "the hash of another key finds nothing"
    )


ROW = st.tuples(st.integers(0, 3), st.integers(-25, 35), st.integers(0, 1), st.integers(0, 9), st.booleans())
ACT = st.one_of(
    st.tuples(st.just("append"), st.lists(ROW, min_size=1, max_size=10)),
    st.tuples(st.sampled_from(["dump", "evict", "compact"]), st.integers(-3, 3)),
    st.tuples(st.just("evict keys"), st.sets(st.integers(0, 3), min_size=1, max_size=3)),
)
BOUNDS = st.one_of(
    st.just(All()),
    st.builds(Time, st.integers(-30, 40), st.integers(-30, 40)),
)


@pytest.mark.parametrize(
    "spec", [EVENTS, TABLE, SUMS], ids=["WS-INV-12-append", "WS-INV-12-last", "WS-INV-12-fold"]
)
@settings(max_examples=120, deadline=None)
@given(acts=st.lists(ACT, min_size=1, max_size=12), bounds=st.lists(BOUNDS, min_size=1, max_size=3))
def test_any_layout_reads_as_the_plain_rows(spec: StoreSpec, acts: list[Any], bounds: list[Bounds]) -> None:
    store = LaidStore(
        replace(spec, bucket_ms=10, segment_ms=10, payload=pa.schema([]) if spec is SUMS else spec.payload)
    )
    keys = [b"k%d" % number for number in range(5)]
    for act, what in acts:
        if act == "append":
            rows = [
                {"key": keys[key], "ts": ts, "seq": seq, "value": value, "text": "x" * value, "deleted": gone}
                for key, ts, seq, value, gone in what
            ]
            store.append(batch_of(store.spec, rows))
        elif act == "evict keys":
            store.evict([keys[number] for number in what])
        elif act == "compact":
            store.compact(10 * what)
        elif act == "dump":
            store.dump([10 * what])
        elif store.index.snapshot(10 * what) is not None:
            store.evict(starts=[10 * what])
    requests = [RangeRequest(keys, each) for each in bounds]
    requests += [RangeRequest(keys[0], each) for each in bounds]
    together = store.table(*requests)
    for number, request in enumerate(requests):
        alone = store.table(request)
        assert alone.drop(["request"]) == together.filter(pa.compute.equal(together["request"], number)).drop(
            ["request"]
        )
        found = rows_of(alone, store.spec)
        asked = [request.keys] if isinstance(request.keys, bytes) else keys
        start, end = request.bounds if isinstance(request.bounds, Time) else (None, None)
        expected = store.oracle.contents(asked, start, end)
        assert found == expected
        assert rows_of(store.scan(request.bounds), store.spec) == store.oracle.contents(None, start, end)
    assert store.is_idle()


def test_more_cells_than_one_search_takes_are_answered_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidegate.storage.lookup.MAX_CELLS", 7)
    store = LaidStore(EVENTS)
    keys = [b"key-%02d" % number for number in range(20)]
    for delta in range(3):
        store.append(events(*((key, 1000 + 10 * delta + at) for at, key in enumerate(keys))))
    store.evict([keys[3], keys[11]])
    table = store.table(RangeRequest(keys), RangeRequest(keys[::-1], Time(0, 9999)))
    assert table.filter(pa.compute.equal(table["request"], 0))["key"].to_pylist() == [
        key for key in keys for _ in range(3)
    ]
    assert table.filter(pa.compute.equal(table["request"], 1))["key"].to_pylist() == [
        key for key in keys[::-1] for _ in range(3)
    ]
    with store.reader.load(plan(store, RangeRequest(keys))) as loaded:
        views = [loaded.view(0, number) for number in range(len(keys))]
        assert [view.key for view in views] == keys
        assert {len(view) for view in views} == {3}


def test_a_large_answer_comes_in_pieces_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidegate.storage.ranges.PIECE_ROWS", 7)
    store = LaidStore(EVENTS)
    for delta in range(3):
        store.append(events(*((b"k%d" % key, 1000 + 3 * at + delta) for at in range(9) for key in range(3))))
    keys = [b"k2", b"k0", b"none", b"k1"]
    with store.reader.load(plan(store, RangeRequest(keys))) as loaded:
        batches = list(loaded.batches())
    assert [batch.num_rows for batch in batches] == [7] * 11 + [4]
    table = pa.Table.from_batches(batches)
    assert table["key"].to_pylist() == [key for key in (b"k2", b"k0", b"k1") for _ in range(27)]
    assert table["ts"].to_pylist() == list(range(1000, 1027)) * 3


def test_a_key_with_more_stretches_than_expected_is_read_whole() -> None:
    store = LaidStore(EVENTS)
    for parity in (0, 1):
        store.append(events(*((b"k", 1000 + 2 * at + parity) for at in range(450)), (b"z", 1999)))
    assert times_of(store) == list(range(1000, 1900))
    assert store.table(RangeRequest([b"z", b"k"]))["ts"].to_pylist() == [1999, 1999, *range(1000, 1900)]


# ── scans ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("spec", [EVENTS, TABLE, SUMS], ids=str)
@pytest.mark.parametrize("batch_rows", [1, 7, 50, 10**6])
def test_a_scan_gives_every_row_once_in_bounded_batches(spec: StoreSpec, batch_rows: int) -> None:
    store = LaidStore(spec)
    numbers = np.random.default_rng(7)
    for _ in range(4):
        rows = [
            {
                "key": b"k%d" % key,
                "ts": int(ts),
                "seq": 0,
                "value": 1,
                "text": "t",
                "deleted": bool(ts % 5 == 0),
            }
            for key, ts in zip(numbers.integers(0, 30, 60), numbers.integers(-1500, 2500, 60), strict=True)
        ]
        rows += [{"key": b"big", "ts": ts, "value": 2, "text": "b"} for ts in range(100, 160)]
        store.append(batch_of(spec, rows))
        store.evict([b"k1", b"k2", b"big"])
    for bounds, start, end in ((All(), None, None), (Time(-700, 1300), -700, 1300)):
        with store.reader.scan(TASK, store.state, bounds, batch_rows=batch_rows) as scan:
            batches = list(scan)
        most = max(batch.num_rows for batch in batches)
        assert most <= max(batch_rows, 4), "rows of one key and ts stay together"
        assert rows_of(pa.Table.from_batches(batches), spec) == store.oracle.contents(None, start, end)
        table = pa.Table.from_batches(batches)
        hashes = hash_keys(table["key"].combine_chunks()).tolist()
        columns = (table[name].to_pylist() for name in ("key", "ts", "seq"))
        order = [
            (spec.bucket_of(ts), *rest, ts, seq) for *rest, ts, seq in zip(hashes, *columns, strict=True)
        ]
        assert order == sorted(order), "by bucket, then hash, key and cursor"
    assert store.is_idle()


@pytest.mark.parametrize("spec", [EVENTS, TABLE, SUMS], ids=str)
@pytest.mark.parametrize("merged", [False, True])
def test_only_the_columns_asked_for_are_read(spec: StoreSpec, merged: bool) -> None:
    store = LaidStore(spec)
    for delta in range(3):
        rows = [
            {"key": b"k%d" % key, "ts": 1000 + 7 * key + ts * (delta + 1), "value": delta, "deleted": ts == 3}
            for key in range(4)
            for ts in range(5)
        ]
        store.append(batch_of(spec, rows))
    if merged:
        store.compact(1000)
    store.evict([b"k1"])
    keys = [b"k3", b"k1", b"k0"]
    payload = spec.payload.names[0]
    for bounds in (All(), Time(1003, 1015)):
        requests = [RangeRequest(keys, bounds), RangeRequest(b"k2", bounds)]
        whole = store.table(*requests)
        with store.reader.load(plan(store, *requests)) as loaded:
            for names in (
                [payload, "ts"],
                ["key"],
                ["request"],
                ["seq", "request", "key"],
                whole.column_names,
            ):
                assert loaded.to_table(names) == whole.select(names)
            for names in (["none"], ["deleted"], []):
                with pytest.raises(InvalidError):
                    loaded.to_table(names)
        expected = store.scan(bounds)
        for names in ([payload, "ts"], ["key"], ["ts", "key"]):
            batches = store.reader.scan(TASK, store.state, bounds, batch_rows=6, columns=names)
            assert pa.Table.from_batches(batches) == expected.select(names)
    with pytest.raises(InvalidError):
        store.reader.scan(TASK, store.state, columns=["request"])
    assert store.is_idle()


def test_a_scan_is_one_cut_and_gives_back_what_it_holds() -> None:
    store = store_with(1000, 2000, 3000)
    store.evict(starts=[2000, 3000])
    scan = store.reader.scan(TASK, store.state)
    store.append(events((b"new", 2500), (b"new", 3500)))
    store.index.prune(3000)
    assert next(scan).column("ts").to_pylist() == [1000]
    assert store.pins.open_leases() == 1
    assert [batch.column("ts").to_pylist() for batch in scan] == [[2000], [3000]]
    assert store.is_idle(), "the end gives back"
    assert list(scan) == []
    with store.reader.scan(TASK, store.state) as scan:
        next(scan)
    assert store.is_idle(), "leaving early gives back"
    assert list(scan) == []
    with pytest.raises(InvalidError, match="at least one"):
        store.reader.scan(TASK, store.state, batch_rows=0)


# ── what a load holds ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("row", [pytest.param("", id="WS-INV-13")])
@pytest.mark.parametrize(
    ("keys", "failing"),
    [
        *[(b"k", failing) for failing in ("pin", "permit", "load", "touch_one")],
        *[([b"k", b"other"], failing) for failing in ("pin", "permit", "load", "touch")],
    ],
)
def test_an_error_anywhere_on_the_way_gives_everything_back(
    row: str, failing: str, keys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_with(1000, 2000)
    store.evict()

    def fail(*arguments: object, **options: object) -> None:
        raise UnavailableError("not now")

    owner: Any = {
        "pin": store.pins, "permit": store.scratch, "load": store.packs, "touch": store.key_lru,
        "touch_one": store.key_lru,
    }[failing]  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(type(owner), failing, fail)
        with pytest.raises(UnavailableError):
            store.reader.load(plan(store, RangeRequest(keys)))
    assert store.is_idle()
    assert store.table(RangeRequest(keys)).num_rows == 2
    assert store.is_idle()


def test_a_failing_release_does_not_keep_the_others_from_being_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = store_with(1000)
    store.evict()
    loaded = store.reader.load(plan(store, RangeRequest(b"k")))
    with monkeypatch.context() as patch:
        patch.setattr(
            "tidegate.storage.maintenance.retirement.BatchPins._unpin", lambda pins, lease: _raise()
        )
        with pytest.raises(UnavailableError):
            loaded.close()
    assert store.scratch.in_use(Scratch.READER) == 0


def test_hot_reads_take_no_pin_and_no_permit() -> None:
    store = store_with(1000, reader_slots=1)
    with (
        store.reader.load(plan(store, RangeRequest(b"k"))),
        store.reader.load(plan(store, RangeRequest([b"k"]))),
    ):
        assert store.scratch.in_use(Scratch.READER) == 0
        assert store.pins.open_leases() == 0


def test_keys_count_as_accessed_once_a_load() -> None:
    store = store_with(1000)
    calls: list[tuple[str, list[int]]] = []

    class Watching:
        def touch(self, hashes: Any) -> None:
            calls.append(("touch", hashes.tolist()))

        def touch_one(self, key_hash: int) -> None:
            calls.append(("touch_one", [key_hash]))

    store.reader._key_lru = lambda task: Watching()  # type: ignore[assignment,return-value]
    hashes = hash_keys(pa.array([b"k", b"other"], pa.binary())).tolist()
    for _ in range(2):  # as the first reader, and as one for whom all was made already
        loaded = store.reader.load(plan(store, RangeRequest(b"k")))
        with loaded.view():
            loaded.close()
            loaded.close()
        assert calls == [("touch_one", hashes[:1])]
        calls.clear()
    store.reader.load(plan(store, RangeRequest([b"k"]), RangeRequest([b"other"]))).close()
    assert calls == [("touch", hashes)]
    calls.clear()
    list(store.reader.scan(TASK, store.state))
    assert calls == [], "a sweep over everything says nothing about any key"


def test_waiting_for_scratch_holds_no_lock_of_the_index() -> None:
    store = store_with(1000, reader_slots=1)
    store.evict()
    first = store.reader.load(plan(store, RangeRequest(b"k")))
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.extend(times_of(store)))
    thread.start()
    while not store.scratch.waiting(Scratch.READER):
        thread.join(0.001)
    store.append(events((b"k", 1500)))  # would hang if the waiting load held the index
    assert found == []
    first.close()
    thread.join(300)
    assert found == [1000], "it sees what it captured before it waited"
    assert store.is_idle()


def test_a_load_that_never_gets_scratch_fails_with_the_remedy() -> None:
    store = store_with(1000, reader_slots=1, scratch_timeout_ms=20)
    store.evict()
    errors: list[OverloadError] = []

    def other() -> None:
        try:
            times_of(store)
        except OverloadError as error:
            errors.append(error)

    with store.reader.load(plan(store, RangeRequest(b"k"))):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(300)
        assert [error.reason for error in errors] == ["scratch"]
        assert store.pins.open_leases() == 1, "the failed load unpinned what it had pinned"
    assert store.is_idle()


def test_tables_made_for_reading_let_go_of_evicted_runs() -> None:
    store = store_with(1000)
    times_of(store)
    times_of(store)
    assert store.index.recall(LOW // 1000 * 1000, HIGH // 1000 * 1000) is not None
    store.evict()
    assert store.index.recall(LOW // 1000 * 1000, HIGH // 1000 * 1000) is None
    times_of(store)
    span = store.index.recall(LOW // 1000 * 1000, HIGH // 1000 * 1000)
    assert span is not None and span.has_stored and span.runs == [None]
    assert len(span_of([]).runs) == 0


def test_readers_and_a_writer_at_once_see_whole_batches() -> None:
    """Each batch has one row in each of two buckets: a reader never sees one without the other."""
    store = LaidStore(EVENTS)
    stop = threading.Event()
    wrong: list[Any] = []

    def read() -> None:
        while not stop.is_set():
            with store.reader.load(plan(store, RangeRequest(b"k"))) as loaded:
                times = loaded.view().to_batch().column("ts").to_numpy()
            early = int((times < 2000).sum())
            if early * 2 != len(times):
                wrong.append(times)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(150):
        store.append(events((b"k", 1000 + number), (b"k", 2000 + number)))
        if number % 10 == 9:
            store.evict()
        if number % 25 == 24:
            store.compact(1000)
    stop.set()
    for thread in threads:
        thread.join(300)
    assert not wrong
    assert store.is_idle()
    assert len(times_of(store)) == 300
