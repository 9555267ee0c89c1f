"""How long a table of an app keeps its windows when nobody says it: a day, as `explain()` tells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg

TEN = 1_767_261_600_000  # 2026-01-01T10:00Z
MINUTE = 60_000
HOUR = 60 * MINUTE
DAY = 24 * HOUR
KINDS: dict[str, Any] = {
    "tumbling": lambda **said: tg.Tumbling("1m", **said),
    "hopping": lambda **said: tg.Hopping("2m", "1m", **said),
    "sliding": lambda **said: tg.Sliding("1m", **said),
    "session": lambda **said: tg.Session("1m", **said),
}
LEAST = {"tumbling": "1m", "hopping": "2m", "sliding": "2m", "session": "60001ms"}


def write(folder: Path, times: list[int]) -> None:
    with tg.Log(folder / "log") as log:
        log.create_topic("clicks", 1, if_not_exists=True)
        rows = {"key": ["a"] * len(times), "value": ['{"x":1}'] * len(times), "timestamp": times}
        log.writer("clicks").write(pa.table(rows))


def app_of(
    folder: Path, kind: Any, *, table: bool = True, topic: bool = False, emit: Any = "update"
) -> tg.App:
    app = tg.App("clicks", data=folder)
    windows = app.stream("clicks", value=tg.Json(x="long")).window(kind, emit=emit).count("n")
    if table:
        windows.to_table("totals")
    if topic:
        windows.to_topic("results")
    return app


def starts(app: tg.App) -> list[int]:
    with app.open_table("totals") as table:
        return sorted(table.to_arrow()["window_start"].to_pylist())


@pytest.mark.parametrize("name", KINDS)
def test_without_a_retention_windows_are_readable_for_a_day(tmp_path: Path, name: str) -> None:
    times = [TEN + hour * HOUR for hour in range(49)]
    write(tmp_path, times)
    app = app_of(tmp_path, KINDS[name]())
    app.run("local", until="caught_up")
    with app.open_table("totals") as table:
        seen = {row["timestamp"] for row in table.to_arrow().to_pylist()}
    assert {time for time in times if time > times[-1] - DAY} <= seen  # one of each hour of the last day
    assert min(seen) >= times[-1] - DAY - 2 * MINUTE  # and no growth without an end
    assert "kept 1d (default)" in app.explain()


def test_what_is_said_is_kept_and_what_is_no_table_keeps_what_can_change(tmp_path: Path) -> None:
    write(tmp_path, [TEN + hour * HOUR for hour in range(5)])
    app = app_of(tmp_path, tg.Tumbling("1m", retention="2h"))
    assert "kept 2h" in app.explain() and "default" not in app.explain()
    app.run("local", until="caught_up")
    assert starts(app) == [TEN + 3 * HOUR, TEN + 4 * HOUR]
    only = app_of(tmp_path / "topic", tg.Tumbling("1m"), table=False, topic=True)
    assert "kept 1m (default)" in only.explain()
    assert "kept 3d (default)" in app_of(tmp_path / "long", tg.Tumbling("2d", grace="1d")).explain()


@pytest.mark.parametrize("name", KINDS)
def test_state_that_was_made_with_the_old_default_goes_on_and_keeps_longer(tmp_path: Path, name: str) -> None:
    """Before, a table kept what could still change: just what `retention` may say at least."""
    write(tmp_path, [TEN, TEN + HOUR])
    old = app_of(tmp_path, KINDS[name](retention=LEAST[name]))
    old.run("local", until="caught_up")
    before = starts(old)
    new = app_of(tmp_path, KINDS[name]())
    write(tmp_path, [TEN + 2 * HOUR, TEN + 3 * HOUR])
    new.run("local", until="caught_up")
    assert min(starts(new)) == min(before) > TEN  # what was dropped stays dropped, what was there is there
    with new.open_table("totals") as table:
        times = {row["timestamp"] for row in table.to_arrow().to_pylist()}
    assert times == {TEN + HOUR, TEN + 2 * HOUR, TEN + 3 * HOUR}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("emit", ["update", "close"])
def test_what_is_sent_does_not_depend_on_how_long_windows_are_kept(
    tmp_path: Path, name: str, emit: str
) -> None:
    times = [TEN + offset * 20_000 for offset in (0, 1, 2, 9, 3, 30, 31, 200, 5, 201, 900, 899)]
    sent = []
    for number, kind in enumerate(
        (KINDS[name](), KINDS[name](retention=LEAST[name]), KINDS[name](retention="7d"))
    ):
        folder = tmp_path / str(number)
        write(folder, times)
        app = app_of(folder, kind, topic=True, emit=emit)
        app.run("local", until="caught_up")
        with tg.Log(folder / "log", read_only=True) as log:
            records = [
                (row["key"], row["value"], row["timestamp"])
                for batch in log.reader("results")
                for row in batch.to_pylist()
                if row["value"] is not None and len(row["value"]) == 8
            ]
        late = app.late("totals").select(["offset", "reason"]).to_pylist()
        sent.append((sorted(records, key=repr), late))
    assert sent[0] == sent[1] == sent[2]


@pytest.mark.parametrize("rekeyed", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_the_end_of_the_input_shows_the_same_windows_whatever_the_rounds(
    tmp_path: Path, name: str, rekeyed: bool
) -> None:
    times = [TEN + place * 10_000 + place // 9 * 90_000 - 25_000 * (place % 7 == 3) for place in range(200)]
    found = []
    for number, (size, closes) in enumerate([(1 << 20, False), (1 << 20, True), (9, True), (64, True)]):
        folder = tmp_path / str(number)
        write(folder, times)
        app = tg.App("clicks", data=folder)
        stream = app.stream("clicks", value=tg.Json(x="long"))
        stream = stream.key_by("x", shards=2) if rekeyed else stream
        windows = stream.window(KINDS[name](grace="20s", retention="4m"), late=tg.LateSettings("2h")).count()
        windows.to_table("totals")
        app.run("local", until="caught_up", round_records=size, close=closes)
        with app.open_table("totals") as table:
            rows = table.to_arrow().to_pylist()
        found.append((sorted(rows, key=repr), sorted(app.late("totals").to_pylist(), key=repr)))
    assert len(found[0][0]) >= 2
    assert found[1:] == found[:1] * 3
