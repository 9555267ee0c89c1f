"""Which partitions an audit looks at, and what is known of each before its first byte is read.

Owns turning a path or a topic name into partition folders, and the question whether compaction may have
removed records (gaps are then no loss). Reads small files only, writes nothing, takes no lock.

Compaction is known from, in this order: the topic's settings in our catalog; the broker's
`cleaner-offset-checkpoint` (a broker lists every partition it has cleaned). Where neither exists it is
unknown, until the log itself shows it: a batch with fewer records than offsets, or a delete horizon.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from tidegate.errors import CorruptError, InvalidError
from tidegate.files import Files
from tidegate.log.access.watermark import WATERMARK_NAME, Watermark, is_certain, newest, read_slots
from tidegate.log.partitions.checkpoints import has_clean_shutdown, read_offsets
from tidegate.log.segments.file_names import LOG, offsets_of
from tidegate.log.topics.catalog import LogFolder
from tidegate.log.topics.topics import (
    TopicDescription,
    TopicPartition,
    parse_folder_name,
    partition_folder_name,
)
from tidegate.log.verify.findings import Findings, Severity


class Compaction(Enum):
    """Whether records may have been removed between others."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class PartitionTarget:
    """One partition folder and what its surroundings say about it."""

    folder: Path
    place: TopicPartition
    compaction: Compaction
    compaction_because: str
    log_start: int
    acknowledged: int
    """Offsets below it were acknowledged, so they must be readable (0: not known)."""


_CHECKPOINTS = {
    "high watermark": "replication-offset-checkpoint",
    "recovery point": "recovery-point-offset-checkpoint",
    "log start": "log-start-offset-checkpoint",
    "cleaner": "cleaner-offset-checkpoint",
}


def find_partitions(where: str, log: Path, findings: Findings, *, files: Files) -> list[PartitionTarget]:
    """The partitions of a folder (a log or one partition), or of a topic of the log at `log`."""
    path = Path(where)
    found = files.stat(path)
    if found is not None and found.is_folder:
        if parse_folder_name(path.resolve().name) is not None and _has_log_files(path, files):
            return [_Surroundings(path.resolve().parent, findings, files).target(path)]
        return _whole_log(path, findings, files)
    if "/" in where:
        raise InvalidError(f"{where} is not a folder; name a partition folder, a log folder or a topic")
    description = LogFolder(files, log).describe(where)
    surroundings = _Surroundings(log, findings, files)
    return [
        surroundings.target(log / partition_folder_name(where, number))
        for number in description.partition_numbers
    ]


def _whole_log(path: Path, findings: Findings, files: Files) -> list[PartitionTarget]:
    surroundings = _Surroundings(path, findings, files)
    folders = [path / name for name in files.list(path) if parse_folder_name(name) is not None]
    targets = [surroundings.target(folder) for folder in folders if _has_log_files(folder, files)]
    if targets:
        return targets
    if _has_log_files(path, files):  # a partition folder under a name of its own, such as a backup
        return [surroundings.target(path)]
    raise InvalidError(
        f"{path} holds no partition folders (topic-0, topic-1, …) and no .log files; "
        f"name a partition folder, a log folder or a topic"
    )


def _has_log_files(folder: Path, files: Files) -> bool:
    found = files.stat(folder)
    if found is None or not found.is_folder:
        return False
    return bool(offsets_of(files.list(folder), LOG))


class _Surroundings:
    """What lies around partition folders: the catalog and the broker's checkpoints, each read once."""

    def __init__(self, log: Path, findings: Findings, files: Files) -> None:
        self._log = log
        self._files = files
        self._findings = findings
        self._offsets = {kind: self._read_offsets(log / name) for kind, name in _CHECKPOINTS.items()}
        self._descriptions = self._read_catalog()
        self._clean = has_clean_shutdown(log, files=files)

    def target(self, folder: Path) -> PartitionTarget:
        name = folder.resolve().name
        place = parse_folder_name(name) or TopicPartition(name, 0)
        mark = self._watermark(folder)
        compaction, because = self._compaction(place)
        log_start = self._known("log start", place)
        acknowledged = self._known("high watermark", place)
        if self._clean:
            acknowledged = max(acknowledged, self._known("recovery point", place))
        if mark is not None:
            log_start = max(log_start, mark.log_start)
            acknowledged = max(acknowledged, mark.high_watermark)
        return PartitionTarget(folder, place, compaction, because, log_start, acknowledged)

    def _watermark(self, folder: Path) -> Watermark | None:
        slots = read_slots(self._files, folder)
        if slots is not None and not is_certain(slots):
            slots = read_slots(self._files, folder)  # its writer may have been in the middle of one
        if slots is None:
            return None
        if not is_certain(slots):
            self._findings.add(
                "checkpoint",
                folder / WATERMARK_NAME,
                "it does not match its checksums, so how far the log was acknowledged is not known for sure; "
                "readers go to the last sound batch",
                "open the log for writing once: the file is written anew from the log",
                severity=Severity.WARNING,
            )
        return newest(slots)

    def _compaction(self, place: TopicPartition) -> tuple[Compaction, str]:
        description = self._descriptions.get(place.topic)
        if description is not None:
            policy = ",".join(sorted(description.config.cleanup_policy))
            answer = Compaction.YES if description.config.compacts else Compaction.NO
            return answer, f"the topic's cleanup.policy={policy}"
        if (place.topic, place.partition) in (self._offsets["cleaner"] or {}):
            return Compaction.YES, "the cleaner-offset-checkpoint lists it"
        if self._offsets["cleaner"] is not None:
            return Compaction.NO, "the cleaner-offset-checkpoint does not list it"
        return Compaction.UNKNOWN, "no settings and no cleaner-offset-checkpoint beside it"

    def _known(self, kind: str, place: TopicPartition) -> int:
        return (self._offsets[kind] or {}).get((place.topic, place.partition), 0)

    def _read_offsets(self, path: Path) -> dict[tuple[str, int], int] | None:
        """None when there is no such file, or it cannot be read (a finding)."""
        if not self._files.exists(path):
            return None
        try:
            return dict(read_offsets(path, files=self._files))
        except CorruptError as error:
            self._findings.add(
                "checkpoint",
                path,
                str(error),
                "a broker ignores it and starts from the beginning; remove it to do the same",
                severity=Severity.WARNING,
                position=error.position,
            )
            return None

    def _read_catalog(self) -> dict[str, TopicDescription]:
        folder = LogFolder(self._files, self._log)
        if not folder.is_ours():
            return {}
        try:
            return {description.name: description for description in folder.describe_all()}
        except CorruptError as error:
            self._findings.add(
                "checkpoint",
                folder.catalog_path,
                str(error),
                "restore it from a backup",
                severity=Severity.FAULT,
            )
            return {}
