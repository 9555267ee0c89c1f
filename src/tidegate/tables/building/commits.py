"""The table's commits: one published list names the last of them, and whoever can swap it is the one who builds.

A commit is a storage checkpoint (rows, offsets, drainer states: one cut) and the token to restore it with. It exists
when the list that names it is published; until then it is garbage.

C1  the list is replaced by compare-and-swap only. A new builder first publishes the list again under its own
    epoch; from then on no commit of an older one can succeed (`FencedError`).
C2  the last `KEPT` commits stay readable; older ones are forgotten, and storage gives their packs back.
C3  the list carries the shape of the table, so that it is opened as what it is.
C4  positions count in one topic, whose id the list carries: a topic that was deleted and created again is refused.

Thread rule: the draining thread's; `load` from any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from tidegate.errors import ConflictError, CorruptError, FencedError, InvalidError, SignatureError
from tidegate.tables.building.shape import TableShape

if TYPE_CHECKING:
    from tidegate.storage.backends.base import StorageBackend

KEPT: Final = 10
VERSION: Final = 2
READABLE: Final = (1, 2)  # 1 had no topic id


class Commit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One commit: the offsets after what it holds, by partition, and what restores it."""

    number: int
    positions: dict[int, int]
    committed_ms: int
    rows: int
    token: bytes


class CommitList(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is published."""

    version: int
    epoch: int
    shape: TableShape
    commits: tuple[Commit, ...] = ()
    topic_id: str = ""


def commits_name(table: str) -> str:
    return f"tables/{table}/commits"


def lease_name(table: str) -> str:
    return f"tables/{table}/lease"


def stored_tables(backend: StorageBackend) -> list[str]:
    """The names of the tables that are kept in this backend."""
    found = {each.name.split("/")[1] for each in backend.list("tables") if each.name.endswith("/commits")}
    return sorted(found)


def load_commits(backend: StorageBackend, table: str) -> tuple[CommitList, str] | None:
    """The list as it is now, and its version; None when there is no such table yet."""
    try:
        found = backend.read_published(commits_name(table))
        if found is None:
            return None
        data, version = found
        commits = msgspec.msgpack.decode(data, type=CommitList)
    except SignatureError:
        raise
    except (CorruptError, msgspec.DecodeError) as error:
        raise CorruptError(
            f"the commits of table {table} cannot be read ({error}); restore them from a copy, or build the table anew "
            "in another state folder",
            path=commits_name(table),
            kafka_name=None,
        ) from None
    if commits.version not in READABLE:
        raise InvalidError(
            f"table {table} was written by a later release (version {commits.version}, this one reads up to "
            f"{VERSION}): use that release, or a later one"
        )
    return commits, version


def next_epoch(backend: StorageBackend, table: str) -> int:
    """The least epoch that a new builder may have, also where the lease was deleted."""
    found = load_commits(backend, table)
    return 1 if found is None else found[0].epoch + 1


def recreated(shape: TableShape, was: str, topic_id: str) -> InvalidError:
    """The error for a table whose topic was deleted and created again."""
    return InvalidError(
        f"topic {shape.topic} was deleted and created again: table {shape.name} was built from the topic with id "
        f"{was}, and the topic has id {topic_id} now. Its rows are of the old topic; build the table anew in another "
        "state folder"
    )


class Commits:
    """The builder's side of the list."""

    def __init__(self, backend: StorageBackend, shape: TableShape, epoch: int, topic_id: str) -> None:
        """`topic_id` is the id of the topic that is read now; empty where it is not known."""
        self._backend = backend
        self._shape = shape
        self._topic_id = topic_id
        self._epoch = epoch
        self._list = CommitList(VERSION, epoch, shape, topic_id=topic_id)
        self._version: str | None = None

    def take_over(self) -> tuple[Commit, ...]:
        """Put the list under this builder's epoch (C1); the commits it has, oldest first."""
        for _ in range(8):
            found = load_commits(self._backend, self._shape.name)
            known, version = found if found is not None else (None, None)
            if known is not None:
                self._shape.check_same(known.shape)
                self._require_topic(known)
                if known.epoch > self._epoch:
                    raise self._fenced()
            commits = () if known is None else known.commits
            try:
                self._publish(CommitList(VERSION, self._epoch, self._shape, commits, self._topic_id), version)
            except ConflictError:
                continue  # the one before us has just committed: take that commit over too
            return commits
        raise ConflictError(f"table {self._shape.name}: the list of commits changes all the time; try again")

    @property
    def newest(self) -> Commit | None:
        return self._list.commits[-1] if self._list.commits else None

    @property
    def commits(self) -> tuple[Commit, ...]:
        return self._list.commits

    def add(self, token: bytes, positions: dict[int, int], rows: int, now_ms: int) -> Commit:
        """Make a checkpoint the newest commit."""
        number = 1 if self.newest is None else self.newest.number + 1
        commit = Commit(number, positions, now_ms, rows, token)
        commits = (*self._list.commits, commit)[-KEPT:]
        try:
            self._publish(
                CommitList(VERSION, self._epoch, self._shape, commits, self._topic_id), self._version
            )
        except ConflictError as error:
            raise self._fenced() from error
        return commit

    def _require_topic(self, known: CommitList) -> None:
        if not known.commits or not known.topic_id:
            return  # nothing was read yet, or by a release that did not know the id
        if not self._topic_id:
            self._topic_id = known.topic_id
        elif known.topic_id != self._topic_id:
            raise recreated(self._shape, known.topic_id, self._topic_id)

    def _publish(self, commits: CommitList, expected: str | None) -> None:
        self._version = self._backend.publish(
            commits_name(self._shape.name), msgspec.msgpack.encode(commits), expected=expected
        )
        self._list = commits

    def _fenced(self) -> FencedError:
        return FencedError(
            f"table {self._shape.name}: another process builds it now, and this one's commit was refused; close the "
            "table here and open it again to read it"
        )
