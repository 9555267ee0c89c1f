"""Records that go into no result, or not into all: warned about with their place, counted, told in the summary."""

from __future__ import annotations

import json
import logging
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tidegate as tg
from table_records import window_record, write_records
from tidegate.dropped_records import told, warn_dropped
from tidegate.metrics import Metrics
from tidegate.tables.factories import windowed_table
from tidegate.tables.options import Consumed, Materialized
from tidegate.tables.serdes.base import Long, String

TEN = 1_767_261_600_000
MINUTE = 60_000
LINE = re.compile(r"(.*): (\S+)-(\d+) offset (\d+) (.*) \((the first|[\d,]+ so far)\)")

Record = tuple[str | None, int]


def write(
    folder: Path, records: Sequence[Record], value: str | None = '{"x":1}', partitions: int = 1
) -> None:
    with tg.Log(folder / "log", durability="os") as log:
        log.create_topic("clicks", partitions, if_not_exists=True)
        columns = {
            "key": pa.array([key for key, _ in records], pa.string()),
            "value": pa.array([value] * len(records), pa.string()),
            "timestamp": [at for _, at in records],
        }
        log.writer("clicks").write(pa.table(columns), partition=0)


def counting(folder: Path, kind: Any, on_error: str = "fail") -> tg.App:
    app = tg.App("shop", data=str(folder))
    clicks = app.stream("clicks", value=tg.Json(x="double"), on_error=on_error)
    clicks.window(kind).agg(n=tg.count()).to_table("counts")
    return app


def warned(caplog: pytest.LogCaptureFixture) -> dict[str, list[tuple[int, int]]]:
    """What is said of records → the occurrence that is told, and the offset of the example."""
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for each in caplog.records:
        if each.name != "tidegate.dropped_records":
            continue
        assert each.levelno == logging.WARNING
        match = LINE.fullmatch(each.getMessage())
        assert match is not None, each.getMessage()
        who, topic, partition, offset, why, number = match.groups()
        assert (topic, partition) == ("clicks", "0") and "app shop, flow counts" in who
        count = 1 if number == "the first" else int(number.removesuffix(" so far").replace(",", ""))
        found[why.partition(":")[0].partition(";")[0]].append((count, int(offset)))
    return dict(found)


def powers(offsets: Sequence[int]) -> list[tuple[int, int]]:
    """The oracle: the 1st, 2nd, 4th, 8th, … of them with its offset."""
    return [(number, offset) for number, offset in enumerate(offsets, 1) if number & (number - 1) == 0]


@given(st.integers(0, 5000), st.integers(0, 5000))
def test_the_powers_of_two_are_told_wherever_batches_are_cut(before: int, count: int) -> None:
    expected = [n for n in range(before + 1, before + count + 1) if n & (n - 1) == 0]
    assert list(told(before, count)) == expected


def test_a_reason_that_quotes_a_record_stays_one_printable_line(caplog: pytest.LogCaptureFixture) -> None:
    warn_dropped("x", "is bad", "t", [0], [5], before=0, reasons=["not\njson \x1b[31m" + "y" * 500])
    (line,) = caplog.messages
    assert "\n" not in line and line.isprintable() and len(line) < 300


@pytest.mark.parametrize("round_records", [None, 1, 3, 7])
def test_late_records_are_warned_about_whatever_the_cuts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, round_records: int | None
) -> None:
    late = [("a", TEN + n) for n in range(20)]
    write(tmp_path, [("a", TEN + 5 * MINUTE), *late, ("a", TEN + 6 * MINUTE), ("b", TEN)])
    app = counting(tmp_path, tg.Tumbling("1m", grace="0s"))
    summary = app.run("local", until="caught_up", round_records=round_records)
    assert warned(caplog) == {"is late": powers([*range(1, 21), 22])}
    assert summary.progress.late == 21
    assert "not in all results of counts: 21 late" in str(summary)


def test_a_restart_goes_on_counting(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, [("a", TEN + 5 * MINUTE), ("a", TEN), ("a", TEN), ("a", TEN)])
    counting(tmp_path, tg.Tumbling("1m", grace="0s")).run("local", until="caught_up")
    caplog.clear()
    write(tmp_path, [("a", TEN), ("a", TEN)])
    counting(tmp_path, tg.Tumbling("1m", grace="0s")).run("local", until="caught_up")
    assert warned(caplog) == {"is late": [(4, 4)]}


def test_records_that_miss_some_of_their_hopping_windows_are_counted_apart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Windows of 3 minutes every minute, no grace: a record one minute behind misses the oldest of its three."""
    records = [("a", TEN + 10 * MINUTE), ("a", TEN + 9 * MINUTE), ("a", TEN + 8 * MINUTE), ("a", TEN)]
    write(tmp_path, records)
    metrics = Metrics()
    app = counting(tmp_path, tg.Hopping("3m", advance="1m", grace="0s"))
    summary = app.run("local", until="caught_up", metrics=metrics)
    assert warned(caplog) == {
        "is late": [(1, 3)],
        "is late for some of its windows, which were final": [(1, 1), (2, 2)],
    }
    assert (summary.progress.late, summary.progress.partly_late) == (1, 2)
    assert "1 late, 2 late for some of their windows" in str(summary)
    # Kafka Streams counts a dropped record for each window that had closed: 1 + 2 + 3.
    found = {each.name: each.value for each in metrics.samples() if "late" in each.name}
    assert found == {
        "tidegate_late_total": 1,
        "tidegate_late_windows_total": 6,
        "tidegate_partly_late_total": 2,
    }


@settings(max_examples=40)
@given(data=st.data())
def test_late_counts_of_hopping_windows_equal_kafka_streams(data: st.DataObject) -> None:
    """A naive twin of KStreamWindowAggregate: every window of a record that ended before the close is dropped."""
    import tempfile

    advance, hops, grace = (
        data.draw(st.integers(1, 4)),
        data.draw(st.integers(1, 4)),
        data.draw(st.integers(0, 5)),
    )
    size = advance * hops
    times = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=25))
    stream_time, late, partly, windows = -1, 0, 0, 0
    for at in times:
        stream_time = max(stream_time, at)
        starts = [start for start in range(0, at + 1, advance) if start > at - size]
        closed = [start for start in starts if start + size <= stream_time - grace]
        windows += len(closed)
        late += len(closed) == len(starts)
        partly += 0 < len(closed) < len(starts)
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), [("a", at) for at in times])
        kind = tg.Hopping(f"{size}ms", advance=f"{advance}ms", grace=f"{grace}ms")
        metrics = Metrics()
        progress = counting(Path(folder), kind).run("local", until="caught_up", metrics=metrics).progress
    found = {each.name: each.value for each in metrics.samples() if "late" in each.name}
    assert (progress.late, progress.partly_late) == (late, partly)
    assert found.get("tidegate_late_windows_total", 0) == windows
    assert found.get("tidegate_partly_late_total", 0) == partly


@pytest.mark.parametrize(
    "kind", [tg.Tumbling("1m", grace="1h"), tg.Session("1m", grace="1h"), tg.Sliding("1m", grace="1h")],
    ids=["tumbling", "session", "sliding"],
)  # fmt: skip
def test_records_without_a_key_and_before_1970_are_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: Any
) -> None:
    write(tmp_path, [("a", TEN), (None, TEN), ("b", TEN), (None, TEN), (None, TEN)])
    metrics = Metrics()
    summary = counting(tmp_path, kind).run("local", until="caught_up", metrics=metrics)
    assert warned(caplog) == {"has no key and goes into no window": [(1, 1), (2, 3)]}
    assert "3 without a key" in str(summary)
    dropped = {each.labels["reason"]: each.value for each in metrics.samples() if "dropped" in each.name}
    assert dropped == {"no_key": 3}


@pytest.mark.parametrize(
    ("kind", "behind"),
    [(tg.Session("1s", grace="0s"), 5), (tg.Sliding("1s", grace="0s"), 5)],
    ids=["session", "sliding"],
)
def test_late_records_of_other_windows_are_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: Any, behind: int
) -> None:
    write(tmp_path, [("a", TEN + MINUTE), ("b", TEN), ("c", TEN)])
    counting(tmp_path, kind).run("local", until="caught_up")
    assert warned(caplog) == {"is late": [(1, 1), (2, 2)]}


@pytest.mark.parametrize(
    ("on_error", "fate"),
    [("keep", "cannot be read, and is a dead letter now"), ("drop", "cannot be read, and is left out")],
)
def test_records_that_are_set_aside_are_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, on_error: str, fate: str
) -> None:
    write(tmp_path, [("a", TEN)])
    write(tmp_path, [("a", TEN)] * 5, value="{broken")
    write(tmp_path, [("a", TEN)], value=None)
    summary = counting(tmp_path, tg.Tumbling("1m"), on_error).run("local", until="caught_up")
    assert warned(caplog) == {fate: [(1, 1), (2, 2), (4, 4)], "has no value, and is left out": [(1, 6)]}
    word = "set aside as dead letters" if on_error == "keep" else "dropped"
    assert f"not in all results of counts: 5 unreadable, {word}" in str(summary)


def test_faulty_records_are_warned_about_with_their_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from tidegate.integrity.fault_injection import DamageKind, break_topic

    with tg.Log(tmp_path / "whole") as log:
        log.create_topic("clicks", 1)
        with log.writer("clicks", integrity=True) as sender:
            values = [json.dumps({"x": n}) for n in range(8)]
            sender.write(pa.table({"key": ["a"] * 8, "value": values, "timestamp": [TEN] * 8}))
    with tg.Log(tmp_path / "whole", read_only=True) as log:
        break_topic(log, "clicks", DamageKind.FLIP, into=tmp_path / "log", partition=0, offset=5)
    app = tg.App("shop", data=str(tmp_path))
    clicks = app.stream("clicks", value=tg.Json(x="double")).validate(on_error="keep")
    clicks.window(tg.Tumbling("1m")).agg(n=tg.count()).to_table("counts")
    summary = app.run("local", until="caught_up")
    (told_of,) = warned(caplog).values()
    assert told_of == [(1, 5)]
    assert "faults: 1 corrupt (1 set aside as dead letters)" in str(summary)


def test_records_that_deduplicate_finds_too_old_are_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, [("a", TEN + 30 * MINUTE), ("a", TEN)])
    app = tg.App("shop", data=str(tmp_path))
    clicks = app.stream("clicks", value=tg.Json(x="double")).drop_duplicates("x", within="1m")
    clicks.window(tg.Tumbling("1m", grace="2h")).agg(n=tg.count()).to_table("counts")
    app.run("local", until="caught_up")
    assert warned(caplog) == {"is late": [(1, 1)]}


def test_tables_warn_about_expired_keyless_and_unreadable_records(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    day = 86_400_000
    with tg.Log(tmp_path / "log", durability="os") as log:
        new = window_record(b"a", 100 * day, (1).to_bytes(8, "big"))
        old = [window_record(b"a", n, (1).to_bytes(8, "big")) for n in range(0, 50, 10)]
        wrong = [new._replace(key=None), new._replace(value=b"no long")]
        write_records(log, "clicks", [new, *old, *wrong])
        with windowed_table(
            log, "clicks", "10ms", state=tmp_path / "state", materialized=Materialized("counts"),
            consumed=Consumed(String(), Long(), on_value_error="keep"), retention="1d",
        ):  # fmt: skip
            pass
    said = [each.getMessage() for each in caplog.records if each.name == "tidegate.dropped_records"]
    found = [LINE.fullmatch(line) for line in said]
    assert all(each is not None and each[1] == "table counts" and each[2] == "clicks" for each in found)
    places = {(each[5].partition(":")[0], int(each[4])) for each in found if each is not None}
    assert places == {
        ("is expired", 1),
        ("is expired", 2),
        ("is expired", 4),
        ("has no key, and is left out", 6),
        ("has a value that cannot be read, and is a dead letter now", 7),
    }


def test_counts_of_a_run_are_of_the_topic_once_and_lag_is(tmp_path: Path) -> None:
    """Three flows over one topic and one over another: 10 + 4 records, not 34."""
    write(tmp_path, [("a", TEN + n) for n in range(10)])
    with tg.Log(tmp_path / "log", durability="os") as log:
        log.create_topic("views", 1)
        log.writer("views").write(
            pa.table({"key": ["a"] * 4, "value": ['{"x":1}'] * 4, "timestamp": [TEN] * 4})
        )
    app = tg.App("shop", data=str(tmp_path))
    clicks = app.stream("clicks", value=tg.Json(x="double"))
    for number in range(3):
        clicks.window(tg.Tumbling(f"{number + 1}m")).agg(n=tg.count()).to_table(f"counts{number}")
    app.stream("views", value=tg.Json(x="double")).window(tg.Tumbling("1m")).agg(n=tg.count()).to_table("v")
    lags: list[int] = []
    metrics = Metrics()
    summary = app.run(
        "local",
        until="caught_up",
        round_records=4,
        metrics=metrics,
        progress=lambda each: lags.append(each.lag_records),
    )
    read = [each for each in metrics.samples() if each.name == "tidegate_records_total"]
    of_topic = {
        topic: sum(each.value for each in read if each.labels["topic"] == topic)
        for topic in ("clicks", "views")
    }
    assert of_topic == {"clicks": 10, "views": 4}
    (last,) = [each.value for each in metrics.samples() if each.name == "tidegate_round_records"]
    assert last == 1, "the rounds read 1 + 1, … and 1 record: three flows read the last one"
    assert (summary.records, summary.progress.records, summary.progress.counters["records"]) == (14, 14, 14)
    assert str(summary).startswith("shop: 14 records in ")
    assert max(lags) <= 14 and lags[-1] == 0
    write(tmp_path, [("a", TEN)])
    again = app.run("local", until="caught_up")
    assert (again.records, again.progress.records) == (1, 15)
