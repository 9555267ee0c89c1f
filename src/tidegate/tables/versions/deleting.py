"""How versions leave: retired in the record first, then their topic and files deleted, then forgotten.

D1  the current version is never deleted; a version that is deleted was `retired` in the record before, so no reader
    begins with it any more.
D2  readers that are open on a retired version keep what they have mapped; for what they have not, `grace_ms` is left
    to them before `collect` deletes. Whoever deletes by hand does not wait.
D3  only what is the version's is deleted: partitions and replicas are known by the topic that their commits name
    not by what they are called, and the topic by not having been there before the push (`pushing`).
D4  killed anywhere, a deletion goes on with the next `collect`: the entry is forgotten last.

Thread rule: pure but for the backend and the log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tidegate.clock import Clock, SystemClock
from tidegate.errors import TidegateError
from tidegate.tables.building.commits import load_commits
from tidegate.tables.building.source import task_of
from tidegate.tables.replicas.reading import stored_replicas
from tidegate.tables.versions.catalog import Versions, push_lease_name
from tidegate.tables.versions.record import State, TableVersion

if TYPE_CHECKING:
    from tidegate.storage.backends.base import StorageBackend

GRACE_MS: Final = 60_000


def files_of(backend: StorageBackend, version: TableVersion) -> list[tuple[str, int]]:
    """The stored objects of a version and their sizes, those of its replicas too, its commits and leases last (D3)."""
    packs, published = [], []
    for name in stored_replicas(backend, version.topic):
        packs += [(each.name, each.size) for each in backend.list(name)]
        published += [(each.name, each.size) for each in backend.list(f"tables/{name}")]
    folder = f"tables/{version.topic}"  # which a table of somebody who reads the version topic may have, too
    ours = (f"{folder}/replicas/", f"{folder}/leader-")
    published += [(each.name, each.size) for each in backend.list(folder) if each.name.startswith(ours)]
    for partition in range(version.partitions):
        shape = version.shape(partition)
        stored = load_commits(backend, shape.name)
        if stored is not None and stored[0].shape.topic != version.topic:
            continue  # a table of somebody else, with this name
        packs += [(each.name, each.size) for each in backend.list(task_of(shape))]
        published += [(each.name, each.size) for each in backend.list(f"tables/{shape.name}")]
    return [*packs, *published]


def delete_version(versions: Versions, log: Any, number: int) -> int:
    """Retire a version if it is not yet, delete its topic and its files, and forget it; the bytes of state freed."""
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
    """Delete the versions that were retired at least `grace_ms` ago; their numbers (D2)."""
    now_ms = (clock or SystemClock()).now_ms()
    gone = []
    for each in versions.list().versions:
        if each.state is State.RETIRED and now_ms - each.ended_ms >= grace_ms:
            try:
                delete_version(versions, log, each.number)
            except TidegateError:
                continue  # in use, or out of reach: the next one tries again (D4)
            gone.append(each.number)
    return gone
