"""The index: what it answers, what a change keeps, and that a lost race changes nothing."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.errors import InvalidError
from tidegate.storage.index import (
    AppendBatch,
    BucketIndex,
    HotCopy,
    Pruned,
    RunEntry,
    StoredRef,
    Tenant,
)
from tidegate.storage.runs.build import build_runs
from tidegate.storage.runs.run import Run
from tidegate.storage.spec import Merge, StoreSpec

SPEC = StoreSpec("events", Merge.APPEND, pa.schema([("value", pa.int64())]), bucket_ms=1000, segment_ms=4000)
LAST = StoreSpec("table", Merge.LAST, pa.schema([("value", pa.int64())]), bucket_ms=1000)


def run_of(*times: int, spec: StoreSpec = SPEC, first_seq: int = 0) -> Run:
    columns = [pa.array([b"k"] * len(times), pa.binary()), pa.array(times, pa.int64())]
    names = ["key", "ts"]
    if spec.merge is not Merge.APPEND:
        columns, names = [*columns, pa.array([0] * len(times), pa.int64())], [*names, "seq"]
    rows = pa.RecordBatch.from_arrays([*columns, pa.array(range(len(times)))], names=[*names, "value"])
    (run,) = build_runs(
        spec, rows, first_seq=first_seq if spec.merge is Merge.APPEND else None, max_rows=10**6
    )
    return run


def part(
    start: int, rows: int = 1, *, low: int | None = None, high: int | None = None, charge: int = 100
) -> AppendBatch:
    """A part that says it has `rows` rows; the run behind it stands for them."""
    low, high = start if low is None else low, start if high is None else high
    hot = HotCopy(Tenant.WRITE_BUFFER, id(object()), run_of(low))
    return AppendBatch(start, hot, rows, rows * 10, charge, low, high)


def stored(index: BucketIndex, start: int, name: str = "p", *, keep_hot: bool = False) -> None:
    """Give every run of the bucket a stored place, and perhaps take the hot one."""
    bucket = index.snapshot(start)
    assert bucket is not None
    pairs = [
        (run, replace(run, stored=StoredRef(f"{name}-{start}", at), hot=run.hot if keep_hot else None))
        for at, run in enumerate(bucket.runs)
    ]
    assert index.set_places(bucket, pairs)


def three_buckets() -> BucketIndex:
    index = BucketIndex(SPEC)
    index.insert([part(1000, 100), part(2000, 50), part(3000, 75)])
    for start in (1000, 2000, 3000):
        stored(index, start)
    return index


@pytest.mark.parametrize(("start", "end", "found"), [pytest.param(1500, 2500, [2000], id="WS-T10")])
def test_query_answers_buckets_whose_starts_lie_between(start: int, end: int, found: list[int]) -> None:
    index = three_buckets()
    assert [bucket.start for bucket in index.query(start, end)] == found
    assert index.total_rows == 225
    assert [sum(run.rows for run in bucket.runs) for bucket in index.query(0, 9999)] == [100, 50, 75]


def test_buckets_that_may_hold_a_time_start_before_it() -> None:
    assert [bucket.start for bucket in three_buckets().buckets(1500, 2500)] == [1000, 2000]
    assert three_buckets().buckets(4000, 5000) == []


@pytest.mark.parametrize("cutoff", [pytest.param(2000, id="WS-T11")])
def test_prune_drops_whole_buckets_before_the_cutoff(cutoff: int) -> None:
    index = three_buckets()
    gone = index.prune(cutoff)
    assert gone.stored == (StoredRef("p-1000", 0),)
    assert (gone.rows, gone.hot, gone.buckets) == (100, (), (1000,))
    assert index.total_rows == 125
    assert index.all_buckets() == [2000, 3000]


@pytest.mark.parametrize("cutoff", [pytest.param(1500, id="WS-T12")])
def test_a_run_that_straddles_the_cutoff_stays_whole(cutoff: int) -> None:
    index = BucketIndex(SPEC)
    index.insert([part(1000, 7, low=1100, high=1900), part(1000, 5, low=1000, high=1499)])
    before = index.snapshot(1000)
    gone = index.prune(cutoff)
    after = index.snapshot(1000)
    assert (gone.rows, gone.charge, len(gone.hot)) == (5, 100, 1)
    assert before is not None and after is not None
    assert after.runs == before.runs[:1]
    assert after.data_version > before.data_version
    assert (index.total_rows, index.total_charge, after.runs[0].rows) == (7, 100, 7)
    assert index.prune(cutoff) == Pruned()
    assert index.snapshot(1000) is after


@pytest.mark.parametrize("cutoff", [pytest.param(9000, id="WS-T13")])
def test_a_run_with_two_copies_is_pruned_once(cutoff: int) -> None:
    index = BucketIndex(SPEC)
    (entry,) = index.insert([part(1000, 40, charge=400)])
    stored(index, 1000, keep_hot=True)
    gone = index.prune(cutoff)
    assert entry.hot is not None
    assert [hot.id for hot in gone.hot] == [entry.hot.id]
    assert gone.stored == (StoredRef("p-1000", 0),)
    assert (gone.rows, gone.charge) == (40, 400)
    assert (index.total_rows, index.total_charge, index.total_bytes, index.bucket_count) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("ts", "bucket"), [pytest.param(-1, -1000, id="WS-T14"), (0, 0), (-1000, -1000), (-1001, -2000)]
)
def test_a_bucket_start_is_a_floor(ts: int, bucket: int) -> None:
    assert SPEC.bucket_of(ts) == bucket
    run = run_of(ts)
    index = BucketIndex(SPEC)
    index.insert([part(run.bucket, low=ts, high=ts)])
    assert [found.start for found in index.buckets(ts, ts)] == [bucket]


def test_drop_segments_takes_whole_time_segments_only() -> None:
    index = BucketIndex(SPEC)
    index.insert([part(start) for start in (-1000, 0, 3000, 4000, 7000, 8000)])
    assert index.drop_segments(7999).buckets == (-1000, 0, 3000)
    assert index.drop_segments(7999) == Pruned()
    assert index.drop_segments(8000).buckets == (4000, 7000)
    assert index.all_buckets() == [8000]


def base(entry: RunEntry, **changes: object) -> RunEntry:
    return replace(entry, base=True, **changes)  # type: ignore[arg-type]


# ── versions and compare-and-swap ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("row", [pytest.param("both versions", id="WS-INV-6")])
def test_data_version_follows_content_and_layout_version_follows_publishes(row: str) -> None:
    index = BucketIndex(SPEC)
    seen: set[int] = set()

    def versions() -> tuple[int, int]:
        bucket = index.snapshot(1000)
        assert bucket is not None
        seen.update((bucket.data_version, bucket.layout_version))
        return bucket.data_version, bucket.layout_version

    index.insert([part(1000, 3, low=1000, high=1001)])
    data, layout = versions()
    index.insert([part(1000, 4, low=1900, high=1900)])
    assert versions()[0] > data and versions()[1] == layout
    data = versions()[0]
    stored(index, 1000, keep_hot=True)
    assert versions()[0] == data and versions()[1] > layout
    layout = versions()[1]
    bucket = index.snapshot(1000)
    assert bucket is not None
    merged = base(bucket.runs[1], rows=7, stored=None, min_ts=1000)
    assert index.publish(bucket, bucket.runs, [merged])
    assert versions()[0] == data and versions()[1] > layout
    index.prune(1900)
    assert versions()[0] == data, "the merged run straddles: nothing left"
    index.prune(10**9)
    assert index.snapshot(1000) is None
    before = max(seen)
    index.insert([part(1000)])
    assert min(versions()) > before, "a bucket made again repeats no version"


@pytest.mark.parametrize("stale", ["insert", "places", "publish", "prune", "gone", "again"])
@pytest.mark.parametrize(
    "operation",
    [pytest.param("publish", id="WS-INV-7-publish"), pytest.param("places", id="WS-INV-7-places")],
)
def test_a_lost_race_changes_nothing(operation: str, stale: str) -> None:
    index = BucketIndex(SPEC)
    index.insert([part(1000, 3, low=1000, high=1001), part(1000, 4, low=1900, high=1900)])
    seen = index.snapshot(1000)
    assert seen is not None
    if stale == "insert":
        index.insert([part(1000, 1)])
    elif stale == "places":
        stored(index, 1000, keep_hot=True)
    elif stale == "publish":
        index.publish(seen, seen.runs[:1], [base(seen.runs[0])])
    elif stale == "prune":
        index.prune(1500)
    else:
        index.prune(5000)
        if stale == "again":
            index.insert([part(1000, 3, low=1000, high=1001), part(1000, 4, low=1900, high=1900)])
    before = (
        index.snapshot(1000),
        index.total_rows,
        index.version,
        index.unstored_buckets(),
        index.crowded_buckets(),
    )
    if operation == "publish":
        merged = base(seen.runs[1], rows=7, min_ts=1000)
        assert not index.publish(seen, seen.runs, [merged])
    else:
        pairs = [(run, replace(run, stored=StoredRef("x", 0), hot=None)) for run in seen.runs]
        assert not index.set_places(seen, pairs)
    after = (
        index.snapshot(1000),
        index.total_rows,
        index.version,
        index.unstored_buckets(),
        index.crowded_buckets(),
    )
    assert after == before


def test_publish_puts_new_runs_where_the_old_ones_stood() -> None:
    index = BucketIndex(SPEC)
    index.insert([part(1000, rows) for rows in (1, 2, 3, 4)])
    bucket = index.snapshot(1000)
    assert bucket is not None
    a, b, c, d = bucket.runs
    halves = [base(c, rows=2), base(c, rows=3)]  # one merge, two disjoint pieces of one order
    assert index.publish(bucket, [b, c], halves)
    after = index.snapshot(1000)
    assert after is not None
    assert after.runs == (a, *halves, d)
    assert index.total_rows == 10


def test_publish_of_nothing_removes_the_bucket() -> None:
    index = BucketIndex(LAST)
    index.insert([part(1000, 2), part(2000, 1)])
    bucket = index.snapshot(1000)
    assert bucket is not None
    assert index.publish(bucket, bucket.runs, [])
    assert index.all_buckets() == [2000]
    assert (index.total_rows, index.bucket_count) == (1, 1)


@pytest.mark.parametrize("row", [pytest.param("", id="WS-INV-4")])
def test_a_change_that_would_break_one_logical_copy_is_refused(row: str) -> None:
    index = BucketIndex(SPEC)
    index.insert([part(1000, 1), part(1000, 2), part(1000, 3)])
    bucket = index.snapshot(1000)
    assert bucket is not None
    a, b, c = bucket.runs
    assert a.hot is not None
    partial = replace(a.hot, complete=False)
    refused = [
        lambda: index.publish(bucket, [a, c], [base(c, rows=4)]),  # not side by side: b's turn is lost
        lambda: index.publish(bucket, [b, a], [base(b, rows=3)]),
        lambda: index.publish(bucket, [a, b], [base(b, rows=2)]),  # a row was lost
        lambda: index.publish(bucket, [a, b], [base(b, rows=4)]),  # a row was made up
        lambda: index.publish(bucket, [a, b], [base(c, rows=3)]),  # an order that is taken
        lambda: index.publish(bucket, [a, b], [base(b, rows=3, bucket=2000)]),
        lambda: index.publish(bucket, [a, b], [base(b, rows=3, hot=None)]),  # nowhere
        lambda: index.publish(bucket, [], []),
        lambda: index.set_places(bucket, [(a, replace(a, hot=None))]),  # nowhere
        lambda: index.set_places(bucket, [(a, replace(a, hot=partial))]),  # some of it nowhere
        lambda: index.set_places(bucket, [(a, replace(a, rows=9))]),
        lambda: index.set_places(bucket, [(replace(a), replace(a))]),  # not the index's own entry
        lambda: index.insert([part(1000, 0)]),
        lambda: index.insert([replace(part(1000, 1), hot=replace(part(1000).hot, complete=False))]),
        lambda: index.insert([part(1000, 1, low=999)]),
        lambda: index.insert([part(2000, 1), part(1000, 1, high=2000)]),
    ]
    for number, change in enumerate(refused):
        with pytest.raises(InvalidError):
            change()
        assert index.snapshot(1000) is bucket, number
        assert index.all_buckets() == [1000]


@pytest.mark.parametrize("row", [pytest.param("", id="WS-INV-11-index")])
def test_capture_pins_inside_the_critical_section_and_only_what_is_not_hot(row: str) -> None:
    index = BucketIndex(SPEC)
    index.insert([part(start) for start in (1000, 2000, 3000)])
    stored(index, 1000)
    stored(index, 2000, keep_hot=True)
    seen: list[list[StoredRef]] = []

    def pin(refs: list[StoredRef]) -> str:
        seen.append(refs)
        assert index._lock.locked(), "nobody may prune between finding and pinning"
        return "lease"

    buckets, lease = index.capture(0, 9000, pin)
    assert ([bucket.start for bucket in buckets], lease) == ([1000, 2000, 3000], "lease")
    assert seen == [[StoredRef("p-1000", 0)]]
    assert index.capture(0, 9000, pin, everything=True)[1] == "lease"
    assert seen[1:] == [[StoredRef("p-1000", 0), StoredRef("p-2000", 0)]]
    assert index.capture(3000, 3000, pin)[1] is None
    assert len(seen) == 2


# ── what follows the buckets ─────────────────────────────────────────────────────────────────────────────────


def test_derived_values_live_until_anything_changes() -> None:
    index = BucketIndex(SPEC)
    index.insert([part(1000)])
    index.remember(index.version, 0, 1000, "table")
    assert index.recall(0, 1000) == "table"
    old = index.version
    index.insert([part(1000)])
    assert index.recall(0, 1000) is None
    index.remember(old, 0, 1000, "made of buckets that are no more")
    assert index.recall(0, 1000) is None
    for change in (lambda: stored(index, 1000), lambda: index.prune(5000)):
        index.remember(index.version, 0, 1000, "table")
        change()
        assert index.recall(0, 1000) is None
    for number in range(100):
        index.remember(index.version, number, number, "many")
    assert len(index._derived) <= 16


def test_changes_are_those_since_the_last_confirmed_manifest() -> None:
    index = BucketIndex(SPEC)
    index.insert([part(1000, 1), part(2000, 2), part(3000, 3)])
    assert index.changes() is None, "runs that are only in memory cannot be listed"
    for start in (1000, 2000, 3000):
        stored(index, start, keep_hot=True)
    mark = index.version
    assert index.changes() == {1000, 2000, 3000}
    index.insert([part(2000, 5)])
    stored(index, 2000)
    index.exported(mark)
    assert index.changes() == {2000}
    index.exported(index.version)
    stored(index, 3000)  # takes the hot copy away; the stored one is the same
    bucket = index.snapshot(1000)
    assert bucket is not None
    index.set_places(
        bucket,
        [(run, replace(run, hot=None)) for run in bucket.runs],
    )
    assert index.changes() == set() and index.is_exported, "a hot copy is no business of a manifest"
    index.prune(2000)
    assert index.changes() == {1000}


def test_load_brings_back_the_runs_of_a_manifest() -> None:
    index = three_buckets()
    runs = [run for bucket in index.query(0, 9999) for run in bucket.runs]
    other = BucketIndex(SPEC)
    other.insert([part(7000, 9, charge=5)])
    gone = other.load(runs, next_order=3)
    assert (gone.rows, gone.charge, len(gone.hot), gone.buckets) == (9, 5, 1, (7000,))
    assert [run for bucket in other.query(0, 9999) for run in bucket.runs] == runs
    assert (other.total_rows, other.total_charge) == (225, 300)
    assert other.changes() == set(), "the manifest it came from knows it"
    assert other.hot_buckets() == other.unstored_buckets() == []
    (entry,) = other.insert([part(3000)])
    assert entry.order == 3


@pytest.mark.parametrize("wrong", [{"stored": None}, {"order": 99}, {"rows": 0}])
def test_load_refuses_runs_that_no_manifest_has(wrong: dict[str, object]) -> None:
    first, *rest = [run for bucket in three_buckets().query(0, 9999) for run in bucket.runs]
    with pytest.raises(InvalidError):
        BucketIndex(SPEC).load([*rest, replace(first, **wrong)], next_order=3)  # type: ignore[arg-type]


STEP = st.tuples(
    st.sampled_from(["insert", "prune", "drop", "merge", "store", "evict"]),
    st.integers(-9, 9),
    st.integers(0, 3),
)


@pytest.mark.parametrize("row", [pytest.param("", id="WS-INV-5")])
@settings(max_examples=150, deadline=None)
@given(steps=st.lists(STEP, max_size=40))
def test_counts_and_noted_buckets_equal_the_entries_after_any_changes(
    row: str, steps: list[tuple[str, int, int]]
) -> None:
    index = BucketIndex(SPEC)
    expected_rows = 0
    for action, cell, number in steps:
        start = cell * 1000
        bucket = index.snapshot(start)
        if action == "insert":
            index.insert([part(start, number + 1, low=start + 100 * number, high=start + 200 * number)])
            expected_rows += number + 1
        elif action in ("prune", "drop"):
            gone = index.prune(start + 150 * number) if action == "prune" else index.drop_segments(start)
            expected_rows -= gone.rows
        elif bucket is not None and action == "merge":
            low, high = min(run.min_ts for run in bucket.runs), max(run.max_ts for run in bucket.runs)
            merged = base(
                bucket.runs[-1],
                rows=sum(run.rows for run in bucket.runs),
                min_ts=low,
                max_ts=high,
                stored=None,
            )
            if merged.hot is not None:
                index.publish(bucket, bucket.runs, [merged])
        elif bucket is not None:
            stored(index, start, keep_hot=action == "store")
        runs = [run for found in index.query(-(10**9), 10**9) for run in found.runs]
        assert index.total_rows == expected_rows == sum(run.rows for run in runs)
        assert index.total_charge == sum(run.charge for run in runs)
        assert index.bucket_count == len(index.all_buckets())
        assert index.all_buckets() == sorted({run.bucket for run in runs})
        assert index.unstored_buckets() == sorted({run.bucket for run in runs if run.stored is None})
        assert index.hot_buckets() == sorted({run.bucket for run in runs if run.hot is not None})
        assert all(run.is_hot or run.stored is not None for run in runs)


def test_work_follows_the_buckets_touched_not_all_of_them() -> None:
    """With ten thousand buckets more, inserting, pruning and placing run no more lines of Python."""

    def lines(others: int) -> int:
        index = BucketIndex(SPEC)
        index.insert([part(1000 * at) for at in range(others)])
        count = 0

        def trace(frame: object, event: str, argument: object) -> object:
            nonlocal count
            count += event == "line"
            return trace

        parts = [part(1000 * others + 1000)]
        sys.settrace(trace)  # type: ignore[arg-type]
        try:
            index.insert(parts)
            stored(index, 1000 * others + 1000)
            index.buckets(2000, 3000)
            index.unstored_buckets()
            index.prune(1000)
        finally:
            sys.settrace(None)
        return count

    assert lines(10_000) == lines(100)


def test_many_threads_insert_and_publish_without_losing_a_row() -> None:
    index = BucketIndex(SPEC)
    index.insert([part(1000)])
    published = [0, 0]

    def insert() -> None:
        for _ in range(300):
            index.insert([part(1000)])

    def merge(worker: int) -> None:
        while published[worker] < 50:
            bucket = index.snapshot(1000)
            if bucket is None:
                raise AssertionError("the bucket went away")
            merged = base(bucket.runs[-1], rows=sum(run.rows for run in bucket.runs))
            published[worker] += index.publish(bucket, bucket.runs, [merged])

    threads = [
        threading.Thread(target=insert),
        *(threading.Thread(target=merge, args=(at,)) for at in (0, 1)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not any(thread.is_alive() for thread in threads)
    assert index.total_rows == 301 == sum(run.rows for bucket in index.query(0, 9999) for run in bucket.runs)
