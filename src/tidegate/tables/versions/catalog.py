"""The catalog of a table's versions: one published record, changed by compare-and-swap only.

    versions = Versions(backend, "users")
    versions.swap(3); versions.rollback(); versions.list().current

Owns reading and publishing `tables/T/versions`; what a change may be is `record`'s, what it means for files
`deleting`'s.

C1  every change is one publish: a pure function of the record as it is, made again when another process was faster.
    A swap and a rollback therefore take as long as one small write, whatever the versions' size.
C2  reading takes no lock, and sees the record before or after a change.

Thread rule: from any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tidegate.clock import Clock, SystemClock
from tidegate.errors import ConflictError, CorruptError, InvalidError
from tidegate.tables.versions import record
from tidegate.tables.versions.record import State, TableVersion, VersionList

if TYPE_CHECKING:
    from tidegate.storage.backends.base import StorageBackend

TRIES: Final = 64
_SUFFIX: Final = "/versions"


def versions_name(table: str) -> str:
    return f"tables/{table}{_SUFFIX}"


def versioned_tables(backend: StorageBackend) -> list[str]:
    """The names of the tables that have versions in this backend."""
    return sorted(
        each.name.split("/")[1]
        for each in backend.list("tables")
        if each.name.endswith(_SUFFIX) and each.name.count("/") == 2
    )


def load_versions(backend: StorageBackend, table: str) -> tuple[VersionList, str] | None:
    """The record as it is now, and its version; None when the table has none."""
    found = backend.read_published(versions_name(table))
    if found is None:
        return None
    data, version = found
    try:
        known = msgspec.msgpack.decode(data, type=VersionList)
    except msgspec.DecodeError as error:
        raise CorruptError(
            f"the versions of table {table} cannot be read ({error}); restore {versions_name(table)} from a copy, or "
            "push the table anew into another state folder"
        ) from None
    if known.version != record.VERSION or known.table != table:
        raise CorruptError(
            f"{versions_name(table)} is of table {known.table!r} and format {known.version}; this release reads format "
            f"{record.VERSION} of table {table!r}"
        )
    return known, version


def push_lease_name(table: str, push: str) -> str:
    """The lease that a push holds while it is at work."""
    return f"tables/{table}/pushes/{push}"


def version_named(backend: StorageBackend, name: str) -> tuple[str, int | None] | None:
    """The table and version that a name means: `users` whichever is current, `users_v3` that one; None for neither."""
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
        """All versions, as they are now; an empty list where nothing was ever pushed."""
        found = load_versions(self.backend, self.table)
        return VersionList(record.VERSION, self.table) if found is None else found[0]

    @property
    def exists(self) -> bool:
        return load_versions(self.backend, self.table) is not None

    def require(self) -> VersionList:
        """All versions, or an `InvalidError` where nothing was ever pushed."""
        found = load_versions(self.backend, self.table)
        if found is None:
            known = ", ".join(versioned_tables(self.backend)) or "none"
            raise InvalidError(f"table {self.table!r} has no versions here; tables that have some: {known}")
        return found[0]

    def create(self, push: str, **fields: Any) -> TableVersion:
        """A new version that is being pushed. Needs `partitions`, `key_serde`, `value_serde`."""
        changed = self._change(lambda known: record.created(known, push, self._clock.now_ms(), **fields))
        return changed.versions[-1]

    def mark(self, number: int, state: State, **fields: Any) -> TableVersion:
        """Bring a version into its next state, with what else became known of it."""
        return self._change(lambda known: record.marked(known, number, state, **fields)).get(number)

    def swap(self, number: int, *, reason: str = "swap") -> VersionList:
        """Show this version from now on; one publish (C1)."""
        self.require()
        return self._change(lambda known: record.swapped(known, number, reason, self._clock.now_ms()))

    def swap_if_newer(self, number: int, *, reason: str = "push") -> bool:
        """Show this version, unless a newer one is shown already; whether it is shown now."""

        def change(known: VersionList) -> VersionList:
            if number < known.current:
                return known
            return record.swapped(known, number, reason, self._clock.now_ms())

        return self._change(change).current == number

    def rollback(self) -> VersionList:
        """Show the version again that was shown before; one publish (C1)."""
        self.require()
        return self._change(lambda known: record.rolled_back(known, self._clock.now_ms()))

    def retire(self, number: int) -> VersionList:
        """Take a version out of service; `deleting.delete_version` removes it."""
        return self.mark_list(number, State.RETIRED, ended_ms=self._clock.now_ms())

    def mark_list(self, number: int, state: State, **fields: Any) -> VersionList:
        return self._change(lambda known: record.marked(known, number, state, **fields))

    def forget(self, number: int) -> VersionList:
        """Drop a retired version whose files are gone from the list."""
        return self._change(lambda known: record.forgotten(known, number))

    def _change(self, change: Callable[[VersionList], VersionList]) -> VersionList:
        for attempt in range(TRIES):
            found = load_versions(self.backend, self.table)
            known, version = found if found is not None else (VersionList(record.VERSION, self.table), None)
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
