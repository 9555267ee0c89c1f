"""Serve reads from the newest commit of a table; open the next snapshot alongside, then swap.

A `CommitSource` says which commit is the newest and opens it; the follower keeps the snapshots. Opening a commit takes
milliseconds, and a reader should not wait for it: reads go to the current snapshot, and the newer commit is restored
into the spare one, which nobody reads and whose packs stay open. Where long scans hold the spare, too, a further
snapshot is opened and closed with its last reader.

D1  a read sees one commit from its beginning to its end; a scan, from its first batch until it ends, is closed or is
    garbage collected.
D2  a swap that fails changes nothing: the current snapshot stays.
D3  without readers there are at most two snapshots, of one shape.
D4  reading what is missing of a commit that is not kept any more raises `CommitGoneError`, damage `CorruptError`.

Thread rule: from any thread. One thread at a time looks for a newer commit, the others read what is there meanwhile;
`close` when nobody reads any more.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from tidegate.clock import Clock
from tidegate.errors import CommitGoneError, CorruptError, InvalidError, UnavailableError

LOOK_AGAIN_MS: Final = 100
TRIES: Final = 4


class Snapshot(Protocol):
    """A table as one commit has it."""

    def close(self) -> None: ...


At = TypeVar("At")
View = TypeVar("View", bound=Snapshot)


class CommitSource(Protocol[At, View]):
    """Where the commits of one table are published, and how one is opened."""

    @property
    def name(self) -> str:
        """The table, as messages name it."""

    def newest(self) -> At | None:
        """The commit to serve now; None while there is none."""

    def open(self, commit: At) -> View:
        """A new snapshot of this commit."""

    def fits(self, view: View, commit: At) -> bool:
        """Whether `show` can bring this snapshot to the commit; not where the table has another shape by now."""

    def show(self, view: View, commit: At) -> None:
        """Bring a snapshot that nobody reads to this commit."""

    def gone(self, commit: At) -> str:
        """Why the commit cannot be read any more; empty while it is kept."""


@dataclass(slots=True, eq=False)
class _Counted(Generic[At, View]):
    """A snapshot and how many read it."""

    commit: At
    view: View
    readers: int = 0
    is_stale: bool = False


class CommitFollower(Generic[At, View]):
    """The snapshots of one table: the current one, a spare one, and those that scans still read."""

    def __init__(self, source: CommitSource[At, View], clock: Clock) -> None:
        self.source = source
        self._clock = clock
        self._guard = threading.RLock()  # a scan may end in a garbage collection, on the thread that has it
        self._looking = threading.Lock()
        self._current: _Counted[At, View] | None = None
        self._others: list[_Counted[At, View]] = []
        self._looked_ms: int | None = None
        self._closed = False

    @property
    def current(self) -> View | None:
        """The snapshot that reads go to; None before the first. To read it, pin it."""
        found = self._current
        return None if found is None else found.view

    def refresh(self, *, wait: bool = True) -> None:
        """Look for a newer commit now; without `wait` only if it is time, and if no other thread does."""
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
        """The newest snapshot, which stays as it is until the block ends (D1)."""
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
        """Close all snapshots; fine to call twice."""
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
            except BaseException:  # half moved: it shows no commit (D2)
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
        """Take out what nobody reads: all that is stale, and of the rest all but one (D3)."""
        idle = [each for each in self._others if not each.readers]
        gone = [each for each in idle if each.is_stale]
        gone += [each for each in idle if not each.is_stale][:-1]
        return [each for each in gone if self._take_out(each)]

    def _take_out(self, counted: _Counted[At, View]) -> bool:
        try:
            self._others.remove(counted)
        except ValueError:  # a scan that ended meanwhile, on this thread, has it
            return False
        return True


class PinnedCommit(Generic[View]):
    """One snapshot with the calls of a follower; whoever pinned it closes it."""

    def __init__(self, view: View) -> None:
        self.current = view

    def refresh(self, *, wait: bool = True) -> None:
        """Stay: there is one commit."""

    @contextmanager
    def pinned(self, *, refresh: bool = False) -> Iterator[View]:
        yield self.current

    def close(self) -> None:
        """Leave it open: it is not ours."""
