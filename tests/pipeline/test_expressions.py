"""Expressions give the same columns however they are written, in the order of the rows, of the promised type."""

from __future__ import annotations

import pickle
import random
import sys
import threading

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import tidegate as tg
from tidegate.pipeline.expressions import Mapped, Projection
from tidegate.windows.events import EventBatch

SCHEMA = pa.schema([("amount", pa.float64()), ("user", pa.string()), ("n", pa.int64())])


def events(rows: int, seed: int = 1) -> EventBatch:
    chance = random.Random(seed)
    maybe = [None if chance.random() < 0.1 else chance.uniform(-50, 50) for _ in range(rows)]
    values = pa.record_batch(
        [
            pa.array(maybe, pa.float64()),
            pa.array([f"u{chance.randrange(9)}" for _ in range(rows)], pa.string()),
            pa.array([chance.randrange(100) for _ in range(rows)], pa.int64()),
        ],
        schema=SCHEMA,
    )
    ts = np.array([1_767_225_600_000 + chance.randrange(86_400_000) for _ in range(rows)], np.int64)
    return EventBatch(
        key=pa.array(
            [None if chance.random() < 0.1 else f"k{row}".encode() for row in range(rows)], pa.binary()
        ),
        ts=ts,
        offset=np.arange(rows, dtype=np.int64) * 2,
        partition=np.full(rows, 3, np.int32),
        stream_time=np.maximum.accumulate(ts) if rows else ts,
        values=values,
    )


def project(batch: EventBatch, **columns) -> pa.RecordBatch:
    return Projection(list(columns.items()), SCHEMA, tg.String(), what="here").batch(batch)


@pytest.mark.parametrize("rows", [0, 1, 5000])
def test_sql_arrow_and_functions_agree_with_plain_python(rows) -> None:
    batch = events(rows)
    got = project(
        batch,
        sql="amount * 2 + n",
        arrow=pc.add(pc.multiply(pc.field("amount"), 2), pc.field("n")),
        function=lambda given: pc.add(pc.multiply(given["amount"], 2), given["n"]),
    )
    amounts, numbers = batch.values["amount"].to_pylist(), batch.values["n"].to_pylist()
    wanted = [None if a is None else a * 2 + n for a, n in zip(amounts, numbers, strict=True)]
    assert got["sql"].to_pylist() == got["arrow"].to_pylist() == got["function"].to_pylist() == wanted
    assert got.schema == pa.schema([(name, pa.float64()) for name in ("sql", "arrow", "function")])


def test_rows_keep_their_order_in_large_batches() -> None:
    batch = events(300_000)
    got = project(batch, at="CAST(offset AS BIGINT) * 1", who="upper(user)")
    assert got["at"].to_numpy().tolist() == batch.offset.tolist()
    assert got["who"].to_pylist() == [user.upper() for user in batch.values["user"].to_pylist()]


def test_key_time_offset_and_partition_can_be_used() -> None:
    batch = events(50)
    got = project(
        batch,
        who="key",
        loud="upper(key)",
        hour="extract(hour FROM ts)",
        day="CAST(ts AS DATE)",
        place="partition * 1000000 + offset",
    )
    names = [None if key is None else key.decode() for key in batch.key.to_pylist()]
    assert got["who"].to_pylist() == names
    assert got["loud"].to_pylist() == [name and name.upper() for name in names]
    assert got["hour"].to_pylist() == [int(ts) // 3_600_000 % 24 for ts in batch.ts]
    assert {str(day) for day in got["day"].to_pylist()} == {"2026-01-01"}
    assert got["place"].to_pylist() == [3_000_000 + int(offset) for offset in batch.offset]


def test_a_column_of_the_user_hides_the_one_of_the_record() -> None:
    schema = pa.schema([("ts", pa.string()), ("key", pa.int64())])
    batch = EventBatch(
        pa.array([b"\xff"], pa.binary()),
        np.array([5], np.int64),
        np.array([0], np.int64),
        np.array([0], np.int32),
        np.array([5], np.int64),
        pa.record_batch([pa.array(["mine"]), pa.array([7])], schema=schema),
    )
    projection = Projection([("a", "ts || '!'"), ("b", "key + 1")], schema, tg.String(), what="here")
    assert projection.batch(batch).to_pylist() == [{"a": "mine!", "b": 8}]


def test_a_key_that_is_not_what_it_is_declared_to_be_is_named() -> None:
    batch = events(3)
    bad = EventBatch(
        pa.array([b"a", b"\xff\xfe", b"c"]),
        batch.ts,
        batch.offset,
        batch.partition,
        batch.stream_time,
        batch.values,
    )
    with pytest.raises(tg.CorruptError, match=r"partition 3, offset 2 .* key=Bytes"):
        project(bad, x="upper(key)")
    assert project(bad, x="n + 1").num_rows == 3  # nobody looked at the keys


def test_names_in_any_case_and_with_blanks() -> None:
    schema = pa.schema([("Order Id", pa.string()), ("b", pa.int64())])
    plain = Projection([("x", '"order id" || B')], schema, tg.String(), what="here")
    assert plain.schema.field("x").type == pa.string()
    whole = Projection([("x", "Order Id")], schema, tg.String(), what="here")
    assert whole.schema.field("x").type == pa.string()
    both = pa.schema([("a", pa.int64()), ("A", pa.int64())])
    with pytest.raises(tg.InvalidError, match="does not tell upper from lower"):
        Projection([("x", "a + 1")], both, tg.String(), what="here")
    assert Projection([("x", pc.field("A") + 1)], both, tg.String(), what="here").schema.names == ["x"]


def test_columns_that_are_words_of_sql_need_no_quotes() -> None:
    schema = pa.schema([("order", pa.string()), ("end", pa.int64()), ("offset", pa.int64())])
    wrong = "CASE WHEN order = 'order' THEN offset ELSE \"end\" END"
    made = Projection([("x", wrong)], schema, tg.String(), what="here")
    values = pa.record_batch([pa.array(["order", "x"]), pa.array([1, 2]), pa.array([10, 20])], schema=schema)
    assert made.batch(events(2).with_values(values)).to_pylist() == [{"x": 10}, {"x": 2}]


def test_structs_lists_and_lambdas_are_looked_into() -> None:
    schema = pa.schema([("who", pa.struct([("name", pa.string())])), ("n", pa.list_(pa.int64()))])
    made = Projection(
        [("a", "who.name"), ("b", "list_sum(list_transform(n, lambda each: each * 2))"), ("c", "len(n)")],
        schema,
        tg.String(),
        what="here",
    )
    batch = events(2)
    values = pa.record_batch([pa.array([{"name": "ann"}, None]), pa.array([[1, 2], []])], schema=schema)
    rows = made.batch(batch.with_values(values)).to_pylist()
    assert [(row["a"], row["b"], row["c"]) for row in rows] == [("ann", 6, 2), (None, None, 0)]
    with pytest.raises(tg.InvalidError, match="no column 'eech'"):
        Projection([("b", "list_transform(n, lambda each: eech * 2)")], schema, tg.String(), what="here")


def test_values_that_do_not_fit_say_how_to_get_null() -> None:
    batch = events(5)
    with pytest.raises(tg.InvalidError, match="TRY_CAST"):
        project(batch, x="CAST(user AS INTEGER)")
    assert project(batch, x="TRY_CAST(user AS INTEGER)")["x"].null_count == 5


@pytest.mark.parametrize("failing", ["10 // (n - n)", "9223372036854775807 + 1 + n"])
def test_what_cannot_be_computed_says_how_to_get_null_with_what_can_be_typed(failing: str) -> None:
    batch = events(5)
    with pytest.raises(tg.InvalidError, match=r"TRY\(…\) gives null") as raised:
        project(batch, x=failing)
    assert "SET " not in str(raised.value), "there is no session of the user's to set anything in"
    assert project(batch, x=f"TRY({failing})")["x"].null_count == 5


def test_an_answer_of_another_type_than_promised_is_refused() -> None:
    def fickle(batch: pa.RecordBatch) -> pa.Array:
        return batch["user"] if batch.num_rows else batch["n"]

    def narrow(batch: pa.RecordBatch) -> pa.Array:
        return pa.array([1.0] * batch.num_rows, pa.float32() if batch.num_rows else pa.float64())

    with pytest.raises(tg.InvalidError, match="cast it to one type"):
        project(events(3), x=fickle)
    assert project(events(3), x=narrow).schema.field("x").type == pa.float64()


def test_an_error_of_the_users_function_is_the_users() -> None:
    def fails(batch: pa.RecordBatch) -> pa.Array:
        if batch.num_rows:
            raise ZeroDivisionError("mine")
        return batch["n"]

    with pytest.raises(ZeroDivisionError, match="mine"):
        project(events(1), x=fails)


def test_a_map_sees_everything_and_is_held_to_its_schema() -> None:
    schema = pa.schema([("who", pa.string()), ("n", pa.int32())])

    def shorten(batch: pa.RecordBatch) -> pa.Table:
        assert batch.schema.names == ["amount", "user", "n", "key", "ts", "offset", "partition"]
        return pa.table({"who": batch["user"], "n": batch["n"]})

    mapped = Mapped(shorten, schema, SCHEMA, tg.String(), what="here")
    assert mapped.batch(events(4)).schema == schema


def test_projections_travel_and_are_used_in_other_threads() -> None:
    made = Projection([("x", "n * 2"), ("y", pc.field("n") + 1)], SCHEMA, tg.String(), what="here")
    batch = events(100)
    copy = pickle.loads(pickle.dumps(made))
    answers: list[pa.RecordBatch] = []
    threads = [threading.Thread(target=lambda: answers.append(copy.batch(batch))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert len(answers) == 4 and all(answer == made.batch(batch) for answer in answers)


def test_without_duckdb_names_arrow_and_functions_still_work(monkeypatch) -> None:
    from tidegate.pipeline import expressions

    monkeypatch.setitem(sys.modules, "duckdb", None)
    monkeypatch.setattr(expressions, "_own", threading.local())
    batch = events(3)
    assert project(batch, a="n", b=pc.field("n") > 5, c=lambda given: given["user"]).num_rows == 3
    with pytest.raises(tg.InvalidError, match=r"tidegate\[sql\]"):
        project(batch, a="n + 1")
