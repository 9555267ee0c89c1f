"""Bytes a person hands in as tables of records: lines, JSON lines, JSON, CSV, Parquet.

Reads as it comes, so that a live pipe is written as it grows, in bounded pieces: a few MiB of text at a time,
one row group of Parquet.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.errors import InvalidError
from tidegate.log.format.json_records import parse_document, parse_lines
from tidegate.log.format.records import HEADERS_TYPE

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
    """The records of a stream, piece by piece."""
    if options.format == "parquet":
        yield from _parquet(stream, name)
    elif options.format == "csv":
        yield from _csv(stream, name, options.max_line_bytes)
    elif options.format == "json":
        document = stream.read(_DOCUMENT_LIMIT_BYTES + 1)
        if len(document) > _DOCUMENT_LIMIT_BYTES:
            raise InvalidError(
                f"{name}: a JSON array above 256 MiB; use --format jsonl, which has no such limit"
            )
        yield parse_document(document)
    else:
        for first_line, chunk in _whole_lines(stream, name, options.max_line_bytes):
            if options.format == "jsonl":
                table = parse_lines(chunk, first_line=first_line, max_line_bytes=options.max_line_bytes)
            else:
                table = _plain_lines(chunk, first_line, options)
            if table.num_rows:
                yield table


def _whole_lines(stream: BinaryIO, name: str, max_line_bytes: int) -> Iterator[tuple[int, bytes]]:
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
            raise InvalidError(_too_long(f"line {number}", name, max_line_bytes))
    if rest:
        yield number, rest


def _plain_lines(chunk: bytes, first_line: int, options: InputOptions) -> pa.Table:
    """Every line a value; with a separator, key and value."""
    lines = [line.removesuffix(b"\r") for line in chunk.split(b"\n")]
    for number, line in enumerate(lines, first_line) if len(chunk) > options.max_line_bytes else ():
        if len(line) > options.max_line_bytes:
            raise InvalidError(
                f"line {number} is longer than {options.max_line_bytes} bytes; raise --max-line-bytes"
            )
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


def _csv(stream: BinaryIO, name: str, max_line_bytes: int) -> Iterator[pa.Table]:
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
    for number, records in _whole_csv_records(stream, name, max_line_bytes):
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
            raise InvalidError(
                f"{name}: not the CSV expected, in what begins at line {number}: {said}"
            ) from None
        heading = table.column_names
        table = _record_columns(table, name)
        for column in ("key", "value"):
            longest = pc.max(pc.binary_length(table[column])).as_py() if column in table.column_names else 0
            if longest is not None and longest > max_line_bytes:
                raise InvalidError(_too_long(f"a {column} behind line {number}", name, max_line_bytes))
        if table.num_rows:
            yield table
    if heading is None:
        raise InvalidError(f"{name}: not the CSV expected: it is empty; begin with a heading like key,value")


def _whole_csv_records(stream: BinaryIO, name: str, max_line_bytes: int) -> Iterator[tuple[int, bytes]]:
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
            raise InvalidError(_too_long(f"the record that begins in line {number}", name, max_line_bytes))
    if rest:
        yield number, rest


def _too_long(what: str, name: str, max_line_bytes: int) -> str:
    return f"{what} of {name} is longer than {max_line_bytes} bytes; raise --max-line-bytes"


def _parquet(stream: BinaryIO, name: str) -> Iterator[pa.Table]:
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
            yield _record_columns(table, name)
    except (pa.ArrowException, OSError) as error:
        said = str(error).partition("\n")[0]
        raise InvalidError(f"{name}: not a Parquet file that can be read: {said}") from None


def _record_columns(table: pa.Table, name: str) -> pa.Table:
    """Only the columns that make records; others are metadata of another topic, or a mistake."""
    known = [column for column in _COLUMNS if column in table.column_names]
    strangers = set(table.column_names) - set(_COLUMNS) - {"topic", "offset", "window"}
    if strangers or not known:
        raise InvalidError(
            f"{name}: columns {', '.join(table.column_names)}; expected some of {', '.join(_COLUMNS)}"
        )
    return table.select(known)
