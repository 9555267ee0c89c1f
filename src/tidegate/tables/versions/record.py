"""What is known of a table's versions, as one small value, and every change that may be made to it.

Owns the shape of the published record `tables/T/versions` and the rules of its changes, as pure functions; who
publishes it is `catalog`'s.

    pushing ──► ingesting ──► ready ──► retired ──► (gone)
        └───────────┴──► failed ──────────┘

V1  only a `ready` version is ever current, and the current one is never retired: readers never see a half version.
V2  a number is given out once, also when its version is gone.
V3  a state goes forward along the arrows only; `failed` is final. A push that was given up for dead finds its version
    failed, and can no longer bring it in.

The record's bytes are msgpack of `VersionList`, by field names; `version` is that of the format.

Thread rule: values and pure functions.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec
from msgspec.structs import replace

from tidegate.errors import ConflictError, InvalidError
from tidegate.tables.building.shape import TableShape

VERSION: Final = 1
KEPT_SWAPS: Final = 100
"""Swaps that are remembered; of older ones only the order of versions is left."""


class State(StrEnum):
    """Where a version stands."""

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
    """Why a partition (or, with partition -1, the whole push) failed: what, where, whose, and what to look at."""

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
    """One version: its topic, its push, where it stands and what was found. Times are 0 where they are not yet."""

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
        """What the version is called: the name of its topic."""
        return self.topic

    def shape(self, partition: int) -> TableShape:
        """One partition of the version, as the table that is kept in storage: it has its own lease and commits."""
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
    """One change of what readers see; 0 for no version."""

    at_ms: int
    before: int
    after: int
    reason: str


class VersionList(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All versions of one table, oldest first. `current` is what readers see, `previous` what a rollback shows."""

    version: int
    table: str
    next_number: int = 1
    current: int = 0
    previous: int = 0
    versions: tuple[TableVersion, ...] = ()
    swaps: tuple[Swap, ...] = ()

    def get(self, number: int) -> TableVersion:
        """The version of this number, or an `InvalidError` that says which there are."""
        for each in self.versions:
            if each.number == number:
                return each
        known = ", ".join(str(each.number) for each in self.versions) or "none"
        raise InvalidError(f"table {self.table} has no version {number}; there are {known}")

    @property
    def current_version(self) -> TableVersion | None:
        return self.get(self.current) if self.current else None


def topic_of(table: str, number: int) -> str:
    """The topic of a version, which is also its name."""
    return f"{table}_v{number}"


def partition_table(topic: str, partition: int) -> str:
    """The name of the stored table that one partition of a version is."""
    return f"{topic}-{partition}"


# -- changes -----------------------------------------------------------------------------------------


def created(known: VersionList, push: str, now_ms: int, **fields: object) -> VersionList:
    """With one more version, of the next number (V2)."""
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
    """With one version in another state (V1, V3), and what else became known of it."""
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
    """With another version shown (V1); the one before is what a rollback shows again."""
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
    """With the version before shown again; a second rollback returns to the one before that call."""
    if not known.previous:
        raise ConflictError(
            f"table {known.table} showed no other version before; there is nothing to go back to"
        )
    return swapped(known, known.previous, "rollback", now_ms)


def forgotten(known: VersionList, number: int) -> VersionList:
    """Without a version whose files are gone."""
    if known.get(number).state is not State.RETIRED:
        raise ConflictError(f"version {number} of table {known.table} is not retired; retire it first")
    left = tuple(each for each in known.versions if each.number != number)
    return replace(known, versions=left, previous=0 if known.previous == number else known.previous)


def superfluous(known: VersionList, retain: int) -> list[int]:
    """The versions that may go when `retain` ready ones are kept: the current and the previous one always stay, and of
    failed ones the newest, to be looked at."""
    if retain < 1:
        raise InvalidError(f"retain={retain}: keep at least 1 version")
    kept = {known.current, known.previous} - {0}
    ready = [each.number for each in known.versions if each.state is State.READY]
    for number in reversed(ready):
        if len(kept & set(ready)) >= retain:
            break
        kept.add(number)
    # A newer version that nobody shows yet waits for its swap.
    kept |= {number for number in ready if number > known.current}
    failed = [each.number for each in known.versions if each.state is State.FAILED]
    return sorted({*ready, *failed[:-1]} - kept)


def _with(known: VersionList, changed: TableVersion) -> VersionList:
    versions = tuple(changed if each.number == changed.number else each for each in known.versions)
    return replace(known, versions=versions)
