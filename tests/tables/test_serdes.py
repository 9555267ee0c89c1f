"""Serdes: Kafka's bytes, one value and a column at a time; what no such value has is refused."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.errors import CorruptError, InvalidError, WindowedKeyFormatError
from tidegate.tables.serdes.json_serde import Json
from tidegate.tables.serdes.plain import Bytes, Double, Int, Long, Serde, String
from tidegate.tables.serdes.windowed import WindowedSerde, windowed
from tidegate.windows.keys.layouts import SessionWindow, TimeWindow, Windowed

PLAIN: list[Serde[Any]] = [Bytes(), String(), Int(), Long(), Double(), Json(), Json(a="int")]


@pytest.mark.parametrize(
    ("serde", "value", "raw"),
    [
        (Bytes(), b"\x00\xff", "00ff"),
        (Bytes(), b"", ""),
        (String(), "é", "c3a9"),
        (String(), "", ""),
        (Int(), 1, "00000001"),
        (Int(), -1, "ffffffff"),
        (Int(), 2**31 - 1, "7fffffff"),
        (Long(), 2, "0000000000000002"),
        (Long(), -(2**63), "8000000000000000"),
        (Double(), 1.5, "3ff8000000000000"),
        (Double(), -0.0, "8000000000000000"),
        (Double(), math.inf, "7ff0000000000000"),
        (Json(), {"a": [1, None, "é"]}, '{"a":[1,null,"é"]}'.encode().hex()),
        (Json(a="int", b="string"), {"a": 1, "b": None}, b'{"a":1,"b":null}'.hex()),
    ],
)
def test_golden_bytes(serde: Serde[Any], value: Any, raw: str) -> None:
    expected = bytes.fromhex(raw)
    assert serde.encode(value) == expected
    assert serde.decode(expected) == value


@pytest.mark.parametrize("serde", PLAIN, ids=repr)
def test_nothing_stays_nothing(serde: Serde[Any]) -> None:
    assert isinstance(serde, Serde)
    assert serde.encode(None) is None
    assert serde.decode(None) is None
    column = serde.encode_column(pa.nulls(2, serde.arrow_type))
    assert column.to_pylist() == [None, None]
    decoded = serde.decode_column(column)
    assert decoded.require_good().to_pylist() == [None, None]
    assert serde.decode_column(pa.array([], pa.binary())).values.type == serde.arrow_type


COLUMNS: list[Any] = [
    (Bytes(), st.binary(max_size=9)),
    (String(), st.text(max_size=9)),
    (Int(), st.integers(-(2**31), 2**31 - 1)),
    (Long(), st.integers(-(2**63), 2**63 - 1)),
    (Double(), st.floats(allow_nan=False)),
    (
        Json(a="int", b="string", c="double", d="bool"),
        st.fixed_dictionaries(
            {
                "a": st.none() | st.integers(-(2**63), 2**63 - 1),
                "b": st.none() | st.text(max_size=9),
                "c": st.none() | st.floats(allow_nan=False, allow_infinity=False),
                "d": st.none() | st.booleans(),
            }
        ),
    ),
]


@pytest.mark.parametrize(("serde", "values"), COLUMNS, ids=[repr(serde) for serde, _ in COLUMNS])
@given(data=st.data())
@settings(max_examples=80)
def test_columns_are_written_and_read_as_value_by_value(serde: Serde[Any], values: Any, data: Any) -> None:
    rows = data.draw(st.lists(st.none() | values, max_size=12))
    column = serde.encode_column(pa.array(rows, serde.arrow_type))
    assert column.to_pylist() == [serde.encode(row) for row in rows]
    skip = data.draw(st.integers(0, 3))
    assert serde.decode_column(column[skip:]).require_good().to_pylist() == rows[skip:]
    assert [serde.decode(raw) for raw in column.to_pylist()] == rows


@given(st.lists(st.none() | st.binary(max_size=10), max_size=12))
@settings(max_examples=150)
def test_any_bytes_are_judged_alike_in_columns_and_one_by_one(rows: list[bytes | None]) -> None:
    for serde in (String(), Int(), Long(), Double(), Json(a="int")):
        decoded = serde.decode_column(pa.array(rows, pa.binary()))
        found = decoded.values.to_pylist()
        assert list(decoded.bad_rows) == sorted(decoded.bad_rows)
        for row, raw in enumerate(rows):
            try:
                expected = serde.decode(raw)
            except CorruptError as error:
                assert row in decoded.bad_rows
                assert decoded.reasons[list(decoded.bad_rows).index(row)] == str(error)
                assert found[row] is None
            else:
                assert row not in decoded.bad_rows
                assert found[row] == expected or (expected != expected and found[row] != found[row])


@pytest.mark.parametrize(
    ("serde", "raw", "why"),
    [
        (String(), b"a\xff", "byte 1 of 2 is 0xff"),
        (Int(), b"123", "3 bytes where serde int has 4"),
        (Long(), b"", "0 bytes where serde long has 8"),
        (Long(), b"123456789", "9 bytes"),
        (Double(), b"1234567", "7 bytes"),
        (Json(), b"{", "not JSON"),
        (Json(), b"NaN", "NaN is not JSON"),
        (Json(a="int"), b'{"a":"1"}', "field 'a'"),
    ],
)
def test_bytes_no_such_value_has_are_refused(serde: Serde[Any], raw: bytes, why: str) -> None:
    with pytest.raises(CorruptError, match=why):
        serde.decode(raw)
    if serde.arrow_type != pa.string() or not isinstance(serde, Json):
        with pytest.raises(CorruptError, match=f"row 1 cannot be read: .*{why}"):
            serde.decode_column(pa.array([None, raw], pa.binary())).require_good()


@pytest.mark.parametrize(
    ("serde", "value"),
    [
        (Bytes(), "text"),
        (String(), b"bytes"),
        (Int(), 1.0),
        (Long(), True),
        (Double(), "1"),
        (Json(a="int"), [1]),
    ],
)
def test_values_of_another_kind_are_a_type_error(serde: Serde[Any], value: Any) -> None:
    with pytest.raises(TypeError):
        serde.encode(value)


@pytest.mark.parametrize(
    ("serde", "value"),
    [
        (Int(), 2**31),
        (Long(), -(2**63) - 1),
        (String(), "\ud800"),
        (Json(), float("nan")),
        (Json(a="double"), {"a": float("inf")}),
        (Json(a="int"), {"b": 1}),
        (Json(a="int not null"), {}),
        (Json(a="int"), {"a": "x"}),
    ],
)
def test_values_that_do_not_fit_are_invalid(serde: Serde[Any], value: Any) -> None:
    with pytest.raises(InvalidError):
        serde.encode(value)


@pytest.mark.parametrize(
    ("serde", "column"),
    [
        (Bytes(), pa.array(["a"])),
        (String(), pa.array([b"a"])),
        (Long(), pa.array([1.0])),
        (Double(), pa.array([1])),
        (Json(a="int"), pa.array([1])),
    ],
)
def test_columns_of_another_kind_are_a_type_error(serde: Serde[Any], column: pa.Array) -> None:
    with pytest.raises(TypeError):
        serde.encode_column(column)


def test_a_column_with_a_number_that_does_not_fit_is_invalid() -> None:
    with pytest.raises(InvalidError, match="serde int"):
        Int().encode_column(pa.array([1, 2**31]))


def test_json_writes_every_declared_type_so_that_it_is_read_back() -> None:
    serde = Json(
        d="decimal(10,2)", t="timestamp", u="timestamp[us]", n=pa.timestamp("ms"), day="date",
        l="list<int>", s="struct<a: string>", text="string",
    )  # fmt: skip
    row = {
        "d": Decimal("-0.05"), "t": datetime(2026, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC),
        "u": datetime(2026, 1, 2, 3, 4, 5, 1, tzinfo=UTC), "n": datetime(2026, 1, 2),
        "day": datetime(2026, 1, 2).date(), "l": [1, None], "s": {"a": 'q"\\'}, "text": '"\\\x00\x1f\n\té',
    }  # fmt: skip
    raw = serde.encode(row)
    assert raw is not None
    assert raw.startswith(b'{"d":-0.05,"t":"2026-01-02T03:04:05.678Z","u":"2026-01-02T03:04:05.000001Z"')
    assert serde.decode(raw) == row
    assert serde.decode_column(pa.array([raw])).require_good().to_pylist() == [row]


# -- windowed ----------------------------------------------------------------------------------------------


def test_time_windows_around_a_serde() -> None:
    serde = windowed(String(), size="10ms")
    key = Windowed("key", TimeWindow(50, 60))
    assert serde.encode(key) == bytes.fromhex("6b65790000000000000032")
    assert serde.decode(serde.encode(key)) == key
    store = windowed(String(), size="10ms", key_format="changelog")
    assert store.encode(key) == bytes.fromhex("6b6579000000000000003200000000")
    assert store.decode(store.encode(key)) == key
    assert windowed(Long(), size="10ms", key_format="changelog").fixed_bytes == 20


def test_sessions_around_a_serde() -> None:
    serde = windowed(Long())
    key = Windowed(7, SessionWindow(50, 100))
    raw = bytes.fromhex("0000000000000007 0000000000000064 0000000000000032")
    assert serde.encode(key) == raw
    assert serde.decode(raw) == key
    assert serde.decode(None) is None
    assert serde.decode(b"") is None


def test_windowed_columns() -> None:
    for serde, end in ((windowed(String(), size="10ms"), 60), (windowed(String()), 70)):
        rows = [
            {"key": "k", "window_start": 50, "window_end": end},
            {"key": "", "window_start": 0, "window_end": end - 50},
        ]
        column = serde.encode_column(pa.array(rows, serde.arrow_type))
        assert serde.decode_column(column).require_good().to_pylist() == rows
        bad = pa.array([column[0].as_py(), b"short", None, b"\xff" + column[0].as_py()[1:]], pa.binary())
        decoded = serde.decode_column(bad)
        assert decoded.bad_rows.tolist() == [1, 3]
        assert decoded.values.to_pylist() == [rows[0], None, None, None]
        assert "shorter" in decoded.reasons[0]
        assert "UTF-8" in decoded.reasons[1]


def test_a_key_of_another_length_than_its_serde_has_is_refused() -> None:
    raw = windowed(String(), size="10ms").encode(Windowed("abc", TimeWindow(0, 10)))
    with pytest.raises(WindowedKeyFormatError, match="3 bytes where 8"):
        windowed(Long(), size="10ms").decode(raw)


@pytest.mark.parametrize("inner", PLAIN, ids=repr)
def test_wrapping_twice_is_a_type_error(inner: Serde[Any]) -> None:
    for once in (
        windowed(inner),
        windowed(inner, size="5ms"),
        windowed(inner, size="5ms", key_format="changelog"),
    ):
        assert isinstance(once, WindowedSerde)
        with pytest.raises(TypeError, match="wrapped twice"):
            windowed(once, size="5ms")
        with pytest.raises(TypeError, match="wrapped twice"):
            windowed(once)


@pytest.mark.parametrize("no_serde", [None, "string", String, str])
def test_what_is_no_serde_is_a_type_error(no_serde: Any) -> None:
    with pytest.raises(TypeError, match="is no serde"):
        windowed(no_serde, size="5ms")


def test_sizes_of_windowed_serdes() -> None:
    with pytest.raises(TypeError, match="no window size"):
        windowed(String(), size="5ms", key_format="session")
    with pytest.raises(TypeError, match="give the window size"):
        windowed(String(), key_format="changelog")
    with pytest.raises(InvalidError):
        windowed(String(), size=0)
    with pytest.raises(TypeError, match="Windowed key"):
        windowed(String()).encode("plain")  # type: ignore[arg-type]
