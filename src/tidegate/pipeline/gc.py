"""Garbage collection of commits, plans, packs, parcels, source states and dead letters that no reader can need.

The last `KEPT` commits stay readable with everything they name. Other coordinators and attempts may still run:

G1  *Known dead.* Objects that only expiring commits name: names are unique to an attempt and never used again. They
    are removed at once, before the commits; after a crash in between the next pass removes the rest.
G2  *Delivered.* The parcels of commit N, once commit N+1 exists and does not carry them over.
G3  *Orphans.* Objects that no commit names are removed when older than the grace: a round that took longer than half
    of it is not committed (`coordinator`, M4), and commits are read after all objects were listed. If a chain of dead
    letters cannot be followed to its end, none are removed. Ages are measured by the store's clock, with a mark that
    each pass publishes; when that clock jumps, no orphans are removed for the grace time.
G4  *Plans* up to the newest commit decide nothing any more. Those of retained commits are kept with them.
G5  *Commits* older than the retained ones. A suspended coordinator that creates one again is fenced by the lease
    (`checkpoint`, R5), which is never removed.

A pass consists of many small steps, so that a round never waits long. The first one begins with a run, and is
completed when the run ends.

Thread rule: one coordinator, one thread.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from typing import Final

from tidegate.clock import Clock
from tidegate.errors import ConflictError, CorruptError, TidegateError, UnavailableError
from tidegate.pipeline.checkpoint import KEPT, CommitRecord, Records
from tidegate.pipeline.dead_letters import chain_of
from tidegate.storage.backends.base import TEMPORARY, MissingObjectError, ObjectInfo
from tidegate.storage.manifest import Token, is_task_object, reachable

STEP_MS: Final = 20
END_MS: Final = 10_000
REMOVED_AT_ONCE: Final = 100
_log = logging.getLogger(__name__)


class Collector:
    """Removes unneeded objects, a step at a time."""

    def __init__(self, records: Records, *, clock: Clock, grace_ms: int, every_ms: int) -> None:
        self._backend = records.backend
        self._records = records
        self._clock = clock
        self._grace_ms = grace_ms
        self._every_ms = every_ms
        self._due_ms = clock.monotonic_ms()
        self._steps: Iterator[None] | None = None
        self._first: tuple[int, int] | None = None  # store time and monotonic time of one moment
        self._trusted_ms = 0  # monotonic time from which on stamps give the age of objects
        self._told = ""  # why the last pass left something, as logged
        self._letters: set[str] = set()  # objects reached by complete chains of dead letters

    def superseded(self, before: CommitRecord, after: CommitRecord) -> None:
        """Note that a commit follows another: the parcels of the first are delivered (G2)."""
        carried = {each.parcel.name for each in after.deliveries}
        for each in before.deliveries:
            if each.parcel.name not in carried:
                self._remove(each.parcel.name)

    def step(self, budget_ms: int = STEP_MS) -> None:
        """Continue the current pass for a little while; begin one when it is due.

        A pass ends early if the store is unavailable, or if a kept commit is damaged, so that its needs are unknown;
        a later pass finds the remaining objects again.
        """
        begun_ms = self._clock.monotonic_ms()
        if self._first is None:
            self._store_time()
        if self._steps is None:
            if begun_ms < self._due_ms:
                return
            self._steps = self._pass()
        while self._clock.monotonic_ms() - begun_ms <= budget_ms:
            try:
                is_done = next(self._steps, self) is self
            except (CorruptError, UnavailableError) as error:
                is_done = True
                self._left(error)
            if is_done:
                self._steps = None
                self._due_ms = self._clock.monotonic_ms() + self._every_ms
                return

    def run(self) -> None:
        """Run a whole pass now."""
        for _ in self._pass():
            pass
        self._steps = None

    def finish(self, budget_ms: int = END_MS) -> None:
        """At the end of a run: finish the pass, then remove the commits since, within a time limit."""
        begun_ms = self._clock.monotonic_ms()
        self.step(budget_ms)
        try:
            for _ in self._forget():
                if self._clock.monotonic_ms() - begun_ms > budget_ms:
                    return
        except (CorruptError, UnavailableError) as error:
            self._left(error)

    def _left(self, error: TidegateError) -> None:
        if str(error) != self._told:
            _log.warning(
                "app %s: objects that it does not need are kept for now: %s", self._records.app, error
            )
        self._told = str(error)

    def _pass(self) -> Iterator[None]:
        yield from self._forget()
        yield from self._orphans()

    # -- known dead ------------------------------------------------------------------------------

    def _forget(self) -> Iterator[None]:
        """Delete commits older than the retained ones, after the objects that only they name (G1, G4, G5)."""
        rounds = self._records.rounds()
        kept, gone = rounds[-KEPT:], rounds[:-KEPT]
        if gone:
            retained = self._commits(kept)
            yield
            live: set[str] = set()
            for token in {line.token for commit in retained for line in commit.tasks if line.token}:
                live |= self._reachable(token, required=True)
                yield
            live |= {line.state_object for commit in retained for line in commit.sources if line.state_object}
            tokens: set[bytes] = {line.token for commit in retained for line in commit.tasks}
            for round in gone:
                for commit in self._commits([round], required=False):
                    dead = {line.state_object for line in commit.sources if line.state_object} - live
                    for line in commit.tasks:
                        if line.token and line.token not in tokens:
                            dead |= self._reachable(line.token, required=False) - live
                            tokens.add(line.token)
                    dead |= {each.parcel.name for each in commit.deliveries} - {
                        each.parcel.name for other in retained for each in other.deliveries
                    }
                    # Manifests first: none remains that names a deleted pack.
                    for name in sorted(dead, key=lambda name: ("/packs/" in name, name)):
                        self._remove(name)
                self._records.delete("commits", round)
                yield
        if kept:
            for round in self._records.numbers("plans"):
                if round < kept[0]:
                    self._records.delete("plans", round)
            yield

    def _commits(self, rounds: list[int], *, required: bool = True) -> list[CommitRecord]:
        found = []
        for round in rounds:
            try:
                found.append(self._records.load_commit(round))
            except CorruptError:
                if required:
                    raise  # its needs are unknown, so nothing may be removed
        return [each[0] for each in found if each is not None]

    def _reachable(self, token: bytes, *, required: bool) -> set[str]:
        try:
            return reachable(self._backend, Token.decode(token))
        except MissingObjectError:
            if required:
                raise
            return set()  # an interrupted pass had removed its manifest: the rest are orphans now

    # -- orphans ---------------------------------------------------------------------------------

    def _orphans(self) -> Iterator[None]:
        """Remove old objects that no commit names, a step at a time (G3)."""
        now_ms = self._store_time()
        if now_ms is None:
            return
        old = [
            each.name
            for each in self._listed()
            if now_ms - each.modified_ms >= self._grace_ms and self._may_be_an_orphan(each.name)
        ]
        yield
        named = yield from self._named(self._commits(self._records.rounds()), old)
        # Manifests first: none remains that names a deleted pack.
        orphans = sorted({*old} - named, key=lambda name: ("/packs/" in name, name))
        for number, name in enumerate(orphans):
            if number % REMOVED_AT_ONCE == 0:
                yield
            self._remove(name)

    def _named(self, commits: list[CommitRecord], names: list[str]) -> Generator[None, None, set[str]]:
        """Return what these commits need; and those of `names` that count as needed, too."""
        named = {line.state_object for commit in commits for line in commit.sources}
        named |= {each.parcel.name for commit in commits[-1:] for each in commit.deliveries}  # G2
        letters = {name for name in names if self._kind(name) == "letters"}
        if letters:
            yield
            named |= self._letters if self._follow_letters(commits) else letters
        for token in {line.token for commit in commits for line in commit.tasks if line.token}:
            yield
            named |= self._reachable(token, required=True)
        return named

    def unneeded(self) -> list[ObjectInfo]:
        """Return all objects that no kept commit needs, of any age: some may belong to a round in progress."""
        listed = [each for each in self._listed() if self._may_be_an_orphan(each.name)]
        finding = self._named(self._commits(self._records.rounds()[-KEPT:]), [each.name for each in listed])
        while True:
            try:
                next(finding)
            except StopIteration as found:
                return [each for each in listed if each.name not in found.value]

    def _listed(self) -> Iterator[ObjectInfo]:
        """List the app's records and the objects next to them, then the objects of its tasks, also of removed flows."""
        yield from self._backend.list(self._records.folder)
        yield from self._backend.list(self._records.app)

    def _store_time(self) -> int | None:
        """Return the store's clock; None where it says nothing about the age of objects."""
        try:
            found = self._backend.read_published(self._mark)
            self._backend.publish(self._mark, b"", expected=None if found is None else found[1])
        except (ConflictError, UnavailableError):
            return None  # another process publishes the mark, or the store is not writable now
        stamps = [
            each.modified_ms for each in self._backend.list(self._records.folder) if each.name == self._mark
        ]
        if not stamps:
            return None
        now_ms, monotonic_ms = stamps[0], self._clock.monotonic_ms()
        self._first = self._first or (now_ms, monotonic_ms)
        jumped_ms = (now_ms - self._first[0]) - (monotonic_ms - self._first[1])
        if 4 * abs(jumped_ms) > self._grace_ms:
            self._first, self._trusted_ms = (now_ms, monotonic_ms), monotonic_ms + self._grace_ms
            _log.warning(
                "app %s: the clock of its state's store jumped by %.0f s; objects that no commit needs are kept for "
                "%.0f s more, because their age is not known",
                self._records.app, jumped_ms / 1000, self._grace_ms / 1000,
            )  # fmt: skip
        return now_ms if monotonic_ms >= self._trusted_ms else None

    @property
    def _mark(self) -> str:
        return f"{self._records.folder}/collected"

    def _follow_letters(self, commits: list[CommitRecord]) -> bool:
        """Find which dead-letter objects the commits' sources reach; False where that is unknown now."""
        try:
            for commit in commits:
                for line in commit.sources:
                    state = self._records.state_of(line)
                    self._letters.update(chain_of(self._backend, state, self._letters))
        except (CorruptError, UnavailableError):
            return False
        return True

    def _may_be_an_orphan(self, name: str) -> bool:
        """Whether a commit would name the object if it counted, or an interrupted publish left it."""
        if not name.startswith(f"{self._records.folder}/"):
            return is_task_object(name)
        return self._kind(name) in ("parcels", "sources", "letters") or name.endswith(TEMPORARY)

    def _kind(self, name: str) -> str:
        """Return the app's folder that an object is in."""
        return name[len(self._records.folder) + 1 :].partition("/")[0]

    def _remove(self, name: str) -> None:
        try:
            self._backend.delete(name)
        except UnavailableError:
            pass  # unavailable for now: the next pass finds it again
