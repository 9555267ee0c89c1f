"""Formats of records on the command line.

`tables` parses lines, JSON lines, JSON, CSV and Parquet into Arrow tables as the input arrives, a few MiB of text or
one row group at a time. `sink_for` gives the sink that writes Arrow batches in one of the output formats. The table
format escapes unprintable bytes; the other formats keep bytes as they are, and `output.TerminalBytes` escapes them on
a terminal.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.cli.output import printable, to_json
from tidegate.durations import format_moment
from tidegate.errors import InvalidError
from tidegate.log.format.json_records import encode_lines, parse_document, parse_lines, to_objects
from tidegate.log.format.records import HEADERS_TYPE, RECORD_SCHEMA
from tidegate.log.log import Log

if TYPE_CHECKING:
    from tidegate.tables.serdes.base import WindowedSerde


# -- input -----------------------------------------------------------------------------------------

_CHUNK_BYTES = 4 << 20
_DOCUMENT_LIMIT_BYTES = 256 << 20
_CSV_FIELD = rb'(?:"[^"]*+(?:""[^"]*+)*+"[^,\n]*+|[^",\n][^,\n]*+)?+'
_CSV_RECORDS = re.compile(rb"(?:" + _CSV_FIELD + rb"(?:," + _CSV_FIELD + rb")*+\n)++")
_COLUMNS = ("key", "value", "timestamp", "partition", "headers")


@dataclass(frozen=True, slots=True)
class InputOptions:
    """How to read what is handed in."""

    format: str
    key: str | None = None
    key_separator: str | None = None
    null_empty: bool = False
    headers: tuple[str, ...] = ()
    max_line_bytes: int = 1 << 20


def tables(stream: BinaryIO, name: str, options: InputOptions) -> Iterator[pa.Table]:
    """The records of a stream, piece by piece; what is wrong with one is said with the stream's name."""
    try:
        yield from _tables(stream, name, options)
    except InvalidError as error:
        raise InvalidError(f"{name}: {error}") from None


def _tables(stream: BinaryIO, name: str, options: InputOptions) -> Iterator[pa.Table]:
    if options.format == "parquet":
        yield from _parquet(stream)
    elif options.format == "csv":
        yield from _csv(stream, options.max_line_bytes)
    elif options.format == "json":
        document = stream.read(_DOCUMENT_LIMIT_BYTES + 1)
        if len(document) > _DOCUMENT_LIMIT_BYTES:
            raise InvalidError("a JSON array above 256 MiB; use --format jsonl, which has no such limit")
        yield parse_document(document)
    else:
        for first_line, chunk in _whole_lines(stream, options.max_line_bytes):
            if options.format == "jsonl":
                table = parse_lines(chunk, first_line=first_line, max_line_bytes=options.max_line_bytes)
            else:
                table = _plain_lines(chunk, first_line, options)
            if table.num_rows:
                yield table


def _whole_lines(stream: BinaryIO, max_line_bytes: int) -> Iterator[tuple[int, bytes]]:
    """(number of the first line, whole lines without the last newline), as much as is there at a time."""
    number, rest = 1, b""
    read = getattr(stream, "read1", stream.read)
    while chunk := read(_CHUNK_BYTES):
        cut = chunk.rfind(b"\n")
        if cut < 0:
            rest += chunk
        else:
            whole = rest + chunk[:cut]
            yield number, whole
            number += whole.count(b"\n") + 1
            rest = chunk[cut + 1 :]
        if len(rest) > max_line_bytes:
            raise InvalidError(_too_long(f"line {number}", max_line_bytes))
    if rest:
        yield number, rest


def _plain_lines(chunk: bytes, first_line: int, options: InputOptions) -> pa.Table:
    """Every line a value; with a separator, key and value."""
    lines = [line.removesuffix(b"\r") for line in chunk.split(b"\n")]
    for number, line in enumerate(lines, first_line) if len(chunk) > options.max_line_bytes else ():
        if len(line) > options.max_line_bytes:
            raise InvalidError(_too_long(f"line {number}", options.max_line_bytes))
    keys: list[bytes | None] = [None if options.key is None else options.key.encode()] * len(lines)
    values: list[bytes | None] = list(lines)
    if options.key_separator is not None:
        separator = options.key_separator.encode()
        parts = [line.partition(separator) for line in lines]
        keys = [before if found else key for (before, found, _), key in zip(parts, keys, strict=True)]
        values = [after if found else before for before, found, after in parts]
    if options.null_empty:
        keys = [key or None for key in keys]
        values = [value or None for value in values]
    columns = {"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())}
    if options.headers:
        pairs = []
        for header in options.headers:
            header_name, equals, value = header.partition("=")
            if not header_name:
                raise InvalidError(f"-H {header}: write it as NAME=VALUE")
            pairs.append((header_name, value.encode() if equals else None))
        columns["headers"] = pa.repeat(pa.scalar(pairs, HEADERS_TYPE), len(lines))
    return pa.table(columns)


def _csv(stream: BinaryIO, max_line_bytes: int) -> Iterator[pa.Table]:
    """Whole records at a time. Arrow is given bytes and never the stream: it would read that ahead in threads of its
    own, which end the process when it ends before they do."""
    from pyarrow import csv

    convert = csv.ConvertOptions(
        column_types={
            "key": pa.string(),
            "value": pa.string(),
            "timestamp": pa.int64(),
            "partition": pa.int32(),
        },
        strings_can_be_null=True,
        null_values=[""],
        quoted_strings_can_be_null=False,
    )
    heading: list[str] | None = None
    for number, records in _whole_csv_records(stream, max_line_bytes):
        if not records.strip():
            continue
        read = csv.ReadOptions(use_threads=False, block_size=len(records) + 1, column_names=heading)
        try:
            table = csv.read_csv(
                pa.BufferReader(records),
                read_options=read,
                parse_options=csv.ParseOptions(newlines_in_values=True),
                convert_options=convert,
            )
        except pa.ArrowInvalid as error:
            said = str(error).partition("\n")[0]
            raise InvalidError(f"not the CSV expected, in what begins at line {number}: {said}") from None
        heading = table.column_names
        table = _record_columns(table)
        for column in ("key", "value"):
            longest = pc.max(pc.binary_length(table[column])).as_py() if column in table.column_names else 0
            if longest is not None and longest > max_line_bytes:
                raise InvalidError(_too_long(f"a {column} behind line {number}", max_line_bytes))
        if table.num_rows:
            yield table
    if heading is None:
        raise InvalidError("not the CSV expected: it is empty; begin with a heading like key,value")


def _whole_csv_records(stream: BinaryIO, max_line_bytes: int) -> Iterator[tuple[int, bytes]]:
    """(number of the first line, whole records), as much as is there at a time; quoted fields may hold newlines."""
    number, rest = 1, b""
    read = getattr(stream, "read1", stream.read)
    while chunk := read(_CHUNK_BYTES):
        rest += chunk
        found = _CSV_RECORDS.match(rest)
        cut = 0 if found is None else found.end()
        if cut:
            yield number, rest[:cut]
            number += rest.count(b"\n", 0, cut)
            rest = rest[cut:]
        if len(rest) > max_line_bytes:
            raise InvalidError(_too_long(f"the record that begins in line {number}", max_line_bytes))
    if rest and _CSV_RECORDS.fullmatch(rest + b"\n") is None:
        raise InvalidError(
            f"the record that begins in line {number} has a quote that is not closed; close it, and write quotes "
            'within a quoted field twice: ""'
        )
    if rest:
        yield number, rest


def _too_long(what: str, max_line_bytes: int) -> str:
    return f"{what} is longer than {max_line_bytes} bytes; raise --max-line-bytes"


def _parquet(stream: BinaryIO) -> Iterator[pa.Table]:
    import mmap

    from pyarrow import parquet

    data: mmap.mmap | bytes
    try:  # never the stream itself: Arrow reads ahead in threads of its own
        data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError):  # a pipe
        data = stream.read()
    try:
        file = parquet.ParquetFile(pa.BufferReader(data))
        for number in range(file.num_row_groups):
            table = file.read_row_group(number)
            table.validate(full=True)
            if isinstance(data, mmap.mmap):  # reading through the map does not move the position
                stream.seek(len(data) * (number + 1) // file.num_row_groups)
            yield _record_columns(table)
    except (pa.ArrowException, OSError) as error:
        said = str(error).partition("\n")[0]
        raise InvalidError(f"not a Parquet file that can be read: {said}") from None


def _record_columns(table: pa.Table) -> pa.Table:
    """Only the columns that make records; others are metadata of another topic, or a mistake."""
    known = [column for column in _COLUMNS if column in table.column_names]
    twice = sorted({column for column in known if table.column_names.count(column) > 1})
    if twice:
        raise InvalidError(f"columns twice: {', '.join(twice)}; keep one of each")
    strangers = set(table.column_names) - set(_COLUMNS) - {"topic", "offset", "window"}
    if strangers or not known:
        raise InvalidError(f"columns {', '.join(table.column_names)}; expected some of {', '.join(_COLUMNS)}")
    return table.select(known)


# -- windowed keys ---------------------------------------------------------------------------------

RAW = "raw"


class WindowedKeys:
    """Takes the keys of batches apart."""

    def __init__(self, serde: WindowedSerde[Any]) -> None:
        self._serde = serde

    @property
    def field(self) -> pa.Field:
        """The column `window` of Parquet."""
        import pyarrow as pa

        bounds = [pa.field("start", pa.int64()), pa.field("end", pa.int64())]
        return pa.field("window", pa.struct([pa.field("key", self._serde.inner.arrow_type), *bounds]))

    def windows(self, keys: pa.Array) -> list[dict[str, Any] | None]:
        """`{"key": …, "start": ms, "end": ms}` for each key; None where there is no windowed key."""
        found = self._serde.decode_column(keys).values.to_pylist()
        return [
            None
            if each is None
            else {"key": each["key"], "start": each["window_start"], "end": each["window_end"]}
            for each in found
        ]


def keys_of(
    log: Any, topic: str, *, key_format: str | None, size: str | None, serde: str | None
) -> WindowedKeys | None:
    """What takes the topic's keys apart; None where they carry no windows."""
    if key_format in (None, RAW) and size is not None:
        raise InvalidError("--window-size belongs to --key-format topic or changelog; give both")
    if key_format == RAW:
        return None
    # A cluster keeps no record of it, and is not asked.
    recorded = log.describe(topic).encoding if key_format is None and isinstance(log, Log) else None
    if key_format is None and not (recorded or {}).get("window"):
        if serde is not None:
            raise InvalidError(
                f"--key {serde}: the keys of {topic} have no windows; add --key-format if they do"
            )
        return None
    from tidegate.tables.serdes.base import windowed
    from tidegate.tables.serdes.json import PLAIN_SERDES

    inner = PLAIN_SERDES[serde or "string"]
    if recorded is None:
        if (size is None) != (key_format == "session"):
            raise InvalidError(
                f"--key-format {key_format}: give --window-size for time windows, and none for sessions"
            )
        return WindowedKeys(windowed(inner, size=size, key_format=key_format, strict=False))
    import msgspec

    from tidegate.tables.topic_encoding import TopicEncoding

    encoding = msgspec.convert(recorded, TopicEncoding)
    if encoding.window_size_ms is None and not encoding.is_sessions:
        return None
    if serde is None:
        plain = isinstance(encoding.key, str) and encoding.key in PLAIN_SERDES
        inner = PLAIN_SERDES[encoding.key if plain else "bytes"]
    size_ms = encoding.window_size_ms
    length = None if size_ms is None else f"{size_ms}ms"
    chosen = "session" if encoding.is_sessions else encoding.key_format
    return WindowedKeys(windowed(inner, size=length, key_format=chosen, strict=False))


# -- output ----------------------------------------------------------------------------------------

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
