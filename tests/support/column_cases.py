"""Columns of every Arrow type that stores take, and runs with one of them as payload."""

from __future__ import annotations

import datetime
import decimal

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from tidegate.storage.runs.columns import hash_keys
from tidegate.storage.runs.run import DIRECTORY, Run
from tidegate.storage.spec import Merge, StoreSpec

STRUCT = pa.struct([("a", pa.int16()), ("b", pa.list_(pa.string()))])
TYPED: dict[str, pa.Array] = {
    "bool": pa.array([True, None, False] * 7),
    "int8": pa.array([1, None, -3] * 5, pa.int8()),
    "uint64": pa.array([1, 2**64 - 1, None], pa.uint64()),
    "float16": pa.array(np.array([1.5, 2.5], np.float16)),
    "float64 without nulls": pa.array([1.5, 2.5, 3.5]),
    "string": pa.array(["a", None, "", "ä" * 50]),
    "large string": pa.array(["a", None, "bc"], pa.large_string()),
    "binary": pa.array([b"a", None, b"", b"\0" * 70], pa.binary()),
    "large binary": pa.array([b"a", None], pa.large_binary()),
    "fixed binary": pa.array([b"abc", None, b"xyz"], pa.binary(3)),
    "decimal128": pa.array([decimal.Decimal("1.50"), None], pa.decimal128(20, 2)),
    "decimal256": pa.array([decimal.Decimal("1.50"), None], pa.decimal256(60, 2)),
    "timestamp": pa.array([1, None, 3], pa.timestamp("us", "Europe/Berlin")),
    "date32": pa.array([datetime.date(2026, 1, 1), None]),
    "time64": pa.array([1, None], pa.time64("ns")),
    "duration": pa.array([1, None], pa.duration("ms")),
    "interval": pa.array([pa.MonthDayNano([1, 2, 3]), None], pa.month_day_nano_interval()),
    "null": pa.nulls(5),
    "list": pa.array([[1, 2], None, [], [3, None]], pa.list_(pa.int64())),
    "large list": pa.array([["a"], None, []], pa.large_list(pa.string())),
    "list of lists": pa.array([[[1], [2, 3]], None, [[]]], pa.list_(pa.list_(pa.int8()))),
    "fixed list": pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32(), 2)),
    "struct": pa.array([{"a": 1, "b": ["x", None]}, None, {"a": None, "b": []}], STRUCT),
    "list of structs": pa.array([[{"a": 1, "b": ["x"]}], None], pa.list_(STRUCT)),
    "map": pa.array([[("a", 1), ("b", None)], None, []], pa.map_(pa.string(), pa.int64())),
    "dictionary": pa.array(["x", "y", None, "x"] * 4).dictionary_encode(),
    "dictionary of int8": pa.DictionaryArray.from_arrays(pa.array([0, 1, None], pa.int8()), pa.array([7, 8])),
    "list of dictionaries": pa.ListArray.from_arrays(
        [0, 2, 3], pa.array(["x", "y", "x"]).dictionary_encode()
    ),
}


VALUES = st.one_of(
    st.lists(st.none() | st.booleans(), max_size=40).map(lambda v: pa.array(v, pa.bool_())),
    st.lists(st.none() | st.binary(max_size=70), max_size=40).map(lambda v: pa.array(v, pa.binary())),
    st.lists(st.none() | st.lists(st.none() | st.integers(-99, 99), max_size=5), max_size=20).map(
        lambda v: pa.array(v, pa.list_(pa.int64()))
    ),
    st.lists(st.none() | st.fixed_dictionaries({"a": st.none() | st.text(max_size=5)}), max_size=20).map(
        lambda v: pa.array(v, pa.struct([("a", pa.string())]))
    ),
)


MANY = 1000
EVEN = {
    "zeros": np.zeros(MANY, np.int64),
    "one value": np.full(MANY, -7, np.int32),
    "counted": np.arange(MANY, dtype=np.int64) + 5,
    "in steps down": 10**12 - 60_000 * np.arange(MANY, dtype=np.int64),
    "unsigned": np.full(MANY, 2**64 - 1, np.uint64),
    "to the last number": np.arange(2**63 - MANY, 2**63 - 1, dtype=np.int64),
    "from end to end": np.linspace(-(2**63), 2**63 - 2**53, 2, dtype=np.int64).repeat(MANY // 2),
    "small numbers": np.arange(-128, 128, dtype=np.int8),
    "short": np.arange(10, dtype=np.int64),
    "nearly": np.where(np.arange(MANY) == 700, 1, np.arange(MANY)),
    "wrapping": (np.arange(MANY).astype(np.uint64) * np.uint64(2**62)).view(np.int64),
    "random": np.random.default_rng(1).integers(-(2**63), 2**63 - 1, MANY),
}


def run_with(column: pa.Array, keys: int = 1) -> tuple[StoreSpec, Run]:
    """A run whose payload is one given column."""
    rows = len(column)
    spec = StoreSpec("typed", Merge.APPEND, pa.schema([("value", column.type)]))
    names = pa.array([b"k%d" % i for i in range(keys)], pa.binary())
    order = np.argsort(hash_keys(names))
    directory = pa.RecordBatch.from_arrays(
        [
            pa.array(hash_keys(names)[order]),
            names.take(pa.array(order)),
            pa.array(np.arange(keys, dtype=np.int32)),
        ],
        schema=DIRECTORY,
    )
    numbers = pa.array(np.arange(rows, dtype=np.int64))
    return spec, Run(0, directory, pa.RecordBatch.from_arrays([numbers, numbers, column], schema=spec.rows))
