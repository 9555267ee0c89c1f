"""Serdes convert keys and values to bytes and back, one at a time and by column: bytes, text, numbers, windowed keys.

The bytes are those of Kafka's serdes of these names: UTF-8 text, numbers big-endian. None is written as null, and
null is read as None. Reading is strict: bytes that are no such value are refused and never repaired, with
`CorruptError`; in a column they are a bad row with a reason (`DecodedColumn`).

`windowed(String(), size="1m")` reads and writes what Kafka Streams' time windowed serde does, and with
`key_format="changelog"` what its stores and their changelogs hold; without a size it is sessions. A column of windowed
keys is a struct of key, window_start and window_end.

Thread rule: serdes are values.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidegate.durations import DurationLike, duration_ms
from tidegate.errors import CorruptError, InvalidError, WindowedKeyFormatError
from tidegate.windows.keys import (
    KeyChecks,
    KeyFormat,
    Windowed,
    binary_column,
    check_size,
    decode_key,
    decode_keys,
    encode_key,
    encode_keys,
    make_binary,
    present_rows,
)

# --- plain

T = TypeVar("T")
Int64s = npt.NDArray[np.int64]
NO_ROWS: Final = np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class DecodedColumn:
    """A typed column with null where a row is bad, the numbers of those rows, and the reason of each."""

    values: pa.Array
    bad_rows: Int64s
    reasons: tuple[str, ...]

    def require_good(self) -> pa.Array:
        """Return the values if every row could be read; else raise `CorruptError` about the first that could not."""
        if len(self.bad_rows):
            raise CorruptError(
                f"row {int(self.bad_rows[0])} cannot be read: {self.reasons[0]}", kafka_name=None
            )
        return self.values


@runtime_checkable
class Serde(Protocol[T]):
    """Reads and writes one kind of value; `fixed_bytes` is the length of its bytes, if all have the same."""

    name: str
    fixed_bytes: int | None
    arrow_type: pa.DataType

    def encode(self, value: T | None) -> bytes | None: ...
    def decode(self, raw: bytes | None) -> T | None: ...
    def encode_column(self, values: pa.Array) -> pa.BinaryArray: ...
    def decode_column(self, raw: pa.Array) -> DecodedColumn: ...


class Bytes:
    """Bytes as they are."""

    name = "bytes"
    fixed_bytes: int | None = None
    arrow_type = pa.binary()

    def encode(self, value: bytes | None) -> bytes | None:
        if value is not None and not isinstance(value, bytes | bytearray | memoryview):
            raise _wrong(self.name, value)
        return None if value is None else bytes(value)

    def decode(self, raw: bytes | None) -> bytes | None:
        return raw

    def encode_column(self, values: pa.Array) -> pa.BinaryArray:
        if not (pa.types.is_binary(values.type) or pa.types.is_large_binary(values.type)):
            raise TypeError(f"serde bytes writes columns of binary, not of {values.type}")
        return values.cast(pa.binary())

    def decode_column(self, raw: pa.Array) -> DecodedColumn:
        return DecodedColumn(raw.cast(pa.binary()), NO_ROWS, ())

    def __repr__(self) -> str:
        return type(self).__name__ + "()"


class String:
    """Text as UTF-8."""

    name = "string"
    fixed_bytes: int | None = None
    arrow_type = pa.string()

    def encode(self, value: str | None) -> bytes | None:
        if value is not None and not isinstance(value, str):
            raise _wrong(self.name, value)
        try:
            return None if value is None else value.encode()
        except UnicodeEncodeError as error:
            raise InvalidError(f"{value!r} is no text that UTF-8 can hold: {error.reason}") from None

    def decode(self, raw: bytes | None) -> str | None:
        try:
            return None if raw is None else raw.decode()
        except UnicodeDecodeError as error:
            bad, size = (raw or b"")[error.start], len(raw or b"")
            raise CorruptError(
                f"not UTF-8 text: byte {error.start} of {size} is {bad:#04x}", kafka_name=None
            ) from None

    def encode_column(self, values: pa.Array) -> pa.BinaryArray:
        if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
            raise TypeError(f"serde string writes columns of string, not of {values.type}")
        return values.cast(pa.string()).cast(pa.binary())

    def decode_column(self, raw: pa.Array) -> DecodedColumn:
        try:
            return DecodedColumn(raw.cast(pa.string()), NO_ROWS, ())
        except pa.ArrowInvalid:  # some row is not UTF-8: find out which, one by one
            return decode_one_by_one(self, raw)

    def __repr__(self) -> str:
        return type(self).__name__ + "()"


class _Number(Generic[T]):
    """A number of fixed width, big-endian."""

    name: str
    fixed_bytes: int | None
    arrow_type: pa.DataType
    _code: str  # in `struct` notation
    _layout: str  # in numpy notation

    def encode(self, value: T | None) -> bytes | None:
        if value is None:
            return None
        try:
            return struct.pack(self._code, self._checked(value))
        except (struct.error, OverflowError):
            raise InvalidError(f"{value!r} does not fit serde {self.name}") from None

    def decode(self, raw: bytes | None) -> T | None:
        if raw is None:
            return None
        if len(raw) != self.fixed_bytes:
            raise CorruptError(self._wrong_length(len(raw)), kafka_name=None)
        number: T = struct.unpack(self._code, raw)[0]
        return number

    def encode_column(self, values: pa.Array) -> pa.BinaryArray:
        width = self.arrow_type.bit_width // 8
        if pa.types.is_floating(values.type) != pa.types.is_floating(self.arrow_type):
            raise TypeError(f"serde {self.name} writes columns of {self.arrow_type}, not of {values.type}")
        try:
            typed = values.cast(self.arrow_type)
        except pa.ArrowInvalid as error:
            raise InvalidError(f"a column does not fit serde {self.name}: {error}") from None
        numbers = typed.fill_null(0).to_numpy(zero_copy_only=False)
        content = numbers.astype(self._layout).view(np.uint8)
        ends = np.arange(len(typed) + 1, dtype=np.int32) * width
        return make_binary(ends.astype(np.int32), content, present_rows(typed))

    def decode_column(self, raw: pa.Array) -> DecodedColumn:
        column, width = binary_column(raw), self.arrow_type.bit_width // 8
        starts, lengths = column.bounds[:-1].astype(np.int64), np.diff(column.bounds)
        good = column.present & (lengths == width)
        bad = np.flatnonzero(column.present & ~good)
        reasons = tuple(self._wrong_length(int(lengths[row])) for row in bad.tolist())
        if good.all():
            dense = column.content[column.bounds[0] : column.bounds[-1]]
        else:
            places = np.where(good, starts, 0)[:, None] + np.arange(width)
            padded = column.content if len(column.content) >= width else np.zeros(width, np.uint8)
            dense = padded[places].reshape(-1)
        numbers = np.ascontiguousarray(dense).view(self._layout).astype(self._layout[1:])
        return DecodedColumn(pa.array(numbers, self.arrow_type, mask=~good), bad, reasons)

    def _checked(self, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise _wrong(self.name, value)
        return value

    def _wrong_length(self, length: int) -> str:
        return f"{length} bytes where serde {self.name} has {self.fixed_bytes}"

    def __repr__(self) -> str:
        return type(self).__name__ + "()"


class Int(_Number[int]):
    """A whole number of 32 bits."""

    name, fixed_bytes, arrow_type = "int", 4, pa.int32()
    _code, _layout = ">i", ">i4"


class Long(_Number[int]):
    """A whole number of 64 bits."""

    name, fixed_bytes, arrow_type = "long", 8, pa.int64()
    _code, _layout = ">q", ">i8"


class Double(_Number[float]):
    """A double."""

    name, fixed_bytes, arrow_type = "double", 8, pa.float64()
    _code, _layout = ">d", ">f8"

    def _checked(self, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _wrong(self.name, value)
        return float(value)


def decode_one_by_one(serde: Serde[Any], raw: pa.Array) -> DecodedColumn:
    """Decode a column one value at a time, for serdes without a column form of their own."""
    values: list[Any] = [None] * len(raw)
    bad: dict[int, str] = {}
    for row, one in enumerate(raw.cast(pa.binary()).to_pylist()):
        try:
            values[row] = serde.decode(one)
        except CorruptError as error:
            bad[row] = str(error)
    return DecodedColumn(
        pa.array(values, serde.arrow_type), np.array(list(bad), np.int64), tuple(bad.values())
    )


def text_of_key(key: Any) -> str:
    """Return a key as text that `key_of_text` reads again: of bytes that are no UTF-8, escapes like \\xff."""
    if isinstance(key, bytes):
        return key.replace(b"\\x", b"\\x5cx").decode("utf-8", "backslashreplace")
    if isinstance(key, str | int | float):
        return str(key)
    return msgspec.json.encode(key, enc_hook=str).decode()


def key_of_text(serde: Serde[Any], written: str) -> Any:
    """Return a key that somebody typed, as its serde takes it."""
    try:
        if serde.name in ("int", "long"):
            return int(written)
        if serde.name == "double":
            return float(written)
        if serde.name in ("json", "avro"):
            return msgspec.json.decode(written)
    except (ValueError, OverflowError, RecursionError):
        raise InvalidError(
            f"{written[:60]!r} is no key of this table; its keys are of type {serde.name}"
        ) from None
    if serde.name != "bytes":
        return written
    raw = written.encode("utf-8", "surrogateescape")
    return re.sub(rb"\\x([0-9a-f]{2})", lambda found: bytes.fromhex(found[1].decode()), raw)


def _wrong(name: str, value: object) -> TypeError:
    return TypeError(f"serde {name} does not write a {type(value).__name__}")


# --- windowed

K = TypeVar("K")


class WindowedSerde(Generic[K]):
    """A serde of windowed keys; made by `windowed`."""

    name: str
    fixed_bytes: int | None
    arrow_type: pa.DataType

    def __init__(
        self, inner: Serde[K], key_format: KeyFormat, size_ms: int | None, *, strict: bool = True
    ) -> None:
        require_raw(inner)
        check_size(key_format, size_ms)
        self.inner, self.key_format, self.size_ms = inner, key_format, size_ms
        self.checks = KeyChecks(strict=strict, inner_bytes=inner.fixed_bytes)
        self.name = f"windowed({inner.name})"
        self.fixed_bytes = None if inner.fixed_bytes is None else inner.fixed_bytes + key_format.suffix_bytes
        bounds = [("window_start", pa.int64()), ("window_end", pa.int64())]
        self.arrow_type = pa.struct([("key", inner.arrow_type), *bounds])

    def encode(self, value: Windowed[K] | None) -> bytes | None:
        if value is None:
            return None
        if not isinstance(value, Windowed):
            raise TypeError(f"serde {self.name} writes a Windowed key, not a {type(value).__name__}")
        return encode_key(
            self.inner.encode(value.key), value.window, self.key_format, sequence=value.sequence
        )

    def decode(self, raw: bytes | None) -> Windowed[K] | None:
        found = decode_key(raw, self.key_format, size_ms=self.size_ms, checks=self.checks)
        if found is None:
            return None
        try:
            key = self.inner.decode(found.key)
        except CorruptError as error:
            raise WindowedKeyFormatError(f"the key inside a windowed key cannot be read: {error}") from None
        if key is None:
            raise WindowedKeyFormatError("a windowed key holds no key inside")
        return Windowed(key, found.window, found.sequence)

    def encode_column(self, values: pa.Array) -> pa.BinaryArray:
        """Write a struct column of key, window_start and window_end."""
        if not pa.types.is_struct(values.type) or {"key", "window_start", "window_end"} - set(
            values.type.names
        ):
            raise TypeError(f"serde {self.name} writes columns of {self.arrow_type}, not of {values.type}")
        members = dict(zip(values.type.names, values.flatten(), strict=True))
        key, start, end = (members[name] for name in self.arrow_type.names)
        is_session = self.key_format is KeyFormat.SESSION
        return encode_keys(
            self.inner.encode_column(key),
            start.fill_null(0).to_numpy(zero_copy_only=False),
            self.key_format,
            end=end.fill_null(0).to_numpy(zero_copy_only=False) if is_session else None,
        )

    def decode_column(self, raw: pa.Array) -> DecodedColumn:
        keys = decode_keys(raw, self.key_format, size_ms=self.size_ms, checks=self.checks)
        inner = self.inner.decode_column(keys.inner)
        bad = {int(row): keys.reason(int(row)) for row in np.flatnonzero(keys.bad)}
        bad.update(zip(inner.bad_rows.tolist(), inner.reasons, strict=True))
        good = keys.good & present_rows(inner.values)
        values = pa.StructArray.from_arrays(
            [inner.values, pa.array(keys.start), pa.array(keys.end)],
            fields=list(self.arrow_type),
            mask=pa.array(~good),
        )
        rows = sorted(bad)
        return DecodedColumn(values, np.array(rows, np.int64), tuple(bad[row] for row in rows))

    def __repr__(self) -> str:
        size = "" if self.size_ms is None else f", size={self.size_ms}"
        return f"windowed({self.inner!r}{size}, key_format={self.key_format.value!r})"


def windowed(
    inner: Serde[K],
    *,
    size: DurationLike | None = None,
    key_format: KeyFormat | str | None = None,
    strict: bool = True,
) -> WindowedSerde[K]:
    """Return a serde of `inner`'s keys in windows: time windows if a size is given, else sessions."""
    if key_format is None:
        chosen = KeyFormat.SESSION if size is None else KeyFormat.TOPIC
    else:
        chosen = KeyFormat(key_format)
    return WindowedSerde(inner, chosen, None if size is None else duration_ms(size), strict=strict)


def require_raw(serde: Any) -> None:
    """Raise `TypeError` unless this is a serde of plain keys or values."""
    if isinstance(serde, WindowedSerde):
        raise TypeError(
            f"{serde!r} is windowed already, and would be wrapped twice; give the serde of the raw key,"
            f" {serde.inner!r}"
        )
    if isinstance(serde, type) or not isinstance(serde, Serde):
        shown = serde.__name__ if isinstance(serde, type) else type(serde).__name__
        raise TypeError(f"{shown} is no serde; give one like String() or Long()")
