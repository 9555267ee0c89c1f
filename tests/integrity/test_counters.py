"""What validation adds to the metrics: every verdict, note and producer, once per batch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa

from tidegate.integrity.header import Stamp
from tidegate.integrity.partition_audit import audit_topic
from tidegate.integrity.replica import Replica
from tidegate.integrity.validator import Counters, OnError, PartitionValidator, ValidationRules
from tidegate.integrity.verdicts import Tolerance, Verdict
from tidegate.log.log import Log
from tidegate.metrics import Metrics

NOW = 1_800_000_000_000
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"


def numbers(metrics: Metrics, name: str, label: str = "", *, stage: str = "") -> dict[str, float]:
    """The values of one instrument by one label, zeros left out."""
    return {
        sample.labels.get(label, ""): sample.value
        for sample in metrics.samples()
        if sample.name == name and sample.value and stage in ("", sample.labels["stage"])
    }


def damaged(streams: Any) -> list[Any]:
    """Records that get every verdict."""
    pen, other, headless = streams.Pen(1), streams.Pen(2), streams.Pen(3)
    headless.chain = 0
    start, *puts, end = pen.chain_of(5)
    after = puts[0].stamped(sequence=end.stamp.sequence + 1)
    unknown = Stamp.from_bytes(bytes([1, 9, 255]) + puts[0].stamp.to_bytes()[3:])
    return [
        *(start, *puts, end),
        puts[0],  # repeated
        after,
        puts[1]._replace(stamp=unknown),
        other.start(),
        other.put(sequence=3),  # a gap
        other.put()._replace(value=b"changed"),
        headless.put(),
        streams.Row(None, b"k", b"v"),
        pen.heartbeat(),
    ]


def test_each_verdict_is_counted_by_its_name(streams: Any) -> None:
    metrics = Metrics()
    rows = damaged(streams)
    validator = PartitionValidator("orders", 0, metrics=metrics)
    judged = [validator.validate(streams.batch_of(rows[:6]), streams.NOW)]
    judged.append(validator.validate(streams.batch_of(rows[6:], 6), streams.NOW))
    found = numbers(metrics, "tidegate_judged_records_total", "verdict")
    assert found == {
        verdict.label: sum(one.counts[verdict] for one in judged)
        for verdict in Verdict
        if any(one.counts[verdict] for one in judged)
    }
    assert set(found) == {verdict.label for verdict in Verdict}
    assert sum(found.values()) == len(rows)
    faults = sum(int(one.is_fatal.sum()) for one in judged)
    assert numbers(metrics, "tidegate_integrity_faults_total", "phase") == {"settled": faults}
    assert numbers(metrics, "tidegate_tracked_producers") == {"": 3}


def test_faults_before_the_end_of_a_push_are_counted_apart(streams: Any) -> None:
    metrics = Metrics()
    rules = ValidationRules(during_push=OnError.KEEP)
    pen = streams.Pen()
    rows = [
        pen.start(),
        pen.start_push(),
        pen.put()._replace(value=b"x"),
        pen.end_push(),
        pen.put(sequence=9),
    ]
    PartitionValidator("orders", 0, rules=rules, metrics=metrics).validate(
        streams.batch_of(rows), streams.NOW
    )
    assert numbers(metrics, "tidegate_integrity_faults_total", "phase") == {"push": 1, "settled": 1}


def test_what_passed_for_a_reason_is_counted(streams: Any) -> None:
    metrics = Metrics()
    rules = ValidationRules(tolerance=Tolerance(1000, "previous"), batch_only=True)
    pen = streams.Pen(time=streams.NOW - 5000)
    rows = [pen.start(), pen.start_push(), pen.put(sequence=4), pen.end_push(), pen.end_push()]
    pen.time = streams.NOW
    rows += [pen.put(sequence=20)]
    PartitionValidator("orders", 0, rules=rules, metrics=metrics).validate(
        streams.batch_of(rows), streams.NOW
    )
    assert numbers(metrics, "tidegate_integrity_notes_total", "note") == {
        "tolerated": 2,
        "tolerated_suspect": 1,
        "ignored": 1,
        "unexpected": 1,
    }


def test_both_stages_of_a_replica_count_and_a_failed_store_counts_nothing(streams: Any) -> None:
    metrics = Metrics()
    replica = Replica("orders", 0, max_age_ms=100, metrics=metrics)
    old, new = streams.Pen(1, time=1000), streams.Pen(2, time=9000)
    batch = streams.batch_of([old.start(), new.start(), new.put()])
    replica.to_standby(now_ms=NOW)
    replica.to_leader(now_ms=NOW)

    def full(*_: object) -> None:
        raise OSError("no room")

    replica.consume(batch, streams.NOW)
    try:
        replica.drain(batch, streams.NOW, full)
    except OSError:
        pass
    name = "tidegate_judged_records_total"
    assert numbers(metrics, name, "verdict", stage="consumer") == {"ok": 3}
    assert numbers(metrics, name, "verdict", stage="drainer") == {}
    replica.drain(batch, streams.NOW, lambda *_: None)
    assert numbers(metrics, name, "verdict", stage="drainer") == {"ok": 3}
    assert numbers(metrics, "tidegate_tracked_producers", stage="drainer") == {"": 2}
    data = replica.checkpoint(now_ms=NOW)
    assert data is not None
    assert numbers(metrics, "tidegate_checkpoint_bytes") == {"": len(data)}
    assert numbers(metrics, "tidegate_checkpoints_total") == {"": 1}
    assert numbers(metrics, "tidegate_expired_producers_total") == {"": 1}
    assert numbers(metrics, "tidegate_tracked_producers", stage="drainer") == {"": 1}
    replica.to_standby(now_ms=NOW)
    replica.to_offline()
    assert numbers(metrics, "tidegate_tracked_producers") == {}


def test_an_audit_counts_into_the_logs_metrics(tidegate_log: Log) -> None:
    tidegate_log.create_topic("orders", 1)
    rows = pa.table({"key": [b"k1", b"k2"], "value": [b"v", b"w"]})
    with tidegate_log.writer("orders", integrity=True) as sender:
        sender.write(rows)
    with tidegate_log.writer("orders") as writer:
        writer.write(rows)
    audit_topic(tidegate_log, "orders")
    name = "tidegate_judged_records_total"
    assert numbers(tidegate_log.metrics, name, "verdict", stage="audit") == {"ok": 4, "unmanaged": 2}


def test_the_page_of_metrics_names_these_and_their_labels() -> None:
    metrics = Metrics()
    Counters(metrics, "orders", 0, "audit")
    section = PAGE.read_text(encoding="utf-8").partition("\n## Integrity\n")[2].partition("\n## ")[0]
    listed = dict(re.findall(r"^\| `(\w+)` \| \w+ \| ([a-z, ]+) \|", section, re.MULTILINE))
    assert listed == {one.name: ", ".join(one.labels) for one in metrics.instruments()}
    assert all(f"`{verdict.label}`" in PAGE.read_text(encoding="utf-8") for verdict in Verdict)
