"""Times in another unit than the declared one are told, and never become 1970."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg
from tidegate.errors import InvalidError

TEN = 1_767_261_600_000  # 2026-01-01T10:00Z
MOMENT = datetime(2026, 1, 1, 10, 0, 0, 123_456, tzinfo=UTC)


def produce(folder: Path, *ats: Any, timestamp: int = TEN) -> None:
    with tg.Log(folder / "log") as log:
        log.create_topic("orders", 1, if_not_exists=True)
        values = [json.dumps({"at": at, "amount": 1.0}) for at in ats]
        rows = {"key": ["ann"] * len(ats), "value": values, "timestamp": [timestamp] * len(ats)}
        log.writer("orders").write(pa.table(rows))


def app_of(
    folder: Path, at: Any = "timestamp", *, timestamp: str | None = "at", on_error: Any = "fail"
) -> tg.App:
    app = tg.App("shop", data=folder)
    orders = app.stream(
        "orders", value=tg.Json(at=at, amount="double"), timestamp=timestamp, on_error=on_error
    )
    orders.window(tg.Tumbling("1m", retention="1h")).agg(n=tg.count()).to_table("minutes")
    return app


def starts(app: tg.App) -> list[int]:
    with app.open_table("minutes") as table:
        return [row.window.start for row in table.fetch_all()]


@pytest.mark.parametrize("written", [
    TEN, MOMENT.isoformat(), str(MOMENT), "2026-01-01T10:00:00.123Z", "2026-01-01T10:00:00.123456789Z",
    "2026-01-01T12:00:00.123456+02:00[Europe/Berlin]", "2026-01-01T12:00+0200",
])  # fmt: skip
@pytest.mark.parametrize("declared", ["timestamp", "timestamp[us]", "timestamp[ns]"])
def test_event_times_as_programs_write_them_are_read(tmp_path, written, declared) -> None:
    if isinstance(written, int) and declared != "timestamp":
        written = written * {"timestamp[us]": 1000, "timestamp[ns]": 1_000_000}[declared]
    produce(tmp_path, written)
    app = app_of(tmp_path, declared)
    assert app.run("local", until="caught_up").exit_code == 0
    assert starts(app) == [TEN]


WRONG = [
    ("int64", TEN // 1000, "seconds", "timestamp[s]"),
    ("timestamp", TEN // 1000, "seconds", "timestamp[s]"),
    ("timestamp[us]", TEN, "milliseconds", "timestamp[ms]"),
    ("timestamp[us]", TEN // 1000, "seconds", "timestamp[s]"),
    ("timestamp[ns]", TEN, "milliseconds", "timestamp[ms]"),
    ("timestamp", TEN * 1000, "microseconds", "timestamp[us]"),
    ("int64", TEN * 1_000_000, "nanoseconds", "timestamp[ns]"),
]


@pytest.mark.parametrize(("declared", "value", "unit", "instead"), WRONG)
def test_one_in_another_unit_stops_its_partition_and_says_which(
    tmp_path, declared, value, unit, instead
) -> None:
    produce(tmp_path, *([TEN * {"timestamp[us]": 1000, "timestamp[ns]": 10**6}.get(declared, 1)] * 50))
    app_of(tmp_path, declared).run(
        "local", until="caught_up"
    )  # nothing is wrong with what is there at the start
    produce(tmp_path, value)
    summary = app_of(tmp_path, declared).run("local", until="caught_up")
    assert summary.exit_code == 5
    (stopped,) = summary.stopped
    assert f"event time 'at' is {value}" in stopped.message
    assert f"2026-01-01T10:00:00.000Z in {unit}; declare it {instead}" in stopped.message
    assert starts(app_of(tmp_path, declared)) == [TEN]


@pytest.mark.parametrize(("declared", "value", "unit", "instead"), WRONG)
def test_what_it_says_to_declare_reads_them(tmp_path, declared, value, unit, instead) -> None:
    produce(tmp_path, value)
    app = app_of(tmp_path, instead)
    assert app.run("local", until="caught_up").exit_code == 0
    assert starts(app) == [TEN]


def test_they_are_left_out_or_kept_as_other_bad_values_are(tmp_path) -> None:
    produce(tmp_path, *[TEN] * 50, TEN // 1000, TEN)
    app = app_of(tmp_path, on_error="keep")
    summary = app.run("local", until="caught_up")
    assert summary.exit_code == 0
    with app.open_table("minutes") as table:
        assert [row.value["n"] for row in table.fetch_all()] == [51]
        (letter,) = table.dead_letters().to_pylist()
    assert "in seconds; declare it timestamp[s]" in letter["reason"]


def test_a_records_own_timestamp_is_looked_at_too(tmp_path) -> None:
    produce(tmp_path, *[TEN] * 50)
    produce(tmp_path, TEN, timestamp=TEN // 1000)
    (stopped,) = app_of(tmp_path, timestamp=None).run("local", until="caught_up").stopped
    assert "the record's timestamp is 1767261600: 1970-01-21" in stopped.message
    assert "have the producer set milliseconds" in stopped.message


def test_small_numbers_are_nobodys_unit(tmp_path) -> None:
    """Times that are in our days in no unit are taken as they are: tests and simulations count from 0."""
    produce(tmp_path, 0, 1500, 30_000)
    app = app_of(tmp_path)
    assert app.run("local", until="caught_up").exit_code == 0
    assert starts(app) == [0]


@pytest.mark.parametrize("make", [
    lambda app: app.stream("t").window(tg.Tumbling(60)),
    lambda app: app.stream("t").window(tg.Hopping("1m", 30)),
    lambda app: app.stream("t").window(tg.Sliding("1m", grace=30)),
    lambda app: app.stream("t").window(tg.Session("1m", retention=3600)),
    lambda app: app.stream("t").drop_duplicates("value", 60),
    lambda app: app.stream("t").drop_duplicates("value", "1m", grace=60),
    lambda app: app.stream("t").window(tg.Tumbling("1m"), idle_close=60).count(),
    lambda app: app.changes("t", window_size=60),
    lambda app: app.windowed_table("t", 60),
    lambda app: app.windowed_table("t", "1m", retention=60),
    lambda app: tg.App("b", data=app.state, idle_after=60),
])  # fmt: skip
def test_a_length_without_a_unit_is_refused_wherever_it_is_said(tmp_path, make) -> None:
    tg.Log(tmp_path / "log").create_topic("t", 1)
    with pytest.raises(InvalidError, match=r"seconds or \d+ milliseconds"):
        make(tg.App("a", data=tmp_path))


def test_an_upper_case_m_is_refused_and_a_timedelta_is_fine() -> None:
    with pytest.raises(InvalidError, match=r"a window's size: .*1m for minutes, or 30d for months"):
        tg.Tumbling("1M")
    assert tg.Tumbling(timedelta(minutes=1)) == tg.Tumbling("1m")


def test_queries_refuse_a_moment_in_another_unit(tmp_path) -> None:
    produce(tmp_path, TEN)
    app = app_of(tmp_path)
    app.run("local", until="caught_up")
    with app.open_table("minutes") as table:
        assert len(table.fetch("ann", TEN)) == 1
        assert len(table.fetch("ann", MOMENT.isoformat(), "2027-01-01T00:00:00.123456789Z[UTC]")) == 0
        for asked in (lambda: table.fetch("ann", TEN // 1000), lambda: table.get("ann", TEN * 1000)):
            with pytest.raises(InvalidError, match="looks like"):
                asked()
