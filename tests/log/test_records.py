"""Any caller's table becomes four columns, or a message that says which column is wrong."""

from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from tidegate.errors import InvalidError
from tidegate.log.format.records import RECORD_SCHEMA, RecordColumns, coerce, pieces


def test_the_schema_is_the_seven_columns_of_a_kafka_source() -> None:
    assert RECORD_SCHEMA.names == ["topic", "partition", "offset", "timestamp", "key", "value", "headers"]


def test_missing_columns_are_null() -> None:
    columns = coerce(pa.table({"value": [b"a", b"b"]}))
    assert columns.key.null_count == columns.timestamp.null_count == 2
    assert columns.headers is None
    assert len(columns) == 2


@pytest.mark.parametrize(
    "values",
    [
        pa.array(["é", None], pa.string()),
        pa.array(["é", None], pa.large_string()),
        pa.array(["é".encode(), None], pa.binary()),
        pa.array(["é".encode(), None], pa.large_binary()),
        pa.array(["é".encode(), None], pa.binary(2)),
        pa.array(["é", None]).dictionary_encode(),
    ],
    ids=lambda values: str(values.type),
)
def test_text_and_bytes_of_any_kind_become_binary(values: pa.Array) -> None:
    columns = coerce(pa.table({"key": values, "value": values}))
    assert columns.key.to_pylist() == columns.value.to_pylist() == ["é".encode(), None]
    assert columns.key.type == pa.binary()


def test_a_column_of_nulls_is_fine() -> None:
    columns = coerce(pa.table({"key": pa.nulls(2), "value": pa.nulls(2), "timestamp": pa.nulls(2)}))
    assert columns.value.to_pylist() == [None, None]


@pytest.mark.parametrize(
    "values",
    [
        pa.array([1500, None], pa.int64()),
        pa.array([1500, None], pa.int32()),
        pa.array([1500, None], pa.uint64()),
        pa.array([1500, None], pa.timestamp("ms")),
        pa.array([1500, None], pa.timestamp("ms", "UTC")),
        pa.array([1_500_999, None], pa.timestamp("us", "Europe/Berlin")),
        pa.array([1_500_999_999, None], pa.timestamp("ns")),
        pa.array([datetime(1970, 1, 1, 0, 0, 1, 500_000, UTC), None]),
    ],
    ids=lambda values: str(values.type),
)
def test_times_of_any_unit_become_milliseconds(values: pa.Array) -> None:
    assert coerce(pa.table({"timestamp": values})).timestamp.to_pylist() == [1500, None]


def test_minus_one_is_no_timestamp() -> None:
    assert coerce(pa.table({"timestamp": [5, -1, None]})).timestamp.to_pylist() == [5, None, None]


@pytest.mark.parametrize(
    "headers",
    [
        pa.array([[("a", b"1"), ("a", None)], [], None], pa.map_(pa.string(), pa.binary())),
        pa.array(
            [[{"key": "a", "value": b"1"}, {"key": "a", "value": None}], [], None],
            pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
        ),
        pa.array(
            [[{"key": "a", "value": "1"}, {"key": "a", "value": None}], [], None],
            pa.large_list(pa.struct([("key", pa.large_string()), ("value", pa.string())])),
        ),
    ],
    ids=["map", "list", "large"],
)
def test_headers_are_lists_or_maps(headers: pa.Array) -> None:
    columns = coerce(pa.table({"headers": headers, "value": ["a", "b", "c"]}))
    assert columns.headers is not None
    told = [
        None if row is None else [(h["key"], h["value"]) for h in row] for row in columns.headers.to_pylist()
    ]
    assert told == [[("a", b"1"), ("a", None)], [], None]


def test_what_was_decoded_can_be_encoded_again() -> None:
    rows = [
        {"topic": "t", "partition": 0, "offset": 0, "key": b"k", "headers": [{"key": "h", "value": b"x"}]}
    ]
    table = pa.Table.from_pylist(rows, RECORD_SCHEMA)
    columns = coerce(table)
    assert columns.headers is not None
    assert columns.headers.to_pylist() == [[{"key": "h", "value": b"x"}]]


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"key": pa.array([1])}, "column 'key' is int64"),
        ({"value": pa.array([[1]])}, "column 'value' is list"),
        ({"timestamp": pa.array(["now"])}, "column 'timestamp' is string"),
        ({"timestamp": pa.array([1.5])}, "column 'timestamp' is double"),
        ({"timestamp": pa.array([-2])}, "timestamp -2 lies before 1970"),
        ({"timestamp": pa.array([2**63], pa.uint64())}, "column 'timestamp' is uint64"),
        ({"headers": pa.array(["a"])}, "column 'headers' is string"),
        (
            {
                "headers": pa.array(
                    [[{"key": None, "value": b""}]],
                    pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
                )
            },
            "a header has no key",
        ),
        (
            {
                "headers": pa.array(
                    [[None]], pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
                )
            },
            "a header has no key",
        ),
    ],
)
def test_a_column_of_the_wrong_kind_is_named(table: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidError) as caught:
        coerce(pa.table(table))
    assert words in str(caught.value)


def test_two_columns_of_one_name_are_ambiguous() -> None:
    table = pa.Table.from_arrays([pa.array([b"a"]), pa.array([b"b"])], names=["value", "value"])
    with pytest.raises(InvalidError, match="2 columns called 'value'"):
        coerce(table)


def test_a_single_chunk_is_used_where_it_lies_even_sliced() -> None:
    values = pa.array([b"%d" % i for i in range(100)])
    columns = coerce(pa.table({"value": values}).slice(10, 20))
    assert columns.value.buffers()[2].address == values.buffers()[2].address
    assert columns.slice(5, 3).value.to_pylist() == [b"15", b"16", b"17"]


def test_chunks_are_put_together() -> None:
    table = pa.concat_tables(
        [pa.table({"value": ["a"], "key": ["x"]}), pa.table({"value": ["b"], "key": ["y"]})]
    )
    assert coerce(table).value.to_pylist() == [b"a", b"b"]
    assert [part.key.to_pylist() for part in pieces(table)] == [[b"x", b"y"]]


def test_filtering_keeps_rows_together() -> None:
    columns = coerce(
        pa.table(
            {"key": ["a", "b"], "value": ["1", "2"], "headers": [[("h", "x")], []]},
            schema=pa.schema(
                [("key", pa.string()), ("value", pa.string()), ("headers", pa.map_(pa.string(), pa.string()))]
            ),
        )
    )
    kept = columns.filter(pa.array([False, True]))
    assert isinstance(kept, RecordColumns)
    assert (kept.key.to_pylist(), kept.value.to_pylist()) == ([b"b"], [b"2"])
    assert kept.headers is not None
    assert kept.headers.to_pylist() == [[]]
