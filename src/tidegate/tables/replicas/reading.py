"""Which version a name means, and which replica's commit any other process reads of it.

A replica is stored as the table `<version topic>.<replica>`, over that topic, and has said how it stands (`status`). A
table of another topic, or of somebody who only reads the version topic, may have such a name, too, and is none. Of the
replicas the one that has drained most is the one to read.

Thread rule: pure but for reading the backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tidegate.errors import InvalidError
from tidegate.tables.building.commits import CommitList, load_commits, stored_tables
from tidegate.tables.replicas.status import status_name
from tidegate.tables.versions.catalog import Versions, version_named
from tidegate.tables.versions.record import State, TableVersion

if TYPE_CHECKING:
    from tidegate.storage.backends.base import StorageBackend


class Served(NamedTuple):
    """A version topic, and what the catalog knows of it, if it does."""

    topic: str
    version: TableVersion | None


def replica_table(version: str, replica: str) -> str:
    """The name of the stored table that a replica's rows are."""
    return f"{version}.{replica}"


def stored_replicas(backend: StorageBackend, version: str) -> dict[str, CommitList]:
    """The stored tables that are replicas of a version topic, and their commits."""
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


def served_version(backend: StorageBackend, name: str) -> Served:
    """The version topic that `name` means: a table's current version, or the topic itself; never one that failed."""
    named = version_named(backend, name)
    if named is None:
        return Served(name, None)
    table, number = named
    known = Versions(backend, table).require()
    version = known.get(number) if number is not None else known.current_version
    if version is None:
        raise InvalidError(f"table {table} has no version that readers see; push one, or name its topic")
    if version.state in (State.FAILED, State.RETIRED):
        raise InvalidError(
            f"{version.topic} is {version.state.value} and is not served; see `tidegate table info {table}`"
        )
    return Served(version.topic, version)


def freshest_replica(backend: StorageBackend, name: str) -> str | None:
    """The stored table of the replica that has drained most of this version; None where there is none to read.

    Of a version that the catalog knows, one that holds the whole push of every partition, or none.
    """
    if version_named(backend, name) is None and load_commits(backend, name) is not None:
        return None  # a table of its own
    try:
        topic, version = served_version(backend, name)
    except InvalidError:
        return None
    best: tuple[int, str] | None = None
    for each, found in stored_replicas(backend, topic).items():
        if _is_whole(found, version):
            drained = sum(found.commits[-1].positions.values())
            if best is None or drained > best[0]:
                best = (drained, each)
    return None if best is None else best[1]


def _is_whole(stored: CommitList, version: TableVersion | None) -> bool:
    if not stored.commits:
        return False
    positions = stored.commits[-1].positions
    if version is None:
        return True
    ends = {each.partition: each.end_of_push for each in version.results}
    return len(ends) == version.partitions and all(positions.get(each, 0) > end for each, end in ends.items())
