"""Records printed: JSON lines, JSON, CSV, a table that grows, a kcat-like template, values only, or Parquet.

A sink takes Arrow batches and writes bytes as they come; `finish` writes what a format has at its end. The table
escapes unprintable bytes; in the other formats bytes stay what they are, and a terminal escapes them
(`output.TerminalBytes`).
"""

from __future__ import annotations

import re
from typing import Any, BinaryIO

import pyarrow as pa

from tidegate.cli.output import printable, to_json
from tidegate.cli.windowed_keys import WindowedKeys
from tidegate.durations import format_moment
from tidegate.errors import InvalidError
from tidegate.log.format.json_records import encode_lines, to_objects
from tidegate.log.format.records import RECORD_SCHEMA

_TOKEN = re.compile(r"%(.)|\\([nrt0\\]|x[0-9a-fA-F]{2})|([^%\\]+)", re.DOTALL)
_ESCAPES = {"n": b"\n", "r": b"\r", "t": b"\t", "0": b"\0", "\\": b"\\"}
_COLUMN_WIDTHS = {"partition": 9, "offset": 10, "timestamp": 24, "key": 16}
_WINDOW_WIDTH = 49
_CSV_COLUMNS = ("topic", "partition", "offset", "timestamp", "key", "value", "headers")


class Sink:
    """Counts and forwards; the formats say how."""

    def __init__(self, out: BinaryIO, keys: WindowedKeys | None = None) -> None:
        self.out = out
        self.records = 0
        self.keys = keys

    def write(self, batch: pa.RecordBatch) -> None:
        self._put(batch)
        self.records += batch.num_rows

    def flush(self) -> None:
        self.out.flush()

    def finish(self) -> None:
        self.out.flush()

    def _put(self, batch: pa.RecordBatch) -> None:
        raise NotImplementedError

    def _windows(self, batch: pa.RecordBatch) -> list[dict[str, Any] | None] | None:
        """What is in windowed keys; None for topics without."""
        return None if self.keys is None else self.keys.windows(batch.column("key"))


class JsonLinesSink(Sink):
    def _put(self, batch: pa.RecordBatch) -> None:
        self.out.write(encode_lines(batch, self._windows(batch)))


class JsonSink(Sink):
    """One array, written as it grows."""

    def _put(self, batch: pa.RecordBatch) -> None:
        lines = encode_lines(batch, self._windows(batch)).rstrip(b"\n").replace(b"\n", b",\n")
        self.out.write((b"[\n" if self.records == 0 else b",\n") + lines)

    def finish(self) -> None:
        self.out.write(b"[]\n" if self.records == 0 else b"\n]\n")
        super().finish()


class ValueSink(Sink):
    """Values only, one a line; a null is an empty line."""

    def _put(self, batch: pa.RecordBatch) -> None:
        values = batch.column("value").fill_null(b"").to_pylist()
        self.out.write(b"\n".join(values) + b"\n")


class CsvSink(Sink):
    """With a heading; bytes that are no text are escaped, headers are JSON."""

    def _put(self, batch: pa.RecordBatch) -> None:
        import csv
        import io

        text = io.StringIO()
        writer = csv.writer(text)
        windows = self._windows(batch)
        columns = _CSV_COLUMNS if windows is None else (*_CSV_COLUMNS, "window")
        if self.records == 0:
            writer.writerow(columns)
        for record in to_objects(batch, windows):
            row = [record.get(name) for name in columns]
            writer.writerow([to_json(cell) if isinstance(cell, dict | list) else cell for cell in row])
        self.out.write(text.getvalue().encode("utf-8"))


class TableSink(Sink):
    """Aligned columns that do not wait for the last record to know their widths."""

    def _put(self, batch: pa.RecordBatch) -> None:
        lines = []
        if self.records == 0:
            head = [name.upper().ljust(width) for name, width in _COLUMN_WIDTHS.items()]
            head += [] if self.keys is None else ["WINDOW".ljust(_WINDOW_WIDTH)]
            lines.append("  ".join([*head, "VALUE"]))
        windows = self._windows(batch) or [None] * batch.num_rows
        rows = zip(
            batch.column("partition").to_pylist(),
            batch.column("offset").to_pylist(),
            batch.column("timestamp").cast(pa.int64()).to_pylist(),
            batch.column("key").to_pylist(),
            batch.column("value").to_pylist(),
            batch.column("headers").to_pylist(),
            windows,
            strict=True,
        )
        for partition, offset, timestamp, key, value, headers, window in rows:
            time = "-" if timestamp is None else format_moment(timestamp)
            if (control := _control_text(headers)) is not None:
                key, value = b"-", control.encode()
            named = _shown(key) if window is None else printable(_text(window["key"]))
            cells = [str(partition).rjust(9), str(offset).rjust(10), time.ljust(24), named.ljust(16)]
            if self.keys is not None:
                bounds = (
                    [] if window is None else [format_moment(window["start"]), format_moment(window["end"])]
                )
                cells.append(("/".join(bounds) or "-").ljust(_WINDOW_WIDTH))
            lines.append("  ".join([*cells, _shown(value)]).rstrip())
        self.out.write(("\n".join(lines) + "\n").encode("utf-8"))


class TemplateSink(Sink):
    """kcat's `-f`: each record through a template of bytes and fields."""

    def __init__(self, out: BinaryIO, template: str, keys: WindowedKeys | None = None) -> None:
        super().__init__(out, keys)
        self._parts = list(_template_parts(template))

    def _put(self, batch: pa.RecordBatch) -> None:
        windows = self._windows(batch) or [None] * batch.num_rows
        columns = {
            "t": [str(name).encode() for name in batch.column("topic").to_pylist()],
            "p": [b"%d" % number for number in batch.column("partition").to_pylist()],
            "o": [b"%d" % offset for offset in batch.column("offset").to_pylist()],
            "T": [
                b"%d" % time for time in batch.column("timestamp").cast(pa.int64()).fill_null(-1).to_pylist()
            ],
            "k": [
                (key or b"") if window is None else _text(window["key"]).encode()
                for key, window in zip(batch.column("key").to_pylist(), windows, strict=True)
            ],
            "w": [b"" if each is None else b"%d/%d" % (each["start"], each["end"]) for each in windows],
            "s": [value or b"" for value in batch.column("value").to_pylist()],
            "K": [b"%d" % (-1 if key is None else len(key)) for key in batch.column("key").to_pylist()],
            "S": [b"%d" % (-1 if one is None else len(one)) for one in batch.column("value").to_pylist()],
            "h": [_headers_text(headers) for headers in batch.column("headers").to_pylist()],
        }
        pieces = [
            part if isinstance(part, bytes) else columns[part][row]
            for row in range(batch.num_rows)
            for part in self._parts
        ]
        self.out.write(b"".join(pieces))


class ParquetSink(Sink):
    """One row group a batch."""

    def __init__(self, out: BinaryIO, keys: WindowedKeys | None = None) -> None:
        from pyarrow import parquet

        super().__init__(out, keys)
        schema = RECORD_SCHEMA if keys is None else RECORD_SCHEMA.append(keys.field)
        self._writer = parquet.ParquetWriter(out, schema, compression="zstd")

    def _put(self, batch: pa.RecordBatch) -> None:
        if self.keys is not None:
            windows = pa.array(self._windows(batch), self.keys.field.type)
            batch = batch.append_column(self.keys.field, windows)
        self._writer.write_batch(batch)

    def flush(self) -> None:
        pass

    def finish(self) -> None:
        self._writer.close()


def sink_for(format: str, out: BinaryIO, template: str | None, keys: WindowedKeys | None = None) -> Sink:
    """The sink of a format; `keys` takes windowed keys apart."""
    if format == "template":
        return TemplateSink(out, template or "", keys)
    kinds: dict[str, type[Any]] = {
        "jsonl": JsonLinesSink,
        "json": JsonSink,
        "csv": CsvSink,
        "table": TableSink,
        "lines": ValueSink,
        "parquet": ParquetSink,
    }
    sink: Sink = kinds[format](out, keys)
    return sink


def _template_parts(template: str) -> list[bytes | str]:
    """Literal bytes and field letters."""
    parts: list[bytes | str] = []
    position = 0
    for match in _TOKEN.finditer(template):
        if match.start() != position:
            break
        position = match.end()
        field, escape, literal = match.groups()
        if literal is not None:
            parts.append(literal.encode("utf-8"))
        elif escape is not None:
            parts.append(bytes([int(escape[1:], 16)]) if escape[0] == "x" else _ESCAPES[escape])
        elif field == "%":
            parts.append(b"%")
        elif field in "tpoTkswKSh":
            parts.append(field)
        else:
            raise InvalidError(
                f"-f {template!r}: %{field} is not a field; there are %t %p %o %T %k %w %s %K %S %h"
            )
    if position != len(template):
        raise InvalidError(
            f"-f {template!r}: cannot be read from {template[position:][:10]!r} on; write \\\\ for \\"
        )
    return parts


def _headers_text(headers: Any) -> bytes:
    """`name=value,name=value`, NULL for none, as kcat prints them."""
    return b",".join(
        header["key"].encode() + b"=" + (b"NULL" if header["value"] is None else header["value"])
        for header in headers or ()
    )


def _text(key: Any) -> str:
    """A key that a serde has read, as text."""
    if isinstance(key, bytes):
        return key.decode("utf-8", "backslashreplace")
    return key if isinstance(key, str) else to_json(key)


def _control_text(headers: Any) -> str | None:
    """What one of Tidegate's own records says: `start of chain 0 of 73c7… by shop.py, process 7 on here`."""
    from tidegate.integrity.header import (
        HEADER_KEY,
        ORIGIN_HEADER_KEY,
        ChainOrigin,
        ControlType,
        RecordKind,
        Stamp,
    )

    known = {header["key"]: header["value"] for header in headers or ()}
    if HEADER_KEY not in known:
        return None
    try:
        stamp = Stamp.from_bytes(known[HEADER_KEY] or b"")
        if stamp.kind != RecordKind.CONTROL:
            return None
        what = ControlType(stamp.control).name.lower().replace("_", " ")
    except (InvalidError, ValueError):
        return None
    origin = ChainOrigin.from_bytes(known.get(ORIGIN_HEADER_KEY) or b"")
    of = f"{what} {stamp.chain}" if what.endswith("chain") else what
    return f"{of} of {stamp.guid.hex()}" + ("" if origin is None else f", by {origin}")


def _shown(value: bytes | None) -> str:
    return "-" if value is None else printable(value)
