"""Which version a name means, and which replica's commit any other process reads of it.

A replica is stored as the table `<version topic>.<replica>`; the one that has drained most is the one to read.

Thread rule: pure but for reading the backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tidegate.errors import InvalidError
from tidegate.tables.building.commits import load_commits, stored_tables
from tidegate.tables.versions.catalog import load_versions
from tidegate.tables.versions.record import State, TableVersion

if TYPE_CHECKING:
    from tidegate.storage.backends.port import StorageBackend


class Served(NamedTuple):
    """A version topic, and what the catalog knows of it, if it does."""

    topic: str
    version: TableVersion | None


def replica_table(version: str, replica: str) -> str:
    """The name of the stored table that a replica's rows are."""
    return f"{version}.{replica}"


def served_version(backend: StorageBackend, name: str) -> Served:
    """The version topic that `name` means: a table's current version, or the topic itself; never one that failed."""
    found = load_versions(backend, name)
    if found is not None:
        current = found[0].current_version
        if current is None:
            raise InvalidError(f"table {name} has no version that readers see; push one, or name its topic")
        return Served(current.topic, current)
    table, mark, number = name.rpartition("_v")
    known = load_versions(backend, table) if mark and number.isdecimal() else None
    if known is None:
        return Served(name, None)
    version = known[0].get(int(number))
    if version.state in (State.FAILED, State.RETIRED):
        raise InvalidError(
            f"version {name} is {version.state.value} and is not served; see `tidegate table info {table}`"
        )
    return Served(version.topic, version)


def freshest_replica(backend: StorageBackend, name: str) -> str | None:
    """The stored table of the replica of this version that has drained most; None where there is none."""
    topic = served_version(backend, name).topic
    best: tuple[int, str] | None = None
    for each in stored_tables(backend):
        if not each.startswith(f"{topic}."):
            continue
        found = load_commits(backend, each)
        if found is not None and found[0].shape.topic == topic and found[0].commits:
            drained = sum(found[0].commits[-1].positions.values())
            if best is None or drained > best[0]:
                best = (drained, each)
    return None if best is None else best[1]
