"""JSON values to typed columns: everything is what json.loads says, or the row is bad and says why."""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.errors import InvalidError
from tidegate.kernels import json_rows as kernel
from tidegate.kernels.json_text import double_bits
from tidegate.tables.serdes.json import DecodedValues, JsonDecoder
from tidegate.windows.keys import binary_column

FIELDS: dict[str, Any] = {"text": "string", "whole": "int", "real": "double", "flag": "bool"}


def decode(rows: list[bytes | None], **fields: Any) -> DecodedValues:
    return JsonDecoder(fields or FIELDS).decode(pa.array(rows, pa.binary()))


def one(raw: bytes, **fields: Any) -> dict[str, Any] | str:
    """The columns of a single row, or why it is bad."""
    found = decode([raw], **fields)
    return found.reasons[0] if len(found.bad_rows) else found.batch.to_pylist()[0]


# -- what json.loads says ----------------------------------------------------------------------------------


def is_good(name: str, value: Any) -> bool:
    """Whether json.loads found what is declared."""
    if value is None:
        return True
    if name == "text":
        return isinstance(value, str) and not any(0xD800 <= ord(letter) < 0xE000 for letter in value)
    if name == "flag":
        return isinstance(value, bool)
    if name == "whole":
        return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= 1.7976931348623157e308
    )


def refuse(text: str) -> float:
    raise ValueError(text)


def twin(raw: bytes) -> dict[str, Any] | None:
    """The declared fields by json.loads; None for a bad row."""
    try:
        found = json.loads(raw.decode(), parse_constant=refuse)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not all(is_good(name, found.get(name)) for name in FIELDS):
        return None
    return {name: float(value) if name == "real" and value is not None else value
            for name in FIELDS for value in [found.get(name)]}  # fmt: skip


def same(found: Any, expected: Any) -> bool:
    if (
        isinstance(expected, float) and isinstance(found, float) and expected != 0
    ):  # -0 is a whole number to Python
        return struct.pack("d", found) == struct.pack("d", expected)
    return type(found) is type(expected) and bool(found == expected)


def check(rows: list[bytes]) -> None:
    decoded = decode(rows)
    bad, columns = set(decoded.bad_rows.tolist()), decoded.batch.to_pylist()
    for row, raw in enumerate(rows):
        expected = twin(raw)
        assert (expected is None) == (row in bad), (raw, decoded.reasons)
        for name in FIELDS:
            wanted = None if expected is None else expected[name]
            assert same(columns[row][name], wanted), (raw, name, columns[row][name])


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(2**63) - 2, 2**63 + 2), st.floats(allow_nan=False),
    st.text(max_size=12), st.floats(-1000, 1000),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
MATCHING = st.fixed_dictionaries(
    {},
    optional={
        "text": st.text(max_size=20),
        "whole": st.integers(-(2**63), 2**63 - 1),
        "real": st.floats(allow_nan=False, allow_infinity=False),
        "flag": st.booleans(), "other": VALUES, "te": VALUES,
    },
)  # fmt: skip
MIXED = st.dictionaries(st.sampled_from([*FIELDS, "other", "tex", "texts"]), VALUES, max_size=6)
STYLES = st.sampled_from(
    [
        {"separators": (",", ":")},
        {},
        {"ensure_ascii": False},
        {"indent": 1},
        {"separators": (" ,\t", "\r\n: ")},
    ]
)


@given(st.lists(st.tuples(st.one_of(MATCHING, MIXED), STYLES), max_size=8))
@settings(max_examples=500)
def test_any_objects_are_read_as_json_loads_reads_them(
    rows: list[tuple[dict[str, Any], dict[str, Any]]],
) -> None:
    check([json.dumps(value, **style).encode(errors="surrogatepass") for value, style in rows])


MEMBERS = st.sampled_from(
    ['"a":1', '"a":12', '"a":"x"', '"a":"x,"', '"a": "x"', '"b":{"text":1}', '"b":[1,{}]', '"b":[1,{}', '"b":1e',
     '"text":"t"', '"real":1.5', '"real":15.25', '"whole":7', '"c":"}"', '"c"', '"":0', "1"]
)  # fmt: skip


@given(
    st.lists(
        st.tuples(st.lists(MEMBERS, max_size=5), st.sampled_from(["}", "} ", ",}", "", "}}"])), max_size=12
    )
)
@settings(max_examples=300)
def test_members_that_come_again_are_judged_as_if_they_were_new(rows: list[tuple[list[str], str]]) -> None:
    check([("{" + ",".join(members) + end).encode() for members, end in rows])


def test_numbers_at_the_very_end_of_the_text_and_of_every_length_are_read() -> None:
    texts = [
        f"{sign}{whole}{fraction}"
        for sign in ("", "-")
        for whole in ("0", "7", "1234567", "12345678", "123456789012")
        for fraction in (
            "",
            ".5",
            ".0000001",
            ".1234567",
            ".12345678",
            ".12345678901",
            ".25e3",
            ".5E-7",
            ".",
            "e1",
        )
    ]
    check([b'{"real":%s}' % text.encode() for text in texts])
    for text in texts:
        check([b'{"real":%s}' % text.encode()])
        check([b'{"real":%s' % text.encode()])


@given(MATCHING, STYLES, st.data())
@settings(max_examples=500)
def test_damaged_text_is_judged_as_json_loads_judges_it(
    value: dict[str, Any], style: dict[str, Any], data: Any
) -> None:
    raw = bytearray(json.dumps(value, **style).encode())
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.integers(0, len(raw) - 1)) if raw else 0
        match data.draw(st.sampled_from(["cut", "drop", "put", "change"])):
            case "cut":
                del raw[at:]
            case "drop":
                del raw[at : at + 1]
            case "put":
                raw[at:at] = data.draw(
                    st.sampled_from(
                        [b",", b'"', b"\\", b"{", b"}", b"0", b"-", b".", b"e", b" ", b"\xff", b"\0"]
                    )
                )
            case "change":
                raw[at : at + 1] = data.draw(st.binary(min_size=1, max_size=1))
    check([bytes(raw)])


@given(st.text(alphabet='{}[]",:\\ntrufalse0123456789.-+eE \n', max_size=25))
@settings(max_examples=500)
def test_text_that_looks_like_json_is_judged_as_json_loads_judges_it(text: str) -> None:
    check([text.encode(), b'{"real":' + text.encode() + b"}", b'{"text":"' + text.encode() + b'"}',
           b'{"other":' + text.encode() + b',"flag":true}'])  # fmt: skip


# -- numbers -----------------------------------------------------------------------------------------------


def hard_numbers() -> Iterator[str]:
    """Doubles and their neighbours, halfway cases between two doubles, and every length of digits."""
    chance = random.Random(3)
    for _ in range(4000):
        number = struct.unpack("d", chance.randbytes(8))[0]
        if math.isfinite(number):
            yield repr(number)
            yield f"{number:.17e}"
    for _ in range(3000):
        yield repr(chance.uniform(0, 1000))
        yield f"{chance.randrange(10**7)}.{chance.randrange(100):02d}"
        yield f"{chance.randrange(10 ** chance.randint(1, 19))}e{chance.randint(-330, 300)}"
    for _ in range(2000):
        halfway = (chance.randrange(2**52, 2**53) * 2 + 1) << chance.randint(0, 9)
        yield str(halfway)
        yield f"{halfway}e{chance.randint(0, 22)}"
        exact = Decimal(chance.randrange(2**52, 2**53) * 2 + 1) / Decimal(2) ** chance.randint(1, 4)
        yield str(exact)
    yield from ("0", "-0", "0.0", "-0.0", "0e5", "1e-400", "5e-324", "2.2250738585072014e-308", "1e308", "1e23", "8e22",
                "9007199254740993", "9007199254740992.5", "9223372036854775807", "1.7976931348623157e308")  # fmt: skip


def test_a_number_becomes_the_nearest_double() -> None:
    texts = [text for text in hard_numbers() if math.isfinite(float(text))]
    decoded = decode([b'{"real":%s}' % text.encode() for text in texts], real="double")
    found = decoded.batch.column(0)
    assert len(decoded.bad_rows) == 0
    expected = np.array([float(text) for text in texts])
    assert np.array_equal(found.to_numpy().view(np.int64), expected.view(np.int64))


def test_the_kernel_reads_ordinary_numbers_by_itself() -> None:
    """Were it to leave them all to the standard library, every answer would be right and nothing fast."""
    chance = random.Random(4)
    texts = [repr(chance.uniform(-1000, 1000)) for _ in range(2000)] + [f"{n / 100}" for n in range(2000)]
    assert verdicts(
        [b'{"real":%s,"whole":%d}' % (text.encode(), 10**17 + n) for n, text in enumerate(texts)]
    ) == {kernel.GOOD}
    assert verdicts(
        ['{"text":"é\\u00e9\\n🌊\\ud83c\\udf0a"}'.encode(), b'{"other":[{"a":[1,{}]},[]]}', b" {} "]
    ) == {kernel.GOOD}


def verdicts(rows: list[bytes]) -> set[int]:
    decoder = JsonDecoder(FIELDS)
    return set(decoder._scan(binary_column(pa.array(rows, pa.binary())))[1].tolist())


@pytest.mark.parametrize("power", [-342, -28, -27, -5, -4, 0, 22, 23, 24, 55, 56, 308])
def test_double_bits_are_right_or_absent(power: int) -> None:
    chance = random.Random(power)
    digits = [1, 2**53, 2**53 + 1, 2**63 - 1, *(chance.randrange(1, 2**63) for _ in range(200))]
    for number in digits:
        with np.errstate(over="ignore"):
            bits = int(double_bits(number, power))
        if bits >= 0:
            assert struct.unpack("d", struct.pack("q", bits))[0] == float(f"{number}e{power}")


# -- bad rows ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "not JSON: Expecting value at byte 0"),
        (b"nonsense", "not JSON"),
        (b'{"real":1', "not JSON"),
        (b'{"real":1}}', "not JSON: Extra data"),
        (b'{"real":01}', "not JSON"),
        (b'{"real":NaN}', "NaN is not JSON"),
        (b'{"real":-Infinity}', "-Infinity is not JSON"),
        (b'{"real":1e400}', "too large for a double"),
        (b'{"real":"1"}', "field 'real': \"1\" where double is expected"),
        (b'{"real":true}', "true where double"),
        (b'{"whole":1.0}', "1.0 where int64 is expected"),
        (b'{"whole":9223372036854775808}', "does not fit int64"),
        (b'{"whole":%s}' % (b"9" * 5000), "(5000 characters) does not fit int64"),
        (b'{"flag":1}', "1 where bool"),
        (b'{"flag":"true"}', "where bool"),
        (b'{"text":5}', "5 where string"),
        (b'{"text":{}}', "an object where string"),
        (b'{"text":"\\ud800"}', "half a surrogate pair"),
        (b'{"text":"\xff"}', "not UTF-8 text: byte 9 is 0xff"),
        (b'{"text":"\xed\xa0\x80"}', "not UTF-8"),
        (b'{"text":"a\nb"}', "not JSON: Invalid control character"),
        (b"[1]", "a list where an object"),
        (b"7", "7 where an object"),
        (b"null", "null where an object"),
        (b'{"other":' + b"[" * 100_000, "not "),
    ],
)
def test_a_bad_row_says_why(raw: bytes, why: str) -> None:
    found = decode([b'{"real":1}', raw, None, b'{"real":2}'])
    assert found.bad_rows.tolist() == [1]
    assert why in found.reasons[0]
    assert found.good.tolist() == [True, False, False, True]
    assert found.absent.tolist() == [False, False, True, False]
    assert found.batch["real"].to_pylist() == [1.0, None, None, 2.0]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b'{"real":1,"real":2}', {"real": 2.0}),
        (b'{"r\\u0065al":3}', {"real": 3.0}),
        (b'{"real":4,"":5,"reals":6,"rea":7}', {"real": 4.0}),
        (b'\n{ "real" : 5 }\t', {"real": 5.0}),
        (b'{"real":' + b"1" * 40 + b"}", {"real": 1.1111111111111111e39}),
        (b'{"other":"\\ud800","real":1}', {"real": 1.0}),
        (b'{"other":' + b"[" * 80 + b"]" * 80 + b',"real":1}', {"real": 1.0}),
    ],
)
def test_unusual_rows_are_read_all_the_same(raw: bytes, expected: dict[str, Any]) -> None:
    assert one(raw, real="double") == expected


def test_required_fields_must_be_there() -> None:
    fields = {"text": "string not null", "whole": pa.field("x", pa.int64(), nullable=False), "real": "double"}
    assert one(b'{"text":"a","whole":1}', **fields) == {"text": "a", "whole": 1, "real": None}
    assert "'text' is null or absent" in one(b'{"whole":1}', **fields)
    assert "'whole' is null or absent" in one(b'{"text":"a","whole":null}', **fields)


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("int32", "2147483647", 2147483647),
        ("int32", "2147483648", "does not fit int32"),
        ("int8", "-129", "does not fit int8"),
        ("uint8", "255", 255),
        ("uint8", "-1", "does not fit uint8"),
        ("decimal(10,2)", "12.3", Decimal("12.30")),
        ("decimal(10,2)", '"-12.34"', Decimal("-12.34")),
        ("decimal(10,2)", "1e3", Decimal("1000.00")),
        ("decimal(10,2)", "12.345", "is no decimal128(10, 2)"),
        ("decimal(4,2)", "123.4", "is no decimal128(4, 2)"),
        ("decimal(10,2)", '"1_0"', "is no decimal"),
        ("decimal(10,2)", '"NaN"', "is no decimal"),
        ("decimal(10,2)", "true", "true where decimal"),
        ("decimal(38,0)", "1" * 38, Decimal("1" * 38)),
        ("timestamp", '"2026-01-31T10:00:00Z"', datetime(2026, 1, 31, 10, tzinfo=UTC)),
        ("timestamp", '"2026-01-31T10:00:00.5+02:00"', datetime(2026, 1, 31, 8, 0, 0, 500_000, tzinfo=UTC)),
        ("timestamp", "1500", datetime(1970, 1, 1, 0, 0, 1, 500_000, tzinfo=UTC)),
        ("timestamp[us]", "1500", datetime(1970, 1, 1, 0, 0, 0, 1500, tzinfo=UTC)),
        ("timestamp", '"2026-01-31T10:00:00"', "with its offset from UTC"),
        ("timestamp", '"2026-02-30T10:00:00Z"', "write it like"),
        ("timestamp", "1.5", "where int64"),
        ("timestamp", '"soon"', "write it like"),
        ("date", '"2026-01-31"', date(2026, 1, 31)),
        ("date", '"2026-1-31"', "write it like 2026-01-31"),
        ("date", "5", "5 where date32"),
        ("list<int>", "[1, 2,\n null]", [1, 2, None]),
        ("list<int>", "[1.5]", "field 'v[0]': 1.5 where int64"),
        ("list<int>", "{}", "an object where list"),
        ("list<double>", "[1, 0.1, 5e-324]", [1.0, 0.1, 5e-324]),
        ("list<string>", '["a\\n", "\\u00e9"]', ["a\n", "é"]),
        ("struct<a: int, b: list<string>>", '{"b":["x"],"c":1}', {"a": None, "b": ["x"]}),
        ("struct<a: int>", '{"a":1,"a":2}', {"a": 2}),
        ("struct<a: int>", '{"a":"1"}', "field 'v.a'"),
        ("struct<t: timestamp>", '{"t":"2026-01-31T10:00:00Z"}', {"t": datetime(2026, 1, 31, 10, tzinfo=UTC)}),
        ("list<decimal(5,1)>", "[1, 2.5]", [Decimal("1.0"), Decimal("2.5")]),
    ],
)  # fmt: skip
def test_other_types(kind: str, text: str, expected: Any) -> None:
    raw = b'{"v":%s}' % text.encode()
    rows = decode([raw, b'{"v":null}', None, b"{}"], v=kind)
    if isinstance(expected, str) and kind != "string":
        assert rows.bad_rows.tolist() == [0]
        assert expected in rows.reasons[0]
        expected = None
    else:
        assert len(rows.bad_rows) == 0, rows.reasons
    assert rows.batch["v"].to_pylist() == [expected, None, None, None]
    # beside a bad row, which makes the column go row by row, the answer is the same
    beside = decode([raw, b'{"v":"?"}'], v=kind)
    assert beside.batch["v"].to_pylist() == [expected, None]
    assert 1 in beside.bad_rows.tolist()


def test_sliced_chunked_and_empty_columns() -> None:
    rows = [b'{"real":%d,"text":"t%d"}' % (number, number) for number in range(20)]
    decoder = JsonDecoder({"text": "string", "real": "double"})
    sliced = decoder.decode(pa.array(rows)[5:9]).batch
    assert sliced["text"].to_pylist() == ["t5", "t6", "t7", "t8"]
    chunked = pa.chunked_array([rows[:3], rows[3:7]], pa.binary())
    assert decoder.decode(chunked).batch["real"].to_pylist() == [0, 1, 2, 3, 4, 5, 6]
    assert decoder.decode(pa.array([], pa.binary())).batch.num_rows == 0
    assert decoder.decode(pa.array([None, None], pa.binary())).absent.all()


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, "at least one field"),
        ({"a": "strnig"}, "no type known here"),
        ({"a": pa.float32()}, "rounded twice"),
        ({"a": pa.binary()}, "not read into binary"),
        ({"a": "struct<b>"}, "no member"),
        ({'a"b': "string"}, "no name for a field"),
        ({"": "string"}, "no name for a field"),
    ],
)
def test_declarations_that_cannot_be(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidError, match=why):
        JsonDecoder(fields)


@given(
    st.lists(
        st.one_of(st.none(), st.binary(max_size=30), MIXED.map(lambda value: json.dumps(value).encode())),
        max_size=5,
    )
)
@settings(max_examples=60)
def test_the_kernel_never_leaves_its_arrays(rows: list[bytes | None]) -> None:
    """Run as plain Python every access is checked; and it answers what the compiled one does."""
    column, count = binary_column(pa.array(rows, pa.binary())), len(rows)
    names = np.frombuffer(b"textwholerealflag", np.uint8)
    bounds, kinds = np.array([0, 4, 9, 13, 17], np.int32), np.array([3, 0, 1, 2], np.int32)
    slots, required = np.array([0, 0, 1, 2], np.int32), np.zeros(4, np.int32)
    answers = []
    for run in (kernel.read_json_rows, kernel.read_json_rows.py_func):
        out = [np.zeros(3 * count, np.int64), np.zeros(count + 1, np.int32), np.zeros(column.total_bytes, np.uint8),
               np.zeros(4 * count, np.uint8), np.zeros(count, np.uint8), np.zeros(4, np.int64)]  # fmt: skip
        with np.errstate(over="ignore"):
            irregular = run(*column, names, bounds, kinds, slots, required, column.total_bytes, *out)
        end = int(out[1][-1])
        answers.append(
            [
                int(irregular),
                out[0].tolist(),
                out[1].tolist(),
                out[2][:end].tolist(),
                out[3].tolist(),
                out[4].tolist(),
            ]
        )
    assert answers[0] == answers[1]


_WRITERS = [
    "{:%Y-%m-%dT%H:%M:%S}.{us:06d}+00:00",  # Python's isoformat()
    "{:%Y-%m-%d %H:%M:%S}.{us:06d}+00:00",  # Python's str()
    "{:%Y-%m-%dT%H:%M:%S}.{ms:03d}Z",  # JavaScript's toISOString()
    "{:%Y-%m-%dT%H:%M:%S}.{us:06d}000Z",  # Java's Instant
    "{:%Y-%m-%dT%H:%M:%S}.{us:06d}Z[UTC]",  # Java's ZonedDateTime
    "{east:%Y-%m-%dT%H:%M:%S}.{us:06d}+02:00[Europe/Berlin]",
    "{east:%Y-%m-%dT%H:%M:%S}.{us:06d}+0200",
    "{east:%Y-%m-%dT%H:%M}+02:00",  # Java leaves seconds out that are zero
    "{:%Y-%m-%dT%H:%M:%S}Z",
]


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@given(
    moments=st.lists(st.datetimes(datetime(1950, 1, 1), datetime(2200, 1, 1)), min_size=1, max_size=6),
    data=st.data(),
)
def test_moments_as_python_java_and_javascript_write_them(
    unit: str, moments: list[datetime], data: Any
) -> None:
    """Python's own reading of the text is the oracle; what is finer than the unit is cut off."""
    texts, expected = [], []
    for moment in moments:
        form = data.draw(st.sampled_from(_WRITERS))
        east = moment + timedelta(hours=2)
        text = form.format(moment, east=east, us=moment.microsecond, ms=moment.microsecond // 1000)
        texts.append(text)
        read = datetime.fromisoformat(text.partition("[")[0])
        micros = (read - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
        expected.append({"s": micros // 10**6, "ms": micros // 1000, "us": micros, "ns": micros * 1000}[unit])
    whole = decode([b'{"at":"%s"}' % text.encode() for text in texts], at=f"timestamp[{unit}]")
    assert whole.reasons == ()
    assert whole.batch.column("at").cast(pa.int64()).to_pylist() == expected
    kind = f"struct<t: timestamp[{unit}]>"  # which is read row by row
    apart = decode([b'{"v":{"t":"%s"}}' % text.encode() for text in texts], v=kind)
    assert apart.reasons == ()
    assert apart.batch.column("v").field("t").cast(pa.int64()).to_pylist() == expected
