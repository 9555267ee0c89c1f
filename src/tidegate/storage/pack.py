"""Packs: immutable files with many runs of one store and one time segment; and the cache of open packs.

    head      sealed (task, store, time segment, name), zeros to a multiple of 64
    slots     one run each, at multiples of 64, each with its own CRC-32C; see `slots`
    foot      sealed (the head again, the store's fingerprint and columns, the table of slots)
    trailer   32 bytes: position and length of the foot u64, 0 u32, CRC-32C of the 20 bytes before u32, magic

P2  every byte is covered by exactly one check: trailer, foot and head when the pack is opened (padding after the
    head included), a slot with its padding when it is first read.
P3  no byte of a slot is passed to Arrow before its checksum was verified. A damaged slot is refused with its position;
    the others stay readable.
P4  head and foot repeat the task and store, so a valid file in the wrong place is refused.
O1  a verified slot is not verified again while this process may trust its file: a pack never changes.
O2  a damaged local copy of a remote pack is downloaded again; damage of the pack itself is an error.

Thread rule: a `PackReader` and a `PackCache` may be shared between threads and tasks.
"""

from __future__ import annotations

import struct
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import msgspec
import pyarrow as pa

from tidegate.errors import CorruptError, InvalidError
from tidegate.storage.backends.base import Part, StorageBackend, joined, overlap, put_all, view_of
from tidegate.storage.backends.sealed import ALIGNMENT, Format, crc32c, damaged, padding, seal, unseal
from tidegate.storage.earlier_slots import read_earlier_slot
from tidegate.storage.index import StoredRef
from tidegate.storage.runs.run import Run
from tidegate.storage.slots import BadSlot, check_storable, read_slot, slot_parts
from tidegate.storage.spec import EarlierShape, StoreSpec

# -- one pack ----------------------------------------------------------------------------------------

REMEDY = "restore the file from a copy, or go back to a checkpoint that does not name it"
HEAD = Format(b"TG-PACK\n", "pack", 1, REMEDY)
FOOT = Format(b"TG-FOOT\n", "pack", 3, REMEDY, oldest=1)
IPC_FOOT = 3  # the first version whose slots are Arrow IPC
END = b"TG-PEND\n"
MAX_HEAD_BYTES = 64 << 10
MAX_SLOTS = 1 << 20
_PLACE = struct.Struct("<QQI")
_TRAILER = struct.Struct("<QQII8s")
_HEAD_LENGTH = struct.Struct("<12xI")


class Head(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The head of a pack: its task, store, time segment and name."""

    task: str
    store: str
    segment: int
    name: str


class Slot(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A slot's position, and the facts of its run."""

    position: int
    length: int
    crc: int
    bucket: int
    rows: int
    keys: int
    min_ts: int
    max_ts: int


class Foot(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The foot of a pack: its content."""

    head: Head
    fingerprint: str
    columns: bytes  # the Arrow schema of the rows, for tools that do not know the store
    slots: list[Slot]


# -- writing -------------------------------------------------------------------------------------


class NewPack(NamedTuple):
    """A pack to be written: runs of one store and one time segment."""

    spec: StoreSpec
    segment: int
    runs: Sequence[Run]
    name: str


def pack_parts(task: str, pack: NewPack) -> tuple[list[Part], list[StoredRef]]:
    """The parts of a pack, which share the runs' memory, and the reference of each run."""
    spec, segment, runs, name = pack
    check_storable(spec.rows)
    if not 0 < len(runs) <= MAX_SLOTS:
        raise InvalidError(f"{name}: a pack needs at least one run and holds at most {MAX_SLOTS}")
    head = Head(task, spec.name, segment, name)
    sealed = seal(HEAD, head)
    if len(sealed) > MAX_HEAD_BYTES:
        raise InvalidError(f"task id and store name of {name} are too long to be stored")
    parts: list[Part] = [sealed + bytes(padding(len(sealed)))]
    position = len(sealed) + padding(len(sealed))
    slots: list[Slot] = []
    for run in runs:
        if spec.segment_of(run.bucket) != segment:
            raise InvalidError(
                f"a run of bucket {run.bucket} does not belong into a pack of time segment {segment}"
            )
        if not run.rows.schema.equals(spec.rows):
            raise InvalidError(f"a run of store {spec.name} has columns {run.rows.schema}, not {spec.rows}")
        crc = length = 0
        for part in slot_parts(run):
            view = view_of(part).toreadonly()
            crc = crc32c(view, crc)
            length += view.nbytes
            parts.append(part)
        bounds = (run.min_ts, run.max_ts) if run.row_count else (0, 0)
        slots.append(Slot(position, length, crc, run.bucket, run.row_count, run.key_count, *bounds))
        position += length
    foot = seal(FOOT, Foot(head, spec.fingerprint, spec.rows.serialize().to_pybytes(), slots))
    place = _PLACE.pack(position, len(foot), 0)
    parts += [foot, place + struct.pack("<I8s", crc32c(place), END)]
    return parts, [StoredRef(name, number, run.nbytes) for number, run in enumerate(runs)]


def write_packs(
    backend: StorageBackend, task: str, packs: Sequence[NewPack], *, at_once: int = 1
) -> list[list[StoredRef]]:
    """Put several packs of one task; returns the references of each pack's runs, in the given order."""
    refs: list[list[StoredRef]] = []

    def made() -> Iterator[tuple[str, list[Part]]]:
        for pack in packs:  # one by one: checksummed bytes are still in the processor's cache
            parts, stored = pack_parts(task, pack)
            refs.append(stored)
            yield pack.name, parts

    put_all(backend, made(), at_once=at_once)
    return refs


# -- reading -------------------------------------------------------------------------------------


class PackReader:
    """One open pack: its foot is checked when it is opened, each slot when it is first read."""

    def __init__(self, pack: pa.Buffer, name: str, verified: set[int] | None = None) -> None:
        """`verified` are slots that this process verified before: a pack never changes."""
        self.name = name
        self._pack = pack if pack.address % ALIGNMENT == 0 else joined([pack])
        self.foot, self._version = _open(self._pack, name)
        self._owner: tuple[str, StoreSpec] | None = None
        self._earlier: EarlierShape | None = None  # the store's columns when this pack was written, if others
        self.verified: set[int] = set() if verified is None else verified
        self._runs: weakref.WeakValueDictionary[int, Run] = weakref.WeakValueDictionary()

    def check(self, task: str, spec: StoreSpec) -> None:
        """Raise for a pack of another task or store, and for a store whose declaration changed."""
        if self._owner is not None and self._owner[1] is spec and self._owner[0] == task:
            return
        head = self.foot.head
        if (head.task, head.store) != (task, spec.name):
            why = f"it belongs to task {head.task}, store {head.store}, not to {task}, {spec.name}"
            raise damaged(HEAD, self.name, why, 0)
        if not spec.reads(self.foot.fingerprint):
            raise InvalidError(
                f"store {spec.name} of task {task} was written with another shape (kind, columns, aggregates or bucket "
                f"width) than it is declared with now; declare it as before, or start it under a new name"
            )
        self._owner = (task, spec)
        self._earlier = spec.shape_of(self.foot.fingerprint)

    def load(self, number: int) -> Run:
        """Return the run in a slot, zero copy. Call `check` first."""
        run = self._runs.get(number)
        if run is not None:
            return run
        if self._owner is None or not 0 <= number < len(self.foot.slots):
            slots = len(self.foot.slots)
            raise damaged(HEAD, self.name, f"slot {number} is asked for, and it has {slots}", None)
        slot = self.foot.slots[number]
        content = self._pack.slice(slot.position, slot.length)
        checked = number in self.verified
        if not checked and (crc := crc32c(content)) != slot.crc:
            why = f"its CRC-32C is {crc:08x} and the pack says {slot.crc:08x}"
            raise self._bad_slot(number, slot, why)
        try:
            spec = self._owner[1] if self._earlier is None else self._earlier.spec
            if self._version < IPC_FOOT:
                run = read_earlier_slot(content, spec.rows, checked=checked)
            else:
                run = read_slot(content, spec.rows, slot.bucket, checked=checked)
        except BadSlot as error:
            raise self._bad_slot(number, slot, str(error)) from error
        if (run.bucket, run.row_count, run.key_count) != (slot.bucket, slot.rows, slot.keys):
            raise self._bad_slot(number, slot, f"it holds {run.row_count} rows of bucket {run.bucket}")
        if not checked and run.row_count and (run.min_ts, run.max_ts) != (slot.min_ts, slot.max_ts):
            raise self._bad_slot(number, slot, f"its rows are from {run.min_ts} to {run.max_ts}")
        self.verified.add(number)
        if self._earlier is not None:
            run = Run(run.bucket, run.directory, self._earlier.grow(run.rows))
        self._runs[number] = run
        return run

    def _bad_slot(self, number: int, slot: Slot, why: str) -> CorruptError:
        return CorruptError(
            f"slot {number} (bucket {slot.bucket}, {slot.rows} rows) at byte {slot.position} of pack {self.name} "
            f"is damaged: {why}; the other slots are not affected; {REMEDY}",
            path=self.name,
            position=slot.position,
            kafka_name=None,
        )


def _open(pack: pa.Buffer, name: str) -> tuple[Foot, int]:
    """Return the foot and its format version, after every check that needs no slot (P2)."""
    size = pack.size
    if size < _TRAILER.size:
        raise damaged(FOOT, name, f"it has {size} bytes, too few for a pack", 0)
    trailer = memoryview(pack)[size - _TRAILER.size :]
    position, length, zero, crc, end = _TRAILER.unpack(trailer)
    if end != END or zero != 0 or crc != crc32c(trailer[: _PLACE.size]):
        raise damaged(
            FOOT, name, "its last 32 bytes are not a pack's (cut short, extended or flipped)", size - 32
        )
    if position % ALIGNMENT or position + length + _TRAILER.size != size:
        raise damaged(FOOT, name, f"it has {size} bytes and its trailer says otherwise", size - 32)
    foot = unseal(FOOT, pack.slice(position, length), Foot, name=name)
    version = int.from_bytes(memoryview(pack)[position + 8 : position + 10], "little")
    start = _check_head(pack, foot, name)
    for number, slot in enumerate(foot.slots):
        if (
            slot.position != start
            or slot.length <= 0
            or slot.length % ALIGNMENT
            or slot.length > position - start
        ):
            raise damaged(
                FOOT, name, f"its table puts slot {number} at byte {slot.position}, not {start}", position
            )
        start += slot.length
    if start != position:
        raise damaged(
            FOOT, name, f"its slots end at byte {start} and its foot starts at {position}", position
        )
    return foot, version


def _check_head(pack: pa.Buffer, foot: Foot, name: str) -> int:
    """Return the start of the slots, after checking the head against the foot."""
    stated = _HEAD_LENGTH.unpack_from(pack)[0] + 20 if pack.size >= 16 else 0
    if stated > min(MAX_HEAD_BYTES, pack.size):
        raise damaged(HEAD, name, f"its head of {stated} bytes does not fit it", 12)
    head = unseal(HEAD, pack.slice(0, stated), Head, name=name)
    start = stated + padding(stated)
    if any(memoryview(pack)[stated:start]):
        raise damaged(HEAD, name, "the zeros after its head are not zeros", stated)
    if head != foot.head:
        raise damaged(HEAD, name, f"its head is of {head.name} and its foot of {foot.head.name}", 0)
    if head.name != name:
        raise damaged(HEAD, name, f"it is the pack {head.name} under another name", 0)
    return start


# -- open packs --------------------------------------------------------------------------------------

KEPT_RUNS_BYTES = 16 << 20
MAX_VERIFIED = 1 << 12


class PackCache:
    """At most `max_open` packs stay open.

    Each holds a file descriptor and address space; the least recently used is closed first. Runs of open packs are
    cached as objects while their memory outside the file stays below `kept_bytes`, because building a run costs much
    more than a lookup. A run in use keeps its pack's memory alive after the pack is closed here. `load_all` opens up to
    `reads_at_once` packs at the same time.
    """

    def __init__(
        self,
        backend: StorageBackend,
        *,
        max_open: int = 128,
        kept_bytes: int = KEPT_RUNS_BYTES,
        reads_at_once: int = 1,
    ) -> None:
        if max_open < 1:
            raise InvalidError(f"max_open is {max_open}; it must be at least 1")
        self._backend = backend
        self._max_open = max_open
        self._kept_bytes = kept_bytes
        self.reads_at_once = reads_at_once
        self._lock = threading.Lock()
        self._readers: OrderedDict[str, PackReader] = OrderedDict()
        self._verified: dict[str, set[int]] = {}  # of packs that were closed, oldest first
        self._kept: OrderedDict[tuple[str, int], Run] = OrderedDict()
        self.used_bytes = 0  # by the kept runs
        self.opened = 0  # how often a pack was opened, for statistics

    def __len__(self) -> int:
        return len(self._readers)

    def load(self, task: str, spec: StoreSpec, ref: StoredRef) -> Run:
        """Return the stored run, zero copy; its slot is verified before the first use."""
        try:
            return self._load(task, spec, ref)
        except CorruptError:
            self.forget(ref.pack)
            if not self._backend.forget(ref.pack):
                raise
        return self._load(task, spec, ref)  # the damage may have been in a local copy of a remote pack

    def load_all(self, task: str, spec: StoreSpec, refs: Sequence[StoredRef]) -> Iterator[Run]:
        """Yield the stored runs in the given order, as `load` does; packs that are not open are opened together.

        At most `max_open` at a time: of a longer list, the next packs are opened once these runs were consumed.
        """
        for start in range(0, len(refs), self._max_open):
            part = refs[start : start + self._max_open]
            self.bring(ref.pack for ref in part)
            yield from (self.load(task, spec, ref) for ref in part)

    def bring(self, packs: Iterable[str]) -> None:
        """Open the packs that are not open concurrently; only the first ones, if not all may be open.

        Does nothing when overlapping reads do not help: `load` opens packs, too.
        """
        if self.reads_at_once == 1:
            return
        packs = list(islice(dict.fromkeys(packs), self._max_open))
        with self._lock:
            for pack in packs:
                if pack in self._readers:
                    self._readers.move_to_end(pack)  # not to be closed for those that come now
            absent = [pack for pack in packs if pack not in self._readers]
        overlap(self._try_open, absent, at_most=self.reads_at_once)

    def forget(self, pack: str) -> None:
        """Close the pack before it is deleted. Runs already loaded stay valid."""
        with self._lock:
            self._verified.pop(pack, None)
            reader = self._readers.pop(pack, None)
            if reader is not None:
                self._drop_runs(reader)

    def close(self) -> None:
        with self._lock:
            self._readers.clear()
            self._kept.clear()
            self.used_bytes = 0

    def _load(self, task: str, spec: StoreSpec, ref: StoredRef) -> Run:
        place = (ref.pack, ref.slot)
        with self._lock:
            reader = self._readers.get(ref.pack)
            kept = self._kept.get(place)
            if reader is not None:
                self._readers.move_to_end(ref.pack)
            if kept is not None:
                self._kept.move_to_end(place)
        if reader is None:
            reader = self._open(ref.pack)
        reader.check(task, spec)
        if kept is not None:
            return kept
        run = reader.load(ref.slot)
        self._keep(reader, place, run)
        return run

    def _try_open(self, pack: str) -> None:
        try:
            self._open(pack)
        except CorruptError:
            pass  # `load` meets the error again and handles local copies

    def _open(self, name: str) -> PackReader:
        pack = self._backend.read(name)
        with self._lock:
            verified = self._verified.pop(name, None)
        opened = PackReader(pack, name, verified)
        with self._lock:
            self.opened += 1
            reader = self._readers.setdefault(name, opened)
            while len(self._readers) > self._max_open:
                closed = self._readers.popitem(last=False)[1]
                self._drop_runs(closed)
                if not self._backend.is_remote:  # there, the next copy of it is another download
                    self._verified[closed.name] = closed.verified
            while len(self._verified) > MAX_VERIFIED:
                del self._verified[next(iter(self._verified))]
        return reader

    def _keep(self, reader: PackReader, place: tuple[str, int], run: Run) -> None:
        with self._lock:
            if self._readers.get(reader.name) is not reader or place in self._kept:
                return  # closed meanwhile, or another thread was first
            self._kept[place] = run
            self.used_bytes += _own_bytes(run)
            while self.used_bytes > self._kept_bytes:
                self.used_bytes -= _own_bytes(self._kept.popitem(last=False)[1])

    def _drop_runs(self, reader: PackReader) -> None:
        """Drop a closed pack's cached runs, so that the file is unmapped. The lock is held."""
        for number in list(reader.verified):  # a load on another thread may be adding to it
            run = self._kept.pop((reader.name, number), None)
            if run is not None:
                self.used_bytes -= _own_bytes(run)


def _own_bytes(run: Run) -> int:
    """A loaded run's memory besides the mapped file: array objects, `Run.starts`, computed buffers."""
    made: int = run.__dict__.get("made_bytes", 0)
    return 4096 + 4 * run.key_count + made
