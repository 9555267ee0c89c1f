"""Avro as a serde with a schema registry (extra `avro`), framed as Kafka's Avro producers frame it.

| bytes | hold |
|---|---|
| 0 | 0, always |
| 1-4 | the schema's number in the registry, big-endian |
| 5- | the value, in Avro's binary encoding, by that schema |

A value is read with the schema it was written with and resolved to the declared one. fastavro reads and writes one
value at a time, so columns go through Python objects here. A schema's number never changes, so schemas are cached. A
registry that cannot be reached or fails is `UnavailableError`, one that does not know or refuses a schema is
`InvalidError`.

Thread rule: serdes are values for any thread; the registry has one lock around its cache, and requests run in
parallel.
"""

from __future__ import annotations

import base64
import io
import json
import struct
import threading
import urllib.parse
from collections.abc import Collection
from typing import Any, Final

import pyarrow as pa

from tidegate.errors import CorruptError, InvalidError, UnavailableError
from tidegate.tables.serdes.base import DecodedColumn, decode_one_by_one

# --- schema registry

CONTENT: Final = "application/vnd.schemaregistry.v1+json"
LARGEST_ANSWER: Final = 4 << 20


class SchemaRegistry:
    """One registry, at a URL like http://host:8081; `user` and `password` where it needs them."""

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 10.0,
        user: str | None = None,
        password: str | None = None,
        kept: int = 10_000,
    ) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise InvalidError(f"{url!r} is no address of a schema registry; write it like http://host:8081")
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._headers = {"Accept": CONTENT, "Content-Type": CONTENT}
        if user is not None:
            pair = base64.b64encode(f"{user}:{password or ''}".encode()).decode()
            self._headers["Authorization"] = f"Basic {pair}"
        self._kept = kept
        self._schemas: dict[int, str] = {}
        self._numbers: dict[tuple[str, str], int] = {}
        self._lock = threading.Lock()

    def schema(self, number: int) -> str:
        """Return the text of the schema with this number."""
        with self._lock:
            known = self._schemas.get(number)
        if known is None:
            known = self._text(self._ask("GET", f"/schemas/ids/{number}"), f"schema {number}")
            with self._lock:
                _keep(self._schemas, number, known, self._kept)
        return known

    def register(self, subject: str, schema: str) -> int:
        """Return the number of a schema under a subject; it is registered if it has none yet."""
        with self._lock:
            known = self._numbers.get((subject, schema))
        if known is None:
            path = f"/subjects/{urllib.parse.quote(subject, safe='')}/versions"
            known = self._number(self._ask("POST", path, {"schema": schema}), subject)
            with self._lock:
                _keep(self._numbers, (subject, schema), known, self._kept)
        return known

    def latest(self, subject: str) -> tuple[int, str]:
        """Return the number and the text of a subject's newest schema; never cached."""
        answer = self._ask("GET", f"/subjects/{urllib.parse.quote(subject, safe='')}/versions/latest")
        return self._number(answer, subject), self._text(answer, f"subject {subject}")

    def _ask(self, method: str, path: str, body: dict[str, str] | None = None) -> dict[str, Any]:
        import urllib.error
        import urllib.request  # loads TLS, which only registry users need

        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=self._headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
                raw = response.read(LARGEST_ANSWER + 1)
        except urllib.error.HTTPError as error:
            said = error.read(500).decode(errors="replace")
            message = f"schema registry {self.url} answered {error.code} to {method} {path}: {said}"
            if error.code >= 500 or error.code in (408, 429):
                raise UnavailableError(f"{message}; try again later") from None
            raise InvalidError(message) from None
        except OSError as error:  # refused, unknown host, timeout
            raise UnavailableError(f"schema registry {self.url} cannot be reached: {error}") from None
        if len(raw) > LARGEST_ANSWER:
            raise UnavailableError(
                f"schema registry {self.url} answered {path} with more than {LARGEST_ANSWER} bytes"
            )
        try:
            answer = json.loads(raw)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise UnavailableError(
                f"schema registry {self.url} answered {path} with something that is no JSON object"
            )
        return answer

    def _text(self, answer: dict[str, Any], what: str) -> str:
        kind, text = answer.get("schemaType", "AVRO"), answer.get("schema")
        if kind != "AVRO":
            raise InvalidError(f"{what} of schema registry {self.url} is a {kind} schema, not an Avro one")
        if not isinstance(text, str):
            raise UnavailableError(f"schema registry {self.url} gave no text for {what}")
        return text

    def _number(self, answer: dict[str, Any], subject: str) -> int:
        number = answer.get("id")
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 1 << 31:
            raise UnavailableError(
                f"schema registry {self.url} gave {number!r} as the number of subject {subject}"
            )
        return number


def _keep(kept: dict[Any, Any], key: Any, value: Any, most: int) -> None:
    """Cache a schema, and drop the oldest when there are too many."""
    while len(kept) >= most:
        del kept[next(iter(kept))]
    kept[key] = value


# --- avro

MAGIC: Final = 0
FRAME_BYTES: Final = 5
_PRIMITIVES: Final = {
    "null": pa.null(), "boolean": pa.bool_(), "int": pa.int32(), "long": pa.int64(), "float": pa.float32(),
    "double": pa.float64(), "bytes": pa.binary(), "string": pa.string(),
}  # fmt: skip
_LOGICAL: Final = {
    "date": pa.date32(),
    "timestamp-millis": pa.timestamp("ms", tz="UTC"),
    "timestamp-micros": pa.timestamp("us", tz="UTC"),
    "uuid": pa.string(),
}


class Avro:
    """Avro values of one declared schema, under one subject (for values of a topic: `<topic>-value`).

    A stream does not start if a field that its state depends on is null in every sampled record; `optional` names
    the fields that may be.
    """

    name = "avro"
    fixed_bytes: int | None = None

    def __init__(
        self,
        schema: str | dict[str, Any],
        *,
        registry: SchemaRegistry,
        subject: str,
        optional: Collection[str] = (),
    ) -> None:
        self._fastavro = _load_fastavro()
        self.text = schema if isinstance(schema, str) else json.dumps(schema)
        self.schema = self._parse(self.text, "the declared schema")
        self.registry, self.subject = registry, subject
        self.arrow_type: pa.DataType = arrow_type_of(json.loads(self.text))
        self.optional = frozenset([optional] if isinstance(optional, str) else optional)
        fields = [each.name for each in self.arrow_type] if pa.types.is_struct(self.arrow_type) else []
        if unknown := sorted(self.optional.difference(fields)):
            raise InvalidError(
                f"optional names {unknown[0]!r}, which is no field of the Avro schema; its fields are {fields}"
            )
        self._writers: dict[int, Any] = {}

    def encode(self, value: Any) -> bytes | None:
        if value is None:
            return None
        out = io.BytesIO()
        out.write(struct.pack(">bi", MAGIC, self.registry.register(self.subject, self.text)))
        try:
            self._fastavro.schemaless_writer(out, self.schema, value, strict=True)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, struct.error) as error:
            raise InvalidError(f"a value does not fit its Avro schema ({self.subject}): {error}") from None
        return out.getvalue()

    def decode(self, raw: bytes | None) -> Any:
        if raw is None:
            return None
        if len(raw) < FRAME_BYTES or raw[0] != MAGIC:
            raise CorruptError(
                f"no framed Avro value: {raw[:FRAME_BYTES].hex() or 'no bytes'} where a 0 and a schema number are"
                " expected; was it written with a schema registry?",
                kafka_name=None,
            )
        (number,) = struct.unpack_from(">i", raw, 1)
        if number < 0:
            raise CorruptError(f"an Avro value names schema {number}, which cannot be", kafka_name=None)
        writer = self._writer(number)
        body = io.BytesIO(raw[FRAME_BYTES:])
        try:
            value = self._fastavro.schemaless_reader(body, writer, self.schema)
        except _ERRORS as error:
            raise CorruptError(
                f"no Avro value of schema {number}: {error or type(error).__name__}", kafka_name=None
            ) from None
        except self._fastavro.read.SchemaResolutionError as error:
            raise CorruptError(
                f"schema {number} cannot be read as {self.subject}: {error}", kafka_name=None
            ) from None
        if body.read(1):
            raise CorruptError(f"an Avro value of schema {number} has bytes left over", kafka_name=None)
        return value

    def encode_column(self, values: pa.Array) -> pa.BinaryArray:
        return pa.array([self.encode(value) for value in values.to_pylist()], pa.binary())

    def decode_column(self, raw: pa.Array) -> DecodedColumn:
        return decode_one_by_one(self, raw)

    def _writer(self, number: int) -> Any:
        known = self._writers.get(number)
        if known is None:
            known = self._writers[number] = self._parse(self.registry.schema(number), f"schema {number}")
        return known

    def _parse(self, text: str, what: str) -> Any:
        try:
            return self._fastavro.parse_schema(json.loads(text))
        except (
            ValueError,
            RecursionError,
            self._fastavro.schema.SchemaParseException,
            self._fastavro.schema.UnknownType,
        ) as error:
            raise InvalidError(f"{what} is no Avro schema: {error}") from None

    def __repr__(self) -> str:
        return f"Avro(subject={self.subject!r})"


_ERRORS: Final = (
    EOFError,
    IndexError,
    ValueError,
    TypeError,
    KeyError,
    StopIteration,
    struct.error,
    OverflowError,
)


def arrow_type_of(schema: Any) -> pa.DataType:
    """Return the Arrow type of an Avro schema; unions other than with null have none."""
    if isinstance(schema, list):
        rest = [one for one in schema if one != "null"]
        if len(rest) != 1:
            raise InvalidError(f"a union of {len(rest)} types has no column: only one type, or it and null")
        return arrow_type_of(rest[0])
    if isinstance(schema, str):
        if schema in _PRIMITIVES:
            return _PRIMITIVES[schema]
        raise InvalidError(
            f"Avro type {schema!r} has no column here; named types can be used once, where they are defined"
        )
    logical = schema.get("logicalType")
    if logical == "decimal":
        return pa.decimal128(schema["precision"], schema.get("scale", 0))
    if logical in _LOGICAL:
        return _LOGICAL[logical]
    kind = schema["type"]
    if kind == "record":
        return pa.struct([(field["name"], arrow_type_of(field["type"])) for field in schema["fields"]])
    if kind == "array":
        return pa.list_(arrow_type_of(schema["items"]))
    if kind == "map":
        return pa.map_(pa.string(), arrow_type_of(schema["values"]))
    if kind == "enum":
        return pa.string()
    if kind == "fixed":
        return pa.binary(schema["size"])
    return arrow_type_of(kind)


def _load_fastavro() -> Any:
    try:
        import fastavro
        import fastavro.read
        import fastavro.schema
    except ImportError:
        raise InvalidError("Avro needs fastavro: install tidegate[avro]") from None
    return fastavro
