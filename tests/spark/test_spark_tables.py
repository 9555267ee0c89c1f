"""Committed tables as Arrow rows for Spark, and as DataFrames on a real Spark: columns, filters, commits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
)

from table_records import Said, session_record, window_record, write_records
from tidegate.errors import InvalidError, TidegateWarning, UnavailableError
from tidegate.log.log import Log
from tidegate.spark.tables.filters import bounds_of
from tidegate.spark.tables.options import NAMES, TableOptions
from tidegate.spark.tables.plan import (
    EVERYTHING,
    LARGEST_MS,
    RowBounds,
    chosen_commit,
    rules_of,
    table_schema,
)
from tidegate.spark.tables.rows import read_rows
from tidegate.storage import open_backend
from tidegate.tables.factories import sessioned_table, windowed_table
from tidegate.tables.factories import table as key_table
from tidegate.tables.options import Consumed
from tidegate.tables.serdes.base import Bytes, Double, Int, Long, String
from tidegate.tables.serdes.json import Json, require_serde, serde_from
from window_oracles import ms

MINUTE = 60_000
WINDOWS, SESSIONS, KEYS, ENDLESS = "windows-changelog", "sessions-changelog", "accounts", "endless-changelog"
FIELDS = Json(count="int", total="double", small="uint8", tags="list<string>", at="timestamp")
MOMENT = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Stored:
    """A state folder with one table of each kind; the windowed one has three commits."""

    state: Path
    numbers: tuple[int, ...]
    moments: tuple[int, ...]

    def options(self, name: str, **options: str) -> TableOptions:
        return TableOptions.parse({"state": str(self.state), "table": name, **options})


@pytest.fixture(scope="session")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stored]:
    folder = tmp_path_factory.mktemp("tables")
    with Log(folder / "log", durability="os") as log:
        for topic in (WINDOWS, SESSIONS, KEYS, ENDLESS):
            log.create_topic(topic, partitions=2)
        state = folder / "state"
        commits = []
        with windowed_table(
            log, WINDOWS, "1m", state=state, retention="30d", consumed=Consumed(String(), Long())
        ) as table:
            for commit in range(3):
                records = [
                    window_record(f"k{n}".encode(), window * MINUTE, Long().encode(100 * commit + n))
                    for n in range(20)
                    for window in range(5 * (commit + 1))
                ]
                for partition in (0, 1):
                    chosen = [
                        record for n, record in enumerate(records) if n // (5 * (commit + 1)) % 2 == partition
                    ]
                    write_records(log, WINDOWS, chosen, partition=partition)
                table.catch_up()
                commits.append(table.commits()[-1])
        said = [
            session_record(
                b"ann",
                start,
                start + 500,
                FIELDS.encode(
                    {"count": start, "total": start / 7, "small": 200, "tags": ["a", "b"], "at": MOMENT}
                ),
            )
            for start in range(0, 10_000, 1000)
        ]
        write_records(log, SESSIONS, said, partition=0)
        with sessioned_table(
            log, SESSIONS, state=state, retention="30d", consumed=Consumed(String(), FIELDS)
        ):
            pass
        endless = [window_record(b"far", start, Long().encode(start), 7) for start in (1, MINUTE)]
        write_records(log, ENDLESS, endless, partition=1)
        consumed = Consumed(String(), Long())
        with windowed_table(log, ENDLESS, ms(LARGEST_MS), state=state, consumed=consumed):
            pass
        accounts = [Said(Long().encode(n), str(n * n).encode(), n + 5) for n in range(-5, 30)]
        write_records(log, KEYS, accounts, partition=0)
        with key_table(log, KEYS, state=state, consumed=Consumed(Long(), String())):
            pass
    yield Stored(state, tuple(each.number for each in commits), tuple(each.committed_ms for each in commits))


def rows(options: TableOptions, bounds: RowBounds = EVERYTHING, *columns: str) -> list[dict[str, Any]]:
    """All rows a read gives, over all partitions, checked to be in exactly the declared schema."""
    with options.opened() as backend:
        commits = chosen_commit(backend, options)
    schema = table_schema(rules_of(commits.shape, options), columns or options.columns)
    found: list[dict[str, Any]] = []
    for partition in commits.shape.partitions:
        for batch in read_rows(options, commits, partition, bounds, schema):
            assert batch.schema.equals(schema) and 0 < batch.num_rows <= options.batch_rows
            found += batch.to_pylist()
    return found


def at(ms: int, micros: int = 0) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms, microseconds=micros)


def test_every_row_comes_once_with_typed_columns(stored: Stored) -> None:
    found = rows(stored.options(WINDOWS))
    assert len(found) == len({(row["key"], row["window_start"]) for row in found}) == 20 * 15
    (row,) = [row for row in found if row["key"] == "k7" and row["window_start"] == at(14 * MINUTE)]
    assert row["window_end"] == at(15 * MINUTE) and row["value"] == 207 and row["partition"] == 1
    assert row["timestamp"] == at(14 * MINUTE) and isinstance(row["offset"], int)


def test_batches_are_bounded(stored: Stored) -> None:
    assert len(rows(stored.options(WINDOWS, batchRows="7"))) == 300
    assert len(rows(stored.options(WINDOWS, batchRows="7"), RowBounds(keys=(b"k1", b"k2")))) == 30


@pytest.mark.parametrize(
    "columns", [("value",), ("offset", "key"), ("window_end",), ("partition",), ("timestamp",)]
)
def test_only_the_columns_asked_for_are_made(stored: Stored, columns: tuple[str, ...]) -> None:
    whole = rows(stored.options(WINDOWS))
    assert rows(stored.options(WINDOWS), EVERYTHING, *columns) == [
        {name: row[name] for name in columns} for row in whole
    ]


def test_sessions_have_both_ends_and_json_fields_are_a_struct(stored: Stored) -> None:
    found = [row for row in rows(stored.options(SESSIONS)) if row["key"] == "ann"]
    assert sorted(row["window_start"] for row in found) == [at(ms) for ms in range(0, 10_000, 1000)]
    assert all(row["window_end"] - row["window_start"] == timedelta(milliseconds=500) for row in found)
    value = next(row["value"] for row in found if row["window_start"] == at(3000))
    assert value == {"count": 3000, "total": 3000 / 7, "small": 200, "tags": ["a", "b"], "at": MOMENT}


def test_an_end_of_a_window_that_spark_cannot_hold_is_null(stored: Stored) -> None:
    found = rows(stored.options(ENDLESS))
    assert [(row["window_start"], row["window_end"]) for row in found] == [(at(1), None), (at(MINUTE), None)]
    assert [(row["value"], row["timestamp"]) for row in found] == [(1, at(7)), (MINUTE, at(7))]


def test_plain_keys_have_no_windows(stored: Stored) -> None:
    found = {row["key"]: row for row in rows(stored.options(KEYS))}
    assert set(found) == set(range(-5, 30)) and set(found[4]) == {
        "key",
        "value",
        "timestamp",
        "partition",
        "offset",
    }
    assert found[4]["value"] == "16" and found[4]["timestamp"] == at(9)
    assert [
        row["key"] for row in rows(stored.options(KEYS), RowBounds(keys=(Long().encode(-2) or b"",)))
    ] == [-2]


# -- which commit ----------------------------------------------------------------------------------


def test_a_commit_is_chosen_by_number_or_by_time(stored: Stored) -> None:
    for index, number in enumerate(stored.numbers):
        found = rows(stored.options(WINDOWS, versionAsOf=str(number)))
        assert len(found) == 20 * 5 * (index + 1)
        assert {row["value"] for row in found if row["key"] == "k7"} == {100 * index + 7}
    then = stored.options(WINDOWS, timestampAsOf=str(stored.moments[1]))
    assert len(rows(then)) == 20 * 10
    assert len(rows(stored.options(WINDOWS, timestampAsOf="2999-01-01T00:00Z"))) == 300


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        (WINDOWS, {"versionAsOf": "99"}, "commit 99 of table windows-changelog is not kept; there are "),
        (WINDOWS, {"timestampAsOf": "1999-01-01"}, "no commit as old as 1999-01-01"),
        ("window", {}, "there are accounts, endless-changelog, sessions-changelog, windows-changelog"),
        (WINDOWS, {"versionAsOf": "1", "timestampAsOf": "5"}, "keep one"),
        (WINDOWS, {"version": "1"}, "did you mean versionAsOf"),
        (WINDOWS, {"state": "/nowhere"}, "there is no state in /nowhere"),
        (WINDOWS, {"value": "money"}, r"Json\(amount='double'"),
        (WINDOWS, {"columns": "key,vlaue"}, "has no column 'vlaue'"),
        (WINDOWS, {"state": "memory://x"}, "keep it in a folder"),
        (WINDOWS, {"state": ""}, "option state is missing"),
    ],
)
def test_what_is_wrong_is_said(stored: Stored, name: str, options: dict[str, str], complaint: str) -> None:
    with pytest.raises(InvalidError, match=complaint):
        rows(TableOptions.parse({"state": str(stored.state), "table": name} | options))


def test_the_only_table_needs_no_name(stored: Stored, tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="option table is missing"):
        rows(TableOptions.parse({"state": str(stored.state)}))
    with Log(tmp_path / "log", durability="os") as log:
        write_records(log, "one", [Said(b"a", b"1")])
        with key_table(log, "one", state=tmp_path / "state"):
            assert rows(TableOptions.parse({"state": str(tmp_path / "state")}))[0]["key"] == b"a"


def test_a_commit_whose_files_are_gone_says_to_read_again(stored: Stored, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(stored.state, tmp_path / "state")
    options = TableOptions.parse({"state": str(tmp_path / "state"), "table": WINDOWS})
    with closing(open_backend(tmp_path / "state")) as backend:
        for each in list(backend.list("")):
            if "pack" in each.name:
                backend.delete(each.name)
    with pytest.raises(UnavailableError, match="read the table again"):
        rows(options)


# -- filters ---------------------------------------------------------------------------------------


def key(value: Any) -> EqualTo:
    return EqualTo(("key",), value)


def filtered(stored: Stored, name: str, *filters: Filter) -> tuple[list[dict[str, Any]], list[Filter]]:
    options = stored.options(name)
    with options.opened() as backend:
        rules = rules_of(chosen_commit(backend, options).shape, options)
    bounds, left = bounds_of(filters, rules)
    found = [] if bounds.is_nothing else rows(options, bounds)
    if bounds.partitions is not None:
        found = [row for row in found if row["partition"] in bounds.partitions]
    return found, left


def matches(row: dict[str, Any], each: Filter) -> bool:
    """The obvious twin: what SQL says of one row."""
    value, said = row[each.attribute[0]], getattr(each, "value", None)  # type: ignore[attr-defined]
    if isinstance(each, IsNotNull):
        return value is not None
    if value is None:
        return False
    answers = {
        EqualTo: lambda: value == said,
        EqualNullSafe: lambda: value == said,
        In: lambda: value in said,
        GreaterThan: lambda: value > said,
        GreaterThanOrEqual: lambda: value >= said,
        LessThan: lambda: value < said,
        LessThanOrEqual: lambda: value <= said,
    }
    return bool(answers[type(each)]())


START, END = ("window_start",), ("window_end",)


@pytest.mark.parametrize(
    ("name", "filters"),
    [
        (WINDOWS, [key("k3")]),
        (WINDOWS, [key("nobody")]),
        (WINDOWS, [In(("key",), ("k3", "k4", "nobody", None))]),
        (WINDOWS, [In(("key",), ("k3", "k4")), EqualNullSafe(("key",), "k4")]),
        (WINDOWS, [key("k3"), key("k4")]),
        (WINDOWS, [EqualTo(START, at(3 * MINUTE))]),
        (WINDOWS, [EqualTo(START, at(3 * MINUTE, 1))]),
        (WINDOWS, [GreaterThan(START, at(3 * MINUTE)), LessThan(END, at(9 * MINUTE))]),
        (WINDOWS, [GreaterThan(START, at(3 * MINUTE, -1)), LessThan(END, at(9 * MINUTE, 1))]),
        (WINDOWS, [GreaterThanOrEqual(START, at(3 * MINUTE, 1)), LessThanOrEqual(END, at(9 * MINUTE, -1))]),
        (WINDOWS, [GreaterThanOrEqual(END, at(3 * MINUTE)), LessThanOrEqual(START, at(3 * MINUTE))]),
        (WINDOWS, [LessThan(START, at(0))]),
        (WINDOWS, [LessThan(END, at(30_000)), key("k3")]),
        (
            WINDOWS,
            [key("k5"), GreaterThan(START, at(0)), LessThanOrEqual(START, at(2 * MINUTE)), IsNotNull(START)],
        ),
        (WINDOWS, [EqualTo(("partition",), 1), key("k3")]),
        (WINDOWS, [In(("partition",), (0, 7)), EqualTo(START, at(0))]),
        (SESSIONS, [GreaterThanOrEqual(START, at(2000)), LessThan(END, at(7500))]),
        (SESSIONS, [GreaterThan(END, at(2500)), IsNotNull(END)]),
        (ENDLESS, [IsNotNull(START)]),
        (ENDLESS, [IsNotNull(END)]),
        (ENDLESS, [GreaterThan(END, at(0))]),
        (ENDLESS, [GreaterThan(START, at(1))]),
        (SESSIONS, [key("ann"), EqualTo(START, at(4000))]),
        (KEYS, [In(("key",), (3, -5, 99))]),
        (KEYS, [key(2**63 - 1)]),
    ],
)
def test_filters_taken_are_applied_exactly(stored: Stored, name: str, filters: list[Filter]) -> None:
    found, left = filtered(stored, name, *filters)
    assert left == []
    expected = [row for row in rows(stored.options(name)) if all(matches(row, each) for each in filters)]

    def identity(row: dict[str, Any]) -> tuple[int, int]:
        return row["partition"], row["offset"]

    assert sorted(found, key=identity) == sorted(expected, key=identity)


@pytest.mark.parametrize(
    ("name", "left"),
    [
        (WINDOWS, Not(key("k3"))),
        (WINDOWS, GreaterThan(("key",), "k3")),
        (WINDOWS, EqualTo(("value",), 7)),
        (WINDOWS, EqualTo(START, datetime(1970, 1, 1))),
        (WINDOWS, key(3)),
        (WINDOWS, key(True)),
        (WINDOWS, IsNull(("key",))),
        (WINDOWS, IsNotNull(("value",))),
        (SESSIONS, EqualTo(("value", "count"), 1)),
        (KEYS, EqualTo(START, at(0))),
        (KEYS, key("3")),
    ],
)
def test_other_filters_stay_with_spark(stored: Stored, name: str, left: Filter) -> None:
    assert filtered(stored, name, left)[1] == [left]


def test_keys_whose_equal_values_may_have_other_bytes_stay_with_spark(stored: Stored) -> None:
    options = stored.options(KEYS, key="double")
    with options.opened() as backend:
        rules = rules_of(chosen_commit(backend, options).shape, options)
    assert bounds_of([key(0.0)], rules) == (EVERYTHING, [key(0.0)])


# -- serdes by name --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "serde",
    [Bytes(), String(), Int(), Long(), Double(), Json(), Json(a="string", b="decimal(18,2) not null")],
)
def test_what_a_serde_prints_is_read_again(serde: Any) -> None:
    found = serde_from(repr(serde))
    assert repr(found) == repr(serde) and found is not None and found.arrow_type == serde.arrow_type
    assert repr(serde_from(serde.name)) == repr(type(serde)())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "money",
        "Json(1)",
        "Json(a=1)",
        "Json(**x)",
        "String(a='b')",
        "__import__('os')",
        "Json(a='x'",
        "(" * 999,
    ],
)
def test_what_is_no_serde_is_refused_and_never_run(text: str) -> None:
    assert serde_from(text) is None
    with pytest.raises(InvalidError, match="is no serde"):
        require_serde(text, "value")


# -- on Spark --------------------------------------------------------------------------------------


@pytest.mark.spark
@pytest.mark.xdist_group("spark")
class TestOnSpark:
    def test_a_table_is_a_frame_with_its_types_and_one_task_a_partition(
        self, spark: Any, stored: Stored
    ) -> None:
        frame = spark.read.format("tidegate.table").options(state=str(stored.state), table=SESSIONS).load()
        assert frame.dtypes == [
            ("key", "string"),
            ("window_start", "timestamp"),
            ("window_end", "timestamp"),
            ("value", "struct<count:bigint,total:double,small:smallint,tags:array<string>,at:timestamp>"),
            ("timestamp", "timestamp"),
            ("partition", "int"),
            ("offset", "bigint"),
        ]
        assert frame.rdd.getNumPartitions() == 2
        (row,) = frame.filter("value.count = 3000").select("key", "value.*", "window_end").collect()
        assert (row.key, row.total, row.small, row.tags) == ("ann", 3000 / 7, 200, ["a", "b"])

    def test_filters_reach_the_table_and_the_answer_is_the_same_without(
        self, spark: Any, stored: Stored
    ) -> None:
        frame = spark.read.format("tidegate.table").options(state=str(stored.state), table=WINDOWS).load()
        wanted = "key in ('k3', 'k4') and window_start >= timestamp'1970-01-01 00:04:00' and value > 0"
        chosen = frame.filter(wanted).select("key", "window_start", "value")
        with_pushdown = sorted(chosen.collect())
        plan = chosen._jdf.queryExecution().executedPlan().toString()
        assert "Filter" in plan and "window_start" not in plan.split("Filter")[1].split("BatchScan")[0]
        spark.conf.set("spark.sql.python.filterPushdown.enabled", "false")
        try:
            without = sorted(frame.filter(wanted).select("key", "window_start", "value").collect())
        finally:
            spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
        assert with_pushdown == without and len(without) == 22

    def test_time_travel_projection_and_the_users_own_schema(self, spark: Any, stored: Stored) -> None:
        reader = spark.read.format("tidegate.table").options(state=str(stored.state), table=WINDOWS)
        then = reader.option("versionAsOf", stored.numbers[0]).option("columns", "value").load()
        assert then.columns == ["value"] and then.selectExpr("max(value)").first()[0] == 19
        kept = {"state": str(stored.state), "table": KEYS}
        own = spark.read.format("tidegate.table").options(**kept).schema("value STRING, key STRING").load()
        assert {(row.key, row.value) for row in own.collect()} == {
            (str(n), str(n * n)) for n in range(-5, 30)
        }

    def test_mistakes_are_told_in_our_words(self, spark: Any, stored: Stored) -> None:
        with pytest.raises(Exception, match="commit 99 of table"):
            spark.read.format("tidegate.table").options(
                state=str(stored.state), table=WINDOWS, versionAsOf=99
            ).load()
        kept = {"state": str(stored.state), "table": KEYS}
        for schema, complaint in (
            ("nothing INT", "has no column 'nothing'"),
            ("key BINARY", "cannot become binary"),
        ):
            with pytest.raises(Exception, match=complaint):
                spark.read.format("tidegate.table").options(**kept).schema(schema).load().count()

    def test_a_table_gives_its_own_frame(self, spark: Any, stored: Stored, tmp_path: Path) -> None:
        with Log(tmp_path / "log", durability="os") as log:
            write_records(log, "one", [Said(b"a", Long().encode(1))])
            with key_table(
                log, "one", state=tmp_path / "state", consumed=Consumed(String(), Long())
            ) as table:
                first = table.commits()[-1]
                write_records(log, "one", [Said(b"b", Long().encode(2))])
                table.catch_up()
                assert {(row.key, row.value) for row in table.to_spark(spark).collect()} == {
                    ("a", 1),
                    ("b", 2),
                }
                assert [
                    row.value for row in table.as_of(first).to_spark(spark, columns=["value"]).collect()
                ] == [1]


def test_a_table_in_memory_or_with_a_serde_of_its_own_says_what_spark_gets(tmp_path: Path) -> None:
    class Reversed(Bytes):
        """A serde that no name says."""

        def __repr__(self) -> str:
            return "<reversed>"

    with Log(tmp_path / "log", durability="os") as log:
        write_records(log, "one", [Said(b"a", b"1")])
        with (
            key_table(log, "one", state="memory://") as table,
            pytest.raises(InvalidError, match="of kind memory"),
        ):
            table.to_spark(None)
        with (
            key_table(log, "one", state=tmp_path / "state", consumed=Consumed(Reversed(), Bytes())) as table,
            pytest.warns(TidegateWarning, match="key as bytes"),
            pytest.raises(AttributeError),
        ):
            table.to_spark(None)


def test_the_page_of_the_table_source_names_every_option_and_column(stored: Stored) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "spark-table.md").read_text()
    options = stored.options(WINDOWS)
    with options.opened() as backend:
        columns = table_schema(rules_of(chosen_commit(backend, options).shape, options)).names
    assert [name for name in (*NAMES, *columns) if name != "path" and f"`{name}`" not in page] == []


def test_the_declared_types_are_sparks(stored: Stored) -> None:
    options = stored.options(SESSIONS)
    with options.opened() as backend:
        schema = table_schema(rules_of(chosen_commit(backend, options).shape, options))
    assert schema.field("value").type.field("small").type == pa.int16()
    assert schema.field("window_start").type == pa.timestamp("us", tz="UTC")
