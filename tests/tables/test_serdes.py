"""Serdes: Kafka's bytes, one value and a column at a time; what no such value has is refused."""

from __future__ import annotations

import json
import math
import tracemalloc
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.errors import CorruptError, InvalidError, WindowedKeyFormatError
from tidegate.tables.serdes import json as json_serde
from tidegate.tables.serdes.base import Bytes, Double, Int, Long, Serde, String, WindowedSerde, windowed
from tidegate.tables.serdes.json import Json, encode_objects
from tidegate.windows.keys import SessionWindow, TimeWindow, Windowed

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


# -- lists in JSON -----------------------------------------------------------------------------------------

PIECE = json_serde.PIECE_VALUES
LIST_VALUES: list[Any] = [
    pytest.param(pa.string(), ["", 'q"\\', "é\u2028", None, "\x00\n"], id="strings"),
    pytest.param(pa.int64(), [0, -1, 2**63 - 1, None], id="integers"),
    pytest.param(pa.float64(), [0.0, -1.5, 1e300, 1 / 3, None], id="doubles"),
    pytest.param(pa.bool_(), [True, None, False], id="booleans"),
    pytest.param(pa.decimal128(10, 2), [Decimal("-0.05"), None], id="decimals"),
    pytest.param(pa.timestamp("us", tz="UTC"), [datetime(2026, 1, 2, tzinfo=UTC), None], id="moments"),
    pytest.param(pa.struct({"a": pa.string(), "b": pa.int32()}), [{"a": ",]", "b": 1}, None], id="structs"),
    pytest.param(pa.list_(pa.int32()), [[], [1, None, 3], None], id="lists"),
]
LENGTHS = [
    [], [0], [1], [PIECE - 1], [PIECE], [PIECE + 1], [2 * PIECE], [2 * PIECE + 1], [0, PIECE, 0], [1, PIECE, 1],
    [PIECE - 2, 3, 1, 1], [PIECE // 2 + 1] * 3, [PIECE + 1, PIECE - 1, 3 * PIECE], [0, 1] * PIECE,
]  # fmt: skip


def lists_of(kind: pa.DataType, values: list[Any], lengths: list[int], large: bool = False) -> pa.Array:
    """Lists of these lengths, with the values over and over."""
    total = sum(lengths)
    content = pa.array((values * (total // len(values) + 1))[:total], kind)
    bounds = pa.array(np.cumsum([0, *lengths]), pa.int64() if large else pa.int32())
    made = (pa.LargeListArray if large else pa.ListArray).from_arrays(bounds, content)
    made.validate(full=True)
    return made


def in_one_piece(column: pa.Array) -> list[bytes]:
    """What `json.dumps` of each whole list gives, as the only field of an object."""
    texts = [
        json.dumps(one, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=str)
        for one in column.to_pylist()
    ]
    return [b'{"l":%b}' % text.encode() for text in texts]


def written(column: pa.Array) -> list[bytes]:
    return encode_objects(pa.record_batch({"l": column})).to_pylist()


@pytest.mark.parametrize(("kind", "values"), LIST_VALUES)
def test_lists_are_written_as_in_one_piece_at_every_length_around_a_piece(
    kind: pa.DataType, values: list[Any]
) -> None:
    for lengths in LENGTHS:
        column = lists_of(kind, values, lengths)
        assert written(column) == in_one_piece(column), lengths
        assert written(column[1:]) == in_one_piece(column[1:]), lengths
    column = lists_of(kind, values, [3, PIECE + 1, 0, 5], large=True)
    assert written(column[1:3]) == in_one_piece(column[1:3])


@pytest.mark.parametrize("piece", [1, 2, 5])
@pytest.mark.parametrize(("kind", "values"), LIST_VALUES)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_nulls_and_slices_of_lists_are_written_as_in_one_piece(
    piece: int, kind: pa.DataType, values: list[Any], data: Any
) -> None:
    """With small pieces; values that lie under a null list are not written."""
    lengths = data.draw(st.lists(st.integers(0, 12), max_size=12))
    full = lists_of(kind, values, lengths)
    mask = data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    column = pa.ListArray.from_arrays(full.offsets, full.values, mask=pa.array(mask, pa.bool_()))
    assert [one is None for one in column.to_pylist()] == mask
    start = data.draw(st.integers(0, len(column)))
    stop = data.draw(st.integers(start, len(column)))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(json_serde, "PIECE_VALUES", piece)
        for each in (column, column[start:stop], full.slice(start, stop - start)):
            assert written(each) == in_one_piece(each)


@pytest.mark.parametrize("place", [0, PIECE, 3 * PIECE - 1])
def test_a_value_without_json_is_refused_in_whichever_piece_of_a_list_it_is(place: int) -> None:
    values = np.zeros(3 * PIECE)
    values[place] = math.nan
    column = pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), pa.array(values))
    with pytest.raises(InvalidError, match="'l' has a value that JSON cannot say"):
        written(column)


def test_a_list_too_large_for_a_column_is_told_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(total_bytes: int, what: str) -> int:
        raise InvalidError(f"{what} would take {total_bytes} bytes")

    monkeypatch.setattr(json_serde, "room_for", no_room)
    with pytest.raises(InvalidError, match=r"^a column of JSON would take 7 bytes$"):
        written(pa.array([[1, 2, 3]]))


def test_a_long_list_is_never_python_objects_as_a_whole() -> None:
    column = lists_of(pa.string(), [f"order-{number:024}" for number in range(1000)], [300_000])
    size = len(written(column)[0])
    tracemalloc.start()
    try:
        encode_objects(pa.record_batch({"l": column}))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * size, (peak, size)


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
