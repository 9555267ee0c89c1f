"""Packs that are open: found again by name, verified slot by slot, closed when others are used.

O1  a slot that was found good is not verified again while this process may trust its file: a pack never changes.
O2  damage in a local copy of a remote pack is met by another copy; damage of the pack itself is an error.

Thread rule: may be shared between threads and tasks.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from tidegate.errors import CorruptError, InvalidError
from tidegate.storage.backends.overlap import overlap
from tidegate.storage.backends.port import StorageBackend
from tidegate.storage.index.entries import StoredRef
from tidegate.storage.packs.pack import PackReader
from tidegate.storage.runs.run import Run
from tidegate.storage.spec import StoreSpec

KEPT_RUNS_BYTES = 16 << 20
MAX_VERIFIED = 1 << 12


class PackCache:
    """At most `max_open` packs stay open.

    Each holds a file descriptor and address space; the one used longest ago is closed first. Of open packs, runs are
    kept as objects while what they hold besides the file stays below `kept_bytes`, because making one again costs much
    more than finding it. A run somebody has keeps its pack's memory by itself, whatever is closed here. `load_all`
    opens up to `reads_at_once` packs at the same time.
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
        """The stored run, zero copy; verified before the first use of its slot."""
        try:
            return self._load(task, spec, ref)
        except CorruptError:
            self.forget(ref.pack)
            if not self._backend.forget(ref.pack):
                raise
        return self._load(task, spec, ref)  # the damage may have been in a local copy of a remote pack

    def load_all(self, task: str, spec: StoreSpec, refs: Sequence[StoredRef]) -> Iterator[Run]:
        """The stored runs in the order given, each as `load` does; packs that are not open come together.

        Never more than stay open: of a longer list, the next packs come when the runs of these were taken.
        """
        for start in range(0, len(refs), self._max_open):
            part = refs[start : start + self._max_open]
            self.bring(ref.pack for ref in part)
            yield from (self.load(task, spec, ref) for ref in part)

    def bring(self, packs: Iterable[str]) -> None:
        """Open those of the packs that are not open, beside one another; the first ones, if not all may be open.

        Nothing when reads are not worth overlapping: `load` opens a pack too.
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
        """Close the pack, because it is going to be deleted. Runs already loaded stay valid."""
        with self._lock:
            self._verified.pop(pack, None)
            reader = self._readers.pop(pack, None)
            if reader is not None:
                self._let_go(reader)

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
            pass  # `load` meets it again, and knows what to do about local copies

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
                self._let_go(closed)
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

    def _let_go(self, reader: PackReader) -> None:
        """A closed pack's runs are not kept, or the file would stay mapped. The lock is held."""
        for number in list(reader.verified):  # a load on another thread may be adding to it
            run = self._kept.pop((reader.name, number), None)
            if run is not None:
                self.used_bytes -= _own_bytes(run)


def _own_bytes(run: Run) -> int:
    """What a loaded run holds besides the mapped file: the objects of its arrays, `Run.starts`, buffers made anew."""
    made: int = run.__dict__.get("made_bytes", 0)
    return 4096 + 4 * run.key_count + made
