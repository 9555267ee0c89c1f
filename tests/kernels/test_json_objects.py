"""Objects written by the kernel: what Arrow writes of each value, and what Python reads back."""

from __future__ import annotations

import json
import math
import struct

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tidegate.errors import InvalidError
from tidegate.kernels import json_rows as kernel
from tidegate.tables.serdes.json import encode_objects

EDGES = [
    0.0, -0.0, 0.1, 0.5, 1.0, -1.0, 0.3, 1 / 3, 2 / 3, 1e-6, 9.99e-7, 1e-7, 5e-324, 1.7976931348623157e308,
    999999999999999.0, 1e15, 123456789012345.6, 9007199254740993.0, 100.0, 0.00001, 1234.5600000000002, 8931.53, -0.07,
]  # fmt: skip


def arrow_text(value: float) -> str:
    return str(pa.array([value]).cast(pa.string())[0].as_py())


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=30))
@example(EDGES)
@settings(max_examples=200, deadline=None)
def test_doubles_are_written_as_arrow_writes_them_and_read_back_as_themselves(values: list[float]) -> None:
    written = encode_objects(pa.record_batch({"x": pa.array(values, pa.float64())})).to_pylist()
    assert written == [f'{{"x":{arrow_text(value)}}}'.encode() for value in values]
    for text, value in zip(written, values, strict=True):
        found = float(json.loads(text)["x"])
        assert found == value or math.isclose(found, value, rel_tol=0)


def test_decimals_of_few_digits_need_no_texts() -> None:
    chance = np.random.default_rng(3)
    values = chance.integers(-(10**9), 10**9, 20_000) / 10.0 ** chance.integers(0, 6, 20_000)
    values = values[values != 0]
    numbers, powers = np.empty(len(values), np.int64), np.empty(len(values), np.uint8)
    assert kernel.find_decimals(values, kernel.TENS, numbers, powers) == 0
    assert (numbers / 10.0**powers == values).all()
    written = encode_objects(pa.record_batch({"x": values})).to_pylist()
    assert written == [f'{{"x":{arrow_text(value)}}}'.encode() for value in values.tolist()]


@pytest.mark.parametrize("bits", [0, 1, 17])
def test_random_bits_are_written_as_arrow_writes_them(bits: int) -> None:
    chance = np.random.default_rng(bits)
    values = chance.integers(0, 2**63, 5000, dtype=np.uint64).view(np.float64)
    values = values[np.isfinite(values)] / 2.0**bits
    written = encode_objects(pa.record_batch({"x": values})).to_pylist()
    assert written == [f'{{"x":{arrow_text(value)}}}'.encode() for value in values.tolist()]


@given(st.lists(st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)), max_size=20))
@example([-(2**63), 2**63 - 1, 0, None, -1, 10, 99, 100])
@settings(max_examples=100, deadline=None)
def test_whole_numbers_of_any_size_and_nulls(values: list[int | None]) -> None:
    batch = pa.record_batch({"a": pa.array(values, pa.int64()), "b": pa.array(values, pa.int64())})
    assert [json.loads(text) for text in encode_objects(batch).to_pylist()] == [
        {"a": value, "b": value} for value in values
    ]


def test_all_types_side_by_side_keep_their_order_and_their_nulls() -> None:
    batch = pa.record_batch(
        {
            "n": pa.array([1, None, 3], pa.int32()),
            'ö"': pa.array(['a"b', None, "\n"], pa.string()),
            "x": pa.array([1 / 3, 0.25, None]),
            "flag": pa.array([True, None, False]),
            "y": pa.array([None, 1e300, 2.5]),
            "big": pa.array([2**64 - 1, 0, None], pa.uint64()),
            "list": pa.array([[1], None, []], pa.list_(pa.int64())),
        }
    )
    assert [json.loads(text) for text in encode_objects(batch).to_pylist()] == batch.to_pylist()
    assert encode_objects(batch.slice(1)).to_pylist() == encode_objects(batch).to_pylist()[1:]


def test_the_compiled_form_and_the_plain_one_write_the_same() -> None:
    values = np.array([value for value in EDGES if value == value])
    made = []
    for find, write in (
        (kernel.find_decimals, kernel.write_json_objects),
        (kernel.find_decimals.py_func, kernel.write_json_objects.py_func),
    ):
        numbers, powers = np.empty(len(values), np.int64), np.empty(len(values), np.uint8)
        missing = find(values, kernel.TENS, numbers, powers)
        ends, content = np.empty(len(values) + 1, np.int32), np.zeros(64 * len(values), np.uint8)
        texts = np.frombuffer(b"?" * missing, np.uint8)
        size = write(
            len(values), np.frombuffer(b'{"x":', np.uint8), np.array([0, 5], np.int32),
            np.array([kernel.DECIMAL], np.int32), np.zeros(1, np.int32), numbers, powers,
            np.ones(len(values), np.uint8), texts, np.arange(missing + 1, dtype=np.int32), kernel.NULL,
            np.zeros(1, np.int64), ends, content,
        )  # fmt: skip
        made.append((missing, numbers.tolist(), powers.tolist(), ends.tolist(), bytes(content[:size])))
    assert made[0] == made[1]
    assert made[0][0] > 3


def test_what_json_cannot_say_is_refused() -> None:
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(InvalidError, match="which JSON cannot say"):
            encode_objects(pa.record_batch({"x": pa.array([1.0, value])}))


def test_bits_of_a_double_survive() -> None:
    chance = np.random.default_rng(11)
    values = chance.normal(size=2000) * 10.0 ** chance.integers(-5, 12, 2000)
    for text, value in zip(
        encode_objects(pa.record_batch({"x": values})).to_pylist(), values.tolist(), strict=True
    ):
        assert struct.pack("<d", float(json.loads(text)["x"])) == struct.pack("<d", value)
