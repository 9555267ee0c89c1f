"""What an app's windows hold does not depend on what is sent on, on retention, or on rounds."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg

T0 = 1_767_261_600_000
MINUTE = 60_000
GAP = 20_000


def filled(folder: Path, rows: list[tuple[str, int, int]], partitions: int = 1) -> str:
    """A log of events (key, time, number), whose partitions are dealt out in turn; its address."""
    with tg.Log(folder / "log") as log:
        log.create_topic("events", partitions)
        with log.writer("events") as writer:
            writer.write(
                pa.table(
                    {
                        "key": [key for key, *_ in rows],
                        "value": [f'{{"n":{number},"country":"{key[-1]}"}}' for key, _, number in rows],
                        "timestamp": [time for _, time, _ in rows],
                        "partition": pa.array([at % partitions for at in range(len(rows))], pa.int32()),
                    }
                )
            )
    return str(folder / "log")


def visits(seed: int = 7) -> list[tuple[str, int, int]]:
    """Half an hour of 17 visitors; one record in five is up to ten minutes late."""
    chance, rows = random.Random(seed), list[tuple[str, int, int]]()
    for place in range(2_000):
        late = chance.randrange(10 * MINUTE) if chance.random() < 0.2 else 0
        when = T0 + place * 30 * MINUTE // 2_000 - late
        rows.append((f"visitor-{chance.randrange(17)}", max(when, T0), place))
    return rows


def sessions_of(folder: Path, log: str, emit: str, retention: str | None, records: int) -> dict[Any, Any]:
    """The sessions that a reader of the app's topic knows when all are final."""
    app = tg.App("visits", log=log, state=folder / f"{emit}-{retention}-{records}")
    topic = f"sessions-{emit}-{retention}-{records}"
    stream = app.stream("events", value=tg.Json(n="int64"))
    windows = stream.window(tg.Session("20s", grace="2m", retention=retention), emit=emit)
    windows.agg(visits=tg.count(), total=tg.sum("n")).to_topic(topic)
    app.run("local", until="caught_up", close=True, round_records=records)
    with app, app.sessioned_table(topic, retention="1d") as table:
        return {(row.key, row.window.start, row.window.end): row.value for row in table.all()}


def test_sessions_are_the_same_on_update_and_on_close_and_for_every_retention(tmp_path: Path) -> None:
    log = filled(tmp_path, visits())
    expected = sessions_of(tmp_path, log, "close", None, 10_000)
    assert len(expected) > 300
    for emit, retention, records in [
        ("update", None, 10_000),
        ("update", "3h", 137),
        ("close", "3h", 137),
        ("update", "150s", 500),
    ]:
        assert sessions_of(tmp_path, log, emit, retention, records) == expected, (emit, retention, records)
    for (key, _, end), (following, start, _) in itertools.pairwise(sorted(expected)):
        assert key != following or start - end > GAP


@pytest.mark.parametrize("rekeyed", [False, True])
@pytest.mark.parametrize("records", [7, 40, 10_000])
def test_first_and_last_go_by_event_time(tmp_path: Path, rekeyed: bool, records: int) -> None:
    """Not by place in the log; of records with one time, by partition and offset."""
    chance = random.Random(3)
    rows = [(f"k{chance.randrange(3)}", T0 + chance.randrange(40) * 1_000, at) for at in range(120)]
    log = filled(tmp_path, rows, partitions=3 if rekeyed else 1)
    app = tg.App("edges", log=log, state=tmp_path / "state")
    stream = app.stream("events", value=tg.Json(n="int64", country="string"))
    if rekeyed:
        stream = stream.key_by("country", shards=2)
    windows = stream.window(tg.Tumbling("1m", grace="5m"))
    windows.agg(first=tg.first("n"), last=tg.last("n"), all=tg.collect("n")).to_table("edges")
    app.run("local", until="caught_up", round_records=records)
    partitions = 3 if rekeyed else 1
    placed = [(key, time, at % partitions, at // partitions, at) for at, (key, time, _) in enumerate(rows)]
    with app.open_table("edges") as table:
        found = {row.key: row.value for row in table.all()}
    assert len(found) == 3
    for key, value in found.items():
        own = [row for row in placed if (row[0][-1] if rekeyed else row[0]) == key]
        in_order = [row[4] for row in sorted(own, key=lambda row: row[1:4])]
        assert value == {"first": in_order[0], "last": in_order[-1], "all": in_order}
        assert in_order != sorted(in_order), (
            "event time and place in the log must differ for this to say anything"
        )


def test_windows_that_missed_a_record_are_counted_apart_from_records_that_no_window_took(
    tmp_path: Path,
) -> None:
    """A record late for one of its two windows is no late record; Kafka Streams counts the windows."""
    from tidegate.metrics import Metrics

    rows = [("a", T0, 1), ("a", T0 + 90_000, 2), ("a", T0 + 80_000, 3), ("a", T0 + 150_000, 4), ("a", T0, 5)]
    app = tg.App("late", log=filled(tmp_path, rows), state=tmp_path / "state")
    app.stream("events").window(tg.Hopping("1m", "30s")).count().to_table("hops")
    metrics = Metrics()
    app.run("local", until="caught_up", metrics=metrics)
    values = {sample.name: sample.value for sample in metrics.samples() if "late" in sample.name}
    assert values == {
        "tidegate_late_total": 1,
        "tidegate_partly_late_total": 1,
        "tidegate_late_windows_total": 3,
    }


def test_compat_of_windows_is_checked_recorded_and_kept(tmp_path: Path) -> None:
    from tidegate.pipeline.definition.changes import compare

    def flow(**settings: Any) -> Any:
        app = tg.App("a", data=tmp_path)
        app.stream("events").window(tg.Session("1m"), **settings).count().to_table("t")
        return app.flows[0]

    with pytest.raises(tg.InvalidError, match="only 'kafka-streams' is known"):
        flow(compat="flink")
    ours, theirs = flow(), flow(compat="kafka-streams")
    assert "compat" not in str(ours.document) and theirs.fingerprint != ours.fingerprint
    assert compare({"t": ours.description}, [theirs]).kind == "incompatible"
    assert compare({"t": theirs.description}, [theirs]).kind == "same"


def test_with_compat_a_reader_of_an_app_sees_no_session_that_has_expired(tmp_path: Path) -> None:
    """A reader restores the committed state, clocks included: in an app they are the source's, and not forgotten."""
    rows = [("key", T0 + 20, 1), ("other", T0 + 31, 2), ("key", T0 + 22, 3)]
    app = tg.App("kept", log=filled(tmp_path, rows), state=tmp_path / "state")
    windows = app.stream("events").window(tg.Session("10ms", retention="11ms"), compat="kafka-streams")
    windows.count().to_table("sessions")
    app.run("local", until="caught_up")
    with app.open_table("sessions") as table:
        found = [(row.key, row.window.start - T0, row.window.end - T0) for row in table.all()]
    assert found == [("key", 22, 22), ("other", 31, 31)]


@pytest.mark.parametrize(
    "kind", [tg.Sliding("10s", grace="1m"), tg.Hopping("10s", "1s", grace="1m")], ids=repr
)
@pytest.mark.parametrize("emit", ["update", "close"])
@pytest.mark.parametrize("records", [9, 40, 10_000])
def test_reduce_takes_the_records_of_overlapping_windows_in_order(
    tmp_path: Path, kind: tg.Sliding | tg.Hopping, emit: str, records: int
) -> None:
    """Windows of many records are merged from shared parts: these stay in the order of time."""

    def joined(states: pa.Array, groups: Any, count: int) -> pa.Array:
        texts = [""] * count
        for state, group in zip(states.to_pylist(), groups.tolist(), strict=True):
            texts[group] += state
        return pa.array(texts, pa.string())

    rows = [("k", T0 + at * 333, at) for at in range(120)]
    app = tg.App("reduced", log=filled(tmp_path, rows), state=tmp_path / "state")
    stream = app.stream("events", value=tg.Json(n="int64")).select(text="cast(n as string) || ' '")
    windows = stream.window(kind, emit=emit).agg(all=tg.reduce("text", joined, state=pa.string()))
    windows.to_topic("windows").to_table("kept")
    app.run("local", until="caught_up", close=True, round_records=records)
    with app.open_table("kept") as table:
        kept = {row.window.start: row.value["all"] for row in table.all()}
    with app, app.windowed_table("windows", window_size="10s", retention="1d") as sent:
        assert {row.window.start: row.value["all"] for row in sent.all()} == kept
    assert len(kept) > 40
    for start, text in kept.items():
        end = start + 10_000 + isinstance(kind, tg.Sliding)
        assert text.split() == [str(number) for _, time, number in rows if start <= time < end]


def large_results(folder: Path, **settings: str) -> tg.App:
    """An app that collects 400 texts of 5,000 letters in one window and sends them to topic `out`."""
    with tg.Log(folder / "log") as log:
        log.create_topic("events", 1)
        log.create_topic("out", 1, {name.replace("_", "."): value for name, value in settings.items()})
        with log.writer("events") as writer:
            texts = [f'{{"text":"{"x" * 5_000}"}}' for _ in range(400)]
            writer.write(pa.table({"key": ["k"] * 400, "value": texts, "timestamp": range(T0, T0 + 400)}))
    app = tg.App("large", log=str(folder / "log"), state=folder / "state")
    stream = app.stream("events", value=tg.Json(text="string"))
    stream.window(tg.Tumbling("1m")).agg(texts=tg.collect("text")).to_topic("out")
    return app


@pytest.mark.parametrize("compression", ["producer", "lz4"])
def test_a_result_above_max_message_bytes_is_refused_before_the_commit(
    tmp_path: Path, compression: str
) -> None:
    app = large_results(tmp_path, max_message_bytes="1048588", compression_type=compression)
    said = "key b'k' in the window that starts at 2026-01-01T10:00:00.000Z .* Raise max.message.bytes of topic out"
    for _ in range(2):
        with pytest.raises(tg.InvalidError, match=said):
            app.run("local", until="caught_up")
    with tg.Log(tmp_path / "log") as log:
        log.alter_topic("out", {"max.message.bytes": "3000000"})
    app.run("local", until="caught_up")
    with tg.Log(tmp_path / "log") as log, log.reader("out", start="earliest") as reader:
        (records,) = list(reader)
    assert [len(value) for value in records.column("value").to_pylist()] == [
        400 * 5_003 + len('{"texts":[]}') - 1
    ]


@pytest.mark.parametrize("compression", ["producer", "lz4"])
def test_results_are_sent_in_batches_that_the_topic_takes(tmp_path: Path, compression: str) -> None:
    settings = {"max.message.bytes": "20000", "compression.type": compression}
    log_at = filled(tmp_path, [(f"key-{at}", T0 + at, at) for at in range(5_000)])
    with tg.Log(log_at) as log:
        log.create_topic("out", 1, settings)
    app = tg.App("many", log=log_at, state=tmp_path / "state")
    stream = app.stream("events", value=tg.Json(n="int64"))
    stream.window(tg.Tumbling("1m")).agg(total=tg.sum("n")).to_topic("out")
    app.run("local", until="caught_up")
    sizes = []
    for segment in sorted((tmp_path / "log" / "out-0").glob("*.log")):
        data, at = segment.read_bytes(), 0
        while at < len(data):
            sizes.append(12 + int.from_bytes(data[at + 8 : at + 12], "big"))
            at += sizes[-1]
    assert len(sizes) > 5
    assert max(sizes) <= 20_000
    with app, app.windowed_table("out", "1m") as table:
        assert sorted(row.value["total"] for row in table.all()) == list(range(5_000))


@pytest.mark.parametrize("on_error", ["fail", "keep"])
def test_a_record_above_max_message_bytes_is_treated_as_a_bad_record(tmp_path: Path, on_error: str) -> None:
    rows = [("a", T0, 1), ("b" * 4_000, T0 + 1, 2), ("c", T0 + 2, 3)]
    log_at = filled(tmp_path, rows)
    with tg.Log(log_at) as log:
        log.create_topic("out", 1, {"max.message.bytes": "4000"})
    app = tg.App("copy", log=log_at, state=tmp_path / "state")
    app.stream("events", value=tg.Json(n="int64"), on_error=on_error).to_topic("out")
    summary = app.run("local", until="caught_up")
    assert ("offset 1" in str(summary)) == (on_error == "fail"), summary
    with tg.Log(log_at) as log, log.reader("out", start="earliest") as reader:
        sent = [key for batch in reader for key in batch.column("key").to_pylist()]
    assert sent == ([b"a", b"c"] if on_error == "keep" else [b"a"])
