"""Senders over real logs: chains in the log, threads, failures, repeats."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg
from receiving import Arrived, arrived, verdicts
from tidegate.clock import ManualClock
from tidegate.errors import InvalidError, TidegateError, UnavailableError
from tidegate.files import Effect, Files
from tidegate.integrity import Sender, audit_topic
from tidegate.integrity.header import ORIGIN_HEADER_KEY, ChainOrigin, ControlKey, Stamp
from tidegate.integrity.sender import ChainLimits, Chains, ChainState
from tidegate.integrity.verdicts import Verdict
from tidegate.log.format.records import coerce
from tidegate.log.log import Log
from tidegate.log.writer import Writer, Written
from tidegate.randomness import SeededRandomness

OK, DUPLICATE = Verdict.OK, Verdict.DUPLICATE


def table(*values: str, partition: int | None = 0) -> pa.Table:
    columns: dict[str, Any] = {"key": [f"key-{value}" for value in values], "value": list(values)}
    if partition is not None:
        columns["partition"] = pa.array([partition] * len(values), pa.int32())
    return pa.table(columns)


def read(log: Log, partition: int = 0, topic: str = "orders") -> list[Arrived]:
    return arrived(log.reader(topic, [partition], control_records=True))


def shape(records: list[Arrived]) -> list[str]:
    """`S` a start, `E` an end, `F` a final end, else the value."""
    names = []
    for record in records:
        stamp = record.stamp
        if stamp is not None and stamp.is_start_of_chain:
            names.append("S")
        elif stamp is not None and stamp.is_end_of_chain:
            names.append("F" if stamp.is_final else "E")
        else:
            names.append((record.value or b"").decode())
    return names


@pytest.fixture
def log(tidegate_log: Log) -> Log:
    tidegate_log.create_topic("orders", 3)
    return tidegate_log


@pytest.fixture
def sender(log: Log) -> Iterator[Sender]:
    sender = log.writer("orders", integrity=True)
    yield sender
    sender.close(graceful=False)


class Faulty:
    """Makes writes to, or syncs of, partition logs fail while armed."""

    def __init__(self) -> None:
        self.kind: str | None = None

    def __call__(self, effect: Effect) -> None:
        if effect.kind == self.kind and effect.path.suffix == ".log":
            raise OSError(errno.EIO, "injected")


@pytest.fixture
def faulty() -> Faulty:
    return Faulty()


@pytest.fixture
def faulty_log(tmp_path: Path, manual_clock: ManualClock, faulty: Faulty) -> Iterator[Log]:
    with Log(
        tmp_path / "faulty", files=Files(watch=faulty), clock=manual_clock, randomness=SeededRandomness(3)
    ) as log:
        log.create_topic("orders", 3)
        yield log
        faulty.kind = None


# -- what is in the log ------------------------------------------------------------------------------


def test_ordinary_consumers_still_see_keys_and_values(log: Log, sender: Sender) -> None:
    written = sender.write(table("a", "b"))
    assert [(batch.first_offset, batch.last_offset) for batch in written] == [(0, 2)]
    records = read(log)
    assert shape(records) == ["S", "a", "b"]
    assert [record.key for record in records[1:]] == [b"key-a", b"key-b"]
    assert isinstance(written[0], Written)


def test_a_sender_is_what_integrity_true_gives_and_none_is_the_default(log: Log) -> None:
    assert isinstance(log.writer("orders", integrity=True), Sender)
    assert isinstance(log.writer("orders"), Writer)
    custom = log.writer("orders", integrity={"checksum": "adhash"}, compression="zstd")
    custom.write(table("a"))
    custom.close()
    assert verdicts(read(log)) == [OK] * 3


def test_rows_go_where_an_ordinary_writer_puts_them(log: Log, sender: Sender) -> None:
    from tidegate.log.writer import partition_of_key

    sender.write(table(*map(str, range(30)), partition=None))
    for number in range(3):
        keys = [record.key for record in read(log, number)[1:]]
        assert keys and all(partition_of_key(key or b"", 3) == number for key in keys)


def test_every_sender_has_a_guid_of_its_own(log: Log) -> None:
    guids = {log.writer("orders", integrity=True).guid for _ in range(5)}
    assert len(guids) == 5
    again = Sender(log.writer("orders"), randomness=SeededRandomness(1))
    assert again.guid == Sender(log.writer("orders"), randomness=SeededRandomness(1)).guid


def test_many_partitions_and_chains_are_all_accepted(log: Log, manual_clock: ManualClock) -> None:
    limits = ChainLimits(max_records=7, max_bytes=200)
    with log.writer("orders", integrity={"limits": limits}) as sender:
        for number in range(20):
            sender.write(table(*(f"{number}-{n}" for n in range(number)), partition=None))
            manual_clock.advance("50s")
    total = 0
    for number in range(3):
        records = read(log, number)
        assert set(verdicts(records)) == {OK}
        assert shape(records)[-1] == "F" and shape(records).count("F") == 1
        total += sum(1 for name in shape(records) if name not in "SEF")
    assert total == sum(range(20)) == sum(sent.records for sent in sender.sent().values())


def test_large_tables_and_their_own_headers_pass_through(log: Log) -> None:
    rows = 20_000
    headers = pa.array([[{"key": "trace", "value": b"t"}]] * rows)
    with log.writer("orders", integrity={"limits": ChainLimits(max_records=6000)}) as sender:
        sender.write(
            pa.table({"value": pa.array([b"v" * 100] * rows, pa.binary()), "headers": headers}), partition=1
        )
    batches = list(log.reader("orders", [1], control_records=True))
    assert sum(batch.num_rows for batch in batches) == rows + 8
    data = [
        row for batch in batches for row in batch.column("headers").to_pylist() if row[0]["key"] == "trace"
    ]
    assert len(data) == rows and all([entry["key"] for entry in row] == ["trace", "div"] for row in data)
    assert set(verdicts(arrived(batches))) == {OK}


# -- ends -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ["DIV-37"])
def test_a_pause_longer_than_the_limit_ends_the_chain(row: str, log: Log, manual_clock: ManualClock) -> None:
    sender = log.writer("orders", integrity={"limits": ChainLimits(max_age="1ms")})
    sender.write(table("a"))
    manual_clock.advance(2)
    sender.write(table("b"))
    assert shape(read(log)) == ["S", "a", "E", "S", "b"]
    assert [record.position for record in read(log)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]


@pytest.mark.parametrize("row", ["DIV-38"])
def test_closing_twice_ends_each_chain_once_and_none_where_nothing_was_sent(row: str, log: Log) -> None:
    sender = log.writer("orders", integrity=True)
    sender.write(table("a"))
    sender.write(table("b", partition=2))
    sender.close()
    sender.close()
    assert [shape(read(log, number)) for number in range(3)] == [["S", "a", "F"], [], ["S", "b", "F"]]
    assert {number: verdicts(read(log, number)) for number in (0, 2)} == {0: [OK] * 3, 2: [OK] * 3}
    with pytest.raises(InvalidError, match="closed"):
        sender.write(table("c"))


@pytest.mark.parametrize("row", ["DIV-39"])
def test_writing_after_closing_a_partition_begins_the_next_chain_of_the_same_guid(
    row: str, log: Log, sender: Sender
) -> None:
    sender.write(table("a"))
    sender.close_partition(0)
    sender.close_partition(0)
    sender.close_partition(1)
    sender.write(table("b"))
    records = read(log)
    assert shape(records) == ["S", "a", "F", "S", "b"]
    assert [record.position for record in records][-2:] == [(1, 0), (1, 1)]
    assert len({record.stamp.guid for record in records if record.stamp}) == 1
    assert read(log, 1) == [] and verdicts(records) == [OK] * 5


def test_an_error_in_the_block_leaves_no_end(log: Log) -> None:
    with pytest.raises(RuntimeError), log.writer("orders", integrity=True) as sender:
        sender.write(table("a"))
        raise RuntimeError("the job failed")
    assert shape(read(log)) == ["S", "a"]
    with pytest.raises(InvalidError, match="closed"):
        sender.retry()


def test_leaving_the_block_well_ends_the_chains(log: Log) -> None:
    with log.writer("orders", integrity=True) as sender:
        sender.write(table("a"))
    assert shape(read(log)) == ["S", "a", "F"]


# -- threads ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ["DIV-40"])
def test_eight_threads_on_one_partition_give_one_unbroken_numbering(row: str, log: Log) -> None:
    sender = log.writer("orders", integrity={"limits": ChainLimits(max_records=50)})

    def work(number: int) -> None:
        for turn in range(25):
            sender.write(table(f"{number}-{turn}", f"{number}-{turn}-again"))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    sender.close()
    records = read(log)
    assert set(verdicts(records)) == {OK}
    assert len(records) == 8 * 25 * 2 + 2 * 8
    positions = [record.position for record in records]
    assert positions == sorted(set(positions))


def test_threads_on_overlapping_partitions_do_not_lock_each_other_out(log: Log) -> None:
    sender = log.writer("orders", integrity=True)

    def work(order: list[int]) -> None:
        for turn in range(20):
            values = [f"{turn}-{number}" for number in order]
            sender.write(pa.table({"value": values, "partition": pa.array(order, pa.int32())}))

    threads = [threading.Thread(target=work, args=(order,)) for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
        assert not thread.is_alive()
    sender.close()
    assert all(set(verdicts(read(log, number))) == {OK} for number in range(3))


# -- failures ---------------------------------------------------------------------------------------------


def test_a_table_that_cannot_be_stored_uses_no_numbers(log: Log, sender: Sender) -> None:
    log.alter_topic("orders", {"max.message.bytes": "2000"})
    sender.write(table("a"))
    with pytest.raises(InvalidError, match="nothing was written"):
        sender.write(
            pa.table({"value": ["ok", "x" * 5000, "ok"], "partition": pa.array([0, 1, 2], pa.int32())})
        )
    with pytest.raises(InvalidError, match="reserved"):
        sender.write(pa.table({"key": pa.array([ControlKey(bytes(16), 0, 0).to_bytes()]), "value": ["x"]}))
    sender.write(table("b"))
    sender.close()
    assert shape(read(log)) == ["S", "a", "b", "F"]
    assert verdicts(read(log)) == [OK] * 4
    assert read(log, 1) == [] and read(log, 2) == []


def test_a_null_key_on_a_compacted_topic_uses_no_numbers(tidegate_log: Log) -> None:
    tidegate_log.create_topic("orders", 1, {"cleanup.policy": "compact"})
    with tidegate_log.writer("orders", integrity=True) as sender:
        sender.write(table("a"))
        with pytest.raises(InvalidError, match="no key"):
            sender.write(pa.table({"value": ["b"]}))
    assert shape(read(tidegate_log)) == ["S", "a", "F"]


@pytest.mark.parametrize("how", ["same table", "retry", "next write", "close"])
def test_records_of_a_failed_append_go_out_again_with_the_same_bytes(
    faulty_log: Log, faulty: Faulty, how: str
) -> None:
    sender = faulty_log.writer("orders", integrity=True)
    sender.write(table("a"))
    lost = table("b", "c")
    before = sender.position(0)
    faulty.kind = "write"
    for _ in range(3):
        with pytest.raises(UnavailableError):
            sender.write(lost)
    faulty.kind = None
    after = sender.position(0)
    assert (before.sequence, after.sequence) == (2, 4)
    if how == "same table":
        assert sum(batch.records for batch in sender.write(lost)) == 2
    elif how == "retry":
        assert sum(batch.records for batch in sender.retry()) == 2
        assert sender.retry() == []
    elif how == "next write":
        sender.write(table("d"))
    sender.close()
    expected = ["S", "a", "b", "c", *(["d"] if how == "next write" else []), "F"]
    records = read(faulty_log)
    seen = verdicts(records)
    assert [name for name, verdict in zip(shape(records), seen, strict=True) if verdict is OK] == expected
    assert set(seen) <= {OK, DUPLICATE}


def test_a_table_whose_records_somebody_else_sent_meanwhile_is_not_written_twice(
    faulty_log: Log, faulty: Faulty
) -> None:
    sender = faulty_log.writer("orders", integrity=True)
    lost = table("a", "b")
    faulty.kind = "write"
    with pytest.raises(UnavailableError):
        sender.write(lost)
    faulty.kind = None
    sender.write(table("c"))
    assert sum(batch.records for batch in sender.write(lost)) == 3  # with the start of the chain
    assert shape(read(faulty_log)) == ["S", "a", "b", "c"]
    sender.write(lost)  # a new write: the error is settled
    assert shape(read(faulty_log)) == ["S", "a", "b", "c", "a", "b"]
    faulty.kind = "write"
    with pytest.raises(UnavailableError):
        sender.write(lost)
    faulty.kind = None
    sender.retry()
    sender.write(lost)
    assert shape(read(faulty_log)) == ["S", "a", "b", "c", "a", "b", "a", "b", "a", "b"]
    assert verdicts(read(faulty_log)) == [OK] * 10


def test_a_failed_append_holds_up_only_its_own_partition(faulty_log: Log, faulty: Faulty) -> None:
    sender = faulty_log.writer("orders", integrity=True)
    for number in range(3):
        sender.write(table("first", partition=number))
    spread = pa.table({"value": ["x", "y", "z"], "partition": pa.array([0, 1, 2], pa.int32())})
    faulty.kind = "write"
    with pytest.raises(UnavailableError):
        sender.write(spread)
    faulty.kind = None
    sender.write(table("later", partition=1))
    assert shape(read(faulty_log, 1))[-2:] == ["y", "later"]
    sender.write(spread)
    sender.close()
    for number, expected in enumerate((["x"], ["y", "later"], ["z"])):
        records = read(faulty_log, number)
        assert set(verdicts(records)) <= {OK, DUPLICATE}
        kept = [n for n, v in zip(shape(records), verdicts(records), strict=True) if v is OK]
        assert kept == ["S", "first", *expected, "F"]


def test_a_failed_end_is_owed_like_anything_else(faulty_log: Log, faulty: Faulty) -> None:
    sender = faulty_log.writer("orders", integrity=True)
    sender.write(table("a"))
    faulty.kind = "write"
    with pytest.raises(UnavailableError):
        sender.close()
    faulty.kind = None
    sender.close()
    assert shape(read(faulty_log)) == ["S", "a", "F"]


def test_giving_up_after_a_failure_certifies_nothing(faulty_log: Log, faulty: Faulty) -> None:
    sender = faulty_log.writer("orders", integrity=True)
    sender.write(table("a"))
    faulty.kind = "write"
    with pytest.raises(UnavailableError):
        sender.write(table("b"))
    sender.close(graceful=False)
    faulty.kind = None
    assert shape(read(faulty_log)) == ["S", "a"]


def test_a_failed_sync_is_an_error_and_nothing_is_numbered_twice(faulty_log: Log, faulty: Faulty) -> None:
    sender = faulty_log.writer("orders", integrity=True)
    sender.write(table("a"))
    lost = table("b")
    faulty.kind = "sync"
    with pytest.raises(TidegateError):
        sender.write(lost)
    position = sender.position(0)
    with pytest.raises(TidegateError):
        sender.write(lost)
    assert sender.position(0) == position
    sender.close(graceful=False)


# -- other writers -------------------------------------------------------------------------------------------


class PlainWriter:
    """A writer that only knows `write`, as the Kafka client's; fails every `n`-th call."""

    def __init__(self, log: Log, every: int = 0) -> None:
        self.topic = "orders"
        self._writer = log.writer("orders")
        self.every = every
        self.calls = 0
        self.closed = False

    def write(self, table: Any, *, partition: int | None = None) -> list[Written]:
        self.calls += 1
        stored = self._writer.write(table, partition=partition)
        if self.every and self.calls % self.every == 0:
            raise UnavailableError("stored, but the answer was lost")
        return stored

    def close(self) -> None:
        self.closed = True


def test_any_writer_will_do_and_a_lost_answer_becomes_a_duplicate(log: Log) -> None:
    writer = PlainWriter(log, every=3)
    with Sender(writer, partitions=3, randomness=SeededRandomness(5)) as sender:
        for number in range(10):
            rows = table(str(number))
            for _ in range(3):
                try:
                    sender.write(rows)
                    break
                except UnavailableError:
                    continue
        writer.every = 0
    assert writer.closed
    records = read(log)
    seen = verdicts(records)
    assert [n for n, v in zip(shape(records), seen, strict=True) if v is OK] == [
        "S", *map(str, range(10)), "F",
    ]  # fmt: skip
    assert seen.count(DUPLICATE) > 0 and set(seen) == {OK, DUPLICATE}


def test_a_writer_that_does_not_say_how_many_partitions_needs_to_be_told(log: Log) -> None:
    with pytest.raises(InvalidError, match="partitions=N"):
        Sender(PlainWriter(log))


def test_an_idempotent_writer_stores_a_repeat_once(faulty_log: Log, faulty: Faulty) -> None:
    sender = faulty_log.writer("orders", integrity=True, producer_id=7, batch_records=1)
    sender.write(table("a"))
    sender.write(table("b", "c"))
    faulty.kind = "write"
    with pytest.raises(UnavailableError):
        sender.write(table("d", "e"))
    faulty.kind = None
    sender.write(table("f"))
    sender.close()
    assert shape(read(faulty_log)) == ["S", "a", "b", "c", "d", "e", "f", "F"]
    assert verdicts(read(faulty_log)) == [OK] * 8


# -- positions and settings -----------------------------------------------------------------------------------


def test_a_sender_can_go_on_from_where_another_was(log: Log) -> None:
    first = log.writer("orders", integrity=True)
    first.write(table("a"))
    position = ChainState.from_bytes(first.position(0).to_bytes())
    first.close(graceful=False)
    settings = {"guid": first.guid, "positions": {0: position}}
    with log.writer("orders", integrity=settings) as second:
        second.write(table("b"))
    assert shape(read(log)) == ["S", "a", "b", "F"]
    assert verdicts(read(log)) == [OK] * 4


def test_the_time_in_the_headers_can_be_handed_in(log: Log, sender: Sender) -> None:
    sender.write(table("a"), now_ms=12_345)
    assert {record.stamp.timestamp for record in read(log) if record.stamp} == {12_345}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"checksum": "md5"}, "adhash2"),
        ({"guid": b"short"}, "16 bytes"),
        ({"nonce": -1}, "nonce"),
        ({"nonce": 2**32}, "nonce"),
        ({"partitions": 0}, "partitions"),
    ],
)
def test_wrong_settings_are_refused(log: Log, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidError, match=message):
        log.writer("orders", integrity=settings)


def test_a_partition_that_is_not_there_is_refused(log: Log, sender: Sender) -> None:
    with pytest.raises(InvalidError, match="no partition 9"):
        sender.write(table("a"), partition=9)
    assert sender.write(table()) == []


def test_the_public_name_is_there() -> None:
    import tidegate.integrity

    assert tidegate.integrity.Sender is Sender
    with pytest.raises(AttributeError):
        tidegate.integrity.Nothing  # noqa: B018
    assert tg.Log is Log


# -- a random life ----------------------------------------------------------------------------------------------


class MemoryWriter:
    """A partition in memory whose answers get lost, before or after storing."""

    topic = "orders"

    def __init__(self, chance: SeededRandomness) -> None:
        self.batches: list[pa.RecordBatch] = []
        self.chance = chance
        self.is_reliable = False

    def write(self, table: pa.RecordBatch, *, partition: int | None = None) -> list[Written]:
        fate = 0 if self.is_reliable else self.chance.below(5)
        if fate == 1:
            raise UnavailableError("lost on the way")
        offsets = pa.array(range(table.num_rows), pa.int64())
        self.batches.append(table.append_column("offset", offsets))
        if fate == 2:
            raise UnavailableError("the answer was lost")
        return [Written(partition or 0, 0, table.num_rows - 1, 0, 0, False, 1)]

    def close(self) -> None:
        pass


@pytest.mark.parametrize("seed", range(60))
def test_through_any_failures_each_record_is_accepted_once_and_in_order(seed: int) -> None:
    chance, clock = SeededRandomness(seed), ManualClock()
    writer = MemoryWriter(chance)
    limits = ChainLimits(max_age="40ms", max_records=1 + chance.below(6), max_bytes=20 + chance.below(100))
    sender = Sender(writer, partitions=1, limits=limits, clock=clock, randomness=chance)
    expected: list[str] = []
    for turn in range(12):
        clock.advance(chance.below(60))
        values = [f"{turn}.{n}" for n in range(chance.below(9))]
        rows = table(*values)
        while True:
            try:
                if chance.below(8) == 0:
                    sender.close_partition(0)
                sender.write(rows)
                break
            except UnavailableError:
                continue
        expected += values
    writer.is_reliable = True
    sender.close()
    records = arrived(writer.batches)
    seen = verdicts(records)
    assert set(seen) <= {OK, DUPLICATE}, seen
    kept = [record for record, verdict in zip(records, seen, strict=True) if verdict is OK]
    assert [name for name in shape(kept) if name not in ("S", "E", "F")] == expected


def origins(log: Log, topic: str) -> list[ChainOrigin | None]:
    """What the starts of chains say about who sent them."""
    table = log.reader(topic, control_records=True).read_all()
    found = []
    for headers in table.column("headers").to_pylist():
        known = {each["key"]: each["value"] for each in headers}
        if ORIGIN_HEADER_KEY in known:
            assert Stamp.from_bytes(known["div"]).is_start_of_chain
            found.append(ChainOrigin.from_bytes(known[ORIGIN_HEADER_KEY]))
    return found


def test_a_start_of_chain_names_host_process_and_app(tmp_path: Path) -> None:
    with Log(tmp_path, durability="os") as log:
        log.create_topic("t", 1)
        limits = ChainLimits(max_records=2)
        with log.writer("t", integrity={"app": "shop", "limits": limits}) as sender:
            sender.write(pa.table({"value": [b"1", b"2", b"3"]}))
        with log.writer("t", integrity=True) as sender:
            sender.write(pa.table({"value": [b"4"]}))
        here = (socket.gethostname(), os.getpid())
        first, second, other = origins(log, "t")
        assert first == second == ChainOrigin(*here, "shop")
        assert other is not None and other[:2] == here and other.app
        report = audit_topic(log, "t")
        assert report.faults == 0


def test_who_sent_a_chain_is_in_no_checksum(tmp_path: Path) -> None:
    """Attempts of two processes at the same chain send the same numbers and the same sums."""
    stamps = []
    for app in ("one", "another name"):
        chains = Chains(bytes(16), origin=ChainOrigin("host", 7, app))
        rows = coerce(pa.table({"key": [b"k"], "value": [b"v"], "timestamp": [1]}))
        planned = chains.data(ChainState(), rows, 5)
        end = chains.end(planned.after, 6)
        pieces = [*planned.pieces, *end.pieces]
        stamps.append([piece.headers.to_pylist()[0][0]["value"] for piece in pieces])
    assert stamps[0] == stamps[1] and len(stamps[0]) == 3


def test_a_sender_that_must_repeat_itself_names_nobody(tmp_path: Path) -> None:
    with Log(tmp_path, durability="os") as log:
        log.create_topic("t", 1)
        with log.writer("t", integrity={"guid": bytes(16), "fixed_time_ms": 5}) as sender:
            sender.write(pa.table({"value": [b"1"]}))
        assert origins(log, "t") == []
    assert ChainOrigin.from_bytes(b"{}") is None and ChainOrigin.from_bytes(b"\xff") is None
    assert ChainOrigin.from_bytes(ChainOrigin("h", 1, "ä").to_bytes()) == ChainOrigin("h", 1, "ä")
