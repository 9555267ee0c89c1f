"""A bulk load in its topic: the driver's records, tasks that are tried again, compaction, heartbeats."""

from __future__ import annotations

import errno
from pathlib import Path

import pyarrow as pa
import pytest

from receiving import Arrived, arrived, verdicts
from tidegate.clock import ManualClock
from tidegate.errors import InvalidError, UnavailableError
from tidegate.files import Effect, Files
from tidegate.integrity.columns import read_columns
from tidegate.integrity.control_records import (
    HEARTBEAT_GUID,
    Push,
    send_heartbeat,
    sorted_sender,
    stable_guid,
)
from tidegate.integrity.header import ControlType
from tidegate.integrity.sender import ChainLimits, Sender
from tidegate.integrity.state import Manifest, Producer, compare_manifest
from tidegate.integrity.verdicts import Verdict
from tidegate.log.log import Log
from tidegate.log.maintenance import Housekeeping
from tidegate.log.topic_config import BrokerConfig
from tidegate.randomness import SeededRandomness

OK, DUPLICATE, UNREGISTERED = Verdict.OK, Verdict.DUPLICATE, Verdict.UNREGISTERED_PRODUCER
STARTED_MS = 1_767_225_600_000


def rows(first: int, stop: int) -> pa.Table:
    return pa.table(
        {"key": [f"k{n:03}" for n in range(first, stop)], "value": [f"v{n}" for n in range(first, stop)]}
    )


def read(log: Log, partition: int = 0) -> list[Arrived]:
    return arrived(log.reader("orders", [partition], control_records=True))


def data(records: list[Arrived]) -> list[str]:
    return [
        record.value.decode()
        for record in records
        if record.stamp and record.stamp.kind == 0 and record.value
    ]


def missing(manifest: Manifest, records: list[Arrived]) -> str:
    """What a receiver of these records says to the manifest; it knows no checksums here."""
    found: dict[bytes, Producer] = {}
    for record, verdict in zip(records, verdicts(records), strict=True):
        if record.stamp is None or verdict is not OK:
            continue
        known = found.get(record.stamp.guid)
        count = (known.data_records if known else 0) + (record.stamp.kind != 2)
        found[record.stamp.guid] = Producer(
            record.stamp.guid, *record.position, registered=False, data_records=count
        )
    return compare_manifest(manifest.to_bytes(), found.get)


@pytest.fixture
def log(tidegate_log: Log) -> Log:
    tidegate_log.create_topic("orders", 2)
    return tidegate_log


def attempt(log: Log, number: int, **settings: object) -> Sender:
    return sorted_sender(
        log.writer("orders"), push="push-1", partition=0, attempt=number, started_ms=STARTED_MS, **settings
    )


# -- the driver ------------------------------------------------------------------------------------------------


def test_a_push_reads_start_tasks_end_in_every_partition(log: Log) -> None:
    driver = log.writer("orders", integrity=True)
    push = Push(driver, is_sorted=True)
    push.start()
    with log.writer("orders", integrity=True) as task:
        task.write(rows(0, 20))
    manifests = {number: Manifest.of([sent]) for number, sent in task.sent().items()}
    push.end(manifests)
    driver.close()
    for number in range(2):
        records = read(log, number)
        controls = [record.stamp.control for record in records if record.stamp and record.stamp.kind == 2]
        assert controls == [2, 0, 2, 3, 1, 3]
        assert set(verdicts(records)) == {OK}
        start, end = (
            next(r for r in records if r.stamp and r.stamp.kind == 2 and r.stamp.control == kind)
            for kind in (ControlType.START_OF_PUSH, ControlType.END_OF_PUSH)
        )
        assert start.payload == b"\x01\x01"
        assert end.payload is not None
        manifest = Manifest.from_bytes(end.payload)
        assert manifest == manifests[number] and manifest.records == len(data(records))
        assert missing(manifest, records) == ""


@pytest.mark.parametrize("row", ["DIV-38"])
def test_the_end_of_push_then_close_ends_each_chain_once(row: str, log: Log) -> None:
    driver = log.writer("orders", integrity=True)
    push = Push(driver)
    push.start()
    assert push.start() == []
    push.end({})
    assert push.end({}) == []
    driver.close()
    driver.close()
    for number in range(2):
        controls = [record.stamp.control for record in read(log, number) if record.stamp]
        assert controls == [2, 0, 1, 3]
        assert read(log, number)[-1].stamp.is_final  # type: ignore[union-attr]


def test_a_push_whose_records_failed_says_them_once(tmp_path: Path, manual_clock: ManualClock) -> None:
    failing = [False]

    def watch(effect: Effect) -> None:
        if failing[0] and effect.kind == "write" and effect.path.suffix == ".log":
            raise OSError(errno.EIO, "injected")

    with Log(tmp_path / "faulty", files=Files(watch=watch), clock=manual_clock) as log:
        log.create_topic("orders", 2)
        driver = log.writer("orders", integrity=True)
        push = Push(driver)
        for step in (push.start, lambda: push.end({})):
            failing[0] = True
            for _ in range(2):
                with pytest.raises(UnavailableError):
                    step()
            failing[0] = False
            step()
        driver.close()
        for number in range(2):
            assert [record.stamp.control for record in read(log, number) if record.stamp] == [2, 0, 1, 3]
            assert set(verdicts(read(log, number))) == {OK}


def test_a_manifest_for_a_partition_that_is_not_there_is_refused(log: Log) -> None:
    with pytest.raises(InvalidError, match="no partition 7"):
        Push(log.writer("orders", integrity=True)).end({7: Manifest()})


@pytest.mark.parametrize("row", ["DIV-44"])
@pytest.mark.parametrize("lost", ["the last records", "a whole task"])
def test_what_sequences_cannot_see_the_manifest_can(row: str, lost: str, log: Log) -> None:
    with log.writer("orders", integrity=True) as task:
        task.write(rows(0, 10), partition=0)
    records = read(log)
    kept = records[:-4] if lost == "the last records" else []
    assert set(verdicts(kept)) <= {OK}  # numbering alone is silent
    manifest = Manifest.of([task.sent()[0]])
    assert missing(manifest, records) == ""
    assert missing(manifest, kept).startswith(f"producer {task.guid.hex()} ")


# -- tasks that are tried again --------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ["DIV-41"])
@pytest.mark.parametrize("cut", [1, 3, 7])
def test_interleaved_attempts_at_a_sorted_task_are_one_series(row: str, cut: int, log: Log) -> None:
    limits = ChainLimits(max_age=0, max_records=4)
    first, second = attempt(log, 1, limits=limits), attempt(log, 2, limits=limits)
    assert first.guid == second.guid == stable_guid("push-1", "orders", 0)
    first.write(rows(0, cut), partition=0)
    second.write(rows(0, cut + 1), partition=0)
    first.write(rows(cut, 8), partition=0)
    first.close(graceful=False)  # the first attempt dies
    second.write(rows(cut + 1, 10), partition=0)
    second.close()
    records = read(log)
    seen = verdicts(records)
    assert set(seen) == {OK, DUPLICATE}
    accepted = [record for record, verdict in zip(records, seen, strict=True) if verdict is OK]
    assert data(accepted) == [f"v{n}" for n in range(10)]
    assert accepted[-1].stamp is not None and accepted[-1].stamp.is_final
    assert missing(Manifest.of([second.sent()[0]]), records) == ""


def test_chains_of_a_sorted_sender_do_not_end_by_time(log: Log, manual_clock: ManualClock) -> None:
    sender = attempt(log, 1)
    sender.write(rows(0, 1), partition=0)
    manual_clock.advance("3h")
    sender.write(rows(1, 2), partition=0)
    assert sender.position(0).chain == 0
    assert {record.stamp.timestamp for record in read(log) if record.stamp} == {STARTED_MS}
    with pytest.raises(InvalidError, match="must not end by time"):
        attempt(log, 2, limits=ChainLimits())


@pytest.mark.parametrize("row", ["DIV-42"])
def test_an_unsorted_task_tried_again_has_a_new_guid_and_the_manifest_names_the_winner(
    row: str, log: Log
) -> None:
    loser = log.writer("orders", integrity=True)
    loser.write(rows(0, 3), partition=0)
    loser.close(graceful=False)
    with log.writer("orders", integrity=True) as winner:
        winner.write(rows(0, 5), partition=0)
    assert loser.guid != winner.guid
    records = read(log)
    assert set(verdicts(records)) == {OK}
    assert missing(Manifest.of([winner.sent()[0]]), records) == ""


@pytest.mark.parametrize("row", ["DIV-43"])
@pytest.mark.parametrize(
    ("nonces", "expected"),
    [((0, 0), UNREGISTERED), ((1, 2), OK)],
    ids=["same-control-key", "nonce-per-attempt"],
)
def test_compaction_must_not_take_one_attempts_start_for_anothers(
    row: str, nonces: tuple[int, int], expected: Verdict, tidegate_log: Log, manual_clock: ManualClock
) -> None:
    log = tidegate_log
    log.create_topic("orders", 1, {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.01"})
    first, second = attempt(log, nonces[0]), attempt(log, nonces[1])
    first.write(rows(0, 3))
    second.write(rows(0, 1))  # begins again, then dies; the first goes on
    second.close(graceful=False)
    first.write(rows(3, 4))
    log.partition("orders", 0).roll()
    manual_clock.advance("1h")
    chores = Housekeeping(
        log, broker=BrokerConfig(), files=log.files, clock=manual_clock, randomness=SeededRandomness(1)
    )
    outcome = chores.clean_once()[0]
    assert outcome.compaction is not None, outcome.not_compacted_because
    records = read(log)
    starts = [record for record in records if record.stamp and record.stamp.is_start_of_chain]
    assert len(starts) == len(set(nonces))
    assert data(records).count("v0") == 1
    assert verdicts(records)[0] is expected


# -- heartbeats ------------------------------------------------------------------------------------------------


def test_heartbeats_stand_outside_all_numbering(log: Log, manual_clock: ManualClock) -> None:
    writer = log.writer("orders")
    with log.writer("orders", integrity=True) as sender:
        sender.write(rows(0, 1), partition=0)
        send_heartbeat(writer, [0, 1], clock=manual_clock)
        send_heartbeat(writer, [0], clock=manual_clock)
        sender.write(rows(1, 2), partition=0)
    records = read(log)
    assert verdicts(records) == [OK, OK, Verdict.HEARTBEAT, Verdict.HEARTBEAT, OK, OK]
    assert {r.stamp.guid for r in records if r.stamp and r.stamp.is_heartbeat} == {HEARTBEAT_GUID}
    batch = next(iter(log.reader("orders", [1], control_records=True)))
    columns = read_columns(batch.column("headers"))
    assert columns.is_heartbeat.tolist() == [True] and columns.is_control.tolist() == [True]


def test_a_stable_guid_depends_on_push_topic_and_partition_alone() -> None:
    known = {
        stable_guid(*where)
        for where in (
            ("p", "t", 0),
            ("p", "t", 1),
            ("p", "u", 0),
            ("q", "t", 0),
            ("p\0t", "", 0),
            ("p", "t", 0),
        )
    }
    assert len(known) == 5
    assert stable_guid("push-1", "orders", 0).hex() == "a42d04fe536b510eb05eaeeef5449f04"
