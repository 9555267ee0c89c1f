"""Encode and decode windowed keys in Kafka Streams' formats: one at a time, and whole columns.

| format | bytes | where |
|---|---|---|
| topic | inner, start i64 | a topic written with a windowed serde |
| changelog | inner, start i64, sequence i32 | a window store and its changelog |
| session | inner, end i64, start i64 | sessions, in stores, changelogs and topics alike |

Numbers are big-endian. `inner` is the raw key, of any length and without a length prefix, so a key is split from its
end, and its format cannot be told from the bytes. A time window's end is not stored: it is start + size, at most
2**63 - 1. Null and empty bytes mean "no key" (None). A bad key of a column is a verdict of its row.

Thread rule: values and pure functions. Buffers of a column are not copied and must not be written to.
"""

from __future__ import annotations

import struct
import warnings
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidegate.errors import InvalidError, TidegateWarning, WindowedKeyFormatError
from tidegate.kernels import windowed_keys as kernels
from tidegate.kernels.hashing import partitions_of_keys

# --- buffers of binary columns

Bytes = npt.NDArray[np.uint8]
Int32s = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]


class BinaryColumn(NamedTuple):
    """One byte buffer, the n + 1 offsets of its values, and which rows are not null."""

    content: Bytes
    bounds: Int32s
    present: Flags

    @property
    def total_bytes(self) -> int:
        """The bytes between the first and the last offset; null rows may cover some, too."""
        return int(self.bounds[-1] - self.bounds[0])


def binary_column(array: pa.Array | pa.ChunkedArray) -> BinaryColumn:
    """Return the buffers of a binary or string column, without copying; slices are fine."""
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if pa.types.is_large_binary(array.type) or pa.types.is_large_string(array.type):
        array = array.cast(pa.binary())
    if not (pa.types.is_binary(array.type) or pa.types.is_string(array.type)):
        raise TypeError(f"a column of bytes is needed, not one of {array.type}")
    rows = len(array)
    _, offsets, content = array.buffers()
    bounds = np.zeros(1, np.int32)
    if offsets is not None and offsets.size:
        bounds = np.frombuffer(offsets, np.int32)[array.offset : array.offset + rows + 1]
    return BinaryColumn(np.frombuffer(content or b"", np.uint8), bounds, present_rows(array))


def present_rows(array: pa.Array) -> Flags:
    """Return which rows are not null."""
    if array.null_count == 0:
        return np.ones(len(array), np.bool_)
    present: Flags = array.is_valid().to_numpy(zero_copy_only=False)
    return present


def make_binary(
    ends: Int32s, content: Bytes, present: Flags | None, kind: pa.DataType | None = None
) -> pa.Array:
    """Return a column of a kernel's output; `present` None if no row is null."""
    mask, nulls = None, 0
    if present is not None:
        nulls = int(len(present) - np.count_nonzero(present))
        mask = pa.py_buffer(np.packbits(present, bitorder="little")) if nulls else None
    return pa.Array.from_buffers(
        kind if kind is not None else pa.binary(),
        len(ends) - 1,
        [mask, pa.py_buffer(ends), pa.py_buffer(content)],
        null_count=nulls,
    )


def room_for(total_bytes: int, what: str) -> int:
    """Return the size after checking that it fits a column's 32-bit offsets."""
    if total_bytes > 2**31 - 1:
        raise InvalidError(f"{what} would take {total_bytes} bytes, above 2 GiB: give smaller batches")
    return total_bytes


# --- one key

K = TypeVar("K")
LATEST: Final = 2**63 - 1
LARGEST_SEQUENCE: Final = 2**31 - 1
IMPLAUSIBLE: Final = 1 << 48
_LONGEST_SESSION_MS: Final = 366 * 86_400_000
_LOW: Final = 0xFFFFFFFF


class KeyFormat(StrEnum):
    """The encoding of a key and its window."""

    TOPIC = "topic"
    CHANGELOG = "changelog"
    SESSION = "session"

    @property
    def suffix_bytes(self) -> int:
        """The number of bytes after the inner key."""
        return {"topic": 8, "changelog": 12, "session": 16}[self.value]


@dataclass(frozen=True, slots=True, order=True)
class TimeWindow:
    """From `start` up to, not including, `end`."""

    start: int
    end: int

    def __post_init__(self) -> None:
        _check_bounds(self.start, self.end)
        if self.end == self.start:
            raise InvalidError(f"a time window from {self.start} to {self.end} is empty")

    def overlaps(self, other: TimeWindow) -> bool:
        """Whether the two have a common point in time; a session is another kind and is refused."""
        if not isinstance(other, TimeWindow):
            raise TypeError(f"a time window cannot be compared with a {type(other).__name__}")
        return self.start < other.end and other.start < self.end


@dataclass(frozen=True, slots=True, order=True)
class SessionWindow:
    """From the first event to the last, both inclusive."""

    start: int
    end: int

    def __post_init__(self) -> None:
        _check_bounds(self.start, self.end)

    def overlaps(self, other: SessionWindow) -> bool:
        """Whether the two have a common point in time; a time window is another kind and is refused."""
        if not isinstance(other, SessionWindow):
            raise TypeError(f"a session cannot be compared with a {type(other).__name__}")
        return not (other.end < self.start or self.end < other.start)


Window: TypeAlias = "TimeWindow | SessionWindow"


@dataclass(frozen=True, slots=True)
class Windowed(Generic[K]):
    """A key in one of its windows. `sequence` numbers retained duplicates and is 0 everywhere else."""

    key: K
    window: Window
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class KeyChecks:
    """Optional checks of decoding, beyond what makes a key impossible.

    `strict` detects keys of another format by their structure, whatever their date:

    - a time at or beyond `IMPLAUSIBLE`, the year 10889: bytes of the inner key, or the low half of a start, read as
      the high bytes of one;
    - a sequence that is not 0 in changelog format: the low half of a start;
    - a start with a low half of zeros, the zero sequence of a changelog key, where the four bytes in front could be
      the high half of that key's start;
    - an inner key that ends with what would be a session's end: in topic format a time from the start up to a year
      later, in changelog format the high half of the start.

    `inner_bytes` is the length of a key serde with a fixed one, which settles the last two; `advance_ms` is what
    every start must be a multiple of.
    """

    strict: bool = True
    inner_bytes: int | None = None
    advance_ms: int | None = None

    def __post_init__(self) -> None:
        if self.inner_bytes is not None and self.inner_bytes < 0:
            raise InvalidError(f"an inner key of {self.inner_bytes} bytes is not possible")
        if self.advance_ms is not None and self.advance_ms <= 0:
            raise InvalidError(f"windows cannot start every {self.advance_ms} ms")


STRICT: Final = KeyChecks()
LENIENT: Final = KeyChecks(strict=False)


def window_end(start: int, size_ms: int) -> int:
    """Return the end of a time window; an end beyond the largest number is limited to it, with a warning."""
    if start + size_ms > LATEST:
        warnings.warn(
            f"a window of {size_ms} ms from {start} ends beyond the largest time; its end is given as {LATEST}",
            TidegateWarning,
            stacklevel=3,
        )
        return LATEST
    return start + size_ms


def encode_key(
    inner: bytes | None, window: Window, key_format: KeyFormat, *, sequence: int = 0
) -> bytes | None:
    """Return the bytes of a key in its window; empty for no key."""
    if inner is None:
        return None
    if isinstance(window, SessionWindow) != (key_format is KeyFormat.SESSION):
        raise TypeError(f"a {type(window).__name__} has no {key_format.value} format")
    if key_format is KeyFormat.SESSION:
        return inner + struct.pack(">qq", window.end, window.start)
    if key_format is KeyFormat.TOPIC:
        return inner + struct.pack(">q", window.start)
    if not 0 <= sequence <= LARGEST_SEQUENCE:
        raise InvalidError(f"sequence {sequence} of a store key is not in 0 to {LARGEST_SEQUENCE}")
    return inner + struct.pack(">qi", window.start, sequence)


def decode_key(
    key: bytes | None, key_format: KeyFormat, *, size_ms: int | None = None, checks: KeyChecks = STRICT
) -> Windowed[bytes] | None:
    """Return the inner key and window of some bytes; None if there is no key.

    `size_ms` is needed for time windows, whose end is not in the bytes, and refused for sessions.
    """
    check_size(key_format, size_ms)
    if not key:
        return None
    inner_bytes = len(key) - key_format.suffix_bytes
    if inner_bytes < 0:
        raise WindowedKeyFormatError(_describe(key, key_format, "too short for one"))
    inner, suffix = key[:inner_bytes], key[inner_bytes:]
    fault = _fault(inner, suffix, key_format, checks)
    if fault is not None:
        raise WindowedKeyFormatError(_describe(key, key_format, fault))
    if size_ms is None:
        end, start = struct.unpack(">qq", suffix)
        return Windowed(inner, SessionWindow(start, end))
    start, sequence = struct.unpack(">qi", suffix.ljust(12, b"\0"))
    return Windowed(inner, TimeWindow(start, window_end(start, size_ms)), sequence)


def check_size(key_format: KeyFormat, size_ms: int | None) -> None:
    """Check that a window size is given for time windows, and only for them."""
    if key_format is KeyFormat.SESSION:
        if size_ms is not None:
            raise TypeError("sessions carry both their ends: they have no window size")
    elif size_ms is None:
        raise TypeError("a time window's key does not say where it ends: give the window size")
    elif not 0 < size_ms <= LATEST:
        raise InvalidError(f"a window size of {size_ms} ms is not possible; give 1 ms or more")


def lower_range(inner: bytes) -> bytes:
    """Return the least store key that any window of this key, or of a later one, can have."""
    return inner + bytes(12)


def upper_range(inner: bytes, latest_start: int) -> bytes:
    """Return a store key that no window of `inner` starting at or before `latest_start` sorts after.

    A longer key that begins with `inner` may sort after some of its windows, so a bound that keeps all of `inner`
    could be too low: bytes below the first byte of the start are left out. The rows found must be checked again.
    """
    suffix = struct.pack(">qi", latest_start, LARGEST_SEQUENCE)
    kept = len(inner)
    if suffix[0] != 0:
        kept = next((at for at in range(1, len(inner)) if inner[at] < suffix[0]), len(inner))
    return inner[:kept] + suffix


def _fault(inner: bytes, suffix: bytes, key_format: KeyFormat, checks: KeyChecks) -> str | None:
    start = int.from_bytes(suffix[8:] if key_format is KeyFormat.SESSION else suffix[:8], "big", signed=True)
    if start < 0:
        return f"a window cannot start at {start}"
    if start == LATEST and key_format is not KeyFormat.SESSION:
        return f"a window that starts at {start} has no room for an end"
    end = start
    if key_format is KeyFormat.SESSION:
        end = int.from_bytes(suffix[:8], "big", signed=True)
        if end < start:
            return f"a session cannot end at {end}, before its start {start}"
    elif key_format is KeyFormat.CHANGELOG:
        sequence = int.from_bytes(suffix[8:], "big", signed=True)
        if sequence < 0:
            return f"a sequence cannot be {sequence}"
        if checks.strict and sequence != 0:
            return f"sequence {sequence} where 0 is expected; is it in topic format?"
    if checks.strict and (fault := _other_format(inner, start, end, key_format, checks)) is not None:
        return fault
    if checks.inner_bytes is not None and len(inner) != checks.inner_bytes:
        return f"the key inside has {len(inner)} bytes where {checks.inner_bytes} are expected"
    if (
        checks.advance_ms is not None
        and key_format is not KeyFormat.SESSION
        and start % checks.advance_ms != 0
    ):
        return f"start {start} is not a multiple of {checks.advance_ms} ms"
    return None


def _other_format(inner: bytes, start: int, end: int, key_format: KeyFormat, checks: KeyChecks) -> str | None:
    """Return the sign that a key has another format, in words."""
    if end >= IMPLAUSIBLE:
        return f"{end} ms lies beyond the year 10889; is it in another format?"
    if checks.inner_bytes is not None or start == 0:
        return None
    before = int.from_bytes(inner[-4:], "big") if len(inner) >= 4 else -1
    is_changelog = is_session = False
    match key_format:
        case KeyFormat.SESSION:
            is_changelog = start & _LOW == 0 and end & _LOW < 1 << 16 and end >> 32 != start >> 32
        case KeyFormat.CHANGELOG:
            is_session = 0 < start & _LOW < 1 << 16 and before == start & _LOW
        case KeyFormat.TOPIC:
            is_changelog = start & _LOW == 0 and 0 <= before < 1 << 16
            last = int.from_bytes(inner[-8:], "big", signed=True) if len(inner) >= 8 else -1
            is_session = start <= last <= start + _LONGEST_SESSION_MS
    if is_changelog:
        return f"start {start} has a low half of zeros; is it in changelog format?"
    if is_session:
        return "the key inside ends with a time like the start; is it a session? Else give the key's serde"
    return None


def _describe(key: bytes, key_format: KeyFormat, fault: str) -> str:
    shown = key.hex() if len(key) <= 64 else f"{key[:32].hex()}…{key[-32:].hex()}"
    return (
        f"key {shown} ({len(key)} bytes) is no windowed key in {key_format.value} format: {fault}. Was the topic"
        " written by a windowed aggregation, and in this format? A plain topic becomes windows with"
        " window(…).agg(…)"
    )


def _check_bounds(start: int, end: int) -> None:
    if start < 0:
        raise InvalidError(f"a window cannot start at {start}, before the epoch")
    if not start <= end <= LATEST:
        raise InvalidError(f"a window cannot go from {start} to {end}")


# --- columns of keys

Int64s = npt.NDArray[np.int64]
_CODES: Final = {
    KeyFormat.TOPIC: kernels.TOPIC,
    KeyFormat.CHANGELOG: kernels.CHANGELOG,
    KeyFormat.SESSION: kernels.SESSION,
}
REASONS: Final = {
    kernels.GOOD: "good",
    kernels.ABSENT: "no key",
    kernels.TOO_SHORT: "shorter than the bytes of a window",
    kernels.NEGATIVE_START: "a negative window start",
    kernels.END_BEFORE_START: "a session that ends before it starts",
    kernels.NEGATIVE_SEQUENCE: "a negative sequence",
    kernels.SEQUENCE: "a sequence that is not 0; is it in topic format?",
    kernels.LOW_HALF: "a start whose low half is zero; is it in changelog format?",
    kernels.INNER_BYTES: "an inner key of another length than its serde's",
    kernels.UNALIGNED: "a start that is no multiple of the advance",
    kernels.NO_END: "a start with no room for an end",
    kernels.BEYOND: "a time beyond the year 10889; is it in another format?",
    kernels.LIKE_SESSION: "an inner key that ends with a time like the start; is it a session?",
}


@dataclass(frozen=True, eq=False)
class DecodedKeys:
    """A decoded column of windowed keys; rows that are not good have a null inner key and zeros."""

    inner: pa.BinaryArray
    start: Int64s
    end: Int64s
    sequence: Int32s
    verdict: Bytes
    bad_rows: int
    key_format: KeyFormat
    source: pa.Array

    def __len__(self) -> int:
        return len(self.start)

    @property
    def good(self) -> Flags:
        """The rows with a key."""
        return np.equal(self.verdict, kernels.GOOD)

    @property
    def bad(self) -> Flags:
        """The rows whose bytes are no key of this format."""
        return np.greater(self.verdict, kernels.ABSENT)

    def reason(self, row: int) -> str:
        """Return what is wrong with a row's key, in words."""
        return f"{self.key_format.value} key with {REASONS[int(self.verdict[row])]}"

    def require_good(
        self, *, offsets: Int64s | None = None, topic: str | None = None, partition: int | None = None
    ) -> DecodedKeys:
        """Return these keys if no row is bad; else raise `WindowedKeyFormatError` about the first that is."""
        if self.bad_rows == 0:
            return self
        row = int(np.argmax(self.bad))
        place = [] if topic is None else [f"topic {topic}"]
        place += [] if partition is None else [f"partition {partition}"]
        place += [f"row {row}"] if offsets is None else [f"offset {int(offsets[row])}"]
        raise WindowedKeyFormatError(f"{' '.join(place)}: {self._explain(row)}")

    def _explain(self, row: int) -> str:
        """Return the scalar decoder's message for a row, whose checks may be recovered from its verdict."""
        key = self.source[row].as_py()
        size = None if self.key_format is KeyFormat.SESSION else 1
        try:
            decode_key(key, self.key_format, size_ms=size, checks=STRICT)
        except WindowedKeyFormatError as error:
            return str(error)
        return f"key {key.hex()} is refused: {self.reason(row)}"


def decode_keys(
    keys: pa.Array | pa.ChunkedArray,
    key_format: KeyFormat,
    *,
    size_ms: int | None = None,
    checks: KeyChecks = STRICT,
) -> DecodedKeys:
    """Decode a column of windowed keys. `size_ms` is needed for time windows and refused for sessions."""
    check_size(key_format, size_ms)
    if isinstance(keys, pa.ChunkedArray):
        keys = keys.combine_chunks()
    column, rows = binary_column(keys), len(keys)
    ends, content = np.empty(rows + 1, np.int32), np.empty(column.total_bytes, np.uint8)
    start, end = np.empty(rows, np.int64), np.empty(rows, np.int64)
    sequence, verdict = np.empty(rows, np.int32), np.empty(rows, np.uint8)
    bad = kernels.decode_windowed_keys(
        column.content, column.bounds, column.present, _CODES[key_format], size_ms or 0, int(checks.strict),
        kernels.NO_CHECK if checks.inner_bytes is None else checks.inner_bytes,
        kernels.NO_CHECK if checks.advance_ms is None else checks.advance_ms,
        ends, content, start, end, sequence, verdict,
    )  # fmt: skip
    if size_ms is not None and rows and end.max(initial=0) == LATEST:
        _warn_about_cut_ends(start, end, size_ms)
    inner = make_binary(ends, content[: ends[-1]], np.equal(verdict, kernels.GOOD))
    return DecodedKeys(inner, start, end, sequence, verdict, int(bad), key_format, keys)


def encode_keys(
    inner: pa.Array | pa.ChunkedArray,
    start: Int64s,
    key_format: KeyFormat,
    *,
    end: Int64s | None = None,
    sequence: Int32s | None = None,
) -> pa.BinaryArray:
    """Encode inner keys and windows. `end` is needed for sessions and refused for time windows."""
    if (end is not None) != (key_format is KeyFormat.SESSION):
        raise TypeError("session keys, and only they, have an end in their bytes")
    if sequence is not None and key_format is not KeyFormat.CHANGELOG:
        raise TypeError(f"{key_format.value} keys have no sequence")
    column = binary_column(inner)
    rows = len(column.present)
    starts = _numbers("start", start, np.int64, rows)
    ends = starts if end is None else _numbers("end", end, np.int64, rows)
    sequences = (
        np.zeros(rows, np.int32) if sequence is None else _numbers("sequence", sequence, np.int32, rows)
    )
    room = room_for(column.total_bytes + rows * key_format.suffix_bytes, "a column of windowed keys")
    key_ends, content = np.empty(rows + 1, np.int32), np.empty(room, np.uint8)
    refused = kernels.encode_windowed_keys(
        column.content,
        column.bounds,
        column.present,
        starts,
        ends,
        sequences,
        _CODES[key_format],
        key_ends,
        content,
    )
    if refused >= 0:
        raise InvalidError(
            f"row {refused}: a window from {starts[refused]} to {ends[refused]}, sequence {sequences[refused]}, is"
            " not possible: starts and sequences are 0 or more, and a session ends at or after its start"
        )
    return make_binary(key_ends, content[: key_ends[-1]], column.present)


def partitions_of_inner_keys(inner: pa.Array | pa.ChunkedArray, partitions: int) -> Int32s:
    """Return Kafka Streams' partition of windowed keys: by the inner key alone, so all windows of a key stay together.

    Rows without a key get -1.
    """
    if partitions < 1:
        raise InvalidError(f"a topic cannot have {partitions} partitions")
    column = binary_column(inner)
    chosen = np.full(len(column.present), -1, np.int32)
    partitions_of_keys(column.content, column.bounds, column.present, partitions, chosen)
    return chosen


def _numbers(
    what: str, given: npt.NDArray[np.signedinteger], dtype: type[np.signedinteger], rows: int
) -> npt.NDArray[np.signedinteger]:
    numbers = np.ascontiguousarray(given)
    if len(numbers) != rows:
        raise InvalidError(f"{len(numbers)} numbers in column {what!r} for {rows} keys")
    if not np.issubdtype(numbers.dtype, np.integer):
        raise TypeError(f"column {what!r} holds {numbers.dtype}, not whole numbers")
    cast = numbers.astype(dtype, copy=False)
    if numbers.dtype != cast.dtype and not np.array_equal(numbers, cast):
        raise InvalidError(f"column {what!r} has numbers that do not fit {np.dtype(dtype)}")
    return cast


def _warn_about_cut_ends(start: Int64s, end: Int64s, size_ms: int) -> None:
    cut = np.count_nonzero((end == LATEST) & (start > LATEST - size_ms))
    if cut:
        warnings.warn(
            f"{cut} windows of {size_ms} ms end beyond the largest time; their ends are given as {LATEST}",
            TidegateWarning,
            stacklevel=3,
        )
