"""How fast do JSON values become typed columns, three fields of five, on one core?

Back of the envelope: a value of 100 bytes is walked eight bytes at a time in strings and one by one in numbers,
about 60 steps of a nanosecond, and 30 bytes of it are copied; 100 to 150 ns a row, against 250 ns allowed.

Peers, in the same run, with the same rows and fields where they are installed: DuckDB's json_transform, Arrow's
reader of joined lines, polars, msgspec with a typed struct. Some are more generous than the declared types (DuckDB
reads the text "12" as a number); here they are judged by speed alone. All are checked against json.loads first, and
timed by the whole process's processor time, because some of them work on threads of their own.

    python benchmarks/json_columns.py [--full] [--json]
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from functools import partial
from time import process_time

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as arrow_json

from _report import Report, best_of, demand
from tidegate.tables.serdes.json import JsonDecoder

ROWS = 500_000
TARGET = 4e6
FIELDS = {"order_id": "string", "customer": "string", "amount": "double"}


def orders(rows: int, seed: int = 7) -> pa.BinaryArray:
    """Orders as compact JSON of about 100 bytes, as producers write them."""
    generator = np.random.default_rng(seed)
    parts = [
        pa.array(generator.integers(10**7, 10**8, rows)).cast(pa.string()),
        pa.array(generator.integers(1000, 9999, rows)).cast(pa.string()),
        pa.array(generator.integers(1, 10**7, rows) / 100).cast(pa.string()),
    ]
    joined = pc.binary_join_element_wise(
        '{"order_id":"', parts[0], '","customer":"', parts[1], '","amount":', parts[2],
        ',"currency":"EUR","status":"delivered"}', "",
    )  # fmt: skip
    return joined.cast(pa.binary())


def measurements(rows: int, seed: int = 8) -> pa.BinaryArray:
    """The same fields with numbers of 15 to 17 digits, names with escapes, and a nested object in between."""
    generator = np.random.default_rng(seed)
    parts = [
        pa.array(generator.integers(10**7, 10**8, rows)).cast(pa.string()),
        pa.array(generator.integers(1000, 9999, rows)).cast(pa.string()),
        pa.array(generator.random(rows) * 1000).cast(pa.string()),
    ]
    joined = pc.binary_join_element_wise(
        '{"order_id": "', parts[0], '", "customer": "Andr\\u00e9 ', parts[1],
        '", "where": {"x": [1, 2.5], "y": null}, "amount": ', parts[2], "}", "",
    )  # fmt: skip
    return joined.cast(pa.binary())


def peers(values: pa.BinaryArray) -> dict[str, Callable[[], pa.Table]]:
    """Other ways to the same columns, by name."""
    found: dict[str, Callable[[], pa.Table]] = {"pyarrow.json on joined lines": partial(by_arrow, values)}
    if importlib.util.find_spec("duckdb"):
        import duckdb

        connection = duckdb.connect(config={"threads": 1})
        connection.register("given", pa.table({"value": values.cast(pa.string())}))
        shape = json.dumps({"order_id": "VARCHAR", "customer": "VARCHAR", "amount": "DOUBLE"})
        query = f"select unnest(json_transform(value, '{shape}')) from given"
        found["DuckDB json_transform"] = lambda: connection.sql(query).to_arrow_table()
    if importlib.util.find_spec("polars"):
        import polars

        column = polars.Series("value", polars.from_arrow(values.cast(pa.string())))
        kind = polars.Struct({"order_id": polars.String, "customer": polars.String, "amount": polars.Float64})
        found["polars json_decode"] = lambda: column.str.json_decode(kind).struct.unnest().to_arrow()
    if importlib.util.find_spec("msgspec"):
        found["msgspec, typed"] = partial(by_msgspec, values.to_pylist())
    return found


def by_arrow(values: pa.BinaryArray) -> pa.Table:
    lines = pc.binary_join_element_wise(values.cast(pa.string()), "\n", "")
    types = {"string": pa.string(), "double": pa.float64()}
    options = arrow_json.ParseOptions(
        explicit_schema=pa.schema([(name, types[kind]) for name, kind in FIELDS.items()]),
        unexpected_field_behavior="ignore",
    )
    return arrow_json.read_json(
        pa.BufferReader(lines.buffers()[2]),
        read_options=arrow_json.ReadOptions(use_threads=False),
        parse_options=options,
    )


def by_msgspec(values: list[bytes]) -> pa.Table:
    import msgspec

    order = msgspec.defstruct("Order", [("order_id", str), ("customer", str), ("amount", float)])
    decode = msgspec.json.Decoder(order).decode
    rows = [decode(value) for value in values]
    return pa.table({name: [getattr(row, name) for row in rows] for name in FIELDS})


def check(found: pa.Table, expected: list[dict[str, object]], who: str) -> None:
    rows = found.select(list(FIELDS)).to_pylist()
    demand(rows == expected, f"{who} does not say what json.loads says")


def main() -> None:
    report = Report("How fast do JSON values become typed columns, three fields, on one core?")
    rows = ROWS * 4 if report.full else ROWS
    decoder = JsonDecoder(dict(FIELDS))
    for name, values in (("orders", orders(rows)), ("escapes, nesting, long numbers", measurements(rows))):
        expected = [{field: row[field] for field in FIELDS} for row in map(json.loads, values.to_pylist())]
        decoded = decoder.decode(values)
        demand(len(decoded.bad_rows) == 0, f"{len(decoded.bad_rows)} rows are called bad")
        check(pa.table(decoded.batch), expected, "the decoder")
        rate = rows / best_of(7, partial(decoder.decode, values), process_time)
        report.figure(
            f"{name}", f"{rate / 1e6:.2f} M rows/s", "", f"{TARGET / 1e6:g} M rows/s", rate >= TARGET
        )
        for peer, run in peers(values).items():
            check(run(), expected, peer)
            seconds = best_of(3, run, process_time)
            report.figure(
                f"  {peer}", f"{rows / seconds / 1e6:.2f} M rows/s", f"ours {rate * seconds / rows:.1f}×"
            )


if __name__ == "__main__":
    main()
