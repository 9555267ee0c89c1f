"""Maintenance operations are generators: each step does one phase and yields its name.

The driver sets the pace: `run_through` runs to the end, the supervisor until a deadline and continues at the next call,
a seeded scheduler in tests in any interleaving. Closing a generator early is always safe: its `Work` releases what it
holds and undoes what it made and did not publish.

`BucketLocks` admits one operation per bucket. Locking never blocks: an operation that finds its bucket busy gives up,
and a checkpoint yields and tries again. The lock order is scratch permit, then bucket. The holder of a bucket lock
never waits, so an operation that waits for the bucket with a permit (a checkpoint) always gets it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from tidegate.clock import Clock
from tidegate.errors import OverloadError
from tidegate.storage.index import Bucket, RunEntry, StoredRef
from tidegate.storage.scratch import Scratch

if TYPE_CHECKING:
    from tidegate.storage.parts import AttachedStore, TaskStorage
    from tidegate.storage.runs.run import Run
    from tidegate.storage.spec import StoreSpec

Result = TypeVar("Result")
Operation = Generator[str, None, Result]
Places = dict[int, StoredRef]  # by the identity of the run's entry

WAITING = "waiting"  # yielded while a permit or a bucket is busy: the driver may sleep
RESTING = "resting"  # yielded where nothing is held that others wait for: the driver may come back much later


def run_through(operation: Operation[Result], clock: Clock, *, timeout_ms: int) -> Result:
    """Run the operation to its end and return its result. Each of its waits is bounded by `timeout_ms`."""
    waited_since: int | None = None
    try:
        while True:
            phase = next(operation)
            if phase != WAITING:
                waited_since = None
                continue
            now = clock.monotonic_ms()
            waited_since = now if waited_since is None else waited_since
            if now - waited_since > timeout_ms:
                raise OverloadError(
                    f"maintenance waited {timeout_ms} ms for a permit or a bucket that is in use: close open "
                    "views, or raise max_inflight_maintenance",
                    reason="maintenance_blocked",
                )
            clock.sleep_ms(1)
    except StopIteration as ended:
        return ended.value  # type: ignore[no-any-return]
    finally:
        operation.close()


class BucketLocks:
    """At most one maintenance operation per (task, store, bucket). Safe from any thread."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._held: set[tuple[str, str, int]] = set()

    def try_lock(self, task: str, store: str, bucket: int) -> Callable[[], None] | None:
        """Return the unlock function, or None when the bucket is locked."""
        name = (task, store, bucket)
        with self._guard:
            if name in self._held:
                return None
            self._held.add(name)

        def unlock() -> None:
            with self._guard:
                self._held.discard(name)

        return unlock

    def held(self, task: str | None = None) -> int:
        """The number of locked buckets (of one task)."""
        with self._guard:
            return sum(1 for name in self._held if task is None or name[0] == task)


class Work(ExitStack):
    """What one operation holds until it ends: a permit, bucket locks, leases, and how to undo what is not published."""

    def __init__(self, task: TaskStorage) -> None:
        super().__init__()
        self.undo: dict[Hashable, Callable[[], object]] = {}
        self._parts, self._task = task.parts, task
        self.callback(self._undo)
        self._claim = self.enter_context(ExitStack())

    def permit(self) -> Operation[None]:
        """Take a scratch permit."""
        while (permit := self._parts.scratch.try_permit(Scratch.MAINTENANCE)) is None:
            yield WAITING
        self._claim.callback(permit.close)

    def lock(self, store: AttachedStore, bucket: int) -> bool:
        """Lock a bucket; False when another operation has it."""
        unlock = self._parts.locks.try_lock(self._task.task, store.spec.name, bucket)
        if unlock is not None:
            self._claim.callback(unlock)
        return unlock is not None

    def claim(self, store: AttachedStore, bucket: int) -> Operation[bool]:
        """Take a permit and lock the bucket; False, with neither, when another operation has it."""
        yield from self.permit()
        if self.lock(store, bucket):
            return True
        self.release()
        return False

    def release(self) -> None:
        """Release permit and locks; leases stay, and so does what to undo."""
        self._claim.close()

    def capture(self, store: AttachedStore, bucket: int, *, everything: bool = False) -> Bucket | None:
        """The bucket, with its stored runs pinned; None when it has none."""
        found, lease = store.state.index.capture(
            bucket, bucket, lambda refs: self._parts.pins.pin(self._task.task, refs), everything=everything
        )
        if lease is not None:
            self.callback(lease.close)
        return found[0] if found else None

    def store(self, packs: Sequence[tuple[StoreSpec, int, Sequence[RunEntry], Sequence[Run]]]) -> Places:
        """Write a pack for the runs of each (store, time segment); pinned, so that none is retired before its use."""
        task, places = self._task, Places()
        stored = task.store_all([(spec, segment, runs) for spec, segment, _, runs in packs])
        for (_, _, entries, _), refs in zip(packs, stored, strict=True):
            for entry, ref in zip(entries, refs, strict=True):
                places[id(entry)] = ref
                self.undo[ref] = partial(task.retire, [ref])
            self.callback(self._parts.pins.pin(task.task, refs).close)
        return places

    def place(
        self, store: AttachedStore, bucket: Bucket, pairs: Sequence[tuple[RunEntry, RunEntry]], what: str
    ) -> int | None:
        """Publish new places of the bucket's runs and give up their old ones; returns the bytes of hot copies dropped.

        None when the bucket changed meanwhile: then nothing was published.
        """
        task = self._task
        if not store.state.index.set_places(bucket, pairs):
            self._parts.stats.lost(task.task, what)
            return None
        for _, new in pairs:
            self.undo.pop(new.stored, None)
            self.undo.pop(new.hot, None)
        left = [old.stored for old, new in pairs if old.stored is not None and old.stored != new.stored]
        task.retire(left)
        return task.drop_hot([old.hot for old, new in pairs if old.hot and old.hot is not new.hot])

    def _undo(self) -> None:
        while self.undo:
            self.undo.popitem()[1]()
