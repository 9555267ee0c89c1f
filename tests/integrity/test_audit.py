"""The audit of metadata at rest: counts per producer, first offsets, expected gaps, damage stepped over."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pyarrow as pa
import pytest

from tidegate.clock import ManualClock
from tidegate.integrity import report as audit_report
from tidegate.integrity.control_records import Push
from tidegate.integrity.partition_audit import audit_partition, audit_topic, open_beside
from tidegate.integrity.report import OTHERS, AuditReport, PartitionAudit
from tidegate.integrity.sender import ChainLimits
from tidegate.integrity.state import Manifest
from tidegate.integrity.verdicts import FATAL, Verdict
from tidegate.log.checkpoints import CleanerCheckpoint
from tidegate.log.format.batch import iter_headers
from tidegate.log.log import Log

Rows = list[dict[str, Any]]


def table(first: int, stop: int) -> pa.Table:
    return pa.table({"key": [b"k%03d" % n for n in range(first, stop)], "value": [b"v"] * (stop - first)})


@pytest.fixture
def log(tidegate_log: Log) -> Log:
    tidegate_log.create_topic("orders", 1)
    tidegate_log.create_topic("damaged", 1)
    return tidegate_log


def send(log: Log, topic: str = "orders", *, records: int = 20, senders: int = 1) -> list[str]:
    """Records of some senders in turn; their names."""
    names = []
    for number in range(senders):
        with log.writer(topic, integrity={"limits": ChainLimits(max_records=8)}) as sender:
            sender.write(table(number * records, (number + 1) * records))
            names.append(sender.guid.hex())
    return names


def damaged(log: Log, change: Callable[[Rows], Rows], topic: str = "damaged") -> PartitionAudit:
    """The audit of a copy of `orders` whose records were changed on the way."""
    copied = change(log.reader("orders", control_records=True).read_all().to_pylist())
    columns = ("key", "value", "headers", "timestamp")
    schema = log.reader("orders", control_records=True).read_all().select(columns).schema
    rows = [{name: row[name] for name in columns} for row in copied]
    with log.writer(topic) as writer:
        writer.write(pa.Table.from_pylist(rows, schema))
    return audit_topic(log, topic).partitions[0]


def faults(audit: PartitionAudit) -> dict[Verdict, list[int]]:
    return {verdict: offsets for verdict, offsets in audit.total.first.items() if verdict in FATAL}


def without(rows: Rows, gone: Iterable[int]) -> Rows:
    return [row for number, row in enumerate(rows) if number not in set(gone)]


def test_a_clean_topic_has_no_fault_and_every_record_is_counted(log: Log) -> None:
    names = send(log, senders=3)
    report = audit_topic(log, "orders")
    (partition,) = report.partitions
    assert (report.faults, partition.expected, partition.told, partition.open_chains) == (0, [], [], 0)
    assert sorted(partition.producers) == sorted(names)
    assert sum(tally.records for tally in partition.producers.values()) == report.records == report.managed
    assert report.records == len(log.reader("orders", control_records=True).read_all())
    assert report.evidence == "100 % of records carry integrity metadata; all checked"


def test_records_without_metadata_are_counted_and_no_fault(log: Log) -> None:
    send(log)
    before = audit_topic(log, "orders").records
    with log.writer("orders") as writer:
        writer.write(table(0, before))
    report = audit_topic(log, "orders")
    assert (report.records, report.managed, report.faults) == (2 * before, before, 0)
    assert report.as_dict()["share"] == 0.5
    assert report.evidence.startswith("50 % of records carry")


def test_a_topic_without_any_metadata_says_so(log: Log) -> None:
    with log.writer("orders") as writer:
        writer.write(table(0, 10))
    report = audit_topic(log, "orders")
    assert (report.records, report.managed, report.faults) == (10, 0, 0)
    assert report.evidence == "no record carries integrity metadata"
    assert report.partitions[0].producers == {}


def test_a_sender_still_at_work_is_named_as_what_the_audit_cannot_see(log: Log) -> None:
    sender = log.writer("orders", integrity=True)
    sender.write(table(0, 5))
    report = audit_topic(log, "orders")
    assert report.faults == 0 and report.partitions[0].open_chains == 1
    assert "1 chain has no end yet" in report.evidence
    sender.close()


def flip(rows: Rows, number: int) -> Rows:
    rows[number]["value"] = b"w"
    return rows


@pytest.mark.parametrize(
    ("change", "verdict", "offset"),
    [
        pytest.param(lambda rows: without(rows, [4]), Verdict.MISSING, 4, id="drop"),
        pytest.param(lambda rows: flip(rows, 5), Verdict.CORRUPT, 5, id="flip"),
        pytest.param(
            lambda rows: without(rows, range(3)), Verdict.UNREGISTERED_PRODUCER, 0, id="forget-the-start"
        ),
    ],
)
def test_damage_is_counted_at_its_offset_for_its_producer(
    change: Callable[[Rows], Rows], verdict: Verdict, offset: int, log: Log
) -> None:
    (name,) = send(log)
    audit = damaged(log, change)
    assert faults(audit)[verdict][0] == offset
    assert audit.producers[name].first[verdict] == audit.total.first[verdict]
    assert audit.producers[name].verdicts == audit.total.verdicts
    assert audit.told[0].offset == offset and audit.told[0].producer == name


def test_a_repeat_is_a_duplicate_and_no_fault(log: Log) -> None:
    send(log)
    audit = damaged(log, lambda rows: rows[:5] + rows[3:])
    assert (audit.total.verdicts[Verdict.DUPLICATE], audit.total.faults) == (2, 0)
    assert audit.total.first == {Verdict.DUPLICATE: [5, 6]}


def test_a_fault_of_one_producer_is_not_anothers(log: Log) -> None:
    first, second = send(log, senders=2)
    count = len(log.reader("orders", control_records=True).read_all()) // 2
    audit = damaged(log, lambda rows: flip(rows, count + 3))
    assert audit.producers[first].faults == 0
    assert audit.producers[second].first[Verdict.CORRUPT][0] == count + 3


def test_offsets_and_producers_told_are_bounded_and_counts_are_not(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_report, "MOST_PRODUCERS", 2)
    monkeypatch.setattr(audit_report, "MOST_TOLD", 3)
    send(log, senders=5)

    def change(rows: Rows) -> Rows:
        return [row | {"value": b"other"} if row["value"] == b"v" else row for row in rows]

    audit = damaged(log, change)
    assert audit.total.verdicts[Verdict.CORRUPT] >= 100
    assert len(audit.total.first[Verdict.CORRUPT]) == audit_report.MOST_OFFSETS
    assert len(audit.producers) == 3 and OTHERS in audit.producers
    assert sum(tally.records for tally in audit.producers.values()) == audit.total.records
    assert sum(finding.verdict is Verdict.CORRUPT for finding in audit.told) == 3


def test_a_gap_in_a_compacted_topic_is_expected_once_it_is_old_enough(
    log: Log, manual_clock: ManualClock
) -> None:
    config = {"cleanup.policy": "compact", "min.compaction.lag.ms": "60000"}
    log.create_topic("compacted", 1, config=config)
    send(log)
    young = damaged(log, lambda rows: without(rows, [4]), "compacted")
    assert faults(young)[Verdict.MISSING] == [4] and young.expected == []
    manual_clock.advance(60_000)
    uncleaned = audit_topic(log, "compacted").partitions[0]
    assert faults(uncleaned)[Verdict.MISSING] == [4], "compaction has not been here, so it took nothing"
    CleanerCheckpoint(log.path, files=log.files, clock=manual_clock).put("compacted", 0, 10)
    old = audit_topic(log, "compacted").partitions[0]
    assert old.total.faults == 0
    assert old.compacted.first[0] == 4
    assert old.expected[0].reason == "cleanup.policy=compact, min.compaction.lag.ms=60000"


def test_a_head_that_aged_out_is_expected_and_says_where_the_log_starts(log: Log) -> None:
    send(log)
    log.partition("orders", 0).delete_records_before(5)
    audit = audit_topic(log, "orders").partitions[0]
    assert (audit.total.faults, audit.log_start) == (0, 5)
    assert audit.head.first == [5] and "starts at offset 5" in audit.expected[0].reason


def test_a_push_whose_manifest_lists_more_than_arrived_is_a_fault_and_never_stops_the_audit(log: Log) -> None:
    driver = log.writer("orders", integrity=True)
    push = Push(driver)
    push.start()
    with log.writer("orders", integrity=True) as task:
        task.write(table(0, 10))
    push.end({number: Manifest.of([sent]) for number, sent in task.sent().items()})
    driver.close()
    assert audit_topic(log, "orders").faults == 0
    guid = task.guid
    audit = damaged(
        log,
        lambda rows: [
            row for row in rows if not any(guid in header["value"] for header in row["headers"][:1])
        ],
    )
    assert audit.total.faults >= 1 and Verdict.MISSING in faults(audit)
    assert audit.total.records == len(log.reader("damaged", control_records=True).read_all())


def test_damage_on_the_disk_is_stepped_over_and_what_it_took_is_missing(log: Log) -> None:
    with log.writer("orders", integrity=True, batch_records=5) as sender:
        sender.write(table(0, 30))
    log.release("orders", 0)
    path = next((log.path / "orders-0").glob("*.log"))
    content = bytearray(path.read_bytes())
    position, lost = list(iter_headers(content))[2]
    content[position + lost.size - 2] ^= 1
    path.write_bytes(content)
    with open_beside(path.parent) as other:
        audit = PartitionAudit("orders", 0)
        seen: list[int] = []
        audit_partition(other, audit, now_ms=0, progress=lambda records, _: seen.append(records))
    assert audit.skipped == [(lost.base_offset, lost.next_offset)]
    assert faults(audit)[Verdict.MISSING] == [lost.next_offset]
    assert audit.total.records == sum(seen) == 32 - lost.count
    assert AuditReport([audit]).evidence.endswith("all checked; 1 damaged place could not be read")
    assert audit.unread is None


def test_a_partition_that_cannot_be_read_says_why(log: Log) -> None:
    audit = PartitionAudit("nosuch", 0)
    audit_partition(log, audit, now_ms=0)
    assert audit.unread is not None and "nosuch" in audit.unread
    assert AuditReport([audit]).evidence == "integrity metadata was not read: nosuch-0"
