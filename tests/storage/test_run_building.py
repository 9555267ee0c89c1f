"""Batches become runs: against a dictionary, with good and with hopeless hashes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.errors import InvalidError
from tidegate.storage.runs import build
from tidegate.storage.runs.aggregates import Count, Sum
from tidegate.storage.runs.build import build_runs
from tidegate.storage.runs.columns import hash_keys
from tidegate.storage.runs.run import Run
from tidegate.storage.spec import Merge, StoreSpec

NO_LIMIT = 1 << 30
WIDTH = 10
PAYLOAD = pa.schema([("v", pa.int64()), ("text", pa.string())])
APPEND = StoreSpec("events", Merge.APPEND, PAYLOAD, bucket_ms=WIDTH)
LAST = StoreSpec("table", Merge.LAST, PAYLOAD, bucket_ms=WIDTH)
FOLD = StoreSpec("sums", Merge.FOLD, aggregates=(Count("n"), Sum("total", "v", pa.int64())), bucket_ms=WIDTH)

Row = tuple[bytes, int, int, bool, int | None]  # key, ts, seq, deleted, value

some_keys = st.sampled_from([b"", b"a", b"b", b"ab", b"a much longer key, of forty bytes or so...", b"z" * 9])
some_rows = st.lists(
    st.tuples(
        some_keys, st.integers(-25, 25), st.integers(-1, 2), st.booleans(), st.none() | st.integers(-9, 9)
    ),
    max_size=80,
)


def weak(key: bytes) -> int:
    return len(key) % 2


def batch_of(rows: list[Row], *names: str) -> pa.RecordBatch:
    keys, ts, seq, deleted, values = (
        (list(column) for column in zip(*rows, strict=True)) if rows else ([],) * 5
    )
    columns = {
        "key": pa.array(keys, pa.binary()),
        "ts": pa.array(ts, pa.int64()),
        "seq": pa.array(seq, pa.int64()),
        "deleted": pa.array(deleted, pa.bool_()),
        "v": pa.array(values, pa.int64()),
        "text": pa.array([None if value is None else f"<{value}>" for value in values], pa.string()),
    }
    return pa.record_batch({name: columns[name] for name in ("key", "ts", *names)})


def hashes_of(rows: list[Row], is_weak: bool) -> Any:
    return np.array([weak(row[0]) for row in rows], np.uint64) if is_weak else None


def check_run(spec: StoreSpec, run: Run, hash_of: Any) -> None:
    """What every run promises (WS-INV-3, WS-INV-25)."""
    keys = run.keys.to_pylist()
    lines = list(zip(run.hashes.tolist(), keys, strict=True))
    assert lines == sorted(set(lines))
    assert [hash_of(key) for key in keys] == run.hashes.tolist()
    assert run.starts[0] == 0
    assert (np.diff(run.starts) > 0).all()
    cursors = list(zip(run.ts.tolist(), run.seq.tolist(), strict=True))
    for start, stop in zip(run.starts, run.starts[1:], strict=False):
        assert cursors[start:stop] == sorted(set(cursors[start:stop]))
    assert {spec.bucket_of(moment) for moment in run.ts.tolist()} == {run.bucket}
    assert run.rows.schema == spec.rows
    assert (run.min_ts, run.max_ts) == (min(run.ts), max(run.ts))
    assert_fresh(run)
    run.rows.validate(full=True)
    run.directory.validate(full=True)


def assert_fresh(run: Run) -> None:
    """What the run was handed is what it would derive itself."""
    fresh = Run(run.bucket, run.directory, run.rows)
    assert run.nbytes == fresh.nbytes
    for name in ("hashes", "starts", "ts", "seq"):
        assert getattr(run, name).dtype == getattr(fresh, name).dtype
        assert getattr(run, name).tolist() == getattr(fresh, name).tolist()


def content(runs: list[Run]) -> list[tuple[Any, ...]]:
    """(bucket, key, ts, seq, …) of every row, in the order of the runs."""
    rows = []
    for run in runs:
        keys = run.row_keys().to_pylist()
        columns = [column.to_pylist() for column in run.rows.columns]
        rows += [(run.bucket, *row) for row in zip(keys, *columns, strict=True)]
    return rows


def in_order(rows: list[tuple[Any, ...]], hash_of: Any) -> list[tuple[Any, ...]]:
    return sorted(rows, key=lambda row: (row[0], hash_of(row[1]), row[1], row[2], row[3]))


def strong(key: bytes) -> int:
    return int(xxhash.xxh64_intdigest(key))


@settings(max_examples=150, deadline=None)
@given(some_rows, st.booleans(), st.sampled_from([1, 2, 3, 7, NO_LIMIT]), st.integers(0, 5))
def test_appended_rows_come_out_sorted_each_once(
    rows: list[Row], is_weak: bool, max_rows: int, sliced: int
) -> None:
    """WS-T22, WS-T99: whatever order they came in; duplicate timestamps stand in order of arrival."""
    batch = batch_of(rows, "v", "text").slice(sliced)
    rows = rows[sliced:]
    hash_of = weak if is_weak else strong
    runs = build_runs(APPEND, batch, first_seq=100, max_rows=max_rows, hashes=hashes_of(rows, is_weak))
    expected = [
        (ts // WIDTH * WIDTH, key, ts, 100 + row, value, None if value is None else f"<{value}>")
        for row, (key, ts, _, _, value) in enumerate(rows)
    ]
    assert content(runs) == in_order(expected, hash_of)
    for run in runs:
        check_run(APPEND, run, hash_of)
        assert run.row_count <= max_rows
    assert [run.bucket for run in runs] == sorted(run.bucket for run in runs)
    if max_rows == NO_LIMIT:
        assert len({run.bucket for run in runs}) == len(runs)


@settings(max_examples=150, deadline=None)
@given(some_rows, st.booleans(), st.sampled_from([1, 4, NO_LIMIT]), st.booleans(), st.booleans())
def test_the_last_row_of_an_identity_stays_in_a_batch(
    rows: list[Row], is_weak: bool, max_rows: int, has_seq: bool, has_deleted: bool
) -> None:
    hash_of = weak if is_weak else strong
    names = [name for name, there in (("seq", has_seq), ("deleted", has_deleted)) if there]
    batch = batch_of(rows, *names, "v", "text")
    runs = build_runs(LAST, batch, first_seq=None, max_rows=max_rows, hashes=hashes_of(rows, is_weak))
    kept: dict[tuple[bytes, int, int], tuple[Any, ...]] = {}
    for key, ts, seq, deleted, value in rows:
        identity = (key, ts, seq if has_seq else 0)
        text = None if value is None else f"<{value}>"
        kept[identity] = (ts // WIDTH * WIDTH, *identity, deleted and has_deleted, value, text)
    assert content(runs) == in_order(list(kept.values()), hash_of)
    for run in runs:
        check_run(LAST, run, hash_of)


@settings(max_examples=150, deadline=None)
@given(some_rows, st.booleans(), st.sampled_from([1, 4, NO_LIMIT]), st.booleans())
def test_a_fold_makes_one_state_of_each_identity(
    rows: list[Row], is_weak: bool, max_rows: int, has_seq: bool
) -> None:
    hash_of = weak if is_weak else strong
    batch = batch_of(rows, *(("seq",) if has_seq else ()), "v")
    runs = build_runs(FOLD, batch, first_seq=None, max_rows=max_rows, hashes=hashes_of(rows, is_weak))
    states: dict[tuple[bytes, int, int], list[int | None]] = {}
    for key, ts, seq, _, value in rows:
        states.setdefault((key, ts, seq if has_seq else 0), []).append(value)
    expected = []
    for (key, ts, seq), values in states.items():
        numbers = [value for value in values if value is not None]
        total = sum(numbers) if numbers else None
        expected.append((ts // WIDTH * WIDTH, key, ts, seq, len(values), total))
    assert content(runs) == in_order(expected, hash_of)
    for run in runs:
        check_run(FOLD, run, hash_of)


@pytest.mark.parametrize(
    "spec", [pytest.param(APPEND, id="WS-T93-append"), pytest.param(LAST, id="WS-T93-last")]
)
def test_two_keys_with_one_hash_are_two_lines(spec: StoreSpec) -> None:
    rows: list[Row] = [(key, 3, 0, False, number) for number, key in enumerate([b"one", b"two", b"one"])]
    batch = batch_of(rows, "v", "text")
    first_seq = 0 if spec is APPEND else None
    (run,) = build_runs(spec, batch, first_seq=first_seq, max_rows=NO_LIMIT, hashes=np.full(3, 9, np.uint64))
    assert run.keys.to_pylist() == [b"one", b"two"]
    assert run.hashes.tolist() == [9, 9]
    values = {row[1]: row[-2] for row in content([run])}
    assert values == {b"one": 2, b"two": 1}


def test_many_keys_over_several_buckets_equal_a_sort_by_pyarrow() -> None:
    random = np.random.default_rng(3)
    numbers = random.integers(0, 90_000, 200_000)
    keys = pa.array(numbers.astype("<u4").view("V4").tolist(), pa.binary())
    ts = pa.array(random.integers(-50, 50, 200_000))
    batch = pa.record_batch(
        {"key": keys, "ts": ts, "v": pa.array(numbers), "text": pa.nulls(200_000, pa.string())}
    )
    runs = build_runs(APPEND, batch, first_seq=0, max_rows=NO_LIMIT)
    assert sum(run.row_count for run in runs) == 200_000
    expected = pa.table({"hash": hash_keys(keys), "ts": ts, "seq": np.arange(200_000), "v": numbers})
    bucket = np.floor_divide(expected["ts"].to_numpy(), WIDTH) * WIDTH
    expected = expected.append_column("bucket", pa.array(bucket))
    expected = expected.sort_by([(name, "ascending") for name in ("bucket", "hash", "ts", "seq")])
    for name in ("ts", "seq", "v"):
        got = np.concatenate([run.rows.column(name).to_numpy() for run in runs])
        assert (got == expected[name].to_numpy()).all()
    got = np.concatenate([np.repeat(run.hashes, np.diff(run.starts)) for run in runs])
    assert (got == expected["hash"].to_numpy()).all()


@settings(max_examples=60, deadline=None)
@given(some_rows, st.booleans())
def test_groups_that_are_too_far_apart_to_be_counted_come_out_the_same(
    rows: list[Row], is_weak: bool
) -> None:
    batch, hashes = batch_of(rows, "seq", "deleted", "v", "text"), hashes_of(rows, is_weak)
    with pytest.MonkeyPatch.context() as patch:
        counted = build_runs(LAST, batch, first_seq=None, max_rows=NO_LIMIT, hashes=hashes)
        patch.setattr(build, "MOST_BUCKETS", -1)
        compared = build_runs(LAST, batch, first_seq=None, max_rows=NO_LIMIT, hashes=hashes)
    assert content(counted) == content(compared)


def test_identities_are_the_same_with_and_without_a_sort() -> None:
    """Identities without a sort (each key at one time) equal those with one (some key at two times)."""
    random = np.random.default_rng(11)
    keys = [b"key-%d" % number for number in random.integers(0, 500, 3000)]
    values = random.integers(-100, 100, 3000).tolist()
    plain: list[Row] = [(key, 20, 0, False, value) for key, value in zip(keys, values, strict=True)]
    mixed: list[Row] = [*plain, (b"another", 21, 0, False, 1), (b"another", 22, 0, False, 1)]
    few, more = (
        content(build_runs(FOLD, batch_of(rows, "v"), first_seq=None, max_rows=NO_LIMIT))
        for rows in (plain, mixed)
    )
    assert few == [row for row in more if row[1] != b"another"]
    assert len(more) == len(few) + 2


def test_runs_of_one_batch_own_their_memory() -> None:
    rows: list[Row] = [(b"k", ts, 0, False, 1) for ts in range(100)]
    runs = build_runs(APPEND, batch_of(rows, "v", "text"), first_seq=0, max_rows=4)
    assert len(runs) == 30
    for run in runs:
        assert run.rows.get_total_buffer_size() <= run.rows.nbytes + 64
    states = build_runs(FOLD, batch_of(rows, "v"), first_seq=None, max_rows=4)
    for run in states:
        assert run.rows.get_total_buffer_size() <= run.rows.nbytes + 64


@pytest.mark.parametrize("spec", [APPEND, LAST, FOLD], ids=lambda spec: spec.merge.value)
def test_an_empty_batch_makes_no_run(spec: StoreSpec) -> None:
    first_seq = 0 if spec is APPEND else None
    assert build_runs(spec, batch_of([], "v", "text"), first_seq=first_seq, max_rows=5) == []


def test_large_binary_keys_are_taken_too() -> None:
    batch = batch_of([(b"a", 1, 0, False, 1)], "v", "text")
    batch = batch.set_column(0, "key", batch.column("key").cast(pa.large_binary()))
    (run,) = build_runs(APPEND, batch, first_seq=0, max_rows=5)
    assert run.keys.to_pylist() == [b"a"]


ONE: list[Row] = [(b"a", 1, 0, False, 1)]


@pytest.mark.parametrize(
    ("spec", "batch", "first_seq", "said"),
    [
        (APPEND, batch_of(ONE, "v", "text"), None, "first_seq or by a `seq` column"),
        (APPEND, batch_of(ONE, "seq", "v", "text"), 0, "first_seq or by a `seq` column"),
        (LAST, batch_of(ONE, "v", "text"), 0, "leave first_seq out"),
        (APPEND, batch_of(ONE, "v"), 0, "no single column 'text'"),
        (FOLD, batch_of(ONE, "text"), None, "no single column 'v'"),
        (
            APPEND,
            batch_of(ONE, "v", "text").rename_columns(["ts", "key", "v", "text"]),
            0,
            "column ts is binary",
        ),
        (
            APPEND,
            batch_of(ONE, "v", "text").set_column(0, "key", pa.array([None], pa.binary())),
            0,
            "column key has 1 nulls",
        ),
        (
            APPEND,
            batch_of(ONE, "v", "text").set_column(0, "key", pa.array(["a"])),
            0,
            "encode keys to binary",
        ),
        (APPEND, batch_of(ONE, "v", "text").set_column(2, "v", pa.array([1.0])), 0, "the store holds int64"),
        (APPEND, batch_of([(b"a", -(2**63), 0, False, 1)], "v", "text"), 0, "before 64-bit time"),
    ],
    ids=range(10),
)
def test_a_batch_that_does_not_fit_is_refused_by_name(
    spec: StoreSpec, batch: pa.RecordBatch, first_seq: int | None, said: str
) -> None:
    with pytest.raises(InvalidError, match=said):
        build_runs(spec, batch, first_seq=first_seq, max_rows=5)


def test_the_highest_timestamp_has_a_bucket() -> None:
    (run,) = build_runs(
        APPEND, batch_of([(b"a", 2**63 - 1, 0, False, 1)], "v", "text"), first_seq=0, max_rows=5
    )
    assert run.bucket == APPEND.bucket_of(2**63 - 1)


def test_one_key_in_buckets_half_of_all_time_apart_is_two_groups() -> None:
    """The two buckets add the same to the key's hash, so only comparing them tells them apart."""
    spec = StoreSpec("events", Merge.APPEND, PAYLOAD, bucket_ms=8)
    rows: list[Row] = [(b"a", ts, 0, False, 1) for ts in (0, -(2**63), 1, -(2**63) + 1)]
    runs = build_runs(spec, batch_of(rows, "v", "text"), first_seq=0, max_rows=NO_LIMIT)
    assert [(run.bucket, run.seq.tolist()) for run in runs] == [(-(2**63), [1, 3]), (0, [0, 2])]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=20), st.integers(0, 3))
def test_keys_of_a_slice_hash_as_their_own(keys: list[bytes], start: int) -> None:
    assert hash_keys(pa.array(keys, pa.binary())[start:]).tolist() == [strong(key) for key in keys[start:]]
