"""Windowed keys, a column at a time: one kernel call takes a whole column apart or puts it together.

The bytes and their rules are those of `keys`, and the tests hold the two against each other. A column may come
from a source nobody controls, so a bad key is a verdict of its row; the caller says what that means
(`require_good` raises and names the record). Rows whose key is null or empty are absent: neither good nor bad.

Thread rule: pure functions.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidegate.errors import InvalidError, TidegateWarning, WindowedKeyFormatError
from tidegate.kernels import windowed_keys as kernels
from tidegate.kernels.hashing import partitions_of_keys
from tidegate.windows.keys.binary_columns import Bytes, Flags, Int32s, binary_column, make_binary, room_for
from tidegate.windows.keys.layouts import LATEST, STRICT, KeyChecks, KeyFormat, check_size, decode_key

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
    """A column of windowed keys, taken apart; rows that are not good have a null inner key and zeros."""

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
        """Rows with a key."""
        return np.equal(self.verdict, kernels.GOOD)

    @property
    def bad(self) -> Flags:
        """Rows whose bytes are no key of this format."""
        return np.greater(self.verdict, kernels.ABSENT)

    def reason(self, row: int) -> str:
        """What is wrong with a row's key, in words."""
        return f"{self.key_format.value} key with {REASONS[int(self.verdict[row])]}"

    def require_good(
        self, *, offsets: Int64s | None = None, topic: str | None = None, partition: int | None = None
    ) -> DecodedKeys:
        """These keys, if no row is bad; else `WindowedKeyFormatError` about the first that is."""
        if self.bad_rows == 0:
            return self
        row = int(np.argmax(self.bad))
        place = [] if topic is None else [f"topic {topic}"]
        place += [] if partition is None else [f"partition {partition}"]
        place += [f"row {row}"] if offsets is None else [f"offset {int(offsets[row])}"]
        raise WindowedKeyFormatError(f"{' '.join(place)}: {self._explain(row)}")

    def _explain(self, row: int) -> str:
        """The scalar decoder's words for a row, whose checks may be recovered from its verdict."""
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
    """Take a column of windowed keys apart. `size_ms` is needed for time windows and refused for sessions."""
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
    """Put inner keys and windows together. `end` is needed for sessions and refused for time windows."""
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
    """Where Kafka Streams puts windowed keys: by the inner key alone, so all windows of a key stay together.

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
