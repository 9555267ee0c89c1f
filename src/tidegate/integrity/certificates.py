"""Certificates: a small document that states which records a log held, and its check against a log.

Owns the document (`docs/reference/certificates.md` has its layout), its canonical form and digest, and the check. The
caller chooses the ranges: of a topic, a round of an app, or a version of a table. `certify_topic` audits a topic first
and includes the result. A range is cut into blocks at multiples of `block` offsets, each with its own digest
(`digests`): a check names the blocks that differ, and checks the others when the head has aged out.

C1  the canonical form is JSON with sorted keys, no spaces, ASCII only and no fractions; `digest` is SHA-256 of it, with
    the members `digest` and `signature` left out. A document with another digest is refused.
C2  a check never calls a block proven that it did not read whole.

Thread rule: values and pure functions around readers.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import numpy as np

from tidegate.errors import InvalidError
from tidegate.integrity.audit import Runner, audit, audit_broker, run_ranges
from tidegate.integrity.digests import ALL, Digest, ReadOrder, TopicAt, cut, digest_blocks, hashes_of
from tidegate.integrity.report import AuditReport
from tidegate.integrity.summary import RangeSummary, extend, merge
from tidegate.integrity.verdicts import FATAL
from tidegate.log.log import folder_path, is_kafka

# -- certificates ----------------------------------------------------------------------------------

FORMAT: Final = "tidegate-certificate"
VERSION: Final = 1
MOST_BLOCKS: Final = 256
SMALLEST_BLOCK: Final = 4096
MOST_CHAINS: Final = 1000
_SMALLEST_RANGE: Final = 100_000
Extents = Mapping[int, tuple[int, int]]
# -- reading -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class RangeDigest:
    """The blocks of one range, by number (offset divided by the block size), and its producers' runs."""

    partition: int
    number: int
    blocks: dict[int, Digest] = field(default_factory=dict)
    summary: RangeSummary = field(default_factory=RangeSummary)


def digest_range(block: int, order: ReadOrder) -> RangeDigest:
    """Read a range and return its digests; runs in any process."""
    found = RangeDigest(order.partition, order.number)
    for batch in order.batches():
        offsets = batch.column("offset").to_numpy()
        numbers = offsets // block
        cuts = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1
        edges = np.concatenate(([0], cuts, [len(offsets)])).astype(np.int64)
        for at, digest in zip(
            numbers[edges[:-1]].tolist(), digest_blocks(hashes_of(batch, ALL), edges), strict=True
        ):
            found.blocks[at] = found.blocks.get(at, Digest()) + digest
        found.summary = extend(found.summary, batch)
    return found


def digest_topic(
    source: TopicAt, extents: Extents, block: int, runner: Runner | None = None
) -> dict[int, RangeDigest]:
    """The blocks and runs of every partition, over the given offsets."""
    pieces = 1 if runner is None else 4 * runner.workers
    orders = cut(source, extents, pieces, smallest=_SMALLEST_RANGE, align=block)
    results = run_ranges(runner, partial(digest_range, block), orders)
    whole = {partition: RangeDigest(partition, 0) for partition in extents}
    for part in sorted(results, key=lambda each: (each.partition, each.number)):
        into = whole[part.partition]
        for at, digest in part.blocks.items():
            into.blocks[at] = into.blocks.get(at, Digest()) + digest
        into.summary = merge(into.summary, part.summary)
    return whole


def block_size(extents: Extents) -> int:
    """The smallest power of two with which no partition has more than `MOST_BLOCKS` blocks."""
    longest = max((end - first for first, end in extents.values()), default=0)
    size = SMALLEST_BLOCK
    while longest // size >= MOST_BLOCKS:
        size *= 2
    return size


# -- making ------------------------------------------------------------------------------------------


def range_members(source: TopicAt, extents: Extents, *, runner: Runner | None = None) -> list[dict[str, Any]]:
    """The `ranges` of a certificate: one for each partition, with digests and producers."""
    block = block_size(extents)
    found = digest_topic(source, extents, block, runner)
    members = []
    for partition, (first, end) in extents.items():
        part = found[partition]
        total = Digest()
        for digest in part.blocks.values():
            total += digest
        members.append(
            {
                "topic": source.topic,
                "partition": partition,
                "first": first,
                "next": end,
                "records": total.records,
                "digest": total.hex(),
                "block": block,
                "blocks": [[at, digest.records, digest.hex()] for at, digest in sorted(part.blocks.items())],
                **_producers(part.summary),
            }
        )
    return members


def _producers(summary: RangeSummary) -> dict[str, Any]:
    runs = [(guid, run) for guid, each in sorted(summary.runs.items()) for run in each]
    return {
        "records_without_metadata": summary.unmanaged,
        "producers": len(summary.runs),
        "chains": [
            {
                "producer": guid.hex(),
                "chain": run.chain,
                "first_sequence": run.first_sequence,
                "last_sequence": run.last_sequence,
                "first_offset": run.first_offset,
                "last_offset": run.last_offset,
                "records": run.records,
                "checksum": f"{run.crc_sum:016x}",
                "ended": run.end is not None,
            }
            for guid, run in runs[:MOST_CHAINS]
        ],
        "chains_left_out": max(0, len(runs) - MOST_CHAINS),
    }


def make_certificate(
    subject: Mapping[str, Any],
    ranges: Sequence[Mapping[str, Any]],
    *,
    made_ms: int,
    tolerated: Sequence[Mapping[str, Any]] = (),
    faults: Sequence[Mapping[str, Any]] = (),
    base: str | None = None,
    key: bytes | None = None,
) -> dict[str, Any]:
    """The document, with its digest, and its signature where there is a key."""
    document: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "software": f"tidegate {_release()}",
        "made_ms": made_ms,
        "subject": dict(subject),
        "ranges": list(ranges),
        "records": sum(int(each["records"]) for each in ranges),
        "tolerated": list(tolerated),
        "faults": list(faults),
        "base": base,
    }
    content = canonical(document)
    document["digest"] = hashlib.sha256(content).hexdigest()
    if key is not None:
        document["signature"] = hmac.new(key, content, hashlib.sha256).hexdigest()
    return document


def canonical(document: Mapping[str, Any]) -> bytes:
    """The bytes that are digested and signed (C1)."""
    kept = {name: value for name, value in document.items() if name not in ("digest", "signature")}
    return json.dumps(kept, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def parse_certificate(text: str | bytes, *, key: bytes | None = None) -> dict[str, Any]:
    """Parse a certificate; raises `InvalidError` if it was changed (C1) or signed with another key."""
    try:
        document = json.loads(text)
        known = isinstance(document, dict) and document.get("format") == FORMAT
    except (ValueError, RecursionError):
        known = False
    if not known:
        raise InvalidError("this is no certificate: it is not JSON with format tidegate-certificate")
    if document.get("version") != VERSION:
        raise InvalidError(
            f"certificate version {document.get('version')} is unknown; this release reads {VERSION}"
        )
    try:
        content = canonical(document)
    except ValueError as error:
        raise InvalidError(f"the certificate has no canonical form: {error}") from None
    if hashlib.sha256(content).hexdigest() != document.get("digest"):
        raise InvalidError("the certificate was changed after it was made: its digest is another")
    if key is not None:
        signed = hmac.new(key, content, hashlib.sha256).hexdigest()
        if not hmac.compare_digest(signed, str(document.get("signature"))):
            raise InvalidError("the certificate is not signed with this key")
    _require_shape(document)
    made: dict[str, Any] = document
    return made


def _require_shape(document: Mapping[str, Any]) -> None:
    try:
        for each in document["ranges"]:
            numbers = [each[name] for name in ("partition", "first", "next", "records", "block")]
            sound = all(isinstance(number, int) and number >= 0 for number in numbers) and each["block"] > 0
            total = Digest()
            for _, count, digits in each["blocks"]:
                total += Digest.of(count, digits)
            if not sound or total != Digest.of(each["records"], each["digest"]) or not each["topic"]:
                raise ValueError(f"the blocks of partition {each['partition']} do not add up")
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidError(f"the certificate is malformed: {error}") from None


def _release() -> str:
    try:
        return version("tidegate")
    except PackageNotFoundError:
        return "unknown"


# -- checking ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Changed:
    """Offsets from `first` up to `next` whose records differ from the certificate."""

    partition: int
    first: int
    next: int
    certified: int
    found: int
    reason: str


@dataclass(slots=True)
class Checked:
    """The result of a check; counts are records of the certificate."""

    topic: str
    records: int = 0
    proven: int = 0
    aged_out: int = 0
    changed: list[Changed] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """`proven`, `changed`, `partly aged out` or `aged out`."""
        if self.changed:
            return "changed"
        if not self.aged_out:
            return "proven"
        return "partly aged out" if self.proven else "aged out"

    def as_dict(self) -> dict[str, Any]:
        return {
            "topic": self.topic,
            "verdict": self.verdict,
            "records": self.records,
            "proven": self.proven,
            "aged_out": self.aged_out,
            "changed": [{name: getattr(each, name) for name in Changed.__slots__} for each in self.changed],
        }


def check_certificate(
    document: Mapping[str, Any],
    url: str,
    *,
    client: Mapping[str, str] | None = None,
    runner: Runner | None = None,
) -> list[Checked]:
    """Read the log at `url` and compare it with the certificate; returns one result per topic."""
    topics: dict[str, list[Mapping[str, Any]]] = {}
    for each in document["ranges"]:
        topics.setdefault(each["topic"], []).append(each)
    return [
        _check_topic(TopicAt(url, topic, client or {}), ranges, runner) for topic, ranges in topics.items()
    ]


def _check_topic(source: TopicAt, ranges: Iterable[Mapping[str, Any]], runner: Runner | None) -> Checked:
    checked = Checked(source.topic)
    present, compacts = source.extents(), source.compacts()
    hint = f"; the topic is compacted ({compacts}), which removes records" if compacts else ""
    for each in ranges:
        partition, block = int(each["partition"]), int(each["block"])
        checked.records += each["records"]
        if partition not in present:
            gone = Changed(
                partition, each["first"], each["next"], each["records"], 0, "the partition is gone"
            )
            checked.changed.append(gone)
            continue
        start, end = present[partition]
        extent = max(each["first"], start), max(min(each["next"], end), max(each["first"], start))
        found = digest_topic(source, {partition: extent}, block, runner)[partition].blocks
        certified = {at: Digest.of(count, digits) for at, count, digits in each["blocks"]}
        for at in sorted(certified.keys() | found.keys()):
            first, following = max(at * block, each["first"]), min((at + 1) * block, each["next"])
            expected, there = certified.get(at, Digest()), found.get(at, Digest())
            if first < start:  # its head, or all of it, is gone (C2)
                checked.aged_out += expected.records
            elif expected == there:
                checked.proven += expected.records
            else:
                reason = _difference(expected, there, following > end, end) + hint
                checked.changed.append(
                    Changed(partition, first, following, expected.records, there.records, reason)
                )
    return checked


def _difference(expected: Digest, found: Digest, is_cut: bool, end: int) -> str:
    if is_cut:
        return f"the log ends at {end} now"
    if found.records < expected.records:
        return f"{expected.records - found.records} records are missing"
    if found.records > expected.records:
        return f"{found.records - expected.records} records were added"
    return "records were changed"


# -- certificates of topics ------------------------------------------------------------------------


def certify_topic(
    url: str,
    topic: str,
    *,
    now_ms: int,
    client: Mapping[str, str] | None = None,
    runner: Runner | None = None,
    base: str | None = None,
    key: bytes | None = None,
) -> dict[str, Any]:
    """Audit a topic and return the certificate of all records that can be read now."""
    source = TopicAt(url, topic, client or {})
    if is_kafka(url):
        full = audit_broker(url, topic, client=client, now_ms=now_ms, runner=runner)
    else:
        full = audit(topic, log=Path(folder_path(url)), now_ms=now_ms, runner=runner)
    ranges = range_members(source, source.extents(), runner=runner)
    native = [
        {
            "kind": kind,
            "partition": partition.target.place.partition,
            "count": sum(count for (name, _), count in partition.findings.counts.items() if name == kind),
        }
        for partition in full.native.partitions
        for kind in sorted({name for name, _ in partition.findings.counts})
    ]
    metadata = full.metadata or AuditReport()
    subject = {"kind": "topic", "topic": topic, "evidence": f"{full.native.evidence}; {metadata.evidence}"}
    return make_certificate(
        subject,
        ranges,
        made_ms=now_ms,
        tolerated=tolerated_of(metadata),
        faults=[*native, *faults_of(metadata)],
        base=base,
        key=key,
    )


def tolerated_of(metadata: AuditReport) -> list[dict[str, Any]]:
    """The tolerated gaps, with the reason."""
    return [
        {"topic": each.topic, "partition": each.partition, **gaps.as_dict()}
        for each in metadata.partitions
        for gaps in each.expected
    ]


def faults_of(metadata: AuditReport) -> list[dict[str, Any]]:
    """The faults, by partition and producer."""
    return [
        {
            "kind": verdict.label,
            "partition": each.partition,
            "producer": name,
            "count": tally.verdicts[verdict],
            "first_offsets": tally.first.get(verdict, []),
        }
        for each in metadata.partitions
        for name, tally in each.producers.items()
        for verdict in sorted(FATAL)
        if tally.verdicts[verdict]
    ]
