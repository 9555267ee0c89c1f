"""Reading by time: one rule for sessions wherever they are read, every kind of moment, and no other window size."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import tidegate as tg
from tidegate.durations import moment_ms
from tidegate.errors import InvalidError

TEN = 1_767_261_600_000  # 2026-01-01T10:00Z
LATEST = 2**63 - 1
NAMES = [f"k{number}" for number in range(6)]


def made(folder: Path, kind: Any, *, seed: int = 3) -> tg.App:
    """An app whose results are in a table and in a topic."""
    draw = random.Random(seed)
    times = sorted(TEN + draw.randrange(3_600_000) for _ in range(400))
    with tg.Log(folder / "log") as log:
        log.create_topic("clicks", 2)
        rows = {"key": [draw.choice(NAMES) for _ in times], "value": ['{"x":1}'] * 400, "timestamp": times}
        log.writer("clicks").write(pa.table(rows))
    app = tg.App("clicks", data=folder)
    windows = app.stream("clicks", value=tg.Json(x="long")).window(kind).agg(n=tg.count(), x=tg.sum("x"))
    windows.to_topic("results").to_table("totals")
    app.run("local", until="caught_up")
    return app


def rows_of(found: Any) -> list[tuple[Any, int, int, Any]]:
    """(key, start, end, count), in order."""
    return sorted(
        (
            row.key,
            row.window.start,
            row.window.end,
            row.value["n"] if isinstance(row.value, dict) else row.value,
        )
        for row in found
    )


def test_sessions_are_found_by_overlap_in_results_and_in_topics_alike(tmp_path: Path) -> None:
    app = made(tmp_path, tg.Session("40s", retention="1d"))
    draw = random.Random(7)
    with app.open_table("totals") as results, app.sessioned_table("results") as topic:
        whole = rows_of(results.all())
        assert len(whole) > 100 and whole == rows_of(topic.all())
        for _ in range(200):
            first = TEN + draw.randrange(-60_000, 3_660_000)
            last = first + draw.choice((0, 1, 1000, 60_000, 900_000))
            touched = [row for row in whole if row[2] >= first and row[1] <= last]
            key = draw.choice(NAMES)
            mine = [row for row in touched if row[0] == key]
            for table in (results, topic):
                assert rows_of(table.fetch_all(first, last)) == touched
                assert rows_of(table.fetch(key, first, last)) == mine
                assert rows_of(table.fetch_many([key], first, last)) == mine
        assert rows_of(results.fetch_all(TEN, 0)) == [] == rows_of(topic.fetch_all(TEN, 0))


def test_a_session_is_got_by_its_key_and_start(tmp_path: Path) -> None:
    app = made(tmp_path, tg.Session("40s", retention="1d"))
    with app.open_table("totals") as results, app.sessioned_table("results") as topic:
        for key, start, end, count in rows_of(results.all()):
            assert results.get(key, start)["n"] == count
            assert topic.get(key, start)["n"] == topic.get(key, start, end)["n"] == count
            assert topic.get(key, start, end + 1) is None
            if end > start:
                assert results.get(key, start + 1) is None and topic.get(key, start + 1) is None


@pytest.mark.parametrize(
    "kind",
    [
        tg.Tumbling("1m", retention="1d"),
        tg.Hopping("2m", "30s", retention="1d"),
        tg.Sliding("1m", retention="1d"),
    ],
    ids=["tumbling", "hopping", "sliding"],
)
def test_windows_are_found_by_their_start_in_results_and_in_topics_alike(tmp_path: Path, kind: Any) -> None:
    app = made(tmp_path, kind)
    draw = random.Random(7)
    with app.open_table("totals") as results, app.windowed_table("results") as topic:
        whole = rows_of(results.all())
        assert whole and whole == rows_of(topic.all())
        for _ in range(60):
            first = TEN + draw.randrange(-60_000, 3_660_000)
            last = first + draw.choice((0, 1000, 60_000, 900_000))
            inside = [row for row in whole if first <= row[1] <= last]
            for table in (results, topic):
                assert rows_of(table.fetch_all(first, last)) == inside
                for key in NAMES[:2]:
                    assert rows_of(table.fetch(key, first, last)) == [row for row in inside if row[0] == key]
        for key, start, _, count in whole[:50]:
            assert results.get(key, start)["n"] == count and topic.get(key, start)["n"] == count


BERLIN = timezone(timedelta(hours=1))
MOMENTS: dict[str, Callable[[int], Any]] = {
    "int": int,
    "numpy.int64": np.int64,
    "numpy.uint64": np.uint64,
    "iso": lambda ms: datetime.fromtimestamp(ms / 1000, UTC).isoformat(),
    "iso, another zone": lambda ms: datetime.fromtimestamp(ms / 1000, BERLIN).isoformat(),
    "datetime": lambda ms: datetime.fromtimestamp(ms / 1000, UTC),
    "datetime without a zone": lambda ms: datetime.fromtimestamp(ms / 1000, UTC).replace(tzinfo=None),
    "pandas.Timestamp": lambda ms: pd.Timestamp(ms, unit="ms", tz="UTC"),
    "pandas.Timestamp, another zone": lambda ms: pd.Timestamp(ms, unit="ms", tz="Europe/Berlin"),
    "pandas.Timestamp without a zone": lambda ms: pd.Timestamp(ms, unit="ms"),
    "numpy.datetime64[ms]": lambda ms: np.datetime64(ms, "ms"),
    "numpy.datetime64[ns]": lambda ms: np.datetime64(ms * 1_000_000, "ns"),
    "arrow int64": lambda ms: pa.scalar(ms, pa.int64()),
    "arrow timestamp": lambda ms: pa.scalar(ms, pa.timestamp("ms", "UTC")),
    "arrow timestamp[ns]": lambda ms: pa.scalar(ms * 1_000_000, pa.timestamp("ns", "Europe/Berlin")),
}


@pytest.mark.parametrize("kind", ["window", "session"])
def test_every_read_takes_every_kind_of_moment(tmp_path: Path, kind: str) -> None:
    app = made(
        tmp_path,
        tg.Session("40s", retention="1d") if kind == "session" else tg.Tumbling("1m", retention="1d"),
    )
    opened = app.sessioned_table if kind == "session" else app.windowed_table
    with app.open_table("totals") as results, opened("results") as topic:
        key, start, end, count = rows_of(results.all())[20]
        for table in (results, topic):
            expected = [
                rows_of(table.fetch(key, start, end)),
                rows_of(table.fetch_many([key], start, end)),
                rows_of(table.fetch_all(start, end)),
            ]
            for name, make in MOMENTS.items():
                first, last = make(start), make(end)
                found = [
                    rows_of(table.fetch(key, first, last)),
                    rows_of(table.fetch_many([key], first, last)),
                    rows_of(table.fetch_all(first, last)),
                ]
                assert found == expected, name
                got = table.get(key, first)
                assert got is not None and got["n"] == count, name


def test_what_to_pandas_gives_is_taken_as_key_and_moment(tmp_path: Path) -> None:
    with tg.Log(tmp_path / "log") as log:
        log.create_topic("clicks", 1)
        keys = pa.array([number.to_bytes(8, "big") for number in range(20)], pa.binary())
        log.writer("clicks").write(pa.table({"key": keys, "value": ["{}"] * 20, "timestamp": [TEN] * 20}))
    app = tg.App("clicks", data=tmp_path)
    app.stream("clicks", key=tg.Long(), value=tg.Json()).window(tg.Tumbling("1m")).count("n").to_table(
        "totals"
    )
    app.run("local", until="caught_up")
    with app.open_table("totals") as table:
        frame = table.to_pandas()
        assert len(frame) == 20
        for row in frame.itertuples():
            assert table.get(row.key, row.window_start) == {"n": 1}
        for key, start in zip(frame["key"].to_numpy(), frame["window_start"].to_numpy(), strict=True):
            assert len(table.fetch(key, start, start)) == 1
        arrow = table.to_arrow()
        assert table.get(3, arrow["window_start"][3]) == {"n": 1}


def test_a_date_is_its_midnight_in_utc_and_what_is_no_moment_is_refused() -> None:
    midnight = 1_767_225_600_000
    assert moment_ms(date(2026, 1, 1)) == moment_ms(np.datetime64("2026-01-01")) == midnight
    assert moment_ms(pd.Timestamp("1969-12-31T23:59:59.9995Z")) == -1  # rounded down
    for none in (pd.NaT, np.datetime64("NaT")):
        with pytest.raises(InvalidError, match="no moment"):
            moment_ms(none)
    for wrong in (True, np.bool_(True), 1.5, np.float64(1.5), None, pa.scalar(1.5), b"2026"):
        with pytest.raises(TypeError, match="a moment is"):
            moment_ms(wrong)  # type: ignore[arg-type]


def test_a_window_size_that_the_topic_does_not_have_is_refused(tmp_path: Path) -> None:
    made(tmp_path, tg.Hopping("2m", "1m", retention="1d"))
    with tg.Log(tmp_path / "log", read_only=True) as log:
        for wrong in ("1m", "4m", "90s", "1ms"):
            with pytest.raises(InvalidError, match="results holds windows of 2m: give window_size='2m'"):
                tg.windowed_table(log, "results", wrong, state=tmp_path / "elsewhere")
        with pytest.raises(InvalidError, match=r"holds time windows: use windowed_table\('results'"):
            tg.sessioned_table(log, "results", state=tmp_path / "elsewhere")
        with tg.windowed_table(log, "results", "2m", state=tmp_path / "elsewhere") as table:
            assert len(table.all()) > 100


def test_sessions_and_plain_records_are_not_read_as_windows(tmp_path: Path) -> None:
    made(tmp_path, tg.Session("40s", retention="1d"))
    app = tg.App("plain", data=tmp_path)
    app.stream("clicks", value=tg.Json(x="long")).filter("x > 0").to_topic("copies")
    app.run("local", until="caught_up")
    with tg.Log(tmp_path / "log", read_only=True) as log:
        with pytest.raises(InvalidError, match=r"holds sessions: use sessioned_table\('results'"):
            tg.windowed_table(log, "results", "40s", state=tmp_path / "elsewhere")
        for wrong in (tg.sessioned_table, lambda *a, **k: tg.windowed_table(*a, "1m", **k)):
            with pytest.raises(InvalidError, match=r"copies holds plain records: use table\('copies'"):
                wrong(log, "copies", state=tmp_path / "elsewhere")
