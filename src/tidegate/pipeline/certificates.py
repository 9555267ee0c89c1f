"""The certificate of a committed round: the offsets it read, the digests of their records, and its commit.

Nothing is computed while a round runs. The commit says which offsets were read; their digests are computed from the
log while it still holds them.

Thread rule: one thread; a runner manages its own workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tidegate.errors import InvalidError
from tidegate.integrity.audit import Runner
from tidegate.integrity.certificates import make_certificate, range_members
from tidegate.integrity.digests import TopicAt
from tidegate.pipeline.checkpoint import CommitRecord, Records
from tidegate.storage.backends.base import StorageBackend


def certify_round(
    backend: StorageBackend,
    app: str,
    round: int | None,
    url: str,
    *,
    now_ms: int,
    client: Mapping[str, str] | None = None,
    runner: Runner | None = None,
    key: bytes | None = None,
) -> dict[str, Any]:
    """Return the certificate of a committed round of an app, by default the last; the log at `url` has its sources."""
    records = Records(backend, app)
    if records.load_app() is None:
        raise InvalidError(f"there is no app {app}; `tidegate app status` lists those there are")
    number = records.newest() if round is None else round
    if number is None:
        raise InvalidError(f"app {app} has committed nothing yet; run it first")
    commit, digest = records.read_commit(number)
    flows = {line.name: line.topic for line in records.flows_of(commit)}
    ranges: list[dict[str, Any]] = []
    for (flow, topic), extents in sorted(_read(records, commit, flows).items()):
        source = TopicAt(url, topic, client or {})
        source.require(extents, f"round {number} of app {app}")
        ranges += [{**member, "flow": flow} for member in range_members(source, extents, runner=runner)]
    losses = [
        {
            "flow": loss.flow,
            "partition": loss.partition,
            "first": loss.first,
            "next": loss.end,
            "reason": "deleted from the log before they were read; somebody accepted that",
        }
        for loss in commit.losses
    ]
    stops = [
        {
            "flow": line.flow,
            "partition": line.partition,
            "kind": line.stopped.reason,
            "offset": line.stopped.offset,
            "message": line.stopped.message,
        }
        for line in commit.sources
        if line.stopped is not None
    ]
    subject = {
        "kind": "round",
        "app": app,
        "round": number,
        "commit": digest.hex(),
        "committed_ms": commit.committed_ms,
        "change": commit.change,
        "totals": {flow: dict(counters) for flow, counters in commit.totals.items()},
    }
    return make_certificate(
        subject,
        ranges,
        made_ms=now_ms,
        tolerated=losses,
        faults=stops,
        base=commit.base.hex() or None,
        key=key,
    )


def _read(
    records: Records, commit: CommitRecord, flows: Mapping[str, str]
) -> dict[tuple[str, str], dict[int, tuple[int, int]]]:
    """Return the offset ranges that the round read: from its plan's starts, or the commit before, to its own ends."""
    plan = records.load_plan(commit.round)
    before = records.load_commit(commit.round - 1) if commit.round else None
    starts: dict[tuple[str, int], int] = {}
    if before is not None:
        starts = {(line.flow, line.partition): line.next_offset for line in before[0].sources}
    if plan is not None and commit.plan == plan[1]:
        starts |= {(each.flow, each.partition): each.start for each in plan[0].ranges}
    elif before is None and commit.plan:
        raise InvalidError(
            f"where round {commit.round} of app {records.app} began to read is not kept any more; export a later one"
        )
    found: dict[tuple[str, str], dict[int, tuple[int, int]]] = {}
    for line in commit.sources:
        start = starts.get((line.flow, line.partition), line.next_offset)
        extents = found.setdefault((line.flow, flows.get(line.flow, line.flow)), {})
        extents[line.partition] = min(start, line.next_offset), line.next_offset
    return found
