"""Serdes of windowed keys: an inner serde and a window around it.

`windowed(String(), size="1m")` reads and writes what Kafka Streams' time windowed serde does, and
`windowed(String(), size="1m", key_format="changelog")` what its stores and their changelogs hold; without a size it is
sessions. Wrapping a windowed serde again is a `TypeError`: its bytes would carry two windows, and nobody reads them.

A column is read into a struct of key, window_start and window_end. Values; use them from any thread.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa

from tidegate.durations import DurationLike, duration_ms
from tidegate.errors import CorruptError, WindowedKeyFormatError
from tidegate.tables.serdes.plain import DecodedColumn, Serde
from tidegate.windows.keys import (
    KeyChecks,
    KeyFormat,
    Windowed,
    check_size,
    decode_key,
    decode_keys,
    encode_key,
    encode_keys,
    present_rows,
)

K = TypeVar("K")


class WindowedSerde(Generic[K]):
    """A serde of keys in windows; made by `windowed`."""

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
        key, start, end = values.flatten()[:3] if values.type.names[:3] == self.arrow_type.names else (
            _member(values, name) for name in self.arrow_type.names
        )  # fmt: skip
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
    """A serde of `inner`'s keys in windows: of time when a size is given, else sessions."""
    if key_format is None:
        chosen = KeyFormat.SESSION if size is None else KeyFormat.TOPIC
    else:
        chosen = KeyFormat(key_format)
    return WindowedSerde(inner, chosen, None if size is None else duration_ms(size), strict=strict)


def require_raw(serde: Any) -> None:
    """`TypeError` unless this is a serde of plain keys or values."""
    if isinstance(serde, WindowedSerde):
        raise TypeError(
            f"{serde!r} is windowed already, and would be wrapped twice; give the serde of the raw key,"
            f" {serde.inner!r}"
        )
    if isinstance(serde, type) or not isinstance(serde, Serde):
        shown = serde.__name__ if isinstance(serde, type) else type(serde).__name__
        raise TypeError(f"{shown} is no serde; give one like String() or Long()")


def _member(values: pa.StructArray, name: str) -> pa.Array:
    return values.flatten()[values.type.get_field_index(name)]
