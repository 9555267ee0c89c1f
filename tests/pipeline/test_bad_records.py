"""One record that a step fails on stops its partition and says where, or becomes a dead letter; the rest goes on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import tidegate as tg
from tidegate.cli.main import run

TEN = 1_767_261_600_000
VALUE = tg.Json(id="string", text="string", n="int64")
POISON = 11  # the offset, in partition 1


def produce(
    folder: Path, *, partitions: int = 2, rows: int = 20, poison: dict[int, int] | None = None
) -> None:
    """`rows` records in each partition; those named in `poison` (offset → partition) have a text that is no number."""
    bad = {POISON: 1} if poison is None else poison
    with tg.Log(folder / "log") as log:
        if "orders" not in log.topics():
            log.create_topic("orders", partitions)
        writer = log.writer("orders")
        for partition in range(partitions):
            texts = ["poison" if bad.get(row) == partition else str(row) for row in range(rows)]
            values = [
                json.dumps({"id": f"{partition}-{row}", "text": text, "n": row})
                for row, text in enumerate(texts)
            ]
            keys = [f"k{partition}"] * rows
            times = [TEN + 1000 * row for row in range(rows)]
            writer.write(pa.table({"key": keys, "value": values, "timestamp": times}), partition=partition)


def as_numbers(batch: pa.RecordBatch) -> pa.RecordBatch:
    numbers = [int(text) for text in batch.column("text").to_pylist()]
    return pa.RecordBatch.from_arrays(
        [batch.column("id"), pa.array(numbers, pa.int64())], names=["id", "number"]
    )


def _numbers(stream: tg.Stream) -> tg.Stream:
    return stream.map(as_numbers, pa.schema({"id": pa.string(), "number": pa.int64()}))


def _rated(stream: tg.Stream) -> tg.Stream:
    return stream.lookup("rates", "rate", value=tg.Json(rate="int64"))


def create_rates(folder: Path) -> None:
    with tg.Log(folder / "log") as log:
        log.create_topic("rates", 1, if_not_exists=True)
        log.writer("rates").write(pa.table({"key": ["1-3"], "value": ['{"rate": 5}']}))


STEPS: dict[str, Callable[[tg.Stream], tg.Stream]] = {
    "map": _numbers,
    "sql": lambda stream: stream.select("id", number="CAST(text AS BIGINT)"),
    "arrow": lambda stream: stream.select("id", number=pc.field("text").cast("int64")),
    "function": lambda stream: stream.select("id", number=lambda rows: rows.column("text").cast("int64")),
    "filter": lambda stream: stream.filter("CAST(text AS BIGINT) >= 0").select("id", number="n"),
    "two": lambda stream: _numbers(stream.filter("n >= 0")).filter("number >= 0"),
    "behind-dedupe": lambda stream: _numbers(stream.drop_duplicates("id", within="1h")),
    "behind-key": lambda stream: _numbers(stream.key_by("id")).drop_duplicates("id", within="1h"),
    "behind-key-and-dedupe": lambda stream: _numbers(stream.key_by("id").drop_duplicates("id", within="1h")),
    "behind-key-and-lookup": lambda stream: _numbers(
        _rated(stream.key_by("id").drop_duplicates("id", within="1h"))
    ),
    "behind-lookup-and-key": lambda stream: _numbers(
        _rated(stream).key_by("id").drop_duplicates("id", within="1h")
    ),
}


def app_of(folder: Path, steps: str, on_error: Any = "fail") -> tg.App:
    if "lookup" in steps:
        create_rates(folder)
    app = tg.App("shop", data=folder)
    STEPS[steps](app.stream("orders", value=VALUE, on_error=on_error)).to_topic("numbers")
    return app


def sent(folder: Path, topic: str = "numbers") -> list[str]:
    with tg.Log(folder / "log", read_only=True) as log:
        return sorted(
            json.loads(value)["id"]
            for batch in log.reader(topic)
            for value in batch.column("value").to_pylist()
        )


def ids(partition: int, rows: range) -> list[str]:
    return [f"{partition}-{row}" for row in rows]


@pytest.mark.parametrize("step", STEPS)
def test_a_bad_record_stops_its_partition_alone_and_says_where(tmp_path: Path, step: str) -> None:
    produce(tmp_path)
    app = app_of(tmp_path, step)
    summary = app.run("local", until="caught_up")
    (stopped,) = summary.stopped
    assert (stopped.topic, stopped.partition, stopped.offset, stopped.reason) == (
        "orders",
        1,
        POISON,
        "failed",
    )
    assert f"orders-1 stopped at offset {POISON}" in stopped.message and "poison" in stopped.message
    assert STEP_SAID.get(step, "map as_numbers") in stopped.message
    assert summary.exit_code == 5
    before = sorted([*ids(0, range(20)), *ids(1, range(POISON))])
    if "-key" in step:  # the other partition waits for the stopped one where it came later (ticks, W3)
        before = sorted([*ids(0, range(POISON)), *ids(1, range(POISON))])
    assert sent(tmp_path) == before


STEP_SAID = {"sql": "select", "arrow": "select", "function": "select", "filter": "filter"}


@pytest.mark.parametrize("step", STEPS)
def test_the_command_that_is_named_leaves_the_record_out(tmp_path: Path, step: str) -> None:
    produce(tmp_path)
    app = app_of(tmp_path, step)
    (stopped,) = app.run("local", until="caught_up").stopped
    command = f"tidegate app resume shop --partition numbers:1 --skip-to {POISON + 1} --state {app.state}"
    assert stopped.command == command and f"`{command}`" in stopped.message
    assert run(command.split()[1:]) == 0
    assert app.run("local", until="caught_up").exit_code == 0
    rest = [row for row in ids(1, range(20)) if row != f"1-{POISON}"]
    assert sent(tmp_path) == sorted([*ids(0, range(20)), *rest])


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("round_records", [None, 3])
def test_bad_records_are_kept_as_dead_letters(tmp_path: Path, step: str, round_records: int | None) -> None:
    produce(tmp_path, poison={0: 0, 4: 1, 5: 1, 19: 1, 11: 0})
    app = app_of(tmp_path, step, "keep")
    summary = app.run("local", until="caught_up", round_records=round_records)
    assert summary.exit_code == 0 and not summary.stopped
    bad = {(0, 0), (1, 4), (1, 5), (1, 19), (0, 11)}
    letters = app.dead_letters("numbers")
    assert set(zip(letters["partition"].to_pylist(), letters["offset"].to_pylist(), strict=True)) == bad
    assert letters.num_rows == len(bad)
    assert all("poison" in reason for reason in letters["reason"].to_pylist())
    assert {json.loads(value)["text"] for value in letters["value"].to_pylist()} == {"poison"}
    good = [f"{part}-{row}" for part in (0, 1) for row in range(20) if (part, row) not in bad]
    assert sent(tmp_path) == sorted(good)


def as_windows(folder: Path, on_error: Any, *, rekeyed: bool, emit: str = "close") -> tg.App:
    app = tg.App("shop", data=folder)
    stream = app.stream("orders", value=VALUE, on_error=on_error)
    stream = stream.key_by("id") if rekeyed else stream.drop_duplicates("id", within="1h")
    windows = _numbers(stream).window(tg.Tumbling("5s", retention="1h"), emit=emit)
    windows.agg(total=tg.sum("number")).to_table("totals")
    return app


def total(app: tg.App) -> int:
    with app, app.open_table("totals") as table:
        return sum(table.to_arrow()["total"].to_pylist())


@pytest.mark.parametrize("rekeyed", [False, True], ids=["co-partitioned", "re-keyed"])
@pytest.mark.parametrize("round_records", [None, 1, 7])
def test_a_record_that_fails_behind_state_counts_nowhere(
    tmp_path: Path, rekeyed: bool, round_records: int | None
) -> None:
    """The first try of the round has counted records; none of that may stay."""
    bad = {3: 0, POISON: 1, 12: 1}
    produce(tmp_path, poison=bad)
    app = as_windows(tmp_path, "keep", rekeyed=rekeyed)
    summary = app.run("local", until="caught_up", round_records=round_records)
    assert summary.exit_code == 0
    assert total(app) == 2 * sum(range(20)) - sum(bad)
    assert app.dead_letters("totals")["offset"].to_pylist() == [3, POISON, 12]
    stopping = as_windows(tmp_path / "stopped", "fail", rekeyed=rekeyed)
    produce(tmp_path / "stopped", poison=bad)
    stopped = stopping.run("local", until="caught_up", round_records=round_records).stopped
    assert [(each.partition, each.offset) for each in stopped] == [(0, 3), (1, POISON)]
    assert total(stopping) == sum(range(3)) + sum(range(POISON))
    for each in stopped:
        assert run(each.command.split()[1:]) == 0
    (again,) = stopping.run("local", until="caught_up", round_records=round_records).stopped
    assert again.offset == 12
    assert run(again.command.split()[1:]) == 0
    assert not stopping.run("local", until="caught_up", round_records=round_records).stopped
    assert total(stopping) == total(app)


def joined(rows: pa.RecordBatch, groups: Any, count: int) -> pa.Array:
    sums = [0] * count
    for text, group in zip(rows.column("text").to_pylist(), groups.tolist(), strict=True):
        sums[group] += int(text)
    return pa.array(sums, pa.int64())


def merged(states: pa.Array, groups: Any, count: int) -> pa.Array:
    sums = [0] * count
    for state, group in zip(states.to_pylist(), groups.tolist(), strict=True):
        sums[group] += state
    return pa.array(sums, pa.int64())


@pytest.mark.parametrize("rekeyed", [False, True], ids=["co-partitioned", "re-keyed"])
@pytest.mark.parametrize("on_error", ["fail", "drop", "keep"])
def test_a_users_own_aggregate_fails_on_one_record(tmp_path: Path, rekeyed: bool, on_error: str) -> None:
    produce(tmp_path)
    app = tg.App("shop", data=tmp_path)
    stream = app.stream("orders", value=VALUE, on_error=on_error)
    stream = stream.key_by("id") if rekeyed else stream
    own = tg.reduce("text", merged, partial=joined, state=pa.int64())
    stream.window(tg.Tumbling("5s", retention="1h")).agg(total=own).to_table("totals")
    summary = app.run("local", until="caught_up")
    if on_error == "fail":
        (stopped,) = summary.stopped
        assert (stopped.partition, stopped.offset) == (1, POISON)
        assert "aggregate total failed with ValueError" in stopped.message
        return
    assert not summary.stopped and summary.exit_code == 0
    assert total(app) == 2 * sum(range(20)) - POISON
    assert app.dead_letters("totals").num_rows == (on_error == "keep")


def test_a_function_that_looks_at_other_rows_is_told_so(tmp_path: Path) -> None:
    produce(tmp_path, poison={})

    def alone(batch: pa.RecordBatch) -> pa.RecordBatch:
        if batch.num_rows > 1:
            raise RuntimeError("one at a time")
        return batch.select(["id"])

    app = tg.App("shop", data=tmp_path)
    app.stream("orders", value=VALUE).map(alone, pa.schema({"id": pa.string()})).to_topic("ids")
    with pytest.raises(tg.InvalidError, match="on none of them alone"):
        app.run("local", until="caught_up")


def test_words_for_what_happens_to_bad_records(tmp_path: Path) -> None:
    app = tg.App("shop", data=tmp_path)
    assert app.stream("orders").source.on_error == "fail"
    assert app.changes("orders", sessions=True, on_error="keep").source.on_error == "keep"
    with pytest.raises(tg.InvalidError, match="'fail', 'drop', 'keep'"):
        app.stream("orders", on_error="skip")  # type: ignore[arg-type]
    now = r"stream\('orders', on_bad='skip'\) has another name now: stream\('orders', on_error='drop'\)"
    with pytest.raises(tg.InvalidError, match=now):
        app.stream("orders", on_bad="skip")  # type: ignore[arg-type]
    with pytest.raises(tg.InvalidError, match=r"changes\('orders', on_error='keep'\)"):
        app.changes("orders", sessions=True, on_bad="keep")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unexpected keyword argument 'on_bat'"):
        app.stream("orders", on_bat="keep")  # type: ignore[arg-type]


LARGEST = 2**63 - 1
KINDS = {
    "tumbling": tg.Tumbling("5s", retention="1h"),
    "hopping": tg.Hopping("6s", "3s", retention="1h"),
    "sliding": tg.Sliding("5s", retention="1h"),
    "session": tg.Session("1s", retention="1h"),
    "unlimited": tg.Unlimited(),
}


def write_amounts(folder: Path) -> None:
    """Key a overflows in its first window, and comes back into range in its second; key b does neither."""
    rows = [("a", 0, LARGEST), ("a", 1, LARGEST), ("b", 1, 5), ("a", 10, 7), ("b", 11, 6), ("b", 600, 1)]
    with tg.Log(folder / "log") as log:
        log.create_topic("orders", 1)
        log.writer("orders").write(
            pa.table(
                {
                    "key": [key for key, *_ in rows],
                    "value": [json.dumps({"n": number}) for *_, number in rows],
                    "timestamp": [TEN + 1000 * second for _, second, _ in rows],
                }
            )
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("emit", ["update", "close"])
def test_a_sum_that_does_not_fit_is_null_and_told_and_the_rest_stays_readable(
    tmp_path: Path, kind: str, emit: str, caplog: pytest.LogCaptureFixture
) -> None:
    if kind == "unlimited" and emit == "close":
        pytest.skip("an unlimited window never closes")
    write_amounts(tmp_path)
    app = tg.App("shop", data=tmp_path)
    windows = app.stream("orders", value=tg.Json(n="int64")).window(KINDS[kind], emit=emit)
    made = windows.agg(total=tg.sum("n"), orders=tg.count(), mean=tg.mean("n"))
    made.to_topic("sent")
    made.to_table("totals")
    summary = app.run("local", until="caught_up")
    assert summary.exit_code == 0 and not summary.stopped
    assert "total of key b'a' in the window that starts at 2026" in caplog.text or kind == "unlimited"
    assert "does not fit int64" in caplog.text
    assert re.search(
        r"not in all results of \S+: [1-9]\d* results that could not be made and are null", str(summary)
    )
    caplog.clear()
    with app, app.open_table("totals") as table:
        rows = table.to_arrow().to_pylist()
        assert table.fetch("b")[0].value["total"] in (5, 12)
    assert "does not fit int64" in caplog.text  # whoever reads is told as well
    overflown = [row for row in rows if row["total"] is None]
    assert overflown and {row["key"] for row in overflown} == {"a"}
    assert all(
        row["mean"] is not None and row["orders"] > 0 for row in overflown
    )  # only the sum has no value
    assert {row["key"] for row in rows if row["total"] is not None} >= {"b"}


def test_a_finish_that_fails_for_one_window_leaves_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    produce(tmp_path, partitions=1, poison={})

    def inverse(states: pa.Array) -> pa.Array:
        return pa.array([100 // (state - 10) for state in states.to_pylist()], pa.int64())

    app = tg.App("shop", data=tmp_path)
    own = tg.reduce("n", merged, state=pa.int64(), finish=inverse, result=pa.int64())
    stream = app.stream("orders", value=VALUE)
    stream.window(tg.Tumbling("5s", retention="1h")).agg(x=own).to_table("totals")
    assert app.run("local", until="caught_up").exit_code == 0
    with app, app.open_table("totals") as table:
        assert table.to_arrow()["x"].to_pylist() == [None, 100 // 25, 100 // 50, 100 // 75]
    assert "by zero" in caplog.text


SINKS: dict[str, Callable[[tg.Stream], tg.Stream]] = {
    "stateless": lambda stream: stream,
    "behind-dedupe": lambda stream: stream.drop_duplicates("id", within="1h"),
    "re-keyed": lambda stream: stream.key_by("id").drop_duplicates("id", within="1h"),
}


@pytest.mark.parametrize("steps", SINKS)
@pytest.mark.parametrize("kind", ["int", "json"])
def test_a_record_that_cannot_be_written_is_like_one_that_a_step_fails_on(
    tmp_path: Path, steps: str, kind: str
) -> None:
    """A number beyond int32, or a NaN where JSON is written."""
    for on_error in ("fail", "keep"):
        folder = tmp_path / on_error
        produce(folder, poison={})
        app = tg.App("shop", data=folder)
        stream = SINKS[steps](app.stream("orders", value=VALUE, on_error=on_error))
        if kind == "int":
            number = f"CASE WHEN id = '1-{POISON}' THEN 3000000000 ELSE n END"
            stream.select(number=number).to_topic("numbers", value=tg.Int())
        else:
            number = f"CASE WHEN id = '1-{POISON}' THEN 'nan' ELSE '1.5' END::DOUBLE"
            stream.select("id", number=number).to_topic("numbers")
        summary = app.run("local", until="caught_up", round_records=4)
        if on_error == "fail":
            (stopped,) = summary.stopped
            assert (stopped.partition, stopped.offset, stopped.reason) == (1, POISON, "failed")
        else:
            assert not summary.stopped
            assert app.dead_letters("numbers")["offset"].to_pylist() == [POISON]
            with tg.Log(folder / "log", read_only=True) as log:
                assert sum(batch.num_rows for batch in log.reader("numbers")) == 39


def test_a_window_whose_result_json_cannot_say_is_sent_with_null(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    produce(tmp_path, poison={})
    app = tg.App("shop", data=tmp_path)
    number = f"CASE WHEN id = '1-{POISON}' THEN 'inf' ELSE '1' END::DOUBLE"
    windows = app.stream("orders", value=VALUE).select("id", number=number).window(tg.Tumbling("5s"))
    windows.agg(total=tg.sum("number"), orders=tg.count()).to_topic("numbers")
    assert app.run("local", until="caught_up").exit_code == 0
    with tg.Log(tmp_path / "log", read_only=True) as log:
        rows = [
            json.loads(value)
            for batch in log.reader("numbers")
            for value in batch.column("value").to_pylist()
        ]
    assert [row for row in rows if row["total"] is None] == [{"total": None, "orders": 5}]
    assert len(rows) == 8 and "NaN or infinite" in caplog.text


def test_a_window_whose_result_does_not_fit_its_serde_is_named(tmp_path: Path) -> None:
    produce(tmp_path, poison={})
    app = tg.App("shop", data=tmp_path)
    stream = app.stream("orders", value=VALUE).select(n="n * 300000000")
    stream.window(tg.Tumbling("5s")).agg(total=tg.sum("n")).to_topic("numbers", value=tg.Int())
    with pytest.raises(
        tg.InvalidError, match=r"to numbers: the result of key b'k[01]' in the window that starts at 2026"
    ):
        app.run("local", until="caught_up")


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("step", ["two", "behind-dedupe", "behind-key-and-dedupe", "behind-key-and-lookup"])
def test_whatever_is_bad_and_however_it_is_cut_each_good_record_comes_once(
    tmp_path: Path, step: str, seed: int
) -> None:
    """Against the obvious answer: random records are bad, rounds have random sizes, and every stop is resumed."""
    random = Random(seed)
    rows = 30
    bad = {(partition, row) for partition in range(2) for row in range(rows) if random.random() < 0.15}
    for on_error in ("fail", "drop", "keep"):
        folder = tmp_path / on_error
        with tg.Log(folder / "log") as log:
            log.create_topic("orders", 2)
            for partition in range(2):
                texts = ["poison" if (partition, row) in bad else str(row) for row in range(rows)]
                said = [
                    {"id": f"{partition}-{row}", "text": text, "n": row} for row, text in enumerate(texts)
                ]
                table = {
                    "key": [f"k{partition}"] * rows,
                    "value": [json.dumps(each) for each in said],
                    "timestamp": [TEN + 1000 * row for row in range(rows)],
                }
                log.writer("orders").write(pa.table(table), partition=partition)
        app, met = app_of(folder, step, on_error), set[tuple[int, int]]()
        while stopped := app.run("local", until="caught_up", round_records=random.randint(1, 40)).stopped:
            assert on_error == "fail"
            for each in stopped:
                met.add((each.partition, each.offset))
                assert run(each.command.split()[1:]) == 0
        good = [f"{part}-{row}" for part in (0, 1) for row in range(rows) if (part, row) not in bad]
        assert sent(folder) == sorted(good)
        letters = app.dead_letters("numbers")
        kept = set(zip(letters["partition"].to_pylist(), letters["offset"].to_pylist(), strict=True))
        assert met == (bad if on_error == "fail" else set())
        assert kept == (bad if on_error == "keep" else set()) and letters.num_rows == len(kept)


class FailsOnce:
    """A function that fails the first time it is called, as one that asks another service may."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if batch.num_rows:
            self.calls += 1
            if self.calls == 1:
                raise ConnectionError("try again")
        return batch.select(["x"])


def test_a_step_that_fails_once_loses_no_record(tmp_path: Path) -> None:
    with tg.Log(tmp_path / "log") as log:
        log.create_topic("in", 1)
        values = [f'{{"x": {number}}}' for number in range(10)]
        log.writer("in").write(pa.table({"key": ["k"] * 10, "value": values}))
    once = FailsOnce()
    app = tg.App("once", data=tmp_path)
    app.stream("in", value=tg.Json(x="int64"), on_error="drop").map(
        once, pa.schema([("x", pa.int64())])
    ).to_topic("out")
    summary = app.run("local", until="caught_up")
    assert summary.exit_code == 0 and once.calls > 1
    with tg.Log(tmp_path / "log", read_only=True) as log:
        assert log.reader("out").read_all().num_rows == 10
