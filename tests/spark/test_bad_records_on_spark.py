"""Records that steps fail on, through Spark and on the local engine: the same stops, dead letters and results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg

TEN = 1_767_261_600_000
BAD = {(0, 3), (1, 11), (1, 12)}


def produce(folder: Path) -> None:
    with tg.Log(folder / "log", durability="os") as log:
        log.create_topic("orders", 2)
        log.create_topic("rates", 1)
        log.writer("rates").write(pa.table({"key": ["1-3"], "value": ['{"rate": 5}']}))
        writer = log.writer("orders")
        for partition in range(2):
            texts = ["poison" if (partition, row) in BAD else str(row) for row in range(20)]
            values = [
                json.dumps({"id": f"{partition}-{row}", "text": text}) for row, text in enumerate(texts)
            ]
            times = [TEN + 1000 * row for row in range(20)]
            table = pa.table({"key": [f"k{partition}"] * 20, "value": values, "timestamp": times})
            writer.write(table, partition=partition)


def app_of(folder: Path, on_error: Any, steps: str) -> tg.App:
    def as_numbers(batch: pa.RecordBatch) -> pa.RecordBatch:  # in here, so that it travels by value
        numbers = [int(text) for text in batch.column("text").to_pylist()]
        return pa.RecordBatch.from_arrays(
            [batch.column("id"), pa.array(numbers, pa.int64())], names=["id", "number"]
        )

    app = tg.App("shop", data=folder)
    stream = app.stream("orders", value=tg.Json(id="string", text="string"), on_error=on_error)
    if steps == "behind state":
        stream = stream.drop_duplicates("id", within="1h")
    elif steps == "re-keyed":
        stream = stream.key_by("id", shards=2)
    elif steps == "re-keyed, behind state":
        stream = stream.key_by("id", shards=2).drop_duplicates("id", within="1h")
    elif (
        steps == "re-keyed, behind a lookup"
    ):  # tried only when their turn has come, rounds after they were read
        stream = stream.key_by("id", shards=2).drop_duplicates("id", within="1h")
        stream = stream.lookup("rates", "rate", value=tg.Json(rate="int64"))
    numbers = stream.map(as_numbers, pa.schema({"id": pa.string(), "number": pa.int64()}))
    windows = numbers.window(tg.Tumbling("5s", retention="1h"))
    windows.agg(total=tg.sum("number"), orders=tg.count()).to_table("totals")
    return app


def outcome(folder: Path, engine: Any, on_error: str, steps: str) -> Any:
    produce(folder)
    app = app_of(folder, on_error, steps)
    summary = app.run(engine, until="caught_up", round_records=16)
    letters = app.dead_letters("totals")
    with app, app.open_table("totals") as table:
        rows = table.to_arrow().to_pylist()
    stopped = [
        (each.partition, each.offset, each.reason, each.message.replace(str(folder), ""))
        for each in summary.stopped
    ]
    return (
        summary.exit_code,
        stopped,
        letters.sort_by([("partition", "ascending"), ("offset", "ascending")]),
        rows,
    )


@pytest.mark.parametrize("rekeyed", [False, True], ids=["co-partitioned", "re-keyed"])
def test_a_service_that_is_out_of_reach_is_no_records_fault(
    spark: Any, tmp_path: Path, rekeyed: bool
) -> None:
    produce(tmp_path)
    outage = tmp_path / "outage"
    outage.touch()

    def ask(batch: pa.RecordBatch, outage: str = str(outage)) -> pa.RecordBatch:
        from pathlib import Path

        if batch.num_rows and Path(outage).exists():
            raise ConnectionRefusedError("the price service")
        return batch.select(["id"])

    app = tg.App("shop", data=tmp_path)
    stream = app.stream("orders", value=tg.Json(id="string", text="string"), on_error="keep")
    stream = stream.key_by("id", shards=2) if rekeyed else stream
    stream.map(ask, pa.schema({"id": pa.string()})).drop_duplicates("id", within="1h").to_topic("ids")
    with pytest.raises(tg.UnavailableError, match=r"orders-[01], offsets .*: map .*the price service"):
        app.run(spark, until="caught_up", patience_ms=0, attempts=2)
    outage.unlink()
    assert app.run(spark, until="caught_up").exit_code == 0
    assert app.dead_letters("ids").num_rows == 0
    with tg.Log(tmp_path / "log", read_only=True) as log:
        assert log.reader("ids").read_all().num_rows == 40


@pytest.mark.parametrize(
    "steps",
    ["in front", "behind state", "re-keyed", "re-keyed, behind state", "re-keyed, behind a lookup"],
)
@pytest.mark.parametrize("on_error", ["fail", "keep"])
def test_bad_records_do_the_same_on_both_engines(
    spark: Any, tmp_path: Path, on_error: str, steps: str
) -> None:
    code, stopped, letters, rows = outcome(tmp_path / "spark", spark, on_error, steps)
    assert (code, stopped, letters, rows) == outcome(tmp_path / "local", "local", on_error, steps)
    assert code == (5 if on_error == "fail" else 0)
    if on_error == "keep":
        found = zip(letters["partition"].to_pylist(), letters["offset"].to_pylist(), strict=True)
        assert set(found) == BAD and not stopped
        assert sum(row["total"] for row in rows) == 2 * sum(range(20)) - 3 - 11 - 12
    else:
        both = [(0, 3, "failed"), (1, 11, "failed")]
        # Behind a lookup the second one's turn does not come: it waits for the partition that stopped.
        assert [each[:3] for each in stopped] == (both[:1] if "lookup" in steps else both)
