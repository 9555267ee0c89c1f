"""Appending: Kafka's checks and order of steps (rows U2-U7, U17, U20, U21, V1), and what failures leave."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from log_partitions import START_MS, Place, one_record, records
from tidegate.errors import CorruptError, FencedError, InvalidError, TidegateError, UnavailableError
from tidegate.files import Files
from tidegate.log.format.batch import BatchHeader, Codec, RecordFacts
from tidegate.log.format.decode import decode
from tidegate.log.partition import PartitionLog
from tidegate.log.producer_state import Origin
from tidegate.testing.batches import CODECS, CodecName, Rec, build_batch, end_transaction_batch
from tidegate.testing.faults import FailAt, ShortDisk


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def bases(log: PartitionLog) -> list[int]:
    return [segment.base_offset for segment in log.segments]


def stored(log: PartitionLog) -> list[BatchHeader]:
    return [header for segment in log.segments for _, header in segment.batches()]


def replicate(log: PartitionLog, batch: bytes) -> Any:
    return log.append(batch, origin=Origin.REPLICATION)


# -- rolling -------------------------------------------------------------------------------------


@pytest.mark.parametrize("segment_ms", [pytest.param(3600, id="LS-U2")])
def test_without_timestamps_a_segment_rolls_by_the_wall_clock_but_never_empty(
    place: Place, segment_ms: int
) -> None:
    log = place.open(segment_ms=segment_ms)
    place.clock.advance(segment_ms + 1)
    log.append(one_record())
    assert len(log.segments) == 1
    log.append(one_record())
    assert len(log.segments) == 2
    for count in (3, 4, 5):
        place.clock.advance(segment_ms + 1)
        log.append(one_record())
        assert len(log.segments) == count
    for _ in range(10):
        log.append(one_record())
    log.append(b"")
    assert len(log.segments) == 5


@pytest.mark.parametrize("segment_ms", [pytest.param(3600, id="LS-U3")])
def test_with_timestamps_only_record_time_counts(place: Place, segment_ms: int) -> None:
    log = place.open(segment_ms=segment_ms)
    now = place.clock.now_ms()
    log.append(one_record(timestamp=now))
    place.clock.advance(segment_ms + 1)
    log.append(one_record(timestamp=now))
    assert len(log.segments) == 1
    log.append(one_record(timestamp=now + segment_ms))
    assert len(log.segments) == 1
    log.append(one_record(timestamp=now + segment_ms + 1))
    assert len(log.segments) == 2
    log.append(b"")
    place.clock.advance(10 * segment_ms)
    log.append(b"")
    assert len(log.segments) == 2


@pytest.mark.parametrize("jitter_ms", [pytest.param(1200, id="LS-U4")])
def test_jitter_is_drawn_once_per_segment_and_shortens_its_age(place: Place, jitter_ms: int) -> None:
    log = place.open(segment_ms=3600, segment_jitter_ms=jitter_ms)
    jitter = log.active_segment.roll_jitter_ms
    assert 0 < jitter < jitter_ms
    log.append(one_record(timestamp=1000))
    log.append(one_record(timestamp=1000 + 3600 - jitter))
    assert len(log.segments) == 1
    log.append(one_record(timestamp=1001 + 3600 - jitter))
    assert len(log.segments) == 2
    assert log.active_segment.roll_jitter_ms != jitter


@pytest.mark.parametrize("batches", [pytest.param(11, id="LS-U5")])
def test_a_segment_rolls_by_size(place: Place, batches: int) -> None:
    log = place.open(segment_bytes=10 * 71)
    for _ in range(batches):
        assert log.append(one_record()).size == 72
    assert bases(log) == [0, 9]


@pytest.mark.parametrize(
    ("settings", "origin", "kafka_name"),
    [
        pytest.param({"segment_bytes": 71}, Origin.CLIENT, "RECORD_LIST_TOO_LARGE", id="LS-U6-segment"),
        pytest.param({"max_message_bytes": 71}, Origin.CLIENT, "MESSAGE_TOO_LARGE", id="LS-U6-message"),
        pytest.param({"max_message_bytes": 71}, Origin.REPLICATION, None, id="LS-U6-follower"),
        pytest.param(
            {"segment_bytes": 71}, Origin.REPLICATION, "RECORD_LIST_TOO_LARGE", id="LS-U6-follower-segment"
        ),
        pytest.param({"segment_bytes": 72, "max_message_bytes": 72}, Origin.CLIENT, None, id="LS-U6-fits"),
    ],
)
def test_batches_that_are_too_large(
    place: Place, settings: dict[str, int], origin: Origin, kafka_name: str | None
) -> None:
    log = place.open(**settings)
    if kafka_name is None:
        assert log.append(one_record(), origin=origin).size == 72
        return
    with pytest.raises(InvalidError) as caught:
        log.append(one_record(), origin=origin)
    assert caught.value.kafka_name == kafka_name
    assert (log.log_end_offset, log.active_segment.size) == (0, 0)


@pytest.mark.parametrize(
    "broken", [pytest.param("offsets", id="LS-U7-index"), pytest.param("times", id="LS-U7-timeindex")]
)
def test_an_empty_active_segment_with_a_full_index_is_made_anew(place: Place, broken: str) -> None:
    log = place.open()
    log.append(one_record())
    log.roll()
    empty = log.active_segment
    empty.grow_indexes(10 << 20)
    getattr(empty, broken).resize(0)
    log.append(one_record())
    assert bases(log) == [0, 1]
    assert log.active_segment is not empty
    assert log.active_segment.size == 72
    assert place.size(f"{1:020d}.index") == 10 << 20
    assert place.names(".deleted")
    place.clock.advance("61s")
    place.scheduler.run_due()
    assert not place.names(".deleted")
    assert log.fetch(1, max_bytes=100, isolation=_log_end()).data


def _log_end() -> Any:
    from tidegate.log.fetch import Isolation

    return Isolation.LOG_END


def test_rolling_an_empty_active_segment_keeps_the_number_of_segments(place: Place) -> None:
    log = place.open()
    log.roll()
    assert bases(log) == [0]
    log.append(one_record())
    log.roll()
    log.roll()
    assert bases(log) == [0, 1]


@pytest.mark.parametrize("appends", [pytest.param(100, id="LS-U17")])
def test_follower_appends_index_every_batch_but_the_first(place: Place, appends: int) -> None:
    log = place.open(index_interval_bytes=1)
    for offset in range(appends):
        replicate(log, one_record(timestamp=offset + 10, base_offset=offset))
    times = log.active_segment.times
    assert times.entries == appends - 1
    assert times.last_entry == (appends + 9, appends - 1)


def test_many_batches_in_one_follower_append_are_indexed_one_by_one(place: Place) -> None:
    log = place.open(index_interval_bytes=1)
    many = b"".join(one_record(timestamp=offset, base_offset=offset, leader_epoch=3) for offset in range(20))
    info = replicate(log, many + b"\0" * 20)
    assert (info.first_offset, info.last_offset, info.size) == (0, 19, 20 * 72)
    assert [entry.offset for entry in log.active_segment.offsets] == list(range(1, 20))
    assert [tuple(entry) for entry in log._epochs.entries] == [(3, 0)]


def test_an_index_filled_in_the_middle_of_an_append_rolls_with_the_next(place: Place) -> None:
    log = place.open(index_interval_bytes=0, segment_index_bytes=48)
    for _ in range(8):
        log.append(one_record(timestamp=log.log_end_offset + 1))
    # 48 bytes hold four time entries, one of them kept: full at three, which is the fourth batch
    assert bases(log) == [0, 4]


# -- checks (V1) ---------------------------------------------------------------------------------

TWO = bytes(one_record() + one_record())
REFUSED = [
    pytest.param(one_record(base_offset=1), {}, "INVALID_RECORD", id="LS-V1-base-offset"),
    pytest.param(TWO, {}, "INVALID_RECORD", id="LS-V1-two-batches"),
    pytest.param(records(2, count=3), {}, "INVALID_RECORD", id="LS-V1-count"),
    pytest.param(records(2, last_offset_delta=2), {}, "INVALID_RECORD", id="LS-V1-delta"),
    pytest.param(records(1, last_offset_delta=-1), {}, "INVALID_RECORD", id="LS-V1-negative-delta"),
    pytest.param(records(0, last_offset_delta=0), {}, "INVALID_RECORD", id="LS-V1-empty"),
    pytest.param(one_record(control=True), {}, "INVALID_RECORD", id="LS-V1-control"),
    pytest.param(
        one_record(producer_id=1, producer_epoch=0), {}, "INVALID_RECORD", id="LS-V1-no-sequence"
    ),
    pytest.param(
        one_record(), {"cleanup_policy": frozenset({"compact"})}, "INVALID_RECORD", id="LS-V1-null-key"
    ),
    pytest.param(one_record(crc=1), {}, "CORRUPT_MESSAGE", id="bad CRC"),
    pytest.param(one_record()[:-1], {}, "CORRUPT_MESSAGE", id="cut short"),
    pytest.param(one_record()[:40], {}, "CORRUPT_MESSAGE", id="no header"),
    pytest.param(one_record(magic=1), {}, "CORRUPT_MESSAGE", id="old magic"),
    pytest.param(one_record(body=b"\x20" + b"\0" * 10), {}, "INVALID_RECORD", id="record too long"),
    pytest.param(one_record(body=b"\0\0\0\0\0\0\0\0"), {}, "INVALID_RECORD", id="bytes behind the records"),
    pytest.param(
        one_record(timestamp=START_MS - 1001), {"message_timestamp_before_max_ms": 1000}, "INVALID_TIMESTAMP",
        id="too old",
    ),
    pytest.param(
        one_record(timestamp=START_MS + 1001), {"message_timestamp_after_max_ms": 1000}, "INVALID_TIMESTAMP",
        id="too new",
    ),
    pytest.param(
        one_record(timestamp=1, log_append_time=5), {"message_timestamp_type": "LogAppendTime"},
        "INVALID_TIMESTAMP", id="client sets LogAppendTime",
    ),
]  # fmt: skip


@pytest.mark.parametrize("as_bytearray", [True, False], ids=["bytearray", "bytes"])
@pytest.mark.parametrize(("batch", "settings", "kafka_name"), REFUSED)
def test_a_client_batch_that_cannot_be_accepted_is_refused_and_nothing_is_written(
    place: Place, batch: bytes, settings: dict[str, Any], kafka_name: str, as_bytearray: bool
) -> None:
    log = place.open(**settings)
    handed = bytearray(batch) if as_bytearray else bytes(batch)
    with pytest.raises(TidegateError) as caught:
        log.append(handed)
    assert caught.value.kafka_name == kafka_name
    assert "orders-0" in str(caught.value) or isinstance(caught.value, CorruptError)
    assert handed == batch
    assert (log.log_end_offset, log.active_segment.size, place.size(f"{0:020d}.log")) == (0, 0, 0)


@pytest.mark.parametrize(
    ("timestamp", "settings"),
    [
        (START_MS - 1000, {"message_timestamp_before_max_ms": 1000}),
        (START_MS + 1000, {"message_timestamp_after_max_ms": 1000}),
        (-1, {"message_timestamp_before_max_ms": 0, "message_timestamp_after_max_ms": 0}),
    ],
    ids=["oldest", "newest", "none"],
)
def test_timestamps_at_the_limits_are_accepted(
    place: Place, timestamp: int, settings: dict[str, int]
) -> None:
    assert place.open(**settings).append(one_record(timestamp=timestamp)).first_offset == 0


def test_keyed_records_enter_a_compacted_topic(place: Place) -> None:
    log = place.open(cleanup_policy=frozenset({"compact"}))
    assert log.append(one_record(key=b"k")).last_offset == 0


def test_facts_from_the_caller_are_judged_like_those_read_from_the_records(place: Place) -> None:
    log = place.open(cleanup_policy=frozenset({"compact"}))
    with pytest.raises(InvalidError, match="no key"):
        log.append(one_record(key=b"k"), facts=RecordFacts(1, -1, -1, 0, 1, True))


# -- stamping ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [bytearray, bytes, memoryview])
def test_offsets_and_epoch_are_stamped_without_touching_the_checksum(place: Place, kind: Any) -> None:
    log = place.open()
    crcs = []
    for count in (1, 3, 2):
        batch = records(count, timestamp=7)
        crcs.append(BatchHeader.parse(batch).crc)
        log.append(kind(batch), leader_epoch=4)
    assert [(h.base_offset, h.last_offset, h.leader_epoch, h.crc) for h in stored(log)] == [
        (0, 0, 4, crcs[0]),
        (1, 3, 4, crcs[1]),
        (4, 5, 4, crcs[2]),
    ]
    assert (place.folder / "leader-epoch-checkpoint").read_text() == "0\n1\n4 0\n"


def test_a_bytearray_is_stamped_in_place_and_other_buffers_are_left_alone(place: Place) -> None:
    log = place.open()
    log.append(one_record())
    in_place, alone = one_record(), bytes(one_record())
    log.append(in_place)
    log.append(alone)
    assert BatchHeader.parse(in_place).base_offset == 1
    assert BatchHeader.parse(alone).base_offset == 0


def test_log_append_time_overwrites_the_timestamps(place: Place) -> None:
    log = place.open(message_timestamp_type="LogAppendTime")
    info = log.append(records(2, timestamp=5))
    assert (info.max_timestamp, info.log_append_time) == (START_MS, START_MS)
    fetched = log.fetch(0, max_bytes=1000, isolation=_log_end()).data
    times = decode(fetched, topic="orders", partition=0).column("timestamp").cast("int64").to_pylist()
    assert times == [START_MS, START_MS]
    assert log.active_segment.largest.timestamp == START_MS


def test_a_clients_log_append_time_flag_is_reset_on_a_create_time_topic(place: Place) -> None:
    log = place.open()
    log.append(one_record(timestamp=9, log_append_time=9))
    header = stored(log)[0]
    assert (header.timestamp_type.label, header.max_timestamp) == ("CreateTime", 9)
    decode(log.fetch(0, max_bytes=1000, isolation=_log_end()).data, topic="t", partition=0)


def test_a_wrong_maximum_timestamp_is_put_right(place: Place) -> None:
    log = place.open()
    info = log.append(one_record(timestamp=9, max_timestamp=999))
    assert info.max_timestamp == 9
    assert stored(log)[0].max_timestamp == 9
    assert log.active_segment.largest == (9, 0)


@pytest.mark.parametrize("target", ["uncompressed", "gzip", "snappy", "lz4", "zstd"])
@pytest.mark.parametrize("source", CODECS)
def test_a_batch_is_recompressed_when_the_topic_says_so(place: Place, source: CodecName, target: str) -> None:
    log = place.open(compression_type=target)
    batch = records(
        5, timestamp=3, value=b"x" * 50, codec=source, producer_id=9, producer_epoch=1, base_sequence=4
    )
    log.append(batch)
    header = stored(log)[0]
    assert header.codec is (Codec.NONE if target == "uncompressed" else Codec[target.upper()])
    assert (header.count, header.producer_id, header.producer_epoch, header.base_sequence) == (5, 9, 1, 4)
    table = decode(log.fetch(0, max_bytes=10_000, isolation=_log_end()).data, topic="t", partition=0)
    assert table.column("value").to_pylist() == [b"x" * 50] * 5
    assert table.column("offset").to_pylist() == [0, 1, 2, 3, 4]


def test_compressed_records_with_odd_offset_deltas_are_rebuilt(place: Place) -> None:
    log = place.open()
    odd = [
        Rec(None, b"a", 1, offset_delta=0),
        Rec(None, b"b", 2, offset_delta=0),
        Rec(None, b"c", 3, offset_delta=2),
    ]
    log.append(build_batch(odd, codec="gzip"))
    table = decode(log.fetch(0, max_bytes=10_000, isolation=_log_end()).data, topic="t", partition=0)
    assert table.column("offset").to_pylist() == [0, 1, 2]
    assert table.column("value").to_pylist() == [b"a", b"b", b"c"]


# -- given offsets -------------------------------------------------------------------------------


def test_a_follower_keeps_offsets_and_gaps(place: Place) -> None:
    log = place.open()
    replicate(log, one_record(base_offset=5))
    replicate(log, one_record(base_offset=9))
    assert [header.base_offset for header in stored(log)] == [5, 9]
    assert log.log_end_offset == 10


@pytest.mark.parametrize(
    "batch",
    [one_record(base_offset=4), one_record(base_offset=7) + one_record(base_offset=7)],
    ids=["below the end", "not ascending"],
)
def test_a_follower_refuses_offsets_that_go_back(place: Place, batch: bytes) -> None:
    log = place.open()
    replicate(log, one_record(base_offset=5))
    with pytest.raises(InvalidError) as caught:
        replicate(log, batch)
    assert caught.value.kafka_name == "UNEXPECTED_APPEND_OFFSET"
    assert log.log_end_offset == 6


def test_a_follower_rolls_at_the_offset_of_the_append(place: Place) -> None:
    log = place.open(segment_bytes=100)
    replicate(log, one_record(base_offset=0))
    replicate(log, one_record(base_offset=50))
    assert bases(log) == [0, 50]


def test_a_follower_rolls_before_an_offset_that_does_not_fit(place: Place) -> None:
    log = place.open()
    replicate(log, one_record(base_offset=0))
    replicate(log, one_record(base_offset=2**31))
    assert bases(log) == [0, 2**31]


def test_a_new_leader_epoch_is_on_disk_with_its_first_offset(place: Place) -> None:
    log = place.open()
    for epoch in (0, 0, 2, 2, 5):
        log.append(one_record(), leader_epoch=epoch)
    assert (place.folder / "leader-epoch-checkpoint").read_text() == "0\n3\n0 0\n2 2\n5 4\n"


# -- producers -----------------------------------------------------------------------------------


def produce(log: PartitionLog, sequence: int, count: int = 1, *, epoch: int = 0, **options: Any) -> Any:
    return log.append(
        records(count, timestamp=1, producer_id=1, producer_epoch=epoch, base_sequence=sequence), **options
    )


@pytest.mark.parametrize("back", [pytest.param(back, id=f"LS-U21-{back}") for back in range(1, 6)])
def test_the_last_five_batches_are_known_as_duplicates(place: Place, back: int) -> None:
    log = place.open()
    first = {sequence: produce(log, sequence, 2) for sequence in range(0, 20, 2)}
    end = log.log_end_offset
    again = produce(log, 20 - 2 * back, 2)
    assert again.duplicate
    assert again[:2] == first[20 - 2 * back][:2]
    assert (log.log_end_offset, again.size) == (end, 0)


@pytest.mark.parametrize(
    ("sequence", "count"),
    [
        pytest.param(0, 2, id="LS-U21-older"),
        pytest.param(18, 1, id="LS-U21-part"),
        pytest.param(17, 2, id="LS-U21-overlap"),
        pytest.param(21, 1, id="LS-U21-gap"),
    ],
)
def test_older_batches_overlaps_and_gaps_are_out_of_order(place: Place, sequence: int, count: int) -> None:
    log = place.open()
    for start in range(0, 20, 2):
        produce(log, start, 2)
    with pytest.raises(InvalidError) as caught:
        produce(log, sequence, count)
    assert caught.value.kafka_name == "OUT_OF_ORDER_SEQUENCE_NUMBER"
    assert log.log_end_offset == 20
    assert produce(log, 20).first_offset == 20


def test_a_follower_takes_duplicates(place: Place) -> None:
    log = place.open()
    for offset in range(2):
        replicate(
            log, one_record(base_offset=offset, producer_id=1, producer_epoch=0, base_sequence=0, timestamp=1)
        )
    assert log.log_end_offset == 2


def test_a_duplicate_may_roll_first_and_leaves_the_callers_buffer_alone(place: Place) -> None:
    log = place.open(segment_bytes=150)
    produce(log, 0)
    produce(log, 1)
    batch = records(1, timestamp=1, producer_id=1, producer_epoch=0, base_sequence=1)
    before = bytes(batch)
    assert log.append(batch).duplicate
    assert bytes(batch) == before
    assert bases(log) == [0, 2]


def test_an_old_epoch_is_fenced(place: Place) -> None:
    log = place.open()
    produce(log, 0, epoch=1)
    with pytest.raises(FencedError) as caught:
        produce(log, 1, epoch=0)
    assert caught.value.kafka_name == "INVALID_PRODUCER_EPOCH"


def test_a_coordinator_may_write_markers_and_a_client_may_not(place: Place) -> None:
    log = place.open()
    log.append(one_record(timestamp=1, producer_id=1, producer_epoch=0, base_sequence=0, transactional=True))
    marker = end_transaction_batch("ABORT", producer_id=1, producer_epoch=0, timestamp=5)
    with pytest.raises(InvalidError, match="control batch"):
        log.append(marker)
    log.append(marker, origin=Origin.COORDINATOR)
    assert list(log.active_segment.transactions) == [(1, 0, 1, 2)]


@pytest.mark.parametrize("rolls", [pytest.param((1, 2, 3), id="LS-U20")])
def test_every_roll_takes_a_snapshot_and_flushing_keeps_them(place: Place, rolls: tuple[int, ...]) -> None:
    log = place.open()
    for offset in rolls:
        produce(log, offset - 1)
        log.roll()
    expected = [f"{offset:020d}.snapshot" for offset in rolls]
    assert place.names(".snapshot") == expected
    log.flush()
    assert place.names(".snapshot") == expected
    log.acknowledge(sync=True)
    log.delete_segments(log.segments[:2], reason="test")
    assert place.names(".snapshot") == expected[1:]
    assert log.log_start_offset == 2


# -- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("torn_bytes", [0, 50])
def test_a_full_disk_refuses_appends_and_lets_them_through_again(place: Place, torn_bytes: int) -> None:
    fault = FailAt(10**9, errno.ENOSPC, kinds={"write", "create"}, persistent=True, torn_bytes=torn_bytes)
    place.files = Files(watch=fault)
    log = place.open(segment_bytes=300, index_interval_bytes=70)
    for _ in range(6):
        log.append(one_record(timestamp=log.log_end_offset))
    log.acknowledge(sync=True)
    fault.n = 0
    batch = one_record(timestamp=6)
    before = bytes(batch)
    for _ in range(3):
        with pytest.raises(UnavailableError, match="disk is full"):
            log.append(batch)
        assert bytes(batch) == before
    assert (log.log_end_offset, log.high_watermark) == (6, 6)
    fault.lift()
    for _ in range(20):
        log.append(one_record(timestamp=log.log_end_offset))
    log.acknowledge(sync=True)
    log = place.reopen(log, clean=False, recovery_point=0)
    assert [header.base_offset for header in stored(log)] == list(range(26))


@pytest.mark.parametrize("n", range(1, 30))
def test_any_one_failed_effect_of_appending_costs_at_most_that_append(place: Place, n: int) -> None:
    fault = FailAt(10**9, errno.ENOSPC, torn_bytes=20)
    place.files = Files(watch=fault)
    log = place.open(segment_bytes=300, index_interval_bytes=70, segment_index_bytes=200)
    log.append(one_record(timestamp=0))
    fault.n = fault._counter.count + n
    acknowledged = 1
    for _ in range(12):
        try:
            log.append(one_record(timestamp=log.log_end_offset))
            acknowledged += 1
        except UnavailableError:
            assert log.read_only_reason is None
        assert [header.base_offset for header in stored(log)] == list(range(acknowledged))
    assert fault.fired == 1
    log = place.reopen(log, clean=False, recovery_point=0)
    assert [header.base_offset for header in stored(log)] == list(range(acknowledged))


@pytest.mark.parametrize("n", [1, 2])
def test_a_marker_that_could_not_be_written_aborts_nothing(place: Place, n: int) -> None:
    """Neither the transaction index (first write) nor the log (second) keeps a trace of it."""
    fault = FailAt(10**9, errno.ENOSPC, kinds={"write"})
    place.files = Files(watch=fault)
    log = place.open()
    log.append(one_record(timestamp=1, producer_id=1, producer_epoch=0, base_sequence=0, transactional=True))
    marker = end_transaction_batch("ABORT", producer_id=1, producer_epoch=0, timestamp=5)
    fault.n = fault._counter.count + n
    with pytest.raises(UnavailableError):
        log.append(marker, origin=Origin.COORDINATOR)
    assert list(log.active_segment.transactions) == []
    assert log.active_producers[1].txn_first_offset == 0
    log.append(one_record(timestamp=1, producer_id=1, producer_epoch=0, base_sequence=1, transactional=True))
    log.append(marker, origin=Origin.COORDINATOR)
    assert list(log.active_segment.transactions) == [(1, 0, 2, 3)]


def test_a_disk_that_fills_up_and_is_emptied_again_is_survived(place: Place) -> None:
    disk = ShortDisk(20_000)
    place.files = Files(watch=disk)
    log = place.open(segment_bytes=4000, segment_index_bytes=240)
    kept = 0
    for _ in range(3):
        with pytest.raises(UnavailableError, match="disk is full"):
            for _ in range(1000):
                log.append(one_record(b"x" * 200))
        assert log.log_end_offset > kept
        kept = log.log_end_offset
        assert [header.base_offset for header in stored(log)] == list(range(kept))
        disk.add(5000)
    log = place.reopen(log, clean=False, recovery_point=0)
    assert [header.base_offset for header in stored(log)] == list(range(kept))


def test_hooks_hear_of_appends_and_rolls(place: Place) -> None:
    log = place.open(segment_bytes=150)
    appended: list[tuple[int, int, int]] = []
    rolled: list[int] = []
    log.hooks.on_append.append(
        lambda segment, position, data, header: appended.append(
            (segment.base_offset, position, header.base_offset)
        )
    )
    log.hooks.on_roll.append(lambda segment: rolled.append(segment.base_offset))
    for _ in range(5):
        log.append(one_record())
    assert appended == [(0, 0, 0), (0, 72, 1), (2, 0, 2), (2, 72, 3), (4, 0, 4)]
    assert rolled == [0, 2]


def test_flush_messages_syncs_by_itself(place: Place) -> None:
    log = place.open(flush_messages=3)
    for end, durable in ((1, 0), (2, 0), (3, 3), (4, 3), (5, 3), (6, 6)):
        log.append(one_record())
        assert (log.log_end_offset, log.recovery_point) == (end, durable)


def test_new_settings_act_on_the_next_append(place: Place) -> None:
    log = place.open()
    log.append(one_record())
    log.update_config(type(log.config)(segment_bytes=100))
    log.append(one_record())
    assert bases(log) == [0, 1]
