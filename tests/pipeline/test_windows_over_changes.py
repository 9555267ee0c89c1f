"""Windows over the changes of windows: every row counts once, with its last value, whatever the rounds were."""

from __future__ import annotations

import json
import math
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg
from tidegate.clock import ManualClock
from tidegate.log.maintenance import Housekeeping
from tidegate.metrics import Metrics
from tidegate.pipeline.admin import app_status
from tidegate.pipeline.evolution import compare
from tidegate.storage import open_backend
from tidegate.windows.keys import KeyFormat, TimeWindow, Windowed

T0 = 1_767_261_600_000
MINUTE = 60_000


def events(
    count: int, seed: int, *, late_ms: int = 0, span_ms: int = 20 * MINUTE
) -> list[tuple[str, int, float]]:
    """Events of 7 customers (key, time, amount); some come up to `late_ms` late."""
    chance = random.Random(seed)
    found = []
    for place in range(count):
        late = chance.randrange(late_ms) if late_ms and chance.random() < 0.3 else 0
        when = max(T0, T0 + place * span_ms // count - late)
        found.append((f"c{chance.randrange(7)}", when, float(chance.randrange(-50, 50))))
    return found


def write(folder: Path, rows: list[tuple[str, int, float]], partitions: int = 2) -> None:
    with tg.Log(folder / "log") as log:
        if "events" not in log.topics():
            log.create_topic("events", partitions)
        with log.writer("events") as writer:
            writer.write(
                pa.table(
                    {
                        "key": [key for key, *_ in rows],
                        "value": [f'{{"amount":{amount}}}' for *_, amount in rows],
                        "timestamp": [time for _, time, _ in rows],
                    }
                )
            )


def first_app(folder: Path, kind: Any, emit: str = "update") -> tg.App:
    app = tg.App("first", log=folder / "log", state=folder / "first")
    stream = app.stream("events", value=tg.Json(amount="double"))
    stream.window(kind, emit=emit).agg(n=tg.count(), total=tg.sum("amount")).to_topic("windows")
    return app


def second_app(folder: Path, kind: Any, rekeyed: bool, emit: str = "update", **said: Any) -> tg.App:
    """How many windows each customer (or each first digit of their counts) had, and what was in them."""
    app = tg.App("second", log=folder / "log", state=folder / "second")
    changes = app.changes("windows", value=tg.Json(n="int64", total="double"), **said)
    changes = changes.filter("n <> 3").select("*", double="total * 2")
    if rekeyed:
        changes = changes.key_by("n % 3", shards=3)
    changes.window(kind, emit=emit).agg(
        windows=tg.count(), n=tg.sum("n"), total=tg.sum("double"), mean=tg.mean("n")
    ).to_topic("again")
    return app


def naive(
    rows: list[tuple[Any, int, int, float]], size_ms: int, rekeyed: bool
) -> dict[tuple[Any, int], dict[str, Any]]:
    """Of final windows (key, event time, n, total), what the second windows hold."""
    found: dict[tuple[Any, int], list[tuple[int, float]]] = defaultdict(list)
    for key, time, n, total in rows:
        if n != 3:
            found[n % 3 if rekeyed else key, time // size_ms * size_ms].append((n, total))
    return {
        window: {
            "windows": len(held),
            "n": sum(n for n, _ in held),
            "total": math.fsum(2 * total for _, total in held),
            "mean": sum(n for n, _ in held) / len(held),
        }
        for window, held in found.items()
    }


def tumbling_rows(rows: list[tuple[str, int, float]], size_ms: int) -> list[tuple[str, int, int, float]]:
    held: dict[tuple[str, int], list[float]] = defaultdict(list)
    for key, time, amount in rows:
        held[key, time // size_ms * size_ms].append(amount)
    return [(key, start + size_ms - 1, len(amounts), sum(amounts)) for (key, start), amounts in held.items()]


def session_rows(rows: list[tuple[str, int, float]], gap_ms: int) -> list[tuple[str, int, int, float]]:
    by_key: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for key, time, amount in rows:
        by_key[key].append((time, amount))
    found = []
    for key, held in by_key.items():
        session: list[tuple[int, float]] = []
        for time, amount in sorted(held):
            if session and time - session[-1][0] > gap_ms:
                found.append((key, session[-1][0], len(session), sum(each for _, each in session)))
                session = []
            session.append((time, amount))
        found.append((key, session[-1][0], len(session), sum(each for _, each in session)))
    return found


def committed(app: tg.App) -> dict[tuple[Any, int], dict[str, Any]]:
    with app.open_table("again") as table:
        return {(row.key, row.window.start): row.value for row in table.all()}


def sent(app: tg.App, size_ms: int) -> dict[tuple[Any, int], dict[str, Any]]:
    """What a reader of the topic knows at the end."""
    with app, app.windowed_table("again", f"{size_ms}ms", retention="30d") as table:
        return {(row.key, row.window.start): row.value for row in table.all()}


def run_in_turns(
    folder: Path,
    rows: list[tuple[str, int, float]],
    first: Any,
    second: Any,
    turns: int,
    records: tuple[int, int],
) -> None:
    """Both apps are started again for every share of the records."""
    share = -(-len(rows) // turns)
    for at in range(0, len(rows), share):
        write(folder, rows[at : at + share])
        first().run("local", until="caught_up", round_records=records[0])
        second().run("local", until="caught_up", round_records=records[1])


ROUNDS = [(1, (10_000, 10_000)), (1, (37, 10_000)), (1, (500, 23)), (4, (61, 40)), (3, (7, 300))]


@pytest.mark.parametrize("rekeyed", [False, True])
@pytest.mark.parametrize(("turns", "records"), ROUNDS)
@pytest.mark.parametrize("kind", ["tumbling", "session"])
def test_every_row_counts_once_whatever_the_rounds(
    tmp_path: Path, kind: str, turns: int, records: tuple[int, int], rekeyed: bool
) -> None:
    rows = events(600, seed=turns, late_ms=90_000)
    size = 5 * MINUTE
    if kind == "tumbling":
        window, expected = tg.Tumbling("1m", grace="2m", retention="1d"), tumbling_rows(rows, MINUTE)
        said: dict[str, Any] = {"window_size": "1m"}
    else:
        window, expected = tg.Session("15s", grace="2m", retention="1d"), session_rows(rows, 15_000)
        said = {"sessions": True}
    again = tg.Tumbling("5m", retention="1d")
    run_in_turns(
        tmp_path,
        rows,
        lambda: first_app(tmp_path, window),
        lambda: second_app(tmp_path, again, rekeyed, **said),
        turns,
        records,
    )
    app = second_app(tmp_path, again, rekeyed, **said)
    wanted = naive(expected, size, rekeyed)
    assert len(wanted) >= 10
    assert committed(app) == wanted
    assert app.late("again").num_rows == 0, (
        "no change that was in time for its own window is late for the second"
    )
    assert sent(app, size) == wanted


@pytest.mark.parametrize("emit", ["update", "close"])
@pytest.mark.parametrize("records", [(9, 4), (10_000, 10_000)])
def test_what_was_late_for_a_window_is_in_none(tmp_path: Path, emit: str, records: tuple[int, int]) -> None:
    """Records that came too late for the first windows are in no row; the second windows equal its final rows."""
    rows = events(500, seed=8, late_ms=4 * MINUTE)
    write(tmp_path, rows)
    window = tg.Hopping("2m", "1m", grace="30s", retention="1d")
    first = first_app(tmp_path, window)
    summary = first.run("local", until="caught_up", round_records=records[0])
    assert first.late("windows").num_rows > 0 and summary.caught_up
    with first, first.windowed_table("windows", "2m", retention="30d") as table:
        final = [(row.key, row.window.end - 1, row.value["n"], row.value["total"]) for row in table.all()]
    again = tg.Tumbling("5m", retention="1d")
    second = second_app(tmp_path, again, False, emit, window_size="2m")
    second.run("local", until="caught_up", round_records=records[1], close=emit == "close")
    assert sent(second, 5 * MINUTE) == naive(final, 5 * MINUTE, False)


@pytest.mark.parametrize("emit", ["update", "close"])
@pytest.mark.parametrize(
    ("kind", "at", "start"),
    [
        (tg.Tumbling("1m", retention="1d"), T0 - 1, T0 - 5 * MINUTE),
        (tg.Hopping("1m", "1m", retention="1d"), T0, T0),
        (tg.Sliding("1m", retention="1d"), T0, T0 - 5 * MINUTE),
        (tg.Sliding("1m", retention="1d"), T0 + 1, T0),
        (tg.Session("1m", retention="1d"), T0 - 1, T0 - 5 * MINUTE),
        (tg.Session("1m", retention="1d"), T0, T0),
    ],
)
@pytest.mark.parametrize("is_own", [True, False])
def test_a_change_counts_a_millisecond_before_its_window_ends_and_a_session_at_its_end(
    tmp_path: Path, kind: Any, at: int, start: int, emit: str, is_own: bool
) -> None:
    """The result is the same in the app that writes the windows, which knows their kind, and in another one."""
    write(tmp_path, [("ann", at, 1.0)], partitions=1)
    app = first_app(tmp_path, kind, emit)
    said: dict[str, Any] = {"sessions": True} if isinstance(kind, tg.Session) else {"window_size": "1m"}
    apps = [app, app if is_own else tg.App("second", log=tmp_path / "log", state=tmp_path / "second")]
    changes = apps[1].changes("windows", value=ORDERS, emit=emit, **said)
    changes.window(tg.Tumbling("5m", retention="1d")).agg(n=tg.sum("n"), rows=tg.count()).to_table("again")
    for each in apps:
        each.run("local", until="caught_up", close=True)
    assert committed(apps[1]) == {("ann", start): {"n": 1, "rows": 1}}


def test_a_deletion_that_takes_a_row_back_is_not_counted_as_a_dropped_record(tmp_path: Path) -> None:
    """Sessions that grow together delete the ones before; each deletion was counted as `no_value`."""
    write(tmp_path, [("ann", T0 + at * 1000, 1.0) for at in (0, 50, 20, 70, 35)], partitions=1)
    kind = tg.Session("20s", grace="5m")
    first_app(tmp_path, kind).run("local", until="caught_up", round_records=1)
    with tg.Log(tmp_path / "log") as log:
        assert None in _values(log)
    metrics = Metrics()
    app = second_app(tmp_path, tg.Tumbling("5m", grace="1h"), False, sessions=True)
    app.run("local", until="caught_up", metrics=metrics)
    assert [each["n"] for each in committed(app).values()] == [5]
    assert "no_value" not in app_status(open_backend(app.state), "second").totals["again"]
    dropped = [each for each in metrics.samples() if each.name == "tidegate_dropped_records_total"]
    assert not any(each.value for each in dropped), dropped


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize("steps", ["filtered", "re-keyed"])
@pytest.mark.parametrize("kind", ["tumbling", "session", "sliding"])
def test_the_last_change_of_a_round_is_in_time_for_itself(
    tmp_path: Path, kind: str, steps: str, size: int
) -> None:
    """Its window is final by the end of the round, by records that a filter leaves out or that are elsewhere."""
    write(
        tmp_path,
        [(f"c{at}", T0 + at * 7 * MINUTE, at if steps == "re-keyed" else at % 3 - 0.5) for at in range(9)],
        partitions=1,
    )
    windows = {"tumbling": tg.Tumbling("1m"), "session": tg.Session("30s"), "sliding": tg.Sliding("1m")}[kind]
    emit = "close" if kind == "sliding" else "update"
    app = tg.App("both", data=tmp_path)
    stream = app.stream("events", value=tg.Json(amount="double"))
    stream = stream.key_by("amount", shards=3) if steps == "re-keyed" else stream.filter("amount > 0")
    stream.window(windows, emit=emit).agg(n=tg.count(), total=tg.sum("amount")).to_topic("windows")
    said: dict[str, Any] = {"sessions": True} if kind == "session" else {"window_size": "1m"}
    if steps == "re-keyed":
        said["key"] = tg.Double()
    changes = app.changes("windows", value=tg.Json(n="int64", total="double"), **said)
    again = changes.window(tg.Tumbling("5m", retention="1d")).agg(n=tg.sum("n"), total=tg.sum("total"))
    again.to_topic("again").to_table("rows")
    app.run("local", until="caught_up", round_records=size, close=True)
    with app.open_table("rows") as table:
        total = sum(row.value["n"] for row in table.all())
    expected = 9 if steps == "re-keyed" else 6
    assert (total, app.late("again").num_rows) == (expected, 0)


def test_a_topic_that_was_compacted_between_writer_and_reader_gives_the_same(tmp_path: Path) -> None:
    rows = events(600, seed=5, late_ms=MINUTE)
    said = {"window_size": "1m"}
    window, again = tg.Tumbling("1m", grace="2m", retention="1d"), tg.Tumbling("5m", retention="1d")
    for number, share in enumerate((rows[:200], rows[200:400], rows[400:])):
        write(tmp_path, share)
        first_app(tmp_path, window).run("local", until="caught_up", round_records=13)
        with tg.Log(tmp_path / "log") as log:
            before = len(_values(log))
            settings = {
                "min.compaction.lag.ms": "0",
                "min.cleanable.dirty.ratio": "0.01",
                "retention.ms": "-1",
            }
            log.alter_topic("windows", settings)
            for partition in range(2):
                log.partition("windows", partition).roll()
            parts = {"files": log.files, "clock": log.clock, "randomness": log.randomness}
            Housekeeping(log, broker=log.contents.broker_config(), **parts).clean_once(topics=["windows"])
            assert len(_values(log)) < before
        if number != 1:  # of the second share only what compaction left is ever read
            second_app(tmp_path, again, False, **said).run("local", until="caught_up", round_records=31)
    app = second_app(tmp_path, again, False, **said)
    assert committed(app) == naive(tumbling_rows(rows, MINUTE), 5 * MINUTE, False)


def test_a_reader_that_comes_back_after_days_of_compaction_finds_what_was_deleted(tmp_path: Path) -> None:
    """Sessions that had grown together meanwhile were counted beside the one they became: 9 records, not 7."""
    kind = tg.Session("20s", grace="30m", retention="30d")

    def visits(*seconds: int) -> None:
        write(tmp_path, [("ann", T0 + at * 1000, 1.0) for at in seconds], partitions=1)
        first_app(tmp_path, kind).run("local", until="caught_up", round_records=1)

    app = second_app(tmp_path, tg.Tumbling("1h", grace="1h", retention="1d"), False, sessions=True)
    visits(0, 50)
    app.run("local", until="caught_up")
    assert [each["n"] for each in committed(app).values()] == [2]
    visits(70, 90, 20, 35, 110)
    for days in (2, 5, 8):
        with tg.Log(tmp_path / "log", clock=ManualClock(T0 + days * 1440 * MINUTE)) as log:
            log.alter_topic("windows", {"min.cleanable.dirty.ratio": "0.01"})
            log.partition("windows", 0).roll()
            parts = {"files": log.files, "clock": log.clock, "randomness": log.randomness}
            before = len(_values(log))
            Housekeeping(log, broker=log.contents.broker_config(), **parts).clean_once(topics=["windows"])
            assert days > 2 or len(_values(log)) < before
        visits(3600 * days)
    app.run("local", until="caught_up")
    assert {start: each["n"] for (_, start), each in committed(app).items()} == {
        T0 + hour * 60 * MINUTE: n for hour, n in ((0, 7), (2, 1), (5, 1), (8, 1))
    }


def _values(log: tg.Log) -> list[Any]:
    with log.reader("windows") as reader:
        return list(reader.read_all()["value"].to_pylist())


def test_a_kafka_streams_changelog_is_read_as_updates(tmp_path: Path) -> None:
    """Nothing is known of a topic that this app does not write: its rows may come again, and deletions take back."""
    serde = tg.windowed(tg.String(), size="1m", key_format=KeyFormat.CHANGELOG)
    app = tg.App("reader", data=tmp_path)
    changes = [
        ("ann", 0, 1),
        ("ann", 0, 2),
        ("bob", 0, 7),
        ("ann", MINUTE, 5),
        ("bob", 0, None),
        ("ann", 0, 4),
    ]
    with tg.Log(app.log) as log:
        log.create_topic("counts", 1)
        with log.writer("counts") as writer:
            keys = [serde.encode(Windowed(key, TimeWindow(at, at + MINUTE))) for key, at, _ in changes]
            values = [None if n is None else n.to_bytes(8, "big") for *_, n in changes]
            writer.write(
                pa.table(
                    {
                        "key": pa.array(keys, pa.binary()),
                        "value": pa.array(values, pa.binary()),
                        "timestamp": [at for _, at, _ in changes],
                    }
                )
            )
    stream = app.changes("counts", window_size="1m", value=tg.Long())
    stream.window(tg.Tumbling("1h")).agg(n=tg.count(), total=tg.sum("value")).to_topic("hours")
    app.run("local", until="caught_up", round_records=2)
    with app.open_table("hours") as table:
        assert {row.key: row.value for row in table.all()} == {"ann": {"n": 2, "total": 9}}
    with app, app.windowed_table("hours") as sent_table:
        assert [(row.key, row.value) for row in sent_table.all()] == [("ann", {"n": 2, "total": 9})]


ORDERS = tg.Json(n="int64", total="double")


@pytest.mark.parametrize(
    "made",
    [
        tg.max("n"), tg.min("n"), tg.first("n"), tg.last("n"), tg.count_distinct("n"), tg.top_k("n", 3),
        tg.approx_count_distinct("n"), tg.collect("n"),
        tg.reduce("n", lambda states, groups, count: states, state=pa.int64()),
    ],
    ids=lambda each: each.kind,
)  # fmt: skip
def test_what_cannot_be_undone_is_refused_over_updates(tmp_path: Path, made: Any) -> None:
    app = tg.App("a", data=tmp_path)
    changes = app.changes("windows", window_size="1m", value=ORDERS)
    with pytest.raises(
        tg.InvalidError, match=r"emit='update'.*cannot take back.*count, sum, mean can.*emit='close'"
    ):
        changes.window(tg.Tumbling("1h")).agg(x=made)
    close = app.changes("windows", window_size="1m", value=ORDERS, emit="close")
    close.window(tg.Tumbling("1h")).agg(x=made)


@pytest.mark.parametrize("kind", [tg.Session("1m"), tg.Sliding("1m")])
def test_windows_that_lie_where_records_lie_are_refused_over_updates(tmp_path: Path, kind: Any) -> None:
    app = tg.App("a", data=tmp_path)
    with pytest.raises(tg.InvalidError, match=r"could not be taken back.*emit='close'"):
        app.changes("windows", window_size="1m", value=ORDERS).window(kind).count()
    app.changes("windows", window_size="1m", value=ORDERS, emit="close").window(kind).count()


def test_deduplicating_updates_is_refused(tmp_path: Path) -> None:
    app = tg.App("a", data=tmp_path)
    with pytest.raises(tg.InvalidError, match=r"no copy.*emit='close'"):
        app.changes("windows", window_size="1m", value=ORDERS).drop_duplicates("n", "1h")
    app.changes("windows", window_size="1m", value=ORDERS, emit="close").drop_duplicates("n", "1h")


def own(folder: Path, emit: str = "close", kind: Any = None) -> tg.App:
    app = tg.App("own", data=folder)
    stream = app.stream("events", value=tg.Json(amount="double"))
    windows = stream.window(tg.Tumbling("1m", grace="2m") if kind is None else kind, emit=emit)
    windows.agg(n=tg.count(), total=tg.sum("amount")).to_topic("windows")
    return app


def test_of_its_own_topics_an_app_knows_how_they_are_written(tmp_path: Path) -> None:
    assert own(tmp_path).changes("windows", window_size="1m", value=ORDERS).source.emit is tg.Emit.CLOSE
    source = own(tmp_path, "update").changes("windows", window_size="1m", value=ORDERS).source
    assert (source.emit, source.settles_ms) == (tg.Emit.UPDATE, 2 * MINUTE)
    kind = tg.Session("20s", grace="1m")
    source = own(tmp_path, "update", kind).changes("windows", sessions=True, value=ORDERS).source
    assert source.settles_ms == 80_000


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ({"window_size": "1m", "emit": "close"}, r"read as emit='close'.*writes them with emit='update'"),
        ({"window_size": "2m"}, r"windows of 2m.*writes windows of 1m"),
        ({"sessions": True}, r"read as sessions.*writes windows of 1m"),
    ],
)
@pytest.mark.parametrize("writer_first", [True, False])
def test_reading_its_own_topic_as_something_else_is_refused(
    tmp_path: Path, said: dict[str, Any], wrong: str, writer_first: bool
) -> None:
    app = tg.App("own", data=tmp_path)

    def write_windows() -> None:
        stream = app.stream("events", value=tg.Json(amount="double"))
        stream.window(tg.Tumbling("1m", grace="2m")).agg(n=tg.count(), total=tg.sum("amount")).to_topic(
            "windows"
        )

    def read_windows() -> None:
        app.changes("windows", value=ORDERS, **said).window(tg.Tumbling("1h")).count().to_topic("hours")

    first, second = (write_windows, read_windows) if writer_first else (read_windows, write_windows)
    first()
    with pytest.raises(tg.InvalidError, match=wrong):
        second()


def test_windows_of_its_own_are_not_read_as_plain_records(tmp_path: Path) -> None:
    app = own(tmp_path)
    with pytest.raises(tg.InvalidError, match=r"read it with app\.changes\('windows'"):
        app.stream("windows", value=ORDERS).window(tg.Tumbling("1h")).count().to_topic("hours")
    app.stream("windows").to_topic("copied")  # nothing is added up


def test_state_that_does_not_know_what_rows_were_is_not_gone_on_with(tmp_path: Path) -> None:
    """Of an earlier release, which added every change up, and of a flow that read each window once."""

    def flow(**said: Any) -> Any:
        app = tg.App("a", data=tmp_path)
        changes = app.changes("windows", window_size="1m", value=ORDERS, **said)
        changes.window(tg.Tumbling("1h", grace=said.pop("second", 0))).agg(n=tg.count()).to_topic("hours")
        return app.flows[0]

    now = flow()
    document = dict(now.document)
    document["source"] = {
        name: said for name, said in now.document["source"].items() if name not in ("emit", "settles_ms")
    }
    before = json.dumps(document).encode()
    assert compare({"hours": before}, [now]).kind == "incompatible"
    assert "could not be taken back" in compare({"hours": before}, [now]).notes[0]
    assert compare({"hours": before}, [flow(emit="close")]).kind == "compatible"
    assert compare({"hours": flow(emit="close").description}, [now]).kind == "incompatible"
    assert compare({"hours": now.description}, [flow(grace="1m")]).kind == "compatible"
    assert compare({"hours": now.description}, [now]).kind == "same"


@pytest.mark.parametrize("rekeyed", [False, True])
@pytest.mark.parametrize("records", [(10_000, 10_000), (100, 50), (20, 10_000)])
def test_partitions_that_are_far_apart_in_time_make_no_change_late(
    tmp_path: Path, records: tuple[int, int], rekeyed: bool
) -> None:
    """A writer's task takes records of both; what is final for it is what the slower one has reached."""
    chance = random.Random(1)
    rows = [(chance.randrange(5), T0 + max(0, at - at % 2 * 500) * 1000) for at in range(1200)]
    with tg.Log(tmp_path / "log") as log:
        log.create_topic("events", 2)
        with log.writer("events") as writer:
            writer.write(
                pa.table(
                    {
                        "value": [f'{{"group":{group}}}' for group, _ in rows],
                        "timestamp": [time for _, time in rows],
                        "partition": pa.array([at % 2 for at in range(len(rows))], pa.int32()),
                    }
                )
            )
    first = tg.App("first", log=tmp_path / "log", state=tmp_path / "first", idle_after="1d")
    stream = first.stream("events", value=tg.Json(group="int64")).key_by("group", shards=2)
    stream.window(tg.Tumbling("1m", retention="1d")).count().to_topic("windows")
    first.run("local", until="caught_up", round_records=records[0])
    assert first.late("windows").num_rows == 0
    second = tg.App("second", log=tmp_path / "log", state=tmp_path / "second", idle_after="1d")
    changes = second.changes("windows", window_size="1m", key=tg.Long(), value=tg.Long())
    if rekeyed:
        changes = changes.key_by("key % 2", shards=3)
    changes.window(tg.Tumbling("5m", retention="1d")).agg(n=tg.sum("value")).to_table("again")
    second.run("local", until="caught_up", round_records=records[1])
    wanted: dict[tuple[int, int], int] = defaultdict(int)
    for group, time in rows:
        wanted[group % 2 if rekeyed else group, time // (5 * MINUTE) * 5 * MINUTE] += 1
    with second.open_table("again") as table:
        assert {(row.key, row.window.start): row.value["n"] for row in table.all()} == wanted
    assert second.late("again").num_rows == 0


@pytest.mark.parametrize("by_another_app", [False, True])
def test_windows_over_a_topic_that_several_tasks_share_are_refused(
    tmp_path: Path, by_another_app: bool
) -> None:
    app = tg.App("own", data=tmp_path)
    write(tmp_path, events(10, 1), partitions=2)
    stream = app.stream("events", value=tg.Json(amount="double"))
    stream.window(tg.Tumbling("1m")).agg(n=tg.count()).to_topic(
        "windows", partitions=3, value=tg.Json(n="int64")
    )
    if by_another_app:
        app.run("local", until="caught_up")
        app = tg.App("another", data=tmp_path)
    app.changes("windows", window_size="1m", value=tg.Json(n="int64")).window(
        tg.Tumbling("1h")
    ).count().to_topic("hours")
    with pytest.raises(
        tg.InvalidError, match=r"3 partitions and 2 tasks that write it.*Leave partitions= out"
    ):
        app.run("local", until="caught_up")


@pytest.mark.parametrize(
    ("written", "said", "wrong"),
    [
        ("update", {"window_size": "1m", "emit": "close"}, r"as emit='close'.*written with emit='update'"),
        ("close", {"window_size": "1m"}, r"as emit='update'.*written with emit='close'"),
        ("update", {"window_size": "2m"}, r"as windows of 2m.*has windows of 1m"),
        ("update", {"sessions": True}, r"as sessions.*has windows of 1m"),
    ],
)
def test_another_apps_topic_is_read_as_it_is_recorded(
    tmp_path: Path, written: str, said: dict[str, Any], wrong: str
) -> None:
    """The reader is another app; what the topic holds is recorded with it."""
    write(tmp_path, events(50, 1))
    first_app(tmp_path, tg.Tumbling("1m", grace="2m"), written).run("local", until="caught_up")
    app = tg.App("reader", log=tmp_path / "log", state=tmp_path / "reader")
    app.changes("windows", value=ORDERS, **said).window(tg.Tumbling("1h")).count().to_topic("hours")
    with pytest.raises(tg.InvalidError, match=wrong):
        app.run("local", until="caught_up")
