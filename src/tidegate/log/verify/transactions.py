"""Do the transaction index and the producer snapshots say what the log says?

Owns following transactions and their markers through a partition, comparing each log segment's `.txnindex`
with the aborts found in it, and each `.snapshot` with the producers as they were at its offset.

A transaction that began before the log's first offset is known only by its marker, so its first offset is
not judged; neither are producers of a snapshot that the log does not hold (any more).
Memory: one number per open transaction, one entry per aborted one of a log segment.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from tidegate.errors import CorruptError
from tidegate.files import Files
from tidegate.log.format.batch import CONTROL_BIT, TRANSACTIONAL_BIT, ControlType, read_control
from tidegate.log.producers.producer_snapshot import read_snapshot
from tidegate.log.segments.transaction_index import AbortedTxn, TransactionIndex
from tidegate.log.verify.findings import Findings, Severity
from tidegate.log.verify.indexes import index_path
from tidegate.log.verify.tracks import ProducerTrack

if TYPE_CHECKING:
    from tidegate.log.verify.parsing import CheckedRun

_REBUILD: Final = "move it away; the log rebuilds it when it is opened for writing"


class Growing(NamedTuple):
    """The last log segment, which somebody may be writing to: how far it was walked, in offsets and in bytes."""

    log: Path
    walked_to: int
    walked_bytes: int


class TransactionCheck:
    """Feed it the runs of a partition; call `segment_ended` after each log segment."""

    def __init__(self, findings: Findings, *, files: Files) -> None:
        self._findings = findings
        self._files = files
        self._growing: Growing | None = None
        self._open: dict[int, int] = {}
        self._aborts: dict[int, tuple[int, int | None]] = {}  # marker offset → producer, first offset

    def run(self, run: CheckedRun, path: Path) -> None:
        table = run.table
        rows = np.flatnonzero(table.attributes & (TRANSACTIONAL_BIT | CONTROL_BIT))
        if not len(rows):
            return
        for position, size, base, producer, flags in zip(
            table.position[rows].tolist(),
            table.size[rows].tolist(),
            table.base_offset[rows].tolist(),
            table.producer_id[rows].tolist(),
            table.attributes[rows].tolist(),
            strict=True,
        ):
            if not flags & CONTROL_BIT:
                self._open.setdefault(producer, base)
            elif flags & TRANSACTIONAL_BIT:
                self._marker(run, position, size, base, producer, path)

    def segment_ended(
        self, folder: Path, base: int, log_start: int, *, compacted: bool, growing: Growing | None = None
    ) -> None:
        """Compare the log segment's transaction index with the aborts seen in it.

        Compaction drops aborted records first, so that the log may show a later beginning than the index. A broker
        may be writing to the last segment: it writes a marker and then its entry, so that behind the end of the walk
        the index may know more (`growing`), and of the very last marker less.
        """
        aborts, self._aborts = self._aborts, {}
        self._growing = growing
        path = index_path(folder, base, ".txnindex", self._files)
        index = TransactionIndex(path, base, files=self._files, read_only=True)
        if not index.exists:
            for offset, (producer, first) in aborts.items():
                if first is not None:
                    self._unlisted(path, offset, producer, first)
            return
        try:
            index.sanity_check()
            listed = list(index)
        except CorruptError as error:
            self._bad(path, str(error), error.position, base, None)
            return
        for number, entry in enumerate(listed):
            if growing is None or entry.last_offset < growing.walked_to or not self._has_grown(growing):
                self._compare(path, number, entry, aborts, log_start, compacted)
        known = {entry.last_offset for entry in listed}
        for offset, (producer, first) in aborts.items():
            if first is not None and offset not in known:
                self._unlisted(path, offset, producer, first)

    def finish(self, path: Path) -> None:
        for producer, first in self._open.items():
            self._findings.add(
                "open-transaction",
                path,
                f"the transaction that begins at offset {first} has no end; read-committed readers wait",
                "let its producer finish, or abort it",
                severity=Severity.NOTICE,
                offset=first,
                producer=str(producer),
            )

    def _marker(
        self, run: CheckedRun, position: int, size: int, offset: int, producer: int, path: Path
    ) -> None:
        try:
            marker = read_control(run.control(position, size))
        except CorruptError as error:
            self._findings.add(
                "corrupt",
                path,
                str(error),
                "no reader can know how the transaction ended",
                position=run.position + position,
                offset=offset,
            )
            return
        first = self._open.pop(producer, None)
        if marker.kind is ControlType.ABORT:
            self._aborts[offset] = (producer, first)

    def _compare(
        self,
        path: Path,
        number: int,
        entry: AbortedTxn,
        aborts: Mapping[int, tuple[int, int | None]],
        log_start: int,
        compacted: bool,
    ) -> None:
        found = aborts.get(entry.last_offset)
        position = number * 34
        if found is None or found[0] != entry.producer_id:
            self._bad(
                path,
                f"entry {number} speaks of an abort of producer {entry.producer_id} at offset "
                f"{entry.last_offset}, where the log has none",
                position,
                entry.last_offset,
                entry.producer_id,
            )
            return
        first = found[1]
        if first is None or entry.first_offset < log_start:
            return
        if entry.first_offset > first or (entry.first_offset < first and not compacted):
            self._bad(
                path,
                f"entry {number} says the aborted transaction began at {entry.first_offset}, the log says "
                f"{first}",
                position,
                entry.last_offset,
                entry.producer_id,
            )

    def _has_grown(self, growing: Growing) -> bool:
        found = self._files.stat(growing.log)
        return found is not None and found.size > growing.walked_bytes

    def _unlisted(self, path: Path, offset: int, producer: int, first: int) -> None:
        growing = self._growing
        is_last_batch = growing is not None and offset == growing.walked_to - 1
        self._bad(
            path,
            f"the transaction {first} to {offset} was aborted but is not listed: readers would see it"
            + (", unless its entry is just being written" if is_last_batch else ""),
            None,
            offset,
            producer,
            Severity.WARNING if is_last_batch else Severity.FAULT,
        )

    def _bad(
        self,
        path: Path,
        what: str,
        position: int | None,
        offset: int,
        producer: int | None,
        severity: Severity = Severity.FAULT,
    ) -> None:
        self._findings.add(
            "index",
            path,
            what,
            _REBUILD,
            severity=severity,
            position=position,
            offset=offset,
            producer=None if producer is None else str(producer),
        )


def check_snapshot(
    path: Path,
    offset: int,
    tracks: Mapping[int, ProducerTrack],
    findings: Findings,
    *,
    thinned: bool,
    files: Files,
) -> None:
    """Compare a producer snapshot with the producers as the log shows them just before `offset`.

    `thinned`: batches are known to be gone from the log, so that the snapshot may know more than it.
    """
    remedy = "move it away; the state is rebuilt from the log when it is opened for writing"
    try:
        entries = read_snapshot(path, files=files)
    except CorruptError as error:
        findings.add("snapshot", path, str(error), remedy, position=error.position, offset=offset)
        return
    for entry in entries:
        name = f"{entry.producer_id}/{entry.epoch}"
        if entry.last_offset >= offset:
            findings.add(
                "snapshot",
                path,
                f"its last offset {entry.last_offset} is not before the snapshot's own, {offset}",
                remedy,
                offset=entry.last_offset,
                producer=name,
            )
            continue
        track = tracks.get(entry.producer_id)
        if track is None or not track.recent or not entry.batches or track.epoch != entry.epoch:
            continue
        if thinned and entry.last_offset > track.last_offset:
            continue
        if (entry.last_offset, entry.last_sequence) != (track.last_offset, track.recent[-1].last):
            findings.add(
                "snapshot",
                path,
                f"it has number {entry.last_sequence} at offset {entry.last_offset} as the producer's last, "
                f"the log has {track.recent[-1].last} at {track.last_offset}",
                remedy,
                offset=track.last_offset,
                producer=name,
            )
