"""The certificate of a table version: the records of its topic that are in it, as its catalog says.

Thread rule: one thread; a runner manages its own workers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from tidegate.errors import InvalidError
from tidegate.integrity.audit import Runner
from tidegate.integrity.certificates import make_certificate, range_members
from tidegate.integrity.digests import TopicAt
from tidegate.storage.backends.base import StorageBackend
from tidegate.tables.versions.catalog import Versions, version_named


def certify_version(
    backend: StorageBackend,
    name: str,
    url: str,
    *,
    now_ms: int,
    client: Mapping[str, str] | None = None,
    runner: Runner | None = None,
    key: bytes | None = None,
) -> dict[str, Any]:
    """Return the certificate of a version, named like `users_v3`, or `users` for the current one; the log at `url`
    has its topic."""
    named = version_named(backend, name)
    if named is None:
        raise InvalidError(f"{name} is no table with versions, and no version of one")
    table, number = named
    known = Versions(backend, table).require()
    number = known.current if number is None else number
    if not number:
        raise InvalidError(f"table {table} has no current version; name one, like {table}_v1")
    version = known.get(number)
    if not version.results:
        raise InvalidError(f"{version.name} is {version.state.value}: nothing of it was ingested")
    extents = {each.partition: (0, each.next_offset) for each in version.results}
    source = TopicAt(url, version.topic, client or {})
    source.require(extents, f"version {version.name}")
    subject = {
        "kind": "version",
        "table": table,
        "number": number,
        "state": version.state.value,
        "push": version.push,
        "rows": version.rows,
        "ended_ms": version.ended_ms,
        "verdicts": dict(version.verdicts),
        "complete": all(each.is_complete for each in version.results),
        "record": hashlib.sha256(msgspec.msgpack.encode(version)).hexdigest(),
    }
    faults = [msgspec.to_builtins(fault) for fault in version.faults]
    return make_certificate(
        subject,
        range_members(source, dict(sorted(extents.items())), runner=runner),
        made_ms=now_ms,
        faults=faults,
        base=None,
        key=key,
    )
