"""What may go: records, tokens' packs, parcels, source states and dead letters that nobody can need any more.

The last `KEPT` commits stay readable with all they name. What is removed, and why that is safe while other masters,
attempts and zombies may be about:

G1  *Known dead.* Objects that commits about to be forgotten name and no retained commit does. Names are unique to an
    attempt and a committed object is never named again, so nobody can come to need them. They go at once, and
    before the commits that name them; a crash in between is made good by the next pass.
G2  *Delivered.* The parcels of commit N, once commit N+1 exists and does not carry them over: the round after a
    commit is committed only when the commit's parcels are in the log. At once.
G3  *Orphans.* Objects that no commit names: of attempts that died or lost, or that a task wrote and merged away. They
    go when they are older than the grace. A round that took longer than half of it is not committed (`master`), and
    commits are read after the objects were listed; so what is old and unnamed then stays unnamed for ever, even
    if whoever removes it was asleep in between. Dead letters are named by the states of sources and by each other;
    where one of these chains cannot be followed to its end, no letters go.
G4  *Plans* up to the newest commit decide nothing any more. Those of retained commits are kept with them.
G5  *Commits* older than the retained ones. A master that slept through their removal and creates one again is told
    by the lease (`records`, R5): the lease itself is never removed, and its epoch never falls.

One pass is many small steps, so that a round never waits long for it.

Thread rule: one master, one thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final
from urllib.parse import unquote

from tidegate.clock import Clock
from tidegate.errors import CorruptError, UnavailableError
from tidegate.pipeline.rounds.records import KEPT, CommitRecord, Records
from tidegate.pipeline.tasks.letters import chain_of
from tidegate.pipeline.tasks.names import storage_task
from tidegate.storage.backends.port import TEMPORARY, MissingObjectError, StorageBackend
from tidegate.storage.packs.garbage import collect_garbage, reachable
from tidegate.storage.packs.token import Token

STEP_MS: Final = 20


class Collector:
    """Removes what may go, a step at a time."""

    def __init__(
        self, backend: StorageBackend, records: Records, *, clock: Clock, grace_ms: int, every_ms: int
    ) -> None:
        self._backend = backend
        self._records = records
        self._clock = clock
        self._grace_ms = grace_ms
        self._every_ms = every_ms
        self._due_ms = clock.monotonic_ms() + every_ms
        self._steps: Iterator[None] | None = None
        self._letters: set[str] = (
            set()
        )  # objects of letters that a chain was seen to reach, whole chains only

    def superseded(self, before: CommitRecord, after: CommitRecord) -> None:
        """A commit follows another: the parcels of the first are in the log (G2)."""
        carried = {each.parcel.name for each in after.deliveries}
        for each in before.deliveries:
            if each.parcel.name not in carried:
                self._remove(each.parcel.name)

    def step(self, budget_ms: int = STEP_MS) -> None:
        """Go on with the current pass for a little while; begin one when it is time."""
        begun_ms = self._clock.monotonic_ms()
        if self._steps is None:
            if begun_ms < self._due_ms:
                return
            self._steps = self._pass()
        while self._clock.monotonic_ms() - begun_ms <= budget_ms:
            if next(self._steps, self) is self:
                self._steps = None
                self._due_ms = self._clock.monotonic_ms() + self._every_ms
                return

    def run(self) -> None:
        """A whole pass now."""
        for _ in self._pass():
            pass
        self._steps = None

    def _pass(self) -> Iterator[None]:
        yield from self._forget()
        yield from self._orphans()

    # -- known dead ------------------------------------------------------------------------------

    def _forget(self) -> Iterator[None]:
        """Let go of commits behind the retained ones, what only they name first (G1, G4, G5)."""
        rounds = self._records.rounds()
        kept, gone = rounds[-KEPT:], rounds[:-KEPT]
        if gone:
            retained = self._commits(kept)
            yield
            live: set[str] = set()
            for token in {line.token for commit in retained for line in commit.tasks if line.token}:
                live |= self._reachable(token, required=True)
                yield
            live |= {line.apart for commit in retained for line in commit.sources if line.apart}
            tokens: set[bytes] = {line.token for commit in retained for line in commit.tasks}
            for round in gone:
                for commit in self._commits([round]):
                    dead = {line.apart for line in commit.sources if line.apart} - live
                    for line in commit.tasks:
                        if line.token and line.token not in tokens:
                            dead |= self._reachable(line.token, required=False) - live
                            tokens.add(line.token)
                    dead |= {each.parcel.name for each in commit.deliveries} - {
                        each.parcel.name for other in retained for each in other.deliveries
                    }
                    # Manifests first: none is left behind that names a pack which is gone.
                    for name in sorted(dead, key=lambda name: ("/packs/" in name, name)):
                        self._remove(name)
                self._records.delete("commits", round)
                yield
        if kept:
            for round in self._records.numbers("plans"):
                if round < kept[0]:
                    self._records.delete("plans", round)
            yield

    def _commits(self, rounds: list[int]) -> list[CommitRecord]:
        found = (self._records.load_commit(round) for round in rounds)
        return [each[0] for each in found if each is not None]

    def _reachable(self, token: bytes, *, required: bool) -> set[str]:
        try:
            return reachable(self._backend, Token.decode(token))
        except MissingObjectError:
            if required:
                raise
            return set()  # a pass that died half-way had removed its manifest: the rest are orphans now

    # -- orphans ---------------------------------------------------------------------------------

    def _orphans(self) -> Iterator[None]:
        """What no commit names and is old (G3)."""
        now_ms = self._clock.now_ms()
        old = [
            each.name
            for each in self._backend.list(self._records.folder)
            if now_ms - each.modified_ms >= self._grace_ms and self._may_be_an_orphan(each.name)
        ]
        yield
        tasks = self._stored_tasks()
        yield
        commits = self._commits(self._records.rounds())
        named = {line.apart for commit in commits for line in commit.sources}
        named |= {each.parcel.name for commit in commits[-1:] for each in commit.deliveries}  # G2
        letters = {name for name in old if self._kind(name) == "letters"}
        if letters:
            yield
            named |= self._letters if self._follow_letters(commits) else letters
        for name in old:
            if name not in named:
                self._remove(name)
        yield
        held: dict[str, list[bytes]] = {task: [] for task in tasks}
        for commit in commits:
            for line in commit.tasks:
                tokens = held.setdefault(storage_task(self._records.app, line.flow, line.task), [])
                if line.token and line.token not in tokens:
                    tokens.append(line.token)
        for task, tokens in sorted(held.items()):
            collect_garbage(self._backend, task, tokens, grace_ms=self._grace_ms, now_ms=now_ms)
            yield

    def _follow_letters(self, commits: list[CommitRecord]) -> bool:
        """Learn which objects of letters the commits' sources reach; False where that cannot be said now."""
        try:
            for commit in commits:
                for line in commit.sources:
                    state = self._records.state_of(line)
                    self._letters.update(chain_of(self._backend, state, self._letters))
        except (CorruptError, UnavailableError):
            return False
        return True

    def _may_be_an_orphan(self, name: str) -> bool:
        """Whether a commit would name it if it counted; or it is what a publish that died left behind."""
        return self._kind(name) in ("parcels", "sources", "letters") or name.endswith(TEMPORARY)

    def _kind(self, name: str) -> str:
        """The folder of the app's that an object lies in."""
        return name[len(self._records.folder) + 1 :].partition("/")[0]

    def _stored_tasks(self) -> set[str]:
        """Tasks that have objects in storage, also those of flows that are gone."""
        found = set()
        for each in self._backend.list(self._records.app):
            parts = each.name.split("/")
            if len(parts) > 3:
                found.add("/".join(unquote(part) for part in parts[:3]))
        return found

    def _remove(self, name: str) -> None:
        try:
            self._backend.delete(name)
        except UnavailableError:
            pass  # out of reach for now: the next pass finds it again
