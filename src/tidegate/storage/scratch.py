"""Permits for working memory: limits the concurrent loads and maintenance operations, and their bytes.

Readers and maintenance have separate slots, so neither starves the other. The memory of a merge depends on the rows:
one window of `collect` can be larger than all memory. A merge therefore reserves its bytes first (`hold`), waits while
others hold them, and is refused if it can never get them.

S1  a slot is released exactly once, on every path (INV-13).
S2  no self-deadlock: a thread that holds a permit of a kind gets its next one on the same slot at once, and a thread
    that holds bytes never waits for more.
S3  a merge that needs more than the limit is refused before anything of it is copied.
S4  when a large merge ends, Arrow's memory pool returns what was freed to the operating system.

Safe from any thread; a permit may be closed on another thread than the one that took it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from types import TracebackType

import pyarrow as pa

from tidegate.clock import Clock
from tidegate.errors import OverloadError
from tidegate.storage.wait_queue import Line

COPIES = 3  # of what is merged: put behind each other, in order, and cut into rows again
SORT_BYTES = 64  # for each value of a list: ranks, order and groups, sorted
SMALL_BYTES = 1 << 20  # smaller merges do not reserve memory
LARGE_SHARE = 8  # a merge of an eighth of working memory or more is large


class Scratch(StrEnum):
    """The kinds of users of working memory."""

    READER = "reader"
    MAINTENANCE = "maintenance"


class Permit:
    """The right to working memory; close it once, by hand or with `with`. `slot` lists the open permits of one slot."""

    __slots__ = ("_limiter", "kind", "slot", "thread")

    def __init__(self, limiter: ScratchLimiter, kind: Scratch, slot: list[Permit]) -> None:
        self._limiter = limiter
        self.kind = kind
        self.thread = threading.get_ident()
        self.slot = slot
        slot.append(self)

    def close(self) -> None:
        """Release the permit; idempotent."""
        self._limiter._close(self)

    def __enter__(self) -> Permit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ScratchLimiter:
    """The slots of one worker."""

    def __init__(
        self,
        clock: Clock,
        *,
        reader_slots: int,
        maintenance_slots: int,
        timeout_ms: int,
        working_bytes: int = 1 << 40,
    ) -> None:
        self._slots = {Scratch.READER: reader_slots, Scratch.MAINTENANCE: maintenance_slots}
        self._lines = {kind: Line(clock) for kind in Scratch}
        self._taken: dict[Scratch, list[list[Permit]]] = {kind: [] for kind in Scratch}
        self._timeout_ms = timeout_ms
        self.working_bytes = working_bytes
        self._bytes_line = Line(clock)
        self._bytes_held = 0
        self._mine = threading.local()

    @contextmanager
    def hold(self, nbytes: int, what: Callable[[], str]) -> Iterator[None]:
        """Reserve bytes of working memory for the block; `OverloadError` when they exceed the limit (S3).

        `what` says what they are for, as the beginning of a sentence.
        """
        self.check(nbytes, what)
        holding = getattr(self._mine, "bytes", 0)
        if nbytes < SMALL_BYTES:
            yield
            return
        with self._bytes_line.lock:
            if not holding and not self._bytes_line.enter(lambda: self._fits(nbytes), self._timeout_ms):
                raise OverloadError(
                    f"{what()} needs {nbytes} bytes of working memory, and others held {self._bytes_held} of "
                    f"{self.working_bytes} for {self._timeout_ms} ms. Run fewer tasks in one worker, or raise "
                    "memory_ceiling_bytes",
                    reason="scratch",
                )
            self._bytes_held += nbytes
        self._mine.bytes = holding + nbytes
        try:
            yield
        finally:
            self._mine.bytes = holding
            self.freed(nbytes)
            with self._bytes_line.lock:
                self._bytes_held -= nbytes
                self._bytes_line.stir()

    def freed(self, nbytes: int) -> None:
        """Return freed memory to the operating system if about `nbytes` of columns were freed and that is large (S4).

        Call it on the thread that freed them: Arrow's pool keeps freed memory by thread.
        """
        if nbytes * LARGE_SHARE >= self.working_bytes:
            pa.default_memory_pool().release_unused()

    def check(self, nbytes: int, what: Callable[[], str]) -> None:
        """Raise `OverloadError` when `nbytes` exceed the limit."""
        if nbytes > self.working_bytes:
            more = -(-2 * (nbytes - self.working_bytes) >> 20)
            raise OverloadError(
                f"{what()} needs about {nbytes >> 20} MiB of working memory, and there are {self.working_bytes >> 20} "
                f"MiB: half of what memory_ceiling_bytes leaves besides worker_total_bytes. Raise memory_ceiling_bytes "
                f"of the app's storage by {more} MiB or more, or have windows keep less: shorter ones, "
                "collect(…, limit=…), approx_count_distinct instead of count_distinct",
                reason="window_state",
            )

    def _fits(self, nbytes: int) -> bool:
        return self._bytes_held + nbytes <= self.working_bytes

    def permit(self, kind: Scratch = Scratch.READER, *, timeout_ms: int | None = None) -> Permit:
        """Take a slot, waiting for one as long as the configuration allows, then `OverloadError`."""
        line, bound_ms = self._lines[kind], self._timeout_ms if timeout_ms is None else timeout_ms
        with line.lock:
            here = threading.get_ident()
            held = next((slot for slot in self._taken[kind] if slot[0].thread == here), None)
            if held is not None:
                return Permit(self, kind, held)
            if line.enter(lambda: len(self._taken[kind]) < self._slots[kind], bound_ms):
                return self._take(kind)
        raise OverloadError(
            f"no {kind} slot came free in {bound_ms} ms; all {self._slots[kind]} are taken. Close views as soon as "
            f"they are read, or raise max_inflight_{'loads' if kind is Scratch.READER else 'maintenance'}",
            reason="scratch",
        )

    def try_permit(self, kind: Scratch = Scratch.READER) -> Permit | None:
        """Take a slot if one is free and no thread waits; otherwise return None at once."""
        line = self._lines[kind]
        with line.lock:
            if len(line) or len(self._taken[kind]) >= self._slots[kind]:
                return None
            return self._take(kind)

    def in_use(self, kind: Scratch) -> int:
        """Slots taken now."""
        with self._lines[kind].lock:
            return len(self._taken[kind])

    def waiting(self, kind: Scratch) -> int:
        return len(self._lines[kind])

    def _take(self, kind: Scratch) -> Permit:
        slot: list[Permit] = []
        self._taken[kind].append(slot)
        return Permit(self, kind, slot)

    def _close(self, permit: Permit) -> None:
        line, taken = self._lines[permit.kind], self._taken[permit.kind]
        with line.lock:
            if permit in permit.slot:
                permit.slot.remove(permit)
                if not permit.slot:
                    taken[:] = [slot for slot in taken if slot]
                    line.stir()
