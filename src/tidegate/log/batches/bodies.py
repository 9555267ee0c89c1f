"""The record bytes of batches: unpacked, and in runs that a kernel takes at once.

Stands between a `BatchTable` and the record kernels. Checks CRCs, leaves plain batches where they lie (any
number of neighbours are one run) and decompresses the others, one after the other into the same memory, which
the limits bound. A run is small enough that its bytes are still in the cache when the next step reads them.

Thread rule: values and pure functions, for any thread; scratch memory belongs to one iteration at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from fastcrc.crc32 import iscsi as crc32c
from numpy.typing import NDArray

from tidegate.errors import CorruptError
from tidegate.log.batches.batch import (
    ATTRIBUTES_POSITION,
    CODEC_MASK,
    HEADER_SIZE,
    LENGTH_OVERHEAD,
    SMALLEST_LENGTH,
    Codec,
)
from tidegate.log.batches.batch_table import BatchTable, ByteArray, byte_array, computed_crcs
from tidegate.log.batches.codecs import Unpacker
from tidegate.log.batches.one_record import read_record

RUN_BYTES: Final = 512 << 10
SCRATCH_BYTES: Final = 4 << 20

_kept: Final[deque[memoryview]] = deque(maxlen=4)  # scratch memory that nobody uses at the moment


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """How many bytes of records compressed batches may unfold to: one batch, one piece, one whole call."""

    max_decompressed_bytes: int = 64 << 20
    max_piece_bytes: int = 64 << 20
    max_total_bytes: int = 1 << 30


DEFAULT_LIMITS: Final = DecodeLimits()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a buffer comes from, for messages."""

    path: Path | str | None = None
    file_position: int = 0

    def corrupt(
        self, what: str, position: int, offset: int | None = None, *, kafka_name: str = "CORRUPT_MESSAGE"
    ) -> CorruptError:
        """The batch at `position` of the buffer is wrong: `what` continues the sentence."""
        where = self.file_position + position
        of = "" if self.path is None else f" of {self.path}"
        named = "" if offset is None else f" (base offset {offset})"
        return CorruptError(
            f"the batch at position {where}{of}{named} {what}",
            path=self.path,
            position=where,
            offset=offset,
            kafka_name=kafka_name,
        )


@dataclass(frozen=True, slots=True)
class BodyRun:
    """Batches whose records lie, plain, in one array of bytes.

    `rows` say where (see `kernels/headers.py`); `positions` are the batches' in the buffer they came from.
    `done` is the share of that buffer that ends with them. An `inflated` run's bytes are only there until the
    next run is asked for.
    """

    source: ByteArray
    rows: NDArray[Any]
    positions: NDArray[np.int64]
    bytes: int
    done: float
    inflated: bool

    def malformed(self, index: int, number: int, start: int, place: Place) -> CorruptError:
        """What is wrong with record `number` of batch `index`, which begins at `start`."""
        row = self.rows[index]
        end = int(row["position"]) + LENGTH_OVERHEAD + int(row["length"])
        if number == row["count"]:
            what = f"has {end - start} bytes after its {number} records"
        elif start == end:
            what = f"says it has {row['count']} records but holds {number}"
        else:
            what = f"has a malformed record, number {number}: {_explain(self.source.data[start:end])}"
        return place.corrupt(
            what, int(self.positions[index]), int(row["base_offset"]), kafka_name="INVALID_RECORD"
        )


def body_runs(
    source: ByteArray, table: BatchTable, check_crcs: bool, limits: DecodeLimits, place: Place
) -> Iterator[BodyRun]:
    """The records of the table's batches, in order, their CRCs checked on the way."""
    packed, start = np.flatnonzero(table.codec).tolist(), 0
    if packed:
        with _scratch() as memory:
            unpack = _Unpacking(source, table, Unpacker(limits.max_decompressed_bytes, memory), place)
            for index in packed:
                if start < index:
                    yield from _plain_runs(source, table[start:index], check_crcs, place)
                yield unpack(index, check_crcs)
                start = index + 1
    if start < len(table):
        yield from _plain_runs(source, table[start:], check_crcs, place)


def body_of(source: ByteArray, table: BatchTable, limits: DecodeLimits, place: Place) -> BodyRun:
    """The records of a table's one batch; its CRC is not looked at."""
    if table.codec[0]:
        unpacker = Unpacker(limits.max_decompressed_bytes)
        return _Unpacking(source, table, unpacker, place)(0, check_crc=False)
    return _plain(source, table)


@contextmanager
def _scratch() -> Iterator[memoryview]:
    """Memory to decompress into, the same again and again: new pages cost 7 % of a scan of LZ4."""
    try:
        memory = _kept.pop()
    except IndexError:
        memory = np.empty(SCRATCH_BYTES, np.uint8).data
    try:
        yield memory
    finally:
        _kept.append(memory)


def _plain_runs(source: ByteArray, table: BatchTable, check_crcs: bool, place: Place) -> Iterator[BodyRun]:
    starts = table.position - table.position[0]
    cuts = [0, len(table)]
    if starts[-1] > RUN_BYTES:
        cuts[1:1] = (np.flatnonzero(np.diff(starts // RUN_BYTES)) + 1).tolist()
    for first, stop in pairwise(cuts):
        part = table[first:stop]
        if check_crcs:
            verify_crcs(source, part, place)
        yield _plain(source, part)


def _plain(source: ByteArray, table: BatchTable) -> BodyRun:
    last = table.rows[-1]
    done = (int(last["position"]) + LENGTH_OVERHEAD + int(last["length"])) / len(source)
    return BodyRun(
        source, table.rows, table.position, int(table.length.sum(dtype=np.int64)), done, inflated=False
    )


class _Unpacking:
    """Decompresses batches of a table. Little is done for each of them in Python: they may be small."""

    def __init__(self, source: ByteArray, table: BatchTable, unpacker: Unpacker, place: Place) -> None:
        self._source, self._table, self._unpacker, self._place = source, table, unpacker, place
        self._rows = table.rows.copy()
        self._rows["position"] = -HEADER_SIZE

    def __call__(self, index: int, check_crc: bool) -> BodyRun:
        """Batch `index`, decompressed."""
        row, view = self._table.rows[index], self._source.data
        position = int(row["position"])
        end = position + LENGTH_OVERHEAD + int(row["length"])
        if check_crc and (computed := crc32c(view[position + ATTRIBUTES_POSITION : end])) != row["crc"]:
            raise _wrong_crc(row, computed, self._place)
        plain = view[position + HEADER_SIZE : end]
        if row["count"] or len(plain):  # an emptied batch may keep its codec; nothing is to unpack then
            try:
                plain = self._unpacker.unpack(Codec(int(row["attributes"]) & CODEC_MASK), plain)
            except CorruptError as error:
                what = f"does not unpack: {error}"
                raise self._place.corrupt(what, position, int(row["base_offset"])) from None
        rows, positions = self._rows[index : index + 1], self._table.position[index : index + 1]
        rows["length"] = SMALLEST_LENGTH + len(plain)
        return BodyRun(byte_array(plain), rows, positions, len(plain), end / len(view), inflated=True)


def verify_crcs(source: ByteArray, table: BatchTable, place: Place) -> None:
    """Raise for the first batch whose bytes do not give the CRC it stores."""
    computed = computed_crcs(source, table)
    if not np.array_equal(computed, table.crc):
        index = int(np.flatnonzero(computed != table.crc)[0])
        raise _wrong_crc(table.rows[index], int(computed[index]), place)


def _wrong_crc(row: Any, computed: int, place: Place) -> CorruptError:
    what = f"has stored CRC {row['crc']} but its bytes give {computed}"
    return place.corrupt(what, int(row["position"]), int(row["base_offset"]))


def _explain(record: memoryview) -> str:
    """In words, why there is no sound record at the start of these bytes."""
    try:
        read_record(record)
    except CorruptError as error:
        return str(error)
    return "it changed while it was read"
