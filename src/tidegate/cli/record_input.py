"""Bytes a person hands in as tables of records: lines, JSON lines, JSON, CSV, Parquet.

Reads as it comes, so that a live pipe is written as it grows, in bounded pieces: a few MiB of text at a time,
one row group of Parquet.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import pyarrow as pa

from tidegate.errors import InvalidError
from tidegate.log.batches.json_records import parse_document, parse_lines
from tidegate.log.batches.records import HEADERS_TYPE

_CHUNK_BYTES = 4 << 20
_DOCUMENT_LIMIT_BYTES = 256 << 20
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
        yield from _csv(stream, name)
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
            raise InvalidError(
                f"line {number} of {name} is longer than {max_line_bytes} bytes; raise --max-line-bytes"
            )
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


def _csv(stream: BinaryIO, name: str) -> Iterator[pa.Table]:
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
    try:
        reader = csv.open_csv(stream, convert_options=convert)
        for batch in reader:
            yield _record_columns(pa.Table.from_batches([batch]), name)
    except pa.ArrowInvalid as error:
        raise InvalidError(f"{name}: not the CSV expected: {error}") from None


def _parquet(stream: BinaryIO, name: str) -> Iterator[pa.Table]:
    import io

    from pyarrow import parquet

    source = stream if stream.seekable() else io.BytesIO(stream.read())
    try:
        file = parquet.ParquetFile(source)
        for number in range(file.num_row_groups):
            yield _record_columns(file.read_row_group(number), name)
    except (pa.ArrowInvalid, OSError) as error:
        raise InvalidError(f"{name}: not a Parquet file that can be read: {error}") from None


def _record_columns(table: pa.Table, name: str) -> pa.Table:
    """Only the columns that make records; others are metadata of another topic, or a mistake."""
    known = [column for column in _COLUMNS if column in table.column_names]
    strangers = set(table.column_names) - set(_COLUMNS) - {"topic", "offset"}
    if strangers or not known:
        raise InvalidError(
            f"{name}: columns {', '.join(table.column_names)}; expected some of {', '.join(_COLUMNS)}"
        )
    return table.select(known)
