"""Commits of a table, the builder's lease, takeover, and readers that follow the newest commit.

One published list names the last commits; a commit is a storage checkpoint (rows, offsets and drainer states of one
moment) and the token that restores it.

C1  the list is replaced by compare-and-swap only. A new builder first publishes it under its own epoch; from then on
    no commit of an older one can succeed (`FencedError`), whatever the clocks say.
C2  the last `KEPT` commits stay readable; older ones are removed, and storage frees their packs.
C3  the list carries the table's shape, and the id of the topic that its offsets count in.

Thread rules: `Commits` and `Lease` belong to the draining thread; `Successor` has a thread of its own; followers are
for any thread.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

import msgspec

from tidegate.clock import Clock
from tidegate.errors import (
    CommitGoneError,
    ConflictError,
    CorruptError,
    FencedError,
    InvalidError,
    OverloadError,
    SignatureError,
    UnavailableError,
)
from tidegate.randomness import Randomness
from tidegate.tables.options import TableShape

if TYPE_CHECKING:
    from tidegate.storage.backends.base import StorageBackend


# --- commits

KEPT: Final = 10
VERSION: Final = 2
READABLE: Final = (1, 2)  # 1 had no topic id


class Commit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One commit: the next offset of each partition, and the tokens that restore it."""

    number: int
    positions: dict[int, int]
    committed_ms: int
    rows: int
    token: bytes


class CommitList(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The published commit list."""

    version: int
    epoch: int
    shape: TableShape
    commits: tuple[Commit, ...] = ()
    topic_id: str = ""


def commits_name(table: str) -> str:
    return f"tables/{table}/commits"


def lease_name(table: str) -> str:
    return f"tables/{table}/lease"


def stored_tables(backend: StorageBackend) -> list[str]:
    """Return the names of the tables that are kept in this backend."""
    found = {each.name.split("/")[1] for each in backend.list("tables") if each.name.endswith("/commits")}
    return sorted(found)


Record = TypeVar("Record", bound=msgspec.Struct)


def read_record(
    backend: StorageBackend, name: str, kind: type[Record], what: str, remedy: str
) -> tuple[Record, str] | None:
    """Return a published record and its version, None if there is none; `what` and `remedy` are for the error."""
    try:
        found = backend.read_published(name)
        return None if found is None else (msgspec.msgpack.decode(found[0], type=kind), found[1])
    except SignatureError:
        raise
    except (CorruptError, msgspec.DecodeError) as error:
        raise CorruptError(
            f"{what} cannot be read ({error}); {remedy}", path=name, kafka_name=None
        ) from error


def load_commits(backend: StorageBackend, table: str) -> tuple[CommitList, str] | None:
    """Return the current list and its version; None if there is no such table yet."""
    remedy = "restore them from a copy, or build the table anew in another state folder"
    found = read_record(backend, commits_name(table), CommitList, f"the commits of table {table}", remedy)
    if found is None:
        return None
    commits, version = found
    if commits.version not in READABLE:
        raise InvalidError(
            f"table {table} was written by a later release (version {commits.version}, this one reads up to "
            f"{VERSION}): use that release, or a later one"
        )
    return commits, version


def next_epoch(backend: StorageBackend, table: str) -> int:
    """Return the least epoch that a new builder may have, also where the lease was deleted."""
    found = load_commits(backend, table)
    return 1 if found is None else found[0].epoch + 1


def recreated(shape: TableShape, was: str, topic_id: str) -> InvalidError:
    """Return the error for a table whose topic was deleted and created again."""
    return InvalidError(
        f"topic {shape.topic} was deleted and created again: table {shape.name} was built from the topic with id "
        f"{was}, and the topic has id {topic_id} now. Its rows are of the old topic; build the table anew in another "
        "state folder"
    )


class Commits:
    """The builder's side of the list."""

    def __init__(self, backend: StorageBackend, shape: TableShape, epoch: int, topic_id: str) -> None:
        """`topic_id` is the id of the topic that is read now; empty where it is unknown."""
        self._backend = backend
        self._shape = shape
        self._topic_id = topic_id
        self._epoch = epoch
        self._list = CommitList(VERSION, epoch, shape, topic_id=topic_id)
        self._version: str | None = None

    def take_over(self) -> tuple[Commit, ...]:
        """Put the list under this builder's epoch (C1); return its commits, oldest first."""
        for _ in range(8):
            found = load_commits(self._backend, self._shape.name)
            known, version = found if found is not None else (None, None)
            if known is not None:
                self._shape.check_same(known.shape)
                self._require_topic(known)
                if known.epoch > self._epoch:
                    raise self._fenced()
            commits = () if known is None else known.commits
            try:
                self._publish(CommitList(VERSION, self._epoch, self._shape, commits, self._topic_id), version)
            except ConflictError:
                continue  # the previous builder has just committed: take that commit over too
            return commits
        raise ConflictError(f"table {self._shape.name}: the list of commits changes all the time; try again")

    @property
    def newest(self) -> Commit | None:
        return self._list.commits[-1] if self._list.commits else None

    @property
    def commits(self) -> tuple[Commit, ...]:
        return self._list.commits

    def add(self, token: bytes, positions: dict[int, int], rows: int, now_ms: int) -> Commit:
        """Make a checkpoint the newest commit."""
        number = 1 if self.newest is None else self.newest.number + 1
        commit = Commit(number, positions, now_ms, rows, token)
        commits = (*self._list.commits, commit)[-KEPT:]
        try:
            self._publish(
                CommitList(VERSION, self._epoch, self._shape, commits, self._topic_id), self._version
            )
        except ConflictError as error:
            raise self._fenced() from error
        return commit

    def _require_topic(self, known: CommitList) -> None:
        if not known.commits or not known.topic_id:
            return  # nothing was read yet, or by a release that did not record the id
        if not self._topic_id:
            self._topic_id = known.topic_id
        elif known.topic_id != self._topic_id:
            raise recreated(self._shape, known.topic_id, self._topic_id)

    def _publish(self, commits: CommitList, expected: str | None) -> None:
        self._version = self._backend.publish(
            commits_name(self._shape.name), msgspec.msgpack.encode(commits), expected=expected
        )
        self._list = commits

    def _fenced(self) -> FencedError:
        return FencedError(
            f"table {self._shape.name}: another process builds it now, and this one's commit was refused; close the "
            "table here and open it again to read it"
        )


# --- lease

DEFAULT_TTL_MS: Final = 10_000
_REMEDY: Final = "make sure that no process uses it, then delete it: the next one to start makes it again"


class Held(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The holder of a lease; an empty owner is none."""

    epoch: int
    owner: str
    host: str
    pid: int
    until_ms: int


class Lease:
    """One process's lease of a table."""

    def __init__(
        self,
        backend: StorageBackend,
        name: str,
        *,
        clock: Clock,
        randomness: Randomness,
        ttl_ms: int,
        duty: str = "builds this table",
        remedy: str = "close the table here and open it again to read it",
    ) -> None:
        self._backend = backend
        self._name = name
        self._clock = clock
        self._ttl_ms = ttl_ms
        self._owner = randomness.uuid().hex
        self._version: str | None = None
        self.epoch = 0
        self.was_left = False  # whether it was taken from an owner that had not released it
        self._renew_at = 0
        self._duty, self._remedy = duty, remedy

    def acquire(self, *, at_least: int = 1) -> Held | None:
        """Take the lease, with an epoch of `at_least`; return None on success, else its holder."""
        found = read_lease(self._backend, self._name)
        held, version = found if found is not None else (None, None)
        if held is not None and self.is_alive(held):
            return held
        self.epoch = max(at_least, 1 if held is None else held.epoch + 1)
        self.was_left = held is not None and bool(held.owner)
        try:
            self._publish(version)
        except ConflictError:
            again = read_lease(self._backend, self._name)
            if again is None:
                raise
            return again[0]
        return None

    def keep(self, *, force: bool = False) -> None:
        """Renew when a third of the time has passed; `FencedError` if another process has it."""
        if not force and self._clock.now_ms() < self._renew_at:
            return
        try:
            self._publish(self._version)
        except ConflictError as error:
            raise self.fenced() from error

    def release(self) -> None:
        """Release it, so that the next process need not wait."""
        gone = Held(self.epoch, "", "", 0, 0)
        try:
            self._backend.publish(self._name, msgspec.msgpack.encode(gone), expected=self._version)
        except ConflictError:
            pass  # another process has it already: nothing to release

    def fenced(self) -> FencedError:
        return FencedError(
            f"{self._name}: another process {self._duty} now (this one's epoch was {self.epoch}); {self._remedy}"
        )

    def _publish(self, expected: str | None) -> None:
        now_ms = self._clock.now_ms()
        held = Held(self.epoch, self._owner, socket.gethostname(), os.getpid(), now_ms + self._ttl_ms)
        self._version = self._backend.publish(self._name, msgspec.msgpack.encode(held), expected=expected)
        self._renew_at = now_ms + self._ttl_ms // 3

    def overdue_owner(self) -> Held | None:
        """Return a holder that did not renew in time but is a living process of this machine (stopped, or very
        busy), or None."""
        found = read_lease(self._backend, self._name)
        if found is None or not found[0].owner or found[0].owner == self._owner:
            return None
        held = found[0]
        is_over = held.until_ms <= self._clock.now_ms()
        return held if is_over and held.host == socket.gethostname() and _runs(held.pid) else None

    def is_alive(self, held: Held) -> bool:
        """Whether the holder may still be at work."""
        if not held.owner or held.until_ms <= self._clock.now_ms():
            return False
        return held.host != socket.gethostname() or _runs(held.pid)


def read_lease(backend: StorageBackend, name: str) -> tuple[Held, str] | None:
    """Return the holder of the lease, and its version; None if it was never taken."""
    return read_record(backend, name, Held, name, _REMEDY)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


# --- successor

TRANSIENT = (ConflictError, FencedError, OverloadError, UnavailableError)
logger = logging.getLogger(__name__)


class Successor:
    """Calls `attempt` repeatedly until it returns something."""

    def __init__(self, attempt: Callable[[], object | None], every_ms: int, clock: Clock) -> None:
        self._attempt = attempt
        self._every_ms = every_ms
        self._clock = clock
        self._stopping = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def start(self) -> None:
        """Begin to watch; further calls do nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="tidegate-successor", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the watch and wait for its thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def check(self) -> None:
        """Raise the error that ended the watch, if any."""
        if self.error is not None:
            raise self.error

    def _watch(self) -> None:
        while True:
            with self._changed:
                if not self._stopping:
                    self._clock.wait_ms(self._changed, self._every_ms)
                if self._stopping:
                    return
            try:
                if self._attempt() is not None:
                    return
            except TRANSIENT as error:
                logger.info("taking a table over: %s; trying again", error)
            except BaseException as error:  # noqa: BLE001 - kept, and raised to whoever waits
                self.error = error
                logger.error("taking a table over failed: %s", error)
                return


# --- commit follower

LOOK_AGAIN_MS: Final = 100
TRIES: Final = 4


class Snapshot(Protocol):
    """A table as of one commit."""

    def close(self) -> None: ...


At = TypeVar("At")
View = TypeVar("View", bound=Snapshot)


class CommitSource(Protocol[At, View]):
    """Finds the newest commit of one table, and opens it."""

    @property
    def name(self) -> str:
        """The table's name in messages."""

    def newest(self) -> At | None:
        """Return the commit to serve now; None if there is none yet."""

    def open(self, commit: At) -> View:
        """Open a new snapshot of this commit."""

    def fits(self, view: View, commit: At) -> bool:
        """Whether `show` can move this snapshot to the commit; not if the table's shape has changed."""

    def show(self, view: View, commit: At) -> None:
        """Move a snapshot without readers to this commit."""

    def gone(self, commit: At) -> str:
        """Return why the commit cannot be read any more; empty while it is kept."""


@dataclass(slots=True, eq=False)
class _Counted(Generic[At, View]):
    """A snapshot and its number of readers."""

    commit: At
    view: View
    readers: int = 0
    is_stale: bool = False


class CommitFollower(Generic[At, View]):
    """The snapshots of one table: the current one, a spare one, and those that scans still read."""

    def __init__(self, source: CommitSource[At, View], clock: Clock) -> None:
        self.source = source
        self._clock = clock
        self._guard = (
            threading.RLock()
        )  # reentrant: a scan may end in a garbage collection on the thread that holds it
        self._looking = threading.Lock()
        self._current: _Counted[At, View] | None = None
        self._others: list[_Counted[At, View]] = []
        self._looked_ms: int | None = None
        self._closed = False

    @property
    def current(self) -> View | None:
        """The snapshot that serves reads; None before the first. Pin it to read it."""
        found = self._current
        return None if found is None else found.view

    def refresh(self, *, wait: bool = True) -> None:
        """Look for a newer commit now; without `wait` only if it is due, and if no other thread does."""
        if self._closed:
            raise InvalidError(f"table {self.source.name} is closed; open it again")
        is_needed = wait or self._current is None
        if not is_needed and self._is_fresh():
            return
        if not self._looking.acquire(blocking=is_needed):
            return
        try:
            now_ms = self._clock.monotonic_ms()
            self._follow()
            self._looked_ms = now_ms
        finally:
            self._looking.release()

    @contextmanager
    def pinned(self, *, refresh: bool = False) -> Iterator[View]:
        """The newest snapshot, fixed until the block ends."""
        self.refresh(wait=refresh)
        with self._guard:
            pinned = self._current
            if pinned is None:
                raise InvalidError(f"table {self.source.name} is closed; open it again")
            pinned.readers += 1
        try:
            yield pinned.view
        except CorruptError as error:
            why = self.source.gone(pinned.commit)
            if not why:
                raise
            raise CommitGoneError(why) from error
        finally:
            with self._guard:
                pinned.readers -= 1
                gone = self._unneeded()
            for each in gone:
                each.view.close()

    def close(self) -> None:
        """Close all snapshots; safe to call twice."""
        with self._guard:
            self._closed = True
            every = [*self._others, *([] if self._current is None else [self._current])]
            self._current, self._others = None, []
        for each in every:
            each.view.close()

    def _is_fresh(self) -> bool:
        looked_ms = self._looked_ms
        return looked_ms is not None and self._clock.monotonic_ms() - looked_ms < LOOK_AGAIN_MS

    def _follow(self) -> None:
        for _ in range(TRIES):
            commit, current = self.source.newest(), self._current
            if commit is None:
                raise UnavailableError(
                    f"table {self.source.name} has no commit yet; start the process that builds it, or wait for it"
                )
            if current is not None and current.commit == commit:
                return
            try:
                self._swap(commit)
            except CorruptError:
                if self.source.newest() == commit:
                    raise
                continue  # it was collected while it was opened
            return
        raise UnavailableError(
            f"table {self.source.name} commits faster than it can be opened here; try again"
        )

    def _swap(self, commit: At) -> None:
        current = self._current
        fits = current is not None and self.source.fits(current.view, commit)
        with self._guard:
            spare = next((each for each in self._others if fits and not each.readers), None)
            if spare is not None:
                self._others.remove(spare)
        if spare is None:
            spare = _Counted(commit, self.source.open(commit))
        else:
            try:
                self.source.show(spare.view, commit)
            except BaseException:  # partly moved: it has no commit
                spare.view.close()
                raise
            spare.commit = commit
        with self._guard:
            if self._current is not None:
                self._others.append(self._current)
            for each in self._others if not fits else ():
                each.is_stale = True
            self._current = spare
            gone = self._unneeded()
        for each in gone:
            each.view.close()

    def _unneeded(self) -> list[_Counted[At, View]]:
        """Remove and return snapshots without readers: all outdated ones, and all but one of the rest."""
        idle = [each for each in self._others if not each.readers]
        gone = [each for each in idle if each.is_stale]
        gone += [each for each in idle if not each.is_stale][:-1]
        return [each for each in gone if self._take_out(each)]

    def _take_out(self, counted: _Counted[At, View]) -> bool:
        try:
            self._others.remove(counted)
        except ValueError:  # a scan that ended meanwhile, on this thread, removed it
            return False
        return True


class PinnedCommit(Generic[View]):
    """One snapshot with the interface of a follower; the code that pinned it closes it."""

    def __init__(self, view: View) -> None:
        self.current = view

    def refresh(self, *, wait: bool = True) -> None:
        """Do nothing: there is one commit."""

    @contextmanager
    def pinned(self, *, refresh: bool = False) -> Iterator[View]:
        yield self.current

    def close(self) -> None:
        """Do nothing: the code that pinned the snapshot closes it."""
