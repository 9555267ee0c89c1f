"""Integrity: audits of topics in the background, bounded in time, with their results kept.

The first request starts an audit on a thread of its own; requests meanwhile see how far it is and what it found so far.
It ends after `MOST_SECONDS` at the latest, and then says what was not read. Its result is shown until the topic has
changed and `AGAIN_MS` have passed.

Thread rule: `Audits` from any thread; one audit at a time.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tidegate.durations import counted
from tidegate.errors import TidegateError
from tidegate.web.schemas import (
    CellShown,
    Copy,
    DamageShown,
    FaultShown,
    GapShown,
    IntegrityDocument,
    IntegrityQuestion,
    ProducerShown,
    cli,
    log_python,
)
from tidegate.web.site import Site, is_given_up

if TYPE_CHECKING:
    from tidegate.integrity.report import PartitionAudit

MOST_SECONDS: Final = 120.0
AGAIN_MS: Final = 30_000
KEPT: Final = 32
SHOWN_MS: Final = 100
LOOK_MS: Final = 100
"""How often one who waits for an audit looks whether anybody waits for the answer."""
MOST_FAULTS: Final = 200
MOST_PRODUCERS: Final = 100
MOST_CELLS: Final = 1000
FAULTS: Final = ("missing", "corrupt", "unregistered_producer", "after_end", "unsupported")


class _Enough(Exception):
    """The audit has run for as long as it may."""


@dataclass
class _Audit:
    topic: str
    ends: dict[int, tuple[int, int]]
    began_ms: int
    began: int
    state: str = "running"
    took_ms: int = 0
    read: int = 0
    why: str = ""
    parts: list[dict[str, Any]] = field(default_factory=list)
    told: list[Any] = field(default_factory=list)
    evidence: str = ""
    done: threading.Event = field(default_factory=threading.Event)
    shown_at: int = 0


class Audits:
    """The audits of one site."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._guard = threading.Lock()
        self._turn = threading.Lock()
        self._known: OrderedDict[str, _Audit] = OrderedDict()

    def look(self, topic: str, question: IntegrityQuestion) -> _Audit:
        """The audit there is, or one that begins now."""
        ends = self._site.bounds(topic)
        clock = self._site.clock
        with self._guard:
            found = self._known.get(topic)
            stale = (
                found is not None
                and found.state != "running"
                and (question.again or (found.ends != ends and clock.now_ms() - found.began_ms > AGAIN_MS))
            )
            if found is None or stale:
                found = _Audit(topic, ends, clock.now_ms(), clock.monotonic_ms())
                self._known[topic] = found
                self._known.move_to_end(topic)
                while len(self._known) > KEPT:
                    self._known.popitem(last=False)
                threading.Thread(target=self._run, args=(found,), name="audit", daemon=True).start()
        until = clock.monotonic_ms() + question.wait_ms
        while not is_given_up() and (left := until - clock.monotonic_ms()) > 0:
            if found.done.wait(min(left, LOOK_MS) / 1000):
                break
        return found

    def known(self) -> list[_Audit]:
        """Those that were begun and are still kept."""
        with self._guard:
            return list(self._known.values())

    def _run(self, audit: _Audit) -> None:
        from tidegate.integrity.audit import audit_broker_partition
        from tidegate.integrity.partition_audit import audit_partition
        from tidegate.integrity.report import AuditReport, PartitionAudit

        site, report = self._site, AuditReport()
        try:
            with self._turn:
                for number in sorted(audit.ends):
                    part = PartitionAudit(audit.topic, number)
                    report.partitions.append(part)

                    def told(records: int, _faults: int) -> None:
                        audit.read += records
                        now = site.clock.monotonic_ms()
                        if now - audit.shown_at > SHOWN_MS:
                            audit.shown_at = now
                            _show(audit, report.partitions)
                        if now - audit.began > MOST_SECONDS * 1000:
                            raise _Enough

                    if (cluster := site.cluster) is not None:
                        audit_broker_partition(cluster, part, now_ms=audit.began_ms, progress=told)
                    else:
                        audit_partition(site.files, part, now_ms=audit.began_ms, progress=told)
                audit.state = "done"
        except _Enough:
            audit.state, audit.why = "cut", f"it was ended after {MOST_SECONDS:.0f} seconds"
        except TidegateError as error:
            audit.state, audit.why = "failed", str(error)
        except Exception as error:  # noqa: BLE001 - the edge of a thread; told as a state
            audit.state, audit.why = "failed", f"{type(error).__name__} in Tidegate itself"
        finally:
            _show(audit, report.partitions)
            audit.evidence = report.evidence if report.partitions else ""
            audit.took_ms = site.clock.monotonic_ms() - audit.began
            audit.done.set()


def _show(audit: _Audit, parts: list[PartitionAudit]) -> None:
    """What was found so far, as plain values; by the thread that fills them in."""
    audit.parts = [part.as_dict() for part in parts]
    audit.told = [finding for part in parts for finding in part.told][:MOST_FAULTS]


def integrity(site: Site, topic: str, question: IntegrityQuestion) -> IntegrityDocument:
    """The audit of a topic: begun, under way or done."""
    site.describe(topic)
    return _document(site, audits(site).look(topic, question))


def audits(site: Site) -> Audits:
    """The audits of a site."""
    found: Audits = site.kept("audits", lambda: Audits(site))
    return found


def known_audits(site: Site) -> list[IntegrityDocument]:
    """What is known of topics that were looked at; nothing is begun for it."""
    return [_document(site, each) for each in audits(site).known()]


def _document(site: Site, found: _Audit) -> IntegrityDocument:
    from tidegate.integrity.audit import NOT_SHOWN

    topic, parts = found.topic, found.parts
    producers, producers_total = _producers(parts)
    faults = _faults(found, parts)
    total = sum(high - low for low, high in found.ends.values())
    managed = sum(part["records_with_metadata"] for part in parts)
    judged = sum(part["records"] for part in parts)
    damage = [
        DamageShown(part["partition"], each["offset"], each["resumed_at"])
        for part in parts
        for each in part["skipped_damage"]
    ]
    count = sum(part["faults"] for part in parts) + len(damage)
    doubts = _doubts(parts)
    verdicts = Counter[str]()
    for part in parts:
        verdicts.update(part["verdicts"])
    return IntegrityDocument(
        topic=topic,
        state=found.state,
        sentence=_sentence(found, count, verdicts["duplicate"], total, managed, doubts),
        evidence=found.evidence,
        began_ms=found.began_ms,
        took_ms=found.took_ms or site.clock.monotonic_ms() - found.began,
        records=found.read,
        total=total,
        records_with_metadata=managed,
        metadata_share=managed / judged if judged else None,
        verdicts=dict(verdicts),
        partitions=sorted(found.ends),
        producers=producers,
        producers_total=producers_total,
        faults=faults,
        faults_total=count,
        open_chains=sum(part["open_chains"] for part in parts),
        open_chains_of={str(part["partition"]): part["open_chains"] for part in parts if part["open_chains"]},
        damage=damage,
        damaged_places=len(damage),
        gaps=[
            GapShown(part["partition"], gap["count"], gap["first_offsets"], gap["reason"])
            for part in parts
            for gap in part["expected_gaps"]
        ],
        compacted_below={
            str(part["partition"]): part["compacted_below"] for part in parts if part["compacted_below"] >= 0
        },
        doubts=doubts,
        notes=[*_notes(parts), *([NOT_SHOWN] if site.cluster else [])],
        by_hand=Copy(cli("tidegate verify", topic, log=site.log_path), _python(site, topic)),
    )


def _python(site: Site, topic: str) -> str:
    if isinstance(site.log_path, str):
        lines = (
            "import time", "", "from tidegate.integrity.audit import audit_broker", "",
            f"report = audit_broker({site.log_path!r}, {topic!r}, now_ms=time.time_ns() // 1_000_000)",
            "print(report.metadata.as_dict())",
        )  # fmt: skip
        return "\n".join(lines)
    shown = log_python(site.log_path, f"print(audit_topic(log, {topic!r}).as_dict())")
    return f"from tidegate.integrity import audit_topic\n{shown}"


def _doubts(parts: list[dict[str, Any]]) -> list[str]:
    """Where loss would not show although metadata was checked, and what was not read."""
    unread = [f"Partition {part['partition']}: {part['unread']}." for part in parts if part["unread"]]
    return unread + [
        f"In partition {part['partition']} {part['doubt']}."
        for part in parts
        if part["records_with_metadata"] and part["doubt"]
    ]


def _sentence(
    audit: _Audit, faults: int, duplicates: int, total: int, managed: int, doubts: list[str]
) -> str:
    told = counted(faults, "fault") + (f" and {counted(duplicates, 'duplicate')}" if duplicates else "")
    if audit.state == "running":
        return f"Checking: {audit.read:,} of {total:,} records so far, {told}."
    if audit.state == "failed":
        return f"The check ended early: {audit.why}."
    if audit.state == "cut":
        return f"Checked {audit.read:,} of {total:,} records ({audit.why}): {told}."
    if not faults and not duplicates:
        if audit.read and not managed:
            return f"All {audit.read:,} records were read, and none carries a number: loss would not show."
        found = "nothing is missing, changed or repeated"
        if doubts:
            found = "no fault was found, but some loss would not show"
        return f"All {audit.read:,} records were checked: {found}."
    return f"All {audit.read:,} records were checked: {told}."


def _producers(parts: list[dict[str, Any]]) -> tuple[list[ProducerShown], int]:
    """Those with the most faults, and how many there are."""
    cells: dict[str, list[CellShown]] = {}
    for part in parts:
        for tally in part["producers"]:
            first = tally["first_offsets"]
            at = min((first[name][0] for name in FAULTS if first.get(name)), default=None)
            duplicates = tally["verdicts"].get("duplicate", 0)
            cell = CellShown(part["partition"], tally["records"], tally["faults"], duplicates, at)
            cells.setdefault(tally["producer"], []).append(cell)
    found = [
        ProducerShown(
            name, sum(each.records for each in mine), sum(each.faults for each in mine),
            sum(each.duplicates for each in mine), mine,
        )
        for name, mine in cells.items()
    ]  # fmt: skip
    found.sort(key=lambda each: (-each.faults, -each.duplicates, -each.records, each.producer))
    return measured_first(found[:MOST_PRODUCERS]), len(found)


def measured_first(producers: list[ProducerShown]) -> list[ProducerShown]:
    """The first ones are measured, each with all its cells or not at all: their sum is what the producer's row says."""
    counts = accumulate(len(each.cells) for each in producers)
    return [
        msgspec.structs.replace(each, is_measured=count <= MOST_CELLS)
        for each, count in zip(producers, counts, strict=True)
    ]


def _faults(audit: _Audit, parts: list[dict[str, Any]]) -> list[FaultShown]:
    from tidegate.integrity.report import KIND_OF, REMEDY, remedy_of
    from tidegate.integrity.verdicts import Verdict

    restore = "restore the partition's files from a replica or a backup"
    found = [
        FaultShown(
            KIND_OF[Verdict.CORRUPT], part["partition"], damage["offset"], "", _damage_text(**damage), "", restore, True
        )
        for part in parts
        for damage in part["skipped_damage"]
    ]  # fmt: skip
    found += [
        FaultShown(
            KIND_OF[each.verdict], each.partition, each.offset, each.producer or "", _told(each), str(each),
            remedy_of(each), True, *_missing(each),
        )
        for each in audit.told
    ]  # fmt: skip
    again = "A record of a producer that stands here already, with the same number."
    found += [
        FaultShown("duplicate", part["partition"], offset, "", again, "", REMEDY[Verdict.DUPLICATE], False)
        for part in parts
        for offset in part["first_offsets"].get("duplicate", ())
    ]
    return sorted(found[:MOST_FAULTS], key=lambda each: (not each.is_fault, each.partition, each.offset))


def _damage_text(offset: int, resumed_at: int | None) -> str:
    end = "the end" if resumed_at is None else f"offset {resumed_at - 1}"
    return f"The log is damaged: no record from offset {offset} to {end} can be read."


def audit_faults(audit: _Audit) -> list[FaultShown]:
    """What an audit found, so far."""
    return _faults(audit, audit.parts)


def known_fault(site: Site, topic: str, partition: int, offset: int) -> FaultShown | None:
    """What the last audit of the topic said about a record, if there was one; none is begun for it."""
    found = [each for audit in audits(site).known() if audit.topic == topic for each in audit_faults(audit)]
    return next((each for each in found if (each.partition, each.offset) == (partition, offset)), None)


def _missing(finding: Any) -> tuple[int, int, int] | tuple[None, None, None]:
    """How many records are missing before this one, and the producer's numbers of the first and the last."""
    from tidegate.integrity.verdicts import Verdict

    stamp, before = finding.stamp, finding.previous_sequence
    if (
        finding.verdict is not Verdict.MISSING
        or stamp is None
        or before is None
        or stamp.sequence <= before + 1
    ):
        return None, None, None
    return stamp.sequence - before - 1, before + 1, stamp.sequence - 1


def _told(finding: Any) -> str:
    """The finding as one would say it."""
    from tidegate.integrity.verdicts import Verdict

    stamp = finding.stamp
    lost, first, last = _missing(finding)
    if lost is not None:
        numbers = f"number {first}" if lost == 1 else f"numbers {first} to {last}"
        are = "record of this producer is" if lost == 1 else "records of this producer are"
        return f"{lost} {are} missing before this one ({numbers})."
    if finding.verdict is Verdict.MISSING:
        return "Records of this producer are missing before this one."
    if finding.verdict is Verdict.CORRUPT and stamp is not None and stamp.is_end_of_chain:
        return "The producer's records do not sum up to what it certified when it ended its chain here."
    return {
        Verdict.CORRUPT: "This record is not what its producer sent.",
        Verdict.UNREGISTERED_PRODUCER: "The first records of this producer are missing.",
        Verdict.AFTER_END: "This record stands behind the end of its producer's chain.",
        Verdict.UNSUPPORTED: "What its producer said about this record cannot be read.",
    }.get(finding.verdict, "This record is not as its producer said.")


def _notes(parts: list[dict[str, Any]]) -> list[str]:
    notes = []
    for part in parts:
        place = f"{part['topic']}-{part['partition']}"
        if part["unread"]:
            notes.append(f"{place}: {part['unread']}")
        for each in part["skipped_damage"]:
            resumed = each["resumed_at"]
            went = "nothing behind it was read" if resumed is None else f"went on at {resumed}"
            notes.append(f"{place}: damaged at offset {each['offset']}; {went}")
    return notes
