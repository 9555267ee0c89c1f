"""Push a version: create it, send its rows, finish it; and delete versions. The caller runs the tasks.

    create ─► topic, start of push ─► (tasks send) ─► end of push with manifests ─► (partitions are ingested)
           ─► ready ─► swap ─► retire what is too old;        an error or an interruption anywhere ─► failed, for good

P1  a version becomes current only after every partition was complete. One that is overtaken by a newer stays ready.
P2  a push that ends early marks its version failed; if its process was killed, the table's next push does.
P3  the log is open only while the driver writes, because an embedded log's partitions have one writer at a time.
D1  only versions that are retired in the record are deleted, so no reader begins with one any more; open readers have
    `grace_ms` before `collect` deletes. The entry is forgotten last, so a crash is followed by another attempt.
D2  partitions and replicas are identified by the topic that their commits name, not by their names.

Thread rule: one thread; the lease is renewed by another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tidegate.clock import Clock, SystemClock
from tidegate.errors import ConflictError, FencedError, InvalidError, TidegateError
from tidegate.integrity.control_records import Push
from tidegate.integrity.sender import ChainState, Sender
from tidegate.integrity.state import Manifest, Sent
from tidegate.log.catalog import check_topic_name
from tidegate.log.log import Log, is_kafka, open_log
from tidegate.randomness import Randomness, SystemRandomness
from tidegate.scheduling import Scheduler, ThreadScheduler
from tidegate.storage.backends.base import TEMPORARY, check_state_name
from tidegate.tables.commits import Lease, load_commits, read_lease
from tidegate.tables.snapshot import task_of
from tidegate.tables.versions.catalog import (
    Fault,
    PushFailedError,
    PushReport,
    State,
    TableVersion,
    Versions,
    push_lease_name,
    stored_replicas,
    superfluous,
    topic_of,
)
from tidegate.tables.versions.ingest import Ingested
from tidegate.waiting import waiting

if TYPE_CHECKING:
    from tidegate.storage.backends.base import StorageBackend


# --- pushing

LEASE_MS: Final = 30_000
TOPIC_SETTINGS: Final = {"cleanup.policy": "delete", "retention.ms": -1}
"""A version's records are kept as long as the version: they prove it, and replicas are made of them."""
Watch = Callable[[str], None]
"""Hears the name of each step when it is done: for progress, and for tests that kill a push there."""


@dataclass(frozen=True, slots=True)
class PushPlan:
    """The definition of a push: what is pushed, and what happens to it."""

    log: str
    table: str
    partitions: int
    key_serde: str
    value_serde: str
    source: str = ""
    swap: bool = True
    retain: int | None = None
    client: Mapping[str, str] = field(default_factory=dict)
    topic_settings: Mapping[str, Any] = field(default_factory=dict)
    patience_ms: int = 60_000
    """How long an attempt that is still at a partition is waited for (P3)."""

    def __post_init__(self) -> None:
        check_state_name("table", self.table)
        if self.partitions < 1:
            raise InvalidError(f"partitions={self.partitions}: a table has at least one")
        if self.retain is not None and self.retain < 1:
            raise InvalidError(f"retain={self.retain}: keep at least 1 version")

    def open_log(self) -> Any:
        """Open the log for writing, to be closed again soon (P3)."""
        return open_log(self.log, client=self.client or None) if is_kafka(self.log) else open_log(self.log)


class VersionPush:
    """One push; use it with `with`: leaving it before `finish` fails the version (P2)."""

    def __init__(
        self,
        backend: StorageBackend,
        plan: PushPlan,
        *,
        clock: Clock | None = None,
        randomness: Randomness | None = None,
        scheduler: Scheduler | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.plan = plan
        self.backend = backend
        self.clock = clock or SystemClock()
        self.versions = Versions(backend, plan.table, clock=self.clock)
        self._randomness = randomness or SystemRandomness()
        self._owns_scheduler = scheduler is None
        self._scheduler = scheduler or ThreadScheduler(self.clock, "tidegate-push")
        self._watch: Watch = watch or (lambda _: None)
        self.push = str(self._randomness.uuid())
        self.started_ms = self.clock.now_ms()
        self._guid = self._randomness.uuid().bytes
        self._positions: dict[int, ChainState] = {}
        self._lost: TidegateError | None = None
        self._ended = False
        self._lease = self._lease_of(self.push)
        self._renewing: Any = None
        self._version: TableVersion | None = None

    @property
    def version(self) -> TableVersion:
        if self._version is None:
            raise ConflictError("this push has not begun; use it with `with`")
        return self._version

    def __enter__(self) -> VersionPush:
        self._lease.acquire()  # a new name, taken before the version exists, so that it never looks abandoned
        self._renewing = self._scheduler.every(
            LEASE_MS // 3, self._renew, "push lease", initial_delay_ms=LEASE_MS // 3
        )
        try:
            fail_abandoned(self.versions, self._lease_of)
            self._create()
        except BaseException:
            self._let_go()
            raise
        self._watch("created")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        try:
            if not self._ended and self._version is not None:
                self._fail_for(error)
        finally:
            self._let_go()

    # -- steps -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Create the topic and write the start of push to every partition."""
        with self.plan.open_log() as log:
            settings = {**TOPIC_SETTINGS, **self.plan.topic_settings}
            log.create_topic(self.version.topic, self.plan.partitions, settings)
            self._watch("topic")
            sender = self._sender(log)
            try:
                Push(sender, is_sorted=True).start()
                self._positions = {number: sender.position(number) for number in range(self.plan.partitions)}
            finally:
                sender.close(graceful=False)
        self._watch("started")

    def end(self, sent: Mapping[int, Sequence[Sent]], **counted: int) -> TableVersion:
        """Write to every partition what it must have received: all that its tasks' counted attempts sent."""
        self._check()
        manifests = {partition: Manifest.of(winners) for partition, winners in sent.items()}
        with self.plan.open_log() as log:
            if isinstance(log, Log):
                for number in range(self.plan.partitions):
                    opening = partial(log.open_partition, self.version.topic, number)
                    waiting(self.clock, self.plan.patience_ms, opening)
            with self._sender(log) as sender:
                Push(sender, is_sorted=True).end(manifests)
        self._version = self.versions.mark(
            self.version.number, State.INGESTING, pushed_ms=self.clock.now_ms(), **counted
        )
        self._watch("ended")
        return self.version

    def finish(self, ingested: Sequence[Ingested]) -> PushReport:
        """Check the version's partitions: make it current, or raise `PushFailedError` with what is wrong (P1)."""
        self._check()
        results = tuple(sorted((each.result for each in ingested), key=lambda result: result.partition))
        faults = [each.fault for each in ingested if each.fault is not None]
        complete = {result.partition for result in results if result.is_complete}
        for partition in sorted(
            set(range(self.plan.partitions)) - complete - {each.partition for each in faults}
        ):
            faults.append(Fault(partition, "unfinished", f"partition {partition} was not ingested"))
        verdicts: dict[str, int] = {}
        for result in results:
            for name, count in result.verdicts.items():
                verdicts[name] = verdicts.get(name, 0) + count
        known = {
            "results": results,
            "verdicts": verdicts,
            "rows": sum(result.rows for result in results),
            "ended_ms": self.clock.now_ms(),
        }
        if faults:
            self._ended = True
            self._version = self.versions.mark(
                self.version.number, State.FAILED, faults=tuple(faults), **known
            )
            raise PushFailedError(self._report(is_current=False))
        self._check_commits(results)
        self._version = self.versions.mark(self.version.number, State.READY, **known)
        self._ended = True
        self._watch("ready")
        is_current = self.plan.swap and self.versions.swap_if_newer(self.version.number)
        self._watch("swapped" if is_current else "kept")
        if self.plan.retain is not None:
            self.retain(self.plan.retain)
        return self._report(is_current=is_current)

    def retain(self, count: int) -> list[int]:
        """Retire versions beyond `count`, and delete those that were retired long enough ago."""
        for number in superfluous(self.versions.list(), count):
            self.versions.retire(number)
        with self.plan.open_log() as log:
            return collect(self.versions, log, clock=self.clock)

    # -- inside ----------------------------------------------------------------------------------

    def _create(self) -> None:
        plan = self.plan
        number = self.versions.list().next_number
        if load_commits(self.backend, plan.table) is not None:
            raise InvalidError(
                f"{plan.table} is a table that follows a topic; push into a table of another name, or another state "
                "folder"
            )
        topic = check_topic_name(topic_of(plan.table, number))
        with plan.open_log() as log:
            if topic in log.topics():
                raise InvalidError(
                    f"topic {topic} is there already, and is not of a push of table {plan.table}: delete it if nobody "
                    "needs it, or push into a table of another name"
                )
        self._version = self.versions.create(
            self.push,
            partitions=plan.partitions,
            key_serde=plan.key_serde,
            value_serde=plan.value_serde,
            source=plan.source,
        )

    def _sender(self, log: Any) -> Sender:
        return Sender(
            log.writer(self.version.topic),
            partitions=self.plan.partitions,
            guid=self._guid,
            positions=self._positions,
            app=f"push into {self.plan.table}",
            clock=self.clock,
            randomness=self._randomness,
        )

    def _check_commits(self, results: Sequence[Any]) -> None:
        """Check that each partition's last commit is the one its ingest returned: no other process has built it
        meanwhile."""
        for result in results:
            found = load_commits(self.backend, self.version.shape(result.partition).name)
            newest = found[0].commits[-1] if found is not None and found[0].commits else None
            if newest is None or newest.positions != {result.partition: result.next_offset}:
                raise FencedError(
                    f"partition {result.partition} of {self.version.name} was committed by somebody else; push again"
                )

    def _report(self, *, is_current: bool) -> PushReport:
        known = self.versions.list()
        return PushReport(self.plan.table, self.version, is_current, known.current, self.plan.log)

    def _fail_for(self, error: BaseException | None) -> None:
        """Fail the version of a push that ended early (P2)."""
        kind = "interrupted" if error is None or not isinstance(error, Exception) else type(error).__name__
        said = str(error) if error is not None and str(error) else "the push was interrupted before its end"
        try:
            self._version = self.versions.mark(
                self.version.number,
                State.FAILED,
                faults=(Fault(-1, kind, said[:4000]),),
                ended_ms=self.clock.now_ms(),
            )
        except TidegateError as trouble:
            if error is not None:
                error.add_note(
                    f"the version could not be marked failed ({trouble}); the next push will do it"
                )

    def _lease_of(self, push: str) -> Lease:
        return Lease(
            self.backend,
            push_lease_name(self.plan.table, push),
            clock=self.clock,
            randomness=self._randomness,
            ttl_ms=LEASE_MS,
        )

    def _renew(self) -> None:
        try:
            self._lease.keep()
        except FencedError as error:
            self._lost = error
        except TidegateError:
            pass  # briefly unavailable: the next renewal tries again

    def _check(self) -> None:
        if self._lost is not None:
            raise FencedError(
                f"{self.version.name} was taken for abandoned by another push, and is failed; push again"
            ) from self._lost

    def _let_go(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
        if self._owns_scheduler:
            self._scheduler.close()
        if self._lost is None:
            self.backend.delete(push_lease_name(self.plan.table, self.push))


def fail_abandoned(versions: Versions, lease_of: Callable[[str], Lease]) -> list[int]:
    """Mark versions failed whose push is gone: its process died, or did not renew its lease for too long.

    Leases of pushes that are gone are deleted, also older ones.
    """
    failed, folder = [], push_lease_name(versions.table, "")
    for each in versions.list().versions:
        if each.state not in (State.PUSHING, State.INGESTING):
            continue
        lease = lease_of(each.push)
        if lease.acquire() is not None:
            continue  # another process is working on it
        said = "its process ended before the push did; what it sent is in its topic, and is not used"
        try:
            versions.mark(each.number, State.FAILED, faults=(Fault(-1, "abandoned", said),))
        except ConflictError:
            pass  # it completed after all
        else:
            failed.append(each.number)
        finally:
            lease.release()  # and deleted below
    at_work = {
        each.push for each in versions.list().versions if each.state in (State.PUSHING, State.INGESTING)
    }
    for found in list(versions.backend.list(folder.rstrip("/"))):
        push = found.name.removeprefix(folder)
        if push in at_work or found.name.endswith(TEMPORARY):
            continue
        held = read_lease(versions.backend, found.name)
        if held is not None and not lease_of(push).is_alive(held[0]):
            versions.backend.delete(found.name)  # a push that resumes finds it gone, and is fenced
    return failed


# --- deleting

GRACE_MS: Final = 60_000


def files_of(backend: StorageBackend, version: TableVersion) -> list[tuple[str, int]]:
    """Return the stored objects of a version and its replicas, with sizes; its commits and leases last (D2)."""
    packs, published = [], []
    for name in stored_replicas(backend, version.topic):
        packs += [(each.name, each.size) for each in backend.list(name)]
        published += [(each.name, each.size) for each in backend.list(f"tables/{name}")]
    folder = (
        f"tables/{version.topic}"  # a table of a process that only reads the version topic may have it, too
    )
    ours = (f"{folder}/replicas/", f"{folder}/leader-")
    published += [(each.name, each.size) for each in backend.list(folder) if each.name.startswith(ours)]
    for partition in range(version.partitions):
        shape = version.shape(partition)
        stored = load_commits(backend, shape.name)
        if stored is not None and stored[0].shape.topic != version.topic:
            continue  # a different table with this name
        packs += [(each.name, each.size) for each in backend.list(task_of(shape))]
        published += [(each.name, each.size) for each in backend.list(f"tables/{shape.name}")]
    return [*packs, *published]


def delete_version(versions: Versions, log: Any, number: int) -> int:
    """Retire a version if needed, delete its topic and files, and forget it; return the bytes of state freed."""
    versions.require()
    version = versions.list().get(number)
    if version.state is not State.RETIRED:
        version = versions.retire(number).get(number)
    freed = 0
    for name, size in files_of(versions.backend, version):
        versions.backend.delete(name)
        freed += size
    versions.backend.delete(push_lease_name(versions.table, version.push))
    if version.topic in log.topics():
        log.delete_topic(version.topic)
    versions.forget(number)
    return freed


def collect(
    versions: Versions, log: Any, *, grace_ms: int = GRACE_MS, clock: Clock | None = None
) -> list[int]:
    """Delete the versions that were retired at least `grace_ms` ago; return their numbers (D1)."""
    now_ms = (clock or SystemClock()).now_ms()
    gone = []
    for each in versions.list().versions:
        if each.state is State.RETIRED and now_ms - each.ended_ms >= grace_ms:
            try:
                delete_version(versions, log, each.number)
            except TidegateError:
                continue  # in use, or unavailable: the next one tries again
            gone.append(each.number)
    return gone
