"""Record bytes as something a person can look at: text, JSON, a key in its window, a producer's stamp.

T1  nothing in a record drives the reader: control characters, terminal codes and direction marks are shown as escapes,
    bytes that are no UTF-8 as hexadecimal. Escaping for HTML is the templates' work, on top of this.
T2  a long value is cut, and says how long it was.

Pure functions.
"""

from __future__ import annotations

import unicodedata
from typing import Any, Final, NamedTuple

import msgspec

from tidegate.web.reading.numbers import Detail, Moment, Name

MOST_TEXT: Final = 2000
DEEPEST: Final = 64
_PLAUSIBLE: Final = (631_152_000_000, 4_102_444_800_000)  # windows between 1990 and 2100
_HIDDEN: Final = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


class Text(msgspec.Struct, frozen=True):
    """Bytes as text; `kind` is null, text, json or bytes; `cut` when there is more than is shown."""

    kind: str
    text: str
    size: Detail
    cut: bool = False


class Stamp(msgspec.Struct, frozen=True):
    """What a producer said about a record (its integrity header)."""

    producer: str
    kind: str
    chain: Name
    sequence: Name
    timestamp_ms: Moment
    checksum: str
    is_control: bool = False


class Window(msgspec.Struct, frozen=True):
    """A key and its window, as they lie in the record's key; `end_ms` is null where the width is not known."""

    key: Text
    start_ms: Moment
    end_ms: Moment | None = None
    format: str = "changelog"


def text_of(raw: bytes | None, most: int = MOST_TEXT) -> Text:
    """T1, T2."""
    if raw is None:
        return Text("null", "", 0)
    piece = raw[: most * 4]
    try:
        text = piece.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(piece) - 4 or len(piece) == len(raw):
            return Text("bytes", _spaced(raw[: most // 3]), len(raw), len(raw) > most // 3)
        text = piece[: error.start].decode("utf-8")
    cut = len(text) > most or len(piece) < len(raw)
    kind = "json" if not cut and is_json(raw) else "text"
    return Text(kind, visible(text[:most]), len(raw), cut)


def visible(text: str) -> str:
    """The text with everything that cannot be seen shown as an escape; line ends and tabs stay."""
    if text.isprintable():
        return text
    return "".join(letter if _shows(letter) else _escaped(letter) for letter in text)


def is_json(raw: bytes) -> bool:
    """Whether it is a JSON object or array, of a depth that anyone would write."""
    start = raw.lstrip()[:1]
    if start not in (b"{", b"[") or raw.count(b"[") + raw.count(b"{") > 10_000:
        return False
    try:
        msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return False
    return True


def stamp_of(headers: list[dict[str, Any]]) -> Stamp | None:
    """The integrity header among a record's headers, if it can be read."""
    from tidegate.errors import InvalidError
    from tidegate.integrity.header import HEADER_KEY, ControlType, RecordKind
    from tidegate.integrity.header import Stamp as Header

    raw = next((each["value"] for each in headers if each["key"] == HEADER_KEY), None)
    if raw is None:
        return None
    try:
        found = Header.from_bytes(raw)
    except InvalidError:
        return None
    kind = (
        RecordKind(found.kind).name.lower()
        if found.kind in RecordKind.__members__.values()
        else str(found.kind)
    )
    if found.kind == RecordKind.CONTROL and found.control in ControlType.__members__.values():
        kind = ControlType(found.control).name.lower().replace("_", " ")
    if found.is_heartbeat:
        kind = "heartbeat"
    return Stamp(
        found.guid.hex(), kind, found.chain, found.sequence, found.timestamp, f"{found.crc:08x}",
        found.kind == RecordKind.CONTROL,
    )  # fmt: skip


class KeyFormat(NamedTuple):
    """How keys of a topic are read. `is_known`: an app says so, so that any time is a window's; else it is a guess."""

    name: str
    size_ms: int = 0
    is_known: bool = False


def window_of(raw: bytes | None, format: KeyFormat) -> Window | None:
    """The key as a windowed key of this format; None when it is none, or its time is no time."""
    import struct

    sizes = {"topic": 8, "changelog": 12, "session": 16}
    size = sizes[format.name]
    if raw is None or len(raw) < size or (len(raw) == size and not format.is_known):
        return None
    inner, tail = raw[:-size], raw[-size:]
    end: int | None = None
    if format.name == "session":
        end, start = struct.unpack(">qq", tail)
    elif format.name == "changelog":
        start, sequence = struct.unpack(">qi", tail)
        if sequence:
            return None
    else:
        (start,) = struct.unpack(">q", tail)
    first, last = (0, 2**62) if format.is_known else _PLAUSIBLE
    if not first <= start <= last or (end is not None and not start <= end <= last):
        return None
    if end is None and format.size_ms:
        end = start + format.size_ms
    return Window(text_of(inner, 200), start, end, format.name)


def _shows(letter: str) -> bool:
    return letter in "\n\t" or unicodedata.category(letter) not in _HIDDEN


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape", "surrogatepass").decode("ascii")


def _spaced(raw: bytes) -> str:
    return raw.hex(" ")


def shown_text(raw: Any) -> Text:
    """A value of any kind as text to look at."""
    if raw is None or isinstance(raw, bytes):
        return text_of(raw)
    return text_of(
        msgspec.json.encode(raw, enc_hook=str) if not isinstance(raw, str) else raw.encode("utf-8", "replace")
    )
