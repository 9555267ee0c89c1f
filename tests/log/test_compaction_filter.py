"""What compaction keeps, batch by batch, on hand-made bytes."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from batch_checks import check_batch
from tidegate.log.compaction_filter import CleanedTransactions, CleaningFilter, Kept, KeyMap, Rules
from tidegate.log.format.batch import BatchHeader, iter_headers
from tidegate.log.format.decode import decode, scan_batches
from tidegate.log.indexes import AbortedTxn
from tidegate.log.producer_state import BatchMetadata, ProducerEntry
from tidegate.randomness import SeededRandomness
from tidegate.testing.batches import CODECS, CodecName, Rec, build_batch, end_transaction_batch

NOW_MS = 1_700_000_000_000
DAY_MS = 86_400_000


def last_batch(producer_id: int, last_offset: int, epoch: int) -> ProducerEntry:
    """An active producer; its last data offset is -1 when only a marker is known."""
    batches = () if last_offset < 0 else (BatchMetadata(0, last_offset, 0, 0),)
    return ProducerEntry(producer_id, epoch, batches=batches)


def run(
    data: bytes,
    latest: dict[bytes, int],
    *,
    mapped_to: int = 10**9,
    round_end: int = 10**9,
    active: dict[int, ProducerEntry] | None = None,
    aborted: list[AbortedTxn] | None = None,
    now_ms: int = NOW_MS,
) -> Kept:
    key_map = KeyMap(SeededRandomness(1), memory_bytes=24_000)
    keys = pa.array(list(latest), pa.binary())
    key_map.put(keys, np.array(list(latest.values()), np.int64), np.ones(len(latest), bool))
    transactions = CleanedTransactions()
    transactions.announce(aborted or [])
    rules = Rules(now_ms, DAY_MS, mapped_to, round_end, 1 << 20)
    chosen = CleaningFilter(key_map, rules, active or {}, transactions)
    return chosen.filter(data, scan_batches(data), decode(data, topic="t", partition=0, control="include"))


def headers(kept: Kept) -> list[BatchHeader]:
    found = [header for _, header in iter_headers(kept.data)]
    position = 0
    for header in found:
        check_batch(kept.data, position)
        position += header.size
    assert position == len(kept.data)
    assert [header.size for header in found] == kept.sizes.tolist()
    assert [header.last_offset for header in found] == kept.last_offsets.tolist()
    assert [header.max_timestamp for header in found] == kept.max_timestamps.tolist()
    return found


def records(kept: Kept) -> list[tuple[int, bytes | None, bytes | None, int]]:
    table = decode(kept.data, topic="t", partition=0, control="include")
    times = table.column("timestamp").cast(pa.int64()).to_pylist()
    return list(
        zip(
            table.column("offset").to_pylist(),
            table.column("key").to_pylist(),
            table.column("value").to_pylist(),
            [-1 if time is None else time for time in times],
            strict=True,
        )
    )


def test_batch_that_loses_nothing_is_copied_byte_for_byte() -> None:
    data = build_batch([Rec(b"a", b"1", 5), Rec(b"b", b"2", 6)], base_offset=10, leader_epoch=4)
    kept = run(data, {b"a": 10, b"b": 11})
    assert kept.data == data
    assert (kept.records_read, kept.records_kept) == (2, 2)


@pytest.mark.parametrize("codec", CODECS)
def test_batch_that_loses_records_keeps_its_identity(codec: CodecName) -> None:
    data = build_batch(
        [
            Rec(b"a", b"1", 1000),
            Rec(b"b", b"2", 7000, (("h", b"x"), ("n", None))),
            Rec(b"c", b"3", 5000),
            Rec(b"d", b"4", 9000),
        ],
        base_offset=100,
        leader_epoch=4,
        codec=codec,
        producer_id=9,
        producer_epoch=2,
        base_sequence=50,
    )
    kept = run(data, {b"a": 500, b"b": 101, b"d": 600})
    (header,) = headers(kept)
    assert (header.base_offset, header.last_offset, header.count) == (100, 103, 2)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (9, 2, 50)
    assert header.last_sequence == 53
    assert (header.leader_epoch, header.codec.label) == (4, codec)
    assert (header.base_timestamp, header.max_timestamp) == (7000, 7000)
    assert records(kept) == [(101, b"b", b"2", 7000), (102, b"c", b"3", 5000)]
    table = decode(kept.data, topic="t", partition=0)
    assert table.column("headers").to_pylist()[0] == [
        {"key": "h", "value": b"x"},
        {"key": "n", "value": None},
    ]


def test_rebuilt_batch_equals_one_built_from_its_survivors() -> None:
    data = build_batch([Rec(b"a", b"1", 1000), Rec(b"b", b"2", 400), Rec(b"c", b"3", 900)], base_offset=7)
    expected = build_batch(
        [Rec(b"b", b"2", 400, offset_delta=1), Rec(b"c", b"3", 900, offset_delta=2)],
        base_offset=7,
        last_offset_delta=2,
    )
    assert run(data, {b"a": 99}).data == expected


def test_log_append_time_batch_keeps_its_append_time() -> None:
    data = build_batch(
        [Rec(b"a", b"1", 1000), Rec(b"b", b"2", 2000)],
        base_offset=0,
        log_append_time=77_000,
        max_timestamp=77_000,
    )
    kept = run(data, {b"a": 50})
    (header,) = headers(kept)
    assert (header.base_timestamp, header.max_timestamp) == (77_000, 77_000)
    assert records(kept) == [(1, b"b", b"2", 77_000)]


def test_records_without_timestamps_stay_without() -> None:
    data = build_batch([Rec(b"a", b"1", -1), Rec(b"b", b"2", -1)])
    kept = run(data, {b"a": 50})
    (header,) = headers(kept)
    assert (header.base_timestamp, header.max_timestamp) == (-1, -1)
    assert records(kept) == [(1, b"b", b"2", -1)]


def test_offsets_beyond_the_map_are_kept_whatever_their_keys() -> None:
    data = build_batch([Rec(b"a", b"1"), Rec(None, b"2"), Rec(b"a", b"3")], base_offset=10)
    assert [row[0] for row in records(run(data, {b"a": 99}, mapped_to=10))] == [11, 12]


def test_unkeyed_records_are_dropped__LS_C6() -> None:
    data = build_batch([Rec(None, b"1"), Rec(b"k", b"2"), Rec(None, b"3")])
    assert [row[1] for row in records(run(data, {b"k": 1}))] == [b"k"]


def test_unknown_key_is_kept() -> None:
    data = build_batch([Rec(b"only", b"1")])
    assert run(data, {}).data == data


# -- tombstones ----------------------------------------------------------------------------------


def test_kept_tombstone_gets_a_delete_horizon_once() -> None:
    data = build_batch([Rec(b"a", None, 1000), Rec(b"b", b"2", 2000)], base_offset=4)
    first = run(data, {b"a": 4, b"b": 5})
    (header,) = headers(first)
    assert header.delete_horizon_ms == NOW_MS + DAY_MS
    assert header.base_timestamp > header.max_timestamp == 2000
    assert records(first) == [(4, b"a", None, 1000), (5, b"b", b"2", 2000)]
    again = run(first.data, {b"a": 4, b"b": 5}, now_ms=NOW_MS + DAY_MS - 1)
    assert again.data == first.data
    gone = run(first.data, {b"a": 4, b"b": 5}, now_ms=NOW_MS + DAY_MS)
    (header,) = headers(gone)
    assert header.delete_horizon_ms == NOW_MS + DAY_MS
    assert records(gone) == [(5, b"b", b"2", 2000)]


def test_superseded_tombstone_goes_at_once() -> None:
    data = build_batch([Rec(b"a", None, 1000), Rec(b"b", b"2", 2000)])
    kept = run(data, {b"a": 10, b"b": 1})
    assert headers(kept)[0].delete_horizon_ms is None
    assert [row[0] for row in records(kept)] == [1]


def test_horizon_of_a_log_append_time_batch_leaves_its_times() -> None:
    data = build_batch([Rec(b"a", None, 5)], log_append_time=9000, max_timestamp=9000)
    kept = run(data, {b"a": 0})
    assert headers(kept)[0].delete_horizon_ms == NOW_MS + DAY_MS
    assert records(kept) == [(0, b"a", None, 9000)]


def test_horizon_never_overflows() -> None:
    data = build_batch([Rec(b"a", None, 5)])
    kept = run(data, {b"a": 0}, now_ms=2**63 - 10)
    assert headers(kept)[0].delete_horizon_ms == 2**63 - 1
    assert records(kept) == [(0, b"a", None, 5)]


# -- batches that stay for their offsets -------------------------------------------------------------


def producer_batch(base_offset: int, producer_id: int, sequence: int, codec: CodecName = "none") -> bytes:
    return build_batch(
        [Rec(b"k", b"v", 100), Rec(b"k", b"w", 200)],
        base_offset=base_offset,
        codec=codec,
        producer_id=producer_id,
        producer_epoch=1,
        base_sequence=sequence,
    )


def test_last_batch_of_an_active_producer_stays_as_a_header__LS_C2() -> None:
    data = producer_batch(0, 1, 0) + producer_batch(2, 1, 2, codec="gzip") + producer_batch(4, 2, 0)
    active = {1: last_batch(1, 3, 1), 7: last_batch(7, 99, 1)}
    kept = run(data, {b"k": 1000}, active=active)
    (header,) = headers(kept)
    assert (header.base_offset, header.last_offset, header.count, header.size) == (2, 3, 0, 61)
    assert (header.producer_id, header.base_sequence, header.last_sequence) == (1, 2, 3)
    assert (header.base_timestamp, header.max_timestamp, header.codec.label) == (-1, 200, "none")
    again = run(kept.data, {b"k": 1000}, active=active)
    assert again.data == kept.data
    assert run(kept.data, {b"k": 1000}).data == b""


def test_last_batch_below_the_end_of_the_round_stays_as_a_header() -> None:
    data = producer_batch(0, 1, 0) + producer_batch(2, 1, 2)
    assert [header.base_offset for header in headers(run(data, {b"k": 1000}, round_end=4))] == [2]
    assert run(data, {b"k": 1000}, round_end=5).data == b""


def test_marker_is_the_last_batch_of_a_producer_known_by_a_marker_only() -> None:
    horizon = {"delete_horizon_ms": NOW_MS}
    marker = end_transaction_batch("COMMIT", producer_id=5, producer_epoch=3, base_offset=8)
    with_horizon = build_batch(
        [Rec(b"\0\0\0\1", b"\0\0\0\0\0\0", 50)],
        base_offset=8,
        transactional=True,
        control=True,
        producer_id=5,
        producer_epoch=3,
        **horizon,
    )
    first = run(marker, {}, active={5: last_batch(5, -1, 3)})
    assert headers(first)[0].delete_horizon_ms == NOW_MS + DAY_MS
    (header,) = headers(run(with_horizon, {}, active={5: last_batch(5, -1, 3)}))
    assert (header.count, header.is_control, header.producer_epoch) == (0, True, 3)
    assert run(with_horizon, {}, active={5: last_batch(5, -1, 4)}).data == b""
    emptied = run(with_horizon, {}, active={5: last_batch(5, -1, 3)}).data
    assert run(emptied, {}, active={5: last_batch(5, -1, 3)}).data == emptied


# -- transactions ------------------------------------------------------------------------------------


def transactional(base_offset: int, key: bytes, producer_id: int = 1) -> bytes:
    return build_batch(
        [Rec(key, b"v", 100)],
        base_offset=base_offset,
        transactional=True,
        producer_id=producer_id,
        producer_epoch=0,
        base_sequence=base_offset,
    )


def test_aborted_data_goes_and_its_marker_stays_with_its_index_entry() -> None:
    aborted = AbortedTxn(1, 0, 2, 3)
    data = transactional(0, b"a") + transactional(1, b"b", producer_id=2)
    data += end_transaction_batch("ABORT", producer_id=1, producer_epoch=0, base_offset=2)
    data += end_transaction_batch("COMMIT", producer_id=2, producer_epoch=0, base_offset=3)
    kept = run(data, {b"b": 1}, aborted=[aborted])
    assert [header.base_offset for header in headers(kept)] == [1, 2, 3]
    assert all(header.delete_horizon_ms is None for header in headers(kept))
    assert kept.aborted == [aborted]
    later = run(kept.data, {b"b": 1}, aborted=[aborted])
    assert later.aborted == []
    assert [header.delete_horizon_ms for header in headers(later)] == [None, NOW_MS + DAY_MS, None]
    gone = run(later.data, {b"b": 1}, now_ms=NOW_MS + DAY_MS)
    assert [header.base_offset for header in headers(gone)] == [1, 3]


def test_key_of_an_aborted_record_supersedes_nothing_here_and_is_dropped_even_beyond_the_map() -> None:
    data = transactional(5, b"a")
    kept = run(data, {}, aborted=[AbortedTxn(1, 5, 9, 10)], mapped_to=-1)
    assert kept.data == b""


def test_order_of_verbatim_rebuilt_and_emptied_batches_is_kept() -> None:
    batches = []
    for number in range(30):
        batches.append(
            build_batch(
                [Rec(b"old", b"x", 1), Rec(b"new-%d" % number, b"y", 2)]
                if number % 3
                else [Rec(b"z", b"v", 3)],
                base_offset=number * 2,
                last_offset_delta=1,
                producer_id=number,
                producer_epoch=0,
                base_sequence=0,
            )
        )
    latest = {b"old": 10**6, b"z": 10**6}
    kept = run(b"".join(batches), latest, active={0: last_batch(0, 1, 0), 15: last_batch(15, 31, 0)})
    expected = [number for number in range(30) if number % 3 or number in (0, 15)]
    assert [header.base_offset // 2 for header in headers(kept)] == expected
    assert [row[0] for row in records(kept)] == [number * 2 + 1 for number in range(30) if number % 3]
