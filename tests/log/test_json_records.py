"""Records as JSON lines: in, out, in again; and input that means no good."""

from __future__ import annotations

import base64
import json
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.errors import InvalidError
from tidegate.log.format.json_records import MAX_DEPTH, encode_lines, parse_document, parse_lines
from tidegate.log.format.records import HEADERS_TYPE, RECORD_SCHEMA, TIMESTAMP_TYPE

OPTIONAL_BYTES = st.one_of(
    st.none(), st.binary(max_size=20), st.text(max_size=10).map(lambda t: t.encode("utf-8"))
)
HEADERS = st.lists(st.tuples(st.text(max_size=5), OPTIONAL_BYTES), max_size=3)
RECORDS = st.lists(
    st.tuples(OPTIONAL_BYTES, OPTIONAL_BYTES, st.one_of(st.none(), st.integers(0, 2**50)), HEADERS),
    max_size=12,
)


def batch(rows: list[tuple[Any, ...]]) -> pa.RecordBatch:
    keys, values, times, headers = ([row[at] for row in rows] for at in range(4))
    topics = pa.DictionaryArray.from_arrays(pa.array([0] * len(rows), pa.int32()), pa.array(["t"]))
    return pa.RecordBatch.from_arrays(
        [
            topics,
            pa.array([0] * len(rows), pa.int32()),
            pa.array(range(len(rows)), pa.int64()),
            pa.array(times, TIMESTAMP_TYPE),
            pa.array(keys, pa.binary()),
            pa.array(values, pa.binary()),
            pa.array(headers, HEADERS_TYPE),
        ],
        schema=RECORD_SCHEMA,
    )


@given(RECORDS)
@settings(max_examples=150, deadline=None)
def test_what_goes_out_comes_in_again(rows: list[tuple[Any, ...]]) -> None:
    written = batch(rows)
    read = parse_lines(encode_lines(written))
    assert read.num_rows == len(rows)
    assert read.column("key").to_pylist() == [row[0] for row in rows]
    assert read.column("value").to_pylist() == [row[1] for row in rows]
    assert read.column("timestamp").to_pylist() == [row[2] for row in rows]
    headers = [
        [(pair["key"], pair["value"]) for pair in pairs or ()] for pairs in read.column("headers").to_pylist()
    ]
    assert headers == [[tuple(pair) for pair in row[3]] for row in rows]


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**60), 2**60), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(JSON)
@settings(max_examples=200, deadline=None)
def test_other_json_values_are_stored_as_their_compact_text(value: Any) -> None:
    line = json.dumps({"value": value}, indent=None).encode()
    stored = parse_lines(line).column("value")[0].as_py()
    if value is None:
        assert stored is None
    elif isinstance(value, str):
        assert stored == value.encode()
    elif isinstance(value, dict) and set(value) == {"base64"} and isinstance(value["base64"], str):
        assert stored == base64.b64decode(value["base64"])
    else:
        assert json.loads(stored) == value
        assert stored == msgspec.json.format(json.dumps(value).encode(), indent=-1)


def test_numbers_keep_the_digits_they_were_written_with() -> None:
    lines = b'{"value": 1.50}\n{"value": 1e400}\n{"value": 123456789012345678901234567890}\n{"value": -0.0}'
    stored = parse_lines(lines).column("value").to_pylist()
    assert stored == [b"1.50", b"1e400", b"123456789012345678901234567890", b"-0.0"]


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_records_or_one_clear_error(content: bytes) -> None:
    try:
        assert isinstance(parse_lines(content), pa.Table)
    except InvalidError as error:
        assert "line " in str(error)


LINES = st.lists(
    st.one_of(
        st.sampled_from(
            [b'{"value": 1}', b"", b"   ", b"{", b"null", b'{"value": "\\u0000"}', b'"x"', b"[]"]
        ),
        st.binary(max_size=20),
    ),
    max_size=6,
)


@given(LINES, st.integers(1, 10_000))
@settings(max_examples=200, deadline=None)
def test_the_line_named_is_the_first_bad_one(lines: list[bytes], first_line: int) -> None:
    lines = [line.replace(b"\n", b"") for line in lines]
    try:
        parse_lines(b"\n".join(lines), first_line=first_line)
    except InvalidError as error:
        named = int(str(error).split()[1].rstrip(":"))
        before = lines[: named - first_line]
        assert parse_lines(b"\n".join(before)).num_rows == len([line for line in before if line.strip()])
        with pytest.raises(InvalidError):
            parse_lines(lines[named - first_line])


@pytest.mark.parametrize("limit", [20, 100, 1 << 20])
@pytest.mark.parametrize("over", [-1, 0, 1])
def test_a_line_may_be_as_long_as_the_limit(limit: int, over: int) -> None:
    line = b'{"value":"' + b"x" * (limit + over - 12) + b'"}'
    assert len(line) == limit + over
    for content in (line, b'{"key":1}\n' + line, line + b'\n{"key":1}'):
        if over > 0:
            with pytest.raises(InvalidError, match="more than the"):
                parse_lines(content, max_line_bytes=limit)
        else:
            assert parse_lines(content, max_line_bytes=limit).num_rows >= 1


@pytest.mark.parametrize("depth", [MAX_DEPTH - 1, MAX_DEPTH, MAX_DEPTH + 1, 500, 200_000])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_nesting_is_bounded_without_a_recursion_error(depth: int, opening: str, closing: str) -> None:
    inner = "1" if opening != "[" else ""
    line = ('{"value":' + opening * depth + inner + closing * depth + "}").encode()
    if depth <= MAX_DEPTH:
        assert parse_lines(line, max_line_bytes=1 << 22).num_rows == 1
    else:
        with pytest.raises(InvalidError, match="nested"):
            parse_lines(line, max_line_bytes=1 << 22)


def test_brackets_inside_strings_are_not_nesting() -> None:
    text = "[{" * 200 + '\\"'
    line = json.dumps({"value": {"a": text}}).encode()
    assert json.loads(parse_lines(line).column("value")[0].as_py()) == {"a": text}


def test_a_field_given_twice_counts_once() -> None:
    assert parse_lines(b'{"value": "a", "value": "b"}').column("value").to_pylist() == [b"b"]


def test_a_document_is_an_array_of_records() -> None:
    table = parse_document(b'[{"value": "a"}, {"key": "k"}]')
    assert table.column("value").to_pylist() == [b"a", None]
    assert parse_document(b"[]").num_rows == 0
    for wrong, says in (
        (b"{}", "JSON array"),
        (b'[{"vlue": 1}]', "record 0"),
        (b"[1]", "record 0"),
        (b"\xff", "JSON"),
    ):
        with pytest.raises(InvalidError, match=says):
            parse_document(wrong)
