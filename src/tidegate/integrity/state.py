"""A receiver's state of one partition, its binary encoding, and the manifest of a push.

`ProducerTable` keeps producers as rows with a hash index over their GUIDs, so that kernels update it in place; Python
code reads and writes `Producer` values. `validator` gives the verdicts.

S1  `next_offset` and the producers describe the same records: they are copied, saved and restored together;
S2  `index` finds every row below `count` and nothing else.

The encoded state is saved in the same commit as the data and the offset it describes. Bytes, big-endian; anything else
is a `CorruptError`:

    4 bytes "TGIV" | u8 version, 1 | u8 phase, plus 128 once producers were forgotten
    i64 next offset | i64 offset of the end of push, -1 none
    u32 producers | per producer, in order of GUID:
        16 bytes GUID | u64 checksum | u64 stamp sum | i64 records | i64 data records, -1 uncounted
        i64 producer's time | i64 log time | i64 offset | i32 chain | i32 sequence
        u8 flags: bit 0 registered, 1 ended, 2 final, 3 tainted | u8 checksum type
    u32 CRC-32C of all before

Sequences and checksums cannot detect that the last records of a chain, or a whole producer, never arrived. The manifest
can: the `divc` of an end of push lists every sender that took part, by its last attempt only:

    u8 version, 1 | u64 data records | u32 producers | per producer, in order of GUID:
        16 bytes GUID | i32 last chain | i32 last sequence | u64 checksum of the last chain | u64 data records

Thread rule: one thread per state; `copy` shares nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final, NamedTuple

import numpy as np
from fastcrc.crc32 import iscsi as crc32c
from numpy.typing import NDArray

from tidegate.durations import DurationLike, duration_ms
from tidegate.errors import CorruptError, InvalidError
from tidegate.integrity.header import ChecksumType
from tidegate.kernels.validation import PRODUCER_ROW, find_producer, index_producers

# -- state -----------------------------------------------------------------------------------------

NO_TIME: Final = -1
UNCOUNTED: Final = -1
NEVER: Final = -1
"""The maximum age that means no limit."""
DEFAULT_MAX_AGE_MS: Final = 7 * 86_400_000
"""Default time without records after which a pipeline or a table forgets a producer."""
MOST_REMEMBERED: Final = 100_000
"""Above this many producers, those that have ended are forgotten before their maximum age."""
MOST_SILENT: Final = 500_000
"""Above this many producers, those whose last record is the longest ago are forgotten, ended or not."""
FUTURE_GUARD_MS: Final = 3_600_000
"""How far ahead of the round's time a producer's clock may be and still count as the newest."""
_FEWEST_ROWS: Final = 16


class Phase(IntEnum):
    """The phase of a partition's push; LIVE topics never had one."""

    LIVE = 0
    PUSHING = 1
    PUSHED = 2

    @property
    def is_settled(self) -> bool:
        return self is not Phase.PUSHING


@dataclass(frozen=True, slots=True)
class Producer:
    """The state of one producer in one partition.

    `checksum`, `stamp_sum` and `records` are of the current chain; `data_records` counts over all
    chains, UNCOUNTED once there was a gap.
    """

    guid: bytes
    chain: int
    sequence: int
    registered: bool
    checksum_type: int = ChecksumType.NONE
    checksum: int = 0
    stamp_sum: int = 0
    records: int = 0
    data_records: int = 0
    ended: bool = False
    final: bool = False
    tainted: bool = False
    producer_time: int = NO_TIME
    log_time: int = NO_TIME
    offset: int = -1


class ProducerTable:
    """The producers of one partition, by GUID."""

    count: int
    rows: NDArray[Any]
    """Array of `PRODUCER_ROW`; rows from `count` on are free."""
    index: NDArray[np.int32]

    def __init__(self, rows: NDArray[Any] | None = None) -> None:
        self._take(np.zeros(0, PRODUCER_ROW) if rows is None else rows)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Producer]:
        return (self._producer(row) for row in range(self.count))

    def __contains__(self, guid: bytes) -> bool:
        return self._find(guid) >= 0

    def __eq__(self, other: object) -> bool:
        """Whether both hold the same producers in the same states, in any row order."""
        if not isinstance(other, ProducerTable):
            return NotImplemented
        return self.count == other.count and bool((self.ordered() == other.ordered()).all())

    __hash__ = None  # type: ignore[assignment]

    @property
    def known(self) -> NDArray[Any]:
        """The rows in use: a view."""
        return self.rows[: self.count]

    def ordered(self) -> NDArray[Any]:
        """The rows in order of GUID: a copy."""
        rows = self.known
        ordered: NDArray[Any] = rows[np.lexsort((rows["guid_low"], rows["guid_high"]))]
        return ordered

    def get(self, guid: bytes) -> Producer | None:
        row = self._find(guid)
        return None if row < 0 else self._producer(row)

    def put(self, producer: Producer) -> None:
        """Insert or replace a producer."""
        self.put_all([producer])

    def put_all(self, producers: Sequence[Producer]) -> None:
        """Insert or replace several distinct producers; new ones are appended in the order given."""
        rows = [self._find(producer.guid) for producer in producers]
        self.reserve(rows.count(-1))
        before = self.count
        for row, producer in zip(rows, producers, strict=True):
            if row < 0:
                row = self.count
                self.count += 1
            high, low = _halves(producer.guid)
            for name in PRODUCER_ROW.names or ():
                if not name.startswith("guid"):
                    self.rows[row][name] = getattr(producer, name)
            self.rows[row]["guid_high"], self.rows[row]["guid_low"] = high, low
        if self.count > before:
            self._reindex()

    def reserve(self, more: int) -> None:
        """Ensure capacity for `more` additional producers."""
        needed = self.count + more
        if needed > len(self.rows):
            rows = np.zeros(max(needed, 2 * len(self.rows)), PRODUCER_ROW)
            rows[: self.count] = self.known
            self.rows = rows
            self._reindex()

    def keep(self, chosen: NDArray[np.bool_]) -> int:
        """Remove all other rows; returns how many were removed."""
        kept = self.known[chosen]
        gone = self.count - len(kept)
        if gone:
            self._take(kept)
        return gone

    def copy(self) -> ProducerTable:
        twin = ProducerTable()
        twin.count, twin.rows, twin.index = self.count, self.rows.copy(), self.index.copy()
        return twin

    def _take(self, given: NDArray[Any]) -> None:
        self.count = len(given)
        self.rows = np.zeros(max(_FEWEST_ROWS, len(given)), PRODUCER_ROW)
        self.rows[: self.count] = given
        self._reindex()

    def _find(self, guid: bytes) -> int:
        high, low = _halves(guid)
        return int(find_producer(self.rows, self.index, np.uint64(high), np.uint64(low)))

    def _reindex(self) -> None:
        self.index = np.empty(_index_size(len(self.rows)), np.int32)
        index_producers(self.rows, self.count, self.index)

    def _producer(self, row: int) -> Producer:
        found = self.rows[row]
        flags = {name: bool(found[name]) for name in ("registered", "ended", "final", "tainted")}
        numbers = {
            name: int(found[name])
            for name in PRODUCER_ROW.names or ()
            if name not in flags and not name.startswith("guid")
        }
        guid = int(found["guid_high"]).to_bytes(8, "big") + int(found["guid_low"]).to_bytes(8, "big")
        return Producer(guid=guid, **numbers, **flags)  # type: ignore[arg-type]


@dataclass(slots=True)
class PartitionState:
    """The state a receiver carries from one batch to the next (S1)."""

    producers: ProducerTable = field(default_factory=ProducerTable)
    phase: Phase = Phase.LIVE
    next_offset: int = 0
    """The offset after the last validated record."""
    end_of_push: int = -1
    """The offset of the record that ended the push, -1 before."""
    forgot: bool = False
    """Producers were forgotten: a producer first seen in mid-chain may be one of them, which is no fault."""

    def copy(self) -> PartitionState:
        """A deep copy."""
        return PartitionState(
            self.producers.copy(), self.phase, self.next_offset, self.end_of_push, self.forgot
        )

    @property
    def newest_time(self) -> int:
        """The newest producer time, -1 without producers."""
        times = self.producers.known["producer_time"]
        return int(times.max()) if len(times) else NO_TIME

    def expire(self, max_age_ms: int, *, now_ms: int) -> int:
        """Forget producers whose time is more than `max_age_ms` behind the newest producer's, the oldest ended ones
        above MOST_REMEMBERED and any above MOST_SILENT; returns how many were forgotten.

        The wall clock expires no producer: with `now_ms`, times more than FUTURE_GUARD_MS ahead do not count as the
        newest, and above MOST_SILENT the offset of the last record decides. During a push no producer is forgotten,
        because the manifest lists all that took part.
        """
        times = self.producers.known["producer_time"]
        if max_age_ms == NEVER or self.phase is Phase.PUSHING:
            return 0
        gone = 0
        sane = times[times <= now_ms + FUTURE_GUARD_MS]
        if len(sane) and int(sane.max()) != NO_TIME:
            gone = self._keep(times >= int(sane.max()) - max_age_ms)
        rows = self.producers.known
        gone += self._drop_least("producer_time", np.flatnonzero(rows["final"]), len(rows) - MOST_REMEMBERED)
        count = len(self.producers)
        return gone + self._drop_least("offset", np.arange(count), count - MOST_SILENT)

    def _drop_least(self, name: str, rows: NDArray[np.int64], count: int) -> int:
        """Forget at most `count` of these rows, those with the least values; returns how many were forgotten."""
        if count <= 0 or not len(rows):
            return 0
        if len(rows) > count:
            rows = rows[np.argpartition(self.producers.known[name][rows], count - 1)[:count]]
        kept = np.ones(len(self.producers), np.bool_)
        kept[rows] = False
        return self._keep(kept)

    def _keep(self, chosen: NDArray[np.bool_]) -> int:
        gone = self.producers.keep(chosen)
        self.forgot = self.forgot or gone > 0
        return gone


def _halves(guid: bytes) -> tuple[int, int]:
    return int.from_bytes(guid[:8], "big"), int.from_bytes(guid[8:], "big")


def _index_size(rows: int) -> int:
    return 1 << (2 * rows).bit_length()


# -- encoding --------------------------------------------------------------------------------------

MAGIC: Final = b"TGIV"
VERSION: Final = 1
_FORGOT: Final = 128
_HEAD: Final = struct.Struct(">4sBBqqI")
_CRC: Final = struct.Struct(">I")
_FLAGS: Final = ("registered", "ended", "final", "tainted")
_NUMBERS: Final = [
    name for name in PRODUCER_ROW.names or () if name not in _FLAGS and name != "checksum_type"
]
_ROW: Final = np.dtype(
    [(name, ">" + PRODUCER_ROW[name].str[1:]) for name in _NUMBERS]
    + [("flags", "u1"), ("checksum_type", "u1")]
)
_ALL_FLAGS: Final = (1 << len(_FLAGS)) - 1


def encode_state(state: PartitionState) -> bytes:
    """Encode the state; equal states give equal bytes."""
    rows = state.producers.ordered()
    packed = np.zeros(len(rows), _ROW)
    for name in (*_NUMBERS, "checksum_type"):
        packed[name] = rows[name]
    for bit, name in enumerate(_FLAGS):
        packed["flags"] |= rows[name] << bit
    phase = state.phase | (_FORGOT if state.forgot else 0)
    head = _HEAD.pack(MAGIC, VERSION, phase, state.next_offset, state.end_of_push, len(rows))
    body = head + packed.tobytes()
    return body + _CRC.pack(crc32c(body))


def decode_state(data: bytes) -> PartitionState:
    """Decode a state; raises `CorruptError` for any other bytes."""
    if len(data) < _HEAD.size + _CRC.size:
        raise _corrupt(f"{len(data)} bytes are too few")
    magic, version, phase, next_offset, end_of_push, count = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise _corrupt(f"it begins with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise _corrupt(f"version {version} is unknown, this release reads {VERSION}")
    if len(data) != _HEAD.size + count * _ROW.itemsize + _CRC.size:
        raise _corrupt(f"{len(data)} bytes do not hold {count} producers")
    if _CRC.unpack_from(data, len(data) - _CRC.size)[0] != crc32c(bytes(data[: -_CRC.size])):
        raise _corrupt("its CRC-32C does not match")
    packed = np.frombuffer(data, _ROW, count, _HEAD.size)
    forgot, phase = phase & _FORGOT != 0, phase & ~_FORGOT
    if phase not in list(Phase) or next_offset < 0 or end_of_push < -1 or not _is_sane(packed):
        raise _corrupt("it says what no receiver writes")
    rows = np.zeros(count, PRODUCER_ROW)
    for name in (*_NUMBERS, "checksum_type"):
        rows[name] = packed[name]
    for bit, name in enumerate(_FLAGS):
        rows[name] = packed["flags"] >> bit & 1
    return PartitionState(ProducerTable(rows), Phase(phase), next_offset, end_of_push, forgot)


def _is_sane(packed: NDArray[Any]) -> bool:
    high, low = packed["guid_high"], packed["guid_low"]
    ascends = (high[1:] > high[:-1]) | ((high[1:] == high[:-1]) & (low[1:] > low[:-1]))
    known = np.isin(packed["checksum_type"], [int(kind) for kind in ChecksumType])
    numbered = (packed["chain"] >= 0) & (packed["sequence"] >= 0) & (packed["flags"] <= _ALL_FLAGS)
    return bool(ascends.all() and known.all() and numbered.all())


def _corrupt(why: str) -> CorruptError:
    return CorruptError(
        f"this is not a receiver's checkpoint: {why}; delete it and validate the partition from its beginning"
    )


# -- how old a producer may be -------------------------------------------------------------------


def max_age_of(given: DurationLike | None) -> int:
    """Convert a user's maximum age to milliseconds; None and -1 mean never."""
    return NEVER if given is None or given == NEVER else duration_ms(given)


def effective_max_age_ms(configured_ms: int, rewind_ms: int | None = None) -> int:
    """The maximum age to use, at least the rewind time of a hybrid table; -1 (never) is kept.

    Otherwise replayed records of forgotten producers would not be recognised as duplicates.
    """
    if configured_ms < NEVER:
        raise InvalidError(f"a maximum age of {configured_ms} ms: choose 0 or more, -1 for never")
    if rewind_ms is not None and rewind_ms < 0:
        raise InvalidError(f"a rewind of {rewind_ms} ms: choose 0 or more")
    return configured_ms if configured_ms == NEVER else max(configured_ms, rewind_ms or 0)


def take_checkpoint(state: PartitionState, *, now_ms: int, max_age_ms: int = NEVER) -> bytes:
    """Forget producers that are too old, in memory too, and return the encoded state."""
    state.expire(max_age_ms, now_ms=now_ms)
    return encode_state(state)


def restore_checkpoint(data: bytes, *, now_ms: int, max_age_ms: int = NEVER) -> PartitionState:
    """Decode a checkpoint, without producers that are too old by the present limit."""
    state = decode_state(data)
    state.expire(max_age_ms, now_ms=now_ms)
    return state


# -- manifest of a push ----------------------------------------------------------------------------

MANIFEST_VERSION: Final = 1
MOST_TOLD: Final = 5
"""How many producers an incomplete push names."""
_MANIFEST_HEAD = struct.Struct(">BQI")
_SENT = struct.Struct(">16siiQQ")


class Sent(NamedTuple):
    """What one sender sent to one partition: last chain and sequence, last chain's checksum, number of data records."""

    guid: bytes
    chain: int
    sequence: int
    checksum: int
    records: int


class Manifest(NamedTuple):
    """Everything one partition must have received before its end of push."""

    producers: tuple[Sent, ...] = ()

    @property
    def records(self) -> int:
        """Data records of all producers, duplicates counted once."""
        return sum(sent.records for sent in self.producers)

    @classmethod
    def of(cls, sent: Iterable[Sent]) -> Manifest:
        """Build the manifest of these senders. Attempts that share a GUID are one sender and must be equal."""
        known: dict[bytes, Sent] = {}
        for one in sent:
            if known.setdefault(one.guid, one) != one:
                raise InvalidError(
                    f"sender {one.guid.hex()} says it sent {one[1:]} and {known[one.guid][1:]}; attempts that "
                    f"share a GUID must send the same records: use one GUID per attempt otherwise"
                )
        return cls(tuple(known[guid] for guid in sorted(known)))

    def to_bytes(self) -> bytes:
        head = _MANIFEST_HEAD.pack(MANIFEST_VERSION, self.records, len(self.producers))
        return head + b"".join(_SENT.pack(*sent) for sent in self.producers)

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Decode; raises `InvalidError` for bytes that `to_bytes` would not write."""
        if len(data) < _MANIFEST_HEAD.size:
            raise InvalidError(f"a manifest has at least {_MANIFEST_HEAD.size} bytes, this one {len(data)}")
        version, records, count = _MANIFEST_HEAD.unpack_from(data)
        if version != MANIFEST_VERSION:
            raise InvalidError(
                f"manifest version {version} is unknown, this release reads {MANIFEST_VERSION}"
            )
        if len(data) != _MANIFEST_HEAD.size + count * _SENT.size:
            raise InvalidError(
                f"a manifest of {count} producers has {_MANIFEST_HEAD.size + count * _SENT.size} bytes, this one "
                f"{len(data)}"
            )
        manifest = cls(tuple(Sent(*fields) for fields in _SENT.iter_unpack(data[_MANIFEST_HEAD.size :])))
        guids = [sent.guid for sent in manifest.producers]
        if guids != sorted(set(guids)) or manifest.records != records:
            raise InvalidError("a manifest names each producer once, in order, and its records add up")
        if any(sent.chain < 0 or sent.sequence < 0 for sent in manifest.producers):
            raise InvalidError("a manifest has no negative chain or sequence")
        return manifest


def compare_manifest(payload: bytes | None, known: Callable[[bytes], Producer | None]) -> str:
    """Compare the manifest of an end of push with the known producers; the difference in words, empty if there is none.

    Fewer records (loss) and more or other records (damage) are both a difference. Producers that the manifest does not
    list are none: they are attempts that lost.
    """
    try:
        manifest = Manifest.from_bytes(payload or b"")
    except InvalidError as error:
        return str(error)
    found = [reason for sent in manifest.producers if (reason := _difference(sent, known(sent.guid)))]
    more = len(found) - MOST_TOLD
    return "; ".join(found[:MOST_TOLD]) + (f"; and {more} more producers" if more > 0 else "")


def _difference(sent: Sent, found: Producer | None) -> str:
    name = f"producer {sent.guid.hex()}"
    if found is None:
        return f"{name} never arrived; it sent {sent.records} records"
    if (found.chain, found.sequence) != (sent.chain, sent.sequence):
        return (
            f"{name} arrived up to chain {found.chain} sequence {found.sequence}; it sent "
            f"up to chain {sent.chain} sequence {sent.sequence}"
        )
    if found.data_records not in (UNCOUNTED, sent.records):
        return f"{name} sent {sent.records} records, {found.data_records} arrived"
    if (
        found.registered and not found.tainted and found.checksum != sent.checksum
    ):  # else the chain has a known gap
        return f"{name} certified {sent.checksum:016x} for chain {sent.chain}, {found.checksum:016x} arrived"
    return ""
