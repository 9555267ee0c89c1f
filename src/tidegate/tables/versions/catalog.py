"""Versions of a table: their record, the catalog that publishes it, and why one failed.

    pushing ──► ingesting ──► ready ──► retired ──► (gone)
        └───────────┴──► failed ──────────┘

V1  only a `ready` version is ever current, and the current one is never retired: readers never see a half version.
V2  a number is given out once, also if its version is gone.
V3  a state moves forward along the arrows only. A push that was presumed dead finds its version failed.
C1  every change is one compare-and-swap of one small record, `tables/T/versions`: a pure function of the current one,
    repeated if another process was faster. Reading takes no lock.

Thread rule: values and pure functions; the catalog from any thread.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from tidegate.clock import Clock, SystemClock
from tidegate.errors import ConflictError, CorruptError, IntegrityError, InvalidError
from tidegate.integrity.columns import IntegrityColumns, read_columns
from tidegate.integrity.state import PartitionState
from tidegate.integrity.verdicts import Finding, Rule, Verdict
from tidegate.kernels.integrity import MANAGED
from tidegate.tables.commits import CommitList, load_commits, read_record, stored_tables
from tidegate.tables.options import TableShape

if TYPE_CHECKING:
    from tidegate.storage.backends.base import StorageBackend


# --- record

VERSION: Final = 1
KEPT_SWAPS: Final = 100
"""Swaps that are remembered; of older ones only the order of versions is left."""


class State(StrEnum):
    """The state of a version."""

    PUSHING = "pushing"
    INGESTING = "ingesting"
    READY = "ready"
    FAILED = "failed"
    RETIRED = "retired"


_NEXT: Final = {
    State.PUSHING: {State.INGESTING, State.FAILED},
    State.INGESTING: {State.READY, State.FAILED},
    State.READY: {State.RETIRED},
    State.FAILED: {State.RETIRED},
    State.RETIRED: set[State](),
}


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Why a partition (or, with partition -1, the whole push) failed: what, where, which producer, and the next
    commands."""

    partition: int
    kind: str
    """A verdict in small letters, as `missing` and `corrupt`; or the name of the error."""
    message: str
    offset: int = -1
    producer: str = ""


class PartitionResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One partition after its ingest: `next_offset` is the one after the last record that is in the version."""

    partition: int
    rows: int = 0
    records: int = 0
    next_offset: int = 0
    end_of_push: int = -1
    verdicts: dict[str, int] = {}
    is_complete: bool = False


class TableVersion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One version: its topic, its push, its state and the findings. Times that are not known yet are 0."""

    number: int
    topic: str
    push: str
    state: State
    partitions: int
    key_serde: str
    value_serde: str
    source: str = ""
    created_ms: int = 0
    pushed_ms: int = 0
    ended_ms: int = 0
    rows: int = 0
    nbytes: int = 0
    repeated_keys: int = 0
    """Rows of the source that another one with the same key stood for."""
    without_key: int = 0
    verdicts: dict[str, int] = {}
    results: tuple[PartitionResult, ...] = ()
    faults: tuple[Fault, ...] = ()

    @property
    def name(self) -> str:
        """The name of the version: that of its topic."""
        return self.topic

    def shape(self, partition: int) -> TableShape:
        """The shape of one partition of the version, which is a stored table with its own lease and commits."""
        return TableShape(
            kind="key",
            name=partition_table(self.topic, partition),
            topic=self.topic,
            partitions=(partition,),
            key_format="",
            size_ms=0,
            retention_ms=0,
            key_serde=self.key_serde,
            value_serde=self.value_serde,
        )


class Swap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One change of the current version; 0 for no version."""

    at_ms: int
    before: int
    after: int
    reason: str


class VersionList(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All versions of one table, oldest first. `current` is what readers see, `previous` what a rollback returns to."""

    version: int
    table: str
    next_number: int = 1
    current: int = 0
    previous: int = 0
    versions: tuple[TableVersion, ...] = ()
    swaps: tuple[Swap, ...] = ()

    def get(self, number: int) -> TableVersion:
        """Return the version of this number, or raise an `InvalidError` that says which exist."""
        for each in self.versions:
            if each.number == number:
                return each
        known = ", ".join(str(each.number) for each in self.versions) or "none"
        raise InvalidError(f"table {self.table} has no version {number}; there are {known}")

    @property
    def current_version(self) -> TableVersion | None:
        return self.get(self.current) if self.current else None


def topic_of(table: str, number: int) -> str:
    """Return the topic of a version, which is also its name."""
    return f"{table}_v{number}"


def partition_table(topic: str, partition: int) -> str:
    """Return the name of the stored table of one partition of a version."""
    return f"{topic}-{partition}"


# -- changes -----------------------------------------------------------------------------------------


def created(known: VersionList, push: str, now_ms: int, **fields: object) -> VersionList:
    """Add a version with the next number (V2)."""
    number = known.next_number
    made = TableVersion(
        number=number,
        topic=topic_of(known.table, number),
        push=push,
        state=State.PUSHING,
        created_ms=now_ms,
        **fields,  # type: ignore[arg-type]
    )
    return replace(known, next_number=number + 1, versions=(*known.versions, made))


def marked(known: VersionList, number: int, state: State, **fields: object) -> VersionList:
    """Set the state of one version (V1, V3), and its results."""
    found = known.get(number)
    if state is not found.state and state not in _NEXT[found.state]:
        raise ConflictError(
            f"version {number} of table {known.table} is {found.state.value} and cannot become {state.value}"
            + ("; push again for a new one" if found.state is State.FAILED else "")
        )
    if state is State.RETIRED and number == known.current:
        raise ConflictError(
            f"version {number} of table {known.table} is the one readers see; swap another in first"
        )
    return _with(known, replace(found, state=state, **fields))


def swapped(known: VersionList, number: int, reason: str, now_ms: int) -> VersionList:
    """Make another version current (V1); a rollback returns to the one before."""
    found = known.get(number)
    if found.state is not State.READY:
        raise ConflictError(
            f"version {number} of table {known.table} is {found.state.value}; only a version that is ready can be shown"
        )
    if number == known.current:
        return known
    swap = Swap(now_ms, known.current, number, reason)
    return replace(known, current=number, previous=known.current, swaps=(*known.swaps, swap)[-KEPT_SWAPS:])


def rolled_back(known: VersionList, now_ms: int) -> VersionList:
    """Make the previous version current; a second rollback returns to the one before that call."""
    if not known.previous:
        raise ConflictError(
            f"table {known.table} showed no other version before; there is nothing to go back to"
        )
    return swapped(known, known.previous, "rollback", now_ms)


def forgotten(known: VersionList, number: int) -> VersionList:
    """Remove a version whose files are gone."""
    if known.get(number).state is not State.RETIRED:
        raise ConflictError(f"version {number} of table {known.table} is not retired; retire it first")
    left = tuple(each for each in known.versions if each.number != number)
    return replace(known, versions=left, previous=0 if known.previous == number else known.previous)


def superfluous(known: VersionList, retain: int) -> list[int]:
    """Return the versions that may be removed if `retain` ready ones are kept: the current and the previous one
    always stay, and the newest failed one, for diagnosis."""
    if retain < 1:
        raise InvalidError(f"retain={retain}: keep at least 1 version")
    kept = {known.current, known.previous} - {0}
    ready = [each.number for each in known.versions if each.state is State.READY]
    for number in reversed(ready):
        if len(kept & set(ready)) >= retain:
            break
        kept.add(number)
    # A newer version that was never current waits for its swap.
    kept |= {number for number in ready if number > known.current}
    failed = [each.number for each in known.versions if each.state is State.FAILED]
    return sorted({*ready, *failed[:-1]} - kept)


def _with(known: VersionList, changed: TableVersion) -> VersionList:
    versions = tuple(changed if each.number == changed.number else each for each in known.versions)
    return replace(known, versions=versions)


# --- report

UNFINISHED: Final = "unfinished"
LATE: Final = "late"
UNLISTED: Final = "unlisted"
COMPACTED: Final = "compacted"


@dataclass(frozen=True, slots=True)
class PushReport:
    """The outcome of a push. `current` is the version that readers see now, 0 for none."""

    table: str
    version: TableVersion
    is_current: bool
    current: int
    log: str

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values: the version as it is recorded, and the current version."""
        found: dict[str, Any] = {"table": self.table, "is_current": self.is_current, "current": self.current}
        found |= msgspec.to_builtins(self.version)
        if self.version.faults:
            found["look_closer"] = look_closer(self.version, self.version.faults, self.log)
        return found

    def __str__(self) -> str:
        version = self.version
        if version.faults:
            shown = f"version {self.current} is still shown" if self.current else "nothing is shown yet"
            told = [f"{version.name} failed and is not shown; {shown}."]
            told += [
                f"partition {fault.partition}: {fault.kind}: {fault.message}" for fault in version.faults
            ]
            return "\n".join([*told, "Look closer with:", *look_closer(version, version.faults, self.log)])
        state = "is shown now" if self.is_current else f"is ready; version {self.current or 'none'} is shown"
        return f"{version.name} {state}: {version.rows} rows in {version.partitions} partitions, all as they were sent"


class PushFailedError(IntegrityError):
    """Raised if the version of a push failed and is not current; `report` says why."""

    def __init__(self, report: PushReport) -> None:
        fault = report.version.faults[0]
        super().__init__(
            str(report),
            topic=report.version.topic,
            partition=fault.partition,
            offset=fault.offset,
            producer=fault.producer or None,
            kind=fault.kind,
        )
        self.report = report


def fault_of(
    log: Any, version: TableVersion, partition: int, state: PartitionState, finding: Finding | None
) -> Fault:
    """Return what stopped a partition; without a finding, its end of push is missing."""
    place = f"{version.topic}-{partition}"
    if finding is None:
        said = (
            f"{place} has no end of push up to offset {state.next_offset}: its last records are missing, or the push "
            "was not finished"
        )
        return Fault(partition, UNFINISHED, said, state.next_offset)
    kind, said = finding.verdict.label, str(finding)
    if finding.verdict is Verdict.MISSING and finding.rule is not Rule.M1 and finding.stamp is not None:
        gap, late_at = _gap(finding), None
        if gap is not None:
            late_at = _found_later(log, finding, *gap)
            first, last = gap
            which = f"sequence {first}" if first == last else f"sequences {first} to {last}"
            said = (
                f"{which} of chain {finding.stamp.chain} of producer {finding.producer} "
                f"{'is' if first == last else 'are'} missing in front of offset {finding.offset}; {said}"
            )
        if late_at is not None:
            kind = LATE
            said = f"came late, at offset {late_at}, out of its producer's order: {said}"
    elif finding.verdict is Verdict.CORRUPT:
        said = f"changed on the way: {said}"
    return Fault(partition, kind, said, finding.offset, finding.producer or "")


def lone_repeat(
    log: Any, topic: str, partition: int, repeats: IntegrityColumns, offsets: NDArray[np.int64]
) -> int | None:
    """Return the offset of a repeat whose first copy is not in the partition any more; None if there is none.

    Compaction keeps the last record of a key. If that is a repeat, which is left out, the key would be lost without
    notice; and whether a later value was removed with the first copy is unknown.
    """
    wanted, place = np.unique(_identities(repeats), return_index=True)
    own = offsets[place]
    seen = own.copy()
    with log.reader(topic, [partition], stop={partition: int(own.max())}, control_records=True) as reader:
        for batch in reader:
            found = _identities(read_columns(batch.column("headers")))
            at = np.minimum(np.searchsorted(wanted, found), len(wanted) - 1)
            same = wanted[at] == found
            np.minimum.at(seen, at[same], batch.column("offset").to_numpy()[same])
    alone = own[seen == own]
    return int(alone.min()) if len(alone) else None


def _identities(columns: IntegrityColumns) -> NDArray[Any]:
    """Return the identities of records: producer, chain and sequence, as comparable values."""
    rows = np.zeros(len(columns), [(name, ">u8") for name in ("high", "low", "chain", "sequence")])
    rows["high"], rows["low"] = columns.guid_high, columns.guid_low
    rows["chain"], rows["sequence"] = columns.chain, columns.sequence
    return rows.view("S32")


def look_closer(version: TableVersion, faults: Sequence[Fault], log: str) -> list[str]:
    """Return the commands that show more of each fault."""
    where = shlex.quote(log)
    commands = [f"tidegate verify {version.topic} --log {where}"]
    for fault in faults:
        if fault.partition >= 0 and fault.offset >= 0:
            start = max(0, fault.offset - 2)
            commands.append(
                f"tidegate consume {version.topic} --log {where} -p {fault.partition} --offset {start} -n 5 "
                "--control-records --format jsonl"
            )
    return commands


def _gap(finding: Finding) -> tuple[int, int] | None:
    """Return the sequences that are missing, if they are all of the record's own chain."""
    stamp = finding.stamp
    if stamp is None:
        return None
    if finding.previous_chain == stamp.chain and finding.previous_sequence is not None:
        return finding.previous_sequence + 1, stamp.sequence - 1
    return (0, stamp.sequence - 1) if stamp.sequence else None


def _found_later(log: Any, finding: Finding, first: int, last: int) -> int | None:
    """Return the offset of the first missing record after the gap, if it is there."""
    stamp = finding.stamp
    if stamp is None:
        return None
    high, low = np.frombuffer(stamp.guid, ">u8")
    start = {finding.partition: finding.offset}
    with log.reader(finding.topic, [finding.partition], start=start, control_records=True) as reader:
        end = reader.end_offsets()[finding.partition]
        while reader.positions()[finding.partition] < end:
            batch = reader.poll(1000)
            if batch is None:
                continue
            columns = read_columns(batch.column("headers"))
            wanted = (
                (columns.state == MANAGED)
                & (columns.guid_high == high)
                & (columns.guid_low == low)
                & (columns.chain == stamp.chain)
                & (columns.sequence >= first)
                & (columns.sequence <= last)
            )
            if wanted.any():
                return int(batch.column("offset")[int(np.flatnonzero(wanted)[0])].as_py())
    return None


# --- catalog

TRIES: Final = 64
_SUFFIX: Final = "/versions"


def versions_name(table: str) -> str:
    return f"tables/{table}{_SUFFIX}"


def versioned_tables(backend: StorageBackend) -> list[str]:
    """Return the names of the tables that have versions in this backend."""
    return sorted(
        each.name.split("/")[1]
        for each in backend.list("tables")
        if each.name.endswith(_SUFFIX) and each.name.count("/") == 2
    )


def load_versions(backend: StorageBackend, table: str) -> tuple[VersionList, str] | None:
    """Return the current record and its version; None if the table has none."""
    remedy = f"restore {versions_name(table)} from a copy, or push the table anew into another state folder"
    found = read_record(backend, versions_name(table), VersionList, f"the versions of table {table}", remedy)
    if found is None:
        return None
    known, version = found
    if known.version != VERSION or known.table != table:
        raise CorruptError(
            f"{versions_name(table)} is of table {known.table!r} and format {known.version}; this release reads format "
            f"{VERSION} of table {table!r}"
        )
    return known, version


def push_lease_name(table: str, push: str) -> str:
    """Return the name of the lease that a push holds while it runs."""
    return f"tables/{table}/pushes/{push}"


def version_named(backend: StorageBackend, name: str) -> tuple[str, int | None] | None:
    """Return the table and version of a name: `users` is the current version, `users_v3` that one; None for neither."""
    if backend.read_published(versions_name(name)) is not None:
        return name, None
    table, mark, number = name.rpartition("_v")
    if not (table and mark and number.isdecimal()):
        return None
    found = load_versions(backend, table)
    if found is None or int(number) not in {each.number for each in found[0].versions}:
        return None
    return table, int(number)


class Versions:
    """The versions of one table in one backend."""

    def __init__(self, backend: StorageBackend, table: str, *, clock: Clock | None = None) -> None:
        self.table = table
        self.backend = backend
        self._clock = clock or SystemClock()

    def list(self) -> VersionList:
        """Return all versions; an empty list if nothing was ever pushed."""
        found = load_versions(self.backend, self.table)
        return VersionList(VERSION, self.table) if found is None else found[0]

    @property
    def exists(self) -> bool:
        return load_versions(self.backend, self.table) is not None

    def require(self) -> VersionList:
        """Return all versions, or raise an `InvalidError` if nothing was ever pushed."""
        found = load_versions(self.backend, self.table)
        if found is None:
            known = ", ".join(versioned_tables(self.backend)) or "none"
            raise InvalidError(f"table {self.table!r} has no versions here; tables that have some: {known}")
        return found[0]

    def create(self, push: str, **fields: Any) -> TableVersion:
        """Create a version in the state `pushing`. Needs `partitions`, `key_serde`, `value_serde`."""
        changed = self._change(lambda known: created(known, push, self._clock.now_ms(), **fields))
        return changed.versions[-1]

    def mark(self, number: int, state: State, **fields: Any) -> TableVersion:
        """Set the next state of a version, with its results."""
        return self._change(lambda known: marked(known, number, state, **fields)).get(number)

    def swap(self, number: int) -> VersionList:
        """Make this version current; one publish (C1)."""
        self.require()
        return self._change(lambda known: swapped(known, number, "swap", self._clock.now_ms()))

    def swap_if_newer(self, number: int) -> bool:
        """Make this version current unless a newer one is; return whether it is current now."""

        def change(known: VersionList) -> VersionList:
            if number < known.current:
                return known
            return swapped(known, number, "push", self._clock.now_ms())

        return self._change(change).current == number

    def rollback(self) -> VersionList:
        """Make the previous version current again; one publish (C1)."""
        self.require()
        return self._change(lambda known: rolled_back(known, self._clock.now_ms()))

    def retire(self, number: int) -> VersionList:
        """Take a version out of service; `push.delete_version` removes it."""
        now_ms = self._clock.now_ms()
        return self._change(lambda known: marked(known, number, State.RETIRED, ended_ms=now_ms))

    def forget(self, number: int) -> VersionList:
        """Remove a retired version whose files are gone from the list."""
        return self._change(lambda known: forgotten(known, number))

    def _change(self, change: Callable[[VersionList], VersionList]) -> VersionList:
        for attempt in range(TRIES):
            found = load_versions(self.backend, self.table)
            known, version = found if found is not None else (VersionList(VERSION, self.table), None)
            changed = change(known)
            if changed == known and found is not None:
                return known
            try:
                self.backend.publish(
                    versions_name(self.table), msgspec.msgpack.encode(changed), expected=version
                )
            except ConflictError:
                self._clock.sleep_ms(min(attempt, 10))
                continue
            return changed
        raise ConflictError(f"the versions of table {self.table} change all the time; try again")


# --- replicas of a version


def status_name(version: str, replica: str) -> str:
    return f"tables/{version}/replicas/{replica}"


def replica_table(version: str, replica: str) -> str:
    """Return the name of the stored table with a replica's rows."""
    return f"{version}.{replica}"


def stored_replicas(backend: StorageBackend, version: str) -> dict[str, CommitList]:
    """Return the stored tables that are replicas of a version topic, and their commits."""
    found = {}
    start = replica_table(version, "")
    for name in stored_tables(backend):
        if not name.startswith(start):
            continue
        commits = load_commits(backend, name)
        if commits is None or commits[0].shape.topic != version:
            continue
        if backend.read_published(status_name(version, name.removeprefix(start))) is not None:
            found[name] = commits[0]
    return found
