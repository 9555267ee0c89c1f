"""Keys of windowed results for people: the key inside, and the bounds of its window.

How a topic's keys carry windows is what the app that writes it recorded in the log, or what options say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tidegate.errors import InvalidError
from tidegate.log.access.embedded import Log

if TYPE_CHECKING:
    import pyarrow as pa

    from tidegate.tables.serdes.windowed import WindowedSerde

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
        return None
    from tidegate.tables.building.stored import SERDES
    from tidegate.tables.serdes.windowed import windowed

    inner = SERDES[serde or "string"]
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
        inner = SERDES[encoding.key if isinstance(encoding.key, str) and encoding.key in SERDES else "bytes"]
    size_ms = encoding.window_size_ms
    length = None if size_ms is None else f"{size_ms}ms"
    chosen = "session" if encoding.is_sessions else encoding.key_format
    return WindowedKeys(windowed(inner, size=length, key_format=chosen, strict=False))
