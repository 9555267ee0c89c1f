"""The published status of replicas, and which replica's commit other processes read.

`tables/<version topic>/replicas/<replica>` is a small JSON object, published at intervals. It is information only:
leadership is decided by stamps and leases. A replica is stored as the table `<version topic>.<replica>` over that
topic, and has a status; other tables of such a name have none, and do not count. Reads use the replica that has
drained most.

Thread rule: one thread publishes; reading from any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tidegate.errors import InvalidError
from tidegate.integrity import Role
from tidegate.storage.backends.base import TEMPORARY
from tidegate.tables.commits import CommitList, load_commits
from tidegate.tables.versions.catalog import (
    State,
    TableVersion,
    Versions,
    stored_replicas,
    version_named,
)

if TYPE_CHECKING:
    from tidegate.storage.backends.base import StorageBackend
    from tidegate.tables.hybrid.leader import Leading


# --- status


class PartitionStatus(msgspec.Struct, frozen=True):
    """One partition of one replica; -1 for unknown values."""

    partition: int
    role: str
    """`offline` where it stopped at a fault."""
    epoch: int
    """Of the leader whose records count, as far as this replica has drained; 0 before the first."""
    position: int
    lag: int
    live_position: int = -1
    live_lag: int = -1
    copied: int = 0
    faults: int = 0
    live_faults: int = 0
    fenced: int = 0
    error: str = ""
    live_lost: int = 0
    """Offsets of the live topic that aged out before this replica could copy them."""
    live_unknown: int = 0
    """Offsets of the live topic that aged out after they were copied, with what was known of their producers."""


class ReplicaStatus(msgspec.Struct, frozen=True):
    """One replica."""

    replica: str
    host: str
    pid: int
    at_ms: int
    partitions: tuple[PartitionStatus, ...]

    @property
    def leads(self) -> tuple[int, ...]:
        return tuple(each.partition for each in self.partitions if each.role == Role.LEADER.value)


def partition_status(leading: Leading, end: int, live_end: int) -> PartitionStatus:
    """Return the status of one partition, with the current ends of both topics."""
    following = leading.following
    with following.lock:
        upstream, position = following.upstream, following.state.next_offset
        stopped = following.is_stopped
        error = following.error or leading.error
        live_position = max(upstream.next_offset, leading.live_position)
        return PartitionStatus(
            following.state.partition,
            Role.OFFLINE.value if stopped else leading.role.value,
            upstream.epoch,
            position,
            max(0, end - position),
            live_position,
            max(0, live_end - live_position) if live_position >= 0 else -1,
            upstream.copied,
            following.replica.faults.faults,
            leading.live_faults.faults,
            following.state.counts.fenced,
            "" if error is None else str(error),
            *leading.aged_out,
        )


def read_statuses(backend: StorageBackend, version: str) -> list[ReplicaStatus]:
    """Return the last published status of each replica of a version, sorted by name."""
    found = []
    for each in backend.list(f"tables/{version}/replicas"):
        if each.name.endswith(TEMPORARY):
            continue  # being published just now, or left by an interrupted publish
        published = backend.read_published(each.name)
        if published is not None:
            try:
                found.append(msgspec.json.decode(published[0], type=ReplicaStatus))
            except (msgspec.DecodeError, RecursionError):
                continue  # written by another release: skip it
    return sorted(found, key=lambda status: status.replica)


# --- reading


class Served(NamedTuple):
    """A version topic, and its catalog entry, if any."""

    topic: str
    version: TableVersion | None


def served_version(backend: StorageBackend, name: str) -> Served:
    """Return the version topic of `name`: a table's current version, or the topic itself; never a failed one."""
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
    """Return the stored table of the replica that has drained most of this version; None if there is none to read.

    For a version in the catalog, only a replica with the whole push of every partition counts.
    """
    if version_named(backend, name) is None and load_commits(backend, name) is not None:
        return None  # an ordinary table
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
