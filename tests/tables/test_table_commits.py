"""Commits: data, offsets and validation state are one moment; restarts, fencing, earlier commits, readers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from table_records import window_record, windows_in, write_records
from tidegate.clock import ManualClock
from tidegate.errors import FencedError, IntegrityError, InvalidError, OverloadError, UnavailableError
from tidegate.integrity import restore_checkpoint
from tidegate.log.append_validation import Origin
from tidegate.log.log import Log
from tidegate.tables.commits import KEPT
from tidegate.tables.factories import WindowedTable, windowed_table
from tidegate.tables.ingest.consumer import BoundedBuffer, Piece
from tidegate.tables.ingest.materializer import Cadence
from tidegate.tables.options import Consumed
from tidegate.tables.topic_table import TopicTable
from tidegate.testing.batches import Rec, build_batch, end_transaction_batch

TOPIC = "windows-changelog"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def log(tmp_path: Path, clock: ManualClock) -> Any:
    with Log(tmp_path / "log", durability="os", clock=clock) as opened:
        opened.create_topic(TOPIC)
        yield opened


def write(log: Log, first: int, count: int, **settings: Any) -> None:
    records = [
        window_record(b"key-%d" % (n % 7), n // 7 * 10, b"%d" % n) for n in range(first, first + count)
    ]
    write_records(log, TOPIC, records, **settings)


def opened(log: Log, tmp_path: Path, **settings: Any) -> WindowedTable:
    return windowed_table(log, TOPIC, "10ms", state=tmp_path / "state", **settings)


def expected(count: int) -> dict[tuple[bytes, int, int], tuple[bytes, int]]:
    return {
        (b"key-%d" % (n % 7), n // 7 * 10, n // 7 * 10 + 10): (b"%d" % n, n // 7 * 10) for n in range(count)
    }


def builder_of(table: TopicTable) -> Any:
    assert table._builder is not None
    return table._builder


def dies(table: TopicTable) -> None:
    """As after kill -9: nothing is committed, given back or told."""
    builder = builder_of(table)
    builder._tail.close()
    builder.source.runtime.close()
    table._closed = True


@pytest.mark.parametrize("integrity", [False, True], ids=["plain", "numbered"])
def test_with_the_consumer_at_2000_and_the_drainer_at_1000_the_commit_says_1000(
    log: Log, tmp_path: Path, clock: ManualClock, integrity: bool
) -> None:
    with log.writer(TOPIC, integrity=integrity) as writer:
        import pyarrow as pa

        def thousand(first: int) -> pa.Table:
            said = [
                window_record(b"key-%d" % (n % 7), n // 7 * 10, b"%d" % n) for n in range(first, first + 1000)
            ]
            columns = {"key": [each.key for each in said], "value": [each.value for each in said]}
            return pa.table(columns, schema=pa.schema([("key", pa.binary()), ("value", pa.binary())]))

        table = opened(log, tmp_path, bootstrap=False)
        builder = builder_of(table)
        writer.write(thousand(0))
        while builder.consume_once():
            pass
        while builder.drain_once():
            pass
        drained = table.position[0]
        writer.write(thousand(1000))
        while builder.consume_once():
            pass
    consumed = builder.validations[0].replica.consumer.state.next_offset
    assert consumed >= 2000 > drained >= 1000
    assert len(builder.buffer) > 0
    commit = table.commit()
    assert commit.positions == {0: drained}
    state = restore_checkpoint(builder.source.partitions[0].drainer, now_ms=0)
    assert state.next_offset == drained
    with table.as_of(commit.number) as past:
        assert len(past.all()) == 1000
        assert past._snapshot.source.partitions[0].next_offset == drained
    dies(table)
    clock.advance("1m")
    with opened(log, tmp_path) as again:
        assert {value for value, _ in windows_in(again).values()} == {b"%d" % n for n in range(2000)}
        assert again.counts.repeated == 0


def test_a_restart_goes_on_and_reads_nothing_twice(log: Log, tmp_path: Path) -> None:
    write(log, 0, 50)
    with opened(log, tmp_path) as table:
        assert table.counts.applied == 50
    write(log, 50, 30)
    with opened(log, tmp_path, bootstrap=False) as table:
        assert table.position == {0: 50}
        assert windows_in(table).keys() == expected(50).keys()
        table.catch_up()
        assert table.counts.applied == 80
        assert {key: value[0] for key, value in windows_in(table).items()} == {
            key: value[0] for key, value in expected(80).items()
        }


def test_what_was_not_committed_is_read_again(log: Log, tmp_path: Path, clock: ManualClock) -> None:
    write(log, 0, 50)
    table = opened(log, tmp_path)
    write(log, 50, 30)
    builder = builder_of(table)
    while builder.consume_once():
        builder.drain_once()
    assert table.position == {0: 80}
    dies(table)
    clock.advance("1m")
    with opened(log, tmp_path, bootstrap=False) as again:
        assert again.position == {0: 50}
        assert len(again.all()) == 50
        again.catch_up()
        assert windows_in(again) == expected(80)


def test_as_of_reaches_the_last_ten_commits(log: Log, tmp_path: Path) -> None:
    with opened(log, tmp_path) as table:
        for n in range(KEPT + 5):
            write(log, n * 10, 10)
            table.catch_up()
        commits = table.commits()
        assert len(commits) == KEPT
        for commit in commits:
            with table.as_of(commit) as past:
                assert windows_in(past) == expected(commit.positions[0])
                assert past.position == commit.positions
                assert past.get(b"key-0", 0) == b"0"
        with pytest.raises(InvalidError, match="is not kept; there are"):
            table.as_of(1)
        with table.as_of(commits[0]) as past, pytest.raises(UnavailableError):
            past.get(b"key-0", 0, at_least=table.position)


def test_earlier_commits_stay_readable_across_restarts_and_maintenance(log: Log, tmp_path: Path) -> None:
    for n in range(KEPT):
        write(log, n * 10, 10)
        with opened(log, tmp_path) as table:
            builder_of(table).source.runtime.maintain(table.name, 10_000)
            for commit in table.commits():
                with table.as_of(commit) as past:
                    assert windows_in(past) == expected(commit.positions[0])


def test_a_second_table_reads_what_the_first_commits(log: Log, tmp_path: Path, clock: ManualClock) -> None:
    write(log, 0, 20)
    with opened(log, tmp_path) as first, opened(log, tmp_path) as second:
        assert (first.role, second.role) == ("builder", "reader")
        assert windows_in(second) == expected(20)
        write(log, 20, 20)
        first.catch_up()
        clock.advance("1s")
        assert windows_in(second) == expected(40)
        assert second.position == {0: 40}
        with pytest.raises(UnavailableError, match="not yet"):
            second.get(b"key-0", 0, at_least={0: 41}, timeout=20)
        for refused in (second.commit, second.changes):
            with pytest.raises(InvalidError, match="another process"):
                refused()


def test_a_reader_goes_on_after_its_commit_was_given_back(
    log: Log, tmp_path: Path, clock: ManualClock
) -> None:
    write(log, 0, 20)
    with opened(log, tmp_path) as first, opened(log, tmp_path, read_only=True) as reader:
        assert windows_in(reader) == expected(20)
        for n in range(2, KEPT * 3):
            write(log, n * 10, 10)
            first.catch_up()
            builder_of(first).source.runtime.maintain(first.name, 10_000)
        total = KEPT * 30
        assert (
            len(reader.fetch(b"key-3")) > 0
        )  # within the look-again time: the old commit, whose packs are gone
        clock.advance("1s")
        assert windows_in(reader) == expected(total)


def test_read_only_never_builds(log: Log, tmp_path: Path) -> None:
    write(log, 0, 20)
    with opened(log, tmp_path, read_only=True) as reader:
        assert reader.role == "reader"
        with pytest.raises(UnavailableError, match="no commit yet"):
            reader.all()


def test_a_builder_that_was_away_too_long_is_fenced(log: Log, tmp_path: Path, clock: ManualClock) -> None:
    write(log, 0, 20)
    old = opened(log, tmp_path)
    clock.advance("11s")
    new = opened(log, tmp_path)
    assert new.role == "builder"
    write(log, 20, 20)
    new.catch_up()
    before = new.commits()
    with pytest.raises(FencedError, match="another process builds"):
        old.catch_up()
    with pytest.raises(FencedError):
        old.commit()
    old.close()
    assert new.commits() == before
    write(log, 40, 20)
    new.catch_up()
    assert windows_in(new) == expected(60)
    new.close()


def test_a_commit_of_a_fenced_builder_is_refused_even_when_its_lease_looks_good(
    log: Log, tmp_path: Path, clock: ManualClock
) -> None:
    write(log, 0, 20)
    old = opened(log, tmp_path, lease_ttl="1h")
    builder = builder_of(old)
    write(log, 20, 1)
    builder.consume_once()
    builder.drain_once()
    clock.advance("2h")
    new = opened(log, tmp_path)
    assert new.role == "builder"
    builder._lease._renew_at = clock.now_ms() + 10**9  # a clock that lies
    with pytest.raises(FencedError, match="refused"):
        builder.commit()
    old.close()
    new.close()


def test_damage_that_stops_a_push_stops_the_table_and_is_never_committed(log: Log, tmp_path: Path) -> None:
    write(log, 0, 10)
    table = opened(log, tmp_path)
    builder = builder_of(table)
    builder.validations[0].replica.error = IntegrityError(
        "a producer's records are missing", topic=TOPIC, partition=0
    )
    write(log, 10, 10)
    with pytest.raises(IntegrityError):
        table.catch_up()
    with pytest.raises(IntegrityError):
        table.commit()
    assert table.commits()[-1].positions == {0: 10}
    table.close()


def test_commits_come_by_bytes_and_by_time(log: Log, tmp_path: Path, clock: ManualClock) -> None:
    write(log, 0, 200, batch_records=10)
    cadence = Cadence(commit_interval_ms=1000, commit_bytes=1, read_bytes=512)
    with opened(log, tmp_path, cadence=cadence) as table:
        assert table.commits()[-1].number > 3
        before = table.commits()[-1].number
        builder = builder_of(table)
        object.__setattr__(cadence, "commit_bytes", 1 << 30)
        write(log, 200, 10)
        builder.consume_once()
        builder.drain_once()
        builder.commit_if_due()
        assert table.commits()[-1].number == before
        clock.advance("2s")
        builder.commit_if_due()
        assert table.commits()[-1].number == before + 1


def test_records_without_headers_leave_the_state_that_validating_them_would(log: Log, tmp_path: Path) -> None:
    from tidegate.integrity import PartitionState, PartitionValidator, take_checkpoint

    write(log, 0, 40, batch_records=7)
    with opened(log, tmp_path) as table:
        validator = PartitionValidator(TOPIC, 0, state=PartitionState())
        for batch in log.reader(TOPIC, control_records=True):
            assert validator.validate(batch, 0).kept.all()
        assert builder_of(table).validations[0].saved() == take_checkpoint(validator.state, now_ms=0)


# -- the buffer ----------------------------------------------------------------------------------


def test_the_buffer_is_bounded_in_bytes_and_keeps_order(clock: ManualClock) -> None:
    buffer = BoundedBuffer(clock, limit_bytes=100)
    assert buffer.put(Piece(0, 1, None, 60))
    assert not buffer.put(Piece(0, 2, None, 60), 50), "there was no room"
    assert buffer.put(Piece(0, 2, None, 40))
    assert buffer.nbytes == 100
    assert [buffer.take().next_offset, buffer.take().next_offset] == [1, 2]  # type: ignore[union-attr]
    assert buffer.take(10) is None
    assert buffer.put(Piece(0, 3, None, 1000)), "one larger than the limit goes alone"
    assert not buffer.put(Piece(0, 4, None, 1))
    buffer.close()
    assert not buffer.put(Piece(0, 4, None, 1), 1000)
    assert buffer.take() == Piece(0, 3, None, 1000)


def test_a_small_buffer_only_slows_the_table_down(log: Log, tmp_path: Path) -> None:
    write(log, 0, 300, batch_records=5)
    cadence = Cadence(buffer_bytes=1, read_bytes=256)
    with opened(log, tmp_path, cadence=cadence) as table:
        assert windows_in(table) == expected(300)


# -- changes -------------------------------------------------------------------------------------


def test_changes_tell_each_new_and_old_value_in_order(log: Log, tmp_path: Path) -> None:
    with opened(log, tmp_path) as table, table.changes() as changes:
        said = [("a", b"1"), ("b", b"2"), ("a", b"3"), ("a", None), ("a", b"4"), ("c", None)]
        write_records(log, TOPIC, [window_record(key.encode(), 0, value) for key, value in said])
        table.catch_up()
        told = [(each.key, each.new, each.old, each.offset) for each in changes.take()]
        assert told == [
            (b"a", b"1", None, 0),
            (b"b", b"2", None, 1),
            (b"a", b"3", b"1", 2),
            (b"a", None, b"3", 3),
            (b"a", b"4", None, 4),
        ]
        write_records(log, TOPIC, [window_record(b"b", 0, b"5")])
        table.catch_up()
        (change,) = changes.take()
        assert (change.new, change.old) == (b"5", b"2")


def test_a_slow_subscriber_is_told_and_does_not_stop_the_table(log: Log, tmp_path: Path) -> None:
    with opened(log, tmp_path) as table, table.changes(limit_rows=15) as changes:
        for n in range(3):
            write(log, n * 10, 10)
            table.catch_up()
        assert len(changes.take()) == 10
        with pytest.raises(OverloadError, match="fell behind"):
            changes.take()
        assert len(table.all()) == 30


# -- in the background ---------------------------------------------------------------------------


def test_a_following_table_sees_what_is_written(tmp_path: Path) -> None:
    with Log(tmp_path / "log", durability="os") as log:
        log.create_topic(TOPIC)
        with opened(log, tmp_path, follow=True) as table, table.changes() as changes:
            for n in range(10):
                write(log, n * 20, 20)
                assert len(table.fetch(b"key-0", at_least={0: n * 20 + 20}, timeout="20s")) > n * 2
            assert windows_in(table) == expected(200)
            assert len(changes.take("10s")) > 0
            commit = table.commit()
            assert commit.positions == {0: 200}
        with opened(log, tmp_path, bootstrap=False) as table:
            assert table.position == {0: 200}


def test_an_error_in_the_background_is_raised_to_whoever_asks(tmp_path: Path) -> None:
    from table_records import Said
    from tidegate.errors import WindowedKeyFormatError

    with Log(tmp_path / "log", durability="os") as log:
        log.create_topic(TOPIC)
        table = opened(log, tmp_path, follow=True)
        write_records(log, TOPIC, [Said(b"short", b"x")])
        with pytest.raises(WindowedKeyFormatError, match="offset 0"):
            table.catch_up("20s")
        table.close()


# -- validation ----------------------------------------------------------------------------------


def numbered(log: Log, count: int) -> None:
    import pyarrow as pa

    said = [window_record(b"key-%d" % (n % 7), n // 7 * 10, b"%d" % n) for n in range(count)]
    columns = {"key": [each.key for each in said], "value": [each.value for each in said]}
    with log.writer(TOPIC, integrity=True) as writer:
        writer.write(pa.table(columns, schema=pa.schema([("key", pa.binary()), ("value", pa.binary())])))


def test_records_that_come_twice_are_applied_once(log: Log, tmp_path: Path) -> None:
    from tidegate.integrity.fault_injection import DamageKind, break_topic

    numbered(log, 100)
    break_topic(log, TOPIC, DamageKind.REPEAT, into=tmp_path / "broken", count=5)
    with Log(tmp_path / "broken", read_only=True) as broken, opened(broken, tmp_path) as table:
        assert {value for value, _ in windows_in(table).values()} == {b"%d" % n for n in range(100)}
        assert table.counts.applied == 100
        assert table.counts.repeated == 5


def test_control_records_are_no_rows(log: Log, tmp_path: Path) -> None:
    numbered(log, 10)
    with opened(log, tmp_path) as table:
        assert table.counts.applied == 10
        assert table.counts.null_keys == table.counts.bad_keys == table.counts.repeated == 0
        assert table.position[0] > 10, "the log has control records too"
        assert table.lag == 0


def test_a_table_of_committed_records_sees_neither_open_nor_aborted_transactions(
    log: Log, tmp_path: Path
) -> None:
    partition = log.partition(TOPIC, 0)

    def append(batch: bytes, origin: Origin = Origin.CLIENT) -> None:
        partition.append(batch, origin=origin)
        partition.acknowledge(sync=False)

    def say(key: bytes, producer: int) -> None:
        record = Rec(window_record(key, 0, b"v").key, b"v", 5)
        append(
            build_batch([record], producer_id=producer, producer_epoch=0, base_sequence=0, transactional=True)
        )

    def end(kind: Literal["ABORT", "COMMIT"], producer: int) -> None:
        marker = end_transaction_batch(kind, producer_id=producer, producer_epoch=0, timestamp=5)
        append(marker, Origin.COORDINATOR)

    say(b"aborted", 1)
    say(b"committed", 2)
    end("ABORT", 1)
    end("COMMIT", 2)
    say(b"open", 3)
    with opened(log, tmp_path, consumed=Consumed(isolation="read_committed")) as table:
        assert [row.key for row in table.all()] == [b"committed"]
        assert table.position == {0: 4}, "markers move the position too"
        end("COMMIT", 3)
        table.catch_up()
        assert [row.key for row in table.all()] == [b"committed", b"open"]
        assert table.position == {0: 6}
