"""`hybrid_table`: a pushed version of a table that follows a live topic, served by one of several replicas.

Every process that opens the version is a replica: it drains the version topic into rows of its own, answers queries
from them, and may be the leader of partitions, which copies the live topic into the version topic. Which one leads
is decided by a lease for each partition; that no two leaders' effects mix is decided by the version topic itself
(`replica`, F1).

Replicas are stored as tables `<version topic>.<replica>`, each with its commits, so any process can read the last
commit of any of them.

Thread rule: that of `Table`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from tidegate.clock import Clock, SystemClock
from tidegate.durations import DurationLike, duration_ms, milliseconds
from tidegate.errors import InvalidError, UnavailableError
from tidegate.files import Files
from tidegate.integrity import Role
from tidegate.integrity.replica import CheckpointCadence
from tidegate.integrity.state import NEVER
from tidegate.randomness import Randomness, SystemRandomness
from tidegate.scheduling import Scheduler
from tidegate.storage import StorageConfig, open_backend
from tidegate.tables.commits import DEFAULT_TTL_MS
from tidegate.tables.factories import KeyTable
from tidegate.tables.hybrid.leader import Live, Serving
from tidegate.tables.hybrid.replica import Following
from tidegate.tables.hybrid.status import ReplicaStatus, Served, served_version
from tidegate.tables.ingest.consumer import first_and_end
from tidegate.tables.ingest.materializer import Cadence, Claim, Materialiser
from tidegate.tables.options import Consumed, Materialized, table_rules
from tidegate.tables.serdes.json import stored_serde
from tidegate.tables.versions.catalog import replica_table

if TYPE_CHECKING:
    from tidegate.storage.backends.base import StorageBackend

MOST_REPLICAS: Final = 64
DEFAULT_REWIND: Final = "1d"
NO_BYTES: Final = 1 << 60


class HybridTable(KeyTable):
    """One replica of a hybrid table: the queries of `table`, and the partitions it leads."""

    serving: Serving

    @property
    def replica(self) -> str:
        return self.serving.replica

    @property
    def version(self) -> str:
        """The version topic."""
        return self.serving.version

    @property
    def roles(self) -> dict[int, Role]:
        """Partition → the role of this replica."""
        return self.serving.roles

    def status(self) -> ReplicaStatus:
        """Role, epoch, lag and faults of every partition."""
        return self.serving.status()

    def step(self) -> bool:
        """Drain, commit and lead a little, on this thread; return whether there was anything to do."""
        self._check_open()
        return self.serving.step()

    def follow(self) -> None:
        """Drain, commit and lead in the background."""
        self._check_open()
        self.serving.run()

    def check(self) -> None:
        """Raise the error that stopped this replica, if any; a single partition's fault is in its status."""
        if self.serving.error is not None:
            raise self.serving.error
        if self._builder is not None:
            self._builder.check()

    def catch_up(self, timeout: int | DurationLike = "60s") -> dict[int, int]:
        """Read everything that is in the version topic now; return the position then."""
        self.check()
        return super().catch_up(timeout)

    def close(self, *, save: bool = True) -> None:
        """Stop leading, commit what is drained, and close; with `save=False` without the commit."""
        if self._closed:
            return
        try:
            self.serving.stop()
        finally:
            if not save and self._builder is not None:
                self._builder.forget()
            super().close()
            for each in self.serving.leading.values():
                each.following.replica.to_offline()


def hybrid_table(
    log: Any,
    name: str,
    *,
    live: str,
    rewind: DurationLike = DEFAULT_REWIND,
    rewind_from: Literal["end", "start"] = "end",
    state: str | Path | StorageBackend,
    replica: str | None = None,
    partitions: Sequence[int] | None = None,
    consumed: Consumed | None = None,
    max_age: DurationLike | None = None,
    follow: bool = False,
    commit_interval: DurationLike = "5s",
    lease_ttl: int | DurationLike = DEFAULT_TTL_MS,
    heartbeat: DurationLike = "2s",
    state_bytes: int = 32 << 20,
    hold: DurationLike = "200ms",
    checkpoints: Callable[[], CheckpointCadence] = CheckpointCadence,
    storage: StorageConfig | None = None,
    files: Files | None = None,
    clock: Clock | None = None,
    randomness: Randomness | None = None,
    scheduler: Scheduler | None = None,
) -> HybridTable:
    """Open a replica of `name`, which continues with the topic `live` from `rewind` before the push ended.

    `name` is a table, whose current version is served as long as this replica lives, or a version topic. `state` is
    shared by all replicas: a folder or an object store. `replica` names this one's rows there; without it the first
    free name is taken. `partitions` are those to replicate, all by default. `max_age` is how long a silent producer
    is remembered, at least `rewind`; without it, for ever. With `follow` it drains and leads in the background; else
    call `step`.
    """
    owns_log = isinstance(log, str | Path)
    if owns_log:
        from tidegate.log.log import open_log

        log = open_log(str(log))
    clock = clock or getattr(log, "clock", None) or SystemClock()
    randomness = randomness or getattr(log, "randomness", None) or SystemRandomness()
    owns = isinstance(state, str | Path)
    backend: Any = None
    try:
        backend = (
            open_backend(state, files=files, clock=clock, randomness=randomness)  # type: ignore[arg-type]
            if owns
            else state
        )
        served = served_version(backend, name)
        version = served.topic
        consumed = _serdes(served, consumed)
        numbers, rewind_ms = _checked(log, version, live, partitions, rewind, rewind_from, consumed)
        following = partial(
            Following,
            max_age_ms=NEVER if max_age is None else duration_ms(max_age),
            rewind_ms=rewind_ms,
            cadence=checkpoints,
        )
        names = [replica] if replica is not None else [f"r{number}" for number in range(MOST_REPLICAS)]
        builder, chosen = _claimed(
            log,
            names,
            lambda each: Claim(
                log,
                table_rules(
                    "key",
                    version,
                    numbers,
                    consumed=consumed,
                    materialized=Materialized(replica_table(version, each)),
                ),
                backend,
                cadence=Cadence(commit_interval_ms=duration_ms(commit_interval), commit_bytes=NO_BYTES),
                storage=storage,
                lease_ttl_ms=milliseconds(lease_ttl),
                clock=clock,
                randomness=randomness,
                scheduler=scheduler,
                validation_of=following,
            ),
            version,
        )
    except BaseException:
        if owns and backend is not None:
            backend.close()
        if owns_log:
            log.close()
        raise
    table = HybridTable(
        builder.source.rules, backend, log, builder=builder, clock=clock, owns_backend=owns, owns_log=owns_log
    )
    table.serving = Serving(
        log,
        builder,
        Live(live, rewind_ms, rewind_from, state_bytes=state_bytes, hold_ms=duration_ms(hold)),
        backend,
        chosen,
        lease_ttl_ms=milliseconds(lease_ttl),
        heartbeat_ms=duration_ms(heartbeat),
        clock=clock,
        randomness=randomness,
    )
    try:
        if builder.commits.newest is None:
            builder.commit()  # so that readers find the replica
        if follow:
            table.follow()
    except BaseException:
        table.close()
        raise
    return table


def _serdes(served: Served, consumed: Consumed | None) -> Consumed:
    """Return the serdes of keys and values: those given, else those of the push."""
    given = consumed or Consumed()
    if served.version is None:
        return given
    return replace(
        given,
        key=given.key or stored_serde(served.version.key_serde),
        value=given.value or stored_serde(served.version.value_serde),
    )


def _checked(
    log: Any,
    version: str,
    live: str,
    partitions: Sequence[int] | None,
    rewind: DurationLike,
    rewind_from: str,
    consumed: Consumed | None,
) -> tuple[tuple[int, ...], int]:
    """Return the partitions and the rewind in ms, after refusing invalid arguments."""
    if rewind_from not in ("end", "start"):
        raise InvalidError(f"rewind_from={rewind_from!r}: choose 'end' or 'start'")
    if consumed is not None and consumed.isolation != "read_uncommitted":
        raise InvalidError("a version topic has no transactions; leave isolation at read_uncommitted")
    there, source = log.describe(version), log.describe(live)
    if version == live:
        raise InvalidError(f"{version} cannot be its own live topic")
    if there.partitions != source.partitions:
        raise InvalidError(
            f"{version} has {there.partitions} partitions and {live} {source.partitions}: a key must lie in the same "
            "partition of both; push the table with as many partitions as its live topic has"
        )
    if there.config.compacts:
        raise InvalidError(
            f"{version} is compacted: of a key's records compaction keeps the last, which may be one that does not "
            "count. Set cleanup.policy=delete for version topics of hybrid tables"
        )
    numbers = tuple(there.partition_numbers if partitions is None else sorted(set(partitions)))
    unknown = set(numbers) - set(there.partition_numbers)
    if unknown or not numbers:
        raise InvalidError(f"{version} has no partition {min(unknown, default='to serve')}")
    return numbers, duration_ms(rewind)


def _claimed(log: Any, names: Sequence[str], claim_of: Any, version: str) -> tuple[Materialiser, str]:
    """Return the first of these replicas that no process serves."""
    for name in names:
        claim = claim_of(name)
        builder = claim.attempt()
        if builder is not None:
            try:
                _require_head(log, builder)
            except BaseException:
                builder.close()
                builder.source.runtime.close()
                raise
            return builder, name
    held = claim.held
    who = "another process" if held is None else f"process {held.pid} on {held.host}"
    raise UnavailableError(
        f"replica {names[-1]} of {version} is served by {who}; give this one another name, or none"
    )


def _require_head(log: Any, builder: Materialiser) -> None:
    """Check that the version topic can be read from its beginning, or from the replica's own commit on."""
    for state in builder.source.partitions:
        topic, number = state.shape.topic, state.partition
        first, _ = first_and_end(log, topic, number)
        if first > state.next_offset or state.counts.skipped_offsets:
            raise InvalidError(
                f"{topic}-{number} begins at offset {first} and this replica has drained it up to {state.next_offset}: "
                "a version topic must keep all its records. Push a new version, with retention.ms=-1"
            )
