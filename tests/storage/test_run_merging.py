"""Runs merged, cut and chosen from: against dictionaries, with good and with hopeless hashes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.errors import InvalidError
from tidegate.storage.runs.aggregates import Count, Last, Max, Mean, Min, Sum
from tidegate.storage.runs.build import build_runs
from tidegate.storage.runs.merge import merge_runs, select_keys, slice_rows
from tidegate.storage.runs.run import Run
from tidegate.storage.spec import Merge, StoreSpec

NO_LIMIT = 1 << 30
PAYLOAD = pa.schema([("v", pa.float64()), ("text", pa.string())])
APPEND = StoreSpec("events", Merge.APPEND, PAYLOAD)
LAST = StoreSpec("table", Merge.LAST, PAYLOAD)
FOLD = StoreSpec(
    "sums",
    Merge.FOLD,
    aggregates=(
        Count("n"),
        Sum("total", "v"),
        Mean("mean", "v"),
        Min("low", "v"),
        Max("high", "text", pa.string()),
        Last("latest", "v", pa.float64(), ("at", "partition", "offset")),
    ),
)

Row = tuple[bytes, int, int, bool, float | None]  # key, ts, seq, deleted, value
Content = list[tuple[Any, ...]]

some_keys = st.sampled_from([b"", b"a", b"b", b"ab", b"a key of more than one word", b"z" * 9])
some_values = st.none() | st.floats(-1e9, 1e9) | st.sampled_from([1e300, -1e300, 5e-324])
some_batches = st.lists(
    st.lists(
        st.tuples(some_keys, st.integers(0, 6), st.integers(0, 1), st.booleans(), some_values),
        min_size=1,
        max_size=25,
    ),
    max_size=7,
)


def weak(key: bytes) -> int:
    return len(key) % 2


def strong(key: bytes) -> int:
    return int(xxhash.xxh64_intdigest(key))


def batch_of(rows: list[Row], first: int) -> pa.RecordBatch:
    keys, ts, seq, deleted, values = (list(column) for column in zip(*rows, strict=True))
    return pa.record_batch(
        {
            "key": pa.array(keys, pa.binary()),
            "ts": pa.array(ts, pa.int64()),
            "seq": pa.array(seq, pa.int64()),
            "deleted": pa.array(deleted, pa.bool_()),
            "v": pa.array(values, pa.float64()),
            "text": pa.array([None if value is None else f"<{value}>" for value in values], pa.string()),
            "at": pa.array(ts, pa.int64()),
            "partition": pa.array([0] * len(rows), pa.int32()),
            "offset": pa.array(range(first, first + len(rows)), pa.int64()),
        }
    )


def built(
    spec: StoreSpec, batches: list[list[Row]], is_weak: bool = False, max_rows: int = NO_LIMIT
) -> list[Run]:
    """The runs of batches as they arrive; all rows are in the bucket 0."""
    runs: list[Run] = []
    first = 0
    for rows in batches:
        batch = batch_of(rows, first)
        if spec.merge is Merge.APPEND:
            batch = batch.drop_columns(["seq"])
        hashes = np.array([weak(row[0]) for row in rows], np.uint64) if is_weak else None
        first_seq = first if spec.merge is Merge.APPEND else None
        runs += build_runs(spec, batch, first_seq=first_seq, max_rows=max_rows, hashes=hashes)
        first += len(rows)
    return runs


def assert_fresh(run: Run) -> None:
    """What the run was handed is what it would derive itself."""
    fresh = Run(run.bucket, run.directory, run.rows)
    assert run.nbytes == fresh.nbytes
    for name in ("hashes", "starts", "ts", "seq"):
        assert getattr(run, name).dtype == getattr(fresh, name).dtype
        assert getattr(run, name).tolist() == getattr(fresh, name).tolist()


def content(runs: list[Run]) -> Content:
    rows: Content = []
    for run in runs:
        columns = [column.to_pylist() for column in run.rows.columns]
        rows += zip(run.row_keys().to_pylist(), *columns, strict=True)
    return rows


def check(spec: StoreSpec, runs: list[Run], hash_of: Any, max_rows: int) -> None:
    """Each run keeps its promises, and together they ascend without overlapping (WS-INV-3, WS-INV-25)."""
    identities = [(hash_of(row[0]), *row[:3]) for row in content(runs)]
    assert identities == sorted(set(identities))
    for run in runs:
        assert 0 < run.row_count <= max_rows
        assert run.rows.schema == spec.rows
        lines = list(zip(run.hashes.tolist(), run.keys.to_pylist(), strict=True))
        assert lines == sorted({(hash_of(key), key) for key in run.keys.to_pylist()})
        assert run.starts[0] == 0
        assert (np.diff(run.starts) > 0).all()
        assert_fresh(run)
        run.rows.validate(full=True)
        run.directory.validate(full=True)


def in_order(rows: Content, hash_of: Any) -> Content:
    return sorted(rows, key=lambda row: (hash_of(row[0]), *row[:3]))


def text_of(value: float | None) -> str | None:
    return None if value is None else f"<{value}>"


limits = st.sampled_from([1, 3, 10, NO_LIMIT])


@settings(max_examples=120, deadline=None)
@given(some_batches, st.booleans(), limits, st.booleans())
def test_appended_runs_merge_to_all_rows_in_order(
    batches: list[list[Row]], is_weak: bool, max_rows: int, join: bool
) -> None:
    """WS-T8, WS-T99: overlapping runs become one sorted sequence; equal timestamps stand by seq."""
    hash_of = weak if is_weak else strong
    runs = merge_runs(APPEND, built(APPEND, batches, is_weak), max_rows=max_rows, join=join)
    check(APPEND, runs, hash_of, max_rows)
    rows = [row for batch in batches for row in batch]
    expected = [(key, ts, seq, value, text_of(value)) for seq, (key, ts, _, _, value) in enumerate(rows)]
    assert content(runs) == in_order(expected, hash_of)


@settings(max_examples=120, deadline=None)
@given(some_batches, st.booleans(), limits, st.booleans(), st.booleans())
def test_the_later_write_wins_and_tombstones_go_only_when_asked(
    batches: list[list[Row]], is_weak: bool, max_rows: int, join: bool, drop: bool
) -> None:
    hash_of = weak if is_weak else strong
    runs = merge_runs(LAST, built(LAST, batches, is_weak), max_rows=max_rows, join=join, drop_tombstones=drop)
    check(LAST, runs, hash_of, max_rows)
    kept: dict[tuple[bytes, int, int], Row] = {row[:3]: row for batch in batches for row in batch}
    expected = [(*row, text_of(row[4])) for row in kept.values() if not (drop and row[3])]
    assert content(runs) == in_order(expected, hash_of)


@settings(max_examples=120, deadline=None)
@given(some_batches, st.booleans(), limits, st.data())
def test_folded_runs_do_not_remember_how_they_were_cut(
    batches: list[list[Row]], is_weak: bool, max_rows: int, data: Any
) -> None:
    """Merging in any grouping of neighbours equals building one run of all rows, states byte for byte."""
    hash_of = weak if is_weak else strong
    runs = built(FOLD, batches, is_weak)
    while len(runs) > 1 and data.draw(st.booleans()):
        start = data.draw(st.integers(0, len(runs) - 2))
        stop = data.draw(st.integers(start + 2, len(runs)))
        runs[start:stop] = merge_runs(FOLD, runs[start:stop], max_rows=NO_LIMIT, join=True)
    merged = merge_runs(FOLD, runs, max_rows=max_rows, join=True)
    check(FOLD, merged, hash_of, max_rows)
    rows = [row for batch in batches for row in batch]
    at_once = built(FOLD, [rows], is_weak) if rows else []
    assert content(merged) == content(at_once)


@settings(max_examples=80, deadline=None)
@given(some_batches, st.data())
def test_any_order_of_compaction_gives_the_same_table(batches: list[list[Row]], data: Any) -> None:
    """Neighbours merged first, tombstones dropped only where the oldest run takes part."""
    runs = built(LAST, batches)
    expected = content(merge_runs(LAST, runs, max_rows=NO_LIMIT, drop_tombstones=True))
    parts = [[run] for run in runs]
    while len(parts) > 1:
        place = data.draw(st.integers(0, len(parts) - 2))
        together = parts[place] + parts[place + 1]
        merged = merge_runs(LAST, together, max_rows=NO_LIMIT, join=True, drop_tombstones=place == 0)
        parts[place : place + 2] = [merged]
    last = parts[0] if parts else []
    assert content(merge_runs(LAST, last, max_rows=NO_LIMIT, drop_tombstones=True)) == expected


@pytest.mark.parametrize("spec", [APPEND, LAST, FOLD], ids=lambda spec: f"WS-T7-{spec.merge.value}")
def test_runs_that_do_not_overlap_come_back_in_order_uncopied(spec: StoreSpec) -> None:
    later = built(spec, [[(b"k", ts, 0, False, 1.0) for ts in range(50, 60)]])
    earlier = built(spec, [[(b"k", ts, 0, False, 1.0) for ts in range(10, 17)]])
    merged = merge_runs(spec, later + earlier, max_rows=NO_LIMIT)
    assert merged[0] is earlier[0]
    assert merged[1] is later[0]
    assert [run.row_count for run in merged] == [7, 10]
    (joined,) = merge_runs(spec, later + earlier, max_rows=NO_LIMIT, join=True)
    assert joined.ts.tolist() == [*range(10, 17), *range(50, 60)]
    apart = merge_runs(spec, later + earlier, max_rows=16, join=True)
    assert apart[0] is earlier[0]
    assert apart[1] is later[0]


def test_only_the_runs_that_overlap_are_copied() -> None:
    runs = [
        built(APPEND, [[(b"k", ts, 0, False, 1.0) for ts in range(start, start + 10)]])[0]
        for start in (100, 0, 5, 200)
    ]
    merged = merge_runs(APPEND, runs, max_rows=NO_LIMIT)
    assert [run.row_count for run in merged] == [20, 10, 10]
    assert merged[1] is runs[0]
    assert merged[2] is runs[3]


@pytest.mark.parametrize(
    "pieces", [pytest.param(1, id="WS-T9-one-run"), pytest.param(5, id="WS-T9-five-runs")]
)
def test_a_merge_is_cut_at_the_most_rows_and_counts_each_byte_once(pieces: int) -> None:
    rows: list[Row] = [(b"k%d" % (number % 7), number % 50, 0, False, 1.0) for number in range(2500)]
    size = 2500 // pieces
    runs = built(APPEND, [rows[start : start + size] for start in range(0, 2500, size)])
    merged = merge_runs(APPEND, runs, max_rows=1024)
    assert [run.row_count for run in merged] == [1024, 1024, 452]
    check(APPEND, merged, strong, 1024)
    (whole,) = merge_runs(APPEND, runs, max_rows=NO_LIMIT)
    assert content(merged) == content([whole])
    # more only by the second line of a key that was cut in two, and an offset and rounded bits for each run
    assert 0 <= sum(run.nbytes for run in merged) - whole.nbytes < 2 * 100
    assert sum(run.nbytes for run in merged) < 1.1 * whole.nbytes


def test_a_fold_over_two_keys_with_one_hash_keeps_them_apart() -> None:
    """WS-T93 WS-INV-25"""
    batches: list[list[Row]] = [[(key, 0, 0, False, 1.0)] for key in (b"one", b"two", b"one", b"two", b"six")]
    runs = [
        build_runs(FOLD, batch_of(rows, 0), first_seq=None, max_rows=9, hashes=np.array([5], np.uint64))[0]
        for rows in batches
    ]
    (merged,) = merge_runs(FOLD, runs, max_rows=NO_LIMIT, join=True)
    assert merged.keys.to_pylist() == [b"one", b"six", b"two"]
    assert merged.rows.column("n").to_pylist() == [2, 1, 2]


def test_a_merge_that_drops_everything_leaves_no_run() -> None:
    runs = built(LAST, [[(b"a", 1, 0, False, 1.0)], [(b"a", 1, 0, True, None)]])
    assert merge_runs(LAST, runs, max_rows=NO_LIMIT, drop_tombstones=True) == []
    assert merge_runs(LAST, runs[1:], max_rows=NO_LIMIT, drop_tombstones=True) == []
    (kept,) = merge_runs(LAST, runs, max_rows=NO_LIMIT)
    assert kept.rows.column("deleted").to_pylist() == [True]


def test_runs_of_two_buckets_are_refused() -> None:
    runs = built(APPEND, [[(b"a", 1, 0, False, 1.0), (b"a", 70_000, 0, False, 1.0)]])
    with pytest.raises(InvalidError, match="buckets"):
        merge_runs(APPEND, runs, max_rows=NO_LIMIT)


@pytest.mark.parametrize("spec", [APPEND, LAST, FOLD], ids=lambda spec: spec.merge.value)
@settings(max_examples=60, deadline=None)
@given(batches=some_batches.filter(bool), is_weak=st.booleans(), keep=st.booleans(), data=st.data())
def test_keys_are_selected_by_hash_with_all_their_rows(
    spec: StoreSpec, batches: list[list[Row]], is_weak: bool, keep: bool, data: Any
) -> None:
    hash_of = weak if is_weak else strong
    (run,) = built(spec, batches[:1], is_weak)
    chosen = data.draw(st.sets(st.sampled_from([*run.hashes.tolist(), 1, 77])))
    selected = select_keys(run, np.array(sorted(chosen), np.uint64), keep=keep)
    expected = [row for row in content([run]) if (hash_of(row[0]) in chosen) is keep]
    assert content([selected] if selected else []) == expected
    if selected is None:
        return
    check(spec, [selected], hash_of, NO_LIMIT)
    if len(expected) == run.row_count:
        assert selected is run
    else:
        assert selected.rows.get_total_buffer_size() < run.rows.get_total_buffer_size()


@settings(max_examples=60, deadline=None)
@given(some_batches.filter(bool), st.data())
def test_a_slice_of_rows_is_a_run(batches: list[list[Row]], data: Any) -> None:
    (run,) = built(APPEND, batches[:1])
    start = data.draw(st.integers(0, run.row_count - 1))
    stop = data.draw(st.integers(start + 1, run.row_count))
    part = slice_rows(run, start, stop)
    check(APPEND, [part], strong, NO_LIMIT)
    assert content([part]) == content([run])[start:stop]
    # a slice merges, and is chosen from, as any run
    others = [slice_rows(run, 0, start)] if start else []
    rest = [slice_rows(run, stop, run.row_count)] if stop < run.row_count else []
    (whole,) = merge_runs(APPEND, [part, *others, *rest], max_rows=NO_LIMIT, join=True)
    assert content([whole]) == content([run])
    first = np.array([part.hashes[0]], np.uint64)
    chosen = select_keys(part, first, keep=True)
    assert content([chosen] if chosen else []) == [
        row for row in content([part]) if strong(row[0]) == first[0]
    ]


def test_a_slice_of_nothing_is_refused() -> None:
    (run,) = built(APPEND, [[(b"a", 1, 0, False, 1.0)]])
    with pytest.raises(InvalidError, match="nothing there"):
        slice_rows(run, 1, 1)
