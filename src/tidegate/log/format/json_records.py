"""Parse records from JSON lines, and write them as JSON lines.

One object a line: `{"key": …, "value": …, "timestamp": ms, "partition": n, "headers": {…}}`, all optional.

| JSON | bytes |
|---|---|
| `"text"` | its UTF-8 |
| `{"base64": "…"}` | what it encodes |
| `null`, or absent | null |
| any other value | its compact JSON text: `{"id": 7}` is stored as `{"id":7}` |

`timestamp` is epoch milliseconds or a moment like `2026-01-01T10:00Z`. `headers` is an object, or a list of
`{"key": …, "value": …}` where a name repeats. `topic`, `offset` and `window` are ignored on input, so that output can
be read again. Of a repeated field the last value counts.

J1  a line's bytes and a value's nesting are limited; beyond that is an `InvalidError` that names the line.
J2  what `encode_lines` writes, `parse_lines` reads back into equal records.

Pure functions.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Annotated, Any, TypeVar

import msgspec
import pyarrow as pa
from msgspec import Raw

from tidegate.durations import moment_ms
from tidegate.errors import InvalidError
from tidegate.log.format.records import HEADERS_TYPE

MAX_LINE_BYTES = 1 << 20
MAX_DEPTH = 64
_NULL = Raw(b"null")
_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*"')
_EXAMPLE = '{"key": "k", "value": "v", "timestamp": 1767225600000, "partition": 0, "headers": {"h": "x"}}'
INPUT_SCHEMA = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("timestamp", pa.int64()),
        ("partition", pa.int32()),
        ("headers", HEADERS_TYPE),
    ]
)
Result = TypeVar("Result")


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    key: Raw = _NULL
    value: Raw = _NULL
    timestamp: int | str | None = None
    partition: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    headers: Any = None
    topic: Any = None
    offset: Any = None
    window: Any = None


_LINES = msgspec.json.Decoder(_Line)
_TEXT = msgspec.json.Decoder(str)
_DOCUMENT = msgspec.json.Decoder(list[Raw])


def parse_lines(chunk: bytes, *, first_line: int = 1, max_line_bytes: int = MAX_LINE_BYTES) -> pa.Table:
    """Return the records of whole lines; empty lines are skipped, a bad line is an error with its number (J1)."""
    try:
        chunk.decode("utf-8")
        if len(chunk) > max_line_bytes and any(len(line) > max_line_bytes for line in chunk.split(b"\n")):
            raise InvalidError("a line is too long")
        return _to_table(_LINES.decode_lines(chunk))
    except (InvalidError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _parse_one_by_one(chunk, first_line, max_line_bytes)


def parse_document(document: bytes) -> pa.Table:
    """Return the records of one JSON array of such objects."""
    try:
        document.decode("utf-8")
        raw = _DOCUMENT.decode(document)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidError(f"the input is not a JSON array of records: {error}") from None
    rows = [
        _named(f"record {number}", partial(_checked_line, bytes(record))) for number, record in enumerate(raw)
    ]
    return _to_table(rows)


def encode_lines(records: pa.RecordBatch, windows: Sequence[Mapping[str, Any] | None] | None = None) -> bytes:
    """Return the records as JSON lines with topic, partition and offset (J2), and the windows of windowed keys."""
    encoder = msgspec.json.Encoder()
    return encoder.encode_lines(to_objects(records, windows))


def to_objects(
    records: pa.RecordBatch, windows: Sequence[Mapping[str, Any] | None] | None = None
) -> list[dict[str, Any]]:
    """Return the records as JSON-like objects; `windows`, one for each record, become their field `window`."""
    columns = zip(
        records.column("topic").to_pylist(),
        records.column("partition").to_pylist(),
        records.column("offset").to_pylist(),
        records.column("timestamp").cast(pa.int64()).to_pylist(),
        _texts(records.column("key")),
        _texts(records.column("value")),
        _header_objects(records.column("headers")),
        strict=True,
    )
    objects: list[dict[str, Any]] = [
        {
            "topic": topic,
            "partition": partition,
            "offset": offset,
            "timestamp": timestamp,
            "key": key,
            "value": value,
            "headers": headers,
        }
        for topic, partition, offset, timestamp, key, value, headers in columns
    ]
    if windows is not None:
        for each, window in zip(objects, windows, strict=True):
            each["window"] = None if window is None else {**window, "key": _plain_key(window["key"])}
    return objects


# -- parsing -----------------------------------------------------------------------------------------


def _parse_one_by_one(chunk: bytes, first_line: int, max_line_bytes: int) -> pa.Table:
    rows = []
    for number, line in enumerate(chunk.split(b"\n"), first_line):
        if len(line) > max_line_bytes:
            raise InvalidError(
                f"line {number} has {len(line)} bytes, more than the {max_line_bytes} allowed; raise "
                f"--max-line-bytes or split it"
            )
        if line.strip():
            rows.append(_named(f"line {number}", partial(_checked_line, line)))
    return _to_table(rows)


def _checked_line(line: bytes) -> _Line:
    """Convert one line as `_to_table` does and return its row, so that an error concerns this line."""
    line.decode("utf-8")
    row = _LINES.decode(line)
    _stored(row.key)
    _stored(row.value)
    _timestamp(row.timestamp)
    _headers(row.headers)
    return row


def _named(where: str, decode: Callable[[], Result]) -> Result:
    try:
        return decode()
    except RecursionError:
        raise InvalidError(f"{where}: nested too deeply; the limit is {MAX_DEPTH} levels") from None
    except UnicodeDecodeError as error:
        raise InvalidError(f"{where}: not UTF-8 at byte {error.start}; send bytes as base64") from None
    except (InvalidError, msgspec.MsgspecError) as error:
        raise InvalidError(f"{where}: {error}; a record looks like {_EXAMPLE}") from None


def _to_table(rows: Sequence[_Line]) -> pa.Table:
    headers = [_headers(row.headers) for row in rows] if any(row.headers for row in rows) else None
    columns = [
        pa.array([_stored(row.key) for row in rows], pa.binary()),
        pa.array([_stored(row.value) for row in rows], pa.binary()),
        pa.array([_timestamp(row.timestamp) for row in rows], pa.int64()),
        pa.array([row.partition for row in rows], pa.int32()),
        pa.nulls(len(rows), HEADERS_TYPE) if headers is None else pa.array(headers, HEADERS_TYPE),
    ]
    return pa.Table.from_arrays(columns, schema=INPUT_SCHEMA)


def _stored(raw: Raw) -> bytes | None:
    """Return the bytes that a JSON value stands for."""
    text = bytes(raw)
    first = text[:1]
    if first == b'"':
        return text[1:-1] if b"\\" not in text else _TEXT.decode(text).encode("utf-8")
    if text == b"null":
        return None
    if first == b"{":
        encoded = _base64_of(text)
        if encoded is not None:
            return encoded
    if text.count(b"{") + text.count(b"[") > MAX_DEPTH and _depth(text) > MAX_DEPTH:
        raise InvalidError(f"nested more than {MAX_DEPTH} levels deep")
    return msgspec.json.format(text, indent=-1)


def _base64_of(text: bytes) -> bytes | None:
    if b'"base64"' not in text[:64]:
        return None
    content = msgspec.json.decode(text)
    if set(content) != {"base64"} or not isinstance(content["base64"], str):
        return None
    try:
        return base64.b64decode(content["base64"], validate=True)
    except binascii.Error as error:
        raise InvalidError(f"bad base64: {error}") from None


def _depth(text: bytes) -> int:
    """Return the deepest nesting; brackets inside strings are not counted."""
    brackets = _STRINGS.sub(b"", text)
    return max(accumulate((byte in b"{[") - (byte in b"}]") for byte in brackets))


def _timestamp(said: int | str | None) -> int | None:
    moment = moment_ms(said) if isinstance(said, str) else said
    if moment is not None and not -(2**63) <= moment < 2**63:
        raise InvalidError(f"timestamp {moment} does not fit 64 bits; it is in milliseconds since 1970")
    return moment


def _headers(said: Any) -> list[tuple[str, bytes | None]]:
    if said is None:
        return []
    if isinstance(said, dict):
        return [(name, _header_value(value)) for name, value in said.items()]
    if isinstance(said, list):
        pairs = []
        for item in said:
            if (
                not isinstance(item, dict)
                or not isinstance(item.get("key"), str)
                or set(item) - {"key", "value"}
            ):
                raise InvalidError('a header in a list is {"key": "name", "value": …}')
            pairs.append((item["key"], _header_value(item.get("value"))))
        return pairs
    raise InvalidError("headers are an object or a list")


def _header_value(value: Any) -> bytes | None:
    return _stored(Raw(msgspec.json.encode(value)))


# -- encoding ----------------------------------------------------------------------------------------


def _texts(column: pa.Array) -> list[Any]:
    """Return strings where the bytes are UTF-8, `{"base64": …}` where not, None for null."""
    try:
        texts: list[Any] = column.cast(pa.string()).to_pylist()
    except pa.ArrowInvalid:
        texts = [None if value is None else text_or_base64(value) for value in column.to_pylist()]
    return texts


def text_or_base64(value: bytes) -> Any:
    """Return a string where the bytes are UTF-8, else `{"base64": …}`."""
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value).decode("ascii")}


def _plain_key(key: Any) -> Any:
    return text_or_base64(key) if isinstance(key, bytes) else key


def _header_objects(column: pa.ListArray) -> list[Any]:
    if len(column.flatten()) == 0:
        return [{}] * len(column)
    shown: list[Any] = []
    for pairs in column.to_pylist():
        texts = [
            (pair["key"], None if pair["value"] is None else text_or_base64(pair["value"]))
            for pair in pairs or ()
        ]
        named = dict(texts)
        shown.append(named if len(named) == len(texts) else [{"key": k, "value": v} for k, v in texts])
    return shown
